"""The command `turbojax serve`: its options, and what it prints."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turbojax import _interrupt
from turbojax.app import options, programs, terminal
from turbojax.app.serve.screen import Screen

if TYPE_CHECKING:
    from turbojax.app.serve.requests import RequestFile
    from turbojax.app.serve.results import ResultFile
    from turbojax.app.text_model import FoundModel

# Bad lines that are named; of more, how many there are.
_NAMED = 20
_STANDARD_INPUT = "-"

File = Annotated[
    Path,
    typer.Argument(
        help="JSON lines with prompt, and optionally id, max_new_tokens, stop (a list of texts or "
        "tokens), temperature, top_k, top_p, min_p, seed. - for standard input.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="File for the results, new or empty: see --resume. Default: standard output.",
        show_default=False,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where a run was interrupted: results that are in --out are kept, and their "
        "requests do not run again.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Write --out anew: drop the results that it holds.")
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Run the other requests if lines are bad, and name these. Default: run nothing.",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        help="Pages in auto (uncompressed), fp8_e4m3, fp8_e5m2, turbo4, k8v4 (keys as fp8_e4m3, "
        "values as turbo4), or as turbo4 with 4, 3 or 2 bits for keys and values: turbo_k4v2 .."
    ),
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
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a prompt that run in a step, at most as many as a sequence, or the pool, "
        "can have. Default: 64.",
        show_default=False,
    ),
]
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
    resume: Resume = False,
    overwrite: Overwrite = False,
    skip_bad: SkipBad = False,
    model: options.Model = None,
    adapters: options.Adapters = None,
    max_new_tokens: options.MaxNewTokens = 128,
    max_length: options.MaxLength = None,
    kv_dtype: KvDtype = "auto",
    uncompressed_layers: options.UncompressedLayers = 0,
    page_size: PageSize = 64,
    num_pages: NumPages = None,
    pool_bytes: PoolBytes = None,
    max_sequences: MaxSequences = 8,
    prefill_chunk: PrefillChunk = None,
    cache_results: CacheResults = False,
    implementation: Implementation = None,
    dtype: options.Dtype = None,
    random_weights: options.RandomWeights = None,
    weights: options.Weights = None,
    as_json: options.AsJson = False,
    compilation_cache: programs.CompilationCache = True,
) -> None:
    """Continue many texts at once, sampled or not, on one pool of pages.

    Results are JSON lines, in the order in which they end. A bad line of the requests is found
    before anything runs. After an interruption, the same command with --resume goes on.
    """
    from turbojax import _checks
    from turbojax._environment import environment

    programs.use(compilation_cache, "turbojax serve")
    with (
        terminal.one_line_errors(
            "turbojax serve", smaller="--num-pages, --pool-bytes or --max-sequences"
        ),
        contextlib.ExitStack() as stack,
    ):
        # Before the model is loaded, which may take minutes.
        _check_files(file, out, resume, overwrite)
        content = _content(file)
        results = stack.enter_context(_results(out, resume, overwrite))
        _checks.check_sizes(
            max_new_tokens=max_new_tokens, max_sequences=max_sequences, page_size=page_size
        )
        found = options.find(model, random_weights, weights, dtype, max_length, adapters)
        sizes: dict[str, Any] = {
            "kv_dtype": kv_dtype,
            "uncompressed_layers": uncompressed_layers,
            "page_size": page_size,
            "num_pages": num_pages,
            "pool_bytes": pool_bytes,
        }
        sizes |= {"max_sequences": max_sequences, "prefill_chunk": prefill_chunk}
        lines = _lines(file, content, found, max_new_tokens, sizes)
        _report_bad(file, lines, skip_bad)
        _check_memory(found, lines, sizes)
        others = {"cache_results": cache_results, "implementation": implementation}
        report = _run(found, lines, results, {**sizes, **others})
    numbers = {**environment(), **report.to_json()}
    last = json.dumps(numbers, indent=2) if as_json else report.summary()
    # Beside results on standard output, numbers go where they do not mix with them.
    typer.echo(last, err=out is None)


def _run(
    found: "FoundModel", lines: "RequestFile", results: "ResultFile | None", chosen: dict[str, Any]
) -> Any:
    """Runs what has no result yet, if there is any; the report."""
    from turbojax.app.serve import run
    from turbojax.app.serve.requests import digest
    from turbojax.app.serve.results import unfinished

    how = {x: chosen[x] for x in ("kv_dtype", "uncompressed_layers")}
    name = run.model_name(found, lines.requests, **how)
    digests = {one.id: digest(one, name) for one in lines.requests}
    left = lines.requests
    if results is not None:
        left = unfinished(left, results.held, digests)
        strangers = len(results.held.keys() - {request.id for request in lines.requests})
        if strangers:
            typer.echo(
                f"turbojax serve: {strangers} results in --out are of no request here: kept",
                err=True,
            )
    total = len(lines.requests)
    if left:
        screen = Screen(total, total - len(left), results)
        _interrupt.say(screen.note)
        with screen:
            report = run.serve(
                found.load(),
                lines.requests,
                # In ASCII, which every terminal takes; an `id` may be no Unicode text at all.
                emit=lambda result: screen.write(
                    json.dumps({**result, "request": digests[result["id"]]})
                ),
                progress=screen.advance,
                accepted=screen.begin,
                done={request.id for request in lines.requests} - {request.id for request in left},
                **chosen,
            )
    else:
        how |= {x: chosen[x] for x in ("page_size", "max_sequences")}
        report = run.ServingReport(0, **how, kept=total)
    return dataclasses.replace(report, skipped=len(lines.bad))


def _check_files(file: Path, out: Path | None, resume: bool, overwrite: bool) -> None:
    """Raises ValueError if results cannot go where the options say."""
    from turbojax.app import startup
    from turbojax.app.serve.results import is_standard_input

    if resume and overwrite:
        raise ValueError("--resume keeps what --out holds, and --overwrite drops it: give one")
    if out is None:
        if resume or overwrite:
            raise ValueError(f"--{'resume' if resume else 'overwrite'} is for --out")
        return
    startup.check_output_file("--out", out)
    is_input = str(file) == _STANDARD_INPUT
    if is_standard_input(out) if is_input else _is_same(out, file):
        raise ValueError(f"--out {out} must not be the file of the requests")


def _is_same(out: Path, file: Path) -> bool:
    return out.is_file() and out.samefile(file)


def _content(file: Path) -> bytes:
    """The requests; an error names the file."""
    if str(file) != _STANDARD_INPUT:
        return file.read_bytes()
    if sys.stdin.isatty():
        typer.echo("turbojax serve: requests, one a line; Ctrl-D ends them", err=True)
    return typer.get_binary_stream("stdin").read()


@contextlib.contextmanager
def _results(out: Path | None, resume: bool, overwrite: bool) -> Iterator["ResultFile | None"]:
    """The file of the results; None for standard output."""
    from turbojax.app.serve.results import open_results

    if out is None:
        yield None
        return
    with open_results(out, resume=resume, overwrite=overwrite) as results:
        yield results


def _lines(
    file: Path, content: bytes, found: "FoundModel", max_new_tokens: int, sizes: dict[str, Any]
) -> "RequestFile":
    """The requests, and the lines that cannot run."""
    from turbojax.app.serve.requests import fitting, read_requests
    from turbojax.app.serve.run import pages_of, sizes_before

    steps = {x: sizes[x] for x in ("page_size", "max_sequences", "prefill_chunk")}
    asked = {x: y for x, y in sizes.items() if x not in steps}
    pages = pages_of(found.config, found.dtype, sizes=sizes_before(found.config, **steps), **asked)
    lines = read_requests(content, found.tokenizer, max_new_tokens)
    if not lines.requests and not lines.bad:
        raise ValueError(f"{_name(file)}: there must be at least one request")
    return fitting(
        lines,
        found.config,
        num_pages=pages,
        page_size=sizes["page_size"],
        prefill_chunk=sizes["prefill_chunk"],
    )


def _report_bad(file: Path, lines: "RequestFile", skip: bool) -> None:
    """Names the bad lines, and ends the command because of them unless they are skipped."""
    if not lines.bad:
        return
    for bad in lines.bad[:_NAMED]:
        typer.echo(f"turbojax serve: {_name(file)}: {bad}", err=True)
    many = f"{len(lines.bad)} of {len(lines.bad) + len(lines.requests)} requests are bad"
    if not lines.requests:
        raise ValueError(f"{_name(file)}: {many}: nothing can run")
    if not skip:
        raise ValueError(f"{_name(file)}: {many}, nothing ran: --skip-bad runs the others")
    typer.echo(f"turbojax serve: {_name(file)}: {many}: skipped", err=True)


def _name(file: Path) -> str:
    return "standard input" if str(file) == _STANDARD_INPUT else str(file)


def _check_memory(found: "FoundModel", lines: "RequestFile", sizes: dict[str, Any]) -> None:
    """Raises ValueError if model, pool and logits are more than there is memory for."""
    from turbojax.app import startup
    from turbojax.app.serve.run import plan

    pool = plan(lines.requests, found.config, found.dtype, **sizes)
    rows = sizes["max_sequences"] + 1
    startup.check_memory(
        {
            "weights": found.weight_bytes,
            f"{pool.num_pages:,} pages of {sizes['page_size']} tokens": pool.nbytes,
            f"logits of {rows:,} rows": 4 * rows * found.config.vocab_size,
            "tables of pages": 4 * rows * -(-pool.max_length // sizes["page_size"]),
        },
        "smaller --num-pages, --pool-bytes or --max-sequences, or another --kv-dtype",
    )
