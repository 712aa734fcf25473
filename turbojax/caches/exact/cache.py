"""`ExactCache`: keys and values as they are, with the operations of `ProgressiveCache`."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree
from turbojax.attention.options import check_implementation
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.arrays import CacheArrays
from turbojax.sharding import tables
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.per_device import per_device_explicit

_UNIT = 16
"""Rows of a rolling buffer are a multiple of this."""


@pytree
@dataclasses.dataclass(frozen=True)
class ExactCache(CacheArrays):
    """Keys and values as they are, in one floating-point dtype.

    Token `p` is in row ``p % room`` of ``[B, room, K, H]``; rows without a token are zero.

    Attributes:
      lengths: int32 ``[B]``, tokens seen; all are held, unless this is a rolling buffer.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      window: tokens that a query may see, its own included, see `turbojax.caches.rolling_buffer`;
        None for all.
      limit: tokens a sequence may grow to, or None for `room`.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    limit: int | None = dataclasses.field(default=None, metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "key": "BLKH",
        "value": "BLKH",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    @property
    def max_length(self) -> int:
        """Tokens each sequence may grow to."""
        return self.room if self.limit is None else self.limit

    @property
    def room(self) -> int:
        """Tokens of a sequence that are kept at any time."""
        return self.key.shape[-3]

    @property
    def is_rolling(self) -> bool:
        """Whether new tokens overwrite those that no window reaches any more."""
        return self.room < self.max_length

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


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    local_window_size: int | tuple[int, int] | None = None,
    axes: Axes | None = None,
) -> ExactCache:
    """An empty cache, see `turbojax.init_cache`; devices of a mesh get equally many tokens."""
    if axes is not None:
        static = {"dtype": jnp.dtype(dtype), "local_window_size": local_window_size}
        sizes = Sizes(batch_size, max_length, num_kv_heads, 1, max_length)
        return born(init_cache, axes, sizes, head_dim=head_dim, **static)
    shape = (batch_size, max_length, num_kv_heads, head_dim)
    if min(shape) < 1:
        raise ValueError(f"cache shape {shape} must be positive in every axis")
    window = rolling_buffer.window_of(local_window_size)
    rows = min(max_length, _UNIT * rolling_buffer.units(window, max_length, _UNIT))
    shape = (batch_size, rows, num_kv_heads, head_dim)
    if jnp.dtype(dtype) not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={jnp.dtype(dtype)} must be bfloat16, float16 or float32")
    return ExactCache(
        key=jnp.zeros(shape, dtype),
        value=jnp.zeros(shape, dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        window=window,
        limit=max_length if rows < max_length else None,
    )


def append(
    cache: ExactCache,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: str | None = None,
) -> ExactCache:
    """Adds new tokens, rounded to the cache's dtype; see `turbojax.append`."""
    checks.check_kind(cache, ExactCache)
    check_implementation(implementation, ("xla",))
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
    extended: ExactCache = per_device_explicit(tables.EXACT_APPEND, _append)(
        cache, key, value, lengths
    )
    return extended


def _append(cache: ExactCache, key: jax.Array, value: jax.Array, lengths: jax.Array) -> ExactCache:
    """`append` of checked arguments."""
    tokens = key.shape[1]
    total = cache.lengths + jnp.clip(lengths, 0, tokens)
    accepted = jnp.clip(lengths, 0, jnp.minimum(cache.max_length - cache.lengths, tokens))
    # Rows past the end are those that the scatter drops; no row is named twice.
    index = rolling_buffer.rows_of_new(cache.lengths, accepted, tokens, cache.room)
    # XLA then computes it with the lengths after. Within both scatters it would need the lengths
    # before, which these replace in place, so it would make a copy first, a launch in every step.
    index = jax.lax.optimization_barrier(index)
    # Where there are more devices, slots may be split: XLA gathers them to update a slice.
    put = _put_row if index.size == 1 and jax.device_count() == 1 else _put_rows
    return dataclasses.replace(
        cache,
        key=put(cache.key, index, key.astype(cache.key.dtype)),
        value=put(cache.value, index, value.astype(cache.value.dtype)),
        lengths=cache.lengths + accepted,
        overflowed=cache.overflowed | (total > cache.max_length),
    )


_put_rows = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop", unique_indices=True))


def _put_row(old: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """`_put_rows` of a single row: of that scatter XLA makes three kernels, of this one."""
    room, place = old.shape[1], index[0, 0]
    at = (0, jnp.minimum(place, room - 1), 0, 0)
    kept = jax.lax.dynamic_slice(old, at, new.shape)
    return jax.lax.dynamic_update_slice(old, jnp.where(place < room, new, kept), at)


def dequantize(
    cache: ExactCache, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`: what is held, in the order of tokens."""
    checks.check_kind(cache, ExactCache)
    held, row = rolling_buffer.held(cache)

    def side(x: jax.Array) -> jax.Array:
        tokens = jnp.take(x, row, axis=1)
        return jnp.where(held[:, :, None, None], tokens, 0).astype(dtype or cache.dtype)

    return side(cache.key), side(cache.value)
