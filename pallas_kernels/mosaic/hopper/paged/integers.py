"""Queries and weights as integers of 15 bits, for products of int8 with looked-up centroids.

Each is a low and a high byte in two columns. An entry of a table stands for itself minus a middle;
what that offset contributes is known beforehand, and the sums start from it.
"""

import functools
from collections.abc import Sequence
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import (
    Place,
    Query,
    multiplied,
    scaled,
    summed,
    weight_words,
)
from pallas_kernels.mosaic.lane import Float, Int

# The largest number whose high byte is at most 127 after rounding.
_RANGE = 127.0 * 256
_EVERY_BYTE = 0x01010101


def query_operands(
    x: list[Float], middle: float, here: Place
) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
    """A query's operand words, its columns' starts, its offset, its scale.

    `x` are the lane's channels in the order in which keys meet them; `middle` is that of the keys'
    table.
    """
    x, top = scaled(x)
    is_high = here.g & 1
    words, sums = [], lane.integer(0)
    for k in range(0, len(x), 4):
        word = plane([rounded(v, lane.number(_RANGE)) for v in x[k : k + 4]], is_high)
        words.append(word)
        sums = lane.dot4(word, lane.integer(_EVERY_BYTE), sums)
    sums = lane.reduce_lanes(sums, lambda u, v: u + v, (1, 2))
    low, high = (lane.from_lane(sums, (here.t << 3) + 4 * i) for i in (0, 1))
    start, offset = less_middle(low, high, middle)
    return words, start, offset, top * (1 / _RANGE)


def weight_operands(
    w: list[Float], middle: float, here: Place
) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
    """Words of weights, 15 bits of the block's largest, their columns' starts, offset and unit."""
    inverse, unit = weight_unit(w, (4, 8, 16))
    words: list[Int] = []
    for k in range(0, len(w), 4):
        four = [rounded(x, inverse) for x in w[k : k + 4]]
        words += weight_words([plane(four, lane.integer(i)) for i in (0, 1)], here)
    ones, sums = [lane.integer(_EVERY_BYTE)] * 4, [lane.integer(0)] * 4
    for k in range(0, len(words), 2):
        sums = lane.matmul(ones, words[k : k + 2], sums)
    start, offset = less_middle(sums[0], sums[1], middle)
    return words, start, offset, unit


def weight_unit(w: list[Float], distances: Sequence[int]) -> tuple[Float, Float]:
    """What weights are multiplied with, and what their integers then count.

    Lanes whose indices differ in the bits `distances` have the other weights of the block.
    """
    # Bits of non-negative floats are ordered like integers, with NaN the largest.
    bits = functools.reduce(lambda a, b: a.maximum(b), [x.as_int() for x in w])
    top = lane.reduce_lanes(bits, lambda a, b: a.maximum(b), distances).as_float()
    inverse = (top > 0.0).where(lane.reciprocal(top) * _RANGE, 0.0)
    return inverse, top * (1 / _RANGE)


def scores(pairs: Any, norms: list[Float], query: Query) -> list[list[Float]]:
    """Scores of each tile's query `t` with the lane's tokens, whose operand words are `pairs`."""
    out: list[list[Float]] = [[] for _ in query.operands]
    for pair in pairs:
        for tile, operands in enumerate(query.operands):
            low, high = query.start[tile]
            c = multiplied(pair, operands, [low, high, low, high], lane.matmul)
            for j in (0, 1):
                x = joined(c[2 * j], c[2 * j + 1], query.offset[tile])
                out[tile].append(x * (norms[len(out[tile])] * query.factor[tile]))
    return out


def weighted(value_rows: Any, operands: Sequence[tuple[Any, ...]]) -> list[list[Float]]:
    """Each tile's weights, as `weight_operands` gives them, times values."""
    out: list[list[Float]] = [[] for _ in operands]
    for rows in value_rows:
        for tile, (words, start, offset, unit) in enumerate(operands):
            c = summed(rows, words, [*start, *start], lane.matmul)
            for j in (0, 1):
                out[tile].append(joined(c[2 * j], c[2 * j + 1], offset) * unit)
    return out


def norms(words: list[Int], selector: Int) -> list[Float]:
    """Two float16 norms of each word, in the order of the lane's tokens."""
    out = []
    for word in words:
        word = lane.permute_bytes(word, 0, selector)
        out += [lane.half_to_float(word), lane.half_to_float(word >> 16)]
    return out


def joined(low: Int, high: Int, offset: Float) -> Float:
    """The number that two columns' sums stand for."""
    return ((high << 8) + low).to_float() + offset


def less_middle(low: Int, high: Int, middle: float) -> tuple[tuple[Int, Int], Float]:
    """Where two columns' sums start, and what is added to their combination.

    `low` and `high` are the sums of the operand's low and high bytes.
    """
    whole = int(middle + 0.5)
    rest = ((high << 8) + low).to_float() * (whole - middle)
    return (low * -whole, high * -whole), rest


def rounded(x: Float, factor: Float) -> Int:
    """``rint(x * factor) + 128`` in the low 16 bits: the low byte plus 128, and the high byte."""
    return lane.fma(x, factor, lane.ROUNDER + 128.0).as_int()


def plane(x: list[Int], is_high: Int) -> Int:
    """One byte of each of four `rounded` numbers, as signed bytes."""
    pick = is_high * 0x11 + 0x40
    first, second = lane.permute_bytes(x[0], x[1], pick), lane.permute_bytes(x[2], x[3], pick)
    flip = is_high.equals(0).where(0x80808080 - 2**32, 0)
    return lane.permute_bytes(first, second, 0x5410) ^ flip
