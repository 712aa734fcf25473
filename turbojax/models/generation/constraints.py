"""Which tokens a text may go on with, by those before: what grammars and callbacks have in common."""

from typing import Protocol, runtime_checkable

import numpy as np


class ConstraintState(Protocol):
    """A constraint on one text, as its tokens come."""

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: uint32 ``[ceil(V / 32)]``.

        Token ``t`` is bit ``t % 32`` of word ``t // 32``; bits from `V` on mean nothing.
        """

    def accept(self, token: int) -> None:
        """Adds a token, which was allowed."""


@runtime_checkable
class Constraint(Protocol):
    """What begins such a state for each text that is to follow it."""

    def begin(self) -> ConstraintState:
        """For a result without tokens."""
