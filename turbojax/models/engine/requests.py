"""What goes into an engine and what comes out: requests, events, results."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from turbojax import _checks

FinishReason = Literal["length", "stop", "aborted", "failed"]
# Python's numbers, which any other can be compared with.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    The random numbers of a token follow from `seed` and from how many tokens the request has so
    far, so they do not depend on what else runs, nor on when.

    Attributes:
      temperature: 0 for the most likely token; otherwise logits are divided by it.
      top_k: draw from the `top_k` most likely tokens, ties with the last of them included; None
        for all.
      top_p: draw from the fewest most likely tokens whose probabilities, after temperature and
        `top_k`, add up to at least this, ties with the last of them included; None for all.
      seed: of the random numbers, ``0..2**32 - 1``.

    Raises:
      TypeError: if a number is no number.
      ValueError: if it is out of range, or `top_k` or `top_p` come without a temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            x = getattr(self, name)
            if name == "top_p" and x is None:
                continue
            if isinstance(x, bool) or not isinstance(x, int | float | np.number):
                raise TypeError(f"{name}={x!r} must be a number")
        if self.temperature and not _SMALLEST <= self.temperature <= _LARGEST:
            raise ValueError(
                f"temperature={self.temperature} must be 0, or positive and finite in float32"
            )
        if self.top_k is not None:
            _checks.check_sizes(top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        for name in ("top_k", "top_p"):
            if not self.temperature and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} needs a temperature above 0")
        _checks.check_integer("seed", self.seed)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be within 0..2**32 - 1")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
      tokens: the prompt, at least one token.
      max_new_tokens: tokens to add at most, at least 1.
      stop_tokens: tokens that end the result; the one that did is its last token.
      sampling: how tokens are chosen.

    Raises:
      TypeError: if a token or a number is no integer.
      ValueError: if the prompt is empty or `max_new_tokens` is not positive.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 128
    stop_tokens: Sequence[int] = ()
    sampling: Sampling = Sampling()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _integers("tokens", self.tokens))
        object.__setattr__(self, "stop_tokens", _integers("stop_tokens", self.stop_tokens))
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
      tokens: the new tokens; a stop token included.
      finish_reason: ``"length"``: there are `max_new_tokens`; ``"stop"``: a stop token, or
        `Engine.abort` with this reason; ``"aborted"``; ``"failed"``: the logits were NaN, for
        which a cache is one reason that cannot hold a layer's keys or values (fp8 beyond its
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
