"""The `turbojax` command: its name, its version, and its subcommands, each from a file of its own.

Imported at every start, before Ctrl-C is looked after: so what needs models, or takes long to
import, is imported by the subcommand that runs.
"""

import json
from typing import Annotated, Any, NoReturn

from turbojax import _extras

try:
    import platformdirs as platformdirs
    import rich as rich
    import typer
    from typer.core import TyperGroup
except ImportError as error:
    raise _extras.MissingError(
        f"the turbojax command needs {error.name}: {_extras.install('command')}"
    ) from error

import turbojax
from turbojax import _interrupt
from turbojax.app import options
from turbojax.app.calibrate.command import calibrate
from turbojax.app.demo.command import demo
from turbojax.app.evaluate.command import evaluate
from turbojax.app.generate.command import generate
from turbojax.app.levels.command import levels
from turbojax.app.quantize.command import quantize
from turbojax.app.serve.command import serve
from turbojax.app.train import compare, lora, train


def doctor(as_json: options.AsJson = False) -> None:
    """Say which devices and implementations can be used here, and why the others cannot."""
    from turbojax.app.doctor import examine

    report = examine()
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())


# In the order in which `turbojax --help` lists them.
_SUBCOMMANDS = (
    *(demo, levels, doctor, generate, serve, evaluate, calibrate, train, compare, quantize, lora),
)


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


for _subcommand in _SUBCOMMANDS:
    # Commands have their functions' names, except `eval`, which is a builtin of Python.
    app.command("eval" if _subcommand is evaluate else None)(_subcommand)


def main() -> NoReturn:
    """Runs the `turbojax` command and exits with its code; see `turbojax.__main__`."""
    _interrupt.run(app)
