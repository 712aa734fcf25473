"""Pages of 8-bit floats: how a warp multiplies with e4m3 or e5m2.

Both are float16 numbers, so products are of float16, summed in float32. Queries and weights are
sums of two float16, in two columns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_kernels.mosaic import _lane, _lane_half
from pallas_kernels.mosaic._lane import Float, Int, Pointer
from pallas_kernels.mosaic._paged_query import largest
from pallas_kernels.mosaic._paged_types import Lane, Query, Settings, parity


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
        return cls(head_dim, s, _lane_half.from_e4m3 if is_e4m3 else _lane_half.from_e5m2)

    def query_operands(
        self, x: list[Float], lane: Lane
    ) -> tuple[list[Int], tuple[Any, Any], Float, Float]:
        """A query's operand words, its columns' starts, its offset, its scale."""
        top, inverse = largest(x)
        scaled = [v * inverse for v in x]
        planes = [_planes(scaled[k : k + 2]) for k in range(0, len(x), 2)]
        is_high = (lane.g & 1).equals(1)
        zero = _lane.number(0.0)
        return [is_high.where(high, low) for low, high in planes], (zero, zero), zero, top

    def scores(self, slot: Pointer, query: Query, lane: Lane) -> list[list[Float]]:
        """Scores of each tile's query `t` with the lane's tokens."""
        row, held = self.head_dim, self.s.held
        first = slot.at(lane.g * (held * row) + lane.t * (row // 4))
        out: list[list[Float]] = [[] for _ in query.operands]
        for i in range(0, held, 2):
            pair = [
                [
                    w
                    for word in first.at((lane.odd ^ j) * row).words(row // 16)
                    for w in self.convert(word)
                ]
                for j in (i, i + 1)
            ]
            for tile, operands in enumerate(query.operands):
                c = [*query.start[tile], *query.start[tile]]
                for k in range(0, len(operands), 2):
                    a = [pair[0][k], pair[1][k], pair[0][k + 1], pair[1][k + 1]]
                    c = _lane_half.matmul(a, operands[k : k + 2], c)
                out[tile] += [(c[2 * j] + c[2 * j + 1]) * query.factor[tile] for j in (0, 1)]
        return out

    def add_values(
        self,
        outputs: list[list[Float]],
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[_lane.Bool]],
        alphas: list[Float],
        lane: Lane,
    ) -> list[list[Float]]:
        """``outputs * alpha + weights x values``, for each tile's query `t`."""
        del visible  # weights of what is not seen are 0
        operands = [self._weight_operands(w, lane) for w in weights]
        zero = _lane.number(0.0)
        out: list[list[Float]] = [[] for _ in outputs]
        for rows in self._value_rows(slot.at(self.s.block * self.head_dim), lane):
            for tile, words in enumerate(operands):
                c = [zero] * 4
                for k in range(0, len(words), 2):
                    c = _lane_half.matmul(rows[2 * k : 2 * k + 4], words[k : k + 2], c)
                for j in (0, 1):
                    old = outputs[tile][len(out[tile])]
                    out[tile].append(_lane.fma(old, alphas[tile], c[2 * j] + c[2 * j + 1]))
        return out

    def _weight_operands(self, w: list[Float], lane: Lane) -> list[Int]:
        """Operand words of weights."""
        words = []
        for k in range(0, len(w), 2):
            planes = _planes(w[k : k + 2])
            for half in (0, 1):
                source = (((lane.t << 1) + half) << 2) + (lane.g >> 1)
                low, high = (_lane.from_lane(x, source) for x in planes)
                words.append((lane.g & 1).equals(1).where(high, low))
        return words

    def _value_rows(self, values: Pointer, lane: Lane) -> Any:
        """Yields the operand words of two channels after the other, in the order of `channel`."""
        row, held = self.head_dim, self.s.held
        per_lane = row // 8
        loaded = []
        for half in (0, 1):
            g = (lane.t << 1) + half
            first = values.at(g * (held * row) + lane.g * per_lane)
            odd = parity(g)
            loaded.append([first.at((odd ^ i) * row).words(per_lane // 4) for i in range(held)])
        for j in range(per_lane // 4):
            for selector in (0x5140, 0x7362):
                yield [
                    word
                    for k in range(0, held, 2)
                    for half in (0, 1)
                    for word in self.convert(
                        _lane.permute_bytes(loaded[half][k][j], loaded[half][k + 1][j], selector)
                    )
                ]


def channel(number: int, lane: Lane, head_dim: int) -> Int:
    """The channel of a lane's output `number`."""
    return lane.g * (head_dim // 8) + number


def _planes(x: list[Float]) -> tuple[Int, Int]:
    """Two numbers as float16, and what is left of them: the low word first."""
    high = _lane_half.pack(x[0], x[1])
    first, second = _lane_half.unpack(high)
    return _lane_half.pack(x[0] - first, x[1] - second), high
