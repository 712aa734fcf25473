"""Many texts in, many texts out: what `turbojax serve` does around an engine."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from turbojax import _checks
from turbojax.app.serve.requests import PREFILL_CHUNK, TextRequest, longest
from turbojax.app.text_model import FoundModel, TextModel, than_bfloat16
from turbojax.models import TransformerConfig
from turbojax.models.engine import (
    Engine,
    EngineStatistics,
    Event,
    Finished,
    NewToken,
    Result,
    groups,
)
from turbojax.models.engine.pools import page_bytes
from turbojax.models.generation.stopping import TextStream
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.rotary import LongRopeScaling


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sizes of an engine that serves requests.

    Attributes:
      num_pages: of the pool.
      max_length: of its longest request.
      nbytes: of the pages of all layers.
    """

    num_pages: int
    max_length: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ServingReport:
    """What became of a file of requests.

    Attributes:
      requests: how many ran.
      kv_dtype: how pages were stored.
      page_size: tokens of a page.
      max_sequences: requests that ran at a time, at most.
      statistics: of the engine; None where nothing was left to run.
      kept: requests that had a result already.
      skipped: bad lines.
      uncompressed_layers: layers at either end whose pages were not compressed.
    """

    requests: int
    kv_dtype: str
    page_size: int
    max_sequences: int
    statistics: EngineStatistics | None = None
    kept: int = 0
    skipped: int = 0
    uncompressed_layers: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        held = self.statistics
        return {**own, "statistics": None if held is None else held.to_json()}

    def summary(self) -> str:
        """One line: speed, memory, and what the scheduler did."""
        parts = [f"{self.requests} requests"]
        edges = ""
        if self.uncompressed_layers:
            edges = f" ({self.uncompressed_layers} layers at either end uncompressed)"
        if (held := self.statistics) is not None:
            parts = [
                f"{self.requests} requests, {held.new_tokens:,} tokens, "
                f"{held.tokens_per_second:,.1f} tokens/s",
                f"{self.kv_dtype} pages{edges} for {held.token_capacity:,} tokens, "
                f"{held.pool_bytes:,} bytes ({than_bfloat16(held.compression_ratio)})",
                f"{held.reused_tokens:,} prompt tokens reused, {held.preemptions} preemptions",
            ]
        if self.kept:
            parts.append(f"{self.kept} had results already")
        if self.skipped:
            parts.append(f"{self.skipped} bad lines skipped")
        return "; ".join(parts)


