"""Schedules of learning rates by name: what is left of the peak at a step after the warm-up."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_FRACTION = 0.1
"""Share of the steps after the warm-up in which ``"wsd"`` falls, unless another is given."""


def shape_of(
    name: str, steps: int, final_rate: float, decay_fraction: float | None
) -> Callable[[jax.Array], jax.Array]:
    """What the peak is multiplied by, from a step counted from the end of the warm-up.

    Args:
      name: one of `SCHEDULES`. ``"cosine"`` and ``"linear"`` fall from 1 to `final_rate`;
        ``"wsd"`` (warm-up, stable, decay; Hu et al., "MiniCPM", 2024) stays at 1 and falls linearly
        in the last part; ``"constant"`` stays.
      steps: after the warm-up.
      final_rate: where it ends.
      decay_fraction: of ``"wsd"``, see `DECAY_FRACTION`.

    Returns:
      A function of a float32 scalar, which is negative during the warm-up: then it gives 1.
    """
    steps = max(1, steps)
    if name == "constant":
        return optax.constant_schedule(1.0)
    if name == "linear":
        return optax.linear_schedule(1.0, final_rate, steps)
    if name == "wsd":
        fraction = DECAY_FRACTION if decay_fraction is None else decay_fraction
        last = max(1, round(fraction * steps))
        return optax.linear_schedule(1.0, final_rate, last, transition_begin=steps - last)

    def cosine(step: jax.Array) -> jax.Array:
        fallen = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.clip(step / steps, 0.0, 1.0))
        return final_rate + (1 - final_rate) * fallen

    return cosine
