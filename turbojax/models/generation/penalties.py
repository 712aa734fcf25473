"""Penalties on tokens that a text has already."""

import dataclasses

from turbojax import _checks


@dataclasses.dataclass(frozen=True)
class Penalties:
    """How logits of tokens change that were there before, ahead of temperature and restrictions.

    Attributes:
      repetition: logits of tokens of prompt or result are divided by it where positive, and
        multiplied where negative (Keskar et al., 2019); 1 for none.
      presence: subtracted from the logits of tokens that the result has.
      frequency: subtracted from them once for each time that the result has them.

    Raises:
      TypeError: if one is not a number.
      ValueError: if one is not finite, or `repetition` is not positive.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("repetition", "presence", "frequency"):
            _checks.check_number(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        _checks.check_positive("repetition", self.repetition)
        for name in ("presence", "frequency"):
            if abs(getattr(self, name)) > 1e6:
                raise ValueError(f"{name}={getattr(self, name)} must be within -1e6..1e6")


NO_PENALTIES = Penalties()
"""What was there before makes no difference."""
