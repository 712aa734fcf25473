"""The requests of `turbojax serve`: lines of JSON, and which of them can run."""

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from turbojax.models import Request, Sampling, TransformerConfig
from turbojax.models.engine.groups import pages_at_most, windows_of
from turbojax.models.generation.stopping import check_stops
from turbojax.models.text.tokenizer import Tokenizer

PREFILL_CHUNK = 64
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_KEYS = ("id", "prompt", "max_new_tokens", "stop", *_SAMPLING)
# What is wrong with a line may quote it.
_LONGEST_REASON = 300


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A text to continue.

    Attributes:
      id: what its result is called.
      line: its line in the file, counted from 1.
      request: the same in tokens.
      stop: texts that end the result and are no part of it.
    """

    id: str | int
    line: int
    request: Request
    stop: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A line that cannot run, and why."""

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class RequestFile:
    """The lines of a file, without the empty ones, in their order.

    Attributes:
      requests: what can run.
      bad: what cannot.
    """

    requests: tuple[TextRequest, ...]
    bad: tuple[BadLine, ...] = ()


def read_requests(content: bytes, tokenizer: Tokenizer, max_new_tokens: int) -> RequestFile:
    r"""The requests of a file in JSON lines.

    A line is an object with `prompt`, and optionally `id` (a string or an integer; by default the
    line's number), `max_new_tokens`, `stop` (texts, and tokens as integers, in addition to those
    with which the tokenizer ends every text), `temperature`, `top_k`, `top_p`, `min_p` and `seed`
    (by default the line's number, so that equal prompts differ; see `Sampling`). Empty lines are
    skipped. A line is bad if it is no such object, its values do not fit, or a line before it has
    its id.

    Args:
      content: UTF-8 text.
      tokenizer: what turns prompts into tokens.
      max_new_tokens: of lines that do not say.
    """
    requests, bad, lines = list[TextRequest](), list[BadLine](), dict[str | int, int]()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found = _parse(line, number, tokenizer, max_new_tokens)
            if found.id in lines:
                raise ValueError(
                    f"id {found.id!r} must not be that of line {lines[found.id]} "
                    "(a line without an id has its number)"
                )
        except (ValueError, TypeError) as error:
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
    prefill_chunk: int | None = None,
) -> RequestFile:
    """The same lines; what an engine would refuse is bad.

    Args:
      file: the requests.
      config: of the model.
      num_pages: of the pool, where that does not follow from the requests.
      page_size: tokens of a page.
      prefill_chunk: tokens of a prompt that run in a step; `PREFILL_CHUNK` if not given.
    """
    chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
    requests, bad = [], list(file.bad)
    for found in file.requests:
        reason = _misfit(found.request, config, num_pages, page_size, chunk)
        if reason is None:
            requests.append(found)
        else:
            bad.append(_bad_line(found.line, reason))
    return RequestFile(tuple(requests), tuple(sorted(bad, key=lambda x: x.line)))


def digest(found: TextRequest, model: str) -> str:
    """What a result's `request` says: equal where the same model continues the same.

    Args:
      found: the request; neither its id nor its line counts.
      model: a text that tells models apart.
    """
    request = found.request
    options = [
        model,
        request.tokens,
        request.max_new_tokens,
        request.stop_tokens,
        dataclasses.astuple(request.sampling),
        found.stop,
    ]
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]


def longest(requests: Iterable[TextRequest]) -> int:
    """Tokens of prompt and result of the longest request."""
    return max(found.request.total for found in requests)


def _misfit(
    request: Request,
    config: TransformerConfig,
    num_pages: int | None,
    page_size: int,
    prefill_chunk: int,
) -> str | None:
    """Why `Engine.add` would refuse this, in its words; None if it would not."""
    for token in (*request.tokens, *request.stop_tokens):
        if not 0 <= token < config.vocab_size:
            return f"{token=} of a request must be within 0..{config.vocab_size - 1}"
    parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
    if request.total > config.max_length:
        return f"{parts} must be at most max_length={config.max_length}"
    window = windows_of(config, config.max_length)[0]
    piece = min(prefill_chunk, len(request.tokens))
    pages = pages_at_most(request.total - 1, piece, page_size, window)
    if num_pages is not None and pages > num_pages:
        return f"{parts} need {pages} pages, must be at most {num_pages=}"
    return None


def _bad_line(number: int, reason: str) -> BadLine:
    words = " ".join(reason.split())
    cut = words if len(words) <= _LONGEST_REASON else f"{words[:_LONGEST_REASON]} ..."
    return BadLine(number, cut)


def _parse(line: bytes, number: int, tokenizer: Tokenizer, max_new_tokens: int) -> TextRequest:
    try:
        values = json.loads(line.removeprefix(codecs.BOM_UTF8), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    if unknown := sorted(set(values) - set(_KEYS)):
        raise ValueError(f"{unknown[0]!r} must be one of {', '.join(_KEYS)}")
    if not isinstance(values.get("prompt"), str):
        raise ValueError("'prompt' must be a string")
    name = values.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id={name!r} must be a string or an integer")
    stop = values.get("stop", [])
    if not isinstance(stop, list) or not all(
        (isinstance(x, str) and x) or (isinstance(x, int) and not isinstance(x, bool)) for x in stop
    ):
        raise ValueError(f"{stop=} must be a list of texts, none empty, and tokens")
    chosen = {key: values[key] for key in _SAMPLING if key in values}
    numbers = [x for x in stop if not isinstance(x, str)]
    tokens, texts = check_stops(
        [*numbers, *tokenizer.eos_token_ids], [x for x in stop if isinstance(x, str)], tokenizer
    )
    request = Request(
        tokenizer.encode(values["prompt"]),
        values.get("max_new_tokens", max_new_tokens),
        sorted(tokens),
        Sampling(**{"seed": number, **chosen}),
    )
    return TextRequest(name, number, request, texts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, none of whose keys is given twice."""
    values = dict[str, Any]()
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r} must not be given twice")
        values[key] = value
    return values
