"""The engine's host side, driven through thousands of operations with a device made of numpy.

In every way that steps are made: requests of all kinds come, end and are ended at any moment, leave
the pool for host memory or to run their tokens again, and each gets its own text.
"""

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.serving.engine_texts import VOCABULARY, NoRepeats
from tests.serving.engine_watching import MODES, Watched
from turbojax.models import Request, Sampling
from turbojax.models.generation.sampling import Penalties

# Few tokens and round lengths, so that prompts begin alike and end where pages end.
prompts = st.builds(
    lambda kind, length, tail: [(kind * i - 1) % VOCABULARY for i in range(length)] + tail,
    st.integers(1, 2),
    st.sampled_from([0, 15, 16, 31, 32, 33, 48]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=17),
)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "sampling": st.builds(Sampling, st.sampled_from([0.5, 2.0]), seed=st.integers(0, 9)),
        "penalties": st.just(Penalties(1.5, 0.3, 0.2)),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCABULARY - 1), st.sampled_from([-3.0, 1.0, float("-inf")]), max_size=3
        ),
        "constraint": st.builds(NoRepeats, st.integers(0, 255)),
        "logprobs": st.integers(0, 3),
    },
)
requests = st.builds(
    lambda tokens, count, stop, asked, priority, timeout: Request(
        tokens, count, stop, priority=priority, timeout=timeout, **asked
    ),
    prompts,
    st.integers(1, 40),
    st.sampled_from([(), (), (0,), (1, 3)]),
    st.one_of(st.just({}), st.just({}), wishes),
    st.sampled_from([0, 0, 0, 0, -1, 2]),
    st.sampled_from([None, None, None, 40.0]),
)
WINDOWS = (None,), (20,), (None, 20), (33, None, 7, 33), (64, 16), (2,)
REUSE = (False, False), (True, False), (True, True)
LEAVING = (False,), (True,), (True, False)
GUESSING = (True,), (True,), (True, True, False), (True, False, False)


class EngineMachine(RuleBasedStateMachine):
    mode = "fast"

    @initialize(
        pages=st.integers(4, 10),
        slots=st.integers(1, 5),
        step_tokens=st.sampled_from([7, 40, 1, 16, 100]),
        reuse=st.sampled_from(REUSE),
        windows=st.sampled_from(WINDOWS),
        window_pages=st.sampled_from([None, None, 5, 8]),
        recomputes=st.sampled_from(LEAVING),
        guesses=st.sampled_from([1, 4, 15]),
        guessing=st.sampled_from(GUESSING),
        right=st.sampled_from([0.0, 0.8, 1.0]),
    )
    def start(self, reuse, windows, window_pages, **options):
        if len(set(windows)) == 1:
            window_pages = None
        of_windows = {"windows": windows, "window_pages": window_pages}
        prefixes, results = reuse
        self.watched = Watched(
            self.mode, prefixes=prefixes, results=results, **of_windows, **options
        )

    @rule(request=requests, count=st.sampled_from([1, 1, 1, 2, 4]))
    def add(self, request, count):
        self.watched.add(request, count)

    @rule(request=requests, data=st.data())
    def add_what_follows_another(self, request, data):
        """A prompt that holds another request's text, as in a conversation."""
        if told := self.watched.tokens:
            number = data.draw(st.sampled_from(sorted(told)))
            begin = [*self.watched.prompts[number], *told[number], *request.tokens]
            self.watched.add(dataclasses.replace(request, tokens=begin[:150]))

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.watched.step()

    @precondition(lambda self: self.watched.still_pending())
    @rule(data=st.data(), reason=st.sampled_from(["aborted", "stop"]))
    def abort(self, data, reason):
        self.watched.abort(data.draw(st.sampled_from(self.watched.still_pending())), reason)

    @rule()
    def finish_all(self):
        self.watched.finish()

    def teardown(self):
        if hasattr(self, "watched"):
            self.watched.finish()


def machine(mode: str) -> type:
    """The tests of one way to make steps."""
    made = type(f"Machine_{mode}", (EngineMachine,), {"mode": mode}).TestCase
    made.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
    made.pytestmark = [pytest.mark.slow]
    return made


TestReproducible, TestFast, TestDense, TestNGram, TestDraft = map(machine, MODES)


