"""Operands of paged attention's products, alike for all kinds of pages."""

from collections.abc import Callable
from typing import Any

from pallas_kernels.mosaic import _lane
from pallas_kernels.mosaic._lane import Int, Pointer
from pallas_kernels.mosaic._paged_types import Lane, parity

Convert = Callable[[Int], tuple[Int, Int]]
"""Of a word of a page: two operand words."""


def key_rows(keys: Pointer, row: int, held: int, lane: Lane, convert: Convert) -> Any:
    """Gives the operand words of two of the lane's tokens after the other, as they are taken.

    Args:
      keys: of a block, in shared memory.
      row: bytes of a token.
      held: tokens of the lane.
      lane: the lane.
      convert: words of the pages.
    """
    first = keys.at(lane.g * (held * row) + lane.t * (row // 4))
    return (
        [
            [w for word in first.at((lane.odd ^ j) * row).words(row // 16) for w in convert(word)]
            for j in (i, i + 1)
        ]
        for i in range(0, held, 2)
    )


def value_words(values: Pointer, row: int, held: int, lane: Lane) -> list[list[list[Int]]]:
    """Words of the lane's channels, of the tokens of both its lanes' scores, half after half."""
    loaded = []
    for half in (0, 1):
        g = (lane.t << 1) + half
        first = values.at(g * (held * row) + lane.g * (row // 8))
        odd = parity(g)
        loaded.append([first.at((odd ^ i) * row).words(row // 32) for i in range(held)])
    return loaded


def weight_words(planes: list[Int], lane: Lane) -> list[Int]:
    """Operand words of weights from the low and the high words of the lanes that computed them."""
    words = []
    for half in (0, 1):
        source = (((lane.t << 1) + half) << 2) + (lane.g >> 1)
        low, high = (_lane.from_lane(x, source) for x in planes)
        words.append((lane.g & 1).equals(1).where(high, low))
    return words
