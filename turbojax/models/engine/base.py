"""What `Engine` and `Replicas` share: one thread at a time, and no event is lost or told twice."""

import abc
import collections
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Literal, NoReturn, TypeVar

from turbojax.models.decoder import warn_of_long_factors
from turbojax.models.engine.requests import Event, Finished, Request, Result, Sequence
from turbojax.models.engine.statistics import Counts, EngineStatistics
from turbojax.models.engine.tracker import Admission

Reason = Literal["aborted", "stop"]
"""Why a request is ended by who gave it, see `Engine.abort`."""

_T = TypeVar("_T")

# What calls are on record for: changing the engine, and keeping other threads out meanwhile.
_CHANGE, _RUN = "change", "run"


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call that is under way, or was interrupted.

    `frame` is the frame on that thread's stack for as long as the call is under way.
    """

    name: str
    thread: int
    thread_name: str
    frame: FrameType

    def is_running(self) -> bool:
        """Whether its thread is still in it; if not, it returned or an exception has left it.

        The frame itself is asked, by one call of C during which no other thread runs: Python
        refuses to clear a frame that is on a thread's stack, even below other frames. A frame that
        is on none only loses its local variables, which nobody needs. Following `f_back` from the
        top of the other thread's stack would sometimes miss the frame, because that thread goes on
        meanwhile.
        """
        try:
            self.frame.clear()
        except RuntimeError:
            return True
        return False


class Guard:
    """Lets one call at a time change an engine, and none after an exception inside such a call.

    An exception may come at any instruction (Ctrl-C does), also in this class. So a call is put on
    record before it changes anything, and its last instruction takes it off. Whoever finds a call
    on record asks whether it is still running. If so, the engine is in use. If not, and it is still
    on record, it was interrupted and the engine has ended, even where no handler could note why.

    Python looks for signals, and changes threads, where a function begins, after calls of functions
    written in C, and where a loop goes back. The lines of several statements below contain none of
    these.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._cause: BaseException | None = None
        self._ended = ""

    def check(self) -> None:
        """Raises RuntimeError if the engine has ended, or is in use by another call or thread."""
        call = self._calls.get(_CHANGE)
        if call is not None:
            self._refuse(call)
        call = self._calls.get(_RUN)
        if call is not None and call.thread != threading.get_ident() and call.is_running():
            raise _in_use(call)

    def change(self, name: str, change: Callable[[], _T]) -> _T:
        """Calls what changes the engine; an exception inside ends it.

        `name` is that of the engine's method, for messages. The result is the caller's only if the
        engine has not ended.
        """
        self.check()
        call = _call(name, sys._getframe())
        try:
            found = self._calls.setdefault(_CHANGE, call)  # one thread wins
            if found is call:
                result = change()
                # The frame must not hold itself: all it holds would wait for the garbage collector.
                del self._calls[_CHANGE], call, found; return result  # fmt: skip  # noqa: E702
        except BaseException as error:
            if self._calls.get(_CHANGE) is call:
                # It stays on record: nobody can get in any more.
                self._end(f"{type(error).__name__}: {error}".removesuffix(": "), error)
            raise
        self._refuse(found)

    def keep_others_out(self, name: str, work: Callable[[], _T]) -> _T:
        """Calls what changes the engine several times, and refuses other threads in between.

        An exception from `work` ends nothing.
        """
        self.check()
        call = _call(name, sys._getframe())
        found = self._calls.setdefault(_RUN, call)
        if found is not call:
            if found.is_running():
                raise _in_use(found)
            self._calls[_RUN] = call  # that one was interrupted between two changes
        try:
            result = work()
        except BaseException:
            del self._calls[_RUN]
            raise
        del self._calls[_RUN], call, found; return result  # fmt: skip  # noqa: E702

    def _refuse(self, call: Call) -> NoReturn:
        """Raises an error that says what became of a call found on record."""
        running = call.is_running()
        if not self._ended:
            # It may have come to its end since it was found.
            if running or self._calls.get(_CHANGE) is not call:
                raise _in_use(call)
            self._end(f"interrupted inside {call.name}", None)
        raise RuntimeError(f"this engine has ended: {self._ended}") from self._cause

    def _end(self, why: str, cause: BaseException | None) -> None:
        self._cause = cause
        self._ended = why


def _call(name: str, frame: FrameType) -> Call:
    return Call(name, threading.get_ident(), threading.current_thread().name, frame)


