"""The engine's guard alone, under thousands of real signals: nothing is lost without a word."""

import collections
import functools
import gc
import itertools
import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.tools.interrupting import ctrl_c
from turbojax.models.engine.base import BaseEngine, Guard
from turbojax.models.engine.statistics import Counts


class Counter(BaseEngine):
    """Hands out 0, 1, 2, ... instead of events; a run gets five steps of them."""

    _queue = _abort = statistics = None

    def __init__(self):
        super().__init__(SimpleNamespace(max_length=1), {}, Counts())
        self.guard, self.count = self._guard, 0

    def _works(self):
        return True

    def _advance(self):
        for _ in range(3):
            self._events.append(self.count)
            self.count += 1

    def _run(self, progress):
        for _ in range(5):
            self._guard.change("run", self._advance)
        return list(self._events), collections.deque()

    def go(self, way, seen):
        """Until it is interrupted, or the signal was swallowed."""
        if way == "stream":
            for event in itertools.islice(self.stream(), 10_000):
                seen.append(event)
        for _ in range(1000):
            seen += self.step() if way == "step" else self.run()


def has_ended(guard):
    try:
        guard.check()
    except RuntimeError as error:
        return (str(error), type(error.__cause__))
    return None


@pytest.fixture
def no_collector():
    """Python swallows an exception in a callback of its garbage collector, of which jax has one."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.fuzz)])
def test_signals(count, record_property):
    rng = random.Random(count)
    came = ended = 0
    for i in range(count):
        counter, seen = Counter(), []
        way = ("step", "stream", "run")[i % 3]
        came += (
            ctrl_c(rng.uniform(2e-5, 3e-4), functools.partial(counter.go, way, seen)) is not None
        )
        told = has_ended(counter.guard)
        if told is None:
            seen += counter.step()
            assert seen == list(range(counter.count))
        else:
            assert told == ("this engine has ended: KeyboardInterrupt", KeyboardInterrupt)
            ended += 1
    assert 0 < ended < came
    record_property("counted", f"engine's guard: {came:,} signals, {ended:,} inside a call")


@pytest.fixture
def quick_switches():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_polling_while_another_thread_is_in_a_call():
    """It is in use and has not ended, whatever frames that thread has on top."""
    guard, told, until = Guard(), set(), time.monotonic() + 0.5

    def work():
        while time.monotonic() < until:
            sum(x for x in range(50))
        return "done"

    results = []
    thread = threading.Thread(target=lambda: results.append(guard.change("step", work)), name="t")
    thread.start()
    while thread.is_alive():
        told.add(has_ended(guard))
    thread.join()
    texts = {found[0] for found in told - {None}}
    assert texts == {
        f"this engine is in use by another thread (step in 't', number {thread.ident})"
    }
    assert results == ["done"]
    assert has_ended(guard) is None


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_call_is_running_until_it_returns_or_raises(error):
    """Also while it is below others on its stack."""
    calls, running = [], []

    def asked(depth):
        if depth:
            return asked(depth - 1)
        (call,) = guard._calls.values()
        calls.append(call)
        other = threading.Thread(target=lambda: running.append(call.is_running()))
        other.start()
        other.join()
        running.append(call.is_running())
        if error is not None:
            raise error
        return 5

    guard = Guard()
    if error is None:
        assert guard.change("step", lambda: asked(20)) == 5
    else:
        with pytest.raises(error):
            guard.change("step", lambda: asked(20))
    assert running == [True, True]
    assert [call.is_running() for call in calls * 2] == [False, False]
