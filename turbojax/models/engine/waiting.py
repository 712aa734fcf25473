"""Waiting for what another thread does, in a thread or in an event loop."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterable

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
