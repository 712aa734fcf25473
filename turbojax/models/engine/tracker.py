"""The requests of an engine: whether they fit it, their tokens, their times, and how they end."""

import dataclasses
import time
from collections.abc import Sequence as Many
from typing import Any

import jax

from turbojax import _checks
from turbojax.models.config import TransformerConfig
from turbojax.models.engine.device import Content, Step, content_bytes, fetch_pages
from turbojax.models.engine.pools import Group
from turbojax.models.engine.requests import (
    Event,
    Finished,
    FinishReason,
    NewToken,
    Request,
    Result,
    Sequence,
    Status,
    TokenLogprobs,
    check_vocabulary,
)
from turbojax.models.engine.sampler import wanted_of
from turbojax.models.engine.scheduler import Scheduler
from turbojax.models.engine.statistics import Counts, Times
from turbojax.models.generation.constraints import ConstraintState, is_over
from turbojax.models.generation.sampling import NOTHING
from turbojax.models.generation.stopping import TextStream, check_stops
from turbojax.models.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Admission:
    """What a request is checked against. It never changes, so any thread may ask at any time."""

    config: TransformerConfig
    max_length: int
    step_tokens: int
    groups: Many[Group]
    tokenizer: Tokenizer | None

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.groups[0].allocator.page_size

    @property
    def sizes(self) -> dict[str, Any]:
        """What requests are checked against, for comparing two engines."""
        return {
            "config": self.config,
            "max_length": self.max_length,
            "step_tokens": self.step_tokens,
            "page_size": self.page_size,
            "pages": tuple(group.allocator.num_pages for group in self.groups),
            "tokenizer": self.tokenizer,
        }

    def sequences(self, request: Request, count: int) -> list[Sequence]:
        """The sequences of `count` samples of a request, unnumbered; raises as `Engine` does."""
        _checks.check_sizes(count=count)
        if not isinstance(request, Request):
            raise TypeError(f"request is a {type(request).__name__}, must be a Request")
        check_vocabulary(request, self.config.vocab_size)
        self._check_room(request)
        samples = [request]
        for i in range(1, count):
            seed = (request.sampling.seed + i) % 2**32
            sampling = dataclasses.replace(request.sampling, seed=seed)
            samples.append(dataclasses.replace(request, sampling=sampling))
        return [self._sequence(sample) for sample in samples]

    def _check_room(self, request: Request) -> None:
        """Raises ValueError unless a request fits alone."""
        parts = f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones"
        if request.total > self.max_length:
            raise ValueError(f"{parts} must be at most max_length={self.max_length}")
        for group in self.groups:
            pages, there = group.pages_of(request, self.step_tokens), group.allocator.num_pages
            if pages > there:
                name = "num_pages" if group is self.groups[0] else "window_pages"
                raise ValueError(f"{parts} need {pages} pages, must be at most {name}={there}")

    def _sequence(self, request: Request) -> Sequence:
        tokens, strings = check_stops(request.stop_tokens, request.stop_strings, self.tokenizer)
        text = None
        if strings and self.tokenizer is not None:
            text = TextStream(self.tokenizer.stream(request.tokens), strings)
        wanted = wanted_of([request])
        return Sequence(
            -1,
            request,
            tokens,
            text,
            None if request.constraint is None else request.constraint.begin(),
            is_plain=wanted.is_plain,
            takes_more=wanted._replace(kind="greedy").is_plain,
        )


# On their way -------------------------------------------------------------------------------------


class RequestTracker:
    """Unfinished requests, by number.

    `swapped` are the pages in host memory, of each group.
    """

    def __init__(self, scheduler: Scheduler, counts: Counts) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.swapped: dict[int, list[Content]] = {}
        self._events: list[Event] = []
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

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

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
            raise AssertionError(f"the pool dropped {found[-1]} tokens: a page was missing")
        if step.more:
            self._collect_several(step, found[:-1].reshape(-1, step.more + 3).tolist())
            return
        tokens, done = (found if chosen is None else chosen.tokens).tolist(), Status.DONE
        for row, sequence in zip(step.rows, step.sequences, strict=True):
            if sequence.status is done:
                continue  # it ended while this step ran
            logprobs = None
            if chosen is not None and (count := sequence.request.logprobs) is not None:
                logprobs = chosen.logprobs_of(row, count)
            self._add_token(sequence, tokens[row], logprobs)

    def fetch(self, sequence: Sequence, copies: list[list[Any]]) -> tuple[int, float]:
        """Waits for a sequence's pages, see `read_pages`; returns their bytes and the seconds."""
        begun = time.perf_counter()
        content = self.swapped[sequence.request_id] = [fetch_pages(group) for group in copies]
        seconds = time.perf_counter() - begun
        self._counts.wait_seconds += seconds
        return content_bytes(content), seconds

    def _collect_several(self, step: Step, rows: list[list[int]]) -> None:
        """Adds the tokens of a step that gave several of each sequence; guesses may be wrong."""
        numbered = zip(step.rows, step.sequences, step.counts, strict=True)
        for row, sequence, most in numbered:
            if sequence.status is Status.DONE:
                continue
            fed, new, *tokens = rows[row]
            sequence.sampled -= most - new
            if sequence.unsure:  # 0 where it left meanwhile, to run its tokens again
                sequence.held -= most - new
                sequence.unsure -= most - 1
            if step.is_guessed:  # maybe fewer than there was room for
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
        self._events.append(NewToken(number, len(tokens), token, logprobs))
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
        self._events.append(Finished(sequence.request_id, result))


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