def serve(
    model: TextModel,
    requests: Sequence[TextRequest],
    *,
    emit: Callable[[dict[str, Any]], None],
    progress: Callable[[int, int], None] | None = None,
    accepted: Callable[[], None] | None = None,
    done: Collection[str | int] = (),
    kv_dtype: str = "auto",
    uncompressed_layers: int = 0,
    page_size: int = 64,
    num_pages: int | None = None,
    pool_bytes: int | None = None,
    max_sequences: int = 8,
    prefill_chunk: int | None = None,
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
      progress: called after each step of the engine, the first of which compiles, with the number
        of new tokens, and of requests done, since the last call.
      accepted: called once, when nothing was wrong with any request and before the first one runs.
      done: ids of requests that do not run. Texts of the others do not depend on this: the engine
        is made for all.
      kv_dtype: see `Engine`, for the default as well.
      uncompressed_layers: see `Engine`.
      page_size: see `Engine`.
      num_pages: see `Engine`; by default enough for `max_sequences` of the longest requests, or for
        what their windows need where every layer has one.
      pool_bytes: instead, bytes that the pages of all layers take at most.
      max_sequences: see `Engine`.
      prefill_chunk: see `Engine`; see `plan`.
      cache_results: see `Engine`.
      implementation: see `Engine`.

    Raises:
      ValueError: if there is no request to run, a number does not fit, both sizes of the pool are
        given, or a request is too long; the message names its line.
      NotImplementedError: if the implementation asked for cannot run this.
    """
    running = [request for request in requests if request.id not in done]
    if not running:
        raise ValueError("there must be at least one request")
    decoder = model.decoder
    pool = plan(
        requests,
        decoder.config,
        decoder.dtype,
        kv_dtype=kv_dtype,
        uncompressed_layers=uncompressed_layers,
        page_size=page_size,
        num_pages=num_pages,
        pool_bytes=pool_bytes,
        max_sequences=max_sequences,
        prefill_chunk=prefill_chunk,
    )
    engine = Engine(
        decoder,
        num_pages=pool.num_pages,
        page_size=page_size,
        kv_dtype=kv_dtype,
        uncompressed_layers=uncompressed_layers,
        max_sequences=max_sequences,
        max_length=pool.max_length,
        prefill_chunk=PREFILL_CHUNK if prefill_chunk is None else prefill_chunk,
        cache_results=cache_results,
        implementation=implementation,
    )
    texts = {}
    for request in running:
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
            ended = sum(isinstance(event, Finished) for event in events)
            progress(sum(isinstance(event, NewToken) for event in events), ended)
    return ServingReport(
        len(running),
        kv_dtype,
        page_size,
        max_sequences,
        engine.statistics(),
        kept=len(requests) - len(running),
        uncompressed_layers=uncompressed_layers,
    )


def plan(
    requests: Sequence[TextRequest],
    config: TransformerConfig,
    dtype: np.dtype,
    *,
    kv_dtype: str,
    uncompressed_layers: int = 0,
    page_size: int,
    num_pages: int | None,
    pool_bytes: int | None,
    max_sequences: int,
    prefill_chunk: int | None,
) -> Pool:
    """The sizes of an engine for these requests, without making one.

    Args:
      requests: all, the longest of which counts.
      config: of the model.
      dtype: of the model.
      kv_dtype: see `serve`.
      uncompressed_layers: see there.
      page_size: see there.
      num_pages: see there.
      pool_bytes: see there.
      max_sequences: see there.
      prefill_chunk: see `Engine`; `PREFILL_CHUNK` by default. One that is larger than the longest
        sequence of the model, or than a pool whose size is given, could never be full.

    Raises:
      ValueError: if there is no request, or a number does not fit.
    """
    if not requests:
        raise ValueError("there must be at least one request")
    _checks.check_sizes(max_sequences=max_sequences, page_size=page_size)
    max_length = _max_length(requests, config)
    stored: dict[str, Any] = {"kv_dtype": kv_dtype, "uncompressed_layers": uncompressed_layers}
    sizes = _sizes(page_size, max_sequences, max_length, prefill_chunk)
    count = pages_of(
        config, dtype, sizes=sizes, num_pages=num_pages, pool_bytes=pool_bytes, **stored
    )
    if prefill_chunk is not None:
        _checks.check_sizes(prefill_chunk=prefill_chunk)
        limits = {"the longest sequence of the model": config.max_length}
        if count is not None:
            limits["what the pool holds"] = count * page_size
        for name, limit in limits.items():
            if prefill_chunk > limit:
                raise ValueError(f"{prefill_chunk=} must be at most {limit} tokens, {name}")
    windows = groups.windows_of(config, max_length)
    if count is None:
        together = dataclasses.replace(sizes, max_sequences=min(max_sequences, len(requests)))
        count = together.pages_of_all(windows[0])
    of_groups = zip(
        groups.pages_of_groups(windows, count, sizes),
        _page_bytes(config, dtype, page_size, windows, **stored),
        strict=True,
    )
    return Pool(count, max_length, sum(pages * size for pages, size in of_groups))


def _sizes(
    page_size: int, max_sequences: int, max_length: int, prefill_chunk: int | None
) -> groups.Sizes:
    chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
    return groups.Sizes(page_size, max_sequences, max_length, chunk)


def _page_bytes(
    config: TransformerConfig,
    dtype: np.dtype,
    page_size: int,
    windows: groups.Windows,
    **stored: Any,
) -> list[int]:
    """Of each group of layers the bytes of a page of all of them."""
    return [
        page_bytes(config, dtype, page_size, layers=layers, **stored)
        for layers in groups.layers_of(config, windows)
    ]


def model_name(
    found: FoundModel,
    requests: Sequence[TextRequest],
    kv_dtype: str,
    uncompressed_layers: int = 0,
) -> str:
    """A text that differs where texts of equal requests may: for `requests.digest`.

    Models are told apart by shape and size. With LongRoPE it also counts which factors the engine
    takes, which follows from the longest request.

    Args:
      found: the model.
      requests: all that the engine is made for.
      kv_dtype: see `Engine`.
      uncompressed_layers: see `Engine`.
    """
    config = found.config
    name = f"{_shape(config)} {found.dtype} {found.weight_bytes} {kv_dtype}"
    if uncompressed_layers:
        name += f" {uncompressed_layers} uncompressed"
    if not isinstance(config.rope_scaling, LongRopeScaling):
        return name
    long = _max_length(requests, config) > config.rope_scaling.original_max_length
    return f"{name} {'long' if long else 'short'} factors"


def _shape(config: TransformerConfig) -> str:
    """A model's configuration in words that stay the same from one version to the next.

    Results that an earlier version wrote hold a digest of them, and --resume must go on from these.
    So the configuration goes by the name that it had when the first such file was written.
    """
    return f"LlamaConfig({', '.join(f'{name}={x!r}' for name, x in config.told().items())})"


def pages_of(
    config: TransformerConfig,
    dtype: np.dtype,
    kv_dtype: str,
    num_pages: int | None,
    pool_bytes: int | None,
    *,
    sizes: groups.Sizes,
    uncompressed_layers: int = 0,
) -> int | None:
    """How many pages the pool is asked to have; None where that follows from the requests.

    Args:
      config: of the model.
      dtype: of the model.
      kv_dtype: see `Engine`.
      num_pages: what is asked for.
      pool_bytes: or bytes of all layers' pages: those with a window get what they need at most, see
        `Engine`, and the others the rest.
      sizes: of the engine; of its requests, which may not be known yet, at most.
      uncompressed_layers: see `Engine`.

    Raises:
      ValueError: if both are given, a size does not fit, or not one page fits into the bytes.
    """
    if num_pages is not None and pool_bytes is not None:
        raise ValueError("give the number of pages or the bytes of the pool, one of them")
    if num_pages is not None:
        _checks.check_sizes(num_pages=num_pages)
    if pool_bytes is None:
        return num_pages
    _checks.check_sizes(pool_bytes=pool_bytes)
    windows = groups.windows_of(config, sizes.max_length)
    needed = _page_bytes(
        config,
        dtype,
        sizes.page_size,
        windows,
        kv_dtype=kv_dtype,
        uncompressed_layers=uncompressed_layers,
    )
    if pool_bytes < sum(needed):
        raise ValueError(f"{pool_bytes=} must be at least {sum(needed)}, the bytes of one page")
    return groups.most_first_pages(pool_bytes, needed, windows, sizes)


def sizes_before(
    config: TransformerConfig, page_size: int, max_sequences: int, prefill_chunk: int | None
) -> groups.Sizes:
    """The sizes for `pages_of` where the requests are not known, which may be as long as any."""
    return _sizes(page_size, max_sequences, config.max_length, prefill_chunk)


def _max_length(requests: Sequence[TextRequest], config: TransformerConfig) -> int:
    """The `max_length` of an engine for these requests."""
    return min(longest(requests), config.max_length)


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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
