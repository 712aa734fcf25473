"""The requests of `turbojax serve`: lines of JSON that say what to continue, and how."""

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from turbojax.models import Request, Sampling, TransformerConfig
from turbojax.models.engine.pools import pages_at_most, windows_of
from turbojax.models.engine.requests import check_vocabulary
from turbojax.models.generation.constraints import Constraint
from turbojax.models.generation.sampling import NO_PENALTIES, Penalties
from turbojax.models.generation.stopping import check_stops
from turbojax.models.text.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_PENALTIES = ("repetition", "presence", "frequency")
_GUIDES = ("json_schema", "regex", "grammar")
_KEYS = (
    *("id", "prompt", "max_new_tokens", "stop", *_SAMPLING),
    *(f"{name}_penalty" for name in _PENALTIES),
    *("logit_bias", "logprobs", "priority", "timeout", "n", "best_of", *_GUIDES),
)
_MOST_SAMPLES = 128


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A text to continue, from a line of the file, counted from 1.

    Attributes:
      request: the same in tokens.
      stop: texts that end the result and are no part of it.
      count: results that are wanted, the most likely ones of `samples`.
      shows_logprobs: whether results show log-probabilities; `request` also computes them where
        they are only compared.
      guide: what a result must look like: the line's key, and its value as text.
    """

    id: str | int
    line: int
    request: Request
    stop: tuple[str, ...]
    count: int = 1
    samples: int = 1
    shows_logprobs: bool = False
    guide: tuple[str, str] | None = None


def parse_line(line: bytes, number: int, tokenizer: Tokenizer, max_new_tokens: int) -> TextRequest:
    """Reads line `number` (from 1), UTF-8 text; `max_new_tokens` is for lines that do not say."""
    values = _object(line)
    if not isinstance(values.get("prompt"), str):
        raise ValueError("'prompt' must be a string")
    name = values.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id={name!r} must be a string or an integer")
    tokens, texts = _stops(values.get("stop", []), tokenizer)
    chosen = {key: values[key] for key in _SAMPLING if key in values}
    sampling = Sampling(**{"seed": number, **chosen})
    count, samples = _counts(values, sampling)
    guide, constraint = _guide(values, tokenizer)
    logprobs = values.get("logprobs")
    request = Request(
        tokenizer.encode(values["prompt"]),
        values.get("max_new_tokens", max_new_tokens),
        sorted(tokens),
        sampling,
        texts,
        Penalties(**{x: values[f"{x}_penalty"] for x in _PENALTIES if f"{x}_penalty" in values}),
        _bias(values.get("logit_bias", {})),
        constraint,
        0 if logprobs is None and samples > count else logprobs,
        values.get("priority", 0),
        values.get("timeout"),
    )
    shows = logprobs is not None
    return TextRequest(name, number, request, texts, count, samples, shows, guide)


def _object(line: bytes) -> dict[str, Any]:
    """The line's object, whose keys are known."""
    try:
        values = json.loads(line.removeprefix(codecs.BOM_UTF8), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("must be a JSON object")
    if unknown := sorted(set(values) - set(_KEYS)):
        raise ValueError(f"{unknown[0]!r} must be one of {', '.join(_KEYS)}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, none of whose keys is given twice."""
    values = dict[str, Any]()
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key!r} must not be given twice")
        values[key] = value
    return values


def _stops(stop: Any, tokenizer: Tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
    """Tokens and texts that end a result."""
    if not isinstance(stop, list) or not all(
        (isinstance(x, str) and x) or (isinstance(x, int) and not isinstance(x, bool)) for x in stop
    ):
        raise ValueError(f"{stop=} must be a list of texts, none empty, and tokens")
    numbers = [x for x in stop if not isinstance(x, str)]
    texts = [x for x in stop if isinstance(x, str)]
    return check_stops([*numbers, *tokenizer.eos_token_ids], texts, tokenizer)


def _counts(values: Mapping[str, Any], sampling: Sampling) -> tuple[int, int]:
    """Results that are wanted, and of how many samples."""
    count = values.get("n", 1)
    samples = values.get("best_of", count)
    for name, value in (("n", count), ("best_of", samples)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an integer")
        if not 1 <= value <= _MOST_SAMPLES:
            raise ValueError(f"{name}={value} must be within 1..{_MOST_SAMPLES}")
    if samples < count:
        raise ValueError(f"best_of={samples} must be at least n={count}")
    if samples > 1 and not sampling.temperature:
        raise ValueError(f"{samples} samples need a temperature above 0: greedy texts are alike")
    return count, samples


def _bias(given: Any) -> dict[int, float]:
    """What is added to logits; keys of a JSON object are texts."""
    if not isinstance(given, dict):
        raise TypeError(f"logit_bias={given!r} must be an object of numbers by token")
    for token in given:
        # "01" is refused, since with "1" it would name the same token twice.
        if not (token.isascii() and token.isdecimal() and len(token) < 11) or (
            token != str(int(token))
        ):
            raise ValueError(f"{token!r} in logit_bias must be a token")
    return {int(token): value for token, value in given.items()}


def _guide(
    values: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[tuple[str, str] | None, Constraint | None]:
    """What a result must look like: as text, which tells requests apart, and compiled."""
    given = [name for name in _GUIDES if name in values]
    if not given:
        return None, None
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]}: a line must have one of them")
    from turbojax.models.text import grammar

    [name], value = given, values[given[0]]
    if name == "json_schema":
        # Keys are not sorted: properties come in the schema's order.
        return (name, json.dumps(value)), grammar.json_schema(tokenizer, value)
    make = grammar.regex if name == "regex" else grammar.lark
    return (name, value), make(tokenizer, value)


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
