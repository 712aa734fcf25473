"""Which sequences a step runs, and whose pages are where: host code, no arrays.

First come, first served. Where the pool is full, what only the prefix cache holds goes first, then
the youngest running sequence leaves for host memory, and comes back before any new one is
admitted. The youngest itself waits instead. So the oldest always goes on, and as every request
fits into the pool alone, all of them end.
"""

import collections
import dataclasses
import enum

from turbojax import paged
from turbojax.models.engine.requests import Request
from turbojax.models.generation.stopping import TextStream


class Status(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    LEFT = "left"  # without slot and pages; its last token may still be on its way
    DONE = "done"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request on its way.

    Attributes:
      request_id: increases with the order of arrival.
      request: what was asked for.
      stop_tokens: tokens that end it.
      text: what looks for texts that end it; None if none do.
      status: where it is.
      slot: of the compiled step, while running.
      handle: of the allocator, while running.
      held: tokens in its pages, or on their way there.
      sampled: new tokens chosen, or on their way here.
      new_tokens: those that are known.
      reused: tokens of the prompt found in the prefix cache.
      preemptions: how often it left.
      override: the next step takes its token from the host, not from the slot.
    """

    request_id: int
    request: Request
    stop_tokens: frozenset[int] = frozenset()
    text: TextStream | None = None
    status: Status = Status.WAITING
    slot: int = -1
    handle: int = -1
    held: int = 0
    sampled: int = 0
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    reused: int = 0
    preemptions: int = 0
    override: bool = False

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to run."""
        return self.held < len(self.request.tokens)

    def stopped_by(self, token: int) -> bool:
        """Whether the next new token ends it; to be asked once for each."""
        if self.text is not None:
            self.text.add(token)
        return token in self.stop_tokens or (self.text is not None and self.text.stopped)

    @property
    def known(self) -> list[int]:
        """The tokens in its pages, except those that the host does not know yet."""
        return [*self.request.tokens, *self.new_tokens][: self.held]


@dataclasses.dataclass
class Plan:
    """What happens before and in a step.

    Attributes:
      leaving: sequences that leave the pool, and the pages to read before anything is written.
      returning: sequences that come back, and the pages to write.
      decoding: sequences that run one token; `held` does not count it yet.
      piece: the sequence whose prompt runs, and how many tokens of it.
    """

    leaving: list[tuple[Sequence, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    returning: list[tuple[Sequence, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    decoding: list[Sequence] = dataclasses.field(default_factory=list)
    piece: tuple[Sequence, int] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.decoding and self.piece is None


class Scheduler:
    """Queues, slots and pages.

    Invariants:
      - Running sequences are older than swapped ones, and those older than waiting ones.
      - At most one running sequence is in its prompt.
      - Only full pages are shared, so no page that is being written is shared.

    Args:
      allocator: of the pool's pages.
      prefixes: what finds pages of earlier prompts; None for no reuse.
      slots: sequences that run at a time.
      piece_size: tokens of a prompt that run at a time.
      cache_results: whether results' pages are found as well, not only those of prompts.
    """

    def __init__(
        self,
        allocator: paged.PageAllocator,
        prefixes: paged.PrefixCache | None,
        slots: int,
        piece_size: int,
        *,
        cache_results: bool,
    ) -> None:
        self._allocator = allocator
        self._prefixes = prefixes
        self._piece_size = piece_size
        self._cache_results = cache_results
        self._free_slots = list(range(slots))[::-1]
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.preemptions = 0
        # Could not start, and still cannot: since then nobody left and no prefix became known.
        self._refused: Sequence | None = None

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """Decides on the next step; pages for its new tokens are allocated."""
        plan = Plan()
        self._resume(plan)
        self._admit()
        for sequence in sorted(self.running, key=_age):
            # Making room for an older one may have sent this one away.
            if sequence.status is not Status.RUNNING:
                continue
            count = self._new_tokens(sequence)
            if not self._make_room(sequence, count, plan):
                continue
            if sequence.prefilling:
                plan.piece = (sequence, count)
            else:
                plan.decoding.append(sequence)
        return plan

    def release(self, sequence: Sequence, status: Status) -> None:
        """Takes a sequence out of its queue; its pages stay in the prefix cache, see `keep_prefix`.

        Args:
          sequence: in any status.
          status: `LEFT` or `DONE`.
        """
        if sequence.status is Status.RUNNING:
            self.keep_prefix(sequence)
            self._leave(sequence)
        elif sequence.status is Status.SWAPPED:
            self.swapped.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = status

    def keep_prefix(self, sequence: Sequence) -> None:
        """Lets later requests find the full pages of a running sequence.

        Those of its prompt, whose tokens ran as a later prompt's would; results' tokens ran one by
        one, which another kernel may do, equal within rounding only.
        """
        if self._prefixes is None:
            return
        size = self._allocator.page_size
        prompt = len(sequence.request.tokens)
        known = sequence.known if self._cache_results else sequence.known[:prompt]
        count = len(known) // size
        pages = self._allocator.pages(sequence.handle)[:count]
        if self._prefixes.insert(known[: count * size], pages):
            self._refused = None

    def cached_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        handles = self._allocator.sequences
        held = {page for handle in handles for page in self._allocator.pages(handle)}
        return self._allocator.num_pages - self._allocator.num_free - len(held)

    def held_tokens(self) -> int:
        """Tokens in the pages of running sequences, those in a shared page once."""
        size, full, others = self._allocator.page_size, set[int](), 0
        for sequence in self.running:
            # Only full pages are shared.
            full.update(self._allocator.pages(sequence.handle)[: sequence.held // size])
            others += sequence.held % size
        return len(full) * size + others

    def _new_tokens(self, sequence: Sequence) -> int:
        rest = len(sequence.request.tokens) - sequence.held
        return min(rest, self._piece_size) if rest > 0 else 1

    def _resume(self, plan: Plan) -> None:
        """Brings back swapped sequences, oldest first, while there is room."""
        while self.swapped and self._free_slots:
            sequence = min(self.swapped, key=_age)
            if not self._has_room(sequence.held + self._new_tokens(sequence)):
                return
            self.swapped.remove(sequence)
            sequence.handle = self._allocator.allocate(sequence.held)
            self._start(sequence)
            # The slot does not know its last token.
            sequence.override = not sequence.prefilling
            plan.returning.append((sequence, self._allocator.pages(sequence.handle)))

    def _admit(self) -> None:
        """Starts the oldest waiting sequence, if a slot, the prompt's turn and the pages allow."""
        busy = self.swapped or any(sequence.prefilling for sequence in self.running)
        if busy or not self.waiting or not self._free_slots:
            return
        sequence = self.waiting[0]
        if sequence is self._refused:
            return
        prompt = list(sequence.request.tokens)
        found: tuple[int, ...] = ()
        if self._prefixes is not None:
            # The last token has to run: its logits choose the next.
            found, sequence.held = self._prefixes.lookup(prompt[:-1])
        # Allocated before anything is evicted, so that what was found is not.
        sequence.handle = self._allocator.allocate(prefix_pages=found)
        if not self._has_room(len(prompt) - sequence.held):
            self._allocator.free(sequence.handle)
            sequence.held = 0
            self._refused = sequence
            return
        self.waiting.popleft()
        sequence.reused = sequence.held
        self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        self.running.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._allocator.free(sequence.handle)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        self._refused = None

    def _has_room(self, tokens: int) -> bool:
        """Whether pages are free for these tokens, and one for each sequence that will need more.

        With less, what comes in would soon be sent away again.
        """
        size = self._allocator.page_size
        # The last token is never fed, so it needs no place.
        growing = sum(-(-(s.request.total - 1) // size) > -(-s.held // size) for s in self.running)
        wanted = -(-tokens // size) + growing
        # Usually nothing is evicted for a sequence that has to wait anyway. But some of the pages
        # counted here may stay: an unused prefix does while somebody holds a page after it.
        if wanted > self._allocator.num_free + self.cached_pages():
            return False
        return self._missing(wanted) == 0

    def _missing(self, wanted: int) -> int:
        """How many of the pages wanted are not free, after evicting prefixes."""
        missing = max(wanted - self._allocator.num_free, 0)
        if missing and self._prefixes is not None:
            missing = max(missing - self._prefixes.evict(missing), 0)
        return missing

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocates pages for new tokens; sends younger sequences away for them if it must."""
        size = self._allocator.page_size
        wanted = -(-(sequence.held + count) // size) - -(-sequence.held // size)
        while self._missing(wanted):
            youngest = max(self.running, key=_age)
            if youngest is not sequence:
                self._preempt(youngest, plan)
            elif len(self.running) == 1 and self._prefixes is not None and len(self._prefixes):
                # A prefix that nobody holds stays while somebody holds a page after it, which
                # happens where sequences came to the same tokens by themselves.
                self._prefixes.clear()
                self._refused = None
            else:
                return False
        copies = self._allocator.extend(sequence.handle, count)
        if copies:
            raise AssertionError(f"only full pages are shared, yet {copies=} are needed")
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        pages = self._allocator.pages(sequence.handle)
        if any(entry[0] is sequence for entry in plan.returning):
            # Its pages are not written yet. `_has_room` leaves a page for every decoding sequence
            # that will need one, and the sequence in its prompt is the youngest.
            raise AssertionError(f"request {sequence.request_id} returned and leaves in one step")
        plan.leaving.append((sequence, pages))
        self._leave(sequence)
        sequence.status = Status.SWAPPED
        sequence.preemptions += 1
        self.preemptions += 1
        self.swapped.append(sequence)


def _age(sequence: Sequence) -> int:
    return sequence.request_id
