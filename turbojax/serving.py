"""Many texts in, many texts out: what `turbojax serve` does around an engine."""

import codecs
import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import jax

from turbojax import _checks, paged
from turbojax.models import Decoder, QuantizedDecoder
from turbojax.models.engine import (
    Engine,
    EngineStatistics,
    Event,
    Finished,
    NewToken,
    Request,
    Result,
    Sampling,
)
from turbojax.models.stopping import TextStream, check_stops
from turbojax.models.tokenizer import Tokenizer
from turbojax.text import TextModel, than_bfloat16

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_KEYS = ("id", "prompt", "max_new_tokens", "stop", *_SAMPLING)


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
class ServingReport:
    """What became of a file of requests.

    Attributes:
      requests: how many.
      kv_dtype: how pages were stored.
      page_size: tokens of a page.
      max_sequences: requests that ran at a time, at most.
      statistics: of the engine.
    """

    requests: int
    kv_dtype: str
    page_size: int
    max_sequences: int
    statistics: EngineStatistics

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "statistics": self.statistics.to_json()}

    def summary(self) -> str:
        """One line: speed, memory, and what the scheduler did."""
        held = self.statistics
        return (
            f"{self.requests} requests, {held.new_tokens:,} tokens, "
            f"{held.tokens_per_second:,.1f} tokens/s; {self.kv_dtype} pages for "
            f"{held.token_capacity:,} tokens, {held.pool_bytes:,} bytes "
            f"({than_bfloat16(held.compression_ratio)}); "
            f"{held.reused_tokens:,} prompt tokens reused, {held.preemptions} preemptions"
        )


