"""What an engine has done and holds, and what its steps have cost so far."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from turbojax.models.engine import pools
from turbojax.models.engine.device import Content, content_bytes
from turbojax.models.engine.pools import Group
from turbojax.models.engine.scheduler import Scheduler

_DERIVED = (
    "tokens_per_second",
    "occupancy",
    "preemptions",
    "steps_of_decoding",
    "host_seconds_per_step",
    "idle_seconds_per_step",
    "prefix_hit_rate",
    "acceptance_rate",
)
# What `together` does not add up.
_OF_A_TOKEN = ("token_bytes", "compression_ratio")
_LONGEST = ("seconds", "first_step_seconds")


@dataclasses.dataclass
class Times:
    """When things happened to a request, in seconds of `time.perf_counter`."""

    added: float
    started: float | None = None
    first_token: float | None = None


@dataclasses.dataclass
class Counts:
    """What an engine has done so far, see `EngineStatistics`."""

    steps: int = 0
    first_step_seconds: float = 0.0
    first_step_tokens: int = 0
    seconds: float = 0.0
    new_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefix_hits: int = 0
    finished: int = 0
    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    steps_of_prompts: int = 0
    steps_of_speculation: int = 0
    steps_of_several: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    programs_compiled: int = 0
    late_steps: int = 0
    idle_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupStatistics:
    """What is held by layers that see equally far back, and share tables of pages.

    Attributes:
      window: tokens that a query sees, its own included; None for all.
      layers: how many layers.
      pages: of each layer's pool.
      free_pages: not in use.
      cached_pages: used by no request, but kept for later prompts.
      pool_bytes: of these layers' caches.
    """

    window: int | None
    layers: int
    pages: int
    free_pages: int
    cached_pages: int
    pool_bytes: int


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """Counts since the engine was made, and what it holds now.

    Pages, free and cached ones, and tokens are those of the layers that see furthest back: all, or
    the first of `groups`.

    Attributes:
      steps: compiled steps run.
      first_step_seconds: spent in calls of `Engine.step` in which a program was compiled: the first
        call, and the first that drew tokens, that drew from some of them, and that swapped, unless
        an engine like this one has compiled the program before.
      first_step_tokens: new tokens that these calls brought.
      seconds: spent in all others.
      new_tokens: tokens that requests got.
      prompt_tokens: tokens of prompts that ran.
      reused_tokens: tokens of prompts found in the prefix cache.
      prefix_hits: requests that found some.
      swaps: how often a request had to leave the pool, and its pages went to host memory.
      recomputations: how often a request had to leave the pool, and runs its tokens again.
      finished: requests done, for whatever reason.
      host_seconds: of `seconds` what the host worked, and did not wait for the device; the device
        works meanwhile, on the step before.
      wait_seconds: of `seconds` what the host waited for the device.
      steps_of_prompts: of `steps` those with tokens of prompts.
      steps_of_speculation: those with guesses.
      steps_of_several: those that made several tokens of each sequence, without guesses.
      proposed_tokens: tokens that were guessed.
      accepted_tokens: guesses that were right.
      late_steps: of `steps` those that came when the device had done the one before.
      idle_seconds: how long the device waited for these at most: the time since the host knew it to
        be busy.
      programs_compiled: programs of the engine that `compile`, or a step that needed one, compiled.
      waiting: requests not begun.
      running: requests in the pool.
      swapped: requests in host memory.
      swapped_bytes: bytes of host memory that hold their pages.
      pages: of the pool.
      free_pages: not in use.
      cached_pages: used by no request, but kept for later prompts.
      tokens_held: tokens of running requests in the pool; one in a shared page counts once.
      token_capacity: tokens that the pool holds at most.
      pool_bytes: of all layers' caches.
      token_bytes: bytes of one token, all layers.
      compression_ratio: bytes of a token in bfloat16 over `token_bytes`.
      groups: what is held by layers that see equally far back, those that see furthest first.
    """

    steps: int
    first_step_seconds: float
    first_step_tokens: int
    seconds: float
    new_tokens: int
    prompt_tokens: int
    reused_tokens: int
    prefix_hits: int
    swaps: int
    recomputations: int
    finished: int
    host_seconds: float
    wait_seconds: float
    steps_of_prompts: int
    steps_of_speculation: int
    steps_of_several: int
    proposed_tokens: int
    accepted_tokens: int
    programs_compiled: int
    late_steps: int
    idle_seconds: float
    waiting: int
    running: int
    swapped: int
    swapped_bytes: int
    pages: int
    free_pages: int
    cached_pages: int
    tokens_held: int
    token_capacity: int
    pool_bytes: int
    token_bytes: int
    compression_ratio: float
    groups: tuple[GroupStatistics, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests over time, compilation aside; 0 before there are any."""
        tokens = self.new_tokens - self.first_step_tokens
        return tokens / self.seconds if self.seconds else 0.0

    @property
    def preemptions(self) -> int:
        """How often a request had to leave the pool."""
        return self.swaps + self.recomputations

    @property
    def steps_of_decoding(self) -> int:
        """Steps of one token of each sequence, and nothing else."""
        return self.steps - self.steps_of_prompts - self.steps_of_speculation

    @property
    def host_seconds_per_step(self) -> float:
        """What the host works for a step; 0 before there are any."""
        return self.host_seconds / self.steps if self.steps else 0.0

    @property
    def idle_seconds_per_step(self) -> float:
        """What the device waits for the host between two steps, at most; 0 before there are any."""
        return self.idle_seconds / self.steps if self.steps else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Tokens of prompts found in the prefix cache over all of them, 0..1."""
        return self.reused_tokens / max(self.reused_tokens + self.prompt_tokens, 1)

    @property
    def acceptance_rate(self) -> float:
        """Guesses that were right over all of them, 0..1."""
        return self.accepted_tokens / max(self.proposed_tokens, 1)

    @property
    def occupancy(self) -> float:
        """Share of the pages that running requests hold, 0..1."""
        return 1 - (self.free_pages + self.cached_pages) / self.pages

    def to_json(self) -> dict[str, Any]:
        """All numbers as plain JSON values."""
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in _DERIVED}}


def statistics_of(
    counts: Counts,
    scheduler: Scheduler,
    groups: Sequence[Group],
    caches: pools.Pools,
    swapped: Sequence[list[Content]],
) -> EngineStatistics:
    """What an engine has done, and what it holds; `swapped` are pages in host memory."""
    held = tuple(
        GroupStatistics(
            window=group.window,
            layers=len(group.layers),
            pages=group.allocator.num_pages,
            free_pages=group.allocator.num_free,
            cached_pages=group.cached_pages(),
            pool_bytes=sum(caches[layer].nbytes for layer in group.layers),
        )
        for group in groups
    )
    return EngineStatistics(
        **dataclasses.asdict(counts),
        swaps=scheduler.swaps,
        recomputations=scheduler.recomputations,
        waiting=len(scheduler.waiting),
        running=len(scheduler.running),
        swapped=len(scheduler.swapped),
        swapped_bytes=sum(content_bytes(content) for content in swapped),
        pages=held[0].pages,
        free_pages=held[0].free_pages,
        cached_pages=held[0].cached_pages,
        tokens_held=scheduler.held_tokens(),
        token_capacity=held[0].pages * groups[0].allocator.page_size,
        pool_bytes=sum(group.pool_bytes for group in held),
        token_bytes=pools.token_bytes(caches),
        compression_ratio=pools.compression_ratio(caches),
        groups=held,
    )


def together(parts: Sequence[EngineStatistics]) -> EngineStatistics:
    """The statistics of several engines of one model that work at the same time, as one.

    They are sums, except `seconds` and `first_step_seconds`, which are the largest, and what is
    stated for one token, which is the same in all.
    """
    first = parts[0]
    merged: dict[str, Any] = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in dataclasses.fields(EngineStatistics)
        if field.name not in (*_OF_A_TOKEN, *_LONGEST, "groups")
    }
    merged |= {name: getattr(first, name) for name in _OF_A_TOKEN}
    merged |= {name: max(getattr(part, name) for part in parts) for name in _LONGEST}
    groups = (
        GroupStatistics(
            window=same[0].window,
            layers=same[0].layers,
            pages=sum(x.pages for x in same),
            free_pages=sum(x.free_pages for x in same),
            cached_pages=sum(x.cached_pages for x in same),
            pool_bytes=sum(x.pool_bytes for x in same),
        )
        for same in zip(*(part.groups for part in parts), strict=True)
    )
    return EngineStatistics(**merged, groups=tuple(groups))


# Costs --------------------------------------------------------------------------------------------


# The weight of the newest measurement in a running mean.
_WEIGHT = 0.25
# Assumed before anything was moved: pages go through host memory, no faster than this.
_FIRST_BYTES_PER_SECOND = 8e9
# Steps with fewer tokens of prompts say little about how fast these run.
_FEWEST_TOKENS = 32
# Steps of several tokens before they are compared with plain ones, and after how many the way that
# seemed to be slower is tried again.
_FIRST_SEVERAL, _TRY_AGAIN = 8, 32


class Costs:
    """Times measured so far, from which it is decided which way costs less from now on.

    There are two such decisions: whether the pages of a request that leaves the pool are moved away
    and back or its tokens are computed again (never without `may_recompute`), and whether a step
    gives several tokens of each sequence: guesses, or those of a launch.
    """

    def __init__(self, *, may_recompute: bool) -> None:
        self._may_recompute = may_recompute
        self._bytes_per_second = _FIRST_BYTES_PER_SECOND
        self._tokens_per_second: float | None = None
        self._plain_seconds: float | None = None
        self._several_seconds: float | None = None
        self._new_tokens = 1.0  # of a sequence in a step of several
        self._several = self._asked = 0

    def swapped(self, nbytes: int, seconds: float) -> None:
        """Notes that so many bytes came to host memory in this time."""
        if nbytes and seconds > 0:
            self._bytes_per_second = _mean(self._bytes_per_second, nbytes / seconds)

    def stepped(
        self, seconds: float, *, prompt_tokens: int, several: bool, sequences: int, new_tokens: int
    ) -> None:
        """Notes a step's time; it ran `prompt_tokens`, and `sequences` got `new_tokens` in all."""
        if prompt_tokens >= _FEWEST_TOKENS and seconds > 0:
            self._tokens_per_second = _mean(self._tokens_per_second, prompt_tokens / seconds)
        if several:
            self._several += 1
            self._new_tokens = _mean(self._new_tokens, new_tokens / max(sequences, 1))
            self._several_seconds = _mean(self._several_seconds, seconds)
        elif not prompt_tokens:
            self._plain_seconds = _mean(self._plain_seconds, seconds)

    def recomputes(self, nbytes: int, tokens: int) -> bool:
        """Whether computing these tokens takes less time than moving their pages away and back."""
        if not self._may_recompute or self._tokens_per_second is None:
            return False
        return tokens / self._tokens_per_second < 2 * nbytes / self._bytes_per_second

    def several_pay(self, gain: float = 1.0) -> bool:
        """Whether the next step should give several tokens; to be asked before each step.

        They must come at least `gain` times as fast as one by one.

        Guesses are right in one text and wrong in the next, and what they cost depends on how many
        sequences there are: so both ways are tried again now and then.
        """
        self._asked += 1
        if self._several < _FIRST_SEVERAL:
            return True
        if self._plain_seconds is None or self._several_seconds is None:
            return False
        pays = self._new_tokens * self._plain_seconds >= gain * self._several_seconds
        return pays != (self._asked % _TRY_AGAIN == 0)


def _mean(before: float | None, x: float) -> float:
    return x if before is None else before + _WEIGHT * (x - before)
