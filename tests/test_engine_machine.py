"""The engine's host side, driven through thousands of operations with a device made of numpy.

In every way that steps are made: requests of all kinds come, end and are ended at any moment, leave
the pool for host memory or to run their tokens again, and each gets its own text.
"""

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from engine_device import PAGE, make, on
from engine_texts import VOCABULARY, NoRepeats, expected
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turbojax.models import Finished, NewToken, Request, Sampling
from turbojax.models.engine import engine
from turbojax.models.engine.scheduler import Status
from turbojax.models.generation.penalties import Penalties

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
MODES = {
    "reproducible": {"reproducible": True},
    "fast": {},
    "dense": {"dense": True},
    "ngram": {},
    "draft": {"drafts": True},
}


class EngineMachine(RuleBasedStateMachine):
    mode = "fast"

    @initialize(
        pages=st.integers(4, 10),
        slots=st.integers(1, 5),
        step_tokens=st.sampled_from([1, 7, 16, 40, 100]),
        reuse=st.sampled_from([(False, False), (True, False), (True, True)]),
        windows=st.sampled_from([(None,), (20,), (None, 20), (33, None, 7, 33), (64, 16), (2,)]),
        window_pages=st.sampled_from([None, None, 5, 8]),
        recomputes=st.sampled_from(["never", "always", "sometimes"]),
        guesses=st.sampled_from([1, 4, 15]),
        right=st.sampled_from([0.0, 0.8, 1.0]),
    )
    def start(
        self, pages, slots, step_tokens, reuse, windows, window_pages, recomputes, guesses, right
    ):
        options = {**MODES[self.mode], "right": right}
        if self.mode in ("ngram", "draft"):
            options["guesses"] = guesses
        if len(set(windows)) == 1:
            window_pages = None
        made, device = make(pages, slots, step_tokens, *reuse, windows, window_pages, **options)
        self.engine, self.device, self.slots = made, device, slots
        if self.mode != "reproducible" and recomputes != "never":
            turns = itertools.cycle([True] if recomputes == "always" else [True, False])
            made._costs.recomputes = lambda nbytes, tokens: next(turns)
        self.now, self.steps_left = 1000.0, 0
        self.pending: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def at_this_time(self):
        return mock.patch.object(engine.time, "perf_counter", side_effect=lambda: self.now)

    @rule(request=requests, count=st.sampled_from([1, 1, 1, 2, 4]))
    def add(self, request, count):
        made, total = self.engine, request.total - 1
        for i, group in enumerate(made._groups):
            pages = -(-total // PAGE)
            if group.window is not None:
                # In the worst place, the window of a piece's first token, and the piece.
                seen = group.window + min(made._step_tokens, len(request.tokens)) - 1
                pages = min(pages, max(-(-(at + seen) // PAGE) for at in range(PAGE)))
            if pages > group.allocator.num_pages:
                name = ("num_pages", "window_pages")[i > 0]
                with pytest.raises(ValueError, match=f"need {pages} pages, must be at most {name}"):
                    made.add(request)
                return
        with self.at_this_time():
            numbers = made.add_samples(request, count)
        for i, number in enumerate(numbers):
            seed = request.sampling.seed + i
            sampling = dataclasses.replace(request.sampling, seed=seed)
            self.pending[number] = dataclasses.replace(request, sampling=sampling)
            self.tokens[number], self.prompts[number] = [], request.tokens
        self.steps_left += self.most_steps(request) * count

    def most_steps(self, request):
        """Each step advances the oldest by a token, or waits for its last one.

        Who leaves may run all its tokens again, and who is older than nobody does at most.
        """
        return 2 * request.total * (1 + len(self.pending)) + 10

    @rule(request=requests, data=st.data())
    def add_what_follows_another(self, request, data):
        """A prompt that holds another request's text, as in a conversation."""
        if self.tokens:
            number = data.draw(st.sampled_from(sorted(self.tokens)))
            begin = [*self.prompts[number], *self.tokens[number], *request.tokens]
            self.add(dataclasses.replace(request, tokens=begin[:150]), 1)

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        self.now += 1.0
        late = {n for n, x in self.engine._book._deadlines.items() if x <= self.now}
        self.ended |= dict.fromkeys(late - self.ended.keys(), "timeout")
        with on(self.device), self.at_this_time():
            events = self.engine.step()
        for event in events:
            self.follow(event)
        self.believes_what_is_there()

    def still_pending(self):
        return sorted(self.pending.keys() - self.ended.keys())

    @precondition(lambda self: self.still_pending())
    @rule(data=st.data(), reason=st.sampled_from(["aborted", "stop"]))
    def abort(self, data, reason):
        number = data.draw(st.sampled_from(self.still_pending()))
        self.engine.abort(number, reason=reason)
        self.ended[number] = reason
        with pytest.raises(KeyError, match=f"request {number} is not known, or is done"):
            self.engine.abort(number)

    @rule()
    def finish_all(self):
        for _ in range(self.steps_left + 3):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, "somebody starves"
        assert not self.pending
        self.steps_left = 0
        self.nothing_is_left()

    def nothing_is_left(self):
        made = self.engine
        after, book = made.statistics(), made._book
        for held in after.groups:
            assert held.free_pages + held.cached_pages == held.pages
        assert (after.running, after.waiting, after.swapped, after.swapped_bytes) == (0, 0, 0, 0)
        assert not any((book.sequences, book.swapped, book._times, book._deadlines, book.events))
        assert sorted(made._scheduler._free_slots) == list(range(self.slots))
        assert made._in_flight is None

    def follow(self, event):
        number = event.request_id
        request = self.pending[number]
        if isinstance(event, NewToken):
            assert event.index == len(self.tokens[number])
            assert (event.logprobs is None) == (request.logprobs is None)
            self.tokens[number].append(event.token)
            return
        assert isinstance(event, Finished)
        tokens, reason = expected(request)
        result = event.result
        assert result.tokens == tuple(self.tokens[number])
        if number in self.ended:
            assert result.finish_reason == self.ended.pop(number)
            assert result.tokens == tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (tokens, reason)
        if request.logprobs is not None:
            assert [len(x.top) for x in result.logprobs] == [request.logprobs] * len(result.tokens)
        del self.pending[number]

    def believes_what_is_there(self):
        """Tables, lengths and tokens on the device are what the host takes them for."""
        there = self.engine._device._state
        for sequence in self.engine._scheduler.running:
            slot, length = sequence.slot, there.lengths[sequence.slot]
            assert sequence.held - sequence.unsure <= length <= sequence.held
            known = [*sequence.request.tokens, *sequence.new_tokens]
            assert there.history[slot, : len(known)].tolist() == known
            prompt = len(sequence.request.tokens)
            assert there.prompts[slot] == prompt
            if not sequence.prefilling:
                new = sequence.request.max_new_tokens - there.left[slot]
                assert sequence.sampled - sequence.unsure <= new <= sequence.sampled
                assert length == prompt + new - 1
            for table, group, handle in zip(
                there.tables[:, slot], self.engine._groups, sequence.handles, strict=True
            ):
                pages = np.array(group.allocator.pages(handle))[: len(table)]
                is_held = pages >= 0
                assert np.array_equal(table[: len(pages)][is_held], pages[is_held])

    @invariant()
    def holds_together(self):
        if not hasattr(self, "engine"):
            return
        made, scheduler = self.engine, self.engine._scheduler
        for group in made._groups:
            group.allocator.validate()
            assert len(group.allocator.sequences) == len(scheduler.running)
        programs = made._device.programs
        sizes = {(x.tokens, x.is_dense) for x in programs.prompts}
        sizes |= {(rows, False) for rows in programs.decoding}
        assert {(x.tokens, x.is_dense) for x in self.device.programs} <= sizes
        if self.mode == "reproducible":
            assert len(self.device.programs) <= 1
            assert sum(s.prefilling for s in scheduler.running) <= 1
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert set(made._book.swapped) == {s.request_id for s in scheduler.swapped}
        for sequence in scheduler.running:
            assert sequence.status is Status.RUNNING
            assert sequence.held - sequence.unsure < sequence.request.total
            assert sequence.sampled - sequence.unsure < sequence.request.max_new_tokens
            for group, handle in zip(made._groups, sequence.handles, strict=True):
                assert group.allocator.length(handle) == sequence.room >= sequence.held
        self.is_fair()

    def is_fair(self):
        """First come, first served, among those of equal priority that wait for nobody's prompt."""
        scheduler = self.engine._scheduler
        for sequence in (*scheduler.swapped, *scheduler.waiting):
            for other in scheduler.running:
                if other.request.priority == sequence.request.priority and sequence.first is None:
                    assert other.request_id < sequence.request_id

    def teardown(self):
        if hasattr(self, "engine"):
            self.finish_all()


def machine(name: str, examples: int) -> type:
    """The tests of one way to make steps."""
    made = type(f"Machine_{name}", (EngineMachine,), {"mode": name}).TestCase
    made.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return made


TestReproducible = machine("reproducible", 25)
TestFast = machine("fast", 25)
TestDense = machine("dense", 25)
TestNGram = machine("ngram", 25)
TestDraft = machine("draft", 25)
