"""Which sequences a step runs, and whose pages are where: host code, no arrays.

First come, first served. Where the pool is full, what only the prefix cache holds goes first, then
the youngest running sequence leaves for host memory, and comes back before any new one is
admitted. The youngest itself waits instead. So the oldest always goes on, and as every request
fits into the pool alone, all of them end.

Layers with and without a sliding window have tables and pages of their own (`groups`). Of those
with a window, a sequence's pages are freed when no later token sees them.
"""

import collections
import dataclasses
import enum
from collections.abc import Sequence as Many

from turbojax.models.engine.groups import Group, known_beginning
from turbojax.models.engine.requests import Request
from turbojax.models.generation.stopping import TextStream

Pages = tuple[tuple[int, ...], ...]
"""Numbers of pages, of each group."""


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
      handles: of each group's allocator, while running.
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
    handles: tuple[int, ...] = ()
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
      leaving: sequences that leave the pool, and of each group the pages to read before anything
        is written.
      returning: sequences that come back, and of each group the pages to write.
      decoding: sequences that run one token; `held` does not count it yet.
      piece: the sequence whose prompt runs, and how many tokens of it.
    """

    leaving: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
    returning: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
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
      - All groups hold the same tokens of a sequence, but for those before their windows.

    Args:
      groups: of layers; all reuse prefixes, or none.
      slots: sequences that run at a time.
      piece_size: tokens of a prompt that run at a time.
      cache_results: whether results' pages are found as well, not only those of prompts.
    """

    def __init__(
        self,
        groups: Many[Group],
        slots: int,
        piece_size: int,
        *,
        cache_results: bool,
    ) -> None:
        self._groups = tuple(groups)
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
        for sequence in self.running:
            self._release_unseen(sequence)
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
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            self._keep(group, handle, sequence)

    def held_tokens(self) -> int:
        """Tokens of running sequences in the first group's pages, those in a shared page once."""
        group = self._groups[0]
        size, full, others = group.allocator.page_size, set[int](), 0
        for sequence in self.running:
            handle = sequence.handles[0]
            released = group.allocator.released(handle)
            # Only full pages are shared.
            full.update(group.held(handle)[: sequence.held // size - released])
            others += sequence.held % size
        return len(full) * size + others

    def _keep(self, group: Group, handle: int, sequence: Sequence) -> None:
        if group.prefixes is None:
            return
        size = group.allocator.page_size
        prompt = len(sequence.request.tokens)
        known = sequence.known if self._cache_results else sequence.known[:prompt]
        count = len(known) // size
        pages = group.allocator.pages(handle)[:count]
        if group.prefixes.insert(known[: count * size], pages):
            self._refused = None

    def _release_unseen(self, sequence: Sequence) -> None:
        """Lets go of pages that no later token sees; a prompt's are remembered before."""
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            count = group.pages_before(sequence.held)
            if count <= group.allocator.released(handle):
                continue
            # Those of a prompt that is complete are known already, see `keep_prefix`.
            if sequence.prefilling or self._cache_results:
                self._keep(group, handle, sequence)
            if group.allocator.release_before(handle, count * group.allocator.page_size):
                self._refused = None

    def _new_tokens(self, sequence: Sequence) -> int:
        rest = len(sequence.request.tokens) - sequence.held
        return min(rest, self._piece_size) if rest > 0 else 1

    def _resume(self, plan: Plan) -> None:
        """Brings back swapped sequences, oldest first, while there is room."""
        while self.swapped and self._free_slots:
            sequence = min(self.swapped, key=_age)
            held, more = sequence.held, self._new_tokens(sequence)
            gone = [group.pages_before(held) for group in self._groups]
            wanted = [
                group.pages_for(held + more) - count
                for group, count in zip(self._groups, gone, strict=True)
            ]
            if not self._has_room(wanted):
                return
            self.swapped.remove(sequence)
            sequence.handles = tuple(
                group.allocator.allocate(
                    held - count * group.allocator.page_size, prefix_pages=(-1,) * count
                )
                for group, count in zip(self._groups, gone, strict=True)
            )
            self._start(sequence)
            # The slot does not know its last token.
            sequence.override = not sequence.prefilling
            plan.returning.append((sequence, self._pages(sequence)))

    def _admit(self) -> None:
        """Starts the oldest waiting sequence, if a slot, the prompt's turn and the pages allow."""
        busy = self.swapped or any(sequence.prefilling for sequence in self.running)
        if busy or not self.waiting or not self._free_slots:
            return
        sequence = self.waiting[0]
        if sequence is self._refused:
            return
        prompt = list(sequence.request.tokens)
        # The last token has to run: its logits choose the next.
        sequence.held, found = known_beginning(self._groups, prompt[:-1])
        # Allocated before anything is evicted, so that what was found is not.
        sequence.handles = tuple(
            group.allocator.allocate(prefix_pages=pages)
            for group, pages in zip(self._groups, found, strict=True)
        )
        if not self._has_room(self._pages_of_prompt(sequence)):
            self._free(sequence)
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

    def _pages(self, sequence: Sequence) -> Pages:
        """The pages that a running sequence holds."""
        return tuple(
            group.held(handle) for group, handle in zip(self._groups, sequence.handles, strict=True)
        )

    def _free(self, sequence: Sequence) -> None:
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            group.allocator.free(handle)
        sequence.handles = ()

    def _leave(self, sequence: Sequence) -> None:
        self._free(sequence)
        self._free_slots.append(sequence.slot)
        self.running.remove(sequence)
        self._refused = None

    def _pages_of_prompt(self, sequence: Sequence) -> list[int]:
        """Of each group, how many more pages a sequence's prompt needs than it has, at most."""
        prompt, held = len(sequence.request.tokens), sequence.held
        piece, wanted = min(self._piece_size, prompt - held), list[int]()
        for group in self._groups:
            gone = group.pages_before(held)
            most = min(group.pages_for(prompt) - gone, group.at_most(prompt, piece))
            wanted.append(max(most - (group.pages_for(held) - gone), 0))
        return wanted

    def _grows(self, group: Group, index: int, sequence: Sequence) -> bool:
        """Whether a running sequence will have more pages of a group than it has now."""
        held, released = sequence.held, group.allocator.released(sequence.handles[index])
        # The last token is never fed, so it needs no place.
        total = sequence.request.total - 1
        piece = min(self._piece_size, total) if sequence.prefilling else 1
        most = min(group.pages_for(total) - released, group.at_most(total, piece))
        return most > group.pages_for(held) - released

    def _has_room(self, wanted: list[int]) -> bool:
        """Whether pages of each group are free, and one for each sequence that will need more.

        With less, what comes in would soon be sent away again.
        """
        wanted = [
            count + sum(self._grows(group, i, sequence) for sequence in self.running)
            for i, (group, count) in enumerate(zip(self._groups, wanted, strict=True))
        ]
        # Usually nothing is evicted for a sequence that has to wait anyway. But some of the pages
        # counted here may stay: an unused prefix does while somebody holds a page after it.
        for group, count in zip(self._groups, wanted, strict=True):
            if count > group.allocator.num_free + group.cached_pages():
                return False
        return not self._are_missing(wanted)

    def _are_missing(self, wanted: list[int]) -> bool:
        """Whether some of the pages wanted of each group are not free, after evicting prefixes."""
        missing = False
        for group, count in zip(self._groups, wanted, strict=True):
            lacking = max(count - group.allocator.num_free, 0)
            if lacking and group.prefixes is not None:
                lacking = max(lacking - group.prefixes.evict(lacking), 0)
            missing = missing or lacking > 0
        return missing

    def _forget_prefixes(self) -> bool:
        """Forgets all prefixes; False if there are none."""
        caches = [group.prefixes for group in self._groups if group.prefixes is not None]
        if not any(len(cache) for cache in caches):
            return False
        for cache in caches:
            cache.clear()
        self._refused = None
        return True

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocates pages for new tokens; sends younger sequences away for them if it must."""
        held = sequence.held
        wanted = [group.pages_for(held + count) - group.pages_for(held) for group in self._groups]
        while self._are_missing(wanted):
            youngest = max(self.running, key=_age)
            if youngest is not sequence:
                self._preempt(youngest, plan)
            # A prefix that nobody holds stays while somebody holds a page after it, which happens
            # where sequences came to the same tokens by themselves.
            elif len(self.running) > 1 or not self._forget_prefixes():
                return False
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            copies = group.allocator.extend(handle, count)
            if copies:
                raise AssertionError(f"only full pages are shared, yet {copies=} are needed")
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        pages = self._pages(sequence)
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
