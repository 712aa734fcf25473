"""INT4 weights to e4m3, transposed: bytes of one input lie together.

A product of 8-bit operands sums along the bytes of both. So the product with a weight's outputs,
that of a gradient, needs the weight with its outputs last, and no matrix instruction transposes
8-bit numbers. A lane takes four rows, converts 32 codes of each as `int4` does, and transposes
four times four bytes by eight permutations.
"""

from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES, convert

ROWS = 128
"""Rows that a warpgroup transposes at a time."""
_EACH = 4


def expand(codes: Any, scales: Any, tables: Any, group: Any, out: Any) -> None:
    """128 rows of a group of 128 inputs as e4m3 ``[inputs, rows]``.

    A warp's lanes store one input's 128 bytes, or four parts of four such lines. The places `t` of
    neighbouring lanes differ, and every other lane of eight takes its rows in swapped pairs, so
    that no two of them meet in a bank of shared memory when they load or store.

    In shared memory: `codes` uint8 ``[2, groups, 64, 64]`` in any shape, tiles of 64 rows; `scales`
    e4m3 ``[2, groups, 64]``; `tables` as for `int4.load`; `out` uint8 ``[128, 128]``, rows of 128
    bytes interleaved. `group` is which of the groups of inputs.
    """
    number = lane.special("tid.x") & 127
    group = lane.scalar(group)
    quad, warp = number & 31, number >> 5
    line, part = quad >> 2, quad & 3
    place, turned = (warp + part) & 3, line & 1
    # Of the two tiles the lane's, of its rows the first four.
    tile, first = (quad >> 4) * 2 + group, (quad & 15) * _EACH
    words = Pointer.to(scales).at(tile * 64, first).word()
    source = Pointer.to(codes).at(tile * (64 * ROW_BYTES), first * ROW_BYTES, place * 16)
    rows = []
    for i in range(_EACH):
        row = turned ^ i
        scale = (words >> (row << 3)) & (TABLES - 1)
        table = Pointer.to(tables).at(scale * TABLE_BYTES).words(4)
        held = source.at(row * ROW_BYTES).words(4)
        rows.append([x for word in held for x in convert(word, table)])
    is_turned = turned.equals(1)
    low, high = is_turned.where(0x1504, 0x5140), is_turned.where(0x3726, 0x7362)
    targets = []
    for i in range(_EACH):
        k = (place << 2) + i
        targets.append(Pointer.to(out).at(k * ROWS, ((line ^ (k & 7)) << 4) + (part << 2)))
    for j in range(GROUP // 16):
        columns = _transposed([row[j] for row in rows], low, high)
        for target, word in zip(targets, columns, strict=True):
            target.at(16 * j * ROWS).store(word)


def _transposed(rows: list[Int], low: Int, high: Int) -> list[Int]:
    """Byte `i` of each of four words, for each `i`.

    `low` and `high` interleave the lower and the upper halves of two words, in either order.
    """
    out = []
    for selector in (low, high):
        a, b = (lane.permute_bytes(rows[i], rows[i + 1], selector) for i in (0, 2))
        out += [lane.permute_bytes(a, b, 0x5410), lane.permute_bytes(a, b, 0x7632)]
    return out
