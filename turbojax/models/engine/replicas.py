"""`Replicas`: several engines of one model, each on devices of its own, that look like one."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many

from turbojax.models.engine.base import BaseEngine, Reason
from turbojax.models.engine.engine import Engine
from turbojax.models.engine.requests import Event, NewToken, Request, Sequence
from turbojax.models.engine.statistics import Counts, EngineStatistics, together

# A new token costs its share of a whole step; tokens of a prompt run by the hundred in one.
_NEW_TOKEN = 8


class Load:
    """What is left to do in one engine, and which beginnings of prompts it has seen.

    By it a request goes where it will have to wait least.

    `work` is counted in tokens of prompts, at most: texts may stop earlier. Prompts share whole
    pages of `page_size` tokens. The pool cannot hold more beginnings than its `pages`; 0 where none
    are kept.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.work = 0
        self._page_size, self._pages = page_size, pages
        self._left: dict[int, int] = {}
        self._seen: collections.OrderedDict[int, None] = collections.OrderedDict()

    def cost(self, request: Request, count: int, beginnings: Many[int]) -> int:
        """The work until `count` samples of a request are done here, all earlier work included."""
        known = 0
        for key in beginnings if self._pages else ():
            if key not in self._seen:
                break
            known += self._page_size
        prompt = len(request.tokens) - known
        return self.work + prompt + count * _NEW_TOKEN * request.max_new_tokens

    def add(self, numbers: Many[int], request: Request, beginnings: Many[int]) -> None:
        """Adds samples of a request, of which the first runs the prompt."""
        for i, number in enumerate(numbers):
            work = _NEW_TOKEN * request.max_new_tokens + (0 if i else len(request.tokens))
            self._left[number] = work
            self.work += work
        for key in beginnings if self._pages else ():
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._pages:
            self._seen.popitem(last=False)

    def got_token(self, number: int, request: Request, index: int) -> None:
        """Notes that a request has its new token of this index, so its prompt has run."""
        left = _NEW_TOKEN * (request.max_new_tokens - index - 1)
        self.work -= self._left[number] - left
        self._left[number] = left

    def ended(self, number: int) -> None:
        """Takes away what was left of a request."""
        self.work -= self._left.pop(number)


def beginnings_of(request: Request, page_size: int) -> list[int]:
    """A number for each beginning of a prompt that is whole pages, the shortest first.

    Where different ones have the same number a prompt runs twice, and nothing else happens.
    """
    found, key = [], 0
    # The last token always runs.
    for end in range(page_size, len(request.tokens), page_size):
        key = hash((key, tuple(request.tokens[end - page_size : end])))
        found.append(key)
    return found


# Engines ------------------------------------------------------------------------------------------


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


class Replicas(BaseEngine):
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
        self._replicas = [_Replica(engine) for engine in self.engines]
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(self.engines), thread_name_prefix="turbojax-replica"
        )
        self._places: dict[int, _Replica] = {}
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        super().__init__(self.engines[0].admission, self._places, Counts())

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
        """
        return self._guard.change("statistics", lambda: together(self._statistics()))

    def statistics_of_each(self) -> tuple[EngineStatistics, ...]:
        """The same, of each engine."""
        return self._guard.change("statistics", lambda: tuple(self._statistics()))

    # Inside a call --------------------------------------------------------------------------------

    def _queue(self, sequences: list[Sequence], added: float | None) -> tuple[int, ...]:
        now = time.perf_counter() if added is None else added
        request, count = sequences[0].request, len(sequences)
        beginnings = beginnings_of(request, self.admission.page_size)
        replica = min(self._replicas, key=lambda x: x.load.cost(request, count, beginnings))
        numbers = tuple(range(self._next_id, self._next_id + count))
        self._next_id += count
        replica.load.add(numbers, request, beginnings)
        self._places |= dict.fromkeys(numbers, replica)
        self._requests |= dict.fromkeys(numbers, request)

        def queue() -> None:
            own = replica.engine.queue(sequences, now)
            replica.own |= zip(numbers, own, strict=True)
            replica.numbers |= zip(own, numbers, strict=True)

        replica.call(queue)
        return numbers

    def _abort(self, request_id: int, reason: Reason) -> bool:
        if (replica := self._places.get(request_id)) is None:
            return False

        def abort() -> None:
            # The step before may have ended it, of which the events are on their way.
            with contextlib.suppress(KeyError):
                replica.engine.abort(replica.own[request_id], reason=reason)

        replica.call(abort)
        return True

    def _works(self) -> bool:
        return any(x.step or x.calls or not x.engine.idle for x in self._replicas)

    def _advance(self) -> None:
        """Begins steps and waits for one of them, if none has ended since the last time."""
        before = len(self._events)
        self._gather()
        for replica in self._replicas:
            if replica.step is None and not replica.engine.idle:
                replica.step = self._threads.submit(replica.engine.step)
        steps = [x.step for x in self._replicas if x.step is not None]
        if steps and len(self._events) == before:
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
            self._counts.new_tokens += 1
            replica.load.got_token(number, self._requests[number], event.index)
            return NewToken(number, event.index, event.token, event.logprobs)
        self._counts.finished += 1
        replica.load.ended(number)
        del replica.numbers[event.request_id], replica.own[number]
        del self._places[number], self._requests[number]
        return dataclasses.replace(event, request_id=number)

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
