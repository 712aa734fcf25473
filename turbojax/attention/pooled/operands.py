"""What the kernels' adapters do to arrays before and after: plain JAX, one fusion each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.attention.pooled.pooling import group_counts
from turbojax.attention.pooled.static import LEVELS
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.numerics import rows

MARKS = ("query_offset", "key_offset", "query_segment_ids", "key_value_segment_ids")
"""What the kernels take of `ScoreModifiers`."""


class Backward(NamedTuple):
    """What a backward pass takes, see `turbojax.attention.turbo.operands.Backward`; with levels.

    Lengths are None where all tokens are real.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    levels: jax.Array
    query_length: jax.Array | None
    key_length: jax.Array | None
    out: jax.Array
    residual: jax.Array
    d_out: jax.Array
    d_residual: jax.Array


def segments(modifiers: ScoreModifiers) -> tuple[jax.Array, jax.Array] | None:
    """The segments of queries and of keys, if there are any."""
    if modifiers.query_segment_ids is None or modifiers.key_value_segment_ids is None:
        return None
    return modifiers.query_segment_ids, modifiers.key_value_segment_ids


def lengths(length: jax.Array | None, batch: int, tokens: int) -> jax.Array:
    """int32 ``[B]``."""
    return jnp.full(batch, tokens, jnp.int32) if length is None else length


def merge_gradients(
    parts: tuple[jax.Array, ...],
    key_length: jax.Array | None,
    tokens: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The adjoint of pooling, summed over levels 1, 2, 4 and 8: ``[B, S, K, H]``, 0 past the end.

    `parts` are float32 ``[B, K, G, H]``, `G` at least ``ceil(S / level)``; `tokens` is `S`.
    """
    batch, heads, _, channels = parts[0].shape
    groups = -(-tokens // LEVELS[-1])
    length = lengths(key_length, batch, tokens)
    total = jnp.zeros((batch, heads, groups, *(1,) * 3, channels), jnp.float32)
    for level, part in zip(LEVELS, parts, strict=True):
        each = LEVELS[-1] // level  # groups of this level in one of the largest
        count = jnp.maximum(group_counts(length, groups * LEVELS[-1], level), 1)
        part = rows.pad_axis(part[:, :, : groups * each], 2, groups * each)
        part = part * (1 / count.astype(jnp.float32))[:, None, :, None]
        # The three axes are halves, quarters and eighths of a group of eight tokens.
        shape = tuple(2 if each >= 2**i else 1 for i in (1, 2, 3))
        total = total + part.reshape(batch, heads, groups, *shape, channels)
    total = jnp.broadcast_to(total, (batch, heads, groups, 2, 2, 2, channels))
    result = jnp.swapaxes(total.reshape(batch, heads, -1, channels)[:, :, :tokens], 1, 2)
    return rows.without_padding(result.astype(dtype), key_length)
