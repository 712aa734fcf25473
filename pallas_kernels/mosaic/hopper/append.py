"""Append on Hopper: one new token per sequence into int8 buffers, which make blocks when full.

Roofline: a step of 16 sequences moves 50 KB a side, which is negligible: the floor is one launch
for both sides, 2 to 3 us, the target twice that. Seen on an H200: 1.7 us, with 64 sequences 2.9.
The launch bounds it.

A program takes one head of one sequence, of keys or of values. Its first warp fixes the universal
scale if that is still open, rounds the token and stores its codes. The step that fills the buffer
also compresses its oldest block, or all of it, and moves the rest down, with all warps. Where a
single sequence has heads of one width, a kernel before it, `count`, brings its counts up to date.

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import Side
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, lane, lanes, stage2
from pallas_kernels.mosaic.block import CHANNELS, TOKENS, Block, Share, Words
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.stage2 import Arrays, Layout, Target

_WARP = 32


class _Program(NamedTuple):
    batch: Int
    head: Int
    heads: int  # `K`
    row: Int  # tokens in the buffer
    size: int  # tokens that fill it
    flush: int  # how many of them a full buffer compresses
    first_tokens: int  # how many stay in the buffer in front of those
    buffer: Pointer  # this head's buffer
    scale: Pointer  # where this head's universal scale is stored
    share: Share  # the lane's part of a block of the buffer
    memory: Pointer


def append(
    tokens: Sequence[jax.Array],
    accepted: jax.Array,
    row: jax.Array,
    start: jax.Array,
    sides: Sequence[Side],
    *,
    layouts: Sequence[Layout],
    flush: int,
    first_tokens: int = 0,
) -> list[Side]:
    """Appends one token per sequence to keys and values of a cache, in donated memory if possible.

    For each side, `tokens` are bfloat16, float16 or float32 ``[B, K, H]``, `H` a multiple of 8.
    `sides` have int8 buffers ``[B, K, buffer_size, H]``, zero from `row` on, and their float32
    scales ``[B, K]``, 0 where they are open; blocks are as in `stage2.Arrays`.

    int32 ``[B]`` each: `accepted`, 1 or 0 for a sequence that gets no token; `row`, tokens in the
    buffer; `start`, the place of the next block, below `n` (after the last place the first one
    follows). If `start` is negative, what leaves the buffer is not stored: it is another device's.

    A full buffer compresses `flush` tokens, whole blocks; `first_tokens` stay in front of them.
    Both together are at most `buffer_size`.
    """
    batch, heads, channels = tokens[0].shape
    # A buffer's codes are loaded as words of four, whatever the tokens' dtype.
    size = layouts[0].tokens
    warpgroups = blocks.default_warpgroups(size, channels)
    block = Block(size, channels, channels, tokens[0].dtype.name, warpgroups)
    states = [
        [*s.codes, s.channel_scale, s.channel_zero, s.block_scale, s.buffer, s.buffer_scale]
        for s in sides
    ]
    inputs = [accepted, row, start, *tokens, *(s.head_slots for s in sides)]
    programs = batch * heads

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        accepted, row, start, *given = arrays[: len(inputs)]
        rest = arrays[len(inputs) :]
        index = ids[0] % programs
        batch_index, head = index // heads, index % heads
        own = batch_index << 2
        is_accepted = accepted.at(own).word() > 0
        for i, (side, state) in enumerate(zip(sides, states, strict=True)):
            mine, rest = rest[: len(state)], rest[len(state) :]
            buffered, rows = side.buffer.shape[2], row.at(own).word()
            program = _Program(
                *(batch_index, head, heads, rows, buffered, flush, first_tokens),
                mine[-2].times(index, buffered * channels),
                mine[-1].at(index << 2),
                *(Share(block, lane.thread()), arrays[-1]),
            )
            a = Arrays(
                codes=mine[: len(side.codes)],
                channel_scale=mine[-5],
                channel_zero=mine[-4],
                block_scale=mine[-3],
                blocks=side.block_scale.shape[2],
                layout=layouts[i],
            )
            with lane.when(is_accepted & (ids[0] // programs).equals(i)):
                with lane.when(program.share.thread < _WARP):
                    _token(program, given[i])
                with lane.when(rows.equals(buffered - 1)):
                    lane.block_barrier()  # all warps read what one has stored
                    slot = head
                    if len(side.codes) > 1:
                        slot = given[len(tokens) + i].at(index << 2).word()
                    first = start.at(own).word()
                    _flush(program, a, Target(batch_index, head, heads, slot, first))

    written = lanes.update(
        body,
        "turbojax_append_hopper",
        inputs,
        [array for state in states for array in state],
        grid={"program": programs * len(sides)},
        warpgroups=warpgroups,
        shared=blocks.MAXIMA_BYTES + max(stage2.shared_bytes(block, x) for x in layouts),
    )
    out = []
    for side, state in zip(sides, states, strict=True):
        mine, written = written[: len(state)], written[len(state) :]
        *codes, scale, zero, block_scale, buffer, buffer_scale = mine
        out.append(
            Side(tuple(codes), scale, zero, block_scale, side.head_slots, buffer, buffer_scale)
        )
    return out


@dataclasses.dataclass(frozen=True)
class Counting:
    """Sizes of a cache that gets a token a sequence, in tokens but for the last."""

    max_length: int
    buffer_size: int
    flush: int
    block: int
    room: int  # places for blocks


def count(
    asked: jax.Array, counts: Sequence[jax.Array], s: Counting
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What `append` is to do, and a cache's counts after it.

    Int32 ``[B]`` are `asked`, whether there is a new token, and the first two of `counts`: tokens
    held, tokens in the buffer. The third is bool ``[B]``, whether a token was ever left out.
    Returns `accepted`, `row` and `start` of `append`, and the counts, in their own memory if they
    were donated. The definition is `turbojax.caches.progressive.append_reference`, to which a test
    holds it. XLA computes all this in one kernel for several sequences, for a single one in five.
    """

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        own = ids[0] << 2
        asked, held, buffered, left_out, *plan = arrays
        with lane.when(lane.thread().equals(0)):
            wanted, tokens, row = (x.at(own).word() for x in (asked, held, buffered))
            accepted = wanted.maximum(0).minimum((lane.integer(s.max_length) - tokens).minimum(1))
            start = (tokens - row) // s.block % s.room
            for target, x in zip(plan, (accepted, row, start), strict=True):
                target.at(own).store(x)
            filled = row + accepted
            held.at(own).store(tokens + accepted)
            buffered.at(own).store((filled >= s.buffer_size).where(filled - s.flush, filled))
            with lane.when(wanted > accepted):
                left_out.at(ids[0]).store_low(lane.integer(1), 8)

    plan = [jax.ShapeDtypeStruct(asked.shape, jnp.int32)] * 3
    grid = {"sequence": asked.shape[0]}
    name = "turbojax_count_hopper"
    written = lanes.update(body, name, [asked], counts, grid=grid, warpgroups=1, out=plan)
    return written[len(counts) :], written[: len(counts)]


