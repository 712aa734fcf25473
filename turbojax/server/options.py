"""How a text is to be continued: the fields that completions and chats have in common."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from turbojax import _json
from turbojax.models.engine.requests import MOST_LOGPROBS, Request
from turbojax.models.generation.constraints import Constraint
from turbojax.models.generation.sampling import Penalties, Sampling
from turbojax.models.generation.stopping import check_stops
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.server.errors import ApiError, blamed_on
from turbojax.server.fields import Fields

MOST_STOPS = 16
"""Stop texts of a request."""

LONGEST_STOP = 256
"""Characters of a stop text: the engine looks for these after every token, while others wait."""

_GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "lark"}
_ONLY_ONE = "only one of response_format, guided_json, guided_regex and guided_grammar"
# Fields of OpenAI's API that must ask for what is done here anyway; else they are refused.
_FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
}
_LABELS = ("user", "safety_identifier", "prompt_cache_key")


@dataclasses.dataclass(frozen=True)
class Options:
    """How texts are continued; most are attributes of `Request`.

    `stop_tokens` include those of stop texts and the tokenizer's ends. With `stream` tokens are
    sent as they come, with `include_usage` counts of tokens at the end.
    """

    sampling: Sampling
    penalties: Penalties
    logit_bias: Mapping[int, float]
    stop_tokens: frozenset[int]
    stop: tuple[str, ...]
    constraint: Constraint | None
    priority: int
    timeout: float | None
    stream: bool
    include_usage: bool

    def request(self, tokens: list[int], max_new_tokens: int, logprobs: int | None) -> Request:
        """The engine's request for one prompt."""
        return Request(
            tokens,
            max_new_tokens,
            sorted(self.stop_tokens),
            self.sampling,
            self.stop,
            self.penalties,
            self.logit_bias,
            self.constraint,
            logprobs,
            self.priority,
            self.timeout,
        )


def read_options(fields: Fields, tokenizer: Tokenizer) -> Options:
    """Reads these fields of a body; ApiError names the first that is wrong."""
    for name, (allowed, why) in _FIXED.items():
        fields.only(name, allowed, why)
    for name in _LABELS:
        fields.text(name)
    if (metadata := fields.inner("metadata")) is not None:
        del metadata  # labels of the client's own
    stop_tokens, stop = _stops(fields, tokenizer)
    stream = fields.boolean("stream")
    timeout = fields.number("timeout", 0.0, positive=True)
    return Options(
        sampling=_sampling(fields),
        penalties=_penalties(fields),
        logit_bias=_logit_bias(fields, tokenizer.vocab_size),
        stop_tokens=stop_tokens,
        stop=stop,
        constraint=_constraint(fields, tokenizer),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
        timeout=timeout or None,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def read_top_logprobs(fields: Fields, name: str) -> int | None:
    """How many likely tokens are asked for at each place."""
    return fields.integer(name, 0, MOST_LOGPROBS)


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0.0)
    top_p = fields.number("top_p", 1.0, most=1.0, positive=True)
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    min_p = fields.number("min_p", 0.0, 0.0, 1.0)
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    # A greedy token is among the most likely ones, whatever top-k, top-p and min-p say.
    drawn = temperature > 0
    with blamed_on("temperature"):
        return Sampling(
            temperature=temperature,
            top_k=top_k if drawn and top_k is not None and top_k > 0 else None,
            top_p=top_p if drawn and top_p < 1 else None,
            min_p=min_p if drawn and min_p > 0 else None,
            # A seed of 64 bits is mapped to 32; without one each request gets another seed.
            seed=secrets.randbits(32) if seed is None else seed % 2**32,
        )


def _penalties(fields: Fields) -> Penalties:
    return Penalties(
        repetition=fields.number("repetition_penalty", 1.0, 1e-6, 1e6),
        presence=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
    )


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    """Numbers of -100 to 100 by token; the keys of a JSON object are texts."""
    bias = fields.inner("logit_bias")
    found = dict[int, float]()
    for key in fields.raw("logit_bias") or ():
        assert bias is not None
        digits = key.isascii() and key.isdecimal() and len(key) < 11
        if not digits or int(key) >= vocab_size or key != str(int(key)):
            raise ApiError(
                f"logit_bias has the key {_json.shown(key)}, must be a token within "
                f"0..{vocab_size - 1}",
                param="logit_bias",
            )
        found[int(key)] = bias.number(key, 0.0, -100.0, 100.0)
    return found


def _stops(fields: Fields, tokenizer: Tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
    """Tokens and texts that end a result."""
    texts = fields.texts("stop", MOST_STOPS, LONGEST_STOP)
    tokens = fields.tokens("stop_token_ids", tokenizer.vocab_size)
    ends = () if fields.boolean("ignore_eos") else tokenizer.eos_token_ids
    return check_stops((*tokens, *ends), texts, tokenizer)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.error("stream_options", "given with stream=true only")
    include = options.boolean("include_usage")
    # OpenAI's padding hides sizes of packets; there is none here.
    options.only("include_obfuscation", (False,), "chunks are not padded")
    options.refuse_others()
    return include


def _constraint(fields: Fields, tokenizer: Tokenizer) -> Constraint | None:
    """What a text must look like; one of the ways to say so."""
    guides = {name: value for name in _GUIDES if (value := fields.raw(name)) is not None}
    schema, kind = _response_format(fields)
    if len(guides) + (kind is not None) > 1:
        raise ApiError(f"{_ONLY_ONE} must be given", param=next(iter(guides)))
    if kind is None and not guides:
        return None

    if kind is not None:
        name, value = "response_format", schema
    else:
        [(name, value)] = guides.items()
        kind, value = _GUIDES[name], _guide(fields, name, value)

    from turbojax.models.text import grammar

    with blamed_on(name):
        if kind == "json_object":
            return grammar.json_object(tokenizer)
        if kind == "json_schema":
            return grammar.json_schema(tokenizer, value)
        return (grammar.regex if kind == "regex" else grammar.lark)(tokenizer, value)


def _guide(fields: Fields, name: str, value: Any) -> Any:
    """What a text is guided by: a schema, which may come as a text, or a text."""
    if name != "guided_json":
        if not isinstance(value, str):
            raise fields.error(name, "a text")
        return value
    if isinstance(value, str):
        with blamed_on(name):
            value = _json.parse(value)
    if not isinstance(value, dict | bool):
        raise fields.error(name, "a JSON schema")
    return value


def _response_format(fields: Fields) -> tuple[Any, str | None]:
    """The schema, if there is one, and the kind, if it is not any text."""
    form = fields.inner("response_format")
    if form is None:
        return None, None
    kind = form.raw("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise form.error("type", "text, json_object or json_schema")
    schema = None
    if kind == "json_schema":
        inner = form.inner("json_schema")
        if inner is None:
            raise form.error("json_schema", "an object with a name and a schema")
        inner.text("name")
        inner.text("description")
        inner.boolean("strict")  # it always is
        schema = inner.raw("schema")
        if not isinstance(schema, dict | bool):
            raise inner.error("schema", "a JSON schema")
        inner.refuse_others()
    form.refuse_others()
    return schema, None if kind == "text" else kind
