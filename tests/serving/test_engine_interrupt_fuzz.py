"""Ten thousand calls of an engine, many of them interrupted; what ends is what it would be alone.

On the device made of numpy, which tells what a request gets from its own tokens.
"""

import contextlib
import itertools
import random

import pytest

from tests.serving.engine_device import make, on
from tests.serving.engine_texts import VOCABULARY, expected
from tests.tools.interrupting import Lines, within
from turbojax.models import NewToken, Request

OPERATIONS = ("add", "add", "add", "add", "step", "steps", "stream", "run", "abort", "statistics")

PLACE = "turbojax/models/engine"


class Stop(Exception):
    """Of a progress callback."""


class Fuzz:
    """One engine after the other."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.operations = self.interrupts = self.ends = self.preemptions = self.finished = 0
        self.replace()

    def replace(self):
        rng = self.rng
        self.size = rng.choice([4, 5, 6])
        self.made, self.device = make(
            self.size, rng.randrange(2, 6), rng.choice([1, 7, 16, 40]), rng.random() < 0.7
        )
        self.pending, self.tokens = {}, {}
        self.aborted, self.in_runs = set(), set()

    def request(self):
        rng = self.rng
        length = rng.choice([0, 0, 0, 15, 16, 31])
        kind = rng.randrange(1, 3)
        prompt = [(kind * i - 1) % VOCABULARY for i in range(length)]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 10))]
        count = min(rng.choice([5, 30, 45]), 16 * self.size - len(prompt))
        return Request(prompt, count, rng.choice([(), (), (), (1, 3)]))

    def take(self, event):
        """What a caller gets: every token once, in order, and results that end them."""
        number = event.request_id
        if isinstance(event, NewToken):
            assert event.index == len(self.tokens[number])
            self.tokens[number].append(event.token)
        else:
            self.end(number, event.result)

    def end(self, number, result):
        told, (tokens, reason) = self.tokens[number], expected(self.pending.pop(number))
        # A run tells results alone, also one that was left before it could.
        assert len(told) == len(result.tokens) or number in self.in_runs
        assert result.tokens[: len(told)] == tuple(told)
        if result.finish_reason == "aborted":
            assert number in self.aborted
            assert result.tokens == tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (tokens, reason)
        self.finished += 1

    def call(self, name):
        rng, made = self.rng, self.made
        if name == "add":
            request = self.request()
            number = made.add(request)
            self.pending[number], self.tokens[number] = request, []
        elif name == "abort":
            number = rng.choice(sorted(self.pending) or [0])
            self.aborted.add(number)
            with contextlib.suppress(KeyError):
                made.abort(number)
        elif name == "stream":
            for event in itertools.islice(made.stream(), rng.randrange(1, 12)):
                self.take(event)
        elif name == "run":
            self.run(rng.randrange(1, 15))
        elif name == "statistics":
            held = made.statistics()
            assert held.tokens_held <= held.token_capacity
        else:
            for _ in range(1 if name == "step" else rng.randrange(2, 10)):
                for event in made.step():
                    self.take(event)

    def run(self, steps):
        left = iter(range(steps))
        self.in_runs |= set(self.pending)

        def progress(count):
            if next(left, None) is None:
                raise Stop

        with contextlib.suppress(Stop):
            for number, result in self.made.run(progress).items():
                self.end(number, result)

    def operate(self):
        """One call; where it is interrupted, the engine has ended or goes on."""
        self.operations += 1
        name, interrupted = self.rng.choice(OPERATIONS), self.rng.random() < 0.12
        try:
            with Lines(self.rng.randrange(400) if interrupted else None, where=PLACE):
                self.call(name)
        except KeyboardInterrupt:
            self.interrupts += 1
            try:
                self.made.statistics()
            except RuntimeError as error:
                self.check_ended(error)
                return
        self.made._groups[0].allocator.validate()
        if self.operations % 80 == 0:
            self.check_empty()

    def check_ended(self, error):
        assert str(error).startswith("this engine has ended: KeyboardInterrupt: at line")
        assert isinstance(error.__cause__, KeyboardInterrupt)
        for call in (self.made.step, self.made.run, lambda: self.made.add(Request([1], 1))):
            with pytest.raises(RuntimeError, match="^this engine has ended: "):
                call()
        self.ends += 1
        self.preemptions += self.made._scheduler.preemptions
        self.replace()

    def check_empty(self):
        """All ends, and no page is lost."""
        self.run(10**6)
        after = self.made.statistics()
        assert not self.pending
        assert self.made.idle
        assert after.free_pages + after.cached_pages == after.pages
        assert (after.running, after.waiting, after.swapped, after.swapped_bytes) == (0, 0, 0, 0)
        self.preemptions += after.preemptions
        self.replace()


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.fuzz)])
def test_calls_that_are_interrupted(count, record_property):
    fuzz = Fuzz(seed=count)
    while fuzz.operations < count:
        # Each time the same engine's functions, patched once.
        with on(fuzz.device), within(60):
            device = fuzz.device
            while fuzz.device is device and fuzz.operations < count:
                fuzz.operate()
    assert fuzz.interrupts > count // 100
    assert fuzz.preemptions >= count // 300
    assert 0 < fuzz.ends <= fuzz.interrupts
    record_property(
        "counted",
        f"engine: {fuzz.operations:,} operations, {fuzz.interrupts} interrupts that ended "
        f"{fuzz.ends} engines, {fuzz.preemptions} preemptions, {fuzz.finished:,} requests as alone",
    )