def _token(p: _Program, x: Pointer) -> None:
    """Stores the token's codes and the buffer's scale; one warp does it."""
    b = p.share.block
    last = b.channels // CHANNELS - 1
    column = p.share.column.minimum(last)
    index = p.batch * p.heads + p.head
    row = x.times(index, b.channels * b.value_bytes)
    words = row.at(column * (CHANNELS * b.value_bytes)).words(b.words)
    maximum = lane.largest_of_warp(p.share.largest([[words]])).as_float()
    held = p.scale.float()
    # The first token that is not all zero fixes an open scale.
    fixes = held.equals(0.0) & ~maximum.equals(0.0)
    scale = fixes.where(eight_bits.scale_of(maximum * 2.0, True), held)
    is_known = eight_bits.is_finite(maximum) & eight_bits.is_finite(scale)
    scale = is_known.where(scale, float("nan"))
    divisor = is_known.where(_or_one(scale), 1.0)
    values = p.share.floats(words)
    codes = [eight_bits.clamped_code(v, divisor) for v in values]
    packed = [is_known.where(lane.pack_bytes(codes[i : i + 4]), 0) for i in (0, 4)]
    place = p.buffer.at(p.row * b.channels, column * CHANNELS)
    with lane.when(p.share.thread <= last):
        place.store_words(packed)
    with lane.when(p.share.thread.equals(0)):
        p.scale.store(scale)


def _or_one(scale: Float) -> Float:
    """A divisor: 1 where the scale is 0 because all tokens were zero."""
    return scale.equals(0.0).where(1.0, scale)


def _flush(p: _Program, a: Arrays, at: Target) -> None:
    """Compresses the oldest tokens of a full buffer and moves the rest to its front."""
    tokens, zero = a.layout.tokens, lane.integer(0)
    scale, is_here = _or_one(p.scale.float()), at.number >= 0

    def compress(i: Int, state: list[Int]) -> list[Int]:
        lane.block_barrier()  # shared memory of the block before has been read
        codes = _load(p, i * tokens + p.first_tokens)
        with lane.when(is_here):
            stage2.tell_extremes(p.share, codes, p.memory)
            lane.block_barrier()
            here = Target(at.batch, at.head, at.heads, at.slot, (at.number + i) % a.blocks)
            with lane.when(p.share.thread.equals(0)):
                a.block_scale.times(here.of_head(a), 4).store(scale)
            stage2.write(p.share, codes, p.memory, a, here)
        return state

    def move(i: Int, state: list[Int]) -> list[Int]:
        to = i * tokens + p.first_tokens
        codes = _load(p, to + p.flush)
        lane.block_barrier()  # all codes have been read
        _store(p, to, codes)
        return state

    _times(p.flush // tokens, zero, compress)
    lane.block_barrier()
    _times(-(-(p.size - p.first_tokens) // tokens), zero, move)


def _times(count: int, zero: Int, step: Callable[[Int, list[Int]], list[Int]]) -> None:
    if count == 1:
        step(zero, [])
    else:
        lane.loop(zero, lane.integer(count), 1, [zero], step)


def _load(p: _Program, first: Int) -> Words:
    """The lane's part of the block of codes that begins at row `first`; 0 past the buffer."""
    share, b = p.share, p.share.block
    column = share.column.minimum(b.channels // CHANNELS - 1) * CHANNELS
    out = []
    for number in range(b.groups):
        # A group that does not exist reads the last one's.
        group = share.group(number).minimum(b.tokens // TOKENS - 1)
        rows = [group * TOKENS + first + i for i in range(TOKENS)]
        out.append([_row(p, row, column) for row in rows])
    return out


def _row(p: _Program, row: Int, column: Int) -> list[Int]:
    is_inside = row < p.size
    place = p.buffer.times(row.minimum(p.size - 1), p.share.block.channels).at(column)
    return [is_inside.where(word, 0) for word in place.words(2)]


def _store(p: _Program, first: Int, codes: Words) -> None:
    """Stores `_load`'s codes to the rows from `first` on that exist."""
    share, b = p.share, p.share.block
    for number in range(b.groups):
        with share.inside(number):
            for i in range(TOKENS):
                row = share.group(number) * TOKENS + first + i
                with lane.when(row < p.size):
                    place = p.buffer.times(row, b.channels).at(share.column * CHANNELS)
                    place.store_words(codes[number][i])
