"""Warps that share the blocks of a program: each has its tokens of the scores, then its channels.

One warp holds at most 32 queries' outputs, and no more registers are left to hide latencies with.
Two warps dequantize a half each of a block's keys and values, and exchange maxima and weights in
shared memory.
"""

import dataclasses

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.types import Place
from pallas_kernels.mosaic.lane import Float, Int, Pointer


def exchange_bytes(size: int, rows: int, block: int) -> int:
    """Shared memory in which a team's warps exchange maxima and weights."""
    return 0 if size == 1 else size * rows * 4 + 2 * rows * block


@dataclasses.dataclass(frozen=True, eq=False)
class Team:
    """The running warp's team.

    Attributes:
      size: warps, 1 or 2.
      number: of the team in its program.
      memory: shared memory of `exchange_bytes`.
      rows: queries.
    """

    size: int
    number: Int
    member: Int
    memory: Pointer
    rows: int

    def sync(self) -> None:
        if self.size == 1:
            lane.warp_barrier()
        else:
            lane.named_barrier(self.number + 1, 32 * self.size)

    def _numbers(self, member: Int, row: int, here: Place) -> Pointer:
        return self.memory.at(member * (4 * self.rows) + (here.g << 2), 32 * row)

    def others(self, numbers: list[Float], here: Place) -> list[Float]:
        """The other warp's numbers of rows; synchronizes."""
        with lane.when(here.t.equals(0)):
            for row, x in enumerate(numbers):
                self._numbers(self.member, row, here).store(x)
        self.sync()
        return [self._numbers(self.member ^ 1, row, here).float() for row in range(len(numbers))]

    def all_words(self, words: list[list[list[Int]]], here: Place) -> list[list[list[Int]]]:
        """Operand words of the weights of all warps; synchronizes."""
        if self.size == 1:
            return words
        area = self.memory.at(((here.g << 2) + here.t) << 4, 4 * self.size * self.rows)
        count = len(words[0])
        for tile, of_tile in enumerate(words):
            for k, four in enumerate(of_tile):
                place = (self.member * count + (tile * self.size * count + k)) << 9
                area.at(place).store_words(four)
        self.sync()
        return [
            [
                area.at(512 * (tile * self.size * count + k)).words(4)
                for k in range(self.size * count)
            ]
            for tile in range(len(words))
        ]
