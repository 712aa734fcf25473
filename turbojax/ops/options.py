"""What a layer asks of attention."""

import dataclasses
from typing import Any

from turbojax import _checks
from turbojax._registry import IMPLEMENTATION_NAMES


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """How a layer's causal attention differs from the plain one; static under `jit`.

    Attributes:
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      local_window_size: optional number of tokens that a query sees, its own included, as model
        configurations count them.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.

    Raises:
      TypeError: if a number is not a Python number, or the window not an integer.
      ValueError: if the scale is not finite (it may be negative), the window below 1, or the cap
        not positive and finite.
    """

    scale: float | None = None
    local_window_size: int | None = None
    logits_soft_cap: float | None = None

    def __post_init__(self) -> None:
        _checks.check_number("scale", self.scale)
        _checks.check_number("logits_soft_cap", self.logits_soft_cap)
        _checks.check_positive("logits_soft_cap", self.logits_soft_cap)
        if self.local_window_size is not None:
            _checks.check_sizes(local_window_size=self.local_window_size)

    def arguments(self) -> dict[str, Any]:
        """The options as arguments of `turbo_attention`, `decode` and their like.

        These count the tokens on either side of the query's own.
        """
        window = self.local_window_size
        return {
            "scale": self.scale,
            "local_window_size": None if window is None else (window - 1, 0),
            "logits_soft_cap": self.logits_soft_cap,
        }


PLAIN = AttentionOptions()
"""Causal attention to all tokens, scores over ``sqrt(H)``."""


def check_implementation(
    implementation: object, names: tuple[str, ...] = IMPLEMENTATION_NAMES
) -> None:
    """Raises ValueError unless it is None or among the names."""
    if implementation is not None and implementation not in names:
        raise ValueError(f"{implementation=} must be None or one of {names}")


def require_plain(options: AttentionOptions, what: str, *, but_scale: bool = False) -> None:
    """Raises NotImplementedError if a layer asks for more than causal attention.

    Args:
      options: of the layer.
      what: what cannot do more.
      but_scale: whether it takes a scale.
    """
    allowed = AttentionOptions(scale=options.scale) if but_scale else PLAIN
    if options != allowed:
        raise NotImplementedError(
            f"{what} has no window and no cap of scores: {options} is not supported"
        )
