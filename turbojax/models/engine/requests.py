"""What goes into an engine and what comes out, and a request on its way through it."""

import contextlib
import dataclasses
import enum
import math
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Literal

import numpy as np

from turbojax import _checks
from turbojax.models.generation.constraints import AllowedTokens, Constraint, ConstraintState
from turbojax.models.generation.sampling import GREEDY, NO_PENALTIES, Penalties, Sampling
from turbojax.models.generation.stopping import TextStream, check_stop_strings

FinishReason = Literal["length", "stop", "aborted", "failed", "timeout"]

MOST_LOGPROBS = 20
"""Likely tokens that a request may ask for at each place."""

_LARGEST = float(np.finfo(np.float32).max)


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
      penalties: of tokens that were there before, see `Penalties`.
      logit_bias: what is added to the logits of tokens, before all else, in float32; ``-inf``
        forbids a token.
      constraint: which tokens may follow those before, see `Constraint`; None for all. With a
        constraint the next token is computed only when the one before is known.
      logprobs: None for none; otherwise results have each token's log-probability, and those of so
        many of the most likely ones, 0 to 20. They are the model's: of the logits before bias,
        penalties, constraint and temperature.
      priority: of requests that wait those with a smaller number come first, and where the pool is
        full those with a larger one leave it first; equal ones in order of arrival.
      timeout: seconds from `Engine.add` after which the request ends with what it has; None for
        any time.

    Raises:
      TypeError: if a token or a number is not an integer, a stop text not text, or an option of
        another kind than stated.
      ValueError: if the prompt is empty, `max_new_tokens` or `timeout` is not positive, a stop text
        is empty, a bias is NaN, infinity or beyond float32, or `logprobs` out of range.
    """

    tokens: Many[int]
    max_new_tokens: int = 128
    stop_tokens: Many[int] = ()
    sampling: Sampling = GREEDY
    stop_strings: Iterable[str] = ()
    penalties: Penalties = NO_PENALTIES
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    constraint: Constraint | None = None
    logprobs: int | None = None
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _integers("tokens", self.tokens))
        object.__setattr__(self, "stop_tokens", _integers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop_strings", check_stop_strings(self.stop_strings))
        if not self.tokens:
            raise ValueError("tokens of a request must be at least one")
        _checks.check_sizes(max_new_tokens=self.max_new_tokens)
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling={self.sampling!r} must be a Sampling")
        if not isinstance(self.penalties, Penalties):
            raise TypeError(f"penalties={self.penalties!r} must be Penalties")
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise TypeError(f"constraint={self.constraint!r} must be a Constraint")
        if self.logprobs is not None:
            _checks.check_integer("logprobs", self.logprobs)
            if not 0 <= self.logprobs <= MOST_LOGPROBS:
                raise ValueError(f"logprobs={self.logprobs} must be within 0..{MOST_LOGPROBS}")
        _checks.check_integer("priority", self.priority)
        if self.timeout is not None:
            if isinstance(self.timeout, bool):
                raise TypeError(f"timeout={self.timeout} must be a number")
            _checks.check_number("timeout", self.timeout)
            _checks.check_positive("timeout", float(self.timeout))

    @property
    def total(self) -> int:
        """Tokens of prompt and longest result together."""
        return len(self.tokens) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, and which others were.

    Attributes:
      logprob: natural logarithm of the token's probability.
      top: the most likely tokens, each with its own, most likely first; as many as asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a request.

    Attributes:
      tokens: the new tokens; a stop token, or the one that completed a stop text, included.
      finish_reason: ``"length"``: there are `max_new_tokens`; ``"stop"``: a stop token or a stop
        text, a constraint at its end, or `Engine.abort` with this reason; ``"aborted"``;
        ``"failed"``: the logits were NaN, for which a cache is one reason that cannot hold a
        layer's keys or values (fp8 beyond its range), or bias and constraint left no token;
        ``"timeout"``: its time was over.
      prompt_tokens: length of the prompt.
      reused_tokens: of the prompt, whose keys and values were in the pool already.
      preemptions: how often the request had to leave the pool for a while.
      waited_seconds: from `add` to the first step.
      first_token_seconds: from `add` to the first token; None if there is none.
      seconds: from `add` to the end.
      logprobs: one for each token where asked for; None otherwise.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    preemptions: int
    waited_seconds: float
    first_token_seconds: float | None
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean of the tokens' log-probabilities, by which the best of several is chosen.

        It is -inf for a result without tokens: any other is better.

        Raises:
          ValueError: if they were not asked for.
        """
        if self.logprobs is None:
            raise ValueError("the request's logprobs are None, must be a number")
        if not self.logprobs:
            return -math.inf
        return sum(x.logprob for x in self.logprobs) / len(self.logprobs)


