"""INT4 weights as 16-bit operands of a matrix instruction, for tokens that stay as they are.

A lane reads eight codes of a row as a word. Its nibbles `i` and `i + 4` are masked into the low bits
of two 16-bit floats between 128 and 256 (bfloat16) or 1024 and 2048 (float16), whose unit is 1, and
what is too much is subtracted, the zero point with it: exact, two numbers in three instructions.

So of each 32 inputs the pair `i` of a lane, whose place is `t` of four, are the inputs ``4 t + i``
and ``16 + 4 t + i``, and tokens come in that order, too (`token_words`).
"""

from collections.abc import Sequence

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Float, Int

# A code of 0 between 128 and 256 in bfloat16, or 1024 and 2048 in float16: with 8 added to it.
_ZERO = {"bfloat16": 0x4308, "float16": 0x6408}
# Bits of a 16-bit float beyond the three that e4m3 has.
_BEYOND_E4M3 = {"bfloat16": 4, "float16": 7}
_TWICE = 0x00010001


def twice(x: Int) -> Int:
    """The 16 bits in both halves of a word."""
    return x * _TWICE


def zero_word(zero: Int | None, dtype: str) -> Int:
    """What `integers` subtracts for a zero point, a small integer; None for 0."""
    if zero is None:
        return lane.integer(_ZERO[dtype] * _TWICE)
    return twice(zero + _ZERO[dtype])


def integers(word: Int, zero: Int, dtype: str) -> list[Int]:
    """Eight codes less their zero point, as four words: nibbles 0 and 4, 1 and 5, and so on."""
    return [
        lane.half.subtract(
            ((word >> (4 * i)) & (15 * _TWICE)) ^ (_ZERO[dtype] * _TWICE), zero, dtype
        )
        for i in range(4)
    ]


def e4m3_values(word: Int, scale: Int, dtype: str) -> list[Int]:
    """The same of a group whose values are ``e4m3(scale * code)``, saturating.

    A product of an e4m3 scale and a code has at most eight bits. Below 2**-6, where e4m3 numbers
    are 2**-9 apart, it is a multiple of 2**-9: so rounding it to four bits is all that e4m3 does.

    Args:
      word: the codes.
      scale: finite, 16-bit, twice.
      dtype: of the results.
    """
    beyond = _BEYOND_E4M3[dtype]
    most = lane.integer({"bfloat16": 0x43E0, "float16": 0x5F00}[dtype] * _TWICE)
    out = []
    for pair in integers(word, zero_word(None, dtype), dtype):
        x = lane.half.multiply(pair, scale, dtype)
        # To nearest, ties to even; the halves do not carry into each other.
        x = x + ((x >> beyond) & _TWICE) + ((1 << (beyond - 1)) - 1) * _TWICE
        x = x & (((1 << 16) - (1 << beyond)) * _TWICE)
        out.append(lane.half.clip(x, most, dtype))
    return out


def operands(rows: Sequence[Sequence[Int]]) -> list[list[Int]]:
    """Words of both rows of a lane, as the left operands of two instructions of 16 inputs."""
    first, second = rows
    return [[first[i], second[i], first[i + 1], second[i + 1]] for i in (0, 2)]


def token_words(low: Sequence[Int], high: Sequence[Int]) -> list[Int]:
    """A token's inputs in the order of `integers`.

    Args:
      low: two words, inputs ``4 t`` to ``4 t + 3`` of 32.
      high: those 16 further on.
    """
    return [
        lane.permute_bytes(low[i // 2], high[i // 2], 0x7632 if i % 2 else 0x5410)
        for i in range(4)
    ]


def scale_of(bits: Int, kind: str) -> Float:
    """A scale of 16 bits as a float32."""
    return lane.half.unpack(bits, kind)[0]
