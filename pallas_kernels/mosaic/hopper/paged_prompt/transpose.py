"""e4m3 values from pages, transposed: the tokens of a channel side by side, for products of e4m3.

Roofline, for 32,768 tokens of 8 KV heads with 128 channels, H200: each byte is read and written
once, 67 MB, 16 us at 4.3 TB/s; a word of four channels takes some 12 instructions, 0.1 G: 4 us.
Target: 30 us, beside 700 us of attention of 1,024 queries. Seen: 18 us.

A program transposes a tile of 128 tokens of one head by way of shared memory. Tokens are permuted
within groups of 16: place ``4 t + r`` holds token ``2 t + r`` (`r` < 2) or ``8 + 2 t + r - 2``.
Thread `t` of four holds these columns of the scores, so that weights need not change threads.
Values that are not finite become 0, and bits say whose they were, as in `nonfinite`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.lane import Int, Pointer

TILE = 128
_THREADS, _GROUP, _BITS = 128, 16, 32
_WORDS = TILE // _BITS
# Words of a channel in shared memory, so that both ways of access use many banks.
_STRIDE = TILE // 4 + 1


def _body(arrays: list[Pointer], ids: list[Int], *, shape: tuple[int, ...]) -> None:
    kv_heads, page_size, head_dim, max_pages, tiles = shape
    tile, head, b = ids
    tables, lengths, starts, value, out, nonfinite, shared = arrays
    length, start = (x.at(b * 4).word() for x in (lengths, starts))
    begin, thread = tile * TILE, lane.special("tid.x") & (_THREADS - 1)
    number = (b * tiles + tile) * kv_heads + head
    found, told = shared.at(4 * head_dim * _STRIDE), nonfinite.times(number, 4 * _WORDS)
    is_word, zero = thread < _WORDS, lane.integer(0)
    is_needed = (begin < length) & (begin + TILE > start)
    with lane.when(~is_needed & is_word):
        told.at(thread * 4).store(zero)
    with lane.when(is_needed):
        with lane.when(is_word):
            found.at(thread * 4).store(zero)
        mgpu.utils.warpgroup_barrier()
        for i in range(TILE // _GROUP // (_THREADS // 32)):
            group = (thread >> 5) * 2 + i
            token = begin + group * _GROUP
            held = token.minimum(length - 1)
            entry = (held // page_size).minimum(max_pages - 1)
            page = tables.at((b * max_pages + entry) * 4).word()
            index = (page * kv_heads + head) * page_size + token % page_size
            rows = value.times(index, head_dim)
            _transpose_group(rows, shared, found, group, length - token, thread & 31, head_dim)
        mgpu.utils.warpgroup_barrier()
        target = out.times(number, head_dim * TILE)
        for i in range(0, head_dim * TILE // 16, _THREADS):
            place = thread + i
            at = shared.at(((place >> 3) * _STRIDE + (place & 7) * 4) * 4)
            target.at(place * 16).store_words([at.at(4 * j).word() for j in range(4)])
        with lane.when(is_word):
            told.at(thread * 4).store(found.at(thread * 4).word())


def _transpose_group(
    rows: Pointer,
    shared: Pointer,
    found: Pointer,
    group: Int,
    count: Int,
    number: Int,
    head_dim: int,
) -> None:
    """Transposes a group of 16 tokens by a warp: a lane words of four channels of four tokens.

    It copies values from `rows` to `shared`, and the bits of tokens that are not finite to `found`.
    `group` is which of the tile's groups it is, `count` how many tokens exist, `number` the lane's.
    """
    column, quarter = number & 7, number >> 3
    tokens = [quarter * 2 + i for i in (0, 1, 8, 9)]
    is_nonfinite = [lane.integer(0)] * 4
    for first in range(0, head_dim // 4, 8):
        words = [rows.at(t * head_dim, (column + first) * 4).word() for t in tokens]
        for i, token in enumerate(tokens):
            word = (token < count).where(words[i], 0)
            bad = _not_finite(word)
            is_nonfinite[i] = is_nonfinite[i] | bad
            words[i] = word & ((bad * 255) ^ 0xFFFFFFFF)
        at = shared.at((((column + first) * 4) * _STRIDE + group * 4 + quarter) * 4)
        for i, word in enumerate(_transposed(words)):
            at.at(4 * _STRIDE * i).store(word)
    for token, bad in zip(tokens, is_nonfinite, strict=True):
        place = group * _GROUP + token
        with lane.when(bad > 0):
            lane.join_bits(found.at((place >> 5) * 4), lane.integer(1) << (place & (_BITS - 1)))


def _not_finite(word: Int) -> Int:
    return (((word & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101


def _transposed(words: list[Int]) -> list[Int]:
    """Transposes four words of four bytes: their first bytes, their second ones, and so on."""
    permute = lane.permute_bytes
    pairs = [(permute(a, b, 0x5140), permute(a, b, 0x7362)) for a, b in (words[:2], words[2:])]
    (low, high), (low_2, high_2) = pairs
    return [permute(a, b, s) for a, b in ((low, low_2), (high, high_2)) for s in (0x5410, 0x7632)]


def transpose(
    value: jax.Array, tables: jax.Array, lengths: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Transposes the values of sequences, float8_e4m3fn ``[P, K, page_size, H]``, `H` 64 or 128.

    `tables`, `lengths` and `starts` as for `expand.expand`. Returns float8_e4m3fn
    ``[B * tiles, K, H, 128]``, 0 past a sequence's end, arbitrary in tiles before its start; and
    int32 ``[B * tiles, K, 4]``, the bits of tokens that were not finite.
    """
    batch, max_pages = tables.shape
    _, kv_heads, page_size, head_dim = value.shape
    tiles = pl.cdiv(max_pages * page_size, TILE)
    shape = (kv_heads, page_size, head_dim, max_pages, tiles)
    body: Callable[..., Any] = functools.partial(_body, shape=shape)
    out, nonfinite = lanes.launch(
        body,
        "turbojax_paged_turn_hopper",
        [tables, lengths, starts, value],
        [
            jax.ShapeDtypeStruct((batch * tiles, kv_heads, head_dim, TILE), value.dtype),
            jax.ShapeDtypeStruct((batch * tiles, kv_heads, _WORDS), jnp.int32),
        ],
        grid={"tile": tiles, "head": kv_heads, "sequence": batch},
        warpgroups=1,
        shared=4 * (head_dim * _STRIDE + _WORDS),
    )
    return out, nonfinite
