"""What the scheduler decides on: the next step, and what a step may hold."""

import dataclasses

from turbojax.models.engine.programs import PromptProgram
from turbojax.models.engine.sequence import Pages, Sequence


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
      guesses: how many of these tokens are guesses at most, in a step of nothing else; 0 otherwise.
      grown: sequences that got pages while running, and how many each had before.
    """

    leaving: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
    entering: list[Sequence] = dataclasses.field(default_factory=list)
    returning: list[tuple[Sequence, Pages]] = dataclasses.field(default_factory=list)
    decoding: list[Sequence] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    guesses: int = 0
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
      guesses: how many a sequence may be ahead of its last token.
      is_shared: whether several prompts may be under way at a time.
    """

    slots: int
    program: PromptProgram
    dense: PromptProgram | None = None
    guesses: int = 0
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
