"""The command `turbojax serve`: its options, and what it prints."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turbojax import _interrupt, cli_options, cli_programs

File = Annotated[
    Path,
    typer.Argument(
        help="JSON lines with prompt, and optionally id, max_new_tokens, stop (a list of texts or "
        "tokens), temperature, top_k, top_p, min_p, seed.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="File for the results. Default: standard output.", show_default=False),
]
KvDtype = Annotated[
    str, typer.Option(help="Pages in auto (uncompressed), fp8_e4m3, fp8_e5m2 or turbo4.")
]
PageSize = Annotated[int, typer.Option(help="Tokens of a page: 16, 32, 64 or 128.")]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Pages of the pool. Default: enough for --max-sequences of the longest requests.",
        show_default=False,
    ),
]
PoolBytes = Annotated[
    int | None,
    typer.Option(help="Instead, bytes of the pool, all layers.", show_default=False),
]
MaxSequences = Annotated[int, typer.Option(help="Requests that run at a time.")]
PrefillChunk = Annotated[int, typer.Option(help="Tokens of a prompt that run in a step.")]
CacheResults = Annotated[
    bool,
    typer.Option(
        "--cache-results",
        help="Prompts that begin with another one's result find its pages, too; their text may "
        "then differ by rounding from one that runs alone.",
    ),
]
Implementation = Annotated[
    str | None,
    typer.Option(
        help="What runs attention: xla, triton or mosaic_gpu. Default: the fastest that can.",
        show_default=False,
    ),
]


def serve(
    file: File,
    out: Out = None,
    model: cli_options.Model = None,
    max_new_tokens: cli_options.MaxNewTokens = 128,
    max_length: cli_options.MaxLength = None,
    kv_dtype: KvDtype = "auto",
    page_size: PageSize = 64,
    num_pages: NumPages = None,
    pool_bytes: PoolBytes = None,
    max_sequences: MaxSequences = 8,
    prefill_chunk: PrefillChunk = 64,
    cache_results: CacheResults = False,
    implementation: Implementation = None,
    dtype: cli_options.Dtype = None,
    random_weights: cli_options.RandomWeights = None,
    weights: cli_options.Weights = None,
    as_json: cli_options.AsJson = False,
    compilation_cache: cli_programs.CompilationCache = True,
) -> None:
    """Continue many texts at once, sampled or not, on one pool of pages.

    Results are JSON lines, in the order in which they end.
    """
    from turbojax import _checks, serving
    from turbojax.demo import environment

    cli_programs.use(compilation_cache, "turbojax serve")
    with cli_options.one_line_errors(
        "turbojax serve", smaller="--num-pages, --pool-bytes or --max-sequences"
    ):
        # Before the model is loaded, which may take minutes.
        content = file.read_bytes()
        results = _Results(out)
        results.check(file)
        _checks.check_sizes(
            max_new_tokens=max_new_tokens, max_sequences=max_sequences, page_size=page_size
        )
        source = cli_options.load(model, random_weights, weights, dtype, max_length)
        try:
            requests = serving.read_requests(content, source.tokenizer, max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        _interrupt.say(results.note)
        with results, _bar(len(requests)) as advance:
            report = serving.serve(
                source,
                requests,
                # In ASCII, which every terminal takes; an `id` may be no Unicode text at all.
                emit=lambda result: results.write(json.dumps(result)),
                progress=advance,
                accepted=results.open,
                kv_dtype=kv_dtype,
                page_size=page_size,
                num_pages=num_pages,
                pool_bytes=pool_bytes,
                max_sequences=max_sequences,
                prefill_chunk=prefill_chunk,
                cache_results=cache_results,
                implementation=implementation,
            )
    numbers = {**environment(), **report.to_json()}
    last = json.dumps(numbers, indent=2) if as_json else report.summary()
    # Beside results on standard output, numbers go where they do not mix with them.
    typer.echo(last, err=out is None)


class _Results(contextlib.ExitStack):
    """Where results go. Each is written at once, so that a long run can be followed.

    Args:
      path: of a file, whose content is kept until `open`; None for standard output.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self._file: TextIO | None = None
        self._written = 0

    def check(self, requests: Path) -> None:
        """Raises ValueError if there is no such place, or it is the file of the requests."""
        if self._path is None:
            return
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise ValueError(f"--out {self._path} must be a file in a folder that exists")
        if self._path.is_file() and self._path.samefile(requests):
            raise ValueError(f"--out {self._path} must not be the file of the requests")

    def open(self) -> None:
        """Begins the file anew."""
        if self._path is not None:
            self._file = self.enter_context(self._path.open("w", encoding="utf-8"))

    def write(self, line: str) -> None:
        """Adds a line."""
        typer.echo(line, file=self._file)
        if self._file is not None:
            self._file.flush()
        self._written += 1

    def note(self) -> str:
        """What is written so far."""
        place = "on standard output" if self._path is None else f"in {self._path}"
        return f"{self._written} results are {place}"


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
