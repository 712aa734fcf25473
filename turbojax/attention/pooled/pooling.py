"""Means over groups of adjacent tokens, and their adjoint (multi-scale KV pooling, Li, 2025).

A group of level `r` is `r` tokens, the first at a multiple of `r`. In a group across the end of a
sequence only the tokens that exist count: it is their mean, and it weighs as many.
"""

import jax
import jax.numpy as jnp


def sum_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """What values of this dtype are summed in: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def group_counts(key_length: jax.Array, size: int, level: int) -> jax.Array:
    """How many of at most `size` tokens each group holds: int32 ``[B, ceil(size / level)]``."""
    first = jnp.arange(0, size, level, dtype=jnp.int32)
    return jnp.clip(jnp.minimum(key_length, size)[:, None] - first[None], 0, level)


def pool(x: jax.Array, key_length: jax.Array, level: int) -> jax.Array:
    """The mean of each group's tokens, summed in float32 and rounded once to the dtype of `x`.

    ``[B, S, K, H]`` becomes ``[B, ceil(S / level), K, H]``, zeros for groups without a token. What
    is stored at or past a sequence's end is not used.
    """
    batch, size, heads, channels = x.shape
    there = jnp.arange(size, dtype=jnp.int32)[None] < key_length[:, None]
    x = jnp.where(there[..., None, None], x, jnp.zeros((), x.dtype))
    if level == 1:
        return x
    dtype = sum_dtype(x.dtype)
    x = jnp.pad(x, ((0, 0), (0, -size % level), (0, 0), (0, 0)))
    sums = jnp.sum(x.reshape(batch, -1, level, heads, channels), axis=2, dtype=dtype)
    counts = jnp.maximum(group_counts(key_length, size, level), 1).astype(dtype)
    return (sums / counts[..., None, None]).astype(x.dtype)


def unpool(d: jax.Array, key_length: jax.Array, size: int, level: int) -> jax.Array:
    """The adjoint of `pool`: each token of a group gets the group's gradient over its count.

    The gradient of a group without a token is not used. Returns ``[B, S, K, H]`` in float32
    (float64 if `d` is), zeros at and past a sequence's end; `size` is `S`.
    """
    dtype = sum_dtype(d.dtype)
    counts = jnp.maximum(group_counts(key_length, size, level), 1).astype(dtype)
    shares = jnp.repeat(d.astype(dtype) / counts[..., None, None], level, axis=1)[:, :size]
    there = jnp.arange(size, dtype=jnp.int32)[None] < key_length[:, None]
    return jnp.where(there[..., None, None], shares, jnp.zeros((), dtype))
