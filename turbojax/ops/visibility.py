"""Which keys a query sees: lengths, causality and a sliding window."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The static part of an attention mask.

    Attributes:
      is_causal: a query sees keys up to its own position.
      window: (left, right): a query at ``p`` sees keys in ``[p - left, p + right]``.
    """

    is_causal: bool
    window: tuple[int, int] | None

    def mask(
        self, query_position: jax.Array, key_position: jax.Array, key_length: jax.Array
    ) -> jax.Array:
        """Visible pairs.

        Args:
          query_position: int32 ``[B or 1, T]``.
          key_position: int32 ``[B or 1, S]``.
          key_length: int32 ``[B]``, keys at or past it are ignored.

        Returns:
          bool ``[B, T, S]``.
        """
        q, k = query_position[:, :, None], key_position[:, None, :]
        visible = jnp.broadcast_to(
            k < key_length[:, None, None], (key_length.shape[0], q.shape[1], k.shape[2])
        )
        if self.is_causal:
            visible = visible & (k <= q)
        if self.window is not None:
            left, right = self.window
            visible = visible & (k >= q - left) & (k <= q + right)
        return visible

    def key_range(
        self, first: jax.Array, last: jax.Array, key_length: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Positions ``[start, stop)`` outside which queries ``first..last`` see nothing.

        Args:
          first: int32 scalar, smallest query position.
          last: int32 scalar, largest query position.
          key_length: int32 ``[B]``.

        Returns:
          int32 scalars, valid for every sequence; empty ranges have ``stop <= start``.
        """
        start, stop = jnp.zeros_like(first), jnp.max(key_length)
        if self.is_causal:
            stop = jnp.minimum(stop, last + 1)
        if self.window is not None:
            left, right = self.window
            start = jnp.maximum(start, first - left)
            stop = jnp.minimum(stop, last + right + 1)
        return start, stop


def attention_options(
    query: jax.Array,
    scale: float | None,
    is_causal: bool,
    local_window_size: int | tuple[int, int] | None,
    logits_soft_cap: float | None,
) -> dict[str, Any]:
    """The static options of an attention call, checked and completed."""
    _checks.check_number("scale", scale)
    _checks.check_number("logits_soft_cap", logits_soft_cap)
    _checks.check_positive("logits_soft_cap", logits_soft_cap)
    return {
        "scale": 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        "visibility": Visibility(bool(is_causal), _checks.normalize_window(local_window_size)),
        "logits_soft_cap": None if logits_soft_cap is None else float(logits_soft_cap),
    }
