"""The engine's host side, driven through thousands of operations with a device made of numpy."""

from unittest import mock

import pytest

from tests.serving.engine_device import FakeDevice, make, step
from tests.serving.engine_texts import VOCABULARY, expected, next_token
from turbojax.models.engine import Engine, Finished, Request, engine, programs
from turbojax.models.engine.requests import Status
from turbojax.models.generation.sampling import NOTHING


def run_all(made: Engine, device: FakeDevice, wanted: list[Request]) -> dict:
    numbers = [made.add(request) for request in wanted]
    results = {}
    for _ in range(10_000):
        if made.idle:
            break
        events = step(made, device)
        results.update({e.request_id: e.result for e in events if isinstance(e, Finished)})
    for number, request in zip(numbers, wanted, strict=True):
        assert (results[number].tokens, results[number].finish_reason) == expected(request)
    return results


def test_the_youngest_leaves_and_the_oldest_never():
    made, device = make(8, 4, 16, prefixes=False)
    wanted = [Request([i % VOCABULARY] * 20, 60) for i in range(4)]
    results = run_all(made, device, wanted)
    assert results[0].preemptions == 0
    assert results[3].preemptions + results[2].preemptions > 0
    ends = sorted(results, key=lambda number: results[number].seconds)
    assert ends[0] == 0


def test_prefixes_go_before_running_requests():
    made, device = make(9, 2, 16, prefixes=True)
    for kind in range(4):
        run_all(made, device, [Request([kind] * 33, 1)])
    assert made.statistics().cached_pages == 8
    run_all(made, device, [Request([0, 4] * 30, 60)])
    assert made.statistics().preemptions == 0


@pytest.mark.parametrize("guesses", [0, 4])
def test_pages_are_not_kept_for_who_needs_no_more(guesses):
    """A pool for eight requests runs eight: of each, one page holds all it will ever have."""
    made, device = make(8, 8, 16, prefixes=True, guesses=guesses)
    wanted = [Request([i % VOCABULARY] * 4, 13) for i in range(16)]
    for request in wanted:
        made.add(request)
    most = 0
    while not made.idle:
        step(made, device)
        most = max(most, made.statistics().running)
    assert most == 8
    assert made.statistics().preemptions == 0


def test_a_prompt_is_not_looked_up_again_while_nothing_has_changed():
    made, device = make(8, 4, 16, prefixes=True)
    made.add(Request([0] * 60, 60))
    for _ in range(8):
        step(made, device)
    with mock.patch.object(
        made._groups[0].prefixes, "lookup", wraps=made._groups[0].prefixes.lookup
    ) as lookup:
        number = made.add(Request([1] * 100, 4))
        for _ in range(20):
            step(made, device)
        assert lookup.call_count == 1
        made.abort(number)
        made.add(Request([2] * 100, 4))
        for _ in range(5):
            step(made, device)
        assert lookup.call_count == 2
        made.abort(0)
        while not made.idle:
            step(made, device)
        assert lookup.call_count == 3
    assert made.statistics().finished == 3


def test_the_rate_leaves_out_tokens_and_time_of_steps_that_compile():
    made, device = make(16, 4, 16, prefixes=False)
    clock = mock.Mock(now=0.0)
    run = device.run_step

    def run_step(*arguments, **options):
        # The fourth step compiles once more, as where a first request is drawn.
        first = clock.steps in (0, 3)
        clock.now += 100.0 if first else 0.5
        clock.steps += 1
        if first:
            programs.note_traced()
        return run(*arguments, **options)

    clock.steps, device.run_step = 0, run_step
    with mock.patch.object(engine.time, "perf_counter", side_effect=lambda: clock.now):
        for kind in (1, 2):
            made.add(Request([kind] * 10, 9))
        while not made.idle:
            step(made, device)
    after = made.statistics()
    assert (after.first_step_seconds, after.first_step_tokens) == (200.0, 3 - 1)
    # Prompts run one after the other: ten steps, and a call that only reads the last token.
    assert (after.steps, after.seconds, after.new_tokens) == (10, 4.0, 18)
    assert after.tokens_per_second == 4.0


