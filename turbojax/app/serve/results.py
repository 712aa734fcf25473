"""The results of `turbojax serve`, and its progress: where both go.

Results go to a file to which each is added as it comes, and which can go on.

A result is one line of JSON. A process that is ended while it writes leaves the last line without
its end; whoever goes on drops that line.
"""

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turbojax import _locks
from turbojax.app.serve.requests import TextRequest

_KEYS = {"id", "request", "finish_reason"}
_LONGEST_LINE = 32 * 2**20  # bytes; a result is its text and some numbers
_ATTEMPTS = 20  # to open a file that other processes remove meanwhile


class ResultFile:
    """An open file of results.

    `file` is open to append, and `size` is bytes of what is kept. `held` has by id the `request`
    that each result in the file says it is of.
    """

    def __init__(self, path: Path, file: io.RawIOBase, held: Mapping[str | int, str], size: int):
        self.held = held
        self.begun = False
        self.path, self._file, self._size = path, file, size

    def begin(self) -> None:
        """Drops what is not kept: called before the first result, after all checks."""
        self.begun = True
        if self.path.is_file():
            self._file.truncate(self._size)

    def write(self, line: str) -> None:
        """Adds a line, which stays even if the process ends right after; OSError names the path."""
        try:
            rest = line.encode() + b"\n"
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


@contextlib.contextmanager
def open_results(path: Path, *, resume: bool, overwrite: bool) -> Iterator[ResultFile]:
    """Opens a file for results, for this process alone; it need not exist.

    Nothing in the file is changed before `ResultFile.begin`.
    """
    with _opened(path) as (file, made):
        size = path.stat().st_size if path.is_file() else 0
        if size and not (resume or overwrite):
            raise ValueError(
                f"--out {path} holds results already: --resume keeps them and goes on, "
                "--overwrite drops them"
            )
        held, kept = _read(path) if size and resume else ({}, 0)
        results = ResultFile(path, file, held, kept)
        try:
            yield results
        finally:
            if made and not results.begun and _is_at(path, file) and not path.stat().st_size:
                path.unlink(missing_ok=True)


def unfinished(
    requests: Iterable[TextRequest],
    held: Mapping[str | int, str],
    digests: Mapping[str | int, str],
) -> tuple[TextRequest, ...]:
    """The requests that have no result yet.

    `held` as in `ResultFile`; `digests` is what the result of each request says as its `request`.
    """
    left = []
    for found in requests:
        if found.id not in held:
            left.append(found)
        elif held[found.id] != digests[found.id]:
            raise ValueError(
                f"line {found.line}: --out holds a result with its id {found.id!r} of another "
                "request or model: --resume needs the requests, the model, --max-new-tokens, "
                "--max-length, --dtype, --kv-dtype and --uncompressed-layers of the results in "
                "--out, and of a model with LongRoPE a longest request that takes the same factors"
            )
    return tuple(left)


def _read(path: Path) -> tuple[dict[str | int, str], int]:
    """The results in a file (see `ResultFile.held`), and the bytes of its whole lines."""
    held, size = dict[str | int, str](), 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                break
            result = _result(path, number, line)
            # An aborted request runs again; of two results with one id the later one counts.
            if result["finish_reason"] != "aborted":
                held[result["id"]] = result["request"]
            size += len(line)
    return held, size


def _result(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        result = None
    fits = isinstance(result, dict) and result.keys() >= _KEYS and line.endswith(b"\n")
    if not fits or isinstance(result["id"], bool) or not isinstance(result["id"], str | int):
        raise ValueError(
            f"--out {path}, line {number}: is no result of turbojax serve, so --resume cannot go on"
        )
    return dict(result)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[io.RawIOBase, bool]]:
    """Opens a file to append to, for this process alone; also says whether there was none."""
    for _ in range(_ATTEMPTS):
        made = not path.exists()
        # Without a buffer, so that a line that found no room is not written again at the end.
        with path.open("ab", buffering=0) as file:
            _lock(path, file)
            # Another process may have removed its file between our opening and locking it.
            if _is_at(path, file):
                yield file, made
                return
    raise ValueError(f"--out {path}: other processes make and remove it")


def _lock(path: Path, file: io.RawIOBase) -> None:
    """Locks a file until it is closed, where there are locks; ValueError if another holds it."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return
    try:
        _locks.lock(file)
    except BlockingIOError as error:
        raise ValueError(f"--out {path}: another process writes to it") from error


def _is_at(path: Path, file: io.RawIOBase) -> bool:
    """Whether an open file is the one that its path leads to."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_standard_input(path: Path) -> bool:
    """Whether a file is what standard input reads."""
    try:
        return os.path.samestat(os.fstat(sys.stdin.fileno()), path.stat())
    except (OSError, ValueError):  # there is no such file, or no such input
        return False


class Screen(contextlib.ExitStack):
    """Both, and each whole, if they go to one terminal.

    `kept` of the `total` requests have a result already; `results` is None for standard output.
    """

    def __init__(self, total: int, kept: int, results: ResultFile | None) -> None:
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
