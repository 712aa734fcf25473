"""The command `turbojax compare`: two runs of `turbojax train`, side by side."""

import json
from pathlib import Path
from typing import Annotated

import typer

from turbojax.app import terminal


def compare(
    first: Annotated[Path, typer.Argument(help="Folder or log of a run, usually dense.")],
    second: Annotated[Path, typer.Argument(help="The same settings, pooled.")],
    smoothing: Annotated[int, typer.Option(help="Steps over which losses are averaged.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw both losses to this file.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write figures and both logs to this JSON file.")
    ] = None,
) -> None:
    """Compare two runs of `turbojax train`: their losses at the same step, and the time saved."""
    from turbojax.app import startup

    with terminal.one_line_errors("turbojax compare", extra="train"):
        from turbojax import _writing, finetune

        startup.check_plot(plot)
        startup.check_output_file("--write", write)
        logs = [finetune.read_log(path) for path in (first, second)]
        result = finetune.compare(*logs, width=smoothing)
        if write is not None:
            _writing.write_text(write, json.dumps(result) + "\n")
        if plot is not None:
            finetune.save_plot(logs, plot, width=smoothing)
    typer.echo(finetune.summary(result))