def read_requests(content: bytes, tokenizer: Tokenizer, max_new_tokens: int) -> list[TextRequest]:
    r"""The requests of a file in JSON lines.

    A line is an object with `prompt`, and optionally `id` (a string or an integer; by default the
    line's number), `max_new_tokens`, `stop` (texts, and tokens as integers, in addition to those
    with which the tokenizer ends every text), `temperature`, `top_k`, `top_p`, `min_p` and `seed`
    (by default the line's number, so that equal prompts differ; see `Sampling`). Empty lines are
    skipped.

    Args:
      content: UTF-8 text.
      tokenizer: what turns prompts into tokens.
      max_new_tokens: of lines that do not say.

    Raises:
      ValueError: naming the line: if it is no such object, or its values do not fit. If there is no
        request.
    """
    requests, lines = list[TextRequest](), dict[str | int, int]()
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
            raise ValueError(f"line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"line {number}: must not be nested so deep") from error
        lines[found.id] = number
        requests.append(found)
    if not requests:
        raise ValueError("there must be at least one request")
    return requests


def serve(
    model: TextModel,
    requests: list[TextRequest],
    *,
    emit: Callable[[dict[str, Any]], None],
    progress: Callable[[int, int], None] | None = None,
    accepted: Callable[[], None] | None = None,
    kv_dtype: str = "auto",
    page_size: int = 64,
    num_pages: int | None = None,
    pool_bytes: int | None = None,
    max_sequences: int = 8,
    prefill_chunk: int = 64,
    cache_results: bool = False,
    implementation: str | None = None,
) -> ServingReport:
    """Runs requests through an engine.

    A result's `tokens` are all that were generated: those of the stop text, which its `text` leaves
    out, included.

    Args:
      model: what generates.
      requests: what to continue.
      emit: called with each result as soon as there is one, as plain JSON values.
      progress: called with the number of new tokens, and of requests done, since the last call.
      accepted: called once, when nothing was wrong with any request and before the first one runs.
      kv_dtype: see `Engine`, for the default as well.
      page_size: see `Engine`.
      num_pages: see `Engine`; by default enough for `max_sequences` of the longest requests.
      pool_bytes: instead, bytes that the pages of all layers take at most.
      max_sequences: see `Engine`.
      prefill_chunk: see `Engine`.
      cache_results: see `Engine`.
      implementation: see `Engine`.

    Raises:
      ValueError: if there is no request, a number does not fit, both sizes of the pool are given,
        or a request is too long; the message names its line.
      NotImplementedError: if the implementation asked for cannot run this.
    """
    if not requests:
        raise ValueError("there must be at least one request")
    _checks.check_sizes(max_sequences=max_sequences, page_size=page_size)
    longest = max(r.request.total for r in requests)
    largest = model.decoder.config.max_length
    if num_pages is not None and pool_bytes is not None:
        raise ValueError("give the number of pages or the bytes of the pool, one of them")
    if pool_bytes is not None:
        num_pages = pages_within(model.decoder, pool_bytes, page_size, kv_dtype)
    elif num_pages is None:
        sequences = min(max_sequences, len(requests))
        num_pages = sequences * -(-min(longest, largest) // page_size)
    engine = Engine(
        model.decoder,
        num_pages=num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        max_sequences=max_sequences,
        max_length=min(longest, largest),
        prefill_chunk=prefill_chunk,
        cache_results=cache_results,
        implementation=implementation,
    )
    texts = {}
    for request in requests:
        try:
            texts[engine.add(request.request)] = _Text(request, model.tokenizer)
        except ValueError as error:
            raise ValueError(f"line {request.line}: {error}") from error
    if accepted is not None:
        accepted()
    while not engine.idle:
        events = engine.step()
        _follow(engine, events, texts, emit)
        if progress is not None:
            done = sum(isinstance(event, Finished) for event in events)
            progress(sum(isinstance(event, NewToken) for event in events), done)
    return ServingReport(len(requests), kv_dtype, page_size, max_sequences, engine.statistics())


def pages_within(
    decoder: Decoder | QuantizedDecoder, pool_bytes: int, page_size: int, kv_dtype: str
) -> int:
    """How many pages of all layers fit into this many bytes.

    Args:
      decoder: the model.
      pool_bytes: bytes of all layers' pages.
      page_size: tokens of a page.
      kv_dtype: see `Engine`.

    Raises:
      ValueError: if it is not one, or a size does not fit.
    """
    _checks.check_sizes(pool_bytes=pool_bytes)
    config = decoder.config
    one_page = jax.eval_shape(
        lambda: paged.init_cache(
            1,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype=kv_dtype,
            dtype=decoder.dtype,
        )
    )
    needed = config.num_layers * one_page.page_bytes
    if pool_bytes < needed:
        raise ValueError(f"{pool_bytes=} must be at least {needed}, the bytes of one page")
    return pool_bytes // needed


class _Text:
    """The text of a request as its tokens come."""

    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        decode = tokenizer.stream(list(request.request.tokens))
        self._text = TextStream(decode, request.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._text.stopped

    def add(self, token: int | None) -> None:
        """Adds a token's text, None ends it; a stop token has none."""
        if token not in self.request.request.stop_tokens:
            self._text.add(token)

    def to_json(self, result: Result) -> dict[str, Any]:
        """The request's line of results."""
        return {
            "id": self.request.id,
            "text": self._text.text,
            "tokens": list(result.tokens),
            "finish_reason": "stop" if self.stopped else result.finish_reason,
            "seconds": round(result.seconds, 6),
            "first_token_seconds": _rounded(result.first_token_seconds),
            "prompt_tokens": result.prompt_tokens,
            "reused_tokens": result.reused_tokens,
            "preemptions": result.preemptions,
        }


def _follow(
    engine: Engine,
    events: Iterable[Event],
    texts: dict[int, _Text],
    emit: Callable[[dict[str, Any]], None],
) -> None:
    """Adds new tokens to the texts, ends requests at stop texts, and hands out results."""
    done = {event.request_id for event in events if isinstance(event, Finished)}
    for event in events:
        text = texts[event.request_id]
        if isinstance(event, Finished):
            text.add(None)
            emit(text.to_json(event.result))
            del texts[event.request_id]
            continue
        text.add(event.token)
        if text.stopped and event.request_id not in done:
            engine.abort(event.request_id, reason="stop")


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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
