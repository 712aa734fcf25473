"""Reading a `ProgressiveCache` back as keys and values."""

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax.caches.progressive.blocks import read_blocks
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache


def dequantize(
    cache: ProgressiveCache, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """The keys and values that the cache stands for, for tests and debugging.

    Args:
      cache: the cache.
      dtype: floating point; `cache.dtype` if not given. float32 shows the stored numbers exactly.

    Returns:
      key, value: ``[B, max_length, K, H]``, zero past each sequence's length, and where a ring
      holds newer tokens instead.

    Raises:
      TypeError: if `cache` is another kind or `dtype` none of bfloat16, float16, float32.
    """
    if not isinstance(cache, ProgressiveCache):
        raise TypeError(f"cache is a {type(cache).__name__}, must be a ProgressiveCache")
    dtype = jnp.dtype(cache.dtype if dtype is None else dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    key, value = refuse_gradients(_dequantize, "dequantize")(cache)
    return key.astype(dtype), value.astype(dtype)


@jax.jit
def _dequantize(cache: ProgressiveCache) -> tuple[jax.Array, jax.Array]:
    return _dequantize_side(cache, cache.key), _dequantize_side(cache, cache.value)


def _dequantize_side(cache: ProgressiveCache, side: CacheSide) -> jax.Array:
    codes, scale = read_blocks(side, 0, cache.blocks_of_length, is_ring=cache.is_ring)
    blocks = codes.astype(jnp.float32) * scale[..., None, None]
    batch, heads, _, _, channels = blocks.shape
    blocks = blocks.reshape(batch, heads, -1, channels)
    room = max(0, cache.max_length - blocks.shape[2])
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, room), (0, 0)))[:, :, : cache.max_length]

    compressed, first_tokens = cache.lengths - cache.buffer_lengths, cache.config.num_first_tokens
    position = jnp.arange(cache.max_length)[None]
    in_blocks = position < compressed[:, None]
    in_blocks = in_blocks & (position >= compressed[:, None] - cache.room)
    in_blocks = in_blocks[:, None, :, None]
    out = jnp.where(in_blocks, blocks, 0)
    out = jnp.roll(out, first_tokens, axis=2)  # these are in the buffer, with as many others

    buffer = side.buffer.astype(jnp.float32) * side.buffer_scale[..., None, None]
    slot = jnp.arange(buffer.shape[2])[None]
    used = slot < cache.buffer_lengths[:, None]
    index = jnp.where(slot < first_tokens, slot, compressed[:, None] + slot)
    index = jnp.where(used, index, cache.max_length)
    out = jax.vmap(lambda o, i, b: o.at[:, i].set(b, mode="drop"))(out, index, buffer)
    return jnp.swapaxes(out, 1, 2)
