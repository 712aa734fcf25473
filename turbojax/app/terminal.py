"""What commands show: one line about an error, tables, bars of progress."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turbojax import _extras

if TYPE_CHECKING:
    from rich.console import RenderableType

# Columns: wider than any table.
_WIDEST = 10_000


@contextlib.contextmanager
def one_line_errors(
    command: str, smaller: str | None = None, *, extra: str | None = None
) -> Iterator[None]:
    """Turns errors that a user can do something about into one line on standard error, exit code 2.

    `command` is what failed, as ``"turbojax generate"``; `smaller` what to make smaller if memory
    runs out; `extra` the extra of this package that brings what the command imports.
    """
    import jax

    try:
        yield
    except (OSError, ValueError, NotImplementedError, ImportError, FloatingPointError) as error:
        missing = extra is not None and isinstance(error, ModuleNotFoundError)
        how = f": {_extras.install(str(extra))}" if missing else ""
        typer.echo(f"{command}: {' '.join(str(error).split())}{how}", err=True)
        raise typer.Exit(2) from error
    except jax.errors.JaxRuntimeError as error:
        if smaller is None or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        typer.echo(f"{command}: out of memory: try a smaller {smaller}", err=True)
        raise typer.Exit(2) from error


def show(table: "RenderableType") -> None:
    """Prints a table; to a pipe or a file at its full width, so that nothing is cut or folded."""
    console = Console()
    if not console.is_terminal:
        # `Measurement.get` gives at most the console's width.
        widest = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
        console.width = max(console.width, widest)
    console.print(table)


def report(
    found: Any, render: Callable[[Any], "RenderableType"], as_json: bool, last: str | None = None
) -> None:
    """Prints a report: as JSON, or as `render` shows it with a `last` line, if there is one."""
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    show(render(found))
    if last is not None:
        typer.echo(last)


def progress_bar(*, transient: bool = False) -> Progress:
    """A bar on standard error, so that standard output stays clean."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=transient,
    )


class Bars:
    """A bar for each phase of a run, on standard error."""

    def __init__(self) -> None:
        self._progress = progress_bar()
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *exception: object) -> None:
        # Without a task, `stop` would print an empty line.
        if self._tasks:
            self._progress.stop()

    def advance(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done."""
        self._progress.start()  # what runs already goes on
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
