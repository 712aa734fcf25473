"""Reading and writing the packed blocks of one side of a `ProgressiveCache`."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax.caches import ring
from turbojax.caches.progressive.cache import CacheSide
from turbojax.numerics.packing import pack, unpack
from turbojax.numerics.progressive import dequantize_channels, quantize_channels


def read_blocks(
    side: CacheSide, start: jax.Array | int, count: int, *, is_ring: bool
) -> tuple[jax.Array, jax.Array]:
    """Dequantizes `count` blocks from `start` on to stage-1 integers.

    In a ring block number `i` is in place ``i % n``, where a newer one may be instead; otherwise
    ``start + count`` must not exceed the blocks allocated.

    Returns int8 ``[B, K, count, block, H]`` and their `block_scale`, float32 ``[B, K, count]``:
    keys or values are their products.
    """
    allocated = side.block_scale.shape[2]

    def window(x: jax.Array) -> jax.Array:
        if is_ring:
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
    are stored; a ring with room for fewer stores the last ones.

    For a part of a cache, which is no ring, `first` (int32 ``[]``) is the number of the block in
    its first place: blocks before it and past its last place are left out.
    """
    # Blocks that are not to be stored get an index that the scatter drops.
    rows = side.block_scale.shape[2]
    if first is None:
        index = ring.rows_of_new(start, count, codes.shape[2], rows)
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


def _rows_of_part(start: jax.Array, count: jax.Array, blocks: int, rows: int) -> jax.Array:
    """As `ring.rows_of_new`, without blocks that are before row 0 or past the last row."""
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
