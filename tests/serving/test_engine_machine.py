"""The engine's host side, driven through thousands of operations with a device made of numpy.

In every way that steps are made: requests of all kinds come, end and are ended at any moment, leave
the pool for host memory or to run their tokens again, and each gets its own text.
"""

import random

import pytest

from tests.serving.engine_texts import VOCABULARY, NoRepeats
from tests.serving.engine_watching import MODES, Watched
from turbojax.models import Request, Sampling
from turbojax.models.generation.sampling import Penalties

WINDOWS = (None,), (20,), (None, 20), (33, None, 7, 33), (64, 16), (2,)
REUSE = (False, False), (True, False), (True, True)
LEAVING = (False,), (False,), (True,), (True, False)
GUESSING = (True,), (True,), (True, True, False), (True, False, False)


class Crowd:
    """More requests than the pool has room for, of long texts, many of which begin alike."""

    def __init__(self, mode: str, seed: int) -> None:
        self.mode, self.rng = mode, random.Random(seed)
        self.counted = dict.fromkeys(
            ("finished", "swaps", "recomputations", "prefix_hits", "accepted_tokens"), 0
        )
        self.aborted = self.late = 0

    def request(self, most: int, begin: tuple[int, ...] = ()) -> Request:
        """Few tokens and round lengths, so that prompts begin alike and end where pages end."""
        rng = self.rng
        kind = rng.randrange(1, 3)
        prompt = list(begin)
        if not begin:
            count = rng.choice([0, 15, 16, 31, 32, 33])
            prompt = [(kind * i - 1) % VOCABULARY for i in range(count)]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 18))]
        prompt = prompt[: most - 6]
        asked = {}
        if rng.random() < 0.3:
            asked["sampling"] = Sampling(rng.choice([0.5, 2.0]), seed=rng.randrange(9))
        if rng.random() < 0.1:
            asked["constraint"] = NoRepeats(rng.randrange(256))
        if rng.random() < 0.1:
            bias = {rng.randrange(VOCABULARY): rng.choice([-3.0, 1.0, float("-inf")])}
            wishes = {
                "penalties": Penalties(1.5, 0.3, 0.2),
                "logit_bias": bias,
                "logprobs": rng.randrange(4),
            }
            asked |= {
                name: wishes[name] for name in rng.sample(sorted(wishes), rng.randrange(1, 4))
            }
        return Request(
            prompt,
            min(rng.choice([1, 30, 45, 60, 60]), most - len(prompt)),
            rng.choice([(), (), (), (), (), (0,), (1, 3)]),
            priority=rng.choice([0, 0, 0, 0, -1, 2]),
            timeout=rng.choice([None] * 9 + [40.0]),
            **asked,
        )

    def follow_up(self, watched: Watched, most: int) -> Request:
        """A prompt that holds another request's text, as in a conversation."""
        number = self.rng.choice(sorted(watched.tokens))
        return self.request(most, (*watched.prompts[number], *watched.tokens[number]))

    def round(self) -> None:
        """One engine, until all is done."""
        rng = self.rng
        pages, windows = rng.randrange(4, 9), rng.choice([*WINDOWS, (None,), (None,)])
        prefixes, results = rng.choice(REUSE)
        watched = Watched(
            self.mode,
            rng.choice([1, 2, 3, 4, 5, 5]),
            rng.choice(LEAVING),
            rng.choice([1, 4, 15]),
            rng.choice(GUESSING),
            pages=pages,
            step_tokens=rng.choice([1, 7, 16, 40, 100]),
            prefixes=prefixes,
            results=results,
            windows=windows,
            window_pages=rng.choice([None, None, 5, 8]) if len(set(windows)) > 1 else None,
            right=rng.choice([0.0, 0.8, 1.0]),
            max_length=(most := rng.choice([80, 16 * pages])),
        )
        for _ in range(rng.randrange(3, 12)):
            follows = watched.tokens and rng.random() < 0.2
            request = self.follow_up(watched, most) if follows else self.request(most)
            watched.add(request, rng.choice([1, 1, 1, 2, 4]))
            for _ in range(rng.choice([0, 0, 1, 20])):
                watched.step()
            if rng.random() < 0.1 and watched.still_pending():
                reason = rng.choice(["aborted", "stop"])
                watched.abort(rng.choice(watched.still_pending()), reason)
        watched.finish()
        if windows == (None,) and not results:
            assert watched.device.behind == 0, "a draft model that lost its text"
        after = watched.engine.statistics()
        for name in self.counted:
            self.counted[name] += getattr(after, name)
        self.aborted, self.late = self.aborted + watched.aborted, self.late + watched.late


@pytest.mark.quick(slow=4)
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


def test_pages_of_results_are_kept_up_to_the_last_token_that_was_fed():
    """A request ends with its last page full but for its last token; the next one goes on there."""
    for mode in ("together", "ngram"):
        options = {"pages": 7, "step_tokens": 16, "prefixes": True, "results": True}
        watched = Watched(mode, 2, guesses=3, guessing=(True, True, False), right=1.0, **options)
        for prompt in range(50, 54):
            watched.add(Request([1] * prompt, 80 - prompt))
            watched.finish()
            text = [1] * prompt + watched.tokens[max(watched.tokens)]
            watched.add(Request([*text, 2, 3], 4))
            watched.finish()
