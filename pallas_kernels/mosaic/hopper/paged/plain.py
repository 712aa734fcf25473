"""Pages of bfloat16 or float16: how a warp multiplies with numbers as they are.

Products are of the pages' dtype, summed in float32. Queries have that dtype and need no second
part: both columns of one hold it, the second with neighbouring runs of channels in each other's
place, since lanes read keys so. Weights are sums of two numbers of that dtype.

A token's key or value takes 128 bytes or a multiple of it, so that those of all tokens begin in the
same bank, and no two lanes may read the same part of theirs at a time. Of keys, those of odd rows
`g` read every other run of channels first, and take their scores from the second column. Of values,
lane `t` begins with part `t` of four, and selects put them in order.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.floats import Floats
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Query, parity
from pallas_kernels.mosaic.lane import Float, Int, Pointer

# Bytes of a run of channels, of which each of four lanes reads a quarter.
_RUN = 64
# Parts of the channels that a lane has of a value.
_PARTS = 4
# The first numbers of two words, and the second.
_SELECTORS = (0x5410, 0x7632)


@dataclasses.dataclass(frozen=True, eq=False)
class Plain(Floats):
    """The products of a block in shared memory."""

    @property
    def dtype(self) -> str:
        return self.s.kind

    def query_operands(
        self, row: Pointer, here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        zero = lane.number(0.0)
        return self._runs(row, here), (zero, zero), zero, lane.number(1.0)

    def _runs(self, row: Pointer, here: Place) -> list[Int]:
        """The lane's words of a query or a key, in the order of row or column `g`."""
        first, turn = row.at(here.t << 4), here.g & 1
        return [w for i in range(self.row // _RUN) for w in first.at((turn ^ i) * _RUN).words(4)]

    def lost(self, word: Int) -> Int:
        smallest = 0x7F80 if self.s.kind == "bfloat16" else 0x7C00
        carried = (word & 0x7FFF7FFF) + (0x8000 - smallest) * 0x00010001
        return (carried >> 15) & 0x00010001

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        is_odd = (here.g & 1).equals(1)
        first = slot.at(here.g * (self.s.held * self.row))
        out: list[list[Float]] = [[] for _ in query.operands]
        for i in range(0, self.s.held, 2):
            pair = [self._runs(first.at((here.odd ^ j) * self.row), here) for j in (i, i + 1)]
            for tile, operands in enumerate(query.operands):
                c = [lane.number(0.0)] * 4
                for k in range(0, len(operands), 2):
                    a = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
                    c = lane.half.matmul(a, operands[k : k + 2], c, self.dtype)
                found = [is_odd.where(c[2 * j + 1], c[2 * j]) for j in (0, 1)]
                out[tile] += [x * query.factor[tile] for x in found]
        return out

    def value_rows(self, values: Pointer, here: Place) -> Iterator[list[Int]]:
        held, loaded = self.s.held, []
        for half in (0, 1):
            g = (here.t << 1) + half
            first = values.at(g * (held * self.row) + here.g * (self.row // 8))
            rows = [first.at((parity(g) ^ i) * self.row) for i in range(held)]
            loaded.append([self._in_order(row, here) for row in rows])
        for j in range(self.row // 32):
            yield [
                lane.permute_bytes(loaded[half][k][j], loaded[half][k + 1][j], selector)
                for k in range(0, held, 2)
                for half in (0, 1)
                for selector in _SELECTORS
            ]

    def _in_order(self, channels: Pointer, here: Place) -> list[Int]:
        size = self.row // 8 // _PARTS
        parts = [channels.at((here.t ^ i) * size).words(size // 4) for i in range(_PARTS)]
        for bit in (1, 2):
            is_turned = (here.t & bit).equals(bit)
            parts = [
                [is_turned.where(b, a) for a, b in zip(parts[i], parts[i ^ bit], strict=True)]
                for i in range(_PARTS)
            ]
        return [word for part in parts for word in part]
