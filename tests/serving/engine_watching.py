"""An engine on the device made of numpy, watched: all get their own texts, nothing is lost."""

import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest

from tests.serving.engine_device import PAGE, make, on
from tests.serving.engine_texts import expected
from turbojax.models import Engine, Finished, NewToken, Request
from turbojax.models.engine import engine
from turbojax.models.engine.requests import Status
from turbojax.models.engine.step import State

MODES = {
    "reproducible": {"reproducible": True},
    "fast": {},
    "dense": {"dense": True},
    "together": {"tokens_together": 4},
    "ngram": {},
    "draft": {"drafts": True},
}
"""Ways to make steps, and the options of `engine_device.make`."""


class Watched:
    """An engine, its requests, and what is told of them.

    Args:
      mode: see `MODES`.
      slots: of the engine.
      recomputes: which of those that leave run their tokens again, in turns.
      guesses: at a time, where there are any.
      guessing: which of the steps that may have guesses do, in turns.
      options: of `engine_device.make`.

    Attributes:
      pending: requests that are not done.
      tokens: that were told, of all.
      ended: of pending requests those that were ended, and how.
    """

    def __init__(self, mode, slots, recomputes=(False,), guesses=4, guessing=(True,), **options):
        options |= MODES[mode]
        if mode in ("ngram", "draft"):
            options["guesses"] = guesses
        self.mode, self.slots = mode, slots
        self.engine, self.device = made, _ = make(slots=slots, **options)
        if mode != "reproducible":
            turns = itertools.cycle(recomputes)
            made._costs.recomputes = lambda nbytes, tokens: next(turns)
            steps = itertools.cycle(guessing)
            made._scheduler._takes_more = lambda: next(steps)
        self.now, self.steps_left = 1000.0, 0
        self.pending: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.aborted = self.late = 0

    def at_this_time(self):
        return mock.patch.object(engine.time, "perf_counter", side_effect=lambda: self.now)

    def add(self, request, count=1):
        """Adds samples of a request, or finds that it is refused."""
        made, total = self.engine, request.total - 1
        for i, group in enumerate(made._groups):
            pages = -(-total // PAGE)
            if group.window is not None:
                # In the worst place, the window of a piece's first token, and the piece.
                seen = group.window + min(made.admission.step_tokens, len(request.tokens)) - 1
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

    def step(self):
        """A second goes by, and a step."""
        self.now += 1.0
        late = {n for n, x in self.engine._tracker._deadlines.items() if x <= self.now}
        self.ended |= dict.fromkeys(late - self.ended.keys(), "timeout")
        self.late += len(late)
        with on(self.device), self.at_this_time():
            events = self.engine.step()
        for event in events:
            self.follow(event)
        check_belief(self.engine, self.engine._device._state)
        self.holds_together()

    def still_pending(self):
        return sorted(self.pending.keys() - self.ended.keys())

    def abort(self, number, reason):
        """Ends a request."""
        self.engine.abort(number, reason=reason)
        self.ended[number] = reason
        self.aborted += 1
        with pytest.raises(KeyError, match=f"request {number} is not known, or is done"):
            self.engine.abort(number)

    def finish(self):
        """Steps until all is done."""
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
        after, tracker = made.statistics(), made._tracker
        for held in after.groups:
            assert held.free_pages + held.cached_pages == held.pages
        assert (after.running, after.waiting, after.swapped, after.swapped_bytes) == (0, 0, 0, 0)
        assert not any(
            (tracker.sequences, tracker.swapped, tracker._times, tracker._deadlines, made._events)
        )
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

    def holds_together(self):
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
        assert set(made._tracker.swapped) == {s.request_id for s in scheduler.swapped}
        for sequence in scheduler.running:
            assert sequence.status is Status.RUNNING
            assert sequence.held - sequence.unsure < sequence.request.total
            assert sequence.sampled - sequence.unsure < sequence.request.max_new_tokens
            for group, handle in zip(made._groups, sequence.handles, strict=True):
                held = min(sequence.held, sequence.request.total - 1)
                assert group.allocator.length(handle) == sequence.room >= held
        self.is_fair()

    def is_fair(self):
        """First come, first served, among those of equal priority that wait for nobody's prompt."""
        scheduler = self.engine._scheduler
        for sequence in (*scheduler.swapped, *scheduler.waiting):
            for other in scheduler.running:
                if other.request.priority == sequence.request.priority and sequence.first is None:
                    assert other.request_id < sequence.request_id


def check_belief(made: Engine, there: State) -> None:
    """Tables, lengths and tokens on the device are what the host takes them for."""
    for sequence in made._scheduler.running:
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
            there.tables[:, slot], made._groups, sequence.handles, strict=True
        ):
            pages = np.array(group.allocator.pages(handle))[: len(table)]
            is_held = pages >= 0
            assert np.array_equal(table[: len(pages)][is_held], pages[is_held])
