"""What adapters of attention kernels do to arrays before and after: plain JAX, one fusion each."""

import math

import jax
import jax.numpy as jnp

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


def gradient_rows(
    out: jax.Array,
    residual: jax.Array,
    d_out: jax.Array,
    d_residual: jax.Array,
    tokens: int,
    *,
    all_see: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernels of the backward pass need to know of each row.

    Args:
      out: ``[B, T, N, H]``.
      residual: float32 ``[B, T, N]``.
      d_out: the cotangent of `out`.
      d_residual: that of `residual`.
      tokens: `Tp`, at least `T`.
      all_see: whether every row exists and sees something: then `d_out` is not looked through.

    Returns:
      `d_out` with zeros for rows that saw nothing or do not exist, as a weight of 0 does not remove
      a NaN. And float32 ``[B, N, Tp]``, twice: the log-sum-exp in powers of two, ``inf`` there, so
      that their weights are 0; and ``rowsum(d_out * out)`` less the residual's cotangent, 0 there.
    """
    is_empty = residual == -jnp.inf
    if not all_see:
        d_out = jnp.where(is_empty[..., None], jnp.zeros((), d_out.dtype), d_out)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Otherwise XLA transposes within the sum, which takes five times as long as reading the two
    # arrays.
    delta = jax.lax.optimization_barrier(delta) - d_residual
    lse = jnp.where(is_empty, jnp.inf, residual * _LOG2_E)
    lse, delta = (jnp.swapaxes(x, 1, 2) for x in (lse, jnp.where(is_empty, 0.0, delta)))
    return d_out, pad_axis(lse, 2, tokens, math.inf), pad_axis(delta, 2, tokens)
