"""A tile of queries in shared memory to 8 bits, by one warpgroup: stage 1 within a kernel.

Codes and scales are those of `turbojax.quantizers`, to the bit. A thread takes 16 bytes, eight
channels of a token, at a time: once for the maxima, once for the codes, so that few registers hold
it all. Per value that is 1 instruction for the maxima (both numbers of a word at once, as
integers: bits of absolute values are in the order of the values) and 3.75 for a code.
"""

import dataclasses
from typing import Any

import jax.experimental.mosaic.gpu as mgpu

from pallas_kernels.mosaic import eight_bits, lane
from pallas_kernels.mosaic.lane import Float, Int, Pointer

ROWS = 64  # tokens whose codes are one operand of a warpgroup
PARTS = 4  # words for each 64 tokens, in which the warps exchange maxima
_CHANNELS = 8
_THREADS = 128


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int  # tokens, a multiple of 64
    channels: int  # 64 or 128
    block: int  # tokens that share a scale, 64 or 128; divides `rows`
    dtype: str  # ``"bfloat16"`` or ``"float16"``
    is_int8: bool  # int8 or e4m3 codes

    @property
    def step(self) -> int:
        return _THREADS * _CHANNELS // self.channels


def quantize(raw: Any, codes: Any, scales: Any, slot: Any, count: Any, tile: Tile) -> None:
    """Quantizes a tile in shared memory; tokens from `count` on become 0, in `raw` too.

    `raw` is 16-bit ``[rows, channels]``, contiguous; `codes` 8-bit ``[rows / 64, 64, channels]``,
    each of these tiled for matrix instructions; `scales` float32 ``[PARTS + n, rows / 64]``, of
    which the first `PARTS` are scratch, and `slot` selects one of the `n`.
    """
    source, target, told = (Pointer.to(x) for x in (raw, codes, scales))
    count_of_scales = tile.rows // ROWS
    out = told.at((lane.scalar(slot) + PARTS) * (4 * count_of_scales))
    thread = lane.special("tid.x") & (_THREADS - 1)
    clear(source, thread, lane.scalar(count), tile)
    for i in range(count_of_scales):
        bits = lane.largest_of_warp(largest(source, thread, i, tile))
        with lane.when((thread & 31).equals(0)):
            told.at(16 * i, (thread >> 5) * 4).store(bits)
    mgpu.utils.warpgroup_barrier()
    for i in range(count_of_scales):
        first = i // (tile.block // ROWS) * (tile.block // ROWS)
        words = [w for j in range(tile.block // ROWS) for w in told.at(16 * (first + j)).words(4)]
        scale = scale_of(lane.tree(words, Int.maximum), tile)
        with lane.when(thread.equals(0)):
            out.at(4 * i).store(scale)
        write(source, target, thread, i, scale, tile)


def _rows(first: int, tile: Tile) -> range:
    return range(first * ROWS, (first + 1) * ROWS, tile.step)


def _read(source: Pointer, thread: Int, row: int, tile: Tile) -> Pointer:
    return source.at(row * tile.channels * 2, thread * (2 * _CHANNELS))


def clear(source: Pointer, thread: Int, count: Int, tile: Tile) -> None:
    """Zeros tokens that do not exist: they must not reach a scale."""
    with lane.when(count < tile.rows):
        for row in range(0, tile.rows, tile.step):
            token = thread // (tile.channels // _CHANNELS) + row
            with lane.when(token >= count):
                _read(source, thread, row, tile).store_words([lane.integer(0)] * 4)


def largest(source: Pointer, thread: Int, first: int, tile: Tile) -> Int:
    """The largest bits of a thread's absolute values among 64 tokens."""
    found = lane.integer(0)
    for row in _rows(first, tile):
        words = [w & 0x7FFF7FFF for w in _read(source, thread, row, tile).words(4)]
        found = lane.maxima_of_halves(found, lane.tree(words, lane.maxima_of_halves))
    return (found & 0xFFFF).maximum(found >> 16)


def scale_of(bits: Int, tile: Tile) -> Float:
    """The scale of values with these largest bits; NaN if one is not finite."""
    low, _ = lane.half.unpack(bits, tile.dtype)
    return eight_bits.scale_of(low, tile.is_int8)


def write(
    source: Pointer, target: Pointer, thread: Int, first: int, scale: Float, tile: Tile
) -> None:
    place = _place(thread, tile)
    at = target.at(first * ROWS * tile.channels, place)

    def codes(of: Any) -> None:
        for row in _rows(first, tile):
            words = _read(source, thread, row, tile).words(4)
            x = [v for w in words for v in lane.half.unpack(w, tile.dtype)]
            packed = [of(x[i : i + 4]) for i in (0, 4)]
            at.at((row - first * ROWS) * tile.channels).store_words(packed)

    if not tile.is_int8:
        inverse = lane.divide(lane.number(1.0), scale)
        codes(lambda x: eight_bits.e4m3_word(x, inverse))
        return
    inverse = lane.number(1.0) / scale
    exact = eight_bits.may_meet_halves(scale, tile.dtype)
    with lane.when(exact):
        codes(lambda x: eight_bits.int8_word(x, scale, inverse, exact=True))
    with lane.when(~exact):
        codes(lambda x: eight_bits.int8_word(x, scale, inverse, exact=False))


def _place(thread: Int, tile: Tile) -> Int:
    """Where a thread's eight bytes of the first step go: rows are interleaved by 16 bytes."""
    columns = tile.channels // _CHANNELS
    row, column = thread // columns, thread % columns
    swizzle = (row & 7) if tile.channels == 128 else ((row >> 1) & 3)
    return row * tile.channels + (((column >> 1) ^ swizzle) << 4) + ((column & 1) << 3)
