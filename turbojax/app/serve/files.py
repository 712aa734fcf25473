"""`turbojax serve FILE`: the requests of a file, from the first check to the last result."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from turbojax import _checks, _interrupt
from turbojax.app import startup
from turbojax.app.serve import run, settings
from turbojax.app.serve.requests import RequestFile, digest, fitting, read_requests
from turbojax.app.serve.results import (
    ResultFile,
    Screen,
    is_standard_input,
    open_results,
    unfinished,
)
from turbojax.app.serve.run import ServingReport
from turbojax.app.serve.settings import Models, Settings, pages_asked_for
from turbojax.app.text_model import FoundModel
from turbojax.models.engine.pools import Sizes

# This many bad lines are named; the others are counted.
_NAMED = 20
_STANDARD_INPUT = "-"


@dataclasses.dataclass(frozen=True)
class Output:
    """Where results go, and what becomes of those that are there."""

    path: Path | None
    resume: bool
    overwrite: bool


def serve_file(
    file: Path,
    output: Output,
    find: Callable[[], tuple[FoundModel, FoundModel | None]],
    chosen: Settings,
    *,
    skip_bad: bool,
    max_new_tokens: int,
) -> ServingReport:
    """Runs the requests of a file, or of standard input if `file` is ``-``.

    `find` finds the model, and the draft model if there is one; `max_new_tokens` is for lines that
    do not say. With `skip_bad` the other requests run where lines are bad.
    """
    with contextlib.ExitStack() as stack:
        _check_files(file, output)
        content = _content(file)
        results = None  # on standard output
        if output.path is not None:
            opened = open_results(output.path, resume=output.resume, overwrite=output.overwrite)
            results = stack.enter_context(opened)
        _checks.check_sizes(max_new_tokens=max_new_tokens)
        found, draft = find()
        lines = _lines(file, content, found, draft, max_new_tokens, chosen)
        _report_bad(file, lines, skip_bad)
        free = _check_memory(found, draft, lines, chosen)
        return _run(found, draft, lines, results, chosen, free)


def _run(
    found: FoundModel,
    draft: FoundModel | None,
    lines: RequestFile,
    results: ResultFile | None,
    chosen: Settings,
    free_bytes: int | None,
) -> ServingReport:
    """Runs what has no result yet, if there is any; the report."""
    name = run.model_name(found, lines.requests, chosen)
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
                chosen,
                # As ASCII, which every terminal shows; an `id` may not even be valid Unicode.
                emit=lambda result: screen.write(
                    json.dumps({**result, "request": digests[result["id"]]})
                ),
                progress=screen.advance,
                accepted=screen.begin,
                done={request.id for request in lines.requests} - {request.id for request in left},
                draft=None if draft is None else draft.load().decoder,
                free_bytes=free_bytes,
            )
    else:
        sizes = _sizes(found, lines, chosen)
        report = run.ServingReport(
            0,
            chosen.kv_dtype,
            chosen.page_size,
            sizes.max_sequences,
            kept=total,
            uncompressed_layers=chosen.uncompressed_layers,
        )
    return dataclasses.replace(report, skipped=len(lines.bad))


def _check_files(file: Path, output: Output) -> None:
    """Raises ValueError if results cannot go where the options say."""
    out = output.path
    if output.resume and output.overwrite:
        raise ValueError("--resume keeps what --out holds, and --overwrite drops it: give one")
    if out is None:
        if output.resume or output.overwrite:
            raise ValueError(f"--{'resume' if output.resume else 'overwrite'} is for --out")
        return
    startup.check_output_file("--out", out)
    is_input = str(file) == _STANDARD_INPUT
    if is_standard_input(out) if is_input else out.is_file() and out.samefile(file):
        raise ValueError(f"--out {out} must not be the file of the requests")


def _content(file: Path) -> bytes:
    """The requests; an error names the file."""
    if str(file) != _STANDARD_INPUT:
        return file.read_bytes()
    if sys.stdin.isatty():
        typer.echo("turbojax serve: requests, one a line; Ctrl-D ends them", err=True)
    return typer.get_binary_stream("stdin").read()


def _lines(
    file: Path,
    content: bytes,
    found: FoundModel,
    draft: FoundModel | None,
    max_new_tokens: int,
    chosen: Settings,
) -> RequestFile:
    """The requests, and the lines that cannot run."""
    sizes = chosen.sizes(found.config.max_length)
    pages = pages_asked_for(Models.of(found, draft), chosen, sizes)
    lines = read_requests(content, found.tokenizer, max_new_tokens)
    if not lines.requests and not lines.bad:
        raise ValueError(f"{_name(file)}: there must be at least one request")
    return fitting(
        lines,
        found.config,
        num_pages=pages,
        page_size=chosen.page_size,
        step_tokens=sizes.step_tokens,
    )


def _report_bad(file: Path, lines: RequestFile, skip: bool) -> None:
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


def _check_memory(
    found: FoundModel,
    draft: FoundModel | None,
    lines: RequestFile,
    chosen: Settings,
) -> int | None:
    """Bytes that pages may take; None for any number."""
    needs = settings.bytes_besides(found, draft, chosen, _sizes(found, lines, chosen))
    free = settings.free_for_pages(needs)
    pool = run.plan_for(lines.requests, Models.of(found, draft), chosen, free)
    settings.check_memory(pool, chosen, needs)
    fits = fitting(
        RequestFile(lines.requests),
        found.config,
        num_pages=pool.num_pages,
        page_size=chosen.page_size,
        step_tokens=pool.step_tokens,
    )
    if fits.bad:
        raise ValueError(
            f"{fits.bad[0]}: for more the memory has no room: a smaller --max-sequences or "
            "--step-tokens, or another --kv-dtype"
        )
    return free


def _sizes(found: FoundModel, lines: RequestFile, chosen: Settings) -> Sizes:
    """What pages follow from: each sample is a request of its own."""
    samples = sum(request.samples for request in lines.requests)
    return chosen.sizes(run.max_length_of(lines.requests, found.config), samples)
