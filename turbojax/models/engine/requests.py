"""What goes into an engine and what comes out: requests, events, results."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from turbojax import _checks
from turbojax.models.generation.sampling import GREEDY, Sampling
from turbojax.models.generation.stopping import check_stop_strings

FinishReason = Literal["length", "stop", "aborted", "failed"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
      tokens: the prompt, at least one token.
      max_new_tokens: tokens to add at most, at least 1.
      stop_tokens: tokens that end the result; the one that did is its last token.
      sampling: how tokens are chosen.
      stop_strings: texts that end the result, wherever in the tokens they begin and end; the token
        that completed one is the last. One that is written like a special token, such as
        ``"<|im_end|>"``, is a stop token, too. The `Engine` needs a `tokenizer` for them.

    Raises:
      TypeError: if a token or a number is not an integer, or a stop text not text.
      ValueError: if the prompt is empty, `max_new_tokens` is not positive, or a stop text is empty.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 128
    stop_tokens: Sequence[int] = ()
    sampling: Sampling = GREEDY
    stop_strings: Iterable[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _integers("tokens", self.tokens))
        object.__setattr__(self, "stop_tokens", _integers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop_strings", check_stop_strings(self.stop_strings))
        if not self.tokens:
            raise ValueError("tokens of a request must be at least one")
        _checks.check_sizes(max_new_tokens=self.max_new_tokens)
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling={self.sampling!r} must be a Sampling")

    @property
    def total(self) -> int:
        """Tokens of prompt and longest result together."""
        return len(self.tokens) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a request.

    Attributes:
      tokens: the new tokens; a stop token, or the one that completed a stop text, included.
      finish_reason: ``"length"``: there are `max_new_tokens`; ``"stop"``: a stop token or a stop
        text, or `Engine.abort` with this reason; ``"aborted"``; ``"failed"``: the logits were NaN,
        for which a cache is one reason that cannot hold a layer's keys or values (fp8 beyond its
        range).
      prompt_tokens: length of the prompt.
      reused_tokens: of the prompt, whose keys and values were in the pool already.
      preemptions: how often the request had to leave the pool for a while.
      waited_seconds: from `add` to the first step.
      first_token_seconds: from `add` to the first token; None if there is none.
      seconds: from `add` to the end.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    preemptions: int
    waited_seconds: float
    first_token_seconds: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class NewToken:
    """A request has one more token.

    Attributes:
      request_id: whose.
      index: how many new tokens the request had before.
      token: the token.
    """

    request_id: int
    index: int
    token: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request is done; its tokens were announced before.

    Attributes:
      request_id: which.
      result: its result.
    """

    request_id: int
    result: Result


Event = NewToken | Finished


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """The values as Python integers."""
    values = tuple(values)  # an iterator can be read only once
    for value in values:
        _checks.check_integer(f"a member of {name}", value)
    return tuple(int(value) for value in values)
