"""An engine that was interrupted says so; one that was not inside a step goes on.

On the device made of numpy, and 200 times each on a real one: an exception before a certain line,
and a signal at a certain time.
"""

import random

import pytest

from tests.serving.engine_device import make as make_fake
from tests.serving.engine_device import on
from tests.serving.engine_helpers import make
from tests.tools.interrupting import Lines, ctrl_c, lines_of, points, seconds_of, within
from turbojax.models import Finished, NewToken, Request, Sampling
from turbojax.models.engine import base
from turbojax.models.engine.placement import Vocabulary
from turbojax.models.engine.programs import PromptProgram
from turbojax.models.engine.sampler import Wanted

WAYS = ("step", "stream", "run")
MANY, FEW = 200, 6
WANTED = [
    Request([1, 2, 3, 4] * 3, 24),
    Request([5, 4] * 5, 26, sampling=Sampling(0.8, seed=3)),
    Request([7] * 9, 25),
]
SMALL = [Request([1] * 20, 4), Request([2] * 17, 3)]


class Session:
    """Requests through an engine, in one way; `go` goes on where it was interrupted."""

    def __init__(self, made, wanted, way):
        self.made, self.wanted, self.way = made, wanted, way
        self.numbers, self.events, self.results = [], [], {}

    def go(self):
        # Python looks for signals after calls of C, so that none of these lines loses a value.
        while len(self.numbers) < len(self.wanted):
            self.numbers.append(self.made.add(self.wanted[len(self.numbers)]))
        if self.way == "run":
            self.results.update(self.made.run())
        elif self.way == "stream":
            for event in self.made.stream():
                self.events.append(event)
        else:
            while not self.made.idle:
                self.events += self.made.step()

    def tokens(self):
        """Of each request, as events or results tell."""
        if self.way == "run":
            assert len(self.results) == len(self.wanted)
            return [self.results[number].tokens for number in self.numbers]
        found = {number: [] for number in self.numbers}
        done = {}
        for event in self.events:
            if isinstance(event, NewToken):
                assert event.index == len(found[event.request_id])
                found[event.request_id].append(event.token)
            else:
                assert done.setdefault(event.request_id, event.result) is event.result
        assert {n: r.tokens for n, r in done.items()} == {n: tuple(t) for n, t in found.items()}
        return [done[number].tokens for number in self.numbers]


def calls(made):
    """Every call that there is, by name."""
    return {
        "add": lambda: made.add(Request([1], 1)),
        "abort": lambda: made.abort(0),
        "step": made.step,
        "stream": lambda: list(made.stream()),
        "run": made.run,
        "idle": lambda: made.idle,
        "statistics": made.statistics,
    }


def ended(made):
    try:
        return made.idle is None
    except RuntimeError:
        return True


def check_ended(made, cause=None):
    for call in calls(made).values():
        with pytest.raises(RuntimeError, match=r"^this engine has ended: \w+") as error:
            call()
        if cause is not None:
            assert error.value.__cause__ is cause


def check(session, expected, cause):
    """The engine has ended, or the session comes to its end as if nothing had happened."""
    with within(60):
        if ended(session.made):
            check_ended(session.made)
            with pytest.raises(RuntimeError) as error:
                session.made.step()
            known = error.value.__cause__
            assert known is cause or (known is None and "interrupted inside" in str(error.value))
            return True
        session.go()
        assert session.tokens() == expected
        assert session.made.idle
    return False


# On the device made of numpy ----------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a broken device")])
def test_an_exception_inside_a_step_ends_the_engine(way, error):
    made, device = make_fake(8, 2, 16, prefixes=True)
    session = Session(made, SMALL, way)

    def broken(*arguments, **options):
        raise error

    device.run_step = broken
    with on(device), pytest.raises(type(error)) as found:
        session.go()
    assert found.value is error
    with on(device):
        check_ended(made, error)
        text = f"this engine has ended: {type(error).__name__}" + f": {error}" * bool(str(error))
        with pytest.raises(RuntimeError) as told:
            made.run()
    assert str(told.value) == text


def test_refused_arguments_end_nothing():
    made, device = make_fake(8, 2, 16, prefixes=True)
    number = made.add(SMALL[0])
    for refused in (Request([99], 1), Request([1] * 300, 5), [1], Request([1], 1, (77,))):
        with pytest.raises((ValueError, TypeError)):
            made.add(refused)
    with pytest.raises(KeyError, match="request 5 is not known"):
        made.abort(5)
    with pytest.raises(ValueError, match="reason='x' must be"):
        made.abort(number, reason="x")
    with on(device):
        assert set(made.run()) == {number}


def test_an_exception_while_a_request_is_added_or_aborted_ends_the_engine(monkeypatch):
    for name, patched in (("add", "add"), ("abort", "release")):
        made, _ = make_fake(8, 2, 16, prefixes=True)
        made.add(SMALL[0])
        error = KeyboardInterrupt()

        def broken(*arguments, error=error):
            raise error

        monkeypatch.setattr(made._scheduler, patched, broken)
        with pytest.raises(KeyboardInterrupt):
            calls(made)[name]()
        check_ended(made, error)


