"""A line of `turbojax serve`: JSON that says what to continue, and how."""

import codecs
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from turbojax.models import Request, Sampling
from turbojax.models.generation.constraints import Constraint
from turbojax.models.generation.sampling import Penalties
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
    """Reads line `number` (from 1), UTF-8 text; `max_new_tokens` is for lines that do not say.

    Raises TypeError, ValueError or NotImplementedError saying what is wrong, RecursionError if the
    line is nested too deep, ImportError if a grammar needs a package that is missing.
    """
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
