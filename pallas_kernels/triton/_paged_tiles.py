"""Tiles of tokens: where they are in pages, and their loads as operands of a product."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import _paged_codes
from pallas_kernels.triton._common import Ref
from pallas_kernels.triton._paged_codes import Codec


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a call.

    Attributes:
      window: optional (left, right); queries never see past their own position.
      soft_cap: optional cap of the scores.
      codec: of 4-bit codes, None for other values.
      part: tokens of a program, a power of two.
      tile: tokens taken at a time, a power of two from 16 to `part`.
      rows: queries of a program at most, a power of two from 8.
      num_warps: per program.
      num_stages: of the software pipeline.
      interpret: run without a GPU.
    """

    window: tuple[int, int] | None
    soft_cap: float | None
    codec: Codec | None
    part: int
    tile: int
    rows: int
    num_warps: int
    num_stages: int
    interpret: bool


class Side(NamedTuple):
    """Keys or values ``[P, K, page_size, W]``; norms float16 ``[P, K, page_size]`` of codes."""

    data: Ref
    norm: Ref | None


class Place(NamedTuple):
    """Where a program reads."""

    sequence: jax.Array
    head: jax.Array
    channel: jax.Array  # int32 [c], of the stored data


def locate(
    i: jax.Array, token: jax.Array, tables_ref: Ref, place: Place, page_size: int, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """Pages (one, or each token's) and the tokens' slots in them."""
    if page_size % s.tile == 0:
        in_page = page_size // s.tile
        page = plgpu.load(tables_ref.at[place.sequence, i // in_page])
        return page, i % in_page * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
    # A table need not end with a tile.
    entry = jnp.minimum(token // page_size, tables_ref.shape[1] - 1)
    return plgpu.load(tables_ref.at[place.sequence, entry]), token % page_size


def load(
    side: Side,
    page: jax.Array,
    slot: jax.Array,
    place: Place,
    some: jax.Array | None,
    kind: str,
    s: Settings,
) -> tuple[jax.Array, ...]:
    """A tile ``[t, c]`` as operands, in one piece or two; 0 where not `some`, except codes."""
    width = side.data.shape[3]
    mask = None if place.channel.shape[0] == width else (place.channel < width)[None, :]
    if some is not None and s.codec is None:
        mask = some[:, None] if mask is None else some[:, None] & mask
    if page.ndim:
        page = page[:, None]
    at = side.data.at[page, place.head, slot[:, None], place.channel[None, :]]
    other = 0 if s.codec is not None else 0.0
    tile = plgpu.load(at) if mask is None else plgpu.load(at, mask=mask, other=other)
    if s.codec is not None:
        return _paged_codes.look_up(tile, s.codec, kind, s.interpret)
    if tile.dtype.itemsize == 1:
        return (_paged_codes.fp8_to_float16(tile, s.interpret),)
    return (tile,)


def norm(side: Side, page: jax.Array, slot: jax.Array, place: Place) -> jax.Array:
    assert side.norm is not None
    return plgpu.load(side.norm.at[page, place.head, slot]).astype(jnp.float32)
