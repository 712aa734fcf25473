"""Which sequences a step runs, and whose pages are where: host code, no arrays.

Sequences are served by priority, and of equal priority in order of arrival. Where the pool is full,
pages that only the prefix cache holds go first. Then the youngest running sequence leaves: to host
memory, or to run its tokens again, whichever costs less. A sequence that is itself the youngest
waits instead. So the oldest always goes on, and as every request fits into the pool alone, all of
them end.

Layers with and without a sliding window have tables and pages of their own (`Group`). In layers
with a window, a sequence's pages are freed when no later token sees them.
"""

import bisect
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Many

from turbojax.models.engine.pools import Group, known_beginning
from turbojax.models.engine.programs import PromptProgram
from turbojax.models.engine.requests import Pages, Sequence, Status


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a prompt that run in a step, from place `begin` of the prompt on."""

    sequence: Sequence
    begin: int
    count: int


@dataclasses.dataclass
class Plan:
    """What happens before and in a step.

    Attributes:
      leaving: sequences that leave the pool for host memory, each with the pages of each group, to
        be read before anything is written.
      returning: those of `entering` that come back from host memory, each with the pages of each
        group, to be written.
      decoding: sequences that go on; their `held` counts the tokens that they get.
      counts: how many tokens each of these gets at most.
      more: how many tokens besides the first they get at most, in a step of nothing else: guesses,
        or the next ones of a launch; 0 otherwise.
      grown: sequences that got pages while running, and how many each had before.
    """

    leaving: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
    entering: list[Sequence] = dataclasses.field(default_factory=list)
    returning: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
    decoding: list[Sequence] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    more: int = 0
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    grown: list[tuple[Sequence, int]] = dataclasses.field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.decoding and not self.pieces


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step may hold.

    Attributes:
      program: the largest one with prompts that attend to pages.
      dense: the largest one whose prompts attend among themselves, if any.
      more: how many tokens besides the first a sequence may get in a step.
      is_shared: whether several prompts may be under way at a time.
    """

    slots: int
    program: PromptProgram
    dense: PromptProgram | None = None
    more: int = 0
    is_shared: bool = True


