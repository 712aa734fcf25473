"""INT4 weights as 16-bit operands of a matrix instruction, for tokens that stay as they are.

A lane reads eight codes of a row as a word. Its nibbles `i` and `i + 4` are masked into the low
bits of two 16-bit floats between 128 and 256 (bfloat16) or 1024 and 2048 (float16), whose unit is
1, and what is too much is subtracted, the zero point with it: exact, two numbers in three
instructions.

So of each 32 inputs the pair `i` of a lane, whose place is `t` of four, are the inputs ``4 t + i``
and ``16 + 4 t + i``, and tokens come in that order, too (`token_words`).
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Float, Int, Pointer, fragments
from pallas_kernels.mosaic.products.int4 import ROW_BYTES

# A code of 0 between 128 and 256 in bfloat16, or 1024 and 2048 in float16: with 8 added to it.
_ZERO = {"bfloat16": 0x4308, "float16": 0x6408}
# Bits of a 16-bit float beyond the three that e4m3 has.
_BEYOND_E4M3 = {"bfloat16": 4, "float16": 7}
# 448.
_MOST_E4M3 = {"bfloat16": 0x43E0, "float16": 0x5F00}
_TWICE = 0x00010001


def twice(x: Int) -> Int:
    return x * _TWICE


def signed(byte: Int) -> Int:
    return (byte ^ 128) - 128


def zero_word(zero: Int | None, dtype: str) -> Int:
    """What `integers` subtracts for a zero point, a small integer or None for 0."""
    if zero is None:
        return lane.integer(_ZERO[dtype] * _TWICE)
    return twice(zero + _ZERO[dtype])


def integer_pair(nibbles: Int, zero: Int, dtype: str) -> Int:
    """Two codes, each in the low four bits of a half, less their zero point."""
    bits = lane.flip_masked(nibbles, 15 * _TWICE, _ZERO[dtype] * _TWICE)
    return lane.half.subtract(bits, zero, dtype)


def integers(word: Int, zero: Int, dtype: str) -> list[Int]:
    """Eight codes less their zero point, as four words: nibbles 0 and 4, 1 and 5, and so on."""
    return [integer_pair(word >> (4 * i), zero, dtype) for i in range(4)]


def round_to_e4m3(nibbles: Int, scale: Int, dtype: str) -> Int:
    """``e4m3(scale * code)``, saturating, of two codes; `scale` is finite, in both halves.

    A product of an e4m3 scale and a code has at most eight bits. Below 2**-6, where e4m3 numbers
    are 2**-9 apart, it is a multiple of 2**-9: so rounding it to four bits is all that e4m3 does.
    """
    beyond = _BEYOND_E4M3[dtype]
    x = lane.half.multiply(integer_pair(nibbles, zero_word(None, dtype), dtype), scale, dtype)
    # To nearest, ties to even; the halves do not carry into each other.
    x = x + ((x >> beyond) & _TWICE) + ((1 << (beyond - 1)) - 1) * _TWICE
    x = x & (((1 << 16) - (1 << beyond)) * _TWICE)
    return lane.half.clip(x, lane.integer(_MOST_E4M3[dtype] * _TWICE), dtype)


def e4m3_scale(bits: Int, dtype: str) -> tuple[Int, Float]:
    """An e4m3 scale as a 16-bit float twice; and 1, or NaN if the scale is NaN."""
    value = lane.half.unpack(lane.half.from_e4m3(bits)[0], "float16")[0]
    return lane.half.pack(value, value, dtype), value * 0.0 + 1.0


def operands(rows: Sequence[Sequence[Int]]) -> list[list[Int]]:
    """Words of both rows of a lane, as the left operands of two instructions of 16 inputs."""
    first, second = rows
    return [[first[i], second[i], first[i + 1], second[i + 1]] for i in (0, 2)]


def token_words(low: Sequence[Int], high: Sequence[Int]) -> list[Int]:
    """A token's inputs in the order of `integers`.

    `low` are two words, inputs ``4 t`` to ``4 t + 3`` of 32; `high` those 16 further on.
    """
    return [
        lane.permute_bytes(low[i // 2], high[i // 2], 0x7632 if i % 2 else 0x5410) for i in range(4)
    ]


def scale_of(bits: Int, kind: str) -> Float:
    return lane.half.unpack(bits, kind)[0]


def _neighbours(first: Int, second: Int, place: Int) -> list[Int]:
    """Eight codes of a lane as four pairs of neighbours, each in the low four bits of a half.

    `first` and `second` are words `s` of the 16 bytes ``t // 2`` and ``t // 2 + 2`` of a row, where
    `t` is `place`, the lane's of four; see `load`.
    """
    # Inputs 2 t and 2 t + 1 of eight: of every 16 inputs a byte of the first half and the second.
    low = lane.permute_bytes(first, second, (place & 1) * 0x1111 + 0x6240)
    high = low >> 4
    return [lane.permute_bytes(low, high, i | ((4 + i) << 8)) for i in range(4)]


def load(
    codes: Any,
    scales: Any,
    zeros: Any | None,
    first: Any,
    dtype: str,
    kind: str,
    rounds: bool = False,
) -> tuple[list[list[Int]], list[Float]]:
    """A lane's part of 64 rows of a group of 128 inputs, for tokens that lie as they are.

    Matrix instructions of a warpgroup read tokens from shared memory, where of every eight inputs a
    lane's are the `t`-th two. Those of a row are in two of its four runs of 16 bytes.

    In shared memory: `codes`, uint8, 64 bytes a row, one after the other; one a row, `scales` of
    `kind` (``"e4m3"``, ``"bfloat16"`` or ``"float16"``) and `zeros`, int8 or None. `first` is the
    first of the rows. If it `rounds`, scales multiply the integers, with one rounding to `dtype`.
    Returns the words of eight instructions of 16 inputs, four each, and the factors of both rows'
    sums.
    """
    row, t = fragments.row_and_place()
    row = row + lane.scalar(first)
    rows, factors = [], []
    for half in range(2):
        at = row + 8 * half
        run = Pointer.to(codes).at(at * ROW_BYTES, (t >> 1) << 4)
        pairs = list(zip(run.words(4), run.at(32).words(4), strict=True))
        pairs_of_four = [_neighbours(a, b, t) for a, b in pairs]
        if kind == "e4m3":
            word, factor = e4m3_scale(Pointer.to(scales).at(at).byte(), dtype)
            words = [round_to_e4m3(x, word, dtype) for four in pairs_of_four for x in four]
        else:
            zero = None if zeros is None else signed(Pointer.to(zeros).at(at).byte())
            less = zero_word(zero, dtype)
            words = [integer_pair(x, less, dtype) for four in pairs_of_four for x in four]
            factor = scale_of(Pointer.to(scales).at(at << 1).half(), kind)
            if rounds:
                scale = lane.half.pack(factor, factor, dtype)
                words = [lane.half.multiply(x, scale, dtype) for x in words]
        rows.append(words)
        factors.append(factor)
    # Of instruction `u` words 2 u and 2 u + 1 of each row.
    first_row, second_row = rows
    instructions = [
        [first_row[i], second_row[i], first_row[i + 1], second_row[i + 1]]
        for i in range(0, len(first_row), 2)
    ]
    return instructions, factors


def operand(
    codes: Any,
    scales: Any,
    zeros: Any | None,
    first: Any,
    dtype: str,
    kind: str,
    rounds: bool = False,
) -> tuple[Any, Any]:
    """What `load` reads, as a register operand: int32 ``[64, 64]``, and float32 ``[64]``."""
    words, factors = load(codes, scales, zeros, first, dtype, kind, rounds)
    return fragments.carrier([x for four in words for x in four]), fragments.row_array(factors)
