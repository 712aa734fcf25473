"""The packed blocks of a `ProgressiveCache`: read, written, and all of it read back."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax._gradient import refuse_gradients
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics.packing import pack, unpack
from turbojax.numerics.progressive import dequantize_channels, quantize_channels


def read_blocks(
    side: CacheSide, start: jax.Array | int, count: int, *, is_rolling: bool
) -> tuple[jax.Array, jax.Array]:
    """Dequantizes `count` blocks from `start` on to stage-1 integers.

    In a rolling buffer block number `i` is in place ``i % n``, where a newer one may be instead;
    otherwise ``start + count`` must not exceed the blocks allocated.

    Returns int8 ``[B, K, count, block, H]`` and their `block_scale`, float32 ``[B, K, count]``:
    keys or values are their products.
    """
    allocated = side.block_scale.shape[2]

    def window(x: jax.Array) -> jax.Array:
        if is_rolling:
            return jnp.take(x, (start + jnp.arange(count)) % allocated, axis=2)
        return jax.lax.dynamic_slice_in_dim(x, start, count, axis=2)

    scale, groups = window(side.block_scale), []
    for codes, bits in zip(side.codes, side.bits, strict=True):
        group = unpack(window(codes), bits, axis=-1)
        groups.append(jnp.swapaxes(group, -1, -2) if side.tokens_last else group)
    codes = _from_slots(groups, side.places)
    channels = window(side.channel_scale), window(side.channel_zero)
    return dequantize_channels(codes, *channels), scale


def write_blocks(
    side: CacheSide,
    codes: jax.Array,
    scale: jax.Array,
    start: jax.Array,
    count: jax.Array,
    first: jax.Array | None = None,
) -> CacheSide:
    """Compresses blocks of stage-1 codes and stores them.

    `codes` are int8 ``[B, K, G, block, H]``, `scale` is float32 ``[B, K, G]``. `start` (int32
    ``[B]``) is the number of the first block, and `count` (int32 ``[B]``) says how many of the `G`
    are stored; a rolling buffer with room for fewer stores the last ones.

    For a part of a cache, which is no rolling buffer, `first` (int32 ``[]``) is the number of the
    block in its first place: blocks before it and past its last place are left out.
    """
    # Blocks that are not to be stored get an index that the scatter drops.
    rows = side.block_scale.shape[2]
    if first is None:
        index = rolling_buffer.rows_of_new(start, count, codes.shape[2], rows)
    else:
        index = _rows_of_part(start - first, count, codes.shape[2], rows)

    def put(array: jax.Array, blocks: jax.Array) -> jax.Array:
        write = jax.vmap(lambda a, i, x: a.at[:, i].set(x, mode="drop"))
        return write(array, index, blocks)

    stored, scales, zeros = [], [], []
    groups = _to_slots(codes, side)
    for group, bits, old in zip(groups, side.bits, side.codes, strict=True):
        q2, channel_scale, channel_zero = quantize_channels(group, bits)
        q2 = jnp.swapaxes(q2, -1, -2) if side.tokens_last else q2
        stored.append(put(old, pack(q2, bits, axis=-1)))
        scales.append(channel_scale)
        zeros.append(channel_zero)
    return dataclasses.replace(
        side,
        codes=tuple(stored),
        channel_scale=put(side.channel_scale, _from_slots(scales, side.places)),
        channel_zero=put(side.channel_zero, _from_slots(zeros, side.places)),
        block_scale=put(side.block_scale, scale),
    )


def dequantize(
    cache: ProgressiveCache, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`; in float32 these are exactly the numbers stored."""
    checks.check_kind(cache, ProgressiveCache)
    key, value = refuse_gradients(_dequantize, "dequantize")(cache)
    return key.astype(dtype or cache.dtype), value.astype(dtype or cache.dtype)


@jax.jit
def _dequantize(cache: ProgressiveCache) -> tuple[jax.Array, jax.Array]:
    return _dequantize_side(cache, cache.key), _dequantize_side(cache, cache.value)


def _dequantize_side(cache: ProgressiveCache, side: CacheSide) -> jax.Array:
    codes, scale = read_blocks(side, 0, cache.blocks_of_length, is_rolling=cache.is_rolling)
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


def _rows_of_part(start: jax.Array, count: jax.Array, blocks: int, rows: int) -> jax.Array:
    """As `rolling_buffer.rows_of_new`, without blocks before row 0 or past the last row."""
    offset = jnp.arange(blocks)[None]
    row = start[:, None] + offset
    return jnp.where((offset < count[:, None]) & (row >= 0) & (row < rows), row, rows + offset)


def _from_slots(groups: list[jax.Array], slots: jax.Array) -> jax.Array:
    """Concatenates groups along the slots (axis 1) and puts them into the heads' order."""
    if len(groups) == 1:  # one width: slots never leave the heads' order
        return groups[0]
    slotted = jnp.concatenate(groups, axis=1)
    return jnp.take_along_axis(slotted, _expand(slots, slotted.ndim), axis=1)


def _to_slots(x: jax.Array, side: CacheSide) -> list[jax.Array]:
    """Splits heads (axis 1) into the groups that share a width, in slot order."""
    if len(side.codes) == 1:
        return [x]
    order = jnp.argsort(side.places, axis=-1)
    slotted = jnp.take_along_axis(x, _expand(order, x.ndim), axis=1)
    first = side.codes[0].shape[1]
    return [slotted[:, :first], slotted[:, first:]]


def _expand(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
