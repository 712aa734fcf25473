"""Where results and the progress of `turbojax serve` go."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from turbojax.app.serve.results import ResultFile


class Screen(contextlib.ExitStack):
    """Both, and each whole, if they go to one terminal.

    `kept` of the `total` requests have a result already; `results` is None for standard output.
    """

    def __init__(self, total: int, kept: int, results: "ResultFile | None") -> None:
        super().__init__()
        self._total, self._done, self._written = total, kept, kept
        self._results, self._tokens = results, 0
        # A terminal shows results above the bar; a file or pipe gets the results alone.
        self._shared = results is None and sys.stdout.isatty()
        columns: Any = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]:,} tokens"),
            TimeElapsedColumn(),
        )
        console = Console() if self._shared else Console(stderr=True)
        # If always on, rich would redirect standard output to the terminal of the bar.
        self._bar = Progress(
            *columns, console=console, transient=True, redirect_stdout=self._shared
        )
        self._task = self._bar.add_task("compiling", total=total, completed=kept, tokens=0)

    def begin(self) -> None:
        """Shows the bar; from here on results are written."""
        if self._results is not None:
            self._results.begin()
        if self._bar.console.is_terminal:
            self.enter_context(self._bar)
        else:
            typer.echo("compiling", err=True)

    def advance(self, new_tokens: int, done: int) -> None:
        """Counts results and tokens; the caller has run a step, so programs are compiled by now."""
        self._tokens += new_tokens
        self._done += done
        self._bar.update(
            self._task, description="requests", completed=self._done, tokens=self._tokens
        )

    def write(self, line: str) -> None:
        """Adds a result. Each is written at once, so that a long run can be followed."""
        if self._results is not None:
            self._results.write(line)
        elif self._shared:
            self._bar.console.out(line, highlight=False)
        else:
            typer.echo(line)
        self._written += 1

    def note(self) -> str:
        """What was written, and how to go on: for whoever ends the command."""
        if self._results is None:
            return f"{self._written} results are on standard output"
        left = f"{self._total - self._written} are left"
        return (
            f"{self._written} results are in {self._results.path}, {left}: "
            "the same command with --resume goes on"
        )
