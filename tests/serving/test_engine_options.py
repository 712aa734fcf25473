"""Priorities, samples, time limits, and what ways to go on cost, on the device made of numpy."""

import dataclasses
from unittest import mock

import pytest

from tests.serving.engine_device import make, on, step
from tests.serving.engine_texts import expected
from tests.serving.engine_watching import Watched
from turbojax.models import Finished, Request, Sampling
from turbojax.models.engine import best_of, engine, statistics


def run(made, device) -> dict:
    results = {}
    while not made.idle:
        for event in step(made, device):
            if isinstance(event, Finished):
                results[event.request_id] = event.result
    return results


# Samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("reproducible", [False, True])
def test_samples_share_the_full_pages_of_their_prompt(prefixes, reproducible):
    made, device = make(12, 4, 64, prefixes=prefixes, reproducible=reproducible)
    request = Request([1, 2, 3] * 14, 20, sampling=Sampling(1.0, seed=2**32 - 2), logprobs=0)
    with on(device):
        numbers = made.add_samples(request, 4)
    assert numbers == (0, 1, 2, 3)
    results, most = {}, 0
    while not made.idle:
        for event in step(made, device):
            if isinstance(event, Finished):
                results[event.request_id] = event.result
        after = made.statistics()
        most = max(most, after.pages - after.free_pages - after.cached_pages)
    # Two pages for all, two more of each: 42 + 19 tokens.
    assert most == 2 + 4 * 2
    assert made.statistics().prompt_tokens == 42 + 3 * 10
    assert made.statistics().preemptions == 0
    for i, number in enumerate(numbers):
        sampling = dataclasses.replace(request.sampling, seed=(2**32 - 2 + i) % 2**32)
        assert (
            results[number].tokens == expected(dataclasses.replace(request, sampling=sampling))[0]
        )
        assert results[number].reused_tokens == (32 if i else 0)
    assert len({result.tokens for result in results.values()}) > 2
    best, *others = best_of(results.values(), 4)
    assert all(best.mean_logprob >= other.mean_logprob for other in others)
    assert len(best_of(results.values())) == 1


def test_samples_run_although_the_first_of_them_is_ended():
    """At any moment of its prompt, or later."""
    for moment in range(8):
        made, device = make(12, 4, 16, prefixes=False)
        first, *others = made.add_samples(Request([1, 2, 3] * 14, 9), 3)
        for _ in range(moment):
            step(made, device)
        made.abort(first)
        results = run(made, device)
        for number in others:
            assert results[number].tokens == expected(Request([1, 2, 3] * 14, 9))[0]
        assert made.statistics().free_pages == 12


def test_how_many_samples():
    made, _ = make(8, 2, 16, prefixes=False)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        made.add_samples(Request([1], 1), 0)
    with pytest.raises(TypeError, match=r"count=1\.5 must be an integer"):
        made.add_samples(Request([1], 1), 1.5)
    assert made.idle


# Priorities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reproducible", "fast", "ngram"])
def test_who_is_more_urgent_takes_the_place_of_others(mode):
    """Slots, and pages: the least urgent, and of these the youngest, leaves first."""
    watched = Watched(mode, 2, pages=8, step_tokens=64, prefixes=False)
    for priority in (0, 5, 0):
        watched.add(Request([1] * 20, 40, priority=priority))
    for _ in range(6):
        watched.step()
    running = {x.request_id for x in watched.engine._scheduler.running}
    assert running == {0, 2}
    watched.add(Request([2] * 60, 30, priority=-1))
    for _ in range(4):
        watched.step()
    running = {x.request_id for x in watched.engine._scheduler.running}
    assert 3 in running
    assert running <= {0, 3}
    watched.finish()


def test_of_those_that_wait_the_most_urgent_comes_first():
    made, device = make(8, 1, 16, prefixes=False)
    order = []
    for priority in (3, 1, 2, 1, -7):
        made.add(Request([1] * 4, 3, priority=priority))
    while not made.idle:
        order += [e.request_id for e in step(made, device) if isinstance(e, Finished)]
    assert order == [4, 1, 3, 2, 0]


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reproducible", "fast", "ngram", "draft"])
def test_requests_end_when_their_time_is_over(mode):
    """While they run, wait, or are away, with the tokens that there are."""
    watched = Watched(mode, 2, pages=6, step_tokens=16, prefixes=False, right=0.0)
    for i in range(4):
        watched.add(Request([i] * 30, 50, timeout=[None, 35.0, 20.0, 8.5][i]))
    ended = {}
    while not watched.engine.idle:
        before = set(watched.pending)
        watched.step()
        ended |= dict.fromkeys(before - set(watched.pending), watched.now - 1000.0)
        where = {n: s.status.value for n, s in watched.engine._tracker.sequences.items()}
        if watched.now == 1007.0:
            assert where[3] == "waiting"
    # A second is a step: the first one that begins when it is too late.
    assert (ended[1], ended[2], ended[3]) == (35.0, 20.0, 9.0)
    assert watched.late == 3
    watched.nothing_is_left()


