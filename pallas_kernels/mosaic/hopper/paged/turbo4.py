"""turbo4 pages: how a warp multiplies with 4-bit codes that stand for 16 centroids.

Products are of int8. A code becomes its centroid, seven bits, by byte permutes of a table: a
selector nibble with its highest bit set gives the table's sign bits, which are 0, so the two halves
of the table are looked up in turn, the upper one with the codes' complements, and added. Queries
and weights are numbers of 15 bits, a high and a low byte in two columns. An entry of the table
stands for itself minus `Settings.middle`; what that offset contributes is known beforehand, and the
sums start from it.
"""

import dataclasses
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged import integers
from pallas_kernels.mosaic.hopper.paged.inputs import (
    Place,
    Program,
    Query,
    Settings,
    key_rows,
    value_words,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer

# Channels of eight that the two halves of a transposed word hold.
_CHANNELS = ((0, 2), (4, 6), (1, 3), (5, 7))


@dataclasses.dataclass(frozen=True, eq=False)
class Turbo4:
    """The products of a block in shared memory."""

    head_dim: int
    s: Settings
    table: list[Int]  # four words: the lower eight centroids, and the upper ones from the last on
    minus: Int  # -1, in a register

    @classmethod
    def of(cls, head_dim: int, s: Settings) -> "Turbo4":
        table = [*s.centroids[:8], *reversed(s.centroids[8:])]
        words = [int.from_bytes(bytes(table[i : i + 4]), "little") for i in range(0, 16, 4)]
        # Permutes take registers: of a constant the compiler makes a copy before every one of them.
        return cls(head_dim, s, [lane.held(word) for word in words], lane.held(-1))

    def look_up(self, word: Int) -> tuple[Int, Int]:
        """The centroids of the codes in a word's low half and in its high half."""
        a, b, c, d = self.table
        low, high = (
            # One of them is 0. Adding is done where multiplications are, and so is the complement:
            # permutes, shifts and logic are what one unit does, which has the most to do.
            lane.permute_bytes(a, b, x) + lane.permute_bytes(c, d, x * self.minus + self.minus)
            for x in (word, word >> 16)
        )
        return low, high

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """See `integers.query_operands`."""
        return integers.query_operands(x, self.s.middle, here)

    def unseen(self, slot: Pointer, begin: Int, at: Program, here: Place) -> list[Int]:
        """Empty: codes are finite, and norms of tokens that are not seen are not used."""
        del slot, begin, at, here
        return []

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        row = self.s.row_bytes(self.head_dim)
        pairs = key_rows(slot, row, self.s.held, here, self.look_up)
        norms = self.norms(slot.at(2 * self.s.block * row), here)
        return integers.scores(pairs, norms, query)

    def norms(self, pointer: Pointer, here: Place) -> list[Float]:
        """Norms of the lane's tokens, from those of a block."""
        held = self.s.held
        words = pointer.at(here.g * (2 * held)).words(held // 2)
        return integers.norms(words, (here.odd * 0x2222) ^ 0x3210)

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        nonfinite: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        del nonfinite
        row = self.s.row_bytes(self.head_dim)
        norms = self.norms(slot.at(2 * self.s.block * row + 2 * self.s.block), here)
        operands = []
        for p, seen in zip(weights, visible, strict=True):
            w = [v.where(x * n, 0.0) for v, x, n in zip(seen, p, norms, strict=True)]
            operands.append(integers.weight_operands(w, self.s.middle, here))
        return integers.weighted(self.value_rows(slot.at(self.s.block * row), here), operands)

    def value_rows(self, values: Pointer, here: Place) -> Any:
        """Yields operand words, two channels at a time, in the order of `channel`."""
        row, held = self.s.row_bytes(self.head_dim), self.s.held
        loaded = value_words(values, row, held, here)
        for j in range(row // 32):
            # [k-step][half of its tokens][pair of channels]
            codes = [
                [_transposed([loaded[half][k + b][j] for b in range(4)]) for half in (0, 1)]
                for k in range(0, held, 4)
            ]
            for pair in range(4):
                yield [
                    word
                    for step in codes
                    for half in (0, 1)
                    for word in self.look_up(step[half][pair])
                ]


def channel(number: int, here: Place, head_dim: int) -> Int:
    word, rest = divmod(number, 8)
    pair, half = divmod(rest, 2)
    return here.g * (head_dim // 8) + (8 * word + _CHANNELS[pair][half])


def _transposed(words: list[Int]) -> list[Int]:
    """Eight codes each of four tokens as four codes each of eight channels, see `_CHANNELS`."""
    even, odd = [], []
    for a, b in (words[:2], words[2:]):
        even.append((a & 0x0F0F0F0F) | ((b << 4) & 0xF0F0F0F0))
        odd.append(((a >> 4) & 0x0F0F0F0F) | (b & 0xF0F0F0F0))
    return [
        lane.permute_bytes(x[0], x[1], selector)
        for x in (even, odd)
        for selector in (0x5140, 0x7362)
    ]
