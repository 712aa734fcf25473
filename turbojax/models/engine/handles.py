"""`RequestHandle`: a request that was given to an `AsyncEngine`, and what is heard of it."""

import collections
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from turbojax.models.engine.requests import Event, Finished, Request, Result
from turbojax.models.engine.waiting import Signal, Waiter

Reason = Literal["aborted", "stop"]
"""Why a request is ended by who gave it, see `Engine.abort`."""


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