def test_a_request_that_is_done_has_no_time_limit():
    made, device = make(8, 2, 16, prefixes=False)
    made.add(Request([1] * 4, 3, timeout=1e9))
    assert run(made, device)[0].finish_reason == "length"
    assert not made._tracker._deadlines


# What leaving costs -------------------------------------------------------------------------------


def prompts_ran(known, tokens, seconds):
    known.stepped(seconds, prompt_tokens=tokens, several=False, sequences=1, new_tokens=1)


def test_what_is_sooner_done_is_done():
    known = statistics.Costs(may_recompute=True)
    # Nothing is known of how fast prompts run.
    assert not known.recomputes(10**9, 1)
    prompts_ran(known, 31, 1.0)  # too few tokens say nothing
    prompts_ran(known, 1000, 0.0)
    assert not known.recomputes(10**9, 1)
    prompts_ran(known, 1000, 1.0)
    for _ in range(80):
        known.swapped(10**6, 0.01)
    # A thousand tokens take a second; 100 MB each way as long as well, moved at 100 MB a second.
    for nbytes, tokens in ((10**8, 1000), (10**8, 1999), (10**6, 19)):
        assert known.recomputes(nbytes, tokens)
        assert not known.recomputes(nbytes, 2 * tokens + 2)
    # What was seen last counts a quarter.
    prompts_ran(known, 2000, 1.0)
    assert known.recomputes(10**8, 2499)
    assert not known.recomputes(10**8, 2501)
    known.swapped(0, 1.0)
    known.swapped(10**6, 0.0)
    assert known.recomputes(10**8, 2499)


def test_bits_that_count_are_never_computed_again():
    known = statistics.Costs(may_recompute=False)
    prompts_ran(known, 10**6, 1e-3)
    assert not known.recomputes(10**12, 1)


def guessing(known, steps, *, plain, with_guesses, new_tokens):
    """How many of so many steps have guesses, of these seconds; a sequence gets so many tokens."""
    count = 0
    for _ in range(steps):
        guesses = known.several_pay()
        count += guesses
        known.stepped(
            with_guesses if guesses else plain,
            prompt_tokens=0,
            several=guesses,
            sequences=10,
            new_tokens=round(10 * new_tokens) if guesses else 10,
        )
    return count


def test_guesses_go_on_while_they_pay():
    """Of three tokens in the time of two; and are tried again now and then where they do not."""
    known = statistics.Costs(may_recompute=True)
    assert guessing(known, 9, plain=1.0, with_guesses=2.0, new_tokens=3.0) == 8
    good = guessing(known, 320, plain=1.0, with_guesses=2.0, new_tokens=3.0)
    assert 300 <= good < 320
    bad = guessing(known, 320, plain=1.0, with_guesses=2.0, new_tokens=1.1)
    assert 5 <= bad < 40
    assert guessing(known, 640, plain=1.0, with_guesses=1.0, new_tokens=1.5) > 320
    # A step with prompts says nothing of one without guesses.
    known.stepped(99.0, prompt_tokens=500, several=False, sequences=10, new_tokens=10)
    assert 5 <= guessing(known, 320, plain=1.0, with_guesses=4.0, new_tokens=2.0) < 60


def test_an_engine_knows_what_pages_weigh_and_how_fast_prompts_run():
    """On a device on which a step takes a second, and nothing else does."""
    made, device = make(8, 2, 64, prefixes=False)
    clock = mock.Mock(now=0.0)
    plain = device.run_step

    def run_step(*arguments, **options):
        clock.now += 1.0
        return plain(*arguments, **options)

    device.run_step = run_step
    asked = []
    made._costs.recomputes = lambda nbytes, tokens: asked.append((nbytes, tokens))
    with mock.patch.object(engine.time, "perf_counter", side_effect=lambda: clock.now):
        for i in range(2):
            made.add(Request([i] * 40, 50))
        run(made, device)
    assert made._costs._tokens_per_second == pytest.approx(50.0, abs=25)
    (nbytes, tokens), *_ = asked
    assert nbytes == -(-tokens // 16) * made._device.caches[0].page_bytes
    assert made.statistics().swaps == len(asked)
