"""The queries of a decode program: loaded and quantized by every warp for itself.

Stage 1 with the bits of `turbojax.quantizers`: one scale for each query.
"""

import struct
from typing import Any

from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode.block import channel_words
from pallas_kernels.mosaic.hopper.decode.types import INT8_RANGE, Place, Query, Shape
from pallas_kernels.mosaic.lane import Float, Int

_TINY = 1.1754943508222875e-38
_INFINITY = float("inf")


def _float32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def load_query(
    a: warp.Arrays, at: warp.Program, shape: Shape, here: Place, factor: float, unit: float
) -> Query:
    """Loads and quantizes a program's queries; row ``head * T + token`` of its KV head."""
    width = 4 if a.dtype == "float32" else 2
    codes, scales, positions = [], [], []
    for number in range(shape.score_tiles):
        base = at.tile * shape.rows + 4 * number
        row = (base + (here.g >> 1)).minimum(a.rows - 1)
        index = (
            (at.batch * a.tokens + row % a.tokens) * a.heads + at.head * a.group + row // a.tokens
        )
        words = channel_words(
            a.query.times(index, a.head_dim * width), here, a.head_dim, shape.key_bits, width
        )
        x = [v for word in words for v in warp.numbers(word, a.dtype)]
        # The factor of the scores stays positive, so that it does not move the maximum.
        x = x if factor >= 0 else [-v for v in x]
        scale = row_scale(x)
        quantized = [row_code(v, scale) for v in x]
        codes.append(
            [
                [(c & 255) << (8 * i) for i, c in enumerate(quantized[k : k + 4])]
                for k in range(0, len(quantized), 4)
            ]
        )
        scales.append(lane.from_lane(scale, here.t << 3) * (abs(factor) * unit))
        positions.append(warp.position(base, here, a, at))
    return Query(codes, scales, positions)


def row_scale(x: list[Float]) -> Float:
    """Stage 1's scale (`scale_from_maximum`) of the row that four lanes share."""
    magnitudes = [lane.maximum(v, -v) for v in x]
    top: Any = magnitudes[0]
    bad: Any = lane.number(0.0)
    for v, m in zip(x, magnitudes, strict=True):
        top = lane.maximum(top, m)
        # Zero, or NaN for what is not finite.
        bad = lane.fma(v, 0.0, bad)
    top = lane.reduce_lanes(top, lane.maximum, (1, 2))
    bad = lane.reduce_lanes(bad, lambda a, b: a + b, (1, 2))
    scale = ((top * _float32(1 / INT8_RANGE)).as_int() + 255) & -256
    value = scale.as_float()
    return (value < _TINY).where(1.0, value) + bad


def row_code(x: Float, scale: Float) -> Int:
    """``rint(x / scale)``, made exact by comparisons (`turbojax.numerics.int8`)."""
    limit = INT8_RANGE
    quotient = lane.minimum(lane.maximum(x / scale, lane.number(-limit)), lane.number(limit))
    shifted = quotient + lane.ROUNDER
    code, guess = shifted.as_int() - 0x4B400000, shifted - lane.ROUNDER
    rest, half = x - guess * scale, scale * 0.5
    is_odd = (code & 1).equals(1)
    above = (rest > half) | (is_odd & rest.equals(half))
    below = (rest < -half) | (is_odd & rest.equals(-half))
    code = code + above.where(lane.integer(1), 0) - below.where(lane.integer(1), 0)
    return code.maximum(-int(limit)).minimum(int(limit))
