"""Packed codes as float16 operands: ``(code + zero) * scale``, exactly.

A word of packed codes holds pairs of codes 16 bits apart. Masked where they lie, at bit `p` of each
half, they are tiny float16 numbers, ``code * 2**(p - 24)``, and one instruction makes
``code * scale + zero * scale`` of the two, times `UNIT`. These are integers of 8 bits with their
sign, times a power of two: nothing is rounded. Scales and zeros as float16 pairs are made once a
block, by all lanes of a warp together, in `scratch` in shared memory.
"""

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.types import Place, Shape
from pallas_kernels.mosaic.lane import Int, Pointer

UNIT = 2.0**-13  # factor of dequantized codes, by which their 1 is a normal float16
_TINY = 2.0**-24
# A byte below the upper bits of float16's 1,024 is that plus the byte.
_BYTES, _OFFSET, _SIGN = 0x00FF00FF, 0x64006400, 0x80808080
_SCALE = 32.0  # factor of the scales of codes at the highest position, 6


def scratch_bytes(head_dim: int) -> int:
    """Shared memory of one side's scales and zeros of a block, as float16."""
    return 4 * head_dim


def _position(bits: int, run: int) -> tuple[int, int]:
    """How far a run's codes are shifted up, and at which bit they are then.

    At bit 0, two bits times a scale of up to 127 would leave float16's range.
    """
    up = 2 if bits == 2 and run == 0 else 0
    return up, bits * run + up


def _boost(bits: int, run: int) -> float:
    """The factor of scales for codes of this run, applied after `_SCALE`."""
    return UNIT / (_TINY * _SCALE * 2.0 ** _position(bits, run)[1])


def code_pairs(word: Int, bits: int, run: int) -> tuple[Int, Int]:
    """Codes of one run at the bits where they are: of bytes 0 and 2, and of bytes 1 and 3."""
    up, position = _position(bits, run)
    mask = ((2**bits - 1) << position) * 0x10001
    even, odd = (word << up, word >> (8 - up)) if up else (word, word >> 8)
    return even & mask, odd & mask


def dequantized(codes: tuple[Int, Int], scales: list[Int], zeros: list[Int]) -> list[Int]:
    """``(code + zero) * scale`` of both pairs."""
    return [lane.half.fma(c, s, z) for c, s, z in zip(codes, scales, zeros, strict=True)]


def signed_bytes(word: Int) -> list[Int]:
    """Bytes 0 and 2, and bytes 1 and 3, as numbers times `UNIT`."""
    flipped = word ^ (_SIGN - 2**32)
    return [_numbers(flipped, shift, UNIT, 128) for shift in (0, 8)]


def _numbers(word: Int, shift: int, factor: float, less: int) -> Int:
    x = ((word >> shift if shift else word) & _BYTES) | _OFFSET
    constant = lane.half.constant
    return lane.half.fma(x, constant(factor), constant(-(1024 + less) * factor))


def _channels(scale: Int, zero: Int, boost: Int) -> list[Int]:
    """Scales and zeros of four channels as operands of `dequantized`: two pairs of each."""
    flipped, nothing = zero ^ (_SIGN - 2**32), lane.half.constant(-0.0)
    scales = [_numbers(scale, shift, _SCALE, 0) for shift in (0, 8)]
    zeros = [_numbers(flipped, shift, UNIT / _SCALE, 128) for shift in (0, 8)]
    zeros = [lane.half.fma(z, s, nothing) for z, s in zip(zeros, scales, strict=True)]
    return [*(lane.half.fma(s, boost, nothing) for s in scales), *zeros]


# Keys: a word is four channels of a token --------------------------------------------------------


def prepare_keys(
    shape: Shape, slot: Pointer, offsets: dict[str, int], scratch: Pointer, here: Place
) -> None:
    """Writes the scales and zeros of all channels to `scratch`; a lane writes four."""
    runs, count = 8 // shape.key_bits, shape.head_dim // 16
    span = shape.head_dim // runs
    for first in range(0, count, 8):
        number = (here.g & (count - 1)) + first
        run = number & (runs - 1)
        offset = run * span + here.t * (span // 4) + (number // runs << 2)
        boost = lane.half.constant(_boost(shape.key_bits, 0))
        for i in range(1, runs):
            other = lane.half.constant(_boost(shape.key_bits, i))
            boost = run.equals(i).where(other, boost)
        scale, zero = (slot.at(offset, offsets[x]).word() for x in ("key_scale", "key_zero"))
        scratch.at(((number << 2) + here.t) << 4).store_words(_channels(scale, zero, boost))


def key_channels(scratch: Pointer, number: int, here: Place) -> list[Int]:
    """Two pairs of scales and two of zeros, for word and run `number` of a token."""
    return scratch.at(here.t << 4, 64 * number).words(4)


def key_pairs(shape: Shape, words: list[Int], number: int, channels: list[Int]) -> list[Int]:
    """Operand words `number` of a token."""
    word, run = divmod(number, 8 // shape.key_bits)
    codes = code_pairs(words[word], shape.key_bits, run)
    return dequantized(codes, channels[:2], channels[2:])


# Values: a word is four tokens of a channel ------------------------------------------------------


def prepare_values(
    shape: Shape,
    slot: Pointer,
    offsets: dict[str, int],
    scratch: Pointer,
    here: Place,
    count: int,
    before: Int | int,
) -> None:
    """Writes the scales and zeros of a warp's channels to `scratch`, `count` times four a lane.

    `slot` holds the block, whose parts are at `offsets`; `before` is how many fours of channels
    other warps take of the same lane.
    """
    boost = lane.half.constant(_boost(shape.value_bits, 0))
    for first in range(0, count, 4):
        number = (here.t & (count - 1)) + first
        offset = here.g * (shape.head_dim // 8) + ((number + before) << 2)
        scale, zero = (
            lane.permute_bytes(slot.at(offset, offsets[x]).word(), 0, here.selector)
            for x in ("value_scale", "value_zero")
        )
        scratch.at(((number << 3) + here.g) << 4).store_words(_channels(scale, zero, boost))


def value_channels(scratch: Pointer, number: int, here: Place) -> list[Int]:
    """Two pairs of scales and two of zeros, for the lane's channels ``4 * number`` and on."""
    return scratch.at(here.g << 4, 128 * number).words(4)


def value_pairs(shape: Shape, words: list[Int], channels: list[Int], which: int) -> list[list[Int]]:
    """Operand words of one of the lane's channels, for each of its words and runs.

    `words` hold the channel's codes; it is number `which` of the four of `channels`, which
    `value_channels` gives.
    """
    runs, bits = 8 // shape.value_bits, shape.value_bits
    scales, zeros = channels[:2], channels[2:]
    zero = [lane.half.twice(zeros[which & 1], which >> 1)] * 2
    of_runs = []
    for run in range(runs):
        less = _boost(bits, run) / _boost(bits, 0)
        scale = scales[which & 1]
        if less != 1:
            scale = lane.half.fma(scale, lane.half.constant(less), lane.half.constant(-0.0))
        of_runs.append([lane.half.twice(scale, which >> 1)] * 2)
    return [
        dequantized(code_pairs(word, bits, run), of_runs[run], zero)
        for word in words
        for run in range(runs)
    ]


def channel_of(number: Int | int, column: Int, head_dim: int) -> Int:
    """The channel of column `column` of the second product's tile `number`."""
    return column * (head_dim // 8) + (number // 4 * 4) + ((column & 3) ^ (number % 4))
