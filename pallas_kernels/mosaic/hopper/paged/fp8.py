"""Pages of 8-bit floats: how a warp multiplies with e4m3 or e5m2.

All their values are float16 numbers, so products are of float16, summed in float32. Queries and
weights are sums of two float16, in two columns.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.floats import Floats, planes
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Query
from pallas_kernels.mosaic.hopper.paged.operands import key_rows, scaled, value_words
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8(Floats):
    """The products of a block in shared memory."""

    @property
    def dtype(self) -> str:
        return "float16"

    def convert(self, word: Int) -> tuple[Int, Int]:
        half = lane.half
        return (half.from_e4m3 if self.s.kind == "fp8_e4m3" else half.from_e5m2)(word)

    def query_operands(
        self, x: list[Float], here: Place
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        x, top = scaled(x)
        pairs = [planes(x[k : k + 2], self.dtype) for k in range(0, len(x), 2)]
        is_high = (here.g & 1).equals(1)
        zero = lane.number(0.0)
        return [is_high.where(high, low) for low, high in pairs], (zero, zero), zero, top

    def lost(self, word: Int) -> Int:
        smallest = 0x7F if self.s.kind == "fp8_e4m3" else 0x7C
        carried = (word & 0x7F7F7F7F) + (128 - smallest) * 0x01010101
        return (carried >> 7) & 0x01010101

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        out: list[list[Float]] = [[] for _ in query.operands]
        for pair in key_rows(slot, self.row, self.s.held, here, self.convert):
            for tile, operands in enumerate(query.operands):
                c = [*query.start[tile], *query.start[tile]]
                for k in range(0, len(operands), 2):
                    a = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
                    c = lane.half.matmul(a, operands[k : k + 2], c)
                out[tile] += [(c[2 * j] + c[2 * j + 1]) * query.factor[tile] for j in (0, 1)]
        return out

    def value_rows(self, values: Pointer, here: Place) -> Iterator[list[Int]]:
        held = self.s.held
        loaded = value_words(values, self.row, held, here)
        for j in range(self.row // 32):
            for selector in (0x5140, 0x7362):
                yield [
                    word
                    for k in range(0, held, 2)
                    for half in (0, 1)
                    for word in self.convert(
                        lane.permute_bytes(loaded[half][k][j], loaded[half][k + 1][j], selector)
                    )
                ]