class Crowd:
    """More requests than the pool has room for, of long texts, many of which begin alike."""

    def __init__(self, mode: str, seed: int) -> None:
        self.mode, self.rng = mode, random.Random(seed)
        self.counted = dict.fromkeys(
            ("finished", "swaps", "recomputations", "prefix_hits", "accepted_tokens"), 0
        )
        self.aborted = self.late = 0

    def request(self, most: int) -> Request:
        rng = self.rng
        kind = rng.randrange(1, 3)
        prompt = [(kind * i - 1) % VOCABULARY for i in range(rng.choice([0, 15, 16, 31, 32, 33]))]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 18))]
        asked = {}
        if rng.random() < 0.3:
            asked["sampling"] = Sampling(rng.choice([0.5, 2.0]), seed=rng.randrange(9))
        if rng.random() < 0.1:
            asked["constraint"] = NoRepeats(rng.randrange(256))
        if rng.random() < 0.1:
            asked |= {"penalties": Penalties(1.5, 0.3, 0.2), "logit_bias": {1: 0.5}, "logprobs": 2}
        return Request(
            prompt,
            min(rng.choice([5, 30, 45, 60]), most - len(prompt)),
            rng.choice([(), (), (), (), (1, 3)]),
            priority=rng.choice([0, 0, 0, 0, -1, 2]),
            timeout=rng.choice([None] * 9 + [60.0]),
            **asked,
        )

    def round(self) -> None:
        """One engine, until all is done."""
        rng = self.rng
        pages, windows = rng.randrange(5, 9), rng.choice([*WINDOWS, (None,), (None,)])
        prefixes, results = rng.choice(REUSE)
        watched = Watched(
            self.mode,
            rng.randrange(2, 6),
            rng.choice(LEAVING),
            rng.choice([1, 4, 15]),
            rng.choice(GUESSING),
            pages=pages,
            step_tokens=rng.choice([1, 7, 16, 40, 100]),
            prefixes=prefixes,
            results=results,
            windows=windows,
            right=rng.choice([0.0, 0.8, 1.0]),
            max_length=(most := rng.choice([80, 16 * pages])),
        )
        for _ in range(rng.randrange(3, 12)):
            watched.add(self.request(most), rng.choice([1, 1, 1, 3]))
            for _ in range(rng.choice([0, 0, 1, 20])):
                watched.step()
            if rng.random() < 0.1 and watched.still_pending():
                watched.abort(rng.choice(watched.still_pending()), "aborted")
        watched.finish()
        if windows == (None,) and not results:
            assert watched.device.behind == 0, "a draft model that lost its text"
        after = watched.engine.statistics()
        for name in self.counted:
            self.counted[name] += getattr(after, name)
        self.aborted, self.late = self.aborted + watched.aborted, self.late + watched.late


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [100, pytest.param(20_000, marks=pytest.mark.fuzz)])
def test_a_crowd(mode, count, record_property):
    crowd = Crowd(mode, seed=count)
    while crowd.counted["finished"] < count:
        crowd.round()
    found = crowd.counted
    assert found["swaps"] > count // 50
    assert (found["recomputations"] > count // 50) == (mode != "reproducible")
    assert found["prefix_hits"] > count // 10
    assert (found["accepted_tokens"] > count) == (mode in ("ngram", "draft"))
    assert min(crowd.aborted, crowd.late) > 0
    record_property(
        "counted",
        f"engine, {mode}: {found['finished']:,} requests with their own texts, {found['swaps']} "
        f"swaps, {found['recomputations']} recomputations, {crowd.late} too late",
    )


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("mode", ["ngram", "draft"])
def test_guesses_at_the_end_of_the_longest_texts(mode):
    """They need no page after the last one: wrong ones on their way do not count as tokens."""
    for late in range(0, 40, 5):
        options = {"pages": 9, "step_tokens": 40, "prefixes": False, "max_length": 64}
        watched = Watched(mode, 3, guesses=15, right=0.0, **options)
        watched.add(Request([1] * 10, 54))
        for _ in range(late):
            watched.step()
        watched.add(Request([2] * 10, 54))
        watched.add(Request([3] * 20, 44))
        watched.finish()
        assert watched.engine.statistics().preemptions > 0
