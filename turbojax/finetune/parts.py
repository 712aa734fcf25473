"""The gradient of a step, with a part of its sequences in memory at a time."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from turbojax.finetune.base import windows
from turbojax.finetune.losses import scaled_value_and_grad

Gradient = Callable[[Any, jax.Array, jax.Array], tuple[tuple[jax.Array, Any], Any]]
"""From what is trained, the stream and the starts of windows what `jax.value_and_grad` gives: the
mean loss with what else the loss returns, and the gradient."""


class Loss(Protocol):
    """The mean loss of some sequences of a step, in nats."""

    @property
    def context(self) -> int:
        """Tokens of a sequence that are predicted."""

    def __call__(
        self, trained: Any, tokens: jax.Array, share: jax.Array | None, /
    ) -> tuple[jax.Array, Any]:
        """The loss at ``[B, context + 1]`` tokens, and what else is wanted, which is averaged.

        With a `share` the sum of what counts, divided by it, see `losses.mean_of_learned`.
        """

    def share(self, tokens: jax.Array) -> jax.Array | None:
        """How many of a step's tokens count, see `losses.share_of_learned`; None if all do."""


def in_parts(
    loss: Loss,
    parts: int,
    scale: float,
    *,
    devices: int = 1,
    whole: Callable[[Any], Any] = lambda trained: trained,
    beside: Any = None,
) -> Gradient:
    """`scaled_value_and_grad` of the mean loss of windows, one part in memory at a time.

    Args:
      loss: see `Loss`.
      parts: into which the windows are taken apart, as many in each.
      scale: see `scaled_value_and_grad`.
      devices: what loss and gradient are divided by, each of which has as many windows.
      whole: makes what the loss takes of what the gradient is of, in each part anew.
      beside: zeros of what else the loss returns.
    """

    def of_part(trained: Any, tokens: jax.Array, share: jax.Array | None) -> tuple[jax.Array, Any]:
        value, more = loss(whole(trained), tokens, share)
        # A share counts the tokens of all parts already.
        return value / (devices * parts if share is None else devices), more

    step = scaled_value_and_grad(of_part, scale)

    def gradient(trained: Any, stream: jax.Array, starts: jax.Array) -> Any:
        tokens = windows(stream, starts, loss.context)
        share = loss.share(tokens)
        if parts == 1:
            return step(trained, tokens, share)

        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, step(trained, tokens, share)), None

        nothing = (jnp.zeros((), jnp.float32), beside), jax.tree.map(jnp.zeros_like, trained)
        total, _ = jax.lax.scan(add, nothing, tokens.reshape(parts, -1, tokens.shape[1]))
        (value, more), grads = total
        return (value, jax.tree.map(lambda x: x / parts, more)), grads

    return gradient
