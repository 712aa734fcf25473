"""Operands of paged attention's products, alike for all kinds of pages."""

from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import Place, parity
from pallas_kernels.mosaic.lane import Float, Int, Pointer

_DOWN, _SMALLEST = 2.0**-16, 2.0**-100

Convert = Callable[[Int], Sequence[Int]]
"""From a word of a page to operand words."""


def key_rows(keys: Pointer, row: int, held: int, here: Place, convert: Convert) -> Any:
    """Yields operand words lazily, two of the lane's `held` tokens (of `row` bytes) at a time."""
    first = keys.at(here.g * (held * row) + here.t * (row // 4))
    return (
        [
            [w for word in first.at((here.odd ^ j) * row).words(row // 16) for w in convert(word)]
            for j in (i, i + 1)
        ]
        for i in range(0, held, 2)
    )


def value_words(values: Pointer, row: int, held: int, here: Place) -> list[list[list[Int]]]:
    """Words of the lane's channels, for the tokens of both its lanes' scores, half after half."""
    loaded = []
    for half in (0, 1):
        g = (here.t << 1) + half
        first = values.at(g * (held * row) + here.g * (row // 8))
        odd = parity(g)
        loaded.append([first.at((odd ^ i) * row).words(row // 32) for i in range(held)])
    return loaded


def weight_words(planes: list[Int], here: Place) -> list[Int]:
    """Operand words of weights from the low and the high words of the lanes that computed them."""
    words = []
    for half in (0, 1):
        source = (((here.t << 1) + half) << 2) + (here.g >> 1)
        low, high = (lane.from_lane(x, source) for x in planes)
        words.append((here.g & 1).equals(1).where(high, low))
    return words


def scaled(x: list[Float]) -> tuple[list[Float], Float]:
    """A query's numbers divided by their largest magnitude, and that; NaN unless all are finite.

    Numbers below ``2**-84`` become 0, which changes no score.
    """
    top, bad = lane.number(0.0), lane.number(0.0)
    for v in x:
        top = lane.maximum(top, lane.maximum(v, -v))
        # Zero, or NaN for what is not finite.
        bad = lane.fma(v, 0.0, bad)
    top = lane.reduce_lanes(top, lane.maximum, (1, 2))
    bad = lane.reduce_lanes(bad, lambda u, v: u + v, (1, 2))
    # Far from where a reciprocal overflows, or is flushed to 0.
    top = lane.maximum(top * _DOWN, lane.number(_SMALLEST))
    inverse = lane.reciprocal(top)
    return [v * _DOWN * inverse for v in x], (top + bad) * (1 / _DOWN)
