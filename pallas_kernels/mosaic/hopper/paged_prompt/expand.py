"""Pages of codes, int8 and 8-bit floats as 16-bit numbers, for many queries, on Hopper.

Each token's vectors become what they stand for, rotated back where they are codes, in tiles of 128
tokens one after the other: what `kernel.attention` reads as pages of 128 tokens, with a table that
counts up. So a page is decoded once a call, however many queries there are.

Roofline, for 32,768 tokens of 8 KV heads with 128 channels, turbo4, H200:
  - bytes: 2 * 8 * 32768 * (66 + 256) = 169 MB: 39 us at 4.3 TB/s.
  - operations: 67 M numbers of some 15 instructions (a lookup, seven butterflies of which two go to
    other lanes, signs and norms, rounding), 1.0 G: 36 us of all lanes.
Beside attention of 1,024 queries, 840 us at the target, both are small. Target: 80 us.
Seen: 63 us; of 3-bit keys and 2-bit values 62.

A thread has 32 channels of a token, eight side by side in each quarter, so that neighbouring lanes
load and store what lies together; two, four or eight lanes have a token.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import eight_bits, lane, lanes
from pallas_kernels.mosaic.lane import Float, Int, Pointer

TILE = 128  # tokens of a program, and of what it writes
_THREADS = 128
_QUARTERS, _TOGETHER = 4, 8
# 2**15, of which the second byte counts ones.
_BYTE_FLOAT, BYTE_OFFSET = 0x47000000, 32768.0


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a side of the pages is stored."""

    # Of codes of 4, 3 or 2 bits, 16, 8 or 4 integers up to 127; empty for 8 bits.
    centroids: tuple[int, ...] = ()
    middle: float = 0.0  # subtracted from the centroids
    # Factor of the centroids then, beside their token's norm; it includes the rotation's factor,
    # one over the root of the channels.
    unit: float = 1.0
    is_e5m2: bool = False  # which of the two 8-bit floats
    is_int8: bool = False  # whether 8 bits are int8, with a scale for each token

    @property
    def has_norm(self) -> bool:
        """Whether each token has a norm or a scale."""
        return bool(self.centroids) or self.is_int8

    @property
    def bits(self) -> int:
        return len(self.centroids).bit_length() - 1 if self.centroids else 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """A call's static settings: the codecs of keys and values; results are `dtype`, 16 bits."""

    codecs: tuple[Codec, Codec]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A thread's part of a token: number `part` of `parts`, a power of two."""

    part: Int
    parts: int

    @property
    def head_dim(self) -> int:
        return self.parts * _QUARTERS * _TOGETHER

    def numbers(self, row: Pointer, codec: Codec) -> list[Float]:
        """The thread's 32 numbers of a stored row, quarter by quarter."""
        if codec.is_int8:
            return [
                x
                for i in range(_QUARTERS)
                for word in row.at(i * self.head_dim // _QUARTERS, self.part * _TOGETHER).words(2)
                for x in eight_bits.int8_numbers(word)
            ]
        if not codec.centroids:
            convert = lane.half.from_e5m2 if codec.is_e5m2 else lane.half.from_e4m3
            found: list[Float] = []
            for i in range(_QUARTERS):
                at = row.at(i * self.head_dim // _QUARTERS, self.part * _TOGETHER)
                words = [half for word in at.words(2) for half in convert(word)]
                found += [x for word in words for x in lane.half.unpack(word)]
            return found
        found = []
        for i in range(_QUARTERS):
            if codec.bits == 4:
                word = row.at(i * self.head_dim // (2 * _QUARTERS), self.part * 4).word()
                found += centroids(word, codec)
                continue
            fields, third = row.at(i * self.head_dim // (4 * _QUARTERS), self.part * 2).half(), None
            if codec.bits == 3:
                first = self.head_dim // 4 + i * self.head_dim // (8 * _QUARTERS)
                third = row.at(first, self.part).byte()
            found += centroids_of_fields(fields, third, codec)
        return found

    def rotated_back(self, x: list[Float]) -> list[Float]:
        """The transposed Hadamard matrix times a vector, whose parts the threads hold."""
        x = _butterflies(x, 1, _TOGETHER)
        distance = 1
        while distance < self.parts:
            sign = (self.part & distance).equals(0).where(lane.number(1.0), -1.0)
            x = [v.fma(sign, lane.partner(v, distance)) for v in x]
            distance *= 2
        return _butterflies(x, _TOGETHER, len(x))


def centroids(word: Int, codec: Codec) -> list[Float]:
    """The numbers of a word's eight codes."""
    table = _table(codec)
    flipped = word ^ 0x88888888
    found = []
    for low, high in ((word, flipped), (word >> 16, flipped >> 16)):
        # A selector with its highest bit set gives the sign of a byte, which is 0.
        four = lane.permute_bytes(table[0], table[1], low) | lane.permute_bytes(
            table[2], table[3], high
        )
        found += _floats(four, codec)
    return found


def centroids_of_fields(fields: Int, third: Int | None, codec: Codec) -> list[Float]:
    """The numbers of eight codes of 2 or 3 bits.

    `fields` is two bytes with the lower two bits of four codes each, `third` a byte of third bits
    (see `turbojax.polar.pack`), or None.
    """
    table = _table(codec)
    # In every nibble a code: those of even channels, those of odd ones.
    nibbles = [fields & 0x3333, (fields >> 2) & 0x3333]
    if third is not None:
        both = third | (third << 8)
        for i, (lower, upper) in enumerate(((both << 2, both), (both << 1, both >> 1))):
            nibbles[i] = nibbles[i] | (lower & 0x0044) | (upper & 0x4400)
    numbers = [_floats(lane.permute_bytes(table[0], table[-1], x), codec) for x in nibbles]
    return [x for pair in zip(*numbers, strict=True) for x in pair]


def _table(codec: Codec) -> list[Int]:
    words = [codec.centroids[i : i + 4] for i in range(0, len(codec.centroids), 4)]
    return [lane.integer(int.from_bytes(bytes(w), "little")) for w in words]


def _floats(four: Int, codec: Codec) -> list[Float]:
    words = [lane.permute_bytes(four, _BYTE_FLOAT, 0x7504 | (i << 4)) for i in range(4)]
    return [w.as_float() + -(BYTE_OFFSET + codec.middle) for w in words]


def _butterflies(x: list[Float], first: int, end: int) -> list[Float]:
    """Sums and differences of numbers whose places differ in one bit, for bits up to `end`."""
    half = first
    while half < end:
        out = list(x)
        for i in range(len(x)):
            if not i & half:
                out[i], out[i | half] = x[i] + x[i | half], x[i] - x[i | half]
        x, half = out, 2 * half
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class _Side:
    """Keys or values: where they are read and written."""

    data: Pointer
    norm: Pointer | None
    out: Pointer
    codec: Codec
    row_bytes: int


def _expand(
    side: _Side, place: Place, signs: list[Float], index: Int, row: Int, is_there: Any, dtype: str
) -> None:
    x = place.numbers(side.data.times(index, side.row_bytes), side.codec)
    if side.codec.is_int8:
        assert side.norm is not None
        scale = lane.half_to_float(side.norm.times(index, 2).half())
        x = [v * scale for v in x]
    elif side.norm is not None:
        norm = lane.half_to_float(side.norm.times(index, 2).half()) * side.codec.unit
        x = [v * (sign * norm) for v, sign in zip(place.rotated_back(x), signs, strict=True)]
    target = side.out.times(row, 2 * place.head_dim)
    with lane.when(is_there):
        for i in range(_QUARTERS):
            some = x[i * _TOGETHER : (i + 1) * _TOGETHER]
            words = [lane.half.pack(some[k], some[k + 1], dtype) for k in range(0, _TOGETHER, 2)]
            at = target.at(i * 2 * place.head_dim // _QUARTERS, place.part * (2 * _TOGETHER))
            at.store_words(words)


def _body(arrays: list[Pointer], ids: list[Int], *, shape: tuple[int, ...], s: Settings) -> None:
    kv_heads, page_size, head_dim, max_pages, tiles = shape
    tile, head, b = ids
    tables, lengths, starts, *rest = arrays
    length, start = (x.at(b * 4).word() for x in (lengths, starts))
    begin = tile * TILE
    with lane.when((begin < length) & (begin + TILE > start)):
        parts = head_dim // (_QUARTERS * _TOGETHER)
        thread = lane.special("tid.x") & (_THREADS - 1)
        place = Place(thread & (parts - 1), parts)
        signs, sides = _sides(rest, place, s)
        step = _THREADS // parts
        first = thread // parts

        def rows(i: Int, _: list[Int]) -> list[Int]:
            row = first + i
            token = begin + row
            # Lanes exchange numbers: all of a warp do the same.
            held = token.minimum(length - 1)
            entry = (held // page_size).minimum(max_pages - 1)
            page = tables.at((b * max_pages + entry) * 4).word()
            index = (page * kv_heads + head) * page_size + held % page_size
            target = ((b * tiles + tile) * kv_heads + head) * TILE + row
            for side in sides:
                _expand(side, place, signs, index, target, token < length, s.dtype)
            return []

        lane.loop(lane.integer(0), lane.integer(TILE), step, [], rows)


def _sides(arrays: list[Pointer], place: Place, s: Settings) -> tuple[list[Float], list[_Side]]:
    arrays = list(arrays)
    is_rotated = any(codec.centroids for codec in s.codecs)
    signs: list[Float] = []
    if is_rotated:
        at = arrays.pop(0)
        for i in range(_QUARTERS):
            some = at.at(i * 4 * place.head_dim // _QUARTERS, place.part * (4 * _TOGETHER))
            signs += [x.as_float() for x in some.words(_TOGETHER)]
    out, sides = arrays[-2:], []
    for codec, target in zip(s.codecs, out, strict=True):
        data = arrays.pop(0)
        norm = arrays.pop(0) if codec.has_norm else None
        width = place.head_dim * codec.bits // 8
        sides.append(_Side(data, norm, target, codec, width))
    return signs, sides


def expand(
    key: jax.Array,
    value: jax.Array,
    norms: tuple[jax.Array | None, jax.Array | None],
    signs: jax.Array | None,
    tables: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    *,
    head_dim: int,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decodes the pages of sequences.

    `key` and `value` are ``[P, K, page_size, W]``, uint8 codes, int8 or 8-bit floats; `norms`
    float16 ``[P, K, page_size]`` of a side with codes, of int8 the scales, otherwise None; `signs`
    float32 ``[H]``, 1 or -1, of the codes' rotation. int32: `tables` ``[B, max_pages]``, all within
    the pool; `lengths` ``[B]``, tokens held, 0 for a sequence that must not be read; `starts`
    ``[B]``, before which tokens are not needed. `head_dim` is 64, 128 or 256.

    Returns keys and values as pages of 128 tokens, ``[B * tiles, K, 128, H]``, and their tables
    int32 ``[B, tiles]``. What is past a sequence's end, or before its start, is arbitrary.
    """
    batch, max_pages = tables.shape
    _, kv_heads, page_size, _ = key.shape
    tiles = pl.cdiv(max_pages * page_size, TILE)
    shape = (kv_heads, page_size, head_dim, max_pages, tiles)
    sides = [x for pair in zip((key, value), norms, strict=True) for x in pair if x is not None]
    given = [] if signs is None else [signs]
    out = jax.ShapeDtypeStruct((batch * tiles, kv_heads, TILE, head_dim), jnp.dtype(settings.dtype))
    body: Callable[..., None] = functools.partial(_body, shape=shape, s=settings)
    keys, values = lanes.launch(
        body,
        "turbojax_paged_expand_hopper",
        [tables, lengths, starts, *given, *sides],
        [out, out],
        grid={"tile": tiles, "head": kv_heads, "sequence": batch},
        warpgroups=1,
    )
    return keys, values, jnp.arange(batch * tiles, dtype=jnp.int32).reshape(batch, tiles)
