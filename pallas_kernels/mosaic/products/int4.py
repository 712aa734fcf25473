"""INT4 weights as the register operand of a matrix instruction (FireQ, section 3.1.1).

A lane reads 16 bytes of each of its two rows, 32 codes, and turns them into bytes of e4m3 by
permuting the bytes of a table: four codes take three permutations, from the table's non-negative
half, from its negative half, and from these two by the codes' signs. Where the product is not what
takes the time, two operands save the last: `load_split`.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.block import transposed
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments

GROUP = 128  # inputs that share a scale
ROW_BYTES = GROUP // 2
# e4m3 of 0 .. 7 and of -8 .. -1.
_INTEGERS = (0x44403800, 0x4E4C4A48, 0xCACCCED0, 0xB8C0C4C8)
_MAGNITUDES = 0x7F7F7F7F
TABLE_BYTES = 16
CHUNK = 256  # bytes of a row as a tile of 64 rows is copied: 16 such rows, as longer rows are fewer
TABLES = 128  # scales are e4m3 without a sign; each has a table of 16 products


def chunks(codes: Any) -> Any:
    """Tiles ``[N / 64, K / 128, 64, 64]`` as they are copied, in rows of `CHUNK` bytes."""
    return codes.reshape(*codes.shape[:2], -1, CHUNK)


Choice = tuple[Int, Int, Int]
"""What `lane.permute_bytes` makes a word of e4m3 of: bytes of either sign, and which to take."""


def choices(word: Int, table: Sequence[Int]) -> tuple[Choice, Choice]:
    """Eight codes: nibbles 0 to 3, and 4 to 7."""
    magnitude = word & 0x77777777
    # Byte i of the first or, of negative codes, of the second.
    sign = lane.flip_masked(word >> 1, 0x44444444, 0x32103210)
    out = []
    for _ in range(2):
        positive = lane.permute_bytes(table[0], table[1], magnitude)
        negative = lane.permute_bytes(table[2], table[3], magnitude)
        out.append((positive, negative, sign))
        magnitude, sign = magnitude >> 16, sign >> 16
    return out[0], out[1]


def convert(word: Int, table: Sequence[Int]) -> tuple[Int, Int]:
    """Eight codes as two words of e4m3: nibbles 0 to 3, and 4 to 7."""
    first, second = choices(word, table)
    return lane.permute_bytes(*first), lane.permute_bytes(*second)


def load(
    codes: Any, scales: Any, tables: Any | None, first: Any, dtype: str = "bfloat16"
) -> tuple[list[list[Int]], list[Float]]:
    """A lane's part of 64 rows of a group of 128 inputs.

    In shared memory: `codes`, uint8, 64 bytes a row, one after the other; `scales`, one a row, e4m3
    with tables, `dtype` (16 bits) without; `tables`, e4m3 ``[128, 16]``, of each scale its products
    with 0..7, -8..-1, or None for the codes themselves. `first` is the first of the rows.

    Returns of each of its two rows eight words of e4m3, word ``2 s + h`` of inputs
    ``32 s + 16 h + 4 t`` and three more, where `t` is the lane's place of four; and the rows'
    scales, float32, that are not in them.
    """
    row, t = fragments.row_and_place()
    tables = None if tables is None else Pointer.to(tables)
    here = row + lane.scalar(first), t
    rows, rest = _read(Pointer.to(codes), Pointer.to(scales), tables, here, dtype)
    return [[x for word in words for x in convert(word, table)] for words, table in rows], rest


def _read(
    codes: Pointer, scales: Pointer, tables: Pointer | None, here: tuple[Int, Int], dtype: str
) -> tuple[list[tuple[list[Int], list[Int]]], list[Float]]:
    """For each of a lane's rows four words of codes and its table; and the scales for later."""
    row, t = here
    rows, rest = [], []
    for half in range(2):
        if tables is None:
            scale = scales.at(row << 1, lane.integer(16 * half)).half()
            rest.append(lane.half.unpack(scale, dtype)[0])
            table = [lane.integer(x) for x in _INTEGERS]
        else:
            scale = scales.at(row, lane.integer(8 * half)).byte() & (TABLES - 1)
            rest.append(lane.number(1.0))
            table = tables.at(scale * TABLE_BYTES).words(4)
        at = (row * ROW_BYTES) + (t << 4)
        rows.append((codes.at(at, lane.integer(8 * half * ROW_BYTES)).words(4), table))
    return rows, rest


def _split(word: Int, table: Sequence[Int]) -> list[tuple[Int, Int]]:
    """Eight codes in two operands' words: of nibbles 0 to 3, then of 4 to 7.

    A selector with its fourth bit set repeats a byte's sign eight times, which is zero here.
    """
    other = word ^ -0x77777778
    return [
        (
            lane.permute_bytes(table[0], table[1], plus),
            lane.permute_bytes(table[2], table[3], minus),
        )
        for plus, minus in ((word, other), (word >> 16, other >> 16))
    ]


