"""A sequence's new token, which attention to pages stores on its way.

Only the warp that takes the token's block needs it. While its first blocks are copied, it encodes
the token, with the instructions and so the bits of `append`, and stores it in its page. If its
block is one of those on their way, it waits for that and puts the token into the copy, too;
otherwise the block is copied later, with the token in it. So no program waits for what another one
writes; that the copy engine may read a token while it is written makes no difference. Programs with
different queries of a head store the same bits. The loop over blocks knows nothing of all this.

Half of a warp's lanes have the key, half the value, so both are encoded by the same instructions.
"""

import dataclasses

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged import append
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Program, Settings
from pallas_kernels.mosaic.lane import Bool, Int, Pointer
from pallas_kernels.mosaic.warp import Slots

_LANES = 32


@dataclasses.dataclass(frozen=True, eq=False)
class NewToken:
    """A program's new token; there may be none."""

    a: append.Arrays  # `lengths` are those before
    s: append.Settings  # keys and values are stored alike, in at most 16 lanes
    pair: Int
    position: Int
    at: append.Place
    is_first: Bool  # whether the program has the first queries of its head
    words: list[Int]  # of the lane's key or value

    @classmethod
    def of(cls, a: append.Arrays, at: Program, here: Place, s: append.Settings) -> "NewToken":
        """Reads it, before it is known whether it is needed."""
        key, value = (side.vectors for side in a.sides)
        vectors = Pointer.choose(_is_value(here, s), value, key)
        words = append.load(vectors, at.pair, here.number % s.lanes, s)
        position = a.lengths.at(at.batch << 2).word()
        found = append.find(a, at.pair, s)
        return cls(a, s, at.pair, position, found, at.tile.equals(0), words)

    def count_dropped(self, here: Place, run: Int) -> None:
        """Counts it if it has no place: in one warp of one program of each sequence."""
        with lane.when(self.is_first & run.equals(0) & (lane.thread() < _LANES)):
            # Looked for again, rather than kept all the time.
            at = append.find(self.a, self.pair, self.s)
            append.count_dropped(self.a.dropped_tokens, at, here.number)

    def block(self, s: Settings) -> Int:
        """The block that it belongs to; -1 if it is nowhere."""
        return self.at.kept.where(self.position // s.block, -1)

    def store(self, first: Int, slots: Slots, here: Place, s: Settings) -> None:
        """Stores it; all lanes of the warp that takes its block call this.

        `first` is the warp's first block; copies of its first blocks, one for each slot, have
        started.
        """
        is_value, (key, value) = _is_value(here, self.s), self.a.sides
        scale = key.scale
        if scale is not None and value.scale is not None:
            scale = Pointer.choose(is_value, value.scale, scale)
        place, size = here.number % self.s.lanes, self.s.vector_bytes(0)
        encode = append.encoder(scale, self.s.sides[0], self.a.signs, place, self.s)
        store = encode(self.words)
        for side, is_own in ((key, ~is_value), (value, is_value)):
            with lane.when(is_own):
                side.store(self.at, store, size)
        lane.publish_global_stores()
        number = is_value.where(lane.integer(1), 0)
        token, norms = self.position % s.block, 2 * s.block * size
        for i in range(slots.count):
            with lane.when(self.block(s).equals(first + i * s.warps)):
                lane.wait(slots.barrier(i), lane.integer(0))
                slot = slots.slot(i)
                vector = slot.at(number * (s.block * size) + token * size)
                store(vector, slot.at(number * (2 * s.block) + (token << 1), norms))
        lane.warp_barrier()


def _is_value(here: Place, s: append.Settings) -> Bool:
    """Whether a lane has the value's channels, and not the key's."""
    return ((here.number // s.lanes) & 1).equals(1)
