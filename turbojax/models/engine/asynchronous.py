"""`AsyncEngine`: an engine in a thread of its own, for many threads and event loops at a time."""

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from turbojax import _checks
from turbojax.models.engine.base import BaseEngine, Reason
from turbojax.models.engine.requests import Event, Finished, Request, Result
from turbojax.models.engine.statistics import EngineStatistics

Ready = Callable[[], bool]
"""What somebody waits for; asked with the lock held."""


@dataclasses.dataclass(frozen=True, eq=False)
class Waiter:
    """Somebody who awaits `future` in an event loop until `ready` is true."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    ready: Ready


class Signal:
    """A state that one thread changes and others wait for, with the lock of `condition` held."""

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self._waiters: list[Waiter] = []

    def changed(self) -> list[Waiter]:
        """Wakes threads, and returns who else is to be woken by `wake`; with the lock held."""
        self.condition.notify_all()
        found = [waiter for waiter in self._waiters if waiter.ready()]
        # Whoever is about to be woken need not be again.
        self._waiters = [waiter for waiter in self._waiters if waiter not in found]
        return found

    def wait(self, ready: Ready, timeout: float | None = None) -> bool:
        """Blocks this thread until something is ready or the time is over; returns `ready()`."""
        with self.condition:
            return self.condition.wait_for(ready, timeout)

    async def until(self, ready: Ready) -> None:
        """Waits in an event loop until something is ready."""
        loop = asyncio.get_running_loop()
        while True:
            with self.condition:
                if ready():
                    return
                waiter = Waiter(loop, loop.create_future(), ready)
                self._waiters.append(waiter)
            try:
                await waiter.future
            finally:
                with self.condition:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)


def wake(waiters: Iterable[Waiter]) -> None:
    """Wakes waiters in event loops with one call for each loop, as each call is a system call."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        loops.setdefault(waiter.loop, []).append(waiter.future)
    for loop, futures in loops.items():
        try:
            loop.call_soon_threadsafe(_set, futures)
        except RuntimeError:
            # The loop was closed, so nobody waits in it any more.
            if not loop.is_closed():
                raise


