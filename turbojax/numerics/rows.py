"""What adapters of attention kernels do to arrays before and after: plain JAX, one fusion each."""

import math

import jax
import jax.numpy as jnp

_LOG2_E = math.log2(math.e)
HEAD_DIMS = (64, 128, 256)
"""Head dims of the kernels of Mosaic GPU."""
# Tokens that copies of these kernels take together.
_COPY = 8


def without_padding(x: jax.Array, length: jax.Array | None) -> jax.Array:
    """``[B, S, K, H]`` with zeros at and past each sequence's end, which kernels load too."""
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


def padded_head_dim(head_dim: int) -> int:
    """The smallest of `HEAD_DIMS` that is no smaller."""
    return next(n for n in HEAD_DIMS if n >= head_dim)


def padded(x: jax.Array) -> jax.Array:
    """``[B, T, heads, H]`` with zeros up to a multiple of 8 tokens and one of `HEAD_DIMS`."""
    x = pad_axis(x, 1, -(-x.shape[1] // _COPY) * _COPY)
    return pad_axis(x, 3, padded_head_dim(x.shape[-1]))


def without_blind(x: jax.Array, residual: jax.Array) -> jax.Array:
    """Cotangents with zeros for rows that saw nothing: weights of 0 do not remove a NaN."""
    return jnp.where((residual == -jnp.inf)[..., None], jnp.zeros((), x.dtype), x)


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

    With `all_see` every row exists and sees something, so `d_out` is not searched for blind rows.
    Returns `without_blind` of `d_out`, and float32 ``[B, N, tokens]`` twice: the log-sum-exp in
    powers of two, ``inf`` for blind rows and past the last, so that their weights are 0; and
    ``rowsum(d_out * out)`` less the residual's cotangent, 0 there.
    """
    is_empty = residual == -jnp.inf
    if not all_see:
        d_out = without_blind(d_out, residual)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Otherwise XLA transposes within the sum, which takes five times as long as reading the two
    # arrays.
    delta = jax.lax.optimization_barrier(delta) - d_residual
    lse = jnp.where(is_empty, jnp.inf, residual * _LOG2_E)
    lse, delta = (jnp.swapaxes(x, 1, 2) for x in (lse, jnp.where(is_empty, 0.0, delta)))
    return d_out, pad_axis(lse, 2, tokens, math.inf), pad_axis(delta, 2, tokens)
