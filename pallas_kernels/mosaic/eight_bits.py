"""Numbers of a lane to 8 bits: scales and codes with the bits of `turbojax.quantizers`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.layouts import E4M3_MAX, INT8_RANGE, float32
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Bool, Float, Int

_INFINITY_BITS = 0x7F800000
_ROUNDER_BITS = 0x4B400000
_MAGNITUDE, _MAGNITUDES = 0x7FFFFFFF, 0x7FFF7FFF
_TINY = 2.0**-126
_RECIPROCAL_MAX = float32(1 / E4M3_MAX)
# Fractions of 1 to which quotients are rounded first, where they are rounded twice.
_UNITS = 2**15
# Bits of a float32's pattern that are 0 where a scale has no more significant bits than a value.
_FREE_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}


def is_finite(magnitude: Float) -> Bool:
    return magnitude.as_int() < _INFINITY_BITS


def scale_of(maximum: Float, is_int8: bool) -> Float:
    """The scale of values up to `maximum` in absolute value; NaN if that is not finite."""
    nan = float("nan")
    if not is_int8:
        scale = maximum * (1 / E4M3_MAX)
        scale = (scale < _TINY).where(1.0, scale)
        return is_finite(maximum).where(scale, nan)
    # Rounded up to 16 significant bits.
    scale = (((maximum * (1 / INT8_RANGE)).as_int() + 255) & ~255).as_float()
    scale = (scale < _TINY).where(1.0, scale)
    return is_finite(maximum).where(scale, nan)


def largest_bits(words: Sequence[Int], dtype: str) -> Int:
    """The largest bits of absolute values in words of ``"float32"`` or a 16-bit type.

    They are in the order of the values; NaN and infinity are above all others.
    """
    if dtype == "float32":
        return lane.tree([w & _MAGNITUDE for w in words], lambda a, b: a.maximum(b))
    found = lane.tree([w & _MAGNITUDES for w in words], lane.maxima_of_halves)
    return (found & 0xFFFF).maximum(found >> 16)


def token_scale(bits: Int, dtype: str) -> Float:
    """A token's bfloat16 scale from `largest_bits`: NaN unless all are finite, 1 for zeros."""
    largest = bits.as_float()
    if dtype != "float32":
        largest, _ = lane.half.unpack(bits, dtype)
    scale = lane.maximum(largest * _RECIPROCAL_MAX, lane.number(_TINY))
    scale = (largest < _TINY).where(1.0, scale)
    scale = is_finite(largest).where(scale, float("nan"))
    rounded, _ = lane.half.unpack(lane.half.pack(scale, scale, "bfloat16"), "bfloat16")
    return rounded


def may_meet_halves(scale: Float, dtype: str) -> Bool:
    """Whether a 16-bit value over `scale` can be exactly halfway between integers.

    Then `exact_code` is needed. `scale` has 16 significant bits. A product with the reciprocal,
    rounded once, is on the right side of a half that the quotient does not hit: it is off by less
    than 2**-18.1 of the scale's mantissa, and the quotient of a value of at most 11 bits by a scale
    of 16 is at least 2**-16 over that mantissa away. It can hit one only if the scale has as few
    bits as the value.
    """
    return (scale.as_int() & _FREE_BITS[dtype]).equals(0)


def exact_code(x: Float, scale: Float, inverse: Float) -> Int:
    """``x / scale`` rounded half to even, plus `ROUNDER`: the code is the result's low byte.

    The remainder of a first guess, exact because the scale has 16 bits, decides whether it is
    right.
    """
    shifted = x.fma(inverse, lane.number(lane.ROUNDER))
    guess = shifted + -lane.ROUNDER
    rest = guess.fma(-scale, x)
    # Past half a scale, or at it from an odd guess, the neighbour is right.
    odd = shifted.as_int() & 1
    limit = ((scale * 0.5).as_int() - odd + 1).as_float()
    past = lane.absolute(rest) >= limit
    step = (rest < 0.0).where(lane.integer(-1), 1)
    return shifted.as_int() + past.where(step, 0)


def clamped_code(x: Float, scale: Float) -> Int:
    """The code for a scale that was fixed before; finite values beyond its range become +-119."""
    largest = scale * 128.0  # larger quotients are clamped anyway
    x = lane.minimum(lane.maximum(x, -largest), largest)
    code = exact_code(x, scale, lane.number(1.0) / scale) - _ROUNDER_BITS
    return code.minimum(int(INT8_RANGE)).maximum(-int(INT8_RANGE))