def test_the_end_is_known_where_no_handler_could_note_it(monkeypatch):
    """A second Ctrl-C, while the first is handled."""
    made, device = make_fake(8, 2, 16, prefixes=True)
    made.add(SMALL[0])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    device.run_step = interrupted
    with monkeypatch.context() as patch, on(device):
        patch.setattr(base.Guard, "_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step()
    with pytest.raises(RuntimeError, match="this engine has ended: interrupted inside step"):
        made.step()
    check_ended(made)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("way", WAYS)
def test_at_every_line_of_the_guard(way):
    def session():
        made, device = make_fake(8, 2, 16, prefixes=True)
        return Session(made, SMALL[:1], way), device

    whole, device = session()
    with on(device):
        count = lines_of(whole.go, base.__file__)
    assert count > 40
    outcomes = set()
    for at in range(count):
        made, device = session()
        with on(device):
            with pytest.raises(KeyboardInterrupt) as error, Lines(at, where=base.__file__):
                made.go()
            outcomes.add(check(made, whole.tokens(), error.value))
    assert outcomes == {False, True}


def test_results_of_an_interrupted_run_come_with_the_next():
    made, device = make_fake(8, 2, 16, prefixes=True)
    whole = Session(made, [*SMALL, Request([3] * 5, 40)], "run")
    with on(device):
        whole.go()
    for way in WAYS:
        for steps in range(1, 30, 4):
            made, device = make_fake(8, 2, 16, prefixes=True)
            session = Session(made, whole.wanted, way)
            session.numbers = [made.add(request) for request in session.wanted]
            left = iter(range(steps))

            def progress(count, left=left):
                if next(left, None) is None:
                    raise ZeroDivisionError

            with on(device):
                with pytest.raises(ZeroDivisionError):
                    made.run(progress)
                session.go()
            if way == "run":
                assert session.tokens() == whole.tokens()
                continue
            done = {e.request_id: e.result for e in session.events if isinstance(e, Finished)}
            assert [done[n].tokens for n in session.numbers] == whole.tokens()
            # The tokens of a request that was not done are all told.
            told = [
                e.token for e in session.events if isinstance(e, NewToken) and e.request_id == 2
            ]
            assert tuple(told) == done[2].tokens


def test_a_stream_may_be_left_at_any_event():
    made, device = make_fake(8, 2, 16, prefixes=True)
    whole = Session(made, SMALL, "stream")
    with on(device):
        whole.go()
        for way in ("step", "stream"):
            made, _ = make_fake(8, 2, 16, prefixes=True)
            session = Session(made, SMALL, way)
            session.numbers = [made.add(request) for request in SMALL]
            while not made.idle:
                events = made.stream()
                session.events.append(next(events))
                events.close()
                if len(session.events) == 5:
                    session.events += made.step()
            assert session.tokens() == whole.tokens()


# On a real one ------------------------------------------------------------------------------------


def session(model, way):
    options = {"num_pages": 5, "max_sequences": 3, "step_tokens": 8, "max_length": 64}
    return Session(make(model, **options, reproducible=True), WANTED, way)


@pytest.fixture(scope="module")
def undisturbed(model):
    """What all others are to give, and that pages were scarce."""
    whole = session(model, "step")
    whole.go()
    assert whole.made.statistics().preemptions > 0
    return whole.tokens()


@pytest.mark.parametrize("kind", [PromptProgram, Wanted, Vocabulary])
def test_what_steps_compare_runs_no_python(kind):
    # jax raises a ValueError of its own where an interrupt comes inside of these.
    assert kind.__eq__ is tuple.__eq__
    assert kind.__hash__ is tuple.__hash__


@pytest.mark.slow
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.fuzz)])
def test_an_exception_before_any_line(model, undisturbed, count, record_property):
    ends = 0
    rng = random.Random(count)
    totals = {way: lines_of(session(model, way).go) for way in WAYS}
    for i, part in enumerate(points(count, 10**6, seed=1)):
        way, kind = WAYS[i % 3], rng.choice([KeyboardInterrupt, RuntimeError])
        made = session(model, way)
        with pytest.raises(kind) as error, Lines(part * totals[way] // 10**6, kind):
            made.go()
        ends += check(made, undisturbed, error.value)
    assert 0 < ends <= count
    record_property("counted", f"engine: {count} exceptions before a line, {ends} ended it")


# Python swallows an exception in a callback of its garbage collector, of which jax has one.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.fuzz)])
def test_a_signal_at_any_time(model, undisturbed, count, record_property):
    came = ends = runs = 0
    # As long as most of them take; some come too late.
    length = {way: min(seconds_of(session(model, way).go) for _ in range(3)) for way in WAYS}
    rng = random.Random(count)
    while came < count and runs < 10 * count:
        way = WAYS[runs % 3]
        made = session(model, way)
        cause = ctrl_c(max(rng.random() * length[way], 1e-5), made.go)
        runs, came = runs + 1, came + (cause is not None)
        ends += check(made, undisturbed, cause)
    assert came == count
    record_property("counted", f"engine: {came} signals in {runs} runs, {ends} ended it")
