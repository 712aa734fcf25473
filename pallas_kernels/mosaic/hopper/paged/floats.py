"""What pages of 8-bit and of 16-bit floats have in common: how weights are multiplied with values.

Products are of 16-bit floats, summed in float32. Weights are sums of two such numbers, a high and a
low part in two columns.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Program, Query, Settings
from pallas_kernels.mosaic.hopper.paged.operands import weight_words
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
    def lost(self, word: Int) -> Int:
        """Positive if a number in a word is not finite, else 0."""

    @property
    def row(self) -> int:
        return self.s.row_bytes(self.head_dim)

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

        def prepare(_: Int, lost: list[Int]) -> list[Int]:
            lost = []
            for i in range(words):
                token = (here.number + 32 * i) & (self.s.block - 1)
                is_lost = self._clear(values.at(token * self.row), begin + token >= at.length, here)
                lost.append(lane.ballot(is_lost))
            lane.publish_stores()
            lane.warp_barrier()
            return lost

        zero = lane.integer(0)
        once = is_mixed.where(lane.integer(1), 0)
        return lane.loop(zero, once, 1, [zero] * words, prepare)

    def _clear(self, row: Pointer, is_past: lane.Bool, here: Place) -> lane.Bool:
        """Whether a token's value is not finite; then, or past the end, it is made 0."""
        count = self.row // 16
        # Rows begin in the same bank, so each lane begins elsewhere in its own.
        places = [row.at(((here.number + i) & (count - 1)) << 4) for i in range(count)]
        found = [self.lost(word) for place in places for word in place.words(4)]
        is_lost = functools.reduce(lambda a, b: a | b, found) > 0
        with lane.when(is_lost | is_past):
            for place in places:
                place.store_words([lane.integer(0)] * 4)
        return is_lost

    def weighted(
        self,
        slot: Pointer,
        weights: list[list[Float]],
        visible: list[list[lane.Bool]],
        lost: list[Int],
        here: Place,
    ) -> list[list[Float]]:
        zero, nan = lane.number(0.0), lane.number(float("nan"))
        starts = [self._sees(lost, seen, here).where(nan, 0.0) for seen in visible]
        operands = [self._weight_operands(w, here) for w in weights]
        out: list[list[Float]] = [[] for _ in weights]
        for rows in self.value_rows(slot.at(self.s.block * self.row), here):
            for tile, words in enumerate(operands):
                c = [starts[tile], zero] * 2
                for k in range(0, len(words), 2):
                    a = rows[2 * k : 2 * k + 4]
                    c = lane.half.matmul(a, words[k : k + 2], c, self.dtype)
                out[tile] += [c[2 * j] + c[2 * j + 1] for j in (0, 1)]
        return out

    def _sees(self, lost: list[Int], seen: list[lane.Bool], here: Place) -> lane.Bool:
        """Whether a query sees any of the tokens whose bits are set."""
        first = here.g * self.s.held
        bits = lost[0] if len(lost) == 1 else (here.g < 4).where(lost[0], lost[1])
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


def planes(x: list[Float], dtype: str) -> tuple[Int, Int]:
    """Two numbers rounded to 16 bits, and the remainders, as words: the remainders first."""
    high = lane.half.pack(x[0], x[1], dtype)
    first, second = lane.half.unpack(high, dtype)
    return lane.half.pack(x[0] - first, x[1] - second, dtype), high
