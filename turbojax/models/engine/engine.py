"""`Engine`: many requests through one model and one pool of pages, with continuous batching."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.models.decoder import Decoder, for_length, unstack, warn_of_long_factors
from turbojax.models.engine import compilation, groups, pools, swap
from turbojax.models.engine.guard import Guard
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
from turbojax.models.engine.statistics import Counts, EngineStatistics, Times, statistics_of
from turbojax.models.engine.step import Work, check_implementation, idle_work, run_step
from turbojax.models.generation.sampling import NOTHING, kind_of
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.models.transformer import Transformer


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

    Layers whose sliding windows differ have pages of their own: those of a window are freed as it
    moves on, so that a request holds what its windows need.

    A request gets pages as it needs them. Where the pool is full, the youngest running request is
    swapped out to host memory, and continues later with the same bits. Full pages of prompts stay
    in the pool as long as the space is not needed, and are found by later requests that begin with
    the same tokens.

    A step is given to the device before the tokens of the one before are read, so events come with
    the next call of `step`.

    An exception inside a step ends the engine, whatever it is, Ctrl-C included, and so does one
    while a request is added or aborted: every later call, `idle` and `statistics` included, raises
    ``RuntimeError("this engine has ended: ...")`` with the first cause. Arguments that are refused
    end nothing. Between steps the engine may be left at any time, by an exception of `progress`, by
    closing what `stream` gave, by Ctrl-C there: what was not handed out comes with the next call.

    An engine is for one thread at a time. A call while another thread is inside one, or in `run`,
    raises RuntimeError and changes nothing.

    Args:
      model: the model, quantized or not. A `Transformer` is unstacked first, see `start`.
      num_pages: pages of each layer's pool; where some layers see further back than others, of
        those that see furthest.
      window_pages: pages of the pools of all other layers, see `num_pages`; by default what
        `max_sequences` requests need at most, but no more than `num_pages`.
      page_size: tokens of a page: 16, 32, 64 or 128.
      kv_dtype: how pages are stored: ``"auto"`` (the model's dtype), ``"fp8_e4m3"``,
        ``"turbo4"``, ``"k8v4"`` .., see `PagedCache`; of a model with latent attention ``"auto"``,
        ``"fp8_e4m3"`` or ``"turbo4"``, see `LatentPages`. By default nothing is compressed, so that
        texts are exactly the model's; `init_paged_cache`, whose purpose is compression, has another
        default.
      uncompressed_layers: how many of the first and of the last layers have pages in the model's
        dtype all the same; they lose most in many models.
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
      seed: of the codes' rotation, see `init_paged_cache`. Sampling has seeds of its own.
      implementation: of attention to pages; None to choose.
      tokenizer: what turns tokens into the text in which requests' `stop_strings` are looked for;
        needed for those and nothing else.

    Raises:
      TypeError: if the model or a number is of the wrong kind.
      ValueError: if a number does not fit, or a name is unknown.
      NotImplementedError: if the implementation asked for cannot run the engine's step here.
    """

    def __init__(
        self,
        model: Transformer | Decoder | QuantizedDecoder,
        *,
        num_pages: int,
        window_pages: int | None = None,
        page_size: int = 64,
        kv_dtype: str = "auto",
        uncompressed_layers: int = 0,
        max_sequences: int = 8,
        max_length: int | None = None,
        prefill_chunk: int = 64,
        prefix_caching: bool = True,
        cache_results: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        seed: int = 0,
        implementation: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not isinstance(model, Transformer | Decoder | QuantizedDecoder):
            raise TypeError(
                f"model is a {type(model).__name__}, must be a Transformer, Decoder or "
                "QuantizedDecoder"
            )
        self.max_length = model.config.max_length if max_length is None else max_length
        sizes = groups.Sizes(page_size, max_sequences, self.max_length, prefill_chunk)
        if self.max_length > model.config.max_length:
            raise ValueError(f"{max_length=} must be at most the model's {model.config.max_length}")
        if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, must be at most the model's "
                f"{model.config.vocab_size}"
            )
        if cache_results and not prefix_caching:
            raise ValueError(f"{cache_results=} has no use with {prefix_caching=}")
        windows = groups.windows_of(model.config, self.max_length)
        pages = groups.pages_of_groups(windows, num_pages, sizes, window_pages)
        self._caches = pools.init_pools(
            model.config,
            model.dtype,
            pools.pages_of_layers(model.config, windows, pages),
            page_size,
            kv_dtype=kv_dtype,
            uncompressed_layers=uncompressed_layers,
            key_scale=key_scale,
            value_scale=value_scale,
            seed=seed,
        )
        decoder = unstack(model) if isinstance(model, Transformer) else model
        self._decoder = for_length(decoder, self.max_length)
        self._implementation, self._tokenizer = implementation, tokenizer
        self._max_pages = -(-self.max_length // page_size)
        self._slots, self._chunk = max_sequences, prefill_chunk
        self._windows = windows
        work = idle_work(max_sequences, prefill_chunk, self._max_pages, len(windows))
        # One of each way to store pages: the first and last layers may have another.
        for cache in {cache.kv_dtype: cache for cache in self._caches}.values():
            check_implementation(implementation, work, cache, self._decoder.config.num_heads)
        self._groups = groups.new_groups(
            model.config, windows, pages, page_size, prefix_caching=prefix_caching
        )
        self._scheduler = Scheduler(
            self._groups, max_sequences, prefill_chunk, cache_results=cache_results
        )
        self._last_tokens = jnp.zeros(max_sequences, jnp.int32)
        self._sequences: dict[int, Sequence] = {}
        self._times: dict[int, Times] = {}
        self._swapped: dict[int, list[swap.Content]] = {}
        self._in_flight: _InFlight | None = None
        self._events: collections.deque[Event] = collections.deque()
        self._next_id = 0
        self._counts = Counts()
        self._guard = Guard()

    @property
    def idle(self) -> bool:
        """Whether every request is done and every event was handed out.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        return not self._sequences and not self._events and self._in_flight is None

    def add(self, request: Request) -> int:
        """Queues a request.

        Args:
          request: what to continue, and how.

        Returns:
          Its number, counted from 0 in the order of arrival.

        Raises:
          TypeError: if it is not a `Request`.
          ValueError: if a token is not in the vocabulary, prompt and result are longer than
            `max_length` or than the whole pool, or there are `stop_strings` and no tokenizer.
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        if not isinstance(request, Request):
            raise TypeError(f"request is a {type(request).__name__}, must be a Request")
        vocabulary = self._decoder.config.vocab_size
        for token in (*request.tokens, *request.stop_tokens):
            if not 0 <= token < vocabulary:
                raise ValueError(f"{token=} of a request must be within 0..{vocabulary - 1}")
        parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
        if request.total > self.max_length:
            raise ValueError(f"{parts} must be at most max_length={self.max_length}")
        for group in self._groups:
            pages, there = group.pages_of(request, self._chunk), group.allocator.num_pages
            if pages > there:
                name = "num_pages" if group is self._groups[0] else "window_pages"
                raise ValueError(f"{parts} need {pages} pages, must be at most {name}={there}")
        stops, text = self._stops(request)
        config = self._decoder.config
        warn_of_long_factors(config, len(request.tokens), self.max_length, stacklevel=2)
        return self._guard.change("add", lambda: self._queue(request, stops, text))

    def abort(self, request_id: int, *, reason: Literal["aborted", "stop"] = "aborted") -> None:
        """Ends a request now; it keeps the tokens announced so far.

        Args:
          request_id: which.
          reason: what its result says: ``"stop"`` where the caller found the end in the text.

        Raises:
          KeyError: if there is no such request, or it is done.
          ValueError: if there is no such reason.
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        if reason not in ("aborted", "stop"):
            raise ValueError(f"{reason=} must be 'aborted' or 'stop'")
        if not self._guard.change("abort", lambda: self._abort(request_id, reason)):
            raise KeyError(f"request {request_id} is not known, or is done")

    def step(self) -> list[Event]:
        """Gives the device the next step and reads the tokens of the one before.

        Returns:
          What happened and was not handed out before, in order.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        return self._guard.change("step", self._step)

    def stream(self) -> Iterator[Event]:
        """Steps until all requests are done, those included that are added meanwhile.

        It may be left at any event: the others come with the next call of this, `step` or `run`.

        Yields:
          Events as they come.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        while not self.idle:
            if not self._events:
                self._guard.change("stream", self._advance)
            while self._events:
                self._guard.check()
                event = self._events[0]
                # Nothing can interrupt between these two, see `Guard`.
                del self._events[0]; yield event  # fmt: skip  # noqa: E702

    def run(self, progress: Callable[[int], None] | None = None) -> dict[int, Result]:
        """Steps until all requests are done.

        Where an exception of `progress`, or Ctrl-C between two steps, leaves it, a later `run` goes
        on and returns the results of this one, too. `step` and `stream` then begin with them, and
        with the tokens so far of requests that are not done.

        Args:
          progress: called after every step with the number of new tokens. It may add and abort
            requests, and must not call `run`.

        Returns:
          The results of all requests that ended and were not handed out before, by number.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        done = self._guard.keep_others_out("run", lambda: self._run(progress))
        results, self._events = done; return results  # fmt: skip  # noqa: E702

    def statistics(self) -> EngineStatistics:
        """What was done so far, and what is held now.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        return statistics_of(
            self._counts, self._scheduler, self._groups, self._caches, list(self._swapped.values())
        )

    def _stops(self, request: Request) -> tuple[frozenset[int], TextStream | None]:
        """The tokens that end a request, and where texts do, what looks for them."""
        tokens, strings = check_stops(request.stop_tokens, request.stop_strings, self._tokenizer)
        if not strings or self._tokenizer is None:
            return tokens, None
        return tokens, TextStream(self._tokenizer.stream(request.tokens), strings)

    def _queue(self, request: Request, stops: frozenset[int], text: TextStream | None) -> int:
        sequence = Sequence(self._next_id, request, stops, text)
        self._next_id += 1
        self._sequences[sequence.request_id] = sequence
        self._times[sequence.request_id] = Times(time.perf_counter())
        self._scheduler.add(sequence)
        return sequence.request_id

    def _abort(self, request_id: int, reason: FinishReason) -> bool:
        """Ends a request; False if there is none."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence is not None

    def _step(self) -> list[Event]:
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def _run(
        self, progress: Callable[[int], None] | None
    ) -> tuple[dict[int, Result], collections.deque[Event]]:
        """The results, and the events that are left once these are handed out."""
        while self._sequences or self._in_flight is not None:
            tokens, finished = self._counts.new_tokens, self._counts.finished
            self._guard.change("run", self._advance)
            if self._counts.finished > finished:
                # So that what waits here does not grow with all that is run.
                self._events = collections.deque(
                    event
                    for event in self._events
                    if isinstance(event, Finished) or event.request_id in self._sequences
                )
            if progress is not None:
                progress(self._counts.new_tokens - tokens)
        results = {e.request_id: e.result for e in self._events if isinstance(e, Finished)}
        return results, collections.deque()

    def _advance(self) -> None:
        """One step; its events wait to be handed out."""
        begun, compiled = time.perf_counter(), compilation.count()
        tokens = self._counts.new_tokens
        plan = self._scheduler.plan()
        # Nothing waits for the device before it has the next step.
        leaving = self._swap(plan)
        previous, self._in_flight = self._in_flight, self._dispatch(plan)
        for request_id, copies in leaving.items():
            self._swapped[request_id] = [swap.fetch(of_group) for of_group in copies]
        if previous is not None:
            self._collect(previous)
        for sequence in list(self._scheduler.running):
            # Nothing is left to feed; the last token is on its way.
            if sequence.sampled == sequence.request.max_new_tokens:
                self._scheduler.release(sequence, Status.LEFT)
        seconds = time.perf_counter() - begun
        if compilation.count() > compiled:
            self._counts.first_step_seconds += seconds
            self._counts.first_step_tokens += self._counts.new_tokens - tokens
        else:
            self._counts.seconds += seconds

    def _swap(self, plan: Plan) -> dict[int, list[list[Any]]]:
        """Everything that leaves is read before a page of it can be written."""
        layers = tuple(group.layers for group in self._groups)
        leaving = {
            s.request_id: swap.read_groups(self._caches, layers, pages) for s, pages in plan.leaving
        }
        for sequence, pages in plan.returning:
            content = self._swapped.pop(sequence.request_id)
            self._caches = swap.write_groups(self._caches, layers, pages, content)
        return leaving

    def _dispatch(self, plan: Plan) -> _InFlight | None:
        """Gives the device a step; the sequences advance."""
        if plan.empty:
            return None
        work = idle_work(self._slots, self._chunk, self._max_pages, len(self._groups))
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
            windows=self._windows,
        )
        kind = kind_of(sequence.request.sampling for _, sequence in rows)
        tokens, self._last_tokens = choose(
            logits, self._last_tokens, work.counts, work.piece_slot, work.sampling, kind=kind
        )
        self._counts.steps += 1
        return _InFlight(rows, tokens, lost)

    def _fill_row(self, work: Work, row: int, sequence: Sequence, count: int) -> None:
        for tables, group, handle in zip(work.tables, self._groups, sequence.handles, strict=True):
            tables[row] = group.allocator.block_tables([handle], self._max_pages)[0]
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
        # Of one layer of each group, all of which write to the same places.
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
            if sequence.stopped_by(token):
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
