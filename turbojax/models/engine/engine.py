"""`Engine`: many requests through one model and one pool of pages, with continuous batching."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, paged
from turbojax.models.decoder import Decoder, for_length, unstack, warn_of_long_factors
from turbojax.models.engine import compilation, swap
from turbojax.models.engine.requests import (
    Event,
    Finished,
    FinishReason,
    NewToken,
    Request,
    Result,
)
from turbojax.models.engine.sampling import choose
from turbojax.models.engine.scheduler import Plan, Scheduler, Sequence, Status
from turbojax.models.engine.statistics import EngineStatistics
from turbojax.models.engine.step import Work, check_implementation, idle_work, run_step
from turbojax.models.llama import Llama
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.sampling import NOTHING, kind_of


@dataclasses.dataclass
class _Times:
    added: float
    started: float | None = None
    first_token: float | None = None


@dataclasses.dataclass
class _Counts:
    steps: int = 0
    first_step_seconds: float = 0.0
    first_step_tokens: int = 0
    seconds: float = 0.0
    new_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefix_hits: int = 0
    finished: int = 0


@dataclasses.dataclass
class _InFlight:
    """A step that was given to the device.

    Attributes:
      rows: which sequence's next token is in which row of `tokens`.
      tokens: int32 ``[S + 1]``.
      lost: int32 ``[]``.
    """

    rows: list[tuple[int, Sequence]]
    tokens: jax.Array
    lost: jax.Array


class Engine:
    """Runs requests that come at any time through one model and one paged cache.

    Every step runs one token of each sequence that is generating, and a piece of one prompt: always
    the same compiled program of the model, whatever the mix. A second one, small, chooses tokens:
    one of three, by what the requests that run ask for. Prompts attend to the pages, that is to
    keys and values as the cache stores them, like the tokens after them.

    A request's text depends on its own tokens and options, and on the engine's settings (such as
    `max_sequences`, `prefill_chunk` and `implementation`, which make other programs). It does not
    depend on what else runs, on the order of arrival, on the size of the pool, on prefixes found
    there or on having left it for a while.

    A request gets pages as it needs them. Where the pool is full, the youngest running request is
    swapped out to host memory, and continues later with the same bits. Full pages of prompts stay
    in the pool as long as the space is not needed, and are found by later requests that begin with
    the same tokens.

    A step is given to the device before the tokens of the one before are read, so events come with
    the next call of `step`. An engine is for one thread; an exception inside `step` ends it.

    Args:
      model: the model, quantized or not. A `Llama` is unstacked first, see `start`.
      num_pages: pages of each layer's pool.
      page_size: tokens of a page: 16, 32, 64 or 128.
      kv_dtype: how pages are stored: ``"auto"`` (the model's dtype), ``"fp8_e4m3"``,
        ``"fp8_e5m2"`` or ``"turbo4"``, see `PagedCache`. By default nothing is compressed, so that
        texts are exactly the model's; `init_paged_cache`, whose purpose is compression, has another
        default.
      max_sequences: requests that run at a time.
      max_length: tokens of prompt and result of a request at most; by default the model's. By it
        LongRoPE chooses its factors, for all requests alike, as they may share pages.
      prefill_chunk: tokens of a prompt that run in a step.
      prefix_caching: whether pages are kept for requests that begin with the same tokens.
      cache_results: whether pages of results are kept, too, for instance for the next turn of a
        conversation. A text that continues one may then differ in rounding from one that ran alone,
        where single tokens and prompts run in different kernels.
      key_scale: see `init_paged_cache`.
      value_scale: see `init_paged_cache`.
      seed: of turbo4's rotation, see `init_paged_cache`. Sampling has seeds of its own.
      implementation: of `paged_attention`; None to choose.

    Raises:
      TypeError: if the model or a number is of the wrong kind.
      ValueError: if a number does not fit, or a name is unknown.
      NotImplementedError: if the implementation asked for cannot run the engine's step here.
    """

    def __init__(
        self,
        model: Llama | Decoder | QuantizedDecoder,
        *,
        num_pages: int,
        page_size: int = 64,
        kv_dtype: str = "auto",
        max_sequences: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 64,
        prefix_caching: bool = True,
        cache_results: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        seed: int = 0,
        implementation: str | None = None,
    ) -> None:
        if not isinstance(model, Llama | Decoder | QuantizedDecoder):
            raise TypeError(
                f"model is a {type(model).__name__}, must be a Llama, Decoder or QuantizedDecoder"
            )
        self.max_length = model.config.max_length if max_length is None else max_length
        _checks.check_sizes(
            max_sequences=max_sequences, max_length=self.max_length, prefill_chunk=prefill_chunk
        )
        if self.max_length > model.config.max_length:
            raise ValueError(f"{max_length=} must be at most the model's {model.config.max_length}")
        if cache_results and not prefix_caching:
            raise ValueError(f"{cache_results=} has no use with {prefix_caching=}")
        self._caches = tuple(
            paged.init_cache(
                num_pages,
                page_size,
                model.config.num_kv_heads,
                model.config.head_dim,
                kv_dtype=kv_dtype,
                dtype=model.dtype,
                key_scale=key_scale,
                value_scale=value_scale,
                seed=seed,
            )
            for _ in range(model.config.num_layers)
        )
        decoder = unstack(model) if isinstance(model, Llama) else model
        self._decoder = for_length(decoder, self.max_length)
        self._implementation = implementation
        self._max_pages = -(-self.max_length // page_size)
        self._slots, self._chunk = max_sequences, prefill_chunk
        work = idle_work(max_sequences, prefill_chunk, self._max_pages)
        check_implementation(implementation, work, self._caches[0], self._decoder.config.num_heads)
        self._allocator = paged.PageAllocator(num_pages, page_size)
        prefixes = paged.PrefixCache(self._allocator) if prefix_caching else None
        self._scheduler = Scheduler(
            self._allocator, prefixes, max_sequences, prefill_chunk, cache_results=cache_results
        )
        self._last_tokens = jnp.zeros(max_sequences, jnp.int32)
        self._sequences: dict[int, Sequence] = {}
        self._times: dict[int, _Times] = {}
        self._swapped: dict[int, swap.Content] = {}
        self._in_flight: _InFlight | None = None
        self._events: list[Event] = []
        self._next_id = 0
        self._counts = _Counts()

    @property
    def idle(self) -> bool:
        """Whether every request is done and every event was handed out."""
        return not self._sequences and not self._events and self._in_flight is None

    def add(self, request: Request) -> int:
        """Queues a request.

        Args:
          request: what to continue, and how.

        Returns:
          Its number, counted from 0 in the order of arrival.

        Raises:
          TypeError: if it is not a `Request`.
          ValueError: if a token is not in the vocabulary, or prompt and result are longer than
            `max_length` or than the whole pool.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request is a {type(request).__name__}, must be a Request")
        vocabulary = self._decoder.config.vocab_size
        for token in (*request.tokens, *request.stop_tokens):
            if not 0 <= token < vocabulary:
                raise ValueError(f"{token=} of a request must be within 0..{vocabulary - 1}")
        parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
        if request.total > self.max_length:
            raise ValueError(f"{parts} must be at most max_length={self.max_length}")
        # The last token is never fed, so it needs no place.
        pages = -(-(request.total - 1) // self._allocator.page_size)
        if pages > self._caches[0].num_pages:
            raise ValueError(
                f"{parts} need {pages} pages, must be at most num_pages={self._caches[0].num_pages}"
            )
        config = self._decoder.config
        warn_of_long_factors(config, len(request.tokens), self.max_length, stacklevel=2)
        sequence = Sequence(self._next_id, request)
        self._next_id += 1
        self._sequences[sequence.request_id] = sequence
        self._times[sequence.request_id] = _Times(time.perf_counter())
        self._scheduler.add(sequence)
        return sequence.request_id

    def abort(self, request_id: int, *, reason: Literal["aborted", "stop"] = "aborted") -> None:
        """Ends a request now; it keeps the tokens announced so far.

        Args:
          request_id: which.
          reason: what its result says: ``"stop"`` where the caller found the end in the text.

        Raises:
          KeyError: if there is no such request, or it is done.
          ValueError: if there is no such reason.
        """
        if reason not in ("aborted", "stop"):
            raise ValueError(f"{reason=} must be 'aborted' or 'stop'")
        if request_id not in self._sequences:
            raise KeyError(f"request {request_id} is not known, or is done")
        self._finish(self._sequences[request_id], reason)

    def step(self) -> list[Event]:
        """Gives the device the next step and reads the tokens of the one before.

        Returns:
          What happened since the last call, in order.
        """
        begun, compiled = time.perf_counter(), compilation.count()
        tokens = self._counts.new_tokens
        plan = self._scheduler.plan()
        # Nothing waits for the device before it has the next step.
        leaving = self._swap(plan)
        previous, self._in_flight = self._in_flight, self._dispatch(plan)
        for request_id, copies in leaving.items():
            self._swapped[request_id] = swap.fetch(copies)
        if previous is not None:
            self._collect(previous)
        for sequence in list(self._scheduler.running):
            # Nothing is left to feed; the last token is on its way.
            if sequence.sampled == sequence.request.max_new_tokens:
                self._scheduler.release(sequence, Status.LEFT)
        events, self._events = self._events, []
        seconds = time.perf_counter() - begun
        if compilation.count() > compiled:
            self._counts.first_step_seconds += seconds
            self._counts.first_step_tokens += self._counts.new_tokens - tokens
        else:
            self._counts.seconds += seconds
        return events

    def stream(self) -> Iterator[Event]:
        """Steps until all requests are done, those included that are added meanwhile.

        Yields:
          Events as they come.
        """
        while not self.idle:
            yield from self.step()

    def run(self, progress: Callable[[int], None] | None = None) -> dict[int, Result]:
        """Steps until all requests are done.

        Args:
          progress: called after every step with the number of new tokens.

        Returns:
          The results of all requests that ended in this call, by number.
        """
        results = {}
        while not self.idle:
            events = self.step()
            results.update({e.request_id: e.result for e in events if isinstance(e, Finished)})
            if progress is not None:
                progress(sum(isinstance(event, NewToken) for event in events))
        return results

    def statistics(self) -> EngineStatistics:
        """What was done so far, and what is held now."""
        scheduler, cache, layers = self._scheduler, self._caches[0], len(self._caches)
        return EngineStatistics(
            **dataclasses.asdict(self._counts),
            preemptions=scheduler.preemptions,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            swapped=len(scheduler.swapped),
            swapped_bytes=sum(swap.nbytes(content) for content in self._swapped.values()),
            pages=cache.num_pages,
            free_pages=self._allocator.num_free,
            cached_pages=scheduler.cached_pages(),
            tokens_held=scheduler.held_tokens(),
            token_capacity=cache.num_pages * cache.page_size,
            pool_bytes=sum(layer.nbytes for layer in self._caches),
            token_bytes=layers * cache.token_bytes,
            compression_ratio=cache.compression_ratio,
        )

    def _swap(self, plan: Plan) -> dict[int, list[Any]]:
        """Everything that leaves is read before a page of it can be written."""
        leaving = {s.request_id: swap.read(self._caches, pages) for s, pages in plan.leaving}
        for sequence, pages in plan.returning:
            content = self._swapped.pop(sequence.request_id)
            self._caches = swap.write(self._caches, pages, content)
        return leaving

    def _dispatch(self, plan: Plan) -> _InFlight | None:
        """Gives the device a step; the sequences advance."""
        if plan.empty:
            return None
        work = idle_work(self._slots, self._chunk, self._max_pages)
        rows = []
        for sequence in plan.decoding:
            self._fill_row(work, sequence.slot, sequence, 1)
            if sequence.override:
                work.tokens[sequence.slot] = sequence.new_tokens[-1]
                sequence.override = False
            sequence.held += 1
            sequence.sampled += 1
            rows.append((sequence.slot, sequence))
        if plan.piece is not None:
            sequence, count = plan.piece
            self._fill_row(work, self._slots, sequence, count)
            work.piece[:count] = sequence.request.tokens[sequence.held : sequence.held + count]
            self._advance_prompt(sequence, count)
            if not sequence.prefilling:
                work = dataclasses.replace(work, piece_slot=np.int32(sequence.slot))
                sequence.sampled += 1
                rows.append((self._slots, sequence))
        self._caches, logits, lost = run_step(
            self._decoder,
            self._caches,
            self._last_tokens,
            work,
            implementation=self._implementation,
        )
        kind = kind_of(sequence.request.sampling for _, sequence in rows)
        tokens, self._last_tokens = choose(
            logits, self._last_tokens, work.counts, work.piece_slot, work.sampling, kind=kind
        )
        self._counts.steps += 1
        return _InFlight(rows, tokens, lost)

    def _fill_row(self, work: Work, row: int, sequence: Sequence, count: int) -> None:
        work.tables[row] = self._allocator.block_tables([sequence.handle], self._max_pages)[0]
        work.lengths[row] = sequence.held
        work.counts[row] = count
        work.sampling.set(row, sequence.request.sampling, sequence.sampled)

    def _advance_prompt(self, sequence: Sequence, count: int) -> None:
        times = self._times[sequence.request_id]
        if times.started is None:
            times.started = time.perf_counter()
            self._counts.reused_tokens += sequence.reused
            self._counts.prefix_hits += sequence.reused > 0
        sequence.held += count
        self._counts.prompt_tokens += count
        if not sequence.prefilling:
            # Whoever finds these pages reads them in a later step.
            self._scheduler.keep_prefix(sequence)

    def _collect(self, step: _InFlight) -> None:
        """Waits for a step's tokens."""
        tokens, lost = jax.device_get((step.tokens, step.lost))
        # Of the first layer: all layers write to the same places.
        if lost:
            raise AssertionError(f"the pool lost {lost} tokens: a page was missing")
        for row, sequence in step.rows:
            if sequence.status is Status.DONE:
                continue  # it ended while this step ran
            token = int(tokens[row])
            if token == NOTHING:
                self._finish(sequence, "failed")
                continue
            self._times[sequence.request_id].first_token = (
                self._times[sequence.request_id].first_token or time.perf_counter()
            )
            self._events.append(NewToken(sequence.request_id, len(sequence.new_tokens), token))
            sequence.new_tokens.append(token)
            self._counts.new_tokens += 1
            if token in sequence.request.stop_tokens:
                self._finish(sequence, "stop")
            elif len(sequence.new_tokens) == sequence.request.max_new_tokens:
                self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.release(sequence, Status.DONE)
        self._swapped.pop(sequence.request_id, None)
        del self._sequences[sequence.request_id]
        times, now = self._times.pop(sequence.request_id), time.perf_counter()
        first = times.first_token
        self._counts.finished += 1
        result = Result(
            tokens=tuple(sequence.new_tokens),
            finish_reason=reason,
            prompt_tokens=len(sequence.request.tokens),
            reused_tokens=sequence.reused,
            preemptions=sequence.preemptions,
            waited_seconds=(times.started or now) - times.added,
            first_token_seconds=None if first is None else first - times.added,
            seconds=now - times.added,
        )
        self._events.append(Finished(sequence.request_id, result))
