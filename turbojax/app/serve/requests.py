"""The requests of `turbojax serve`: lines of JSON, and which of them can run."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from turbojax.app.serve.lines import TextRequest, parse_line
from turbojax.models import Request, TransformerConfig
from turbojax.models.engine.groups import pages_at_most, windows_of
from turbojax.models.engine.requests import check_vocabulary
from turbojax.models.generation.sampling import NO_PENALTIES
from turbojax.models.text.tokenizer import Tokenizer

# The values of a request that uses none of these options.
_PLAIN: Mapping[str, Any] = {
    "penalties": dataclasses.astuple(NO_PENALTIES),
    "logit_bias": [],
    "logprobs": None,
    "timeout": None,
    "samples": (1, 1),
    "guide": None,
}
# A reason may quote its line, so it is cut to this many characters.
_LONGEST_REASON = 300


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot run, and why."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class RequestFile:
    """The lines of a file in their order, without the empty ones: what can run and what cannot."""

    requests: tuple[TextRequest, ...]
    bad: tuple[BadLine, ...] = ()


def read_requests(content: bytes, tokenizer: Tokenizer, max_new_tokens: int) -> RequestFile:
    """The requests of a file in JSON lines, UTF-8 text.

    A line is an object with `prompt`, and optionally `id` (a string or an integer; by default the
    line's number), `max_new_tokens`, `stop` (texts, and tokens as integers, in addition to those
    with which the tokenizer ends every text), `temperature`, `top_k`, `top_p`, `min_p` and `seed`
    (by default the line's number, so that equal prompts differ; see `Sampling`),
    `repetition_penalty`, `presence_penalty` and `frequency_penalty` (see `Penalties`),
    `logit_bias`, `logprobs`, `priority` and `timeout` (see `Request`), `n` and `best_of` (results
    that are wanted, and samples of which these are the most likely), and one of `json_schema`,
    `regex` and `grammar` (Lark's; see `models.text.grammar`). Empty lines are skipped. A line is
    bad if it is no such object, its values do not fit, or a line before it has its id.
    """
    requests, bad, lines = list[TextRequest](), list[BadLine](), dict[str | int, int]()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found = parse_line(line, number, tokenizer, max_new_tokens)
            if found.id in lines:
                raise ValueError(
                    f"id {found.id!r} must not be that of line {lines[found.id]} "
                    "(a line without an id has its number)"
                )
        except (ValueError, TypeError, NotImplementedError) as error:
            bad.append(_bad_line(number, str(error)))
            continue
        except RecursionError:
            bad.append(BadLine(number, "must not be nested so deep"))
            continue
        lines[found.id] = number
        requests.append(found)
    return RequestFile(tuple(requests), tuple(bad))


def fitting(
    file: RequestFile,
    config: TransformerConfig,
    *,
    num_pages: int | None,
    page_size: int,
    step_tokens: int,
) -> RequestFile:
    """The same lines, where requests that an engine of these sizes would refuse are bad.

    `num_pages` is None where the pool's size follows from the requests.
    """
    requests, bad = [], list(file.bad)
    for found in file.requests:
        reason = _misfit(found.request, config, num_pages, page_size, step_tokens)
        if reason is None:
            requests.append(found)
        else:
            bad.append(_bad_line(found.line, reason))
    return RequestFile(tuple(requests), tuple(sorted(bad, key=lambda x: x.line)))


def digest(found: TextRequest, model: str) -> str:
    """What a result's `request` says: equal where the same model continues the same.

    `model` is a text that tells models apart. The request's id and line do not count.
    """
    request = found.request
    options: list[Any] = [
        model,
        request.tokens,
        request.max_new_tokens,
        request.stop_tokens,
        dataclasses.astuple(request.sampling),
        found.stop,
    ]
    # Defaults are left out, so that digests in the results of earlier versions still match.
    more = {
        "penalties": dataclasses.astuple(request.penalties),
        "logit_bias": sorted(request.logit_bias.items()),
        # Log-probabilities that only choose among samples are not in the result.
        "logprobs": request.logprobs if found.shows_logprobs else None,
        "timeout": request.timeout,
        "samples": (found.count, found.samples),
        "guide": found.guide,
    }
    if changed := {name: x for name, x in more.items() if x != _PLAIN[name]}:
        options.append(changed)
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]


def longest(requests: Iterable[TextRequest]) -> int:
    """Tokens of prompt and result of the longest request."""
    return max(found.request.total for found in requests)


def _misfit(
    request: Request,
    config: TransformerConfig,
    num_pages: int | None,
    page_size: int,
    step_tokens: int,
) -> str | None:
    """Why `Engine.add` would refuse this, in its words; None if it would not."""
    try:
        check_vocabulary(request, config.vocab_size)
    except ValueError as error:
        return str(error)
    parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
    if request.total > config.max_length:
        return f"{parts} must be at most max_length={config.max_length}"
    window = windows_of(config, config.max_length)[0]
    piece = min(step_tokens, len(request.tokens))
    pages = pages_at_most(request.total - 1, piece, page_size, window)
    if num_pages is not None and pages > num_pages:
        return f"{parts} need {pages} pages, must be at most {num_pages=}"
    return None


def _bad_line(number: int, reason: str) -> BadLine:
    words = " ".join(reason.split())
    cut = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} ..."
    return BadLine(number, cut)
