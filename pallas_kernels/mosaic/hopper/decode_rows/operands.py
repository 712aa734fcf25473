"""Packed codes as operands, exactly: of keys in float16, of values in bytes.

A word of packed keys holds pairs of codes 16 bits apart. Masked where they lie, at bit `p` of each
half, they are tiny float16 numbers, ``code * 2**(p - 24)``. Codes of 4 bits are operands as they
are: the queries are multiplied by the channels' scales, once a block, which takes 11 bits. Of other
codes one instruction makes ``code * scale + zero * scale``, two at a time, times `UNIT`. Either way
scores are integers times `UNIT`: nothing is rounded.

A word of packed values holds codes of one channel. One multiplication makes
``code * scale + zero * scale + 128`` of four of them, bytes without a sign that do not reach into
each other.

Scales and zeros are prepared once a block, by all lanes of a warp together, in `scratch` in shared
memory.
"""

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.types import Place, Shape
from pallas_kernels.mosaic.lane import Int, Pointer

UNIT = 2.0**-19  # factor of scores, with which scaled queries are within float16's range
_TINY = 2.0**-24
# A byte below the upper bits of float16's 1,024 is that plus the byte.
_BYTES, _OFFSET, _SIGN = 0x00FF00FF, 0x64006400, 0x80808080
_SCALE = 32.0  # factor of the scales of codes at the highest position, 6
_EVERY_BYTE, VALUE_OFFSET = 0x01010101, 128  # of values, added so that their bytes have no sign


def scratch_bytes(head_dim: int) -> int:
    """Shared memory of one side's scales and zeros of a block."""
    return 8 * head_dim


def _boost(bits: int, run: int) -> float:
    """The factor of scales for codes of this run, applied after `_SCALE`."""
    return UNIT / (_TINY * _SCALE * 2.0 ** (bits * run))


def code_pairs(word: Int, bits: int, run: int) -> tuple[Int, Int]:
    """Codes of one run at the bits where they are: of bytes 0 and 2, and of bytes 1 and 3."""
    mask = ((2**bits - 1) << (bits * run)) * 0x10001
    return word & mask, (word >> 8) & mask


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


def scales_queries(shape: Shape) -> bool:
    """Whether queries are multiplied by the scales of keys, and keys are not.

    Of 4 bits scales are 16 at most, so that products with queries, 119 at most, are exact. More
    than 16 queries would be as many products as keys are, and too many registers.
    """
    return shape.key_bits == 4 and shape.rows == 16


def _channels(scale: Int, zero: Int, boosts: tuple[Int, Int], is_scaled: bool) -> list[Int]:
    """Scales and zeros of four channels, two pairs of each.

    They are operands of `dequantized`, or zeros are as codes are, and scales factors of queries.
    `boosts` are the scales' factor and its inverse.
    """
    flipped, multiply = zero ^ (_SIGN - 2**32), lane.half.multiply
    scales = [_numbers(scale, shift, _SCALE, 0) for shift in (0, 8)]
    zeros = [_numbers(flipped, shift, UNIT / _SCALE, 128) for shift in (0, 8)]
    of_zeros = [boosts[1]] * 2 if is_scaled else scales
    return [
        *(multiply(s, boosts[0]) for s in scales),
        *(multiply(z, factor) for z, factor in zip(zeros, of_zeros, strict=True)),
    ]


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
        boosts = [_boost(shape.key_bits, i) for i in range(runs)]
        boost, inverse = (_of_run(run, x) for x in (boosts, [1 / x for x in boosts]))
        scale, zero = (slot.at(offset, offsets[x]).word() for x in ("key_scale", "key_zero"))
        channels = _channels(scale, zero, (boost, inverse), scales_queries(shape))
        scratch.at(((number << 2) + here.t) << 4).store_words(channels)


def _of_run(run: Int, values: list[float]) -> Int:
    """One of `values`, twice as float16."""
    found = lane.half.constant(values[0])
    for i, x in enumerate(values[1:], 1):
        found = run.equals(i).where(lane.half.constant(x), found)
    return found


def key_channels(scratch: Pointer, number: int, here: Place) -> list[Int]:
    """Two pairs of scales and two of zeros, see `_channels`, for word and run `number`."""
    return scratch.at(here.t << 4, 64 * number).words(4)


def key_pairs(shape: Shape, words: list[Int], number: int, channels: list[Int]) -> list[Int]:
    """Operand words `number` of a token."""
    word, run = divmod(number, 8 // shape.key_bits)
    codes = code_pairs(words[word], shape.key_bits, run)
    if scales_queries(shape):
        return list(codes)
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
    for first in range(0, count, 4):
        number = (here.t & (count - 1)) + first
        offset = here.g * (shape.head_dim // 8) + ((number + before) << 2)
        scale, zero = (
            lane.permute_bytes(slot.at(offset, offsets[x]).word(), 0, here.selector)
            for x in ("value_scale", "value_zero")
        )
        scales, zeros = ([lane.signed_byte(x, i) for i in range(4)] for x in (scale, zero))
        place = scratch.at(((number << 3) + here.g) << 4)
        place.store_words(scales)
        place.at(4 * shape.head_dim).store_words(
            [(s * z + VALUE_OFFSET) * _EVERY_BYTE for s, z in zip(scales, zeros, strict=True)]
        )


def value_channels(
    shape: Shape, scratch: Pointer, number: int, here: Place
) -> list[tuple[Int, Int]]:
    """Scale and offset of each of the lane's channels ``4 * number`` and on."""
    place = scratch.at(here.g << 4, 128 * number)
    return list(zip(place.words(4), place.at(4 * shape.head_dim).words(4), strict=True))


def value_words(shape: Shape, words: list[Int], channel: tuple[Int, Int]) -> list[Int]:
    """Operand words of a channel, for each of its `words` and runs, plus `VALUE_OFFSET`."""
    scale, offset = channel
    mask, bits = (2**shape.value_bits - 1) * _EVERY_BYTE, shape.value_bits
    return [
        ((word >> shift if shift else word) & mask) * scale + offset
        for word in words
        for shift in range(0, 8, bits)
    ]


def plain_value(word: Int) -> Int:
    """Four values of 8 bits, plus `VALUE_OFFSET`."""
    return word ^ (_SIGN - 2**32)


def channel_of(number: Int | int, column: Int, head_dim: int) -> Int:
    """The channel of column `column` of the second product's tile `number`."""
    return column * (head_dim // 8) + (number // 4 * 4) + ((column & 3) ^ (number % 4))
