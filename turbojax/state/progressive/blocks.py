"""Reading and writing the packed blocks of one side of a `ProgressiveCache`."""

import dataclasses

import jax
import jax.numpy as jnp

from turbojax.quantizers import dequantize_channels, pack, quantize_channels, unpack
from turbojax.state.progressive.cache import CacheSide


def read_blocks(side: CacheSide, start: jax.Array | int, count: int) -> jax.Array:
    """Dequantizes blocks to stage-1 integers.

    Args:
      side: keys or values.
      start: first block; ``start + count`` must not exceed the blocks allocated.
      count: how many, static.

    Returns:
      int8 ``[B, K, count, block, H]``; times `block_scale` they are keys or values.
    """

    def window(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, count, axis=2)

    groups = []
    for codes, bits in zip(side.codes, side.bits, strict=True):
        group = unpack(window(codes), bits, axis=-1)
        groups.append(jnp.swapaxes(group, -1, -2) if side.tokens_last else group)
    codes = _from_slots(groups, side.head_slots)
    return dequantize_channels(codes, window(side.channel_scale), window(side.channel_zero))


def write_blocks(
    side: CacheSide, codes: jax.Array, scale: jax.Array, start: jax.Array, count: jax.Array
) -> CacheSide:
    """Compresses blocks of stage-1 codes and stores them.

    Args:
      side: keys or values.
      codes: int8 ``[B, K, G, block, H]``.
      scale: float32 ``[B, K, G]``, their stage-1 scales.
      start: int32 ``[B]``, the block number of the first.
      count: int32 ``[B]``, how many of the `G` blocks are stored; the rest is left out.

    Returns:
      The side with these blocks written.
    """
    allocated = side.block_scale.shape[2]
    number = jnp.arange(codes.shape[2], dtype=jnp.int32)[None]
    # Blocks that are not to be stored get an index that the scatter drops.
    index = jnp.where(number < count[:, None], start[:, None] + number, allocated)

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
        channel_scale=put(side.channel_scale, _from_slots(scales, side.head_slots)),
        channel_zero=put(side.channel_zero, _from_slots(zeros, side.head_slots)),
        block_scale=put(side.block_scale, scale),
    )


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
    order = jnp.argsort(side.head_slots, axis=-1)
    slotted = jnp.take_along_axis(x, _expand(order, x.ndim), axis=1)
    first = side.codes[0].shape[1]
    return [slotted[:, :first], slotted[:, first:]]


def _expand(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