def load_split(
    codes: Pointer,
    scales: Pointer,
    tables: Pointer | None,
    here: tuple[Int, Int],
    dtype: str = "bfloat16",
) -> tuple[list[Int], list[Int], list[Float]]:
    """As `load`, in two operands: 7 instructions instead of 11 for eight codes.

    Nothing in `tables` is negative, see `magnitudes`; `here` is the first of the lane's two rows
    and its place of four. Returns the values that are not negative, and the negative ones without
    signs, each with zeros in the other's places, as words for `lane.start_product`; and the rows'
    scales that are not in them.
    """
    rows, rest = _read(codes, scales, tables, here, dtype)
    if tables is None:
        rows = [(words, magnitudes(table)) for words, table in rows]
    pairs = [[x for word in words for x in _split(word, table)] for words, table in rows]
    both = [row[i] for i in range(len(pairs[0])) for row in pairs]
    return [plus for plus, _ in both], [minus for _, minus in both], rest


def magnitudes(table: Sequence[Int]) -> list[Int]:
    """A table's words without signs."""
    return [*table[:2], *(x & _MAGNITUDES for x in table[2:])]


def operand(
    codes: Any, scales: Any, tables: Any | None, first: Any, dtype: str = "bfloat16"
) -> tuple[Any, Any]:
    """What `load` reads, as a register operand, and float32 ``[64]``, the scales not in it.

    Its words are int32 ``[64, 32]``: of every instruction both rows' first 16 inputs, then both
    rows' others.
    """
    rows, rest = load(codes, scales, tables, first, dtype)
    return fragments.carrier(
        [row[i] for i in range(len(rows[0])) for row in rows]
    ), fragments.row_array(rest)


def choices_of_operand(codes: Any, scales: Any, tables: Any, first: Any) -> Any:
    """Of every word of `operand` its `Choice`, as int32 ``[64, 96]``."""
    row, t = fragments.row_and_place()
    here = row + lane.scalar(first), t
    found, _ = _read(Pointer.to(codes), Pointer.to(scales), Pointer.to(tables), here, "bfloat16")
    rows = [[x for word in words for x in choices(word, table)] for words, table in found]
    return fragments.carrier(
        [x for pair in zip(*rows, strict=True) for three in pair for x in three]
    )


def expand(codes: Any, scales: Any, tables: Any, first: Any, out: Any) -> None:
    """What `load` reads, as e4m3 in shared memory ``[64, 128]``, rows of 128 bytes interleaved."""
    rows, _ = load(codes, scales, tables, first)
    row, t = fragments.row_and_place()
    for half, words in enumerate(rows):
        at = row + 8 * half
        for i, word in enumerate(words):
            place = (at * GROUP) + ((((at & 7) ^ i) << 4) + (t << 2))
            Pointer.to(out).at(place).store(word)


# Transposed ---------------------------------------------------------------------------------------
# A product of 8-bit operands sums along the bytes of both. So the product with a weight's outputs,
# that of a gradient, needs the weight with its outputs last, and no matrix instruction transposes
# 8-bit numbers. A lane takes four rows, converts 32 codes of each, and transposes four times four
# bytes by eight permutations.

MOST_ROWS = 128  # rows that a warpgroup transposes at a time
_EACH = 4


def expand_transposed(codes: Any, scales: Any, tables: Any, group: Any, out: Any) -> None:
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
    place, swap = (warp + part) & 3, line & 1
    # Of the two tiles the lane's, of its rows the first four.
    tile, first = (quad >> 4) * 2 + group, (quad & 15) * _EACH
    words = Pointer.to(scales).at(tile * 64, first).word()
    source = Pointer.to(codes).at(tile * (64 * ROW_BYTES), first * ROW_BYTES, place * 16)
    rows = []
    for i in range(_EACH):
        row = swap ^ i
        scale = (words >> (row << 3)) & (TABLES - 1)
        table = Pointer.to(tables).at(scale * TABLE_BYTES).words(4)
        held = source.at(row * ROW_BYTES).words(4)
        rows.append([x for word in held for x in convert(word, table)])
    is_swapped = swap.equals(1)
    # Either order of the lower, and of the upper, halves of two words.
    picks = is_swapped.where(0x1504, 0x5140), is_swapped.where(0x3726, 0x7362)
    targets = []
    for i in range(_EACH):
        k = (place << 2) + i
        targets.append(Pointer.to(out).at(k * MOST_ROWS, ((line ^ (k & 7)) << 4) + (part << 2)))
    for j in range(GROUP // 16):
        columns = transposed([row[j] for row in rows], picks)
        for target, word in zip(targets, columns, strict=True):
            target.at(16 * j * MOST_ROWS).store(word)
