"""Penalties on tokens that a text has already."""

import dataclasses

from turbojax import _checks


@dataclasses.dataclass(frozen=True)
class Penalties:
    """How logits of tokens change that were there before, ahead of temperature and restrictions.

    Attributes:
      repetition: logits of tokens of prompt or result are divided by it where positive, and
        multiplied where negative (Keskar et al., 2019), 1e-6..1e6; 1 for none.
      presence: subtracted from the logits of tokens that the result has, -1e6..1e6.
      frequency: subtracted from them once for each time that the result has them, -1e6..1e6.

    Raises:
      TypeError: if one is not a number.
      ValueError: if one is out of range.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name, smallest in (("repetition", 1e-6), ("presence", -1e6), ("frequency", -1e6)):
            x = getattr(self, name)
            if isinstance(x, bool) or x is None:
                raise TypeError(f"{name}={x} must be a number")
            _checks.check_number(name, x)
            if not smallest <= x <= 1e6:
                raise ValueError(f"{name}={x} must be within {smallest:g}..1e6")
            object.__setattr__(self, name, float(x))


NO_PENALTIES = Penalties()
"""What was there before makes no difference."""
