"""Which tokens a text may go on with after those before: what grammars and callbacks share."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from turbojax import _checks

WORD = 32
"""Tokens whose bits share a word of a mask."""


class ConstraintState(Protocol):
    """A constraint on one text, as its tokens come.

    One that may come to an end has an attribute `is_complete`, too: where it is true and nothing is
    allowed, the request ends with ``"stop"``, and otherwise with ``"failed"``.
    """

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: uint32 ``[ceil(V / 32)]``.

        Token ``t`` is bit ``t % 32`` of word ``t // 32``; bits from `V` on mean nothing. Where
        there are fewer words, tokens beyond them are not allowed.
        """

    def accept(self, token: int) -> None:
        """Adds a token, which was allowed."""


@runtime_checkable
class Constraint(Protocol):
    """What begins such a state for each text that is to follow it."""

    def begin(self) -> ConstraintState:
        """For a result without tokens."""


Allowed = np.ndarray | Iterable[int] | None
"""What a callback says: bool ``[V]``, or the tokens themselves, or None for all of them."""


@dataclasses.dataclass(frozen=True)
class AllowedTokens:
    """A `Constraint` by a function, which is asked before each token.

    Attributes:
      callback: gets the tokens of the result so far, ``()`` at first, and returns which may come
        next: bool ``[V]``, or the tokens, or None for all. Where it allows none, the request ends
        as failed.
      vocab_size: V, of the model.

    Raises:
      TypeError: if `callback` cannot be called, or `vocab_size` is not an integer.
      ValueError: if `vocab_size` is not positive.
    """

    callback: Callable[[tuple[int, ...]], Allowed]
    vocab_size: int

    def __post_init__(self) -> None:
        if not callable(self.callback):
            raise TypeError(f"callback={self.callback!r} must be a function")
        _checks.check_sizes(vocab_size=self.vocab_size)
        object.__setattr__(self, "vocab_size", int(self.vocab_size))

    def begin(self) -> "AllowedTokensState":
        """For a result without tokens."""
        return AllowedTokensState(self)


class AllowedTokensState:
    """The state of `AllowedTokens` for one text."""

    def __init__(self, constraint: AllowedTokens) -> None:
        self._constraint = constraint
        self._tokens: tuple[int, ...] = ()

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, see `ConstraintState.allowed`."""
        return pack(_bools(self._constraint.callback(self._tokens), self._constraint.vocab_size))

    def accept(self, token: int) -> None:
        """Adds a token, which was allowed."""
        self._tokens += (int(token),)


def is_over(state: ConstraintState | None) -> bool:
    """Whether a text is complete and may have no other token, see `ConstraintState`."""
    if state is None or not getattr(state, "is_complete", False):
        return False
    return not state.allowed().any()


def words_of(vocab_size: int) -> int:
    """Words of a mask of so many tokens: ``ceil(V / 32)``."""
    return -(-vocab_size // WORD)


def pack(allowed: np.ndarray) -> np.ndarray:
    """Bools ``[V]`` as the bits of words uint32 ``[ceil(V / 32)]``; bits from V on are 0."""
    if (kind := getattr(allowed, "dtype", type(allowed).__name__)) != np.bool_:
        raise TypeError(f"allowed is of {kind}, must be an array of bool")
    if allowed.ndim != 1:
        raise ValueError(f"{allowed.shape=} must be [V]")
    bits = np.zeros(words_of(allowed.size) * WORD, np.bool_)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _bools(given: Allowed, size: int) -> np.ndarray:
    if given is None:
        return np.ones(size, np.bool_)
    if not hasattr(given, "dtype"):
        return _of_members(given, size)
    array = np.asarray(given)  # of jax, too
    if array.dtype == np.bool_:
        if array.shape != (size,):
            raise ValueError(f"bools of shape {array.shape} from a callback must be ({size},)")
        return array
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{array.dtype} of shape {array.shape} from a callback must be bools [V], tokens "
            "[count] or None"
        )
    return _of_members(array.tolist(), size)


def _of_members(given: Iterable[int], size: int) -> np.ndarray:
    if not isinstance(given, Iterable):
        raise TypeError(f"{given!r} from a callback must be bools, tokens or None")
    members = list(given)
    if members and all(isinstance(member, bool | np.bool_) for member in members):
        return _bools(np.array(members, np.bool_), size)
    for member in members:
        _checks.check_integer("a token from a callback", member)
        if not 0 <= member < size:
            raise ValueError(f"token {member} from a callback must be within 0..{size - 1}")
    allowed = np.zeros(size, np.bool_)
    allowed[np.array(members, np.int64)] = True
    return allowed
