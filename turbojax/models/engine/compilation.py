"""Counts the engine's programs as they are compiled, so that a step's time can leave that out.

Counted by thread: engines that run side by side each ask for what their own step compiled.
"""

import threading
from typing import NamedTuple

import jax

# A program that was traced for one device is compiled for another without being traced again.
_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Counts(threading.local):
    traced = compiled = 0


class Seen(NamedTuple):
    """Programs that a thread has traced and compiled so far."""

    traced: int
    compiled: int


_counts = _Counts()


def note() -> None:
    """Counts a program; to be called in the body of a jitted function, which runs once for each."""
    _counts.traced += 1


def count() -> int:
    """Calls of `note` in this thread."""
    return _counts.traced


def seen() -> Seen:
    """What this thread has traced and compiled so far."""
    return Seen(_counts.traced, _counts.compiled)


def since(before: Seen) -> int:
    """Programs that this thread has compiled since then."""
    return max(_counts.traced - before.traced, _counts.compiled - before.compiled)


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == _COMPILED:
        _counts.compiled += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
