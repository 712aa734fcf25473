"""How INT4 weights lie in memory: bytes of a block, blocks of a weight, and padding.

The 128 inputs of a row's block are 64 bytes in the order of Hopper's register operand: byte
``16 t + 4 s + b`` holds input ``32 s + 4 t + 2 (b % 2) + 16 (b // 2)`` in its low nibble and the
next input in its high one (`t`, `s`, `b` from 0 to 3), as two's complement.

Such blocks of 64 rows are a tile, 4 KB without a gap, and tiles of the same rows follow each other
along the inputs: one copy of contiguous bytes brings as many inputs of 64 rows as are wanted.
Scales and zeros lie alike, 64 to a group of inputs.
"""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

OUT_MULTIPLE = 64
"""Rows of a tile; stored rows are padded to a multiple of this."""
BLOCK = 128
"""Inputs that are packed together; stored inputs are padded to a multiple of this."""
GATED_ROWS = 8
"""Rows of a gate that alternate with as many of its partner in a gated weight."""

_Array = TypeVar("_Array", jax.Array, np.ndarray)


def stored_rows(out_size: int, gated: bool = False) -> int:
    """Rows that `out_size` outputs take, padding included."""
    if gated:
        out_size = 2 * round_up(out_size // 2, GATED_ROWS)
    return round_up(out_size, OUT_MULTIPLE)


def stored_inputs(in_size: int, group_size: int = BLOCK) -> int:
    """Inputs that a row stores, padding included."""
    return round_up(in_size, math.lcm(BLOCK, group_size))


def size_of_part(name: str, size: int, count: int, stored: int) -> int:
    """The part of `size` outputs, or inputs (`name`), that each of `count` devices has.

    Raises ValueError unless it is what a device stores: whole tiles without padding.
    """
    if count > 1 and size != stored * count:
        raise ValueError(
            f"weight.{name}={size} must be {stored * count} to be split over {count} devices: "
            "whole tiles on each, without padding"
        )
    return size // count


def round_up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def pack_codes(codes: jax.Array) -> jax.Array:
    """Packs int8 codes ``[..., K]`` in -8..7, `K` a multiple of 128, to uint8 ``[..., K / 2]``."""
    lead = codes.shape[:-1]
    nibbles = jax.lax.bitcast_convert_type(codes, jnp.uint8) & 15
    # Bits of an input's number, from the top: s (2), b // 2, t (2), b % 2, nibble.
    nibbles = jnp.moveaxis(nibbles.reshape(*lead, -1, 4, 2, 4, 2, 2), -3, -5)
    return (nibbles[..., 0] | (nibbles[..., 1] << 4)).reshape(*lead, -1)


def unpack_codes(packed: jax.Array) -> jax.Array:
    """Inverse of `pack_codes`: uint8 ``[..., K / 2]`` to int8 ``[..., K]``."""
    lead = packed.shape[:-1]
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8)
    nibbles = jnp.stack([(signed << 4) >> 4, signed >> 4], axis=-1)
    return jnp.moveaxis(nibbles.reshape(*lead, -1, 4, 4, 2, 2, 2), -5, -3).reshape(*lead, -1)


def code_tiles(packed: _Array) -> _Array:
    """Rows of packed codes ``[..., N, K / 2]`` as tiles ``[..., N / 64, K / 128, 64, 64]``."""
    *lead, rows, size = packed.shape
    shape = (*lead, rows // OUT_MULTIPLE, OUT_MULTIPLE, size // (BLOCK // 2), BLOCK // 2)
    return packed.reshape(shape).swapaxes(-2, -3)


def code_rows(tiles: _Array) -> _Array:
    """Inverse of `code_tiles`."""
    *lead, many, blocks, rows, size = tiles.shape
    return tiles.swapaxes(-2, -3).reshape(*lead, many * rows, blocks * size)


def scale_tiles(scales: _Array) -> _Array:
    """One number a row and group, ``[..., N, groups]``, as ``[..., N / 64, groups, 64]``."""
    *lead, rows, groups = scales.shape
    return scales.reshape(*lead, rows // OUT_MULTIPLE, OUT_MULTIPLE, groups).swapaxes(-1, -2)


def scale_rows(tiles: _Array) -> _Array:
    """Inverse of `scale_tiles`."""
    *lead, many, groups, rows = tiles.shape
    return tiles.swapaxes(-1, -2).reshape(*lead, many * rows, groups)
