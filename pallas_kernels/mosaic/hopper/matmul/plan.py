"""Which tokens are whose, where experts share a product: prefix sums of their groups' sizes."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Int, Pointer

NAN = 0x7FFF7FFF
"""A word of two float16 or bfloat16 NaNs."""
_LANES = 32


class Plan:
    """Where each expert's tokens and tiles begin: each program computes it, in shared memory.

    `held` are int32: for every expert, and after the last one, the number of tokens before it; then
    the same of tiles of tokens; then how many tiles there are, how many tokens they hold, and the
    word of two numbers that the other rows are filled with. If sizes of groups are not valid, there
    are no tiles.
    """

    def __init__(self, held: Any, experts: int) -> None:
        self.held, self.experts = held, experts

    @staticmethod
    def size(experts: int) -> int:
        return 2 * (experts + 1) + 3

    def token(self, expert: Any) -> Any:
        return self.held[expert]

    def tile(self, expert: Any) -> Any:
        return self.held[expert + (self.experts + 1)]

    def bound(self, i: int) -> Any:
        """Number of tiles, of tokens, and what rows of no expert hold."""
        return self.held[2 * (self.experts + 1) + i]

    def expert(self, tile: Any) -> Any:
        low, high = jnp.int32(0), jnp.int32(self.experts - 1)
        for _ in range((self.experts - 1).bit_length()):
            middle = (low + high) >> 1
            is_past = self.tile(middle + 1) > tile
            low, high = jnp.where(is_past, low, middle + 1), jnp.where(is_past, middle, high)
        return low


def make_plan(sizes: Pointer, held: Pointer, experts: int, rows: int, tile: int) -> None:
    """Writes a `Plan` to `held`; one warp calls it.

    `sizes` are int32 in global memory, of each expert's group; if they are negative or hold more
    than `rows` tokens, they are not valid. `tile` is a tile's tokens, a power of two.
    """
    number, each = lane.special("laneid"), -(-experts // _LANES)
    tokens = tiles = lane.integer(0)
    is_bad = number < 0
    mine = []
    for j in range(each):
        expert = number * each + j
        size = sizes.at(expert.minimum(experts - 1) << 2).word()
        size = (expert < experts).where(size, 0)
        is_bad = is_bad | (size < 0) | (size > rows)
        tokens, tiles = tokens + size, tiles + ((size + (tile - 1)) >> (tile.bit_length() - 1))
        mine.append((expert, tokens, tiles))
    all_tokens, all_tiles = _running(tokens, number), _running(tiles, number)
    before = all_tokens - tokens, all_tiles - tiles
    for expert, *found in mine:
        with lane.when(expert < experts):
            for i, (own, others) in enumerate(zip(found, before, strict=True)):
                held.at((expert + (i * (experts + 1) + 1)) << 2).store(own + others)
    last = lane.integer(_LANES - 1)
    total, count = lane.from_lane(all_tokens, last), lane.from_lane(all_tiles, last)
    is_bad = (lane.ballot(is_bad) > 0) | (lane.ballot(is_bad) < 0) | (total > rows)
    bounds = is_bad.where(0, count), is_bad.where(0, total), is_bad.where(NAN, lane.integer(0))
    with lane.when(number < 1):
        for i in range(2):
            held.at(4 * i * (experts + 1)).store(lane.integer(0))
        for i, bound in enumerate(bounds):
            held.at(4 * (2 * (experts + 1) + i)).store(bound)


def _running(x: Int, number: Int) -> Int:
    """The sum of this lane's number and those of the lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        x = x + (number >= distance).where(lane.from_lane(x, number - distance), 0)
    return x
