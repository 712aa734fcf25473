"""The fields of a request's JSON object: each is asked for, and what nobody asks for is refused.

Errors have the shape that OpenAI's clients read; `Options` are what completions and chats have in
common.
"""

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turbojax import _json
from turbojax.models.engine.requests import MOST_LOGPROBS
from turbojax.models.engine.requests import Request as EngineRequest
from turbojax.models.generation.constraints import Constraint
from turbojax.models.generation.sampling import Penalties, Sampling
from turbojax.models.generation.stopping import check_stops
from turbojax.models.text.tokenizer import Tokenizer

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told instead of an answer.

    `message` says what is wrong: the field, its value, and the requirement. `param` is the field,
    `code` a word for programs, and `headers` are further ones of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def to_json(self) -> dict[str, object]:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The response."""
        return JSONResponse(self.to_json(), self.status, self.headers)


@contextlib.contextmanager
def blamed_on(param: str | None) -> Iterator[None]:
    """Turns errors that the library raises in the body into errors of a field."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ApiError(_json.line(str(error)), param=param) from error


async def answer_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own errors: no such path, another method."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {_json.shown_name(request.url.path)}: {error.detail}"
    return ApiError(words, status=error.status_code, headers=error.headers).response()


async def answer_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of everything else, which it then raises again, to be logged."""
    return ApiError("the server failed; its log says why", status=500).response()


MOST_BRACKETS = 500_000
"""Brackets that a body may have. Each may begin a list or an object, and while Python makes these,
some 0.2 µs each, no other thread runs."""


class Fields:
    """Reads a JSON object, in which null is the same as no field.

    `within` comes before the fields' names in errors, such as ``"stream_options."``.
    """

    def __init__(self, values: dict[str, Any], within: str = "") -> None:
        self._values = values
        self._within = within
        self._read = set[str]()

    @classmethod
    def of_body(cls, body: bytes) -> "Fields":
        """The fields of a body; ApiError if it is no JSON object, or has too many brackets."""
        if (count := body.count(b"[") + body.count(b"{")) > MOST_BRACKETS:
            raise ApiError(
                f"the body has {count} of [ and {{, must have at most {MOST_BRACKETS}",
                status=413,
                code="body_too_large",
            )
        try:
            values = _json.parse(body)
        except ValueError as error:  # bytes that are no UTF-8 among them
            raise ApiError(f"the body is not JSON: {_json.line(str(error))}") from error
        if not isinstance(values, dict):
            raise ApiError(f"the body is {_json.shown(values)}, must be a JSON object")
        return cls(values)

    def name(self, name: str) -> str:
        """A field's name as errors give it."""
        return self._within + name

    def error(self, name: str, requirement: str) -> ApiError:
        """Says that a field's value is not what it must be."""
        shown = _json.shown(self._values.get(name))
        return ApiError(f"{self.name(name)}={shown} must be {requirement}", param=self.name(name))

    def raw(self, name: str) -> Any:
        """A field as it is; None if it is not there."""
        self._read.add(name)
        return self._values.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "a text")
        return value

    def integer(self, name: str, least: int, most: int | None = None) -> int | None:
        """An integer within bounds, both included."""
        value = self.raw(name)
        if value is None:
            return None
        above = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not above or (most is not None and value > most):
            limits = f"of {least} or more" if most is None else f"within {least}..{most}"
            raise self.error(name, f"an integer {limits}")
        assert isinstance(value, int)
        return value

    def number(
        self,
        name: str,
        default: float,
        least: float = -math.inf,
        most: float = math.inf,
        *,
        positive: bool = False,
    ) -> float:
        """A finite number within bounds, both included; or above 0."""
        value = self.raw(name)
        if value is None:
            return default
        found = _finite(value)
        if found is None or not least <= found <= most or (positive and found <= 0):
            if positive:
                limits = " above 0" + ("" if most == math.inf else f" and at most {most:g}")
            elif most == math.inf:
                limits = "" if least == -math.inf else f" of {least:g} or more"
            else:
                limits = f" within {least:g}..{most:g}"
            raise self.error(name, f"a number{limits}")
        return found

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """One text or at most so many, none empty or of more than `longest` characters."""
        value = self.raw(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(x, str) and x for x in values):
            raise self.error(name, "a text or a list of texts, none of them empty")
        if len(values) > most:
            raise self.error(name, f"{most} texts at most")
        if max(map(len, values), default=0) > longest:
            raise self.error(name, f"of texts of {longest} characters at most")
        return tuple(values)

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A list of tokens."""
        value = self.raw(name)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(is_token(x, vocab_size) for x in values):
            raise self.error(name, f"a list of tokens within 0..{vocab_size - 1}")
        return tuple(values)

    def inner(self, name: str) -> "Fields | None":
        """An object inside this one."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.name(name)}.")

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Refuses a field, saying `why`, unless its value asks for what is done anyway."""
        value = self.raw(name)
        # True is 1 to Python, not to JSON.
        same = any(type(value) is type(x) and value == x for x in allowed)
        if value is not None and not same:
            shown = f"{self.name(name)}={_json.shown(value)}"
            raise ApiError(f"{shown}: {why}", param=self.name(name), code="unsupported_parameter")

    def refuse_others(self) -> None:
        """Refuses the first field that no method was asked for."""
        for name in self._values:
            if name not in self._read:
                shown = self.name(_json.shown_name(name))
                raise ApiError(f"{shown} is not known here", param=shown, code="unknown_parameter")


def is_token(value: object, vocab_size: int) -> bool:
    """Whether a value of JSON is a token of a vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _finite(value: object) -> float | None:
    """A value of JSON as a finite number, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


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

    def request(
        self, tokens: list[int], max_new_tokens: int, logprobs: int | None
    ) -> EngineRequest:
        """The engine's request for one prompt."""
        return EngineRequest(
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
