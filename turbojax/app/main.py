"""The `turbojax` command."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

from turbojax import _extras

try:
    import platformdirs as platformdirs
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from typer.core import TyperGroup
except ImportError as error:
    raise SystemExit(
        f"the turbojax command needs {error.name}: {_extras.install('command')}"
    ) from error

import turbojax
from turbojax import _interrupt
from turbojax.app import options as cli_options
from turbojax.app import programs as cli_programs
from turbojax.app import train as cli_train
from turbojax.app.generate import command as cli_generate
from turbojax.app.quantize import command as cli_quantize
from turbojax.app.serve import command as cli_serve


class _Commands(TyperGroup):
    """The commands, each of which an interruption ends with one line."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _interrupt.tell()
            raise typer.Exit(_interrupt.exit_code()) from None


app = typer.Typer(
    cls=_Commands,
    help="Quantized, compressed and sparse attention for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"turbojax {turbojax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    _interrupt.begin(f"turbojax {context.invoked_subcommand}")


@app.command()
def demo(
    file: Annotated[
        Path | None,
        typer.Option(
            help="Text to read. Default: a module of this Python's standard library that the "
            "model was not trained on.",
            show_default=False,
        ),
    ] = None,
    prompt_bytes: Annotated[int, typer.Option(help="Bytes to prefill.")] = 3072,
    new_bytes: Annotated[int, typer.Option(help="Bytes to decode one by one and score.")] = 256,
    generate_bytes: Annotated[int, typer.Option(help="Bytes to generate freely.")] = 96,
    cache: Annotated[
        str,
        typer.Option(
            help="Caches, comma separated: exact, 4bit, 2/4bit, 3bit, 2bit, kv4, paged, fp8_e4m3, "
            "fp8_e5m2, turbo4, paged_k8v4, turbo_k4v2 and so on."
        ),
    ] = "exact,4bit,2/4bit",
    model: Annotated[
        str, typer.Option(help="'embedded', or a folder with a byte-level Llama checkpoint.")
    ] = "embedded",
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    compilation_cache: cli_programs.CompilationCache = True,
) -> None:
    """Read a file with a small language model through several KV caches, side by side.

    The model prefills the beginning of the file, then decodes on through each cache, fed the true
    bytes: bits per byte, how often the greedy prediction equals that of the first cache, memory
    and speed. Then it continues the text by itself.
    """
    import jax.numpy as jnp

    from turbojax import models
    from turbojax.app import startup
    from turbojax.app.demo import DemoSettings, default_file, display, run

    cli_programs.use(compilation_cache, "turbojax demo")
    try:
        startup.check_plot(plot)
        settings = DemoSettings(
            file=file or default_file(prompt_bytes + new_bytes),
            prompt_bytes=prompt_bytes,
            new_bytes=new_bytes,
            generated_bytes=generate_bytes,
            caches=tuple(name.strip() for name in cache.split(",")),
        )
        startup.check_input_files(settings.file)
        # float32 is the fast dtype of CPUs; the caches are what is being compared.
        llama = models.load_transformer(model, dtype=jnp.float32)
        steps = len(settings.caches) * (settings.new_bytes + settings.generated_bytes)
        with _progress_bar() as bar:
            task = bar.add_task("starting", total=steps)

            def advance(name: str, count: int) -> None:
                bar.update(task, advance=count, description=f"{name} cache")

            report = run(llama, settings, advance)
        if plot is not None:
            display.save_plot(report, llama, plot)
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        typer.echo(f"turbojax demo: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        cli_options.show(display.render(report))
        if plot is not None:
            typer.echo(f"plot written to {plot}")


@app.command()
def levels(
    file: Annotated[
        Path | None,
        typer.Option(help="Text to read. Default: as for `demo`.", show_default=False),
    ] = None,
    layer: Annotated[int, typer.Option(help="Whose queries and keys, from 0 on.")] = 4,
    head: Annotated[
        str | None,
        typer.Option(help="Heads, comma separated. Default: all.", show_default=False),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Policies, comma separated: topk, threshold (up to 0.8 of the attention, not the "
            "0.97 of `turbojax train`), threshold95 (up to 0.95), "
            "topk+similarity, threshold+similarity, window, strided."
        ),
    ] = "topk,topk+similarity,threshold95,window",
    tokens: Annotated[int, typer.Option(help="Length of the text in tokens.")] = 4096,
    block: Annotated[int, typer.Option(help="Queries, and keys, of a block.")] = 32,
    model: Annotated[
        str, typer.Option(help="'embedded', or a folder with a byte-level Llama checkpoint.")
    ] = "embedded",
    plot: Annotated[Path | None, typer.Option(help="Draw the levels to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    compilation_cache: cli_programs.CompilationCache = True,
) -> None:
    """Show which blocks pooled attention reads, and how coarsely, for a real model and text.

    Each policy chooses levels from the queries and keys of one layer: density (work, relative to
    dense attention) and error of the layer's attention with these levels.
    """
    import jax.numpy as jnp

    from turbojax import models
    from turbojax.app import levels as levels_map
    from turbojax.app import startup
    from turbojax.app.demo import default_file

    cli_programs.use(compilation_cache, "turbojax levels")
    try:
        startup.check_plot(plot)
        settings = levels_map.MapSettings(
            file=file or default_file(tokens - 1),
            layer=layer,
            heads=None if head is None else tuple(int(number) for number in head.split(",")),
            policies=tuple(name.strip() for name in policy.split(",")),
            tokens=tokens,
            block=block,
        )
        startup.check_input_files(settings.file)
        report = levels_map.run(models.load_transformer(model, dtype=jnp.float32), settings)
        if plot is not None:
            levels_map.save_plot(report, plot)
    except (OSError, ValueError, NotImplementedError, ImportError) as error:
        typer.echo(f"turbojax levels: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        cli_options.show(levels_map.render(report))
        if plot is not None:
            typer.echo(f"plot written to {plot}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say which devices and implementations can be used here, and why the others cannot."""
    from turbojax.app import doctor as examination

    report = examination.examine()
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())


app.command()(cli_generate.generate)
app.command()(cli_serve.serve)
app.command()(cli_train.train)
app.command()(cli_train.compare)
app.command()(cli_quantize.quantize)


def _progress_bar() -> Progress:
    """A bar on standard error, so that standard output stays clean for `--json`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def main() -> NoReturn:
    """Entry point of the `turbojax` command."""
    _interrupt.run(app)
