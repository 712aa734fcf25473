"""A request on its way through an engine."""

import contextlib
import dataclasses
import enum
import warnings

from turbojax.models.engine.requests import Request, TokenLogprobs
from turbojax.models.generation.constraints import ConstraintState
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


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way.

    Attributes:
      request_id: increases with the order of arrival.
      text: finds stop texts; None if there are none.
      first: the sequence of the same prompt whose pages this one shares, if any.
      is_plain: whether it takes the most likely token, and nothing else is wanted.
      can_guess: whether its tokens may be guessed: nothing is asked for but how they are drawn.
      slot: on the device, while running; -1 otherwise.
      handles: of each group's allocator, while running.
      prompt: tokens to run before it decodes: those of the request and, after it left the pool
        without its pages, also the new ones that it had.
      held: tokens in its pages, or on their way there, at most.
      unsure: how many of these may be missing: guesses on their way that may be wrong.
      room: tokens that its pages have room for.
      sampled: new tokens chosen, or on their way here, at most; `unsure` of these may be missing.
      new_tokens: those that are known; `logprobs` are theirs, where asked for.
      reused: tokens of the prompt found in the prefix cache.
      stored: tokens that its pages in host memory have room for.
      gone: of each group, how many of its first pages it has released.
    """

    request_id: int
    request: Request
    stop_tokens: frozenset[int] = frozenset()
    text: TextStream | None = None
    constraint: ConstraintState | None = None
    first: "Sequence | None" = None
    is_plain: bool = True
    can_guess: bool = True
    status: Status = Status.WAITING
    slot: int = -1
    handles: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    held: int = 0
    unsure: int = 0
    room: int = 0
    sampled: int = 0
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    reused: int = 0
    preemptions: int = 0
    stored: int = 0
    gone: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.prompt = tuple(self.request.tokens)

    @property
    def age(self) -> tuple[int, int]:
        """The sequence with the smaller age goes first, and leaves last."""
        return self.request.priority, self.request_id

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to run."""
        return self.held < len(self.prompt)

    @property
    def is_known(self) -> bool:
        """Whether the host knows all its tokens: none is on its way."""
        return self.sampled == len(self.new_tokens)

    def stopped_by(self, token: int) -> bool:
        """Whether the next new token ends it; to be called once for each."""
        if self.text is not None:
            self.text.add(token)
        return token in self.stop_tokens or (self.text is not None and self.text.stopped)

    def warn_of(self, error: Exception) -> None:
        """Warns of an exception of its constraint, which ends it."""
        # Where warnings are errors this one must not end the engine, and with it all others.
        with contextlib.suppress(RuntimeWarning):
            warnings.warn(
                f"request {self.request_id} has failed: its constraint raised "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def known(self) -> list[int]:
        """The tokens in its pages, without those that the host does not know yet."""
        return [*self.request.tokens, *self.new_tokens][: self.held - self.unsure]
