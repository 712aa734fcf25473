"""What pages of 8-bit and of 16-bit floats have in common: how weights are multiplied with values.

Products are of 16-bit floats, summed in float32. Weights are sums of two such numbers, a high and a
low part in two columns.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import (
    Place,
    Program,
    Query,
    Settings,
    key_rows,
    multiplied,
    parity,
    scaled,
    summed,
    value_words,
    weight_words,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Floats(abc.ABC):
    """The products of a block in shared memory."""

    head_dim: int
    s: Settings

    @property
    @abc.abstractmethod
    def dtype(self) -> str:
        """The dtype of the products' operands, ``"float16"`` or ``"bfloat16"``."""

    @abc.abstractmethod
    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        """Scores of each tile's query `t` with the lane's tokens."""

    @abc.abstractmethod
    def value_rows(self, values: Pointer, here: Place) -> Iterator[list[Int]]:
        """Yields operand words, two channels at a time, in the order of `channel`."""

    @abc.abstractmethod
    def nonfinite(self, word: Int) -> Int:
        """Positive if a number in a word is not finite, else 0."""

    @property
    def row(self) -> int:
        return self.s.row_bytes(self.head_dim)

    def _matmul(self, a: Sequence[Int], b: Sequence[Int], c: Sequence[Float]) -> list[Float]:
        return lane.half.matmul(a, b, c, self.dtype)

    def unseen(self, slot: Pointer, begin: Int, at: Program, here: Place) -> list[Int]:
        """Prepares a block of which some query may not see all: a bit for each token not finite.

        A product counts what a query does not see as 0 times it, so what is not finite there, or
        lies past the sequence's end, is made 0 in shared memory. A query that does see it gets NaN
        because of the returned bits, one for each token of the block.
        """
        values = slot.at(self.s.block * self.row)
        first, last = at.begin, at.length - 1
        is_mixed = begin + self.s.block > first + 1
        if self.s.window is not None:
            is_mixed = is_mixed | (begin < last - self.s.window[0])
        words = max(1, self.s.block // 32)

        def prepare(_: Int, nonfinite: list[Int]) -> list[Int]:
            nonfinite = []
            for i in range(words):
                token = (here.number + 32 * i) & (self.s.block - 1)
                is_nonfinite = self._clear(
                    values.at(token * self.row), begin + token >= at.length, here
                )
                nonfinite.append(lane.ballot(is_nonfinite))
            lane.publish_stores()
            lane.warp_barrier()
            return nonfinite

        zero = lane.integer(0)
        once = is_mixed.where(lane.integer(1), 0)
        return lane.loop(zero, once, 1, [zero] * words, prepare)

    def _clear(self, row: Pointer, is_past: lane.Bool, here: Place) -> lane.Bool:
        """Whether a token's value is not finite; then, or past the end, it is made 0."""
        count = self.row // 16
        # Rows begin in the same bank, so each lane begins elsewhere in its own.
        places = [row.at(((here.number + i) & (count - 1)) << 4) for i in range(count)]
        found = [self.nonfinite(word) for place in places for word in place.words(4)]
        is_nonfinite = functools.reduce(lambda a, b: a | b, found) > 0
        with lane.when(is_nonfinite | is_past):
            for place in places:
                place.store_words([lane.integer(0)] * 4)
        return is_nonfinite

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        nonfinite: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        zero, nan = lane.number(0.0), lane.number(float("nan"))
        starts = [self._sees(nonfinite, seen, here).where(nan, 0.0) for seen in visible]
        operands = [self._weight_operands(w, here) for w in weights]
        out: list[list[Float]] = [[] for _ in weights]
        for rows in self.value_rows(slot.at(self.s.block * self.row), here):
            for tile, words in enumerate(operands):
                c = summed(rows, words, [starts[tile], zero] * 2, self._matmul)
                out[tile] += [c[2 * j] + c[2 * j + 1] for j in (0, 1)]
        return out

    def _sees(self, nonfinite: list[Int], seen: list[lane.Bool], here: Place) -> lane.Bool:
        """Whether a query sees any of the tokens whose bits are set."""
        first = here.g * self.s.held
        bits = (
            nonfinite[0] if len(nonfinite) == 1 else (here.g < 4).where(nonfinite[0], nonfinite[1])
        )
        bits = bits >> (first & 31)
        found = [mask.where((bits >> (here.odd ^ i)) & 1, 0) for i, mask in enumerate(seen)]
        hit = functools.reduce(lambda a, b: a | b, found)
        return lane.reduce_lanes(hit, lambda a, b: a | b, (4, 8, 16)) > 0

    def _weight_operands(self, w: list[Float], here: Place) -> list[Int]:
        words = []
        for k in range(0, len(w), 2):
            words += weight_words(list(planes(w[k : k + 2], self.dtype)), here)
        return words


def channel(number: int, here: Place, head_dim: int) -> Int:
    """The channel of a lane's output `number`."""
    return here.g * (head_dim // 8) + number


def planes(x: list[Float], dtype: str = "float16") -> tuple[Int, Int]:
    """Two numbers rounded to 16 bits, and the remainders, as words: the remainders first."""
    high = lane.half.pack(x[0], x[1], dtype)
    first, second = lane.half.unpack(high, dtype)
    return lane.half.pack(x[0] - first, x[1] - second, dtype), high


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8(Floats):
    """The products of a block of e4m3 or e5m2 in shared memory.

    All their values are float16 numbers. Queries, too, are sums of two float16, in two columns.
    """

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

    def nonfinite(self, word: Int) -> Int:
        smallest = 0x7F if self.s.kind == "fp8_e4m3" else 0x7C
        carried = (word & 0x7F7F7F7F) + (128 - smallest) * 0x01010101
        return (carried >> 7) & 0x01010101

    def scores(self, slot: Pointer, query: Query, here: Place) -> list[list[Float]]:
        out: list[list[Float]] = [[] for _ in query.operands]
        for pair in key_rows(slot, self.row, self.s.held, here, self.convert):
            for tile, operands in enumerate(query.operands):
                start = [*query.start[tile], *query.start[tile]]
                c = multiplied(pair, operands, start, lane.half.matmul)
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


# Numbers as they are ------------------------------------------------------------------------------
# Products are of the pages' dtype, summed in float32. Queries have that dtype and need no second
# part: both columns of one hold it, the second with neighbouring runs of channels in each other's
# place, since lanes read keys so. Weights are sums of two numbers of that dtype.
#
# A token's key or value takes 128 bytes or a multiple of it, so that those of all tokens begin in
# the same bank, and no two lanes may read the same part of theirs at a time. Of keys, those of odd
# rows `g` read every other run of channels first, and take their scores from the second column. Of
# values, lane `t` begins with part `t` of four, and selects put them in order.

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
        first, swap = row.at(here.t << 4), here.g & 1
        return [w for i in range(self.row // _RUN) for w in first.at((swap ^ i) * _RUN).words(4)]

    def nonfinite(self, word: Int) -> Int:
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
                c = multiplied(pair, operands, [lane.number(0.0)] * 4, self._matmul)
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
            is_swapped = (here.t & bit).equals(bit)
            parts = [
                [is_swapped.where(b, a) for a, b in zip(parts[i], parts[i ^ bit], strict=True)]
                for i in range(_PARTS)
            ]
        return [word for part in parts for word in part]