class Filling:
    """What is in a step so far; `is_alone` says that no other prompt wants to share it."""

    def __init__(self, limits: Limits, is_alone: bool) -> None:
        self._limits = limits
        self._is_alone = is_alone
        self._tokens = self._pieces = self._parts = 0
        self._dense = limits.dense

    @property
    def has_room(self) -> bool:
        """Whether another piece may fit."""
        return self.most(1, 0) > 0

    def most(self, rest: int, held: int) -> int:
        """Tokens of a prompt that may come next, 0 if none; `rest` are left, `held` have run."""
        program = self._program(held)
        if self._pieces == program.pieces:
            return 0
        count = min(rest, program.prompt_tokens - self._tokens)
        if rest > program.prompt_tokens and not self._is_alone:
            count = min(count, max(program.prompt_tokens // 2, 1))
        if program.parts:
            count = min(count, (program.parts - self._parts) * program.part)
        return count

    def add(self, count: int, held: int) -> None:
        """Adds a piece."""
        is_dense = self._program(held).is_dense
        self._tokens += count
        self._pieces += 1
        self._parts += -(-count // self._limits.program.part)
        if not is_dense:
            self._dense = None

    def _program(self, held: int) -> PromptProgram:
        return self._limits.program if held or self._dense is None else self._dense


# Scheduling ---------------------------------------------------------------------------------------


class Scheduler:
    """Queues, slots and pages.

    Invariants:
      - Of equal priority, running sequences are older than swapped and waiting ones, except waiting
        ones whose first sample still runs their prompt.
      - Only full pages are shared, so no page that is being written is shared.
      - All groups hold the same tokens of a sequence, except those before their windows.

    All groups reuse prefixes, or none. With `cache_results` results' pages are found as well, not
    only those of prompts. `takes_more` is asked before each step whether more
    than one token of each sequence pay, and
    `recomputes` whether a sequence that must leave runs its tokens again instead of having its
    pages stored.
    """

    def __init__(
        self,
        groups: Many[Group],
        limits: Limits,
        *,
        cache_results: bool,
        recomputes: Callable[[Sequence, Pages], bool],
        takes_more: Callable[[], bool] = lambda: True,
    ) -> None:
        self._groups = tuple(groups)
        self._limits = limits
        self._cache_results = cache_results
        self._recomputes, self._takes_more = recomputes, takes_more
        self._free_slots = list(range(limits.slots))[::-1]
        self._page_size = self._groups[0].allocator.page_size
        self._has_windows = any(group.window is not None for group in self._groups)
        self.waiting: list[Sequence] = []  # by age
        self.running: list[Sequence] = []  # by age
        self.swapped: list[Sequence] = []
        self.swaps = self.recomputations = 0
        # It could not start, and still cannot: since then nobody left and no prefix became known.
        self._refused: Sequence | None = None
        # Pages of each group that running sequences will need soon; None: to be counted again.
        self._reserved: list[int] | None = None

    @property
    def preemptions(self) -> int:
        """How often a sequence had to leave the pool."""
        return self.swaps + self.recomputations

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        bisect.insort(self.waiting, sequence, key=_age)

    def plan(self) -> Plan:
        """Decides on the next step, and allocates pages for its tokens."""
        plan = Plan()
        before = self.preemptions
        self._make_way(plan)
        self._decode(plan)
        # What has just left does not come back in the same step.
        self._fill_with_prompts(plan, may_enter=self.preemptions == before)
        if plan.more:
            self._settle(plan)
        return plan

    def release(self, sequence: Sequence, status: Status) -> None:
        """Takes a sequence, in any status, out of its queue; the new status is `LEFT` or `DONE`."""
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

        Without `cache_results` these are the prompt's alone: results' tokens ran one by one, maybe
        in another kernel, so they equal a later prompt's only within rounding.
        """
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            self._keep(group, handle, sequence)

    def held_tokens(self) -> int:
        """Tokens of running sequences in the first group's pages, those of a shared page once."""
        group = self._groups[0]
        size, full, others = self._page_size, set[int](), 0
        for sequence in self.running:
            handle = sequence.handles[0]
            released = group.allocator.released(handle)
            # Only full pages are shared.
            full.update(group.held(handle)[: sequence.held // size - released])
            others += sequence.held % size
        return len(full) * size + others

    # Decoding -------------------------------------------------------------------------------------

    def _decode(self, plan: Plan) -> None:
        """Lets decoding sequences go on by one token, and as many more as there may be."""
        if self._limits.more and self._takes_more():
            plan.more = self._limits.more
        most, running = 1 + plan.more, Status.RUNNING
        # What is looked up here is looked up for each of a thousand sequences in each step.
        for sequence in list(self.running):
            # Making room for an older one may have sent this one away.
            if sequence.status is not running:
                continue
            held = sequence.held
            if held < len(sequence.prompt):
                if self._has_windows:
                    self._grow(sequence, self._next_piece(sequence), plan)
                continue
            if sequence.constraint is not None and not sequence.is_known:
                continue
            wanted = sequence.request.max_new_tokens - sequence.sampled + sequence.unsure
            if wanted <= 0:
                continue
            count = most if most < wanted else wanted
            lacks_room = held + count > sequence.room < sequence.end
            if lacks_room and not self._grow(sequence, count, plan):
                if len(self.running) > 1:
                    continue
                # It is alone, and its windows' pages are too few for more.
                plan.more, count = 0, 1
                if _end(sequence, 1) > sequence.room and not self._grow(sequence, 1, plan):
                    continue
            sequence.held = held + count
            sequence.sampled += count
            sequence.unsure += count - 1
            plan.decoding.append(sequence)
            plan.counts.append(count)

    def _settle(self, plan: Plan) -> None:
        """Takes back all but the first tokens if there are prompts, or a sequence gets one only."""
        if not plan.pieces and all(sequence.takes_more for sequence in plan.decoding):
            return
        plan.more = 0
        for sequence, count in zip(plan.decoding, plan.counts, strict=True):
            sequence.held -= count - 1
            sequence.sampled -= count - 1
            sequence.unsure -= count - 1

    def _next_piece(self, sequence: Sequence) -> int:
        """Tokens of a prompt that the next step may run."""
        return min(len(sequence.prompt) - sequence.held, self._limits.program.prompt_tokens)

    def _grow(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocates pages for more tokens of a running sequence; False if there is no room."""
        if self._has_windows:
            self._release_unseen(sequence)
        before, size = sequence.room // self._page_size, self._page_size
        pages = max(-(-_end(sequence, count) // size) - before, 0)
        if not self._make_room(sequence, [pages] * len(self._groups), plan):
            return False
        self._extend(sequence, pages * size)
        self._reserved = None
        plan.grown.append((sequence, before))
        return True

    def _extend(self, sequence: Sequence, tokens: int) -> None:
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            copies = group.allocator.extend(handle, tokens)
            if copies:
                raise AssertionError(f"only full pages are shared, yet {copies=} are needed")
        sequence.room += tokens

    # Prompts --------------------------------------------------------------------------------------

    def _make_way(self, plan: Plan) -> None:
        """Sends away sequences for one of a higher priority that finds no slot or no room."""
        while self.running:
            first, last = self._next(is_alone=False), self.running[-1]
            if first is None or first.request.priority >= last.request.priority:
                return
            pages = [self._most(group, first) for group in self._groups]
            if self._free_slots and self._has_room(pages):
                return
            self._preempt(last, plan)

    def _fill_with_prompts(self, plan: Plan, *, may_enter: bool) -> None:
        """Pieces of prompts, as many as there is room for in the step, oldest first."""
        prefilling = [x for x in self.running if x.held < len(x.prompt)]
        # A prompt longer than a step leaves half of it to others, if there are any.
        is_alone = len(self.waiting) + len(prefilling) <= 1 or not self._limits.is_shared
        step = Filling(self._limits, is_alone)
        for sequence in prefilling:
            self._take_piece(sequence, step, plan)
        while may_enter and self._free_slots and step.has_room:
            found = self._next(is_alone=not self._limits.is_shared)
            if found is None or not self._enter(found, plan):
                break
            if found.prefilling:
                self._take_piece(found, step, plan)
        self._reserved = None

    def _take_piece(self, sequence: Sequence, step: Filling, plan: Plan) -> None:
        held = sequence.held
        count = min(step.most(len(sequence.prompt) - held, held), sequence.room - held)
        if count <= 0:
            return
        step.add(count, held)
        plan.pieces.append(Piece(sequence, held, count))
        sequence.held += count
        if not sequence.prefilling:
            sequence.sampled += 1

    def _next(self, *, is_alone: bool) -> Sequence | None:
        """The oldest swapped or waiting sequence that may come into a slot now."""
        swapped = min(self.swapped, key=_age, default=None)
        busy = is_alone and any(sequence.prefilling for sequence in self.running)
        for sequence in self.waiting:
            if swapped is not None and swapped.age < sequence.age:
                return swapped
            # Skipped while another sequence runs the same prompt, or a token is on its way.
            if not _is_under_way(sequence.first) and sequence.is_known:
                return None if busy else sequence
        return swapped

    def _enter(self, sequence: Sequence, plan: Plan) -> bool:
        if sequence.status is Status.SWAPPED:
            return self._resume(sequence, plan)
        return self._admit(sequence, plan)

    def _resume(self, sequence: Sequence, plan: Plan) -> bool:
        """Brings back a swapped sequence."""
        size, gone = self._page_size, sequence.gone
        room = max(sequence.stored, sequence.held + 1)
        # Pages of a window may have gone out of sight: guesses that were on their way have come.
        wanted = [
            min(group.pages_for(room) - n, group.allocator.num_pages)
            for group, n in zip(self._groups, gone, strict=True)
        ]
        if not self._has_room(wanted):
            return False
        self.swapped.remove(sequence)
        sequence.handles = tuple(
            group.allocator.allocate(sequence.stored - n * size, prefix_pages=(-1,) * n)
            for group, n in zip(self._groups, gone, strict=True)
        )
        sequence.room = sequence.stored
        self._start(sequence, plan)
        plan.returning.append((sequence, self._pages(sequence)))
        return True

    def _admit(self, sequence: Sequence, plan: Plan) -> bool:
        """Starts a waiting sequence."""
        if sequence is self._refused:
            return False
        sequence.prompt = sequence.tokens
        self._share(sequence)
        if not self._has_room(self._pages_of_prompt(sequence)):
            self._free(sequence)
            sequence.held = sequence.room = 0
            self._refused = sequence
            return False
        self.waiting.remove(sequence)
        if not sequence.preemptions:
            sequence.reused = sequence.held
        tokens = len(sequence.prompt)
        if self._has_windows:  # those before the windows are let go meanwhile
            tokens = sequence.held + self._next_piece(sequence)
        self._extend(sequence, -(-tokens // self._page_size) * self._page_size - sequence.room)
        self._start(sequence, plan)
        return True

    def _share(self, sequence: Sequence) -> None:
        """Gives a sequence the pages that others have of its beginning."""
        # The last token has to run: its logits choose the next.
        prompt = sequence.prompt[:-1]
        first, size = sequence.first, self._page_size
        held, found = known_beginning(self._groups, prompt)
        if first is not None and first.status is Status.RUNNING:
            count = min(len(prompt), len(first.request.tokens)) // size
            pages = [
                group.allocator.pages(handle)[:count]
                for group, handle in zip(self._groups, first.handles, strict=True)
            ]
            if count * size > held and not self._has_windows:
                held, found = count * size, tuple(pages)
        # Allocated before anything is evicted, so that the pages found here are not.
        sequence.held = sequence.room = held
        sequence.handles = tuple(
            group.allocator.allocate(prefix_pages=pages)
            for group, pages in zip(self._groups, found, strict=True)
        )

    def _start(self, sequence: Sequence, plan: Plan) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=_age)
        plan.entering.append(sequence)
        if self._reserved is not None:
            self._reserved = [
                count + self._to_come(group, i, sequence)
                for i, (group, count) in enumerate(zip(self._groups, self._reserved, strict=True))
            ]

    # Pages ----------------------------------------------------------------------------------------

    def _keep(self, group: Group, handle: int, sequence: Sequence) -> None:
        if group.prefixes is None:
            return
        # A step that was planned before a request's end was known counts as held what is never fed.
        held = min(sequence.held - sequence.unsure, sequence.end)
        if self._cache_results:
            tokens = sequence.tokens[:held]
        else:
            tokens = sequence.prompt[: min(held, len(sequence.request.tokens))]
        if group.prefixes.insert(tokens, group.allocator.pages(handle)):
            self._refused = None

    def _release_unseen(self, sequence: Sequence) -> None:
        """Frees pages that no later token sees; the prefix cache remembers a prompt's before."""
        held = sequence.held - sequence.unsure
        for group, handle in zip(self._groups, sequence.handles, strict=True):
            count = group.pages_before(held)
            if count <= group.allocator.released(handle):
                continue
            # Those of a prompt that is complete are known already, see `keep_prefix`.
            if sequence.prefilling or self._cache_results:
                self._keep(group, handle, sequence)
            if group.allocator.release_before(handle, count * self._page_size):
                self._refused = None

    def _pages(self, sequence: Sequence) -> Pages:
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
        sequence.slot = -1
        self.running.remove(sequence)
        self._refused = None

    def _most(self, group: Group, sequence: Sequence) -> int:
        """Pages of a group that a sequence has at most until its prompt is complete."""
        prompt = len(sequence.prompt)
        piece = min(self._limits.program.prompt_tokens, prompt)
        return group.at_most(prompt, piece)

    def _pages_of_prompt(self, sequence: Sequence) -> list[int]:
        """Of each group, how many more pages a sequence's prompt needs than it has, at most."""
        wanted = list[int]()
        for group in self._groups:
            gone = group.pages_before(sequence.held)
            most = min(group.pages_for(len(sequence.prompt)) - gone, self._most(group, sequence))
            wanted.append(max(most - (sequence.room // self._page_size - gone), 0))
        return wanted

    def _to_come(self, group: Group, index: int, sequence: Sequence) -> int:
        """Pages that a running sequence will need soon: those of its prompt, or the next one."""
        if group.window is None and not sequence.prefilling:
            return int(sequence.room < sequence.end)
        released = group.allocator.released(sequence.handles[index])
        has = sequence.room // self._page_size - released
        if sequence.prefilling:
            rest = group.pages_for(len(sequence.prompt)) - released
            return max(min(rest, self._most(group, sequence)) - has, 0)
        in_flight = 1 + self._limits.more
        most = min(group.pages_for(sequence.end) - released, group.at_most(sequence.end, in_flight))
        return int(most > has)

    def _has_room(self, wanted: list[int]) -> bool:
        """Whether the wanted pages are free beside those that running sequences will need soon.

        With less room, what comes in would soon be sent away again.
        """
        if self._reserved is None:
            self._reserved = [
                sum(self._to_come(group, i, sequence) for sequence in self.running)
                for i, group in enumerate(self._groups)
            ]
        wanted = [count + more for count, more in zip(wanted, self._reserved, strict=True)]
        # Usually nothing is evicted for a sequence that has to wait anyway. But some of the pages
        # counted here may stay: an unused prefix does while somebody holds a page after it.
        for group, count in zip(self._groups, wanted, strict=True):
            free = group.allocator.num_free
            if count > free and count > free + group.cached_pages():
                return False
        return not self._are_missing(wanted)

    def _are_missing(self, wanted: list[int]) -> bool:
        """Whether some of the wanted pages of each group are not free, after evicting prefixes."""
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

    def _make_room(self, sequence: Sequence, wanted: list[int], plan: Plan) -> bool:
        """Frees pages for a running sequence, maybe preempting younger ones; False if too few."""
        while self._are_missing(wanted):
            youngest = self.running[-1]
            if youngest is not sequence:
                self._preempt(youngest, plan)
            # An unused prefix stays while somebody holds a page after it, which happens where
            # sequences came to the same tokens independently.
            elif len(self.running) > 1 or not self._forget_prefixes():
                return False
        return True

    def _fits_as_prompt(self, sequence: Sequence) -> bool:
        """Whether the pool has room for a sequence whose new tokens are part of its prompt.

        As a prompt they run in larger pieces, for which a window needs more pages.
        """
        tokens = min(len(sequence.request.tokens) + sequence.sampled, sequence.end)
        piece = min(self._limits.program.prompt_tokens, tokens)
        return all(x.at_most(tokens, piece) <= x.allocator.num_pages for x in self._groups)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Sends away a running sequence that this step does not run."""
        self._release_unseen(sequence)
        pages = self._pages(sequence)
        sequence.stored = sequence.room
        sequence.gone = tuple(
            group.allocator.released(handle)
            for group, handle in zip(self._groups, sequence.handles, strict=True)
        )
        recomputes = self._fits_as_prompt(sequence) and self._recomputes(sequence, pages)
        self._leave(sequence)
        self._reserved = None
        sequence.preemptions += 1
        if recomputes:
            self.recomputations += 1
            sequence.held = sequence.room = sequence.unsure = 0
            sequence.status = Status.WAITING
            self.add(sequence)
            return
        self.swaps += 1
        plan.leaving.append((sequence, pages))
        sequence.status = Status.SWAPPED
        self.swapped.append(sequence)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age


def _end(sequence: Sequence, count: int) -> int:
    """Tokens that a sequence's pages hold after so many more.

    What is held counts guesses on their way, and the last of these may come after the end.
    """
    return min(sequence.held + count, sequence.end)


def _is_under_way(first: Sequence | None) -> bool:
    """Whether the sequence that runs the prompt for others has not run all of it yet."""
    if first is None:
        return False
    if first.status is Status.WAITING:
        return True
    return first.status is Status.RUNNING and first.prefilling
