"""The requests of an engine: their tokens as they come, their times, and how they end."""

import collections
import time
from typing import Any

import jax

from turbojax.models.engine import swap
from turbojax.models.engine.device import Step
from turbojax.models.engine.requests import (
    Event,
    Finished,
    FinishReason,
    NewToken,
    Result,
    TokenLogprobs,
)
from turbojax.models.engine.scheduler import Scheduler
from turbojax.models.engine.sequence import Sequence, Status
from turbojax.models.engine.statistics import Counts, Times
from turbojax.models.generation.constraints import ConstraintState, is_over
from turbojax.models.generation.sampling import NOTHING


class RequestTracker:
    """Unfinished requests, by number, and the events that were not handed out.

    `swapped` are the pages in host memory, of each group.
    """

    def __init__(self, scheduler: Scheduler, counts: Counts) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.swapped: dict[int, list[swap.Content]] = {}
        self.events: collections.deque[Event] = collections.deque()
        self._scheduler, self._counts = scheduler, counts
        self._times: dict[int, Times] = {}
        self._deadlines: dict[int, float] = {}
        self._next_id = 0

    def queue(self, sequences: list[Sequence], added: float | None = None) -> tuple[int, ...]:
        """Numbers the sequences of one prompt and hands them to the scheduler.

        `added` is when the request came, in seconds of `time.perf_counter`; None for now.
        """
        now = time.perf_counter() if added is None else added
        for sequence in sequences:
            sequence.request_id = self._next_id
            sequence.first = None if sequence is sequences[0] else sequences[0]
            self._next_id += 1
            self.sequences[sequence.request_id] = sequence
            self._times[sequence.request_id] = Times(now)
            if sequence.request.timeout is not None:
                self._deadlines[sequence.request_id] = now + sequence.request.timeout
            self._scheduler.add(sequence)
        return tuple(sequence.request_id for sequence in sequences)

    def started(self, sequence: Sequence) -> None:
        """Notes that a sequence is in a slot, maybe not for the first time."""
        times = self._times[sequence.request_id]
        if times.started is None:
            times.started = time.perf_counter()
            self._counts.reused_tokens += sequence.reused
            self._counts.prefix_hits += sequence.reused > 0

    def end_late(self, now: float) -> None:
        """Ends requests whose time is over."""
        for request_id in [x for x, deadline in self._deadlines.items() if deadline <= now]:
            self.finish(self.sequences[request_id], "timeout")

    def collect(self, step: Step) -> None:
        """Waits for a step's tokens and adds them to their sequences."""
        begun = time.perf_counter()
        found, chosen = jax.device_get((step.found, step.chosen))
        self._counts.wait_seconds += time.perf_counter() - begun
        # Counted in one layer of each group: all its layers write to the same places.
        if found[-1]:
            raise AssertionError(f"the pool lost {found[-1]} tokens: a page was missing")
        if step.guesses:
            self._collect_guesses(step, found[:-1].reshape(-1, step.guesses + 3).tolist())
            return
        tokens = (found if chosen is None else chosen.tokens).tolist()
        for row, sequence, _ in step.rows:
            if sequence.status is Status.DONE:
                continue  # it ended while this step ran
            count = sequence.request.logprobs
            logprobs = None if count is None else chosen.logprobs_of(row, count)
            self._add_token(sequence, tokens[row], logprobs)

    def fetch(self, sequence: Sequence, copies: list[list[Any]]) -> tuple[int, float]:
        """Waits for a sequence's pages, see `swap.read`; returns their bytes and the seconds."""
        begun = time.perf_counter()
        content = self.swapped[sequence.request_id] = [swap.fetch(group) for group in copies]
        seconds = time.perf_counter() - begun
        self._counts.wait_seconds += seconds
        return swap.nbytes(content), seconds

    def _collect_guesses(self, step: Step, rows: list[list[int]]) -> None:
        """Adds the tokens of a step with guesses, some of which may be wrong."""
        for row, sequence, most in step.rows:
            if sequence.status is Status.DONE:
                continue
            fed, new, *tokens = rows[row]
            sequence.sampled -= most - new
            if sequence.unsure:  # 0 where it left meanwhile, to run its tokens again
                sequence.held -= most - new
                sequence.unsure -= most - 1
            # There may have been fewer guesses than there was room for.
            self._counts.proposed_tokens += max(fed - 1, 0)
            self._counts.accepted_tokens += max(new - 1, 0)
            for token in tokens[:new]:
                if not self._add_token(sequence, token, None):
                    break

    def _add_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Adds a token to a sequence, or ends it if there is none; returns whether it goes on."""
        if token == NOTHING:
            self.finish(sequence, "stop" if _is_complete(sequence) else "failed")
            return False
        number, tokens = sequence.request_id, sequence.new_tokens
        if not tokens:
            self._times[number].first_token = time.perf_counter()
        self.events.append(NewToken(number, len(tokens), token, logprobs))
        tokens.append(token)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        self._counts.new_tokens += 1
        if sequence.constraint is not None and not _accepts(sequence, sequence.constraint, token):
            self.finish(sequence, "failed")
            return False
        if sequence.stopped_by(token):
            self.finish(sequence, "stop")
            return False
        if len(tokens) == sequence.request.max_new_tokens:
            self.finish(sequence, "length")
            return False
        return True

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a request; its result is its last event."""
        self._scheduler.release(sequence, Status.DONE)
        self.swapped.pop(sequence.request_id, None)
        self._deadlines.pop(sequence.request_id, None)
        del self.sequences[sequence.request_id]
        times, now = self._times.pop(sequence.request_id), time.perf_counter()
        first = times.first_token
        self._counts.finished += 1
        result = Result(
            tokens=tuple(sequence.new_tokens),
            finish_reason=reason,
            prompt_tokens=len(sequence.request.tokens),
            reused_tokens=sequence.reused,
            preemptions=sequence.preemptions,
            waited_seconds=(times.started or now) - times.added,
            first_token_seconds=None if first is None else first - times.added,
            seconds=now - times.added,
            logprobs=None if sequence.request.logprobs is None else tuple(sequence.logprobs),
        )
        self.events.append(Finished(sequence.request_id, result))


def _accepts(sequence: Sequence, constraint: ConstraintState, token: int) -> bool:
    """Whether a constraint takes a token; an exception it raises ends its own request alone."""
    try:
        constraint.accept(token)
    except Exception as error:
        sequence.warn_of(error)
        return False
    return True


def _is_complete(sequence: Sequence) -> bool:
    """Whether a constraint allows no more because the text is complete."""
    try:
        return is_over(sequence.constraint)
    except Exception:
        return False  # `Device` has warned of it when the step was made
