"""`Engine`: many requests through one model and one pool of pages, with continuous batching."""

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from turbojax.models.decoder import Decoder, warn_of_long_factors
from turbojax.models.engine import build, compilation, costs
from turbojax.models.engine.admission import Admission
from turbojax.models.engine.device import Step
from turbojax.models.engine.guard import Guard
from turbojax.models.engine.plan import Plan
from turbojax.models.engine.requests import Event, Finished, FinishReason, Request, Result
from turbojax.models.engine.scheduler import Scheduler
from turbojax.models.engine.sequence import Sequence, Status
from turbojax.models.engine.speculation import Speculation
from turbojax.models.engine.statistics import Counts, EngineStatistics, statistics_of
from turbojax.models.engine.tracker import RequestTracker
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.tokenizer import Tokenizer
from turbojax.models.transformer import Transformer


class Engine:
    """Runs requests that come at any time through one model and one paged cache.

    A step runs one token of each sequence that is generating and, while there are prompts to run,
    pieces of them, up to `step_tokens`. Steps have a few sizes, each a program; `compile` makes all
    of them before the first request. Where pages are compressed and the device has a kernel for it,
    prompts that begin in a step attend among themselves, to keys and values that are not
    compressed. All other tokens attend to the pages, that is to keys and values as the cache stores
    them.

    With ``reproducible=True`` a request's text depends only on its own tokens and options, and on
    the engine's settings (such as `max_sequences`, `step_tokens` and `implementation`, which make
    other programs): not on what else runs, on the order of arrival, on the size of the pool, on
    prefixes found there or on having left it for a while. All steps are one program then, as large
    as it must be, and one prompt runs at a time. Otherwise all that holds within rounding: programs
    of other sizes add up in another order, so that a text may take another turn where two tokens
    are about equally likely.

    Layers whose sliding windows differ have pages of their own: those of a window are freed as it
    moves on, so that a request holds what its windows need.

    A request gets pages as it needs them. Where the pool is full, the youngest running request
    leaves: its pages go to host memory, from which they come back with the same bits, or they are
    dropped and computed again, if that has taken less time so far (with ``reproducible=True`` they
    never are). Full pages of prompts stay in the pool as long as the space is not needed, and are
    found by later requests that begin with the same tokens.

    A step is given to the device before the tokens of the one before are read, so events come with
    the next call of `step`.

    Any exception inside a step, Ctrl-C included, ends the engine, and so does one while a request
    is added or aborted: every later call, also of `idle` and `statistics`, raises
    ``RuntimeError("this engine has ended: ...")`` with the first cause. Arguments that are refused
    end nothing. Between steps the engine may be left at any time, by an exception of `progress`, by
    closing what `stream` returned, or by Ctrl-C there: what was not handed out comes with the next
    call.

    It runs on the device that holds the model's weights, where these were put on one
    (`jax.device_put`, `replicate`), and otherwise on jax's default device. A model that is split
    over a mesh (`load_decoder` with one, `shard`) runs on all of its devices: each has the pages of
    its KV heads, and a step is one program, see `docs/parallel.md`.

    An engine is for one thread at a time. A call while another thread is inside one, or in `run`,
    raises RuntimeError and changes nothing.

    Args:
      model: the model, quantized or not. A `Transformer` is unstacked first, see `start`.
      num_pages: pages of each layer's pool; where some layers see further back than others, of
        those that see furthest.
      window_pages: pages of the pools of all other layers, see `num_pages`; by default what
        `max_sequences` requests need at most, but no more than `num_pages`.
      page_size: tokens of a page: 16, 32, 64 or 128.
      kv_dtype: how pages are stored: ``"auto"`` (the model's dtype), ``"fp8_e4m3"``, ``"int8"``,
        ``"turbo4"``, ``"k8v4"`` .., see `PagedCache`; for a model with latent attention ``"auto"``,
        ``"fp8_e4m3"`` or ``"turbo4"``, see `LatentPages`. By default nothing is compressed, so that
        texts are exactly the model's; `init_paged_cache`, whose purpose is compression, has another
        default.
      uncompressed_layers: how many of the first and of the last layers keep pages in the model's
        dtype; in many models these layers lose most by compression.
      max_sequences: requests that run at a time; if not given 256 on a GPU, 16 on a CPU, and 8 with
        `reproducible`.
      max_length: tokens of prompt and result of a request at most; by default the model's. LongRoPE
        chooses its factors by it, for all requests alike, as they may share pages. A length that is
        larger than needed costs time in each step, because tables are as wide as it asks for.
      step_tokens: tokens of prompts that a step runs at most, besides those that are generated; if
        not given 8,192 on a GPU, 512 on a CPU, and 64 with `reproducible`. With more of them
        prompts are faster, and sequences that are generating wait longer.
      reproducible: see above.
      speculation: `NGram` or `Draft`: how tokens are guessed ahead, to be checked several at a time
        in steps without prompts, where that has taken less time for a token so far. Not with
        `reproducible`. A step in which a request wants penalties, a bias, a constraint or
        log-probabilities guesses nothing.
      prefix_caching: whether pages are kept for requests that begin with the same tokens.
      cache_results: whether pages of results are kept, too, for instance for the next turn of a
        conversation. A text that continues one may then differ in rounding from one that ran alone,
        where single tokens and prompts run in different kernels.
      key_scale: see `init_paged_cache`.
      value_scale: see `init_paged_cache`.
      seed: of the codes' rotation, see `init_paged_cache`. Sampling has seeds of its own.
      implementation: of attention to pages; None to choose.
      tokenizer: turns tokens into the text in which requests' `stop_strings` are looked for; needed
        for those only.

    Attributes:
      max_length: tokens of prompt and result of a request at most.
      admission: what requests are checked against.

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
        max_sequences: int | None = None,
        max_length: int | None = None,
        step_tokens: int | None = None,
        reproducible: bool = False,
        speculation: Speculation | None = None,
        prefix_caching: bool = True,
        cache_results: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        seed: int = 0,
        implementation: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        build.check_model(model)
        usual = build.usual_sizes(reproducible=reproducible)
        made = build.make(
            model,
            build.Settings(
                page_size=page_size,
                max_sequences=usual.max_sequences if max_sequences is None else max_sequences,
                max_length=model.config.max_length if max_length is None else max_length,
                step_tokens=usual.step_tokens if step_tokens is None else step_tokens,
                num_pages=num_pages,
                window_pages=window_pages,
                kv_dtype=kv_dtype,
                uncompressed_layers=uncompressed_layers,
                key_scale=key_scale,
                value_scale=value_scale,
                seed=seed,
                reproducible=reproducible,
                speculation=speculation,
                prefix_caching=prefix_caching,
                cache_results=cache_results,
                implementation=implementation,
            ),
            tokenizer,
        )
        self.max_length = made.settings.max_length
        self._config = made.config
        self._max_pages = -(-self.max_length // page_size)
        self._groups, self._device = made.groups, made.device
        self.admission = Admission(
            made.config, self.max_length, made.settings.step_tokens, made.groups, tokenizer
        )
        self._costs = costs.Costs(may_recompute=not reproducible)
        self._scheduler = Scheduler(
            self._groups,
            made.limits,
            cache_results=cache_results,
            recomputes=self._recomputes,
            guesses=self._costs.guessing_pays,
        )
        self._counts = Counts()
        self._tracker = RequestTracker(self._scheduler, self._counts)
        self._in_flight: Step | None = None
        self._busy_since = 0.0
        self._guard = Guard()

    @property
    def idle(self) -> bool:
        """Whether every request is done and every event was handed out.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        return not self._tracker.sequences and not self._tracker.events and self._in_flight is None

    def add(self, request: Request) -> int:
        """Queues a request.

        Args:
          request: what to continue, and how.

        Returns:
          Its number, counted from 0 in the order of arrival.

        Raises:
          TypeError: if it is not a `Request`.
          ValueError: if a token is not in the vocabulary, `AllowedTokens` are of a larger one,
            prompt and result are longer than `max_length` or than the whole pool, or there are
            `stop_strings` and no tokenizer.
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        return self.add_samples(request, 1)[0]

    def add_samples(self, request: Request, count: int) -> tuple[int, ...]:
        """Queues several requests of one prompt, whose full pages they share.

        Args:
          request: what to continue, and how; sample i has its seed plus i, modulo 2**32.
          count: how many; `best_of` chooses among their results.

        Returns:
          Their numbers.

        Raises:
          TypeError, ValueError, RuntimeError: see `add`; or if `count` is not positive.
        """
        self._guard.check()
        made = self.admission.sequences(request, count)
        warn_of_long_factors(self._config, len(request.tokens), self.max_length, stacklevel=2)
        return self.queue(made)

    def queue(self, sequences: list[Sequence], added: float | None = None) -> tuple[int, ...]:
        """Queues what `admission` has made of a request: the second half of `add_samples`.

        Args:
          sequences: of one prompt.
          added: when the request came, in seconds of `time.perf_counter`; None for now.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        return self._guard.change("add", lambda: self._tracker.queue(sequences, added))

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
            if not self._tracker.events:
                self._guard.change("stream", self._advance)
            while self._tracker.events:
                self._guard.check()
                event = self._tracker.events[0]
                # Nothing can interrupt between these two, see `Guard`.
                del self._tracker.events[0]; yield event  # fmt: skip  # noqa: E702

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
        results, self._tracker.events = done; return results  # fmt: skip  # noqa: E702

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, only_greedy: bool = False
    ) -> None:
        """Compiles all programs now, side by side, so that no step has to.

        Programs of a `logit_bias`, and those that move pages to the host and back, are not among
        them: they are small, and compiled when they are first needed.

        Args:
          progress: called with how many programs are done, and of how many.
          only_greedy: whether to leave out the programs of requests that want more than the most
            likely tokens.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        count = self._guard.change(
            "compile", lambda: self._device.compile(progress, only_greedy=only_greedy)
        )
        self._counts.programs_compiled += count

    def statistics(self) -> EngineStatistics:
        """What was done so far, and what is held now.

        Raises:
          RuntimeError: if the engine has ended or is in use by another thread.
        """
        self._guard.check()
        return statistics_of(
            self._counts,
            self._scheduler,
            self._groups,
            self._device.caches,
            list(self._tracker.swapped.values()),
        )

    def _abort(self, request_id: int, reason: FinishReason) -> bool:
        sequence = self._tracker.sequences.get(request_id)
        if sequence is not None:
            self._tracker.finish(sequence, reason)
        return sequence is not None

    def _step(self) -> list[Event]:
        self._advance()
        events = list(self._tracker.events)
        self._tracker.events.clear()
        return events

    def _run(
        self, progress: Callable[[int], None] | None
    ) -> tuple[dict[int, Result], collections.deque[Event]]:
        """The results, and the events that are left once these are handed out."""
        while self._tracker.sequences or self._in_flight is not None:
            tokens, finished = self._counts.new_tokens, self._counts.finished
            self._guard.change("run", self._advance)
            if self._counts.finished > finished:
                # So that the waiting events do not grow with the number of requests.
                self._tracker.events = collections.deque(
                    event
                    for event in self._tracker.events
                    if isinstance(event, Finished) or event.request_id in self._tracker.sequences
                )
            if progress is not None:
                progress(self._counts.new_tokens - tokens)
        results = {e.request_id: e.result for e in self._tracker.events if isinstance(e, Finished)}
        return results, collections.deque()

    def _advance(self) -> None:
        """Runs one step; its events wait to be handed out."""
        begun, compiled = time.perf_counter(), compilation.seen()
        tokens = self._counts.new_tokens
        waited = self._counts.wait_seconds
        self._tracker.end_late(begun)
        plan = self._scheduler.plan()
        self._note_idling(plan)
        # Nothing waits for the device before it has the next step.
        leaving = [(x, self._device.read(pages)) for x, pages in plan.leaving]
        self._enter(plan)
        previous, self._in_flight = self._in_flight, self._dispatch(plan)
        if previous is not None:
            self._tracker.collect(previous)
        for sequence, copies in leaving:
            if sequence.status is Status.SWAPPED:  # and has not ended just now
                self._costs.swapped(*self._tracker.fetch(sequence, copies))
        self._busy_since = time.perf_counter()
        for sequence in [x for x in self._scheduler.running if _is_over(x)]:
            # Nothing is left to feed; the last token is on its way.
            self._scheduler.release(sequence, Status.LEFT)
        seconds = time.perf_counter() - begun
        if (programs := compilation.since(compiled)) > 0:
            self._counts.programs_compiled += programs
            self._counts.first_step_seconds += seconds
            self._counts.first_step_tokens += self._counts.new_tokens - tokens
            # Compiling is not part of what a step costs the host.
            self._counts.wait_seconds = waited
        else:
            self._counts.seconds += seconds
            self._counts.host_seconds += seconds - (self._counts.wait_seconds - waited)
            if previous is not None:  # what the device did meanwhile
                self._costs.stepped(
                    seconds,
                    prompt_tokens=previous.prompt_tokens,
                    guesses=previous.guesses > 0,
                    sequences=len(previous.rows),
                    new_tokens=self._counts.new_tokens - tokens,
                )

    def _note_idling(self, plan: Plan) -> None:
        """Counts a step that comes after the device has done the one before and waits."""
        if plan.empty or self._in_flight is None:
            return
        found: Any = self._in_flight.found
        if not found.is_ready():
            return
        self._counts.late_steps += 1
        self._counts.idle_seconds += time.perf_counter() - self._busy_since

    def _recomputes(self, sequence: Sequence, pages: tuple[tuple[int, ...], ...]) -> bool:
        """Whether running a sequence's tokens again takes less time than moving its pages twice."""
        return self._costs.recomputes(self._device.nbytes(pages), sequence.held)

    def _enter(self, plan: Plan) -> None:
        """Writes pages that come back from host memory, and fills slots of entering sequences."""
        for sequence, pages in plan.returning:
            self._device.write(pages, self._tracker.swapped.pop(sequence.request_id))
        begins = {piece.sequence: piece.begin for piece in plan.pieces}
        for sequence in plan.entering:
            held = begins.get(sequence, sequence.held)
            tables = [
                group.allocator.block_tables([handle], self._max_pages)[0]
                for group, handle in zip(self._groups, sequence.handles, strict=True)
            ]
            self._device.enter(sequence, held, np.stack(tables))
            self._tracker.started(sequence)

    def _dispatch(self, plan: Plan) -> Step | None:
        """Gives the device a step, None if the plan is empty."""
        if plan.empty:
            return None
        step = self._device.run(plan, self._changes(plan))
        self._counts.steps += 1
        self._counts.steps_of_prompts += bool(plan.pieces)
        self._counts.steps_of_speculation += plan.guesses > 0
        for piece in plan.pieces:
            self._counts.prompt_tokens += piece.count
            if not piece.sequence.prefilling:
                # Whoever finds these pages reads them in a later step.
                self._scheduler.keep_prefix(piece.sequence)
        return step

    def _changes(self, plan: Plan) -> list[tuple[int, int, int, int]]:
        """New entries of tables, of sequences that grew: group, slot, column, page."""
        found = []
        for sequence, before in plan.grown:
            for number, handle in enumerate(sequence.handles):
                pages = self._groups[number].allocator.pages(handle)
                found += [
                    (number, sequence.slot, column, pages[column])
                    for column in range(before, len(pages))
                ]
        return found


def _is_over(sequence: Sequence) -> bool:
    """Whether all tokens of a request are known, or are certain to come from steps under way."""
    return sequence.sampled - sequence.unsure >= sequence.request.max_new_tokens
