"""Values that are not finite, in tiles that some query does not see whole.

A product with 0 does not hide them: what a query does not see would reach it as 0 times NaN. So the
warpgroup that copies looks through such a tile in shared memory once, before it is multiplied. It
puts zeros in the place of what is not finite, and of tokens past the sequence's end, whatever they
hold; and writes down which tokens' values were not finite, a bit each, for `spoil`.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.ring import COLUMN, ROW, SCALAR

_BITS = 32
_THREADS = 128
# Bytes that a thread looks at together, and those of a tile's row and of its eight rows.
_CHUNK, _LINE, _BLOCK = 16, 128, 1024
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
# Where in the last row a warpgroup's warps tell each other, and where the result is.
_WARPS, _FOUND = 4, 4


def memory(stages: int, tile: int, head_dim: int) -> Any:
    """For each slot: a word of 32 tokens' bits for each channel, and what was found."""
    return plgpu.SMEM((stages, tile // _BITS + 1, head_dim), jnp.int32)


def clean(values: Ref, lost: Ref, count: jax.Array) -> None:
    """Makes a tile of values finite.

    Args:
      values: ``[t, H]`` in shared memory, 16 bits each, where copies and products find it.
      lost: int32 ``[t / 32 + 1, H]``, of `memory`.
      count: int32 scalar: tokens that there are; past them all becomes 0 and is not lost.
    """
    tile, head_dim = values.shape
    dtype = jnp.dtype(values.dtype).name

    def f(values: Any, lost: Any, count: Any) -> None:
        _clean(Pointer.to(values), Pointer.to(lost), lane.scalar(count), tile, head_dim, dtype)

    ring.inline(f, (ring.tile_type(values), plgpu.RefType(), SCALAR))(values, lost, count)


def _clean(
    values: Pointer, lost: Pointer, count: Int, tile: int, head_dim: int, dtype: str
) -> None:
    thread = lane.special("tid.x") & (_THREADS - 1)
    found = lane.integer(0)
    for at, row, _ in _chunks(values, thread, tile, head_dim):
        words = [w & 0x7FFF7FFF for w in at.words(4)]
        is_there = row < count
        largest = lane.tree(words, lane.maxima_of_halves)
        found = lane.maxima_of_halves(found, is_there.where(largest, 0))
        with lane.when(~is_there):
            at.store_words([lane.integer(0)] * 4)
    warps = lost.at(tile // _BITS * head_dim * 4)
    largest = lane.largest_of_warp((found & 0xFFFF).maximum(found >> 16))
    with lane.when((thread & 31).equals(0)):
        warps.at((thread >> 5) * 4).store(largest)
    mgpu.utils.warpgroup_barrier()
    is_lost = lane.tree(warps.words(_WARPS), Int.maximum) >= _INFINITY[dtype]
    with lane.when(thread.equals(0)):
        warps.at(4 * _FOUND).store(is_lost.where(lane.integer(1), 0))
    with lane.when(is_lost):
        for i in range(0, tile // _BITS * head_dim, _THREADS):
            lost.at(4 * i, thread * 4).store(lane.integer(0))
        mgpu.utils.warpgroup_barrier()
        for at, row, column in _chunks(values, thread, tile, head_dim):
            _write_down(at, lost, row, column, head_dim, dtype)


def _chunks(values: Pointer, thread: Int, tile: int, head_dim: int) -> Any:
    """A thread's 16 bytes at a time: where they are, their token and their first channel.

    Eight rows of 64 channels lie together, and their pieces of 16 bytes are interleaved.
    """
    per_row = head_dim * 2 // _LINE
    step = _THREADS * _CHUNK
    block, within = thread >> 6, thread & 63
    row, piece = within >> 3, within & 7
    column = (piece ^ row) * (_CHUNK // 2)
    for i in range(tile * head_dim * 2 // step):
        number = block + i * (step // _BLOCK)
        eight, part = (number, lane.integer(0)) if per_row == 1 else _split(number, per_row)
        yield values.at(i * step, thread * _CHUNK), eight * 8 + row, column + part * (_LINE // 2)


def _split(number: Int, size: int) -> tuple[Int, Int]:
    return number // size, number % size


def _write_down(
    at: Pointer, lost: Pointer, row: Int, column: Int, head_dim: int, dtype: str
) -> None:
    """Zeros for what is not finite of a thread's 16 bytes, and its tokens' bits."""
    words = at.words(4)
    bit = lane.integer(1) << (row & (_BITS - 1))
    target = lost.at(((row >> 5) * head_dim + column) * 4)
    clean = []
    for i, word in enumerate(words):
        for half in (0, 1):
            is_lost = ((word >> (16 * half)) & 0x7FFF) >= _INFINITY[dtype]
            with lane.when(is_lost):
                lane.join_bits(target.at(4 * (2 * i + half)), bit)
            word = is_lost.where(word & (0xFFFF0000 if half == 0 else 0xFFFF), word)
        clean.append(word)
    at.store_words(clean)


def spoil(o: jax.Array, lost: Ref, first: jax.Array, last: jax.Array) -> jax.Array:
    """NaN in the sums of rows that see a value which was lost.

    Args:
      o: float32 ``[64, H]``.
      lost: int32 ``[t / 32 + 1, H]``, of the tile.
      first: int32 ``[64]``: the first token of the tile that a row sees, if that is not negative.
      last: int32 ``[64]``: the last one.
    """
    words = lost.shape[0] - 1

    def spoiled(o: jax.Array) -> jax.Array:
        for i in range(words):
            seen = _bits_below(last + (1 - _BITS * i)) & ~_bits_below(first - _BITS * i)
            tokens = plgpu.layout_cast(lost.at[i][...], COLUMN)
            both = lax.broadcast_in_dim(tokens, o.shape, (1,)) & lax.broadcast_in_dim(
                seen, o.shape, (0,)
            )
            o = jnp.where(both != 0, jnp.nan, o)
        return o

    return lax.cond(lost[words, _FOUND] != 0, spoiled, lambda o: o, o)


def _bits_below(n: jax.Array) -> jax.Array:
    """Words ``[64]`` whose bits below `n` are set."""
    count = jnp.clip(n, 0, _BITS - 1)
    low = lax.shift_left(jnp.full_like(n, 1), count) - 1
    return jnp.where(n >= _BITS, jnp.full_like(n, -1), low)