def _in_use(call: Call) -> RuntimeError:
    if call.thread == threading.get_ident():
        return RuntimeError(f"this engine is in use: {call.name} is under way in this thread")
    return RuntimeError(
        f"this engine is in use by another thread ({call.name} in {call.thread_name!r}, "
        f"number {call.thread})"
    )


class BaseEngine(abc.ABC):
    """Requests that come at any time, their steps and events.

    Args:
      admission: what requests are checked against.
      live: has the numbers of the requests that are not done.
      counts: of new tokens and finished requests at least.
    """

    def __init__(self, admission: Admission, live: Mapping[int, object], counts: Counts) -> None:
        self.admission, self.max_length = admission, admission.max_length
        self._live, self._counts = live, counts
        self._events: collections.deque[Event] = collections.deque()
        self._guard = Guard()

    @property
    def idle(self) -> bool:
        """Whether every request is done and every event was handed out."""
        self._guard.check()
        return not self._events and not self._works()

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
          TypeError, ValueError: see `add`; or if `count` is not positive.
        """
        self._guard.check()
        made = self.admission.sequences(request, count)
        config = self.admission.config
        warn_of_long_factors(config, len(request.tokens), self.max_length, stacklevel=2)
        return self.queue(made)

    def queue(self, sequences: list[Sequence], added: float | None = None) -> tuple[int, ...]:
        """Queues what `admission` has made of a request: the second half of `add_samples`.

        Args:
          sequences: of one prompt.
          added: when the request came, in seconds of `time.perf_counter`; None for now.
        """
        return self._guard.change("add", lambda: self._queue(sequences, added))

    def abort(self, request_id: int, *, reason: Reason = "aborted") -> None:
        """Ends a request now; it keeps the tokens announced so far.

        In `Replicas` one whose engine is in a step ends after that.

        Args:
          request_id: which.
          reason: what its result says: ``"stop"`` where the caller found the end in the text.

        Raises:
          KeyError: if there is no such request, or it is done.
          ValueError: if there is no such reason.
        """
        self._guard.check()
        if reason not in ("aborted", "stop"):
            raise ValueError(f"{reason=} must be 'aborted' or 'stop'")
        if not self._guard.change("abort", lambda: self._abort(request_id, reason)):
            raise KeyError(f"request {request_id} is not known, or is done")

    def step(self) -> list[Event]:
        """Gives the device the next step and reads the tokens of the one before.

        In `Replicas` every engine with something to do begins a step, and one of them is waited
        for.

        Returns:
          What happened and was not handed out before, in order.
        """
        return self._guard.change("step", self._step)

    def stream(self) -> Iterator[Event]:
        """Steps until all requests are done, those included that are added meanwhile.

        It may be left at any event: the others come with the next call of this, `step` or `run`.

        Yields:
          Events as they come.
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
        """
        done = self._guard.keep_others_out("run", lambda: self._run(progress))
        results, self._events = done; return results  # fmt: skip  # noqa: E702

    @abc.abstractmethod
    def statistics(self) -> EngineStatistics:
        """What was done so far, and what is held now."""

    # Inside a call --------------------------------------------------------------------------------

    @abc.abstractmethod
    def _queue(self, sequences: list[Sequence], added: float | None) -> tuple[int, ...]:
        """See `queue`."""

    @abc.abstractmethod
    def _abort(self, request_id: int, reason: Reason) -> bool:
        """Ends a request; False if there is no such one, or it is done."""

    @abc.abstractmethod
    def _works(self) -> bool:
        """Whether a request is not done, or a step is on its way."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Runs one step; its events wait in `_events` to be handed out."""

    def _step(self) -> list[Event]:
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def _run(
        self, progress: Callable[[int], None] | None
    ) -> tuple[dict[int, Result], collections.deque[Event]]:
        """The results, and the events that are left once these are handed out."""
        most = 0
        try:
            while self._works():
                tokens = self._counts.new_tokens
                self._guard.change("run", self._advance)
                # So that the waiting events do not grow with the number of requests; now and then,
                # as requests that are not done may have a million.
                if len(self._events) > most:
                    self._forget_told()
                    most = 2 * len(self._events)
                if progress is not None:
                    progress(self._counts.new_tokens - tokens)
        except BaseException:
            self._forget_told()
            raise
        results = {e.request_id: e.result for e in self._events if isinstance(e, Finished)}
        return results, collections.deque()

    def _forget_told(self) -> None:
        """Drops the tokens of requests that are done: their results tell them."""
        self._events = collections.deque(
            event
            for event in self._events
            if isinstance(event, Finished) or event.request_id in self._live
        )
