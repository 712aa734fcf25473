"""`Replicas`: several engines of one model, each on devices of its own, that look like one."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from turbojax.models.decoder import warn_of_long_factors
from turbojax.models.engine.balance import Load, beginnings_of
from turbojax.models.engine.engine import Engine
from turbojax.models.engine.guard import Guard
from turbojax.models.engine.requests import Event, Finished, NewToken, Request, Result
from turbojax.models.engine.sequence import Sequence
from turbojax.models.engine.statistics import EngineStatistics, together

# By default Python lets a thread run for 5 ms while others wait: long beside an engine's step.
_SWITCH_SECONDS = 0.0005


class _Replica:
    """An engine, and the requests that it has.

    `numbers` gives the number used here for the engine's number of an unfinished request, `own` the
    reverse. `calls` wait until the `step` that is under way is over.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        groups = engine.admission.groups
        allocator = groups[0].allocator
        # A beginning is found where all groups remember it.
        is_kept = all(group.prefixes is not None for group in groups)
        self.load = Load(allocator.page_size, allocator.num_pages if is_kept else 0)
        self.numbers: dict[int, int] = {}
        self.own: dict[int, int] = {}
        self.calls: collections.deque[Callable[[], object]] = collections.deque()
        self.step: concurrent.futures.Future[list[Event]] | None = None

    def call(self, call: Callable[[], object]) -> None:
        """Calls something that changes the engine: now, or when its step is over."""
        self.calls.append(call)
        if self.step is None:
            self.catch_up()

    def catch_up(self) -> None:
        """Calls everything that has waited for a step to be over."""
        while self.calls:
            self.calls.popleft()()