def int8_word(x: Sequence[Float], scale: Float, inverse: Float, exact: bool) -> Int:
    """The codes of four numbers; if not `exact`, rounded as `may_meet_halves` allows."""
    if exact:
        return lane.pack_bytes([exact_code(v, scale, inverse) for v in x])
    rounder = lane.number(lane.ROUNDER)
    return lane.pack_bytes([v.fma(inverse, rounder).as_int() for v in x])


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """Rounds 16-bit values to int8 codes, exactly and without a branch, in two sums each.

    Where quotients may be exact halves they are rounded to 15 fractional bits first. That restores
    halves that the product with the reciprocal has missed: it is off by less than 120 * 2**-24, a
    quarter of such a unit. It creates no new halves: a quotient of 11-bit numbers that is not a
    half is at least 1.6 units away from one. Elsewhere the factor is 1, and the second sum changes
    nothing.
    """

    factor: Float  # the reciprocal of the scale, times `unit`
    unit: Float  # what a quotient is multiplied by
    offset: Float  # added in the second sum, which leaves `ROUNDER` plus the code

    @classmethod
    def of(cls, scale: Float, dtype: str) -> "Rounding":
        """For ``"bfloat16"`` or ``"float16"`` values and a scale of 16 significant bits."""
        meets = may_meet_halves(scale, dtype)
        factor = meets.where(lane.number(float(_UNITS)), 1.0)
        offset = meets.where(lane.number(lane.ROUNDER - lane.ROUNDER / _UNITS), 0.0)
        unit = meets.where(lane.number(1 / _UNITS), 1.0)
        return cls(lane.rounded_quotient(factor, scale), unit, offset)

    def sums(self, x: Sequence[Float]) -> list[Float]:
        """`ROUNDER` plus codes of numbers."""
        rounder = lane.number(lane.ROUNDER)
        return [v.fma(self.factor, rounder).fma(self.unit, self.offset) for v in x]

    def word(self, x: Sequence[Float]) -> Int:
        return lane.pack_bytes([v.as_int() for v in self.sums(x)])


def e4m3_word(x: Sequence[Float], inverse: Float) -> Int:
    """The e4m3 codes of four numbers, which are at most 448 times the scale."""
    return lane.pack_e4m3([v * inverse for v in x])


def int8_numbers(word: Int) -> list[Float]:
    # Each byte in the low bits of `ROUNDER`.
    positive = word ^ 0x80808080
    shifted = [lane.permute_bytes(positive, _ROUNDER_BITS, 0x7650 | i) for i in range(4)]
    return [x.as_float() - (lane.ROUNDER + 128.0) for x in shifted]


def e4m3_numbers(word: Int) -> list[Float]:
    return [x for half in lane.half.from_e4m3(word) for x in lane.half.unpack(half)]


Rounded = tuple[Int, list[Float]]  # A word of four codes, and the numbers that they stand for


def rounding_of(scale: Float, is_int8: bool, dtype: str) -> Callable[[Sequence[Float]], Rounded]:
    """A function that rounds four numbers of type `dtype`; see `if_known` for a scale of NaN.

    `scale` is as `scale_of` gives it; codes are e4m3 if not `is_int8`.
    """
    if is_int8:
        sums_of = _int8_sums(scale, dtype)

        def to_int8(x: Sequence[Float]) -> Rounded:
            sums = sums_of(x)
            return lane.pack_bytes([v.as_int() for v in sums]), [v + -lane.ROUNDER for v in sums]

        return to_int8
    inverse = lane.divide(lane.number(1.0), scale)

    def to_e4m3(x: Sequence[Float]) -> Rounded:
        word = e4m3_word(x, inverse)
        return word, e4m3_numbers(word)

    return to_e4m3


def _int8_sums(scale: Float, dtype: str) -> Callable[[Sequence[Float]], list[Float]]:
    """A function that returns `ROUNDER` plus the codes of numbers."""
    if dtype != "float32":
        return Rounding.of(scale, dtype).sums
    inverse = lane.number(1.0) / scale
    return lambda x: [exact_code(v, scale, inverse).as_float() for v in x]


def if_known(
    scale: Float, kinds: Sequence[type], known: Callable[[], list[Any]], unknown: list[Any]
) -> list[Any]:
    """What `known` computes, or `unknown` where the scale is NaN; the choice is a branch.

    Two such branches are not merged, because the compiler does not see that they have the same
    condition. Otherwise it would unpack all of a lane's values before it rounds the first, in twice
    the registers, which determine how many programs run at once.
    """
    own = lane.uniform(scale.as_int()).as_float()
    return lane.either(is_finite(own), kinds, known, lambda: unknown)
