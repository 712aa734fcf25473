"""Pages of 8-bit floats: how a warp multiplies with e4m3 or e5m2.

All their values are float16 numbers, so products are of float16, summed in float32. Queries and
weights are sums of two float16, in two columns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Program, Query, Settings
from pallas_kernels.mosaic.hopper.paged.operands import (
    key_rows,
    scaled,
    value_words,
    weight_words,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8:
    """The products of a block in shared memory.

    Attributes:
      head_dim: `H`.
      s: settings.
      convert: four 8-bit floats of a word as two words of float16.
    """

    head_dim: int
    s: Settings
    convert: Callable[[Int], tuple[Int, Int]]

    @classmethod
    def of(cls, head_dim: int, s: Settings) -> "Fp8":
        """For `s.kind`."""
        is_e4m3 = s.kind == "fp8_e4m3"
        return cls(head_dim, s, lane.half.from_e4m3 if is_e4m3 else lane.half.from_e5m2)

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """A query's operand words, its columns' starts, its offset, its scale."""
        x, top = scaled(x)
        planes = [_planes(x[k : k + 2]) for k in range(0, len(x), 2)]
        is_high = (here.g & 1).equals(1)
        zero = lane.number(0.0)
        return [is_high.where(high, low) for low, high in planes], (zero, zero), zero, top

    def unseen(self, slot: Pointer, begin: Int, at: Program, here: Place) -> list[Int]:
        """Prepares a block of which some query may not see all: the rows of values that are lost.

        A product takes what a query does not see as 0 times it, so what is not finite there, or
        lies past the sequence's end, is made 0 in shared memory. A query that does see it gets NaN
        because of the bits that this returns, one for each token of the block.
        """
        values = slot.at(self.s.block * self.head_dim)
        zero, first = lane.integer(0), at.begin + 1
        is_mixed = begin + self.s.block > first
        if self.s.window is not None:
            is_mixed = is_mixed | (begin >= zero)
        words = self.s.block // 32

        def prepare(_: Int, lost: list[Int]) -> list[Int]:
            lost = []
            for i in range(words):
                token = here.number + 32 * i
                row = values.at(token * self.head_dim)
                found = [self._lost(word) for word in row.words(self.head_dim // 4)]
                bad = functools.reduce(lambda a, b: a | b, found)
                is_lost, is_past = bad > 0, begin + token >= at.length
                with lane.when(is_lost | is_past):
                    for word in range(self.head_dim // 4):
                        row.at(4 * word).store(zero)
                lost.append(lane.ballot(is_lost))
            lane.publish_stores()
            lane.warp_barrier()
            return lost

        once = is_mixed.where(lane.integer(1), 0)
        return lane.loop(zero, once, 1, [zero] * words, prepare)

    def _lost(self, word: Int) -> Int:
        """Positive if some byte of a word is not finite, else 0."""
        smallest = 0x7F if self.s.kind == "fp8_e4m3" else 0x7C
        carried = (word & 0x7F7F7F7F) + (128 - smallest) * 0x01010101
        return (carried >> 7) & 0x01010101

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        """Scores of each tile's query `t` with the lane's tokens."""
        out: list[list[Float]] = [[] for _ in query.operands]
        for pair in key_rows(slot, self.head_dim, self.s.held, here, self.convert):
            for tile, operands in enumerate(query.operands):
                c = [*query.start[tile], *query.start[tile]]
                for k in range(0, len(operands), 2):
                    a = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
                    c = lane.half.matmul(a, operands[k : k + 2], c)
                out[tile] += [(c[2 * j] + c[2 * j + 1]) * query.factor[tile] for j in (0, 1)]
        return out

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        lost: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        """``weights x values``, for each tile's query `t`."""
        zero, nan = lane.number(0.0), lane.number(float("nan"))
        starts = [self._sees(lost, seen, here).where(nan, 0.0) for seen in visible]
        operands = [self._weight_operands(w, here) for w in weights]
        out: list[list[Float]] = [[] for _ in weights]
        for rows in self._value_rows(slot.at(self.s.block * self.head_dim), here):
            for tile, words in enumerate(operands):
                c = [starts[tile], zero] * 2
                for k in range(0, len(words), 2):
                    c = lane.half.matmul(rows[2 * k : 2 * k + 4], words[k : k + 2], c)
                out[tile] += [c[2 * j] + c[2 * j + 1] for j in (0, 1)]
        return out

    def _sees(self, lost: list[Int], seen: list[lane.Bool], here: Place) -> lane.Bool:
        """Whether a query sees one of the tokens whose bits are set."""
        first = here.g * self.s.held
        bits = lost[0] if len(lost) == 1 else (here.g < 4).where(lost[0], lost[1])
        bits = bits >> (first & 31)
        found = [mask.where((bits >> (here.odd ^ i)) & 1, 0) for i, mask in enumerate(seen)]
        hit = functools.reduce(lambda a, b: a | b, found)
        return lane.reduce_lanes(hit, lambda a, b: a | b, (4, 8, 16)) > 0

    def _weight_operands(self, w: list[Float], here: Place) -> list[Int]:
        """Operand words of weights."""
        words = []
        for k in range(0, len(w), 2):
            words += weight_words(list(_planes(w[k : k + 2])), here)
        return words

    def _value_rows(self, values: Pointer, here: Place) -> Any:
        """Yields the operand words of two channels after the other, in the order of `channel`."""
        row, held = self.head_dim, self.s.held
        loaded = value_words(values, row, held, here)
        for j in range(row // 32):
            for selector in (0x5140, 0x7362):
                yield [
                    word
                    for k in range(0, held, 2)
                    for half in (0, 1)
                    for word in self.convert(
                        lane.permute_bytes(loaded[half][k][j], loaded[half][k + 1][j], selector)
                    )
                ]


def channel(number: int, here: Place, head_dim: int) -> Int:
    """The channel of a lane's output `number`."""
    return here.g * (head_dim // 8) + number


def _planes(x: list[Float]) -> tuple[Int, Int]:
    """Two numbers as float16, and what is left of them: the low word first."""
    high = lane.half.pack(x[0], x[1])
    first, second = lane.half.unpack(high)
    return lane.half.pack(x[0] - first, x[1] - second), high
