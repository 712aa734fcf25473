"""Waiting for what another thread does, in a thread or in an event loop."""

import asyncio
import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence

from turbojax.models.engine.requests import Event, Finished, Result

Ready = Callable[[], bool]
"""What somebody waits for; asked with the lock held."""


@dataclasses.dataclass(frozen=True, eq=False)
class Waiter:
    """Somebody in an event loop.

    Attributes:
      loop: which loop.
      future: what it awaits.
      ready: what it waits for.
    """

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    ready: Ready


class Signal:
    """A state that one thread changes and any number of others wait for.

    Attributes:
      condition: its lock is held while the state is looked at or changed.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self._waiters: list[Waiter] = []

    def changed(self) -> list[Waiter]:
        """Wakes threads, and finds who else is to be woken by `wake`; with the lock held."""
        self.condition.notify_all()
        found = [waiter for waiter in self._waiters if waiter.ready()]
        # Whoever is about to be woken need not be again.
        self._waiters = [waiter for waiter in self._waiters if waiter not in found]
        return found

    def wait(self, ready: Ready, timeout: float | None = None) -> bool:
        """Blocks this thread until something is ready.

        Args:
          ready: what.
          timeout: seconds after which it gives up; None for never.

        Returns:
          Whether it is ready.
        """
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


class Mailbox(Signal):
    """What an engine says of one request or several samples of it, until somebody reads it.

    It holds no more events than these have tokens and ends.

    Attributes:
      ids: the engine's numbers of them, once it has accepted them.
      results: of those that ended, by number.
      error: why there will be no more events.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: tuple[int, ...] = ()
        self.results: dict[int, Result] = {}
        self.error: BaseException | None = None
        self._events: collections.deque[Event] = collections.deque()

    def accept(self, ids: Sequence[int]) -> list[Waiter]:
        """The engine has them under these numbers; see `Signal.changed` for what is returned."""
        with self.condition:
            self.ids = tuple(ids)
            return self.changed()

    def put(self, events: Iterable[Event]) -> list[Waiter]:
        """Something happened to them."""
        with self.condition:
            for event in events:
                self._events.append(event)
                if isinstance(event, Finished):
                    self.results[event.request_id] = event.result
            return self.changed()

    def fail(self, error: BaseException) -> list[Waiter]:
        """Nothing will happen to them any more."""
        with self.condition:
            self.error = error
            return self.changed()

    def is_answered(self) -> bool:
        """Whether the engine has accepted or refused them."""
        return bool(self.ids) or self.error is not None

    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or (bool(self.ids) and len(self.results) == len(self.ids))

    def is_readable(self) -> bool:
        """Whether there are events, or will be none."""
        return bool(self._events) or self.is_done()

    def take(self, most: int | None = None) -> list[Event]:
        """Events that are there and were not taken before, in order; [] at the end.

        Args:
          most: how many; None for all.

        Raises:
          BaseException: `error`, once all events were taken.
        """
        with self.condition:
            count = len(self._events) if most is None else min(most, len(self._events))
            events = [self._events.popleft() for _ in range(count)]
            if not events and self.error is not None:
                raise self.error
            return events


def wake(waiters: Iterable[Waiter]) -> None:
    """Wakes who waits in event loops: with one call for each loop, which is a system call."""
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
