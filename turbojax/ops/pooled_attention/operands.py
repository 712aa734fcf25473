"""What the kernels' adapters do to arrays before and after: plain JAX, one fusion each."""

import math

import jax
import jax.numpy as jnp

from turbojax.ops.pooled_attention.pooling import group_counts
from turbojax.ops.pooled_attention.static import LEVELS

_LOG2_E = math.log2(math.e)


def without_padding(x: jax.Array, length: jax.Array | None) -> jax.Array:
    """``[B, S, K, H]`` with zeros at and past each sequence's end: kernels load what is there."""
    if length is None:
        return x
    there = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < length[:, None]
    return jnp.where(there[:, :, None, None], x, jnp.zeros((), x.dtype))


def pad_axis(x: jax.Array, axis: int, size: int, value: float = 0.0) -> jax.Array:
    """`x` with `value` appended along `axis` up to `size`."""
    extra = size - x.shape[axis]
    if extra == 0:
        return x
    widths = [(0, extra) if i == axis else (0, 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def lengths(length: jax.Array | None, batch: int, tokens: int) -> jax.Array:
    """int32 ``[B]``."""
    return jnp.full(batch, tokens, jnp.int32) if length is None else length


def gradient_rows(
    out: jax.Array, residual: jax.Array, d_out: jax.Array, d_residual: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernels of the backward pass need to know of each row.

    Args:
      out: ``[B, T, N, H]``.
      residual: float32 ``[B, T, N]``.
      d_out: the cotangent of `out`.
      d_residual: that of `residual`.
      tokens: `Tp`, at least `T`.

    Returns:
      `d_out` with zeros for rows that saw nothing or do not exist, as a weight of 0 does not remove
      a NaN. And float32 ``[B, N, Tp]``, twice: the log-sum-exp in powers of two, ``inf`` there, so
      that their weights are 0; and ``rowsum(d_out * out)`` less the residual's cotangent, 0 there.
    """
    is_empty = residual == -jnp.inf
    d_out = jnp.where(is_empty[..., None], jnp.zeros((), d_out.dtype), d_out)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Otherwise XLA transposes within the sum, which takes five times as long as reading the two
    # arrays.
    delta = jax.lax.optimization_barrier(delta) - d_residual
    lse = jnp.where(is_empty, jnp.inf, residual * _LOG2_E)
    lse, delta = (jnp.swapaxes(x, 1, 2) for x in (lse, jnp.where(is_empty, 0.0, delta)))
    return d_out, pad_axis(lse, 2, tokens, math.inf), pad_axis(delta, 2, tokens)


def merge_gradients(
    parts: tuple[jax.Array, ...],
    key_length: jax.Array | None,
    tokens: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The adjoint of pooling, summed over the levels.

    Args:
      parts: float32 ``[B, K, G, H]`` of levels 1, 2, 4 and 8, `G` at least ``ceil(S / level)``.
      key_length: optional int32 ``[B]``.
      tokens: `S`.
      dtype: of the result.

    Returns:
      ``[B, S, K, H]``; zeros past each sequence's end.
    """
    batch, heads, _, channels = parts[0].shape
    groups = -(-tokens // LEVELS[-1])
    length = lengths(key_length, batch, tokens)
    total = jnp.zeros((batch, heads, groups, *(1,) * 3, channels), jnp.float32)
    for level, part in zip(LEVELS, parts, strict=True):
        each = LEVELS[-1] // level  # groups of this level in one of the largest
        count = jnp.maximum(group_counts(length, groups * LEVELS[-1], level), 1)
        part = pad_axis(part[:, :, : groups * each], 2, groups * each)
        part = part * (1 / count.astype(jnp.float32))[:, None, :, None]
        # The three axes are halves, quarters and eighths of a group of eight tokens.
        shape = tuple(2 if each >= 2**i else 1 for i in (1, 2, 3))
        total = total + part.reshape(batch, heads, groups, *shape, channels)
    total = jnp.broadcast_to(total, (batch, heads, groups, 2, 2, 2, channels))
    result = jnp.swapaxes(total.reshape(batch, heads, -1, channels)[:, :, :tokens], 1, 2)
    return without_padding(result.astype(dtype), key_length)