class Replicas:
    """Several engines of one model that take requests together; it is used like an `Engine`.

    Each of them runs its steps in a thread of its own, so that all devices work at a time and none
    waits for another: a step here is one of whichever engine has been quickest. A request goes to
    the engine that would be done with it after the least work, which is less where the engine has
    seen the beginning of its prompt before; all samples of a request go to one. It stays there.

    What is said of an `Engine` holds here too: events come in order for each request, an exception
    inside a step (of any engine) ends it, Ctrl-C inside one does, and it is for one thread at a
    time. Between two calls, steps that were begun go on. So a request that is added or aborted
    while its engine is in a step waits until that step is over, and may get a token meanwhile.

    Args:
      engines: of the same model and settings, each on devices of its own (see `replicate`), without
        requests. Nobody else may use them any more.

    Attributes:
      max_length: tokens of prompt and result of a request at most.
      engines: as given.

    Raises:
      TypeError: if one is no `Engine`.
      ValueError: if there is none, one is given twice, is in use, or is of another model or
        `max_length` than the first.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.engines = tuple(engines)
        _check(self.engines)
        self.max_length = self.engines[0].max_length
        self._replicas = [_Replica(engine) for engine in self.engines]
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(self.engines), thread_name_prefix="turbojax-replica"
        )
        self._guard = Guard()
        self._events: collections.deque[Event] = collections.deque()
        self._places: dict[int, _Replica] = {}
        self._requests: dict[int, Request] = {}
        self._next_id = self._new_tokens = self._finished = 0

    @property
    def idle(self) -> bool:
        """Whether every request is done and every event was handed out.

        Raises:
          RuntimeError: if it has ended or is in use by another thread.
        """
        self._guard.check()
        return not self._events and not self._works()

    def add(self, request: Request) -> int:
        """Queues a request, see `Engine.add`."""
        return self.add_samples(request, 1)[0]

    def add_samples(self, request: Request, count: int) -> tuple[int, ...]:
        """Queues several requests of one prompt, see `Engine.add_samples`."""
        self._guard.check()
        admission = self.engines[0].admission
        made = admission.sequences(request, count)
        warn_of_long_factors(admission.config, len(request.tokens), self.max_length, stacklevel=2)
        return self._guard.change("add", lambda: self._add(request, made))

    def abort(self, request_id: int, *, reason: Literal["aborted", "stop"] = "aborted") -> None:
        """Ends a request, see `Engine.abort`; where its engine is in a step, after that."""
        self._guard.check()
        if reason not in ("aborted", "stop"):
            raise ValueError(f"{reason=} must be 'aborted' or 'stop'")
        if request_id not in self._places:
            raise KeyError(f"request {request_id} is not known, or is done")
        self._guard.change("abort", lambda: self._abort(request_id, reason))

    def step(self) -> list[Event]:
        """Has every engine with something to do begin a step, and waits until one of them is over.

        Returns:
          What happened and was not handed out before, in order.

        Raises:
          RuntimeError: if it has ended or is in use by another thread.
        """
        return self._guard.change("step", self._step)

    def stream(self) -> Iterator[Event]:
        """Steps until all requests are done, see `Engine.stream`."""
        while not self.idle:
            if not self._events:
                self._guard.change("stream", self._advance)
            while self._events:
                self._guard.check()
                event = self._events[0]
                # Nothing can interrupt between these two, see `Guard`.
                del self._events[0]; yield event  # fmt: skip  # noqa: E702

    def run(self, progress: Callable[[int], None] | None = None) -> dict[int, Result]:
        """Steps until all requests are done, see `Engine.run`."""
        done = self._guard.keep_others_out("run", lambda: self._run(progress))
        results, self._events = done; return results  # fmt: skip  # noqa: E702

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, only_greedy: bool = False
    ) -> None:
        """Compiles all programs of all engines, one engine after the other; see `Engine.compile`.

        Those of the later ones are traced already, and found in jax's compilation cache if there
        is one.
        """
        self._guard.change("compile", lambda: self._compile(progress, only_greedy))

    def statistics(self) -> EngineStatistics:
        """What all did and hold; waits until no engine is in a step.

        Counts are sums, and so are the seconds of the host and of waiting; `seconds` and
        `first_step_seconds` are those of the engine with most, as all work at the same time.

        Raises:
          RuntimeError: if it has ended or is in use by another thread.
        """
        return self._guard.change("statistics", lambda: together(self._statistics()))

    def statistics_of_each(self) -> tuple[EngineStatistics, ...]:
        """The same, of each engine.

        Raises:
          RuntimeError: if it has ended or is in use by another thread.
        """
        return self._guard.change("statistics", lambda: tuple(self._statistics()))

    # Inside a call --------------------------------------------------------------------------------

    def _add(self, request: Request, made: list[Sequence]) -> tuple[int, ...]:
        now, count = time.perf_counter(), len(made)
        beginnings = beginnings_of(request, self.engines[0].admission.page_size)
        replica = min(self._replicas, key=lambda x: x.load.cost(request, count, beginnings))
        numbers = tuple(range(self._next_id, self._next_id + count))
        self._next_id += count
        replica.load.add(numbers, request, beginnings)
        self._places |= dict.fromkeys(numbers, replica)
        self._requests |= dict.fromkeys(numbers, request)

        def queue() -> None:
            own = replica.engine.queue(made, now)
            replica.own |= zip(numbers, own, strict=True)
            replica.numbers |= zip(own, numbers, strict=True)

        replica.call(queue)
        return numbers

    def _abort(self, request_id: int, reason: Literal["aborted", "stop"]) -> None:
        replica = self._places[request_id]

        def abort() -> None:
            # The step before may have ended it, of which the events are on their way.
            with contextlib.suppress(KeyError):
                replica.engine.abort(replica.own[request_id], reason=reason)

        replica.call(abort)

    def _works(self) -> bool:
        return any(x.step or x.calls or not x.engine.idle for x in self._replicas)

    def _step(self) -> list[Event]:
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def _advance(self) -> None:
        """Begins steps and waits for one of them; its events wait to be handed out."""
        self._gather()  # of those that ended since the last time
        for replica in self._replicas:
            if replica.step is None and not replica.engine.idle:
                replica.step = self._threads.submit(replica.engine.step)
        steps = [x.step for x in self._replicas if x.step is not None]
        if steps and not self._events:
            with _threads_that_alternate():
                concurrent.futures.wait(steps, return_when=concurrent.futures.FIRST_COMPLETED)
        self._gather()

    def _gather(self) -> None:
        """Takes the events of steps that are over."""
        for replica in self._replicas:
            if replica.step is not None and replica.step.done():
                events, replica.step = replica.step.result(), None
                for event in events:
                    self._events.append(self._take(replica, event))
                replica.catch_up()

    def _take(self, replica: _Replica, event: Event) -> Event:
        """An engine's event, with the number that its request has here."""
        number = replica.numbers[event.request_id]
        if isinstance(event, NewToken):
            self._new_tokens += 1
            replica.load.got_token(number, self._requests[number], event.index)
            return NewToken(number, event.index, event.token, event.logprobs)
        self._finished += 1
        replica.load.ended(number)
        del replica.numbers[event.request_id], replica.own[number]
        del self._places[number], self._requests[number]
        return dataclasses.replace(event, request_id=number)

    def _run(
        self, progress: Callable[[int], None] | None
    ) -> tuple[dict[int, Result], collections.deque[Event]]:
        """The results, and the events that are left once these are handed out."""
        while self._works():
            tokens, finished = self._new_tokens, self._finished
            self._guard.change("run", self._advance_more)
            if self._finished > finished:
                # So that the waiting events do not grow with the number of requests.
                self._events = collections.deque(
                    event
                    for event in self._events
                    if isinstance(event, Finished) or event.request_id in self._places
                )
            if progress is not None:
                progress(self._new_tokens - tokens)
        results = {e.request_id: e.result for e in self._events if isinstance(e, Finished)}
        return results, collections.deque()

    def _advance_more(self) -> None:
        """`_advance`, even if events wait to be handed out."""
        before, self._events = self._events, collections.deque()
        self._advance()
        self._events = before + self._events

    def _compile(self, progress: Callable[[int, int], None] | None, only_greedy: bool) -> None:
        self._settle()
        count = len(self.engines)
        for i, engine in enumerate(self.engines):

            def show(done: int, total: int, before: int = i) -> None:
                if progress is not None:
                    progress(before * total + done, count * total)

            engine.compile(show, only_greedy=only_greedy)

    def _statistics(self) -> list[EngineStatistics]:
        self._settle()
        return [engine.statistics() for engine in self.engines]

    def _settle(self) -> None:
        concurrent.futures.wait([x.step for x in self._replicas if x.step is not None])
        self._gather()


@contextlib.contextmanager
def _threads_that_alternate() -> Iterator[None]:
    """Makes Python switch threads often, so that no engine's thread waits long for another."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _check(engines: tuple[Engine, ...]) -> None:
    """Raises TypeError or ValueError unless these engines can be used as one."""
    if not engines:
        raise ValueError("engines are none, must be at least one")
    for engine in engines:
        if not isinstance(engine, Engine):
            raise TypeError(f"an engine is a {type(engine).__name__}, must be an Engine")
    if len(set(map(id, engines))) < len(engines):
        raise ValueError("an engine is given twice, must be one of its own for each replica")
    first = engines[0]
    for i, engine in enumerate(engines):
        if not engine.idle:
            raise ValueError(f"engine {i} has requests, must have none")
        if engine.admission.sizes != first.admission.sizes:
            raise ValueError(
                f"engine {i} must have the first one's model, sizes and tokenizer, but has "
                f"{engine.admission.sizes} and not {first.admission.sizes}"
            )