def _set(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


# Handles of requests ------------------------------------------------------------------------------


class Mailbox(Signal):
    """What an engine says of one request, or of several samples of it, until somebody reads it.

    It holds no more events than the samples have tokens and ends. `ids` are their numbers in the
    engine, once it has accepted them; `error` is why there will be no more events.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: tuple[int, ...] = ()
        self.results: dict[int, Result] = {}
        self.error: BaseException | None = None
        self._events: collections.deque[Event] = collections.deque()

    def accept(self, ids: Sequence[int]) -> list[Waiter]:
        """Notes the engine's numbers of the samples; returns what `Signal.changed` does."""
        with self.condition:
            self.ids = tuple(ids)
            return self.changed()

    def put(self, events: Iterable[Event]) -> list[Waiter]:
        """Adds events; returns what `Signal.changed` does."""
        with self.condition:
            for event in events:
                self._events.append(event)
                if isinstance(event, Finished):
                    self.results[event.request_id] = event.result
            return self.changed()

    def fail(self, error: BaseException) -> list[Waiter]:
        """Notes that no more events will come; returns what `Signal.changed` does."""
        with self.condition:
            self.error = error
            return self.changed()

    def is_answered(self) -> bool:
        """Whether the engine has accepted or refused the request."""
        return bool(self.ids) or self.error is not None

    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or (bool(self.ids) and len(self.results) == len(self.ids))

    def is_readable(self) -> bool:
        """Whether there are events, or there will be none."""
        return bool(self._events) or self.is_done()

    def take(self, most: int | None = None) -> list[Event]:
        """Up to `most` of the events not taken before; [] at the end, or raises `error`."""
        with self.condition:
            count = len(self._events) if most is None else min(most, len(self._events))
            events = [self._events.popleft() for _ in range(count)]
            if not events and self.error is not None:
                raise self.error
            return events


class RequestHandle:
    """A request that was given to an `AsyncEngine`, or several samples of it.

    Its events are for one reader, in any thread (``for event in handle``) or event loop
    (``async for event in handle``). A request that nobody reads runs to its end all the same:
    whoever loses interest calls `cancel`, or leaves a ``with`` block of the handle, which does.

    Attributes:
      request: the request.
      samples: how many samples of it.
    """

    def __init__(
        self,
        request: Request,
        samples: int,
        box: Mailbox,
        cancel: Callable[["RequestHandle", Reason], None],
    ) -> None:
        self.request = request
        self.samples = samples
        self._box = box
        self._cancel = cancel

    def __enter__(self) -> "RequestHandle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @property
    def done(self) -> bool:
        """Whether nothing more will happen to it; there may be events that nobody has read."""
        with self._box.condition:
            return self._box.is_done()

    def cancel(self, reason: Reason = "aborted") -> None:
        """Ends what is not done, soon; the last events come when it has ended.

        Args:
          reason: see `Engine.abort`.
        """
        if not self.done:
            self._cancel(self, reason)

    async def accepted(self) -> tuple[int, ...]:
        """Waits until the engine has the request.

        Returns:
          The engine's number of each sample, by which events say whose they are.

        Raises:
          Exception: what `Engine.add` refused it with; `EngineEnded`.
        """
        await self._box.until(self._box.is_answered)
        return self._ids()

    def wait_accepted(self, timeout: float | None = None) -> tuple[int, ...]:
        """The same in a thread that may block.

        Args:
          timeout: seconds to wait; None for any time.

        Raises:
          TimeoutError: if they are over.
          Exception: see `accepted`.
        """
        self._wait(self._box.is_answered, timeout)
        return self._ids()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Events as they come; those that are there at the same time come together.

        Whoever reads slowly gets more at a time.

        Yields:
          At least one event.

        Raises:
          Exception: see `accepted`.
        """
        while True:
            await self._box.until(self._box.is_readable)
            events = self._box.take()
            if not events:
                return
            yield events

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        while True:
            await self._box.until(self._box.is_readable)
            # One at a time: whoever leaves the loop finds the others later.
            for event in (events := self._box.take(1)):
                yield event
            if not events:
                return

    def __iter__(self) -> Iterator[Event]:
        while True:
            self._box.wait(self._box.is_readable)
            events = self._box.take(1)
            yield from events
            if not events:
                return

    async def results(self) -> tuple[Result, ...]:
        """Waits until all samples are done; nobody needs to read their events.

        Returns:
          The result of each sample.

        Raises:
          Exception: see `accepted`.
        """
        await self._box.until(self._box.is_done)
        return self._results()

    def wait_results(self, timeout: float | None = None) -> tuple[Result, ...]:
        """The same in a thread that may block.

        Args:
          timeout: seconds to wait; None for any time.

        Raises:
          TimeoutError: if they are over; the request goes on.
          Exception: see `accepted`.
        """
        self._wait(self._box.is_done, timeout)
        return self._results()

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        if not self._box.wait(ready, timeout):
            raise TimeoutError(f"a request was not ready after {timeout} seconds")

    def _ids(self) -> tuple[int, ...]:
        if not self._box.ids and self._box.error is not None:
            raise self._box.error
        return self._box.ids

    def _results(self) -> tuple[Result, ...]:
        if self._box.error is not None:
            raise self._box.error
        return tuple(self._box.results[number] for number in self._box.ids)


# The engine's thread ------------------------------------------------------------------------------


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class EngineClosed(RuntimeError):
    """The engine was closed, and takes no more requests."""


class EngineEnded(RuntimeError):
    """The engine has ended because of an exception, which is the cause of this one."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the engine's thread runs between two steps; `fail` is called if the engine has ended."""

    run: Callable[[], None]
    fail: Callable[[EngineEnded], None] = lambda error: None


class AsyncEngine:
    """Runs an engine in a thread of its own; every method may be called from any thread.

    Between two steps the thread takes what came meanwhile: requests, cancellations, questions. It
    never waits for readers of events: events are kept until they are read, for each request no more
    than it has tokens.

    A request waits from `submit` until its first token. More than `max_waiting` are refused.

    An exception in the engine ends it, and whoever waits for a request, or comes later, gets
    `EngineEnded` with that exception as its cause.

    It may be used as a context manager, also with ``async with``: leaving it closes it, after an
    exception without draining. A program that ends without closing it aborts what runs.

    Args:
      engine: the engine; nobody else may use it until this is closed.
      max_waiting: requests that may wait.

    Attributes:
      max_waiting: requests that may wait.
      max_length: tokens of prompt and result of a request at most.

    Raises:
      TypeError: if `max_waiting` is not an integer.
      ValueError: if it is not positive.
    """

    def __init__(self, engine: BaseEngine, *, max_waiting: int = 1024) -> None:
        _checks.check_sizes(max_waiting=max_waiting)
        self.max_waiting = max_waiting
        self.max_length = engine.max_length
        self._engine = engine
        # Guards what follows. `_over` is signalled once, at the end.
        self._condition = threading.Condition()
        self._calls: collections.deque[_Call] = collections.deque()
        self._live: dict[RequestHandle, Mailbox] = {}
        self._waiting = 0
        self._closing: Literal["drain", "abort"] | None = None
        self._ended: EngineStatistics | BaseException | None = None
        self._over = Signal()
        # Of the engine's thread alone.
        self._handles: dict[int, RequestHandle] = {}
        self._untouched: set[int] = set()
        self._observers: list[Callable[[Result], None]] = []
        self._thread = threading.Thread(target=self._run, name="turbojax-engine", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose(drain=error is None)

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken: it was closed, or has ended."""
        return self._closing is not None or self._ended is not None

    @property
    def error(self) -> BaseException | None:
        """The exception that has ended the engine, if any."""
        return self._ended if isinstance(self._ended, BaseException) else None

    @property
    def waiting(self) -> int:
        """Requests that wait for their first token."""
        return self._waiting

    def submit(self, request: Request, samples: int = 1) -> RequestHandle:
        """Gives a request to the engine, and does not wait.

        What the engine refuses comes from the handle, see `RequestHandle.accepted`.

        Args:
          request: what to continue, and how.
          samples: how many results, see `Engine.add_samples`.

        Raises:
          TypeError: if `samples` is not an integer.
          ValueError: if it is not positive, or larger than `max_waiting`.
          QueueFull: if too many requests wait.
          EngineClosed: if it was closed.
          EngineEnded: if the engine has ended.
        """
        _checks.check_sizes(samples=samples)
        if samples > self.max_waiting:
            raise ValueError(f"{samples=} must be at most max_waiting={self.max_waiting}")
        box = Mailbox()
        handle = RequestHandle(request, samples, box, self._cancel)
        with self._condition:
            if self.error is not None:
                raise _ended(self.error)
            if self.closing:
                raise EngineClosed("this engine was closed, and takes no more requests")
            if self._waiting + samples > self.max_waiting:
                raise QueueFull(
                    f"{self._waiting} requests wait, {samples} more must be at most "
                    f"max_waiting={self.max_waiting}"
                )
            self._waiting += samples
            self._live[handle] = box
            self._calls.append(_Call(lambda: self._add(handle, box)))
            self._condition.notify()
        return handle

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """A request's events as they come.

        Leaving the loop, or cancelling the task that is in it, aborts the request.

        Args:
          request: what to continue, and how.

        Yields:
          Its tokens, and its end.

        Raises:
          Exception: see `submit` and `RequestHandle.accepted`.
        """
        with self.submit(request) as handle:
            async for events in handle.batches():
                for event in events:
                    yield event

    def statistics(self, timeout: float | None = None) -> EngineStatistics:
        """What the engine did and holds, taken by its thread; blocks until after its step.

        After `close`, what it was at the end.

        Args:
          timeout: seconds to wait; None for any time.

        Raises:
          TimeoutError: if they are over.
          EngineEnded: if the engine has ended.
        """
        return self._ask().result(timeout)

    async def astatistics(self) -> EngineStatistics:
        """The same for event loops."""
        return await asyncio.wrap_future(self._ask())

    def observe(self, observer: Callable[[Result], None]) -> None:
        """Has every request's result passed to a function, also of requests that nobody reads.

        Args:
          observer: called in the engine's thread, which waits for it; its exceptions end the
            engine.
        """
        self._call(_Call(lambda: self._observers.append(observer)))

    def abort_all(self) -> None:
        """Ends all requests that are not done, soon."""
        with self._condition:
            handles = list(self._live)
        for handle in handles:
            handle.cancel()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Takes no more requests, and waits until the thread has ended; it may be called again.

        Args:
          drain: whether requests run to their end; otherwise they are aborted.
          timeout: seconds after which they are aborted all the same; None for never.
        """
        self._stop(drain)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._stop(False)
            self._thread.join()
        atexit.unregister(self._at_exit)

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """The same for event loops.

        Args:
          drain: see `close`.
          timeout: see `close`.
        """
        self._stop(drain)
        try:
            await asyncio.wait_for(self._over.until(self._is_over), timeout)
        except TimeoutError:
            self._stop(False)
            await self._over.until(self._is_over)
        self.close(drain=False)

    def _is_over(self) -> bool:
        return self._ended is not None

    def _at_exit(self) -> None:
        self.close(drain=False)

    def _stop(self, drain: bool) -> None:
        with self._condition:
            if not drain or self._closing is None:
                self._closing = "drain" if drain else "abort"
            self._condition.notify()

    def _call(self, call: _Call) -> None:
        """Has the engine's thread run a call; `call.fail` is called if the engine has failed."""
        with self._condition:
            if self._ended is None:
                self._calls.append(call)
                self._condition.notify()
                return
        if self.error is not None:
            call.fail(_ended(self.error))

    def _cancel(self, handle: RequestHandle, reason: Reason) -> None:
        # Calls run in order: the request has been added by then.
        self._call(_Call(lambda: self._abort(handle, reason)))

    def _ask(self) -> "concurrent.futures.Future[EngineStatistics]":
        future: concurrent.futures.Future[EngineStatistics] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._engine.statistics())
            except BaseException as error:
                future.set_exception(_ended(error))
                raise

        self._call(_Call(run, lambda error: _fail(future, error)))
        if isinstance(self._ended, EngineStatistics) and not future.done():
            future.set_result(self._ended)
        return future

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:
            self._die(error)
        with self._over.condition:
            waiters = self._over.changed()
        wake(waiters)

    def _run_once(self) -> bool:
        """Does what was asked for, then a step; returns whether there is more to do."""
        with self._condition:
            self._condition.wait_for(self._has_work)
            count, closing = len(self._calls), self._closing
        for _ in range(count):
            # One by one: where one raises, the others are told so.
            self._calls.popleft().run()
        if closing == "abort":
            for number in list(self._handles):
                self._abort_one(number, "aborted")
        if not self._engine.idle:
            self._deliver(self._engine.step())
            return True
        if closing is None or count:
            return True
        statistics = self._engine.statistics()
        with self._condition:
            if not self._calls:
                self._ended = statistics
            return self._ended is None

    def _has_work(self) -> bool:
        return bool(self._calls) or self._closing is not None or not self._engine.idle

    def _add(self, handle: RequestHandle, box: Mailbox) -> None:
        try:
            if handle.samples == 1:
                numbers: tuple[int, ...] = (self._engine.add(handle.request),)
            else:
                numbers = self._engine.add_samples(handle.request, handle.samples)
        except Exception as error:
            # Refused. If the error has ended the engine, the engine's next call raises that.
            self._forget(handle, handle.samples)
            wake(box.fail(error))
            return
        self._handles.update(dict.fromkeys(numbers, handle))
        self._untouched.update(numbers)
        wake(box.accept(numbers))

    def _abort(self, handle: RequestHandle, reason: Reason) -> None:
        for number in self._live[handle].ids if handle in self._live else ():
            self._abort_one(number, reason)

    def _abort_one(self, number: int, reason: Reason) -> None:
        # It may be done, with events that the next step hands out.
        with contextlib.suppress(KeyError):
            self._engine.abort(number, reason=reason)

    def _deliver(self, events: list[Event]) -> None:
        boxes: dict[RequestHandle, list[Event]] = {}
        begun = 0
        for event in events:
            handle = self._handles.get(event.request_id)
            if handle is None:
                continue  # of a request that was added before this was made
            boxes.setdefault(handle, []).append(event)
            if event.request_id in self._untouched:
                self._untouched.remove(event.request_id)
                begun += 1
            if isinstance(event, Finished):
                del self._handles[event.request_id]
                for observer in self._observers:
                    observer(event.result)
        waiters = []
        for handle, of_handle in boxes.items():
            box = self._live[handle]
            waiters += box.put(of_handle)
            if box.is_done():
                self._forget(handle, 0)
        with self._condition:
            self._waiting -= begun
        wake(waiters)

    def _forget(self, handle: RequestHandle, waiting: int) -> None:
        with self._condition:
            del self._live[handle]
            self._waiting -= waiting

    def _die(self, error: BaseException) -> None:
        """Tells everybody that the engine has ended."""
        with self._condition:
            self._ended = error
            calls, self._calls = self._calls, collections.deque()
            boxes, self._live = list(self._live.values()), {}
            self._waiting = 0
        self._handles.clear()
        self._untouched.clear()
        for call in calls:
            call.fail(_ended(error))
        wake(waiter for box in boxes for waiter in box.fail(_ended(error)))


def _ended(cause: BaseException) -> EngineEnded:
    words = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    error = EngineEnded(f"the engine has ended: {words}")
    error.__cause__ = cause
    return error


def _fail(future: "concurrent.futures.Future[EngineStatistics]", error: EngineEnded) -> None:
    # Whoever waited may have cancelled the future at any moment before this.
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
