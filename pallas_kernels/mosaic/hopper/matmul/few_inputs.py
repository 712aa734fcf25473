"""What a program of the kernel for few tokens reads: settings, memory, arrays, tiles and tokens."""

import dataclasses
from typing import Any, NamedTuple

from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding
from pallas_kernels.mosaic.lane import Float, Int, Pointer
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES

ROWS = 64
"""Rows of a tile."""
TILE_BYTES = ROWS * ROW_BYTES
THREADS = 128
_TABLES_BYTES = TABLES * TABLE_BYTES
# Numbers from one token's sums to the next, so that lanes write a tile's sums to all banks.
PITCH = ROWS + 4
_CHUNK = 16
_CHUNKS = GROUP // _CHUNK
# Loads of tokens that a lane has in flight.
_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """A product's static settings.

    Attributes:
      tokens: columns of a product: 8, 16, 32 or 64.
      parts: programs that share rows, each with part of the inputs; at most 8.
      stages: tiles of a warpgroup that are being copied or in use.
      resident: groups of inputs whose tokens are in shared memory at a time, as many for each
        warpgroup that shares rows; or all of a program's.
      splits: warpgroups of a program that share rows, each with part of its inputs.
      rounding: of tokens that are not e4m3 yet, or None; then all of a program's are resident.
    """

    epilogue: Epilogue
    tokens: int
    warpgroups: int
    parts: int
    stages: int
    resident: int
    splits: int = 1
    rounding: Rounding | None = None

    @property
    def token_bytes(self) -> int:
        return self.tokens * GROUP

    def part_of(self, groups: int) -> int:
        """The most groups of inputs that a program has."""
        return -(-groups // self.parts)

    @property
    def tiles(self) -> int:
        return self.warpgroups // self.splits

    @property
    def shares(self) -> int:
        """Warpgroups that share rows, in all programs of a cluster."""
        return self.parts * self.splits

    def share_of(self, groups: int) -> int:
        """The most groups of inputs that a warpgroup has."""
        return -(-groups // self.shares)

    @property
    def slots_bytes(self) -> int:
        """Shared memory of a warpgroup's tiles, and of its sums at the end."""
        return max(self.stages * TILE_BYTES, self.tokens * PITCH * 4)


class Memory(NamedTuple):
    """Offsets in a program's shared memory; the tokens come first.

    Attributes:
      slots: each warpgroup's tiles.
      scales: those of each warpgroup's part of the inputs.
      factors: float32 scales of each warpgroup's outputs, then their biases.
      tables: of products of scales and codes.
      token_scales: float32.
      maxima: of tokens that are rounded here.
      barriers: eight bytes for each slot of each warpgroup.
    """

    slots: int
    scales: int
    factors: int
    tables: int
    token_scales: int
    maxima: int
    barriers: int
    size: int

    @classmethod
    def of(cls, s: Settings, groups: int, scale_bytes: int) -> "Memory":
        share = s.share_of(groups)
        sizes = (
            s.resident * s.token_bytes,
            s.warpgroups * s.slots_bytes,
            s.warpgroups * share * ROWS * scale_bytes,
            s.warpgroups * 2 * ROWS * 4,
            _TABLES_BYTES,
            s.tokens * 4,
            s.tokens * 4,
            s.warpgroups * s.stages * 8,
        )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A call's arrays as pointers, and their sizes.

    Attributes:
      codes: ``[N' / 64, groups, 64, 64]``.
      scales: ``[N' / 64, groups, 64]``.
      tables: of e4m3 scales, or None.
      x: e4m3 ``[M, inputs]``, or as `Settings.rounding` says.
      token_scales: bfloat16 ``[M]``, or None if tokens are rounded here.
      output_scales: float32 ``[N']``.
      bias: float32 ``[N']``, or None.
      residual: ``[M, width]``, or None.
      out: ``[M, width]``.
      tiles: ``N' / 64``.
      groups: of 128 inputs.
      tokens: `M`.
      inputs: of a token, a multiple of 16.
      scale_dtype: ``"uint8"`` (e4m3), ``"bfloat16"`` or ``"float16"``.
    """

    codes: Pointer
    scales: Pointer
    tables: Pointer | None
    x: Pointer
    token_scales: Pointer | None
    output_scales: Pointer
    bias: Pointer | None
    residual: Pointer | None
    out: Pointer
    tiles: int
    groups: int
    tokens: int
    inputs: int
    width: int
    scale_dtype: str

    @property
    def scale_bytes(self) -> int:
        return 1 if self.scale_dtype == "uint8" else 2


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What a warpgroup works on: a row of tiles, and which of these.

    Attributes:
      tile: number of its 64 rows among all; past the last row, the last once more.
      first: the program's first group of inputs.
      begin: the warpgroup's first group.
      count: how many groups the warpgroup has.
      split: its number among the program's warpgroups that share rows.
      part: the program's number in its cluster.
      is_real: whether the rows exist.
    """

    tile: Int
    first: Int
    begin: Int
    count: Int
    split: Int
    part: Int
    is_real: lane.Bool

    @classmethod
    def of(cls, a: Arrays, ids: list[Int], number: Int, s: Settings) -> "Work":
        """For warpgroup `number` of program ``ids = [rows, part]``."""
        row, split = number // s.splits, number % s.splits
        tile = ids[0] * s.tiles + row
        share = ids[1] * s.splits + split
        begin = share * a.groups // s.shares
        end = (share + 1) * a.groups // s.shares
        return cls(
            tile.minimum(a.tiles - 1),
            ids[1] * s.splits * a.groups // s.shares,
            begin,
            end - begin,
            split,
            ids[1],
            tile < a.tiles,
        )

    def begin_of(self, a: Arrays, split: int, s: Settings) -> Int:
        """The first group of warpgroup `split` of the program."""
        return (self.part * s.splits + split) * a.groups // s.shares


# Weights -----------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A tile as two left operands of a product.

    Attributes:
      plus: words as `lane.start_product` takes them, of the values that are not negative.
      minus: words of the negative values, without signs.
      scales: the part of the scales of the lane's two rows that is not in the words.
    """

    plus: list[Int]
    minus: list[Int]
    scales: list[Float]


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A warpgroup's tiles, as they arrive.

    Attributes:
      slots: shared memory of the tiles.
      scales: shared memory of all scales.
      factors: shared memory of the outputs' scales and biases.
      tables: of e4m3 scales.
      barriers: one for each slot.
      number: of the warpgroup.
      here: the lane's first row and place.
    """

    a: Arrays
    work: Work
    slots: Pointer
    scales: Pointer
    factors: Pointer
    tables: Pointer
    barriers: Pointer
    number: Int
    here: tuple[Int, Int]
    s: Settings

    def _copy(self, i: Int | int, slot: Int | int, more: int | Int = 0) -> None:
        """Starts the copy of tile `i`; one lane calls it."""
        a, work = self.a, self.work
        barrier = self.barriers.at(slot * 8)
        lane.expect_bytes(barrier, lane.integer(TILE_BYTES) + more)
        first = work.tile * a.groups + work.begin
        source = a.codes.times(first + i, TILE_BYTES)
        lane.copy(source, self.slots.at(slot * TILE_BYTES), TILE_BYTES, barrier)

    def begin(self) -> None:
        """Prepares the barriers and starts the first copies; one lane calls it."""
        a, work = self.a, self.work
        for i in range(self.s.stages):
            lane.init_barrier(self.barriers.at(8 * i))
        lane.publish_barriers()
        vectors = [x for x in (a.output_scales, a.bias) if x is not None]
        size = work.count * (ROWS * a.scale_bytes)
        first = self.barriers
        self._copy(0, 0, size + ROWS * 4 * len(vectors))
        row = work.tile * a.groups + work.begin
        lane.copy(a.scales.times(row, ROWS * a.scale_bytes), self.scales, size, first)
        for i in range(1, self.s.stages):
            with lane.when(self.work.count > i):
                self._copy(i, i)
        for i, vector in enumerate(vectors):
            target = self.factors.at(ROWS * 4 * i)
            lane.copy(vector.times(work.tile, ROWS * 4), target, ROWS * 4, first)

    def take(self, i: Int, slot: Int, parity: Int) -> Operand:
        lane.wait(self.barriers.at(slot * 8), parity)
        a = self.a
        tables = None if a.tables is None else self.tables
        scales = self.scales.at(i * (ROWS * a.scale_bytes))
        codes = self.slots.at(slot * TILE_BYTES)
        return Operand(*int4.load_split(codes, scales, tables, self.here, a.scale_dtype))

    def refill(self, i: Int, slot: Int) -> None:
        """Starts the next copy to the slot of tile `i`, which has been taken."""
        later = i + self.s.stages
        with lane.when(later < self.work.count):
            self.meet()
            with lane.when((lane.thread() & (THREADS - 1)).equals(0)):
                self._copy(later, slot)

    def meet(self) -> None:
        lane.named_barrier(self.number + 1, THREADS)


# Tokens ------------------------------------------------------------------------------------------


def load_tokens(a: Arrays, first: Int, groups: int, target: Pointer, s: Settings) -> None:
    """Loads groups of tokens as the right operand, by all lanes; zeros where there are none."""
    per_token = groups * _CHUNKS
    total, threads = s.tokens * per_token, THREADS * s.warpgroups
    thread = lane.thread()
    batch = min(_AHEAD, -(-total // threads))

    def some(start: Int | int) -> None:
        places, words = [], []
        for i in range(batch):
            number = thread + (i * threads) + start
            token, chunk = number // per_token, number % per_token
            byte = first * GROUP + (chunk << 4)
            is_there = (token < a.tokens) & (byte < a.inputs)
            source = a.x.times(is_there.where(token, 0), a.inputs).at(is_there.where(byte, 0))
            words.append([is_there.where(x, 0) for x in source.words(4)])
            place = (chunk >> 3) * s.token_bytes + token * GROUP
            places.append((number < total, place + (((chunk ^ token) & 7) << 4)))
        for (is_mine, place), four in zip(places, words, strict=True):
            with lane.when(is_mine):
                target.at(place).store_words(four)

    if total <= threads * batch:
        some(0)
        return

    def step(start: Int, state: list[Any]) -> list[Any]:
        some(start)
        return state

    lane.loop(lane.integer(0), lane.integer(total), threads * batch, [], step)


def load_token_scales(a: Arrays, target: Pointer, s: Settings) -> None:
    assert a.token_scales is not None
    thread = lane.thread()
    with lane.when(thread < s.tokens):
        token = thread.minimum(a.tokens - 1)
        scale = (a.token_scales.at(token << 1).half() << 16).as_float()
        target.at(thread << 2).store(scale)
