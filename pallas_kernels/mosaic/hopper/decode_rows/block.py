"""What one warp computes of one cache block for 16 or 32 queries: scores, softmax, weighted values.

Products are of 16 rows and 8 columns: that of queries and keys of 16 channels at a time, with
float16 operands and float32 sums; that of weights and values of 32 tokens, in bytes. Rows are
queries in both; columns are tokens in the first and channels in the second. Lane ``4 g + t`` holds
of a result rows ``g`` and ``g + 8``, columns ``2 t`` and ``2 t + 1``. So the weights that a lane
computes are, as bytes, its operand of the second product. Which token or channel a column stands
for is free to choose: as `Tokens` and `operands.channel_of` have it, the columns of two tiles in a
lane are the four codes of one word.

All numbers in the first product are integers below 2**11 times a power of two, and sums are below
2**24: nothing is rounded, and scores are those of `decode.block` to the bit.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.types import (
    INT8_RANGE,
    Numerics,
    Place,
    Shape,
    Width,
)
from pallas_kernels.mosaic.hopper.decode_rows.operands import VALUE_OFFSET
from pallas_kernels.mosaic.lane import Bool, Float, Int, Pointer

# Warps that share blocks --------------------------------------------------------------------------
# One warp holds at most 32 queries' outputs, and no more registers are left to hide latencies with.
# Two warps dequantize a half each of a block's keys and values, and exchange maxima and weights in
# shared memory: each has its tokens of the scores, then its channels.


def exchange_bytes(size: int, rows: int, block: int) -> int:
    """Shared memory in which a team's warps exchange maxima and weights."""
    return 0 if size == 1 else size * rows * 4 + rows * block


@dataclasses.dataclass(frozen=True, eq=False)
class Team:
    """The running warp's team."""

    size: int  # warps, 1 or 2
    number: Int  # of the team in its program
    member: Int
    memory: Pointer  # shared memory of `exchange_bytes`
    rows: int  # queries

    def sync(self) -> None:
        if self.size == 1:
            lane.warp_barrier()
        else:
            lane.named_barrier(self.number + 1, 32 * self.size)

    def _numbers(self, member: Int, row: int, here: Place) -> Pointer:
        return self.memory.at(member * (4 * self.rows) + (here.g << 2), 32 * row)

    def others(self, numbers: list[Float], here: Place) -> list[Float]:
        """The other warp's numbers of rows; synchronizes."""
        with lane.when(here.t.equals(0)):
            for row, x in enumerate(numbers):
                self._numbers(self.member, row, here).store(x)
        self.sync()
        return [self._numbers(self.member ^ 1, row, here).float() for row in range(len(numbers))]

    def all_words(self, words: list[list[list[Int]]], here: Place) -> list[list[list[Int]]]:
        """Operand words of the weights of all warps; synchronizes."""
        if self.size == 1:
            return words
        area = self.memory.at(((here.g << 2) + here.t) << 4, 4 * self.size * self.rows)
        count = len(words[0])
        for tile, of_tile in enumerate(words):
            for k, four in enumerate(of_tile):
                place = (self.member * count + (tile * self.size * count + k)) << 9
                area.at(place).store_words(four)
        self.sync()
        return [
            [
                area.at(512 * (tile * self.size * count + k)).words(4)
                for k in range(self.size * count)
            ]
            for tile in range(len(words))
        ]


# Queries, tokens and sums -------------------------------------------------------------------------

_HALVES = (0, 1)
# The score of a token that a query may not see.
_HIDDEN = float("-inf")
# `VALUE_OFFSET` taken from each of four values.
_LESS = 0x01010101 * (256 - VALUE_OFFSET) - 2**32


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Which tokens of a block the columns of the first product's tiles stand for."""

    first: Int | int  # the warp's first token
    step: Int | int  # tokens between the beginnings of neighbouring lanes' words of values
    offsets: Sequence[Int | int]  # the token of each tile's first column, relative to `first`

    @classmethod
    def of(cls, head_dim: int, block: int, value: Width, team: Team) -> "Tokens":
        """Two tiles for each word and run of a channel's values; a warp takes its share."""
        found = [_tokens(Shape(head_dim, block, bits, bits, 16), team.size) for bits in value.bits]
        first, step, *offsets = found[0]
        if value.is_low is not None:
            first, step, *offsets = (
                value.is_low.where(lane.integer(low), high)
                for high, low in zip(*found, strict=True)
            )
        return cls(team.member * first if team.size > 1 else 0, step, offsets)

    def of_column(self, here: Place) -> Int:
        """The token of column `g` of the tile with offset 0: the key that a lane loads."""
        return (here.g >> 1) * self.step + ((here.g & 1) << 1) + self.first

    def of_pair(self, here: Place) -> Int:
        """The token of column ``2 t`` at offset 0; column ``2 t + 1`` is two tokens on."""
        return here.t * self.step + self.first


