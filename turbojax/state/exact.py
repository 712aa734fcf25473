"""`ExactCache`: keys and values as they are, with the operations of `ProgressiveCache`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.state import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactCache:
    """Keys and values as they are, in one floating-point dtype.

    Attributes:
      key: ``[B, max_length, K, H]``, zero past each length.
      value: the same.
      lengths: int32 ``[B]``, tokens held.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    overflowed: jax.Array

    @property
    def max_length(self) -> int:
        """Tokens each sequence can hold."""
        return self.key.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key.shape[-2]

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.key.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the keys and values held."""
        return self.key.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 keys and values over `nbytes`."""
        return 2 * (self.key.size + self.value.size) / self.nbytes


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> ExactCache:
    """An empty cache of these sizes.

    Raises:
      ValueError: if a size is not positive.
      TypeError: if `dtype` is none of bfloat16, float16, float32.
    """
    shape = (batch_size, max_length, num_kv_heads, head_dim)
    if min(shape) < 1:
        raise ValueError(f"cache shape {shape} must be positive in every axis")
    if jnp.dtype(dtype) not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={jnp.dtype(dtype)} must be bfloat16, float16 or float32")
    return ExactCache(
        key=jnp.zeros(shape, dtype),
        value=jnp.zeros(shape, dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
    )


def append(
    cache: ExactCache, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> ExactCache:
    """Adds new tokens, rounded to the cache's dtype; see `turbojax.append`.

    Args:
      cache: the cache to extend.
      key: ``[B, T, K, H]``, floating point.
      value: the same.
      lengths: optional int ``[B]``, how many of the `T` tokens are real.

    Returns:
      The extended cache; under `jit`, tokens past `max_length` are left out and reported in
      `overflowed`.

    Raises:
      TypeError: if `cache` is another kind, or dtypes are not supported or differ.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed
        `max_length`.
    """
    checks.check_kind(cache, ExactCache)
    _checks.check_key_value(key, value)
    batch, tokens = key.shape[:2]
    if (batch, *key.shape[2:]) != (cache.key.shape[0], *cache.key.shape[2:]):
        raise ValueError(f"{key.shape=} must fit {cache.key.shape=}")
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    total = cache.lengths + jnp.clip(lengths, 0, tokens)
    if _checks.is_concrete(total) and np.any(np.asarray(total) > cache.max_length):
        raise ValueError(
            f"appending would give lengths {np.asarray(total).tolist()}, "
            f"which must be at most max_length={cache.max_length}"
        )
    offset = jnp.arange(tokens)[None]
    index = cache.lengths[:, None] + offset
    # Padding gets rows past the end, which the scatter drops; no row is named twice.
    index = jnp.where(offset < lengths[:, None], index, cache.max_length + offset)
    put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop", unique_indices=True))
    return ExactCache(
        key=put(cache.key, index, key.astype(cache.key.dtype)),
        value=put(cache.value, index, value.astype(cache.value.dtype)),
        lengths=jnp.minimum(total, cache.max_length),
        overflowed=cache.overflowed | (total > cache.max_length),
    )
