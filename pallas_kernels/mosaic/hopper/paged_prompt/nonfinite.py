"""Values that are not finite, in tiles that some query does not see whole.

A product with 0 does not hide them: what a query does not see would reach it as 0 times NaN. So the
warpgroup that copies looks through such a tile in shared memory before it is multiplied. It puts
zeros in the place of what is not finite, and of tokens past the sequence's end, whatever they hold;
and it writes down whose values were not finite, a bit for each token: a query that sees one of them
gets NaN, in all channels.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.pipeline import SCALAR

BITS = 32  # tokens of a word
_THREADS = 128
# Bytes that a thread looks at together, and of eight rows of 64 channels, which lie together.
_CHUNK, _BLOCK = 16, 1024
_INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
# Words of a slot: the tokens' bits, and what a warpgroup's warps exchange.
_WORDS, _WARPS = 4, 4


def memory(stages: int) -> Any:
    """Each slot's bits of tokens, and scratch memory to compute them."""
    return plgpu.SMEM((stages, _WORDS + _WARPS), jnp.int32)


def clean(values: Ref, found: Ref, count: jax.Array) -> None:
    """Makes a tile of values finite, 16-bit ``[t, H]`` in shared memory; zeros past `count` tokens.

    `found`, int32 ``[8]`` of `memory`, gets a bit for each real token that had a value not finite.
    """
    tile, head_dim = values.shape
    dtype = jnp.dtype(values.dtype).name

    def f(values: Any, found: Any, count: Any) -> None:
        _clean(Pointer.to(values), Pointer.to(found), lane.scalar(count), tile, head_dim, dtype)

    pipeline.inline(f, (pipeline.tile_type(values), plgpu.RefType(), SCALAR))(values, found, count)


def _clean(
    values: Pointer, found: Pointer, count: Int, tile: int, head_dim: int, dtype: str
) -> None:
    thread = lane.special("tid.x") & (_THREADS - 1)
    top, zero = lane.integer(0), lane.integer(0)
    for at, row in _chunks(values, thread, tile, head_dim):
        is_there = row < count
        top = lane.maxima_of_halves(top, is_there.where(_largest(at), zero))
        with lane.when(~is_there):
            at.store_words([zero] * 4)
    warps = found.at(4 * _WORDS)
    top = lane.largest_of_warp((top & 0xFFFF).maximum(top >> 16))
    with lane.when((thread & 31).equals(0)):
        warps.at((thread >> 5) * 4).store(top)
    with lane.when(thread < _WORDS):
        found.at(thread * 4).store(zero)
    mgpu.utils.warpgroup_barrier()
    is_nonfinite = lane.tree(warps.words(_WARPS), lambda a, b: a.maximum(b)) >= _INFINITY[dtype]
    with lane.when(is_nonfinite):
        for at, row in _chunks(values, thread, tile, head_dim):
            top = _largest(at)
            with lane.when((top & 0xFFFF).maximum(top >> 16) >= _INFINITY[dtype]):
                lane.join_bits(found.at((row >> 5) * 4), lane.integer(1) << (row & (BITS - 1)))
                at.store_words([zero] * 4)


def _largest(at: Pointer) -> Int:
    """The largest magnitude's bits in each half of a thread's words."""
    return lane.tree([w & 0x7FFF7FFF for w in at.words(4)], lane.maxima_of_halves)


def _chunks(
    values: Pointer, thread: Int, tile: int, head_dim: int
) -> Iterator[tuple[Pointer, Int]]:
    """A thread's 16 bytes at a time, with their token."""
    blocks, step = head_dim // 64, _THREADS * _CHUNK
    within = (thread >> 3) & 7
    for i in range(tile * head_dim * 2 // step):
        number = (thread >> 6) + i * (step // _BLOCK)
        yield values.at(i * step, thread * _CHUNK), (number // blocks) * 8 + within


def spoil(o: jax.Array, found: Sequence[jax.Array], first: jax.Array, last: jax.Array) -> jax.Array:
    """Puts NaN into the sums ``[64, H]`` of rows that see a value which was not finite.

    `found` are the bits of a tile's tokens; `first` and `last`, int32 ``[64]``, the first and last
    token of the tile that a row sees. A negative `first` is the tile's first token.
    """

    def spoiled(o: jax.Array) -> jax.Array:
        hit = jnp.zeros_like(last)
        for i, word in enumerate(found):
            hit = hit | (_below(last + (1 - BITS * i)) & ~_below(first - BITS * i) & word)
        return jnp.where(lax.broadcast_in_dim(hit != 0, o.shape, (0,)), jnp.nan, o)

    some = functools.reduce(lax.bitwise_or, found)
    return lax.cond(some != 0, spoiled, lambda o: o, o)


def _below(n: jax.Array) -> jax.Array:
    """Words whose bits below `n` are set."""
    low = lax.shift_left(jnp.full_like(n, 1), jnp.clip(n, 0, BITS - 1)) - 1
    return jnp.where(n >= BITS, jnp.full_like(n, -1), low)