def test_a_token_in_a_shared_page_is_held_once():
    made, device = make(16, 4, 16, prefixes=True)
    for last in range(4):
        made.add(Request([1] * 40 + [last], 8))
    while made.statistics().running < 4:
        step(made, device)
    held = [sequence.held for sequence in made._scheduler.running]
    assert all(count > 40 for count in held)
    # Two pages are one and the same.
    assert made.statistics().tokens_held == sum(held) - 3 * 32
    assert made.statistics().tokens_held <= made.statistics().token_capacity


def test_nothing_is_evicted_for_who_has_to_wait():
    made, device = make(10, 2, 16, prefixes=True)
    run_all(made, device, [Request([1, 3] * 17, 1)])
    assert made.statistics().cached_pages == 2
    made.add(Request([0] * 60, 20))
    made.add(Request([2] * 90, 20))
    for _ in range(12):
        step(made, device)
    during = made.statistics()
    assert (during.running, during.waiting, during.cached_pages) == (1, 1, 2)
    run_all(made, device, [])
    assert made.idle


def test_a_prompt_in_the_pool_is_not_run_again_but_for_its_last_token():
    made, device = make(16, 2, 16, prefixes=True)
    prompt = [0, 1, 2, 3] * 12  # three full pages
    first = run_all(made, device, [Request(prompt, 2)])[0]
    before = made.statistics().prompt_tokens
    second = run_all(made, device, [Request(prompt, 2)])[1]
    assert (first.reused_tokens, second.reused_tokens) == (0, 32)
    assert made.statistics().prompt_tokens == before + 16
    longer = run_all(made, device, [Request([*prompt, *second.tokens, 1], 2)])[2]
    assert longer.reused_tokens == 48
    assert (made.statistics().prefix_hits, made.statistics().reused_tokens) == (2, 80)


@pytest.mark.parametrize("results", [False, True])
def test_what_a_result_holds_is_found_by_the_next_turn_if_asked_for(results):
    made, device = make(16, 2, 16, prefixes=True, results=results)
    prompt = [2, 1] * 12
    first = run_all(made, device, [Request(prompt, 60)])[0]
    turn = run_all(made, device, [Request([*prompt, *first.tokens, 3], 4)])[1]
    # 24 + 60 tokens, of which the last was never fed: five full pages, of which one holds nothing
    # but tokens of the prompt.
    assert turn.reused_tokens == (80 if results else 16)


def test_requests_that_come_together_share_their_beginning():
    made, device = make(32, 4, 16, prefixes=True)
    run_all(made, device, [Request([1] * 40 + [i], 8) for i in range(4)])
    assert made.statistics().prefix_hits == 3


def test_private_copies_of_a_known_prefix_do_not_block_the_pool():
    """A prefix held by nobody stays while somebody holds a page after it: it has to go, too."""
    made, device = make(6, 2, 16, prefixes=True)
    allocator, prefixes = made._groups[0].allocator, made._groups[0].prefixes
    tokens = [1] * 96
    # The first two pages of the text below, in pages that no sequence holds.
    handle = allocator.allocate(32)
    prefixes.insert(tokens[:32], allocator.pages(handle))
    allocator.free(handle)
    number = made.add(Request(tokens[:33], 60))
    sequence = made._tracker.sequences[number]
    with mock.patch.object(prefixes, "lookup", return_value=((), 0)):
        while sequence.held < 48:
            step(made, device)
    # A page of its own now stands after pages that are not its own.
    prefixes.insert(tokens[:48], allocator.pages(sequence.handles[0]))
    assert prefixes.evict(6) == 0
    for _ in range(60):
        step(made, device)
    assert made.idle


def test_aborting_at_every_moment():
    for moment in range(40):
        made, device = make(5, 2, 16, prefixes=False)
        numbers = [made.add(Request([i] * 30, 30)) for i in range(3)]
        for _ in range(moment):
            step(made, device)
        seen = {
            n: made._tracker.sequences[n].status for n in numbers if n in made._tracker.sequences
        }
        for number in seen:
            made.abort(number)
        while not made.idle:
            step(made, device)
        statistics = made.statistics()
        assert statistics.free_pages == 5
        assert statistics.swapped_bytes == 0
        assert statistics.finished == 3
        if moment == 0:
            assert set(seen.values()) == {Status.WAITING}
    assert Status.RUNNING in _statuses_over_time()
    assert Status.SWAPPED in _statuses_over_time()