@dataclasses.dataclass(frozen=True, slots=True)
class NewToken:
    """A request has one more token.

    Attributes:
      request_id: whose.
      index: how many new tokens the request had before.
      token: the token.
      logprobs: how likely it was, where asked for.
    """

    request_id: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None


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


def best_of(results: Iterable[Result], count: int = 1) -> list[Result]:
    """The results whose tokens are the most likely in the mean, the best first.

    Args:
      results: of requests with `logprobs`.
      count: how many, at least 1.

    Raises:
      TypeError: if `count` is not an integer.
      ValueError: if one has no log-probabilities, or there are fewer than `count`.
    """
    results = tuple(results)
    _checks.check_sizes(count=count)
    if count > len(results):
        raise ValueError(f"{count=} must be at most the number of results, {len(results)}")
    return sorted(results, key=lambda result: -result.mean_logprob)[:count]


def check_vocabulary(request: Request, size: int) -> None:
    """Raises ValueError unless all tokens that a request names are in a vocabulary of this size."""
    tokens = (*request.tokens, *request.stop_tokens, *request.logit_bias)
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < size:
            raise ValueError(f"{token=} of a request must be within 0..{size - 1}")
    constraint = request.constraint
    # Its masks would only be found too large in a step.
    if isinstance(constraint, AllowedTokens) and constraint.vocab_size > size:
        raise ValueError(
            f"vocab_size={constraint.vocab_size} of the constraint must be at most the model's "
            f"{size}"
        )


def _bias(values: Mapping[int, float]) -> dict[int, float]:
    """The bias of tokens as Python numbers; raises what `Request` does."""
    if not isinstance(values, Mapping):
        raise TypeError(f"logit_bias={values!r} must be a mapping of tokens to numbers")
    found = dict[int, float]()
    for token, value in values.items():
        _checks.check_integer("a token of logit_bias", token)
        name = f"logit_bias[{token}]"
        if isinstance(value, bool) or value is None:
            raise TypeError(f"{name}={value} must be a number")
        if value != -math.inf:
            _checks.check_number(name, value)
            if abs(value) > _LARGEST:
                raise ValueError(f"{name}={value} must be within float32, or -inf")
        found[int(token)] = float(value)
    return found


def _integers(name: str, values: Many[int]) -> tuple[int, ...]:
    values = tuple(values)  # an iterator can be read only once
    if set(map(type, values)) <= {int}:
        return values  # at once, as there may be thousands
    for value in values:
        _checks.check_integer(f"a member of {name}", value)
    return tuple(int(value) for value in values)


# On their way -------------------------------------------------------------------------------------


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
      takes_more: whether several tokens may come at a time: nothing is asked for but how they are
        drawn.
      slot: on the device, while running; -1 otherwise.
      handles: of each group's allocator, while running.
      prompt: int32, tokens to run before it decodes: those of the request and, after it left the
        pool without its pages, also the new ones that it had.
      end: tokens in its pages at most: the last new one is never fed, so it needs no place.
      held: tokens in its pages, or on their way there, at most.
      unsure: how many of these may be missing: guesses on their way that may be wrong, or what
        comes after an end.
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
    takes_more: bool = True
    status: Status = Status.WAITING
    slot: int = -1
    handles: tuple[int, ...] = ()
    prompt: np.ndarray = dataclasses.field(init=False)
    end: int = dataclasses.field(init=False)
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
        self.prompt = np.array(self.request.tokens, np.int32)
        self.end = self.request.total - 1

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
        if self.text is None:
            return token in self.stop_tokens
        self.text.add(token)
        return token in self.stop_tokens or self.text.stopped

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
    def tokens(self) -> np.ndarray:
        """All tokens that the host knows, int32: those of the request, then the new ones."""
        first = self.prompt[: len(self.request.tokens)]
        return np.concatenate([first, np.array(self.new_tokens, np.int32)])