def _tokens(shape: Shape, size: int) -> list[int]:
    """For one width: tokens between a team's warps, the step, and the offsets."""
    runs, words = 8 // shape.value_bits, shape.value_row // 16
    span = shape.block // runs
    places = itertools.product(range(words), range(runs), (0, 1))
    offsets = [run * span + 4 * word + odd for word, run, odd in places]
    count = len(offsets) // size
    return [offsets[-1] - offsets[count - 1], shape.value_row // 4, *offsets[:count]]


@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """A program's queries, in shared memory because registers are scarce."""

    operands: Pointer  # for each 16 rows and 16 channels four words of every lane
    # Of the rows, times the factor of the scores, the exponential's unit and the factor that turns
    # scores into integers.
    scales: Pointer
    positions: Pointer  # of the rows; -1 if a row does not exist

    @classmethod
    def of(cls, memory: Pointer, rows: int, head_dim: int) -> "Queries":
        size = 2 * rows * head_dim
        return cls(memory, memory.at(size), memory.at(size + 4 * rows))

    def words(self, tile: int, number: int, shape: Shape, here: Place) -> list[Int]:
        at = (tile * (shape.head_dim // 16) + number) * 512
        return self.operands.at(((here.g << 2) + here.t) << 4, at).words(4)

    def scale(self, row: int, here: Place) -> Float:
        """The scale of row ``8 * row + g``."""
        return self.scales.at(here.g << 2, 32 * row).float()

    def position(self, row: int, here: Place) -> Int:
        """The position of row ``8 * row + g``."""
        return self.positions.at(here.g << 2, 32 * row).word()


def query_bytes(rows: int, head_dim: int) -> int:
    return rows * (2 * head_dim + 8)


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    # For each 8 channels and each 16 rows: row g at two columns, then row g + 8.
    outputs: list[Float]
    maxima: list[Float]  # of rows g and g + 8 of each 16, in the exponential's units
    totals: list[Float]  # this lane's part of the sums of weights

    @classmethod
    def empty(cls, tiles: int, channels: int) -> "State":
        zero, lowest = lane.number(0.0), lane.number(float("-inf"))
        rows = 2 * tiles
        return cls([zero] * (channels // 2 * tiles), [lowest] * rows, [zero] * rows)

    def flat(self) -> list[Float]:
        return [*self.maxima, *self.totals, *self.outputs]

    @classmethod
    def of(cls, flat: list[Any], tiles: int) -> "State":
        rows = 2 * tiles
        return cls(flat[2 * rows :], flat[:rows], flat[rows : 2 * rows])


# Scores ------------------------------------------------------------------------------------------


def scores(
    shape: Shape,
    count: int,
    queries: Queries,
    here: Place,
    load: Callable[[int], Any],
    channels: Callable[[int], Any],
    pairs: Callable[[Any, int, Any], list[Int]],
    is_scaled: bool,
) -> list[list[Float]]:
    """Scores of each of the lane's rows with the lane's tokens: integers times `UNIT`.

    There are `count` tiles of tokens. ``load(j)`` gives what is needed of the token of column `g`
    of tile `j`, ``channels(i)`` what is needed of 16 channels, and
    ``pairs(load(j), i, channels(i))`` their operand words. If `is_scaled`, these are codes:
    ``channels(i)`` are then two words of scales and two of zeros.
    """
    tiles = shape.rows // 16
    at_once = min(count, 8 // tiles)
    scaled: list[list[list[Int]]] = []
    starts = [[lane.number(0.0)] * 4 for _ in range(tiles)]
    if is_scaled:
        scaled, starts = _scaled(shape, queries, here, channels)
    rows: list[list[Float]] = [[] for _ in range(2 * tiles)]
    for first in range(0, count, at_once):
        loaded = [load(first + j) for j in range(at_once)]
        sums = [list(starts) for _ in loaded]
        for i in range(shape.head_dim // 16):
            if is_scaled:
                of_rows, of_channels = scaled[i], None
            else:
                of_rows = [queries.words(tile, i, shape, here) for tile in range(tiles)]
                of_channels = channels(i)
            for token, own in zip(loaded, sums, strict=True):
                words = pairs(token, i, of_channels)
                for tile in range(tiles):
                    own[tile] = lane.half.matmul(of_rows[tile], words, own[tile])
        for own in sums:
            for tile in range(tiles):
                for half in _HALVES:
                    rows[2 * tile + half] += own[tile][2 * half : 2 * half + 2]
    return rows


def _scaled(
    shape: Shape, queries: Queries, here: Place, channels: Callable[[int], list[Int]]
) -> tuple[list[list[list[Int]]], list[list[Float]]]:
    """Operand words of queries times scales, of each 16 channels and 16 rows; products with zeros.

    ``channels(i)`` are two words of the scales and two of the zeros of 16 channels.
    """
    words, tiles = [], range(shape.rows // 16)
    sums = [[lane.number(0.0)] * 4 for _ in tiles]
    for i in range(shape.head_dim // 16):
        given = channels(i)
        own = [
            [
                lane.half.multiply(word, given[k // 2])
                for k, word in enumerate(queries.words(tile, i, shape, here))
            ]
            for tile in tiles
        ]
        sums = [lane.half.matmul(x, given[2:], c) for x, c in zip(own, sums, strict=True)]
        words.append(own)
    return words, sums


# Softmax -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A block's softmax, by the lane's rows."""

    # Operand words of each 16 rows, four for each 32 tokens.
    words: list[list[list[Int]]]
    maxima: list[Float]  # of the rows, ``-inf`` where nothing is seen
    totals: list[Float]  # this lane's part of the sums of weights
    nan_terms: list[Float]  # NaN where the scale of the scores is, 0 elsewhere


def softmax(
    scores: list[list[Float]],
    queries: Queries,
    key_scale: Float,
    tokens: Tokens,
    first_token: Int,
    is_masked: bool,
    here: Place,
    team: Team,
    n: Numerics,
) -> Weights:
    """A block's softmax relative to its own maximum, weights rounded (see `decode_reference`).

    `is_masked` says whether some query may not see all of the block; the warps of `team` have its
    other tokens.
    """
    if is_masked:
        scores = [
            [
                seen.where(x, _HIDDEN)
                for x, seen in zip(
                    of_row,
                    _visible(
                        queries.position(row, here) - first_token - tokens.of_pair(here), tokens, n
                    ),
                    strict=True,
                )
            ]
            for row, of_row in enumerate(scores)
        ]
    # Of integers: of a NaN and a number, the float instruction gives the number.
    tops = [lane.among_four(lane.tree(x, lane.maximum), lane.maximum) for x in scores]
    if team.size > 1:
        others = team.others(tops, here)
        tops = [lane.maximum(a, b) for a, b in zip(tops, others, strict=True)]
    maxima, totals, nan_terms = [], [], []
    codes: list[list[Int]] = []
    for row, (x, top) in enumerate(zip(scores, tops, strict=True)):
        factor = queries.scale(row, here) * key_scale
        y, top, nan = _arguments(x, top, factor, is_masked, n)
        p = [n.exp(v) for v in y]
        maxima.append(top)
        nan_terms.append(nan)
        totals.append(lane.tree(p, operator.add))
        codes.append([_codes(p[k : k + 4], n) for k in range(0, len(p), 4)])
    words = [
        [
            [codes[tile + half][k + number] for number in (0, 1) for half in _HALVES]
            for k in range(0, len(codes[0]), 2)
        ]
        for tile in range(0, len(codes), 2)
    ]
    return Weights(team.all_words(words, here), maxima, totals, nan_terms)


def _arguments(
    x: list[Float], top: Float, factor: Float, is_masked: bool, n: Numerics
) -> tuple[list[Float], Float, Float]:
    """The exponential's arguments of a row, its maximum, and NaN where `factor` is NaN, else 0."""
    capped, slope, is_seen = x, factor, top > _HIDDEN
    if n.soft_cap is not None:
        cap = functools.partial(warp.soft_cap, factor=factor * (1 / n.unit), cap=n.soft_cap)
        capped, top = [cap(s) * n.unit for s in x], cap(top) * n.unit
        slope = lane.number(1.0)
    top, nan = top * slope, factor * 0.0
    if not is_masked:
        return [lane.fma(s, slope, -top) for s in capped], top, nan
    top, shift = is_seen.where(top, _HIDDEN), is_seen.where(top, 0.0)
    y = [lane.fma(s, slope, -shift) for s in capped]
    y = [(s > _HIDDEN).where(v, _HIDDEN) for s, v in zip(x, y, strict=True)]
    return y, top, is_seen.where(nan, 0.0)


def _visible(last: Int, tokens: Tokens, n: Numerics) -> list[Bool]:
    """Which of the lane's tokens a query at `last`, counted from the first of them, sees."""
    out = []
    for offset in tokens.offsets:
        for column in (0, 1):
            token = offset + 2 * column
            mask = last >= token
            if n.window is not None:
                left, right = n.window
                mask = mask & (last <= token + left) & (last >= token - right)
            out.append(mask)
    return out


def _codes(p: list[Float], n: Numerics) -> Int:
    """The codes of four weights, in the order of their tokens: see `Tokens`."""
    a, b, c, d = (lane.fma(x, INT8_RANGE / n.largest, lane.ROUNDER).as_int() for x in p)
    return lane.pack_bytes([a, c, b, d])


# Values ------------------------------------------------------------------------------------------


def add_block(
    shape: Shape,
    state: State,
    weights: Weights,
    values: Callable[[int], list[Int]],
    value_scale: Float,
    n: Numerics,
) -> State:
    """Adds a block's weighted values to the running softmax.

    ``values(i)`` gives the operand words of column `g` of tile `i`, two for each 32 tokens, plus
    `VALUE_OFFSET`.
    """
    unit = value_scale * (n.largest / INT8_RANGE)
    alphas, factors, maxima, totals = [], [], [], []
    for i, top in enumerate(weights.maxima):
        new = lane.maximum(state.maxima[i], top)
        shift = (new > float("-inf")).where(new, 0.0)
        alpha, factor = n.exact_exp(state.maxima[i] - shift), n.exact_exp(top - shift)
        total = lane.fma(weights.totals[i], factor, weights.nan_terms[i])
        totals.append(lane.fma(state.totals[i], alpha, total))
        # A block of which a row sees nothing must not reach it, not even as 0 * NaN.
        factors.append(top.equals(float("-inf")).where(0.0, factor * unit))
        alphas.append(alpha)
        maxima.append(new)
    outputs = _rescaled(state.outputs, alphas)
    tiles = shape.rows // 16
    starts = [[lane.integer(0)] * 4 for _ in range(tiles)]
    for tile, of_tile in enumerate(weights.words):
        for words in of_tile:
            starts[tile] = lane.matmul(words, [lane.integer(_LESS)] * 2, starts[tile])
    added: list[Float] = []
    for first in range(0, len(outputs) // (4 * tiles), 2):
        operands = [values(first + i) for i in (0, 1)]
        sums = [list(starts) for _ in operands]
        for k in range(shape.block // 32):
            for own, words in zip(sums, operands, strict=True):
                for tile in range(tiles):
                    two = words[2 * k : 2 * k + 2]
                    own[tile] = lane.matmul(weights.words[tile][k], two, own[tile], "u8")
        for own in sums:
            for tile, c in enumerate(own):
                for i, x in enumerate(c):
                    before = outputs[len(added)]
                    added.append(lane.fma(x.to_float(), factors[2 * tile + i // 2], before))
    return State(added, maxima, totals)


def _rescaled(outputs: list[Float], alphas: list[Float]) -> list[Float]:
    """Outputs times their rows' factors. Most factors are 1, because maxima seldom grow."""
    changed = functools.reduce(operator.or_, (~alpha.equals(1.0) for alpha in alphas))
    per_tile = 2 * len(alphas)

    def multiplied() -> list[Float]:
        return [x * alphas[i % per_tile // 2] for i, x in enumerate(outputs)]

    return lane.either(
        lane.ballot(changed).equals(0), [Float] * len(outputs), lambda: outputs, multiplied
    )