def _statuses_over_time() -> set[Status]:
    """Of the requests of the test above, so that it is known to meet them."""
    made, device = make(5, 2, 16, prefixes=False)
    numbers = [made.add(Request([i] * 30, 30)) for i in range(3)]
    found = set()
    for _ in range(40):
        step(made, device)
        found |= {
            made._tracker.sequences[n].status for n in numbers if n in made._tracker.sequences
        }
    return found


def test_nobody_overtakes_who_had_to_leave():
    made, device = make(6, 2, 16, prefixes=False)
    for request in (Request([1] * 16, 64), Request([2] * 30, 40), Request([3], 1)):
        made.add(request)
    met = 0
    while not made.idle:
        step(made, device)
        status = {n: sequence.status for n, sequence in made._tracker.sequences.items()}
        if status.get(1) is Status.SWAPPED:
            met += 1
            assert status[2] is Status.WAITING
    assert met


def test_no_token_of_a_failed_request_is_taken_for_another():
    """A token that is none was fed for a step, and filled a page."""
    made, device = make(8, 2, 16, prefixes=True, results=True)
    tails = ([a, b, c] for a in range(5) for b in range(5) for c in range(5))
    prompt = next(p for tail in tails if next_token(p := [4] * 12 + tail) == NOTHING)
    results = run_all(made, device, [Request(prompt, 5)])
    assert results[0].finish_reason == "failed"
    for token in range(VOCABULARY):
        run_all(made, device, [Request([*prompt, token, 1], 3)])


def test_one_request_of_few_window_pages_goes_on_without_guesses():
    """A pool for single tokens, in which a window and 15 guesses never fit."""
    made, device = make(2, 1, 40, prefixes=False, windows=(16,), guesses=15)
    run_all(made, device, [Request([1], 60)])


@pytest.mark.parametrize("pages", [3, 4])
def test_who_would_not_fit_as_a_prompt_is_not_computed_again(pages):
    """A window's pages hold single tokens, but not the window and all tokens in one piece."""
    made, device = make(pages, 1, 64, prefixes=False, windows=(16,))
    made._costs.recomputes = lambda nbytes, tokens: True
    last = made.add(Request([2] * 16, 70, priority=1))
    for _ in range(50):
        step(made, device)
    first = Request([1] * 4, 5)
    run_all(made, device, [first])
    assert last not in made._tracker.sequences
    assert (made.statistics().swaps, made.statistics().recomputations) == (1, 0)


def test_pages_that_were_just_taken_are_not_reserved_once_more():
    """One of a higher priority that has room begins, also where others grow in that step."""
    for before in range(16, 21):
        made, device = make(8, 4, 100, prefixes=False)
        for kind in (1, 2):
            made.add(Request([kind] * 14, 30, priority=5))
        for _ in range(before):
            step(made, device)
        made.add(Request([3] * 79, 2))
        step(made, device)
        step(made, device)
        assert not made._scheduler.waiting, before


def test_who_ends_while_it_leaves_is_not_fetched_and_leaving_costs_what_copies_take():
    made, device = make(8, 1, 16, prefixes=False)
    clock, tracker, seconds = mock.Mock(now=0.0), made._tracker, []
    collect = tracker.collect

    def slow(of_step):
        clock.now += 100.0
        collect(of_step)

    made._costs.swapped = lambda nbytes, took: seconds.append(took)
    with (
        mock.patch.object(tracker, "collect", slow),
        mock.patch.object(engine.time, "perf_counter", side_effect=lambda: clock.now),
    ):
        number = made.add(Request([1] * 10, 20, (next_token([1] * 10),), priority=1))
        step(made, device)
        made.add(Request([2] * 10, 3))
        step(made, device)
        assert (made._scheduler.swaps, made._scheduler.swapped, tracker.swapped) == (1, [], {})
        assert number not in tracker.sequences
        made.add(Request([1] * 10, 20, priority=1))
        while not made.idle:
            if made.statistics().steps == 6:
                made.add(Request([2] * 10, 3))
            step(made, device)
    assert seconds == [0.0]
