"""Tiles of tokens: where they are in pages, and their loads as operands of a product."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import _common, _paged_codes
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._paged_codes import Codec

# Terms of the sum of the smallest matrix product.
_NARROWEST = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """A call's static settings.

    Attributes:
      window: optional (left, right); queries never see past their own position.
      key_codec: of keys that are codes, None for others.
      value_codec: of values that are codes, None for others.
      part: tokens of a program, a power of two.
      tile: tokens taken at a time, a power of two from 16 to `part`.
      rows: queries of a program at most, a power of two from 8.
    """

    window: tuple[int, int] | None
    soft_cap: float | None
    key_codec: Codec | None
    value_codec: Codec | None
    part: int
    tile: int
    rows: int
    num_warps: int
    num_stages: int
    interpret: bool


class Side(NamedTuple):
    """Keys or values ``[P, K, page_size, W]``, and of codes norms float16 ``[P, K, page_size]``.

    For int8 the norms are scales. Codes of 4 bits are two to a byte, of 2 bits four, the first in
    the lowest bits. Of 3 bits the first two thirds of the bytes hold the lower two bits in that
    way, and the last third the third ones: those of bytes ``2 m`` and ``2 m + 1`` in byte `m`, see
    `_paged_codes.look_up`.
    """

    data: Ref
    norm: Ref | None


class Place(NamedTuple):
    """Where a program reads."""

    sequence: jax.Array
    head: jax.Array


class Vectors(NamedTuple):
    """A side, and how a program takes its vectors: in pieces, each of which is an operand.

    Piece `j` of `n` has the channels ``n * c + j`` of the head: all of them, or those that begin at
    the same bit of a byte.
    """

    side: Side
    codec: Codec | None
    width: int  # of a piece, without padding
    column: jax.Array  # int32 [c], of a piece, padded to a power of two

    @property
    def channels(self) -> tuple[jax.Array, ...]:
        count = 1 if self.codec is None else self.codec.pieces
        return tuple(count * self.column + j for j in range(count)) if count > 1 else (self.column,)


def vectors(side: Side, codec: Codec | None) -> Vectors:
    width = side.data.shape[3]
    if codec is not None and codec.bits == 3:
        width = width // 3 * 2
    padded = max(_NARROWEST, _common.next_power_of_2(width))
    return Vectors(side, codec, width, jnp.arange(padded, dtype=jnp.int32))


def locate(
    i: jax.Array, token: jax.Array, tables_ref: Ref, place: Place, page_size: int, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """The page (one, or one for each token) and the tokens' slots in it."""
    if page_size % s.tile == 0:
        in_page = page_size // s.tile
        page = plgpu.load(tables_ref.at[place.sequence, i // in_page])
        return page, i % in_page * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    # A table need not end with a tile.
    entry = jnp.minimum(token // page_size, tables_ref.shape[1] - 1)
    return plgpu.load(tables_ref.at[place.sequence, entry]), token % page_size


def load(
    x: Vectors,
    page: jax.Array,
    slot: jax.Array,
    place: Place,
    some: jax.Array | None,
    kind: str,
    s: Settings,
) -> tuple[jax.Array, ...]:
    """A tile as operands ``[t, c]``, one for each piece; 0 where not `some`, except integers."""
    mask = None if x.column.shape[0] == x.width else (x.column < x.width)[None, :]
    is_integer = x.codec is not None or x.side.data.dtype == jnp.int8
    if some is not None and not is_integer:
        mask = some[:, None] if mask is None else some[:, None] & mask
    if page.ndim:
        page = page[:, None]

    def read(column: jax.Array) -> jax.Array:
        at = x.side.data.at[page, place.head, slot[:, None], column[None, :]]
        other = 0 if is_integer else 0.0
        return plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=other)

    tile = read(x.column)
    if x.codec is not None:
        high = _third_bits(x, page, slot, place) if x.codec.bits == 3 else None
        return _paged_codes.look_up(tile, high, x.codec, kind, s.interpret)
    if tile.dtype == jnp.int8:
        return (_paged_codes.int8_to_16_bits(tile, kind, s.interpret),)
    if tile.dtype.itemsize == 1:
        return (_paged_codes.fp8_to_float16(tile, s.interpret),)
    return (tile,)


def _third_bits(x: Vectors, page: jax.Array, slot: jax.Array, place: Place) -> jax.Array:
    """Bytes of third bits, each twice: once for each byte of lower bits to which it belongs."""
    count = x.column.shape[0]
    column = jnp.arange(count // 2, dtype=jnp.int32)
    at = x.side.data.at[page, place.head, slot[:, None], x.width + column[None, :]]
    mask = None if count == x.width else (column < x.width // 2)[None, :]
    tile = plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=0)
    pairs = jnp.broadcast_to(tile[:, :, None], (*tile.shape, 2))
    return pairs.reshape(tile.shape[0], count)


def norm(side: Side, page: jax.Array, slot: jax.Array, place: Place) -> jax.Array:
    assert side.norm is not None
    return plgpu.load(side.norm.at[page, place.head, slot]).astype(jnp.float32)
