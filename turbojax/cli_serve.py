"""What `turbojax generate --requests` prints, and which options it takes."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_OF_REQUESTS = (
    "requests",
    "out",
    "kv_dtype",
    "page_size",
    "num_pages",
    "pool_bytes",
    "max_sequences",
    "prefill_chunk",
    "cache_results",
)
_OF_BOTH = ("model", "random_weights", "weights", "dtype", "max_new_tokens", "implementation")


def check_options(context: typer.Context) -> None:
    """Raises ValueError where an option is given that means nothing with, or without, `--requests`.

    Args:
      context: of the command `generate`.
    """
    given = [name for name in context.params if _is_given(context, name)]
    if "requests" in given:
        wrong = [name for name in given if name not in (*_OF_REQUESTS, *_OF_BOTH, "as_json")]
        message = "has no use with --requests"
    else:
        wrong = [name for name in given if name in _OF_REQUESTS]
        message = "is for --requests"
    if wrong:
        flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
        raise ValueError(f"{flags[wrong[0]]} {message}")


def run(context: typer.Context) -> None:
    """Runs the requests of a file, with the options of the command `generate`.

    Results go to standard output or to the file `--out`, one line of JSON each, in the order in
    which they end; a bar, and unless `--out` is given the summary, to standard error.

    Args:
      context: of the command.

    Raises:
      OSError: if a file cannot be read or written.
      ValueError, NotImplementedError, ImportError: if something does not fit.
    """
    from turbojax import serving, text
    from turbojax.demo import environment

    options = context.params
    kind = text.parse_dtype(options["dtype"])
    if options["random_weights"] is None:
        if options["weights"] is not None:
            raise ValueError("--weights is for --random-weights")
        model = text.load_text_model(options["model"] or "embedded", kind)
    else:
        if options["model"] is not None:
            raise ValueError("--random-weights takes no --model")
        model = text.random_text_model(
            options["random_weights"], kind, options["weights"] or "float"
        )
    path: Path = options["requests"]
    results = _Results(options["out"])
    results.check_is_not(path)
    try:
        requests = serving.read_requests(path.read_bytes(), model.codec, options["max_new_tokens"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    with results, _bar(len(requests)) as advance:
        report = serving.serve(
            model,
            requests,
            # In ASCII, which every terminal takes; an `id` may be no Unicode text at all.
            emit=lambda result: results.write(json.dumps(result)),
            progress=advance,
            accepted=results.open,
            kv_dtype=options["kv_dtype"],
            page_size=options["page_size"],
            num_pages=options["num_pages"],
            pool_bytes=options["pool_bytes"],
            max_sequences=options["max_sequences"],
            prefill_chunk=options["prefill_chunk"],
            cache_results=options["cache_results"],
            implementation=options["implementation"],
        )
    numbers = {**environment(), **report.to_json()}
    last = json.dumps(numbers, indent=2) if options["as_json"] else report.summary()
    typer.echo(last, err=options["out"] is None)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class _Results(contextlib.ExitStack):
    """Where results go, each at once: a long run is to be followed.

    Args:
      path: of a file, whose content is kept until `open`; None for standard output.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self._file: TextIO | None = None

    def check_is_not(self, requests: Path) -> None:
        """Raises ValueError if results would overwrite the requests."""
        if self._path is not None and self._path.is_file() and self._path.samefile(requests):
            raise ValueError(f"--out {self._path} must not be the file of --requests")

    def open(self) -> None:
        """Begins the file anew."""
        if self._path is not None:
            self._file = self.enter_context(self._path.open("w", encoding="utf-8"))

    def write(self, line: str) -> None:
        """Adds a line."""
        typer.echo(line, file=self._file)
        if self._file is not None:
            self._file.flush()


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of requests done, with tokens counted, on standard error."""
    columns: Any = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, tokens = progress.add_task("requests", total=total, tokens=0), 0

        def advance(new_tokens: int, done: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            progress.update(task, advance=done, tokens=tokens)

        yield advance
