"""The engine's host side, driven through thousands of operations with a device made of numpy."""

import dataclasses
from unittest import mock

import pytest
from engine_device import PAGE, FakeDevice, make, step
from engine_texts import VOCABULARY, expected, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turbojax.models.engine import Engine, Finished, NewToken, Request, compilation, engine
from turbojax.models.engine.scheduler import Status
from turbojax.models.generation.sampling import NOTHING

# Few tokens and round lengths, so that prompts begin alike and end where pages end.
prompts = st.builds(
    lambda kind, length, tail: [(kind * i - 1) % VOCABULARY for i in range(length)] + tail,
    st.integers(1, 2),
    st.sampled_from([0, 15, 16, 31, 32, 33, 48]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=17),
)
requests = st.builds(
    Request,
    prompts,
    st.integers(1, 40),
    st.sampled_from([(), (), (0,), (1, 3)]),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(4, 10),
        slots=st.integers(1, 5),
        chunk=st.sampled_from([1, 7, 16, 40]),
        reuse=st.sampled_from([(False, False), (True, False), (True, True)]),
        windows=st.sampled_from([(None,), (20,), (None, 20), (33, None, 7, 33), (64, 16), (2,)]),
        window_pages=st.sampled_from([None, None, 5, 8]),
    )
    def start(self, pages, slots, chunk, reuse, windows, window_pages):
        if len(set(windows)) == 1:
            window_pages = None
        self.engine, self.device = make(pages, slots, chunk, *reuse, windows, window_pages)
        self.pending: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.prompts: dict[int, tuple[int, ...]] = {}

    @rule(request=requests)
    def add(self, request):
        chunk, total = self.engine._step_tokens, request.total - 1
        for i, group in enumerate(self.engine._groups):
            pages = -(-total // PAGE)
            if group.window is not None:
                # In the worst place, the window of a piece's first token, and the piece.
                seen = group.window + min(chunk, len(request.tokens)) - 1
                pages = min(pages, max(-(-(at + seen) // PAGE) for at in range(PAGE)))
            if pages > group.allocator.num_pages:
                name = ("num_pages", "window_pages")[i > 0]
                with pytest.raises(ValueError, match=f"need {pages} pages, must be at most {name}"):
                    self.engine.add(request)
                return
        number = self.engine.add(request)
        self.pending[number], self.tokens[number] = request, []
        self.prompts[number] = request.tokens

    @rule(request=requests, data=st.data())
    def add_what_follows_another(self, request, data):
        """A prompt that holds another request's text, as in a conversation."""
        if self.tokens:
            number = data.draw(st.sampled_from(sorted(self.tokens)))
            begin = [*self.prompts[number], *self.tokens[number], *request.tokens]
            self.add(dataclasses.replace(request, tokens=begin[:150]))

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.follow(step(self.engine, self.device))

    @precondition(lambda self: self.pending.keys() - self.aborted)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.sampled_from(sorted(self.pending.keys() - self.aborted)))
        self.engine.abort(number)
        self.aborted.add(number)
        with pytest.raises(KeyError, match=f"request {number} is not known, or is done"):
            self.engine.abort(number)

    @rule()
    def finish_all(self):
        # Each step advances at least one request by a token, or waits for the last one's.
        limit = sum(request.total + 3 for request in self.pending.values()) + 3
        for _ in range(limit):
            if self.engine.idle:
                break
            self.follow(step(self.engine, self.device))
        assert self.engine.idle
        assert not self.pending
        statistics = self.engine.statistics()
        for held in statistics.groups:
            assert held.free_pages + held.cached_pages == held.pages
        assert (statistics.running, statistics.waiting, statistics.swapped) == (0, 0, 0)
        assert statistics.swapped_bytes == 0

    def follow(self, events):
        for event in events:
            number = event.request_id
            request = self.pending[number]
            if isinstance(event, NewToken):
                assert event.index == len(self.tokens[number])
                self.tokens[number].append(event.token)
                continue
            assert isinstance(event, Finished)
            tokens, reason = expected(request)
            assert event.result.tokens == tuple(self.tokens[number])
            if number in self.aborted:
                assert event.result.finish_reason == "aborted"
                assert event.result.tokens == tokens[: len(event.result.tokens)]
            else:
                assert (event.result.tokens, event.result.finish_reason) == (tokens, reason)
            del self.pending[number]
            self.aborted.discard(number)

    @invariant()
    def holds_together(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine._scheduler
        for group in self.engine._groups:
            group.allocator.validate()
            assert len(group.allocator.sequences) == len(scheduler.running)
        assert len(self.device.programs) <= 1
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert sum(s.prefilling for s in scheduler.running) <= 1
        assert set(self.engine._book.swapped) == {s.request_id for s in scheduler.swapped}
        for sequence in scheduler.running:
            assert sequence.status is Status.RUNNING
            for group, handle in zip(self.engine._groups, sequence.handles, strict=True):
                assert group.allocator.length(handle) == sequence.held < sequence.request.total
            assert sequence.sampled < sequence.request.max_new_tokens
        # First come, first served.
        queues = (scheduler.running, scheduler.swapped, scheduler.waiting)
        order = [number for queue in queues for number in sorted(s.request_id for s in queue)]
        assert order == sorted(order)

    def teardown(self):
        if hasattr(self, "engine"):
            self.finish_all()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


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


def test_pages_are_not_kept_for_who_needs_no_more():
    """A pool for eight requests runs eight: of each, one page holds all it will ever have."""
    made, device = make(8, 8, 16, prefixes=True)
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
            compilation.note()
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
    sequence = made._book.sequences[number]
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
        seen = {n: made._book.sequences[n].status for n in numbers if n in made._book.sequences}
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
        found |= {made._book.sequences[n].status for n in numbers if n in made._book.sequences}
    return found


def test_nobody_overtakes_who_had_to_leave():
    made, device = make(6, 2, 16, prefixes=False)
    for request in (Request([1] * 16, 64), Request([2] * 30, 40), Request([3], 1)):
        made.add(request)
    met = 0
    while not made.idle:
        step(made, device)
        status = {n: sequence.status for n, sequence in made._book.sequences.items()}
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
