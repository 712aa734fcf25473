"""Exceptions where nobody expects one: at the n-th line of our code, or from a real signal."""

import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import turbojax

OURS = str(Path(turbojax.__file__).parent)


class TooLong(AssertionError):
    """A call did not come back in time."""


class Lines:
    """Raises before a certain line of ours runs.

    Args:
      at: how many lines run before; None to only count.
      error: what to raise.
      where: part of the path of the files whose lines count.

    Attributes:
      count: lines that ran.
    """

    def __init__(
        self, at: int | None, error: type[BaseException] = KeyboardInterrupt, where: str = OURS
    ) -> None:
        self.at, self.error, self.where = at, error, where
        self.count = 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "call":
            return self._trace if self.where in frame.f_code.co_filename else None
        if event == "line":
            if self.count == self.at:
                raise self.error(f"at line {frame.f_lineno} of {frame.f_code.co_name}")
            self.count += 1
        return self._trace

    def __enter__(self) -> "Lines":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)


def lines_of(work: Callable[[], object], where: str = OURS) -> int:
    """How many lines of ours this runs."""
    with Lines(None, where=where) as lines:
        work()
    return lines.count


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TooLong` inside, as soon as this much time has passed."""

    def alarm(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ctrl_c(seconds: float, work: Callable[[], object]) -> KeyboardInterrupt | None:
    """Calls something that a signal interrupts after this much time, as Ctrl-C does.

    No context manager: the signal may come while one is entered or left.

    Returns:
      The exception, None if the signal came too late.
    """
    armed = True

    def alarm(number: int, frame: FrameType | None) -> None:
        if armed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
    except KeyboardInterrupt as error:
        return error
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def seconds_of(work: Callable[[], object]) -> float:
    """How long this takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def points(count: int, end: int, seed: int) -> list[int]:
    """This many places before `end`, spread evenly, each by chance within its part."""
    rng = random.Random(seed)
    return [int((i + rng.random()) * end / count) for i in range(count)]
