"""The rotation of turbo4's vectors, as `turbojax.polar.rotate` has it, by all lanes of a warp.

Sums of pairs in the same order as there, so that the bits are the same.
"""

import math

from pallas_kernels.layouts import float32
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Float, Int, Pointer

_LANES = 32


def rotated(x: list[Float], signs: Pointer, lane_number: Int) -> list[Float]:
    """A vector rotated; `x` is this lane's run of channels, where `signs`, float32, begin."""
    flipped = [v * s for v, s in zip(x, _floats(signs, len(x)), strict=True)]
    return _hadamard(flipped, lane_number)


def unrotated(x: list[Float], signs: Pointer, lane_number: Int) -> list[Float]:
    product = _hadamard(x, lane_number)
    return [v * s for v, s in zip(product, _floats(signs, len(x)), strict=True)]


def _floats(pointer: Pointer, count: int) -> list[Float]:
    return [word.as_float() for word in pointer.words(count)]


def _hadamard(x: list[Float], lane_number: Int) -> list[Float]:
    """The product with Sylvester's matrix divided by the root of its order."""
    x = hadamard(x, lane_number, _LANES)
    scale = float32(1 / math.sqrt(len(x) * _LANES))
    return [v * scale for v in x]


def hadamard(x: list[Float], place: Int, lanes: int) -> list[Float]:
    """The product with Sylvester's matrix, in additions only; `x` is this lane's run of channels.

    A vector is in `lanes` lanes, of which this is number `place`; both numbers are powers of two.
    """
    half = 1
    while half < len(x):
        pairs = [(x[i & ~half], x[i | half], i & half) for i in range(len(x))]
        x = [a - b if is_upper else a + b for a, b, is_upper in pairs]
        half *= 2
    distance = 1
    while distance < lanes:
        sign = (place & distance).equals(0).where(lane.number(1.0), -1.0)
        x = [lane.fma(v, sign, lane.partner(v, distance)) for v in x]
        distance *= 2
    return x
