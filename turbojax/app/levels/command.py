"""The command `turbojax levels`: its options, and what it prints."""

from pathlib import Path
from typing import Annotated

import typer

from turbojax.app import options, programs, terminal

File = Annotated[
    Path | None,
    typer.Option(help="Text to read. Default: as for `demo`."),
]
Head = Annotated[
    str | None,
    typer.Option(help="Heads, comma separated. Default: all."),
]
PolicyNames = Annotated[
    str,
    typer.Option(
        help="Policies, comma separated: topk, threshold (up to 0.8 of the attention, not the "
        "0.97 of `turbojax train`), threshold95 (up to 0.95), "
        "topk+similarity, threshold+similarity, window, strided."
    ),
]


def levels(
    file: File = None,
    layer: Annotated[int, typer.Option(help="Whose queries and keys, from 0 on.")] = 4,
    head: Head = None,
    policy: PolicyNames = "topk,topk+similarity,threshold95,window",
    tokens: Annotated[int, typer.Option(help="Length of the text in tokens.")] = 4096,
    block: Annotated[int, typer.Option(help="Queries, and keys, of a block.")] = 32,
    model: options.ByteModel = "embedded",
    plot: Annotated[Path | None, typer.Option(help="Draw the levels to this file.")] = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Show which blocks pooled attention reads, and how coarsely, for a real model and text.

    Each policy chooses levels from the queries and keys of one layer: density (work, relative to
    dense attention) and error of the layer's attention with these levels.
    """
    import jax.numpy as jnp

    from turbojax import models
    from turbojax.app import startup
    from turbojax.app.demo.measure import default_file
    from turbojax.app.levels import measure

    programs.use(compilation_cache, "turbojax levels")
    with terminal.one_line_errors("turbojax levels", smaller="--tokens"):
        startup.check_plot(plot)
        settings = measure.MapSettings(
            file=file or default_file(tokens - 1),
            layer=layer,
            heads=None if head is None else tuple(map(int, options.words(head))),
            policies=options.words(policy),
            tokens=tokens,
            block=block,
        )
        startup.check_input_files(settings.file)
        report = measure.run(models.load_transformer(model, dtype=jnp.float32), settings)
        if plot is not None:
            measure.save_plot(report, plot)
    drawn = None if plot is None else f"plot written to {plot}"
    terminal.report(report, measure.render, as_json, drawn)
