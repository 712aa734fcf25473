"""One thread at a time in an engine, and none after an interrupted call."""

import collections
import contextlib
import functools
import gc
import itertools
import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.serving.engine_device import make, on
from tests.tools.interrupting import ctrl_c
from turbojax.models import Finished, Request
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


WANTED = [Request([1] * 20, 6), Request([2] * 17, 9)]


class Pause:
    """Stops a thread inside a call until the test goes on."""

    def __init__(self, call):
        self.call, self.count = call, 0
        self.reached, self.resume = threading.Event(), threading.Event()

    def __call__(self, *arguments, **options):
        self.count += 1
        if self.count == 3:
            self.reached.set()
            assert self.resume.wait(60)
        return self.call(*arguments, **options)


def meanwhile(first, pause, others, name):
    """Runs `first` in a thread, the others while it pauses; returns its result."""
    found = []
    thread = threading.Thread(target=lambda: found.append(first()), name=name)
    thread.start()
    assert pause.reached.wait(60)
    try:
        others()
    finally:
        pause.resume.set()
        thread.join(60)
    assert not thread.is_alive()
    return found[0]


def alone():
    made, device = make(8, 2, 16, prefixes=True)
    with on(device):
        for request in WANTED:
            made.add(request)
        return {number: result.tokens for number, result in made.run().items()}


def all_refuse(made, message):
    calls = (
        made.step,
        made.run,
        made.statistics,
        lambda: list(made.stream()),
        lambda: made.add(WANTED[0]),
        lambda: made.abort(0),
        lambda: made.idle,
    )

    def call_all():
        for call in calls:
            with pytest.raises(RuntimeError, match=message):
                call()

    return call_all


@pytest.mark.parametrize("way", ["run", "step", "stream"])
def test_a_call_during_a_step_is_refused_and_the_step_goes_on(way):
    made, device = make(8, 2, 16, prefixes=True)
    for request in WANTED:
        made.add(request)
    pause = device.run_step = Pause(device.run_step)

    def first():
        if way == "run":
            return {number: result.tokens for number, result in made.run().items()}
        events = []
        while not made.idle:
            events += made.step() if way == "step" else list(made.stream())
        return {e.request_id: e.result.tokens for e in events if isinstance(e, Finished)}

    message = rf"this engine is in use by another thread \({way} in 'busy', number \d+\)"
    with on(device):
        assert meanwhile(first, pause, all_refuse(made, message), "busy") == alone()


def test_a_call_between_two_steps_of_a_run_is_refused_too():
    made, device = make(8, 2, 16, prefixes=True)
    for request in WANTED:
        made.add(request)
    pause = Pause(lambda count: made.statistics())  # its own thread may call
    message = r"this engine is in use by another thread \(run in 'busy'"
    with on(device):
        results = meanwhile(lambda: made.run(pause), pause, all_refuse(made, message), "busy")
    assert {number: result.tokens for number, result in results.items()} == alone()


def test_threads_take_turns():
    made, device = make(8, 2, 16, prefixes=True)
    events = []

    def turn(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)

    with on(device):
        for request in WANTED:
            turn(lambda request=request: made.add(request))
        given = made.stream()
        events.append(next(given))
        while not made.idle:
            turn(lambda: events.extend(made.step()))
        assert list(given) == []
    done = {e.request_id: e.result.tokens for e in events if isinstance(e, Finished)}
    assert done == alone()


def test_many_threads_at_once_harm_nothing():
    made, device = make(8, 2, 16, prefixes=True)
    for request in WANTED:
        made.add(request)
    events, refused, errors = [], [], []

    def work():
        while True:
            try:
                if made.idle:
                    return
                events.extend(made.step())
            except RuntimeError as error:
                refused.append(error)
                if "in use by another thread" not in str(error):
                    errors.append(error)
                    return

    with on(device):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors
    done = {e.request_id: e.result.tokens for e in events if isinstance(e, Finished)}
    assert done == alone()


def test_a_call_inside_a_call_is_refused():
    """As a handler of signals may make one."""
    made, device = make(8, 2, 16, prefixes=True)
    made.add(WANTED[0])
    plain, refused = device.run_step, []

    def run_step(*arguments, **options):
        with pytest.raises(RuntimeError, match="in use: step is under way in this thread") as error:
            made.abort(0)
        refused.append(error.value)
        return plain(*arguments, **options)

    device.run_step = run_step
    with on(device):
        while not made.idle:
            made.step()
    assert len(refused) > 5


def test_a_run_inside_a_run_is_refused():
    made, device = make(8, 2, 16, prefixes=True)
    made.add(WANTED[0])
    with on(device):
        with pytest.raises(RuntimeError, match="in use: run is under way in this thread"):
            made.run(lambda count: made.run())
        assert len(made.run()) == 1


def test_a_thread_that_died_in_a_step_ended_the_engine():
    made, device = make(8, 2, 16, prefixes=True)
    made.add(WANTED[0])
    error = SystemExit()

    def dies(*arguments, **options):
        raise error

    device.run_step = dies

    def work():
        with contextlib.suppress(SystemExit):
            made.step()

    with on(device):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    with pytest.raises(RuntimeError, match="this engine has ended: SystemExit") as told:
        made.step()
    assert told.value.__cause__ is error
