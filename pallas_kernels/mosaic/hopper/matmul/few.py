"""INT4 weights times e4m3 activations of few tokens, up to 64, for Hopper (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 on an H200: 30 MB, 7 us; conversion takes 112 of some 240
clocks that a tile has, products 64 for 16 tokens and 256 for 64. Target: 13 us for 16 tokens, 12.5
for one, 15 for 64. Seen: 11.9, 10.7 and 17.8; of 64 tokens 13.2 without products, so these hide
only in part behind the rest. Of fewer, launch, first latency and end are a third.

Every warpgroup takes 64 rows and a share of the inputs, one tile after the other. One of its lanes
copies tiles ahead to slots of its own; nobody else waits for them. Weights are rows of the product
and come from registers, where they are converted; tokens are columns, in shared memory: up to 32
are loaded by all lanes, before the copies of weights start, which memory serves first otherwise;
more, or more than fit, are copied ahead in a `Ring`, if it has two places. Warpgroups that share
rows are of one program, or of a cluster of them; their sums are added up in the order of the
inputs. How many there are follows from the weight's shape alone, so a token's result does not
depend on other tokens.

Weights are two operands: what is not negative, and, subtracted, what is. A permutation of bytes
whose selector has its fourth bit set takes a byte's sign for it, zero in a table of magnitudes; so
no third one has to choose between the two.

A warpgroup converts a tile, multiplies, waits, and only then goes on: the other warpgroups of the
multiprocessor fill its waits. Where the registers of the next product's operand are written during
a product, as in `int4.py`, ptxas lets it wait after each of the instructions (its message C7513),
and nothing is hidden; as it is here they follow one another.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import lane, lanes
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.hopper.matmul.rounding import Loads, Rounding
from pallas_kernels.mosaic.lane import ClusterPointer, Float, Int, Pointer
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES

ROWS = 64  # rows of a tile
TILE_BYTES = ROWS * ROW_BYTES
THREADS = 128
_TABLES_BYTES = TABLES * TABLE_BYTES
# Numbers from one token's sums to the next, so that lanes write a tile's sums to all banks.
PITCH = ROWS + 4
_CHUNK = 16
_CHUNKS = GROUP // _CHUNK
# Loads of tokens that a lane has in flight.
_LOADS_IN_FLIGHT = 8
# Columns up to which lanes load tokens, if all fit: the first copies of a `Ring` take 1 us longer.
MOST_LOADED = 32


@dataclasses.dataclass(frozen=True)
class Settings:
    epilogue: Epilogue
    tokens: int  # columns of a product: 8, 16, 32 or 64
    warpgroups: int
    parts: int  # programs that share rows, each with part of the inputs; at most 8
    stages: int  # tiles of a warpgroup that are being copied or in use
    # Groups of inputs whose tokens are in shared memory at a time: all of a program's, or as many,
    # two or more, for each warpgroup that shares rows.
    resident: int
    splits: int = 1  # warpgroups of a program that share rows, each with part of its inputs
    # Of tokens that are not e4m3 yet, or None; then all of a program's are resident.
    rounding: Rounding | None = None

    @property
    def token_bytes(self) -> int:
        return self.tokens * GROUP

    def is_whole(self, groups: int) -> bool:
        """Whether all of a program's tokens are in shared memory at a time."""
        return self.part_of(groups) <= self.resident

    def part_of(self, groups: int) -> int:
        """The most groups of inputs that a program has."""
        return -(-groups // self.parts)

    @property
    def tiles(self) -> int:
        return self.warpgroups // self.splits

    @property
    def depth(self) -> int:
        """Places of groups of tokens that warpgroups with the same inputs have."""
        return self.resident // self.splits

    def has_ring(self, groups: int) -> bool:
        """Whether tokens are copied ahead, and not loaded by lanes.

        With one place a warpgroup would wait forever, for what it says itself a group later
        (`Ring.advance`): programs of so few groups have room for all of them.
        """
        is_many = self.rounding is None and self.tokens > MOST_LOADED
        return not self.is_whole(groups) or (is_many and self.depth > 1)

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
    """Offsets in a program's shared memory; the tokens come first."""

    slots: int  # each warpgroup's tiles
    scales: int  # those of each warpgroup's part of the inputs
    factors: int  # float32 scales of each warpgroup's outputs, then their biases
    tables: int  # of products of scales and codes
    token_scales: int  # float32
    maxima: int  # of tokens that are rounded here, or of warps' shares of them
    barriers: int  # eight bytes for each slot of each warpgroup
    token_barriers: int  # and sixteen for each group of tokens
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
            max(s.tokens, THREADS // 32 * s.warpgroups) * 4,
            s.warpgroups * s.stages * 8,
            s.resident * 16,
        )
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return cls(*ends)


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A call's arrays as pointers, and their sizes."""

    codes: Pointer  # ``[N' / 64, groups, 64, 64]``
    scales: Pointer  # ``[N' / 64, groups, 64]``
    tables: Pointer | None  # of e4m3 scales, or None
    x: Pointer  # e4m3 ``[M, inputs]``, or as `Settings.rounding` says
    token_scales: Pointer | None  # bfloat16 ``[M]``, or None if tokens are rounded here
    output_scales: Pointer  # float32 ``[N']``
    bias: Pointer | None  # float32 ``[N']``, or None
    residual: Pointer | None  # ``[M, width]``, or None
    out: Pointer  # ``[M, width]``
    tiles: int  # ``N' / 64``
    groups: int  # of 128 inputs
    tokens: int  # `M`
    inputs: int  # of a token, a multiple of 16
    width: int
    scale_dtype: str  # ``"uint8"`` (e4m3), ``"bfloat16"`` or ``"float16"``

    @property
    def scale_bytes(self) -> int:
        return 1 if self.scale_dtype == "uint8" else 2


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """What a warpgroup works on: a row of tiles, and which of these."""

    tile: Int  # number of its 64 rows among all; past the last row, the last once more
    first: Int  # the program's first group of inputs
    begin: Int  # the warpgroup's first group
    count: Int  # how many groups the warpgroup has
    row: Int  # number of its rows among those of the program
    split: Int  # its number among the program's warpgroups that share rows
    is_real: lane.Bool  # whether the rows exist

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
            row,
            split,
            tile < a.tiles,
        )


# Weights -----------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """A tile as two left operands of a product."""

    plus: list[Int]  # words as `lane.start_product` takes them, of the values that are not negative
    minus: list[Int]  # words of the negative values, without signs
    scales: list[Float]  # the part of the scales of the lane's two rows that is not in the words


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A warpgroup's tiles, as they arrive."""

    a: Arrays
    work: Work
    slots: Pointer  # shared memory of the tiles
    scales: Pointer  # shared memory of all scales
    factors: Pointer  # shared memory of the outputs' scales and biases
    tables: Pointer  # of e4m3 scales
    barriers: Pointer  # one for each slot
    number: Int  # of the warpgroup
    here: tuple[Int, Int]  # the lane's first row and place
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
        """Starts the first copies; one lane calls it, which has prepared the barriers."""
        a, work = self.a, self.work
        vectors = [x for x in (a.output_scales, a.bias) if x is not None]
        size = work.count * (ROWS * a.scale_bytes)
        first = self.barriers
        self._copy(0, 0, size + ROWS * 4 * len(vectors))
        row = work.tile * a.groups + work.begin
        lane.copy(a.scales.times(row, ROWS * a.scale_bytes), self.scales, size, first)
        for i in range(1, self.s.stages):
            with lane.when(work.count > i):
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

    def refill(self, i: Int, slot: Int, ring: "Ring | None") -> None:
        """Starts the next copy to the slot of tile `i`, which has been taken."""
        later = i + self.s.stages
        has_more = later < self.work.count
        if ring is None:
            with lane.when(has_more):
                self.meet()
                with lane.when(is_first_of_warpgroup()):
                    self._copy(later, slot)
            return
        self.meet()
        with lane.when(is_first_of_warpgroup()):
            with lane.when(has_more):
                self._copy(later, slot)
            ring.advance(i)

    def meet(self) -> None:
        lane.named_barrier(self.number + 1, THREADS)


# Tokens ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """A lane's loads of groups of e4m3 tokens, 16 bytes each, the first of them on their way.

    They become the right operand, with zeros where there are no tokens or inputs.
    """

    a: Arrays
    first: Int  # the first of the groups
    groups: int
    s: Settings
    words: list[list[Int]]  # of the first loads

    @classmethod
    def start(cls, a: Arrays, first: Int, groups: int, s: Settings) -> "Tokens":
        tokens = cls(a, first, groups, s, words=[])
        tokens.words.extend(tokens._load(0))
        return tokens

    def finish(self, target: Pointer) -> None:
        """Stores them, and loads and stores the others."""
        self._store(0, self.words, target)
        step = self._threads * self._batch
        if self._total <= step:
            return

        def more(start: Int, state: list[Any]) -> list[Any]:
            self._store(start, self._load(start), target)
            return state

        lane.loop(lane.integer(step), lane.integer(self._total), step, [], more)

    @property
    def _threads(self) -> int:
        return THREADS * self.s.warpgroups

    @property
    def _total(self) -> int:
        return self.s.tokens * self.groups * _CHUNKS

    @property
    def _batch(self) -> int:
        return min(_LOADS_IN_FLIGHT, -(-self._total // self._threads))

    def _numbers(self, start: Int | int) -> list[tuple[Int, Int, Int]]:
        """Of each load of a batch its number, and of which token and chunk it is."""
        per_token = self.groups * _CHUNKS
        numbers = [lane.thread() + i * self._threads + start for i in range(self._batch)]
        return [(number, number // per_token, number % per_token) for number in numbers]

    def _load(self, start: Int | int) -> list[list[Int]]:
        a, found = self.a, []
        for _, token, chunk in self._numbers(start):
            byte = self.first * GROUP + (chunk << 4)
            is_there = (token < a.tokens) & (byte < a.inputs)
            source = a.x.times(is_there.where(token, 0), a.inputs).at(is_there.where(byte, 0))
            words = source.words_once(4, is_there)
            found.append([is_there.where(x, 0) for x in words])
        return found

    def _store(self, start: Int | int, words: list[list[Int]], target: Pointer) -> None:
        for (number, token, chunk), four in zip(self._numbers(start), words, strict=True):
            place = (chunk >> 3) * self.s.token_bytes + token * GROUP
            with lane.when(number < self._total):
                target.at(place + (((chunk ^ token) & 7) << 4)).store_words(four)


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """Groups of e4m3 tokens as the right operand, copied ahead to places that they take in turn.

    Where there are no tokens or inputs there are zeros. Warpgroups with the same inputs share
    places: the first of their groups is in the first place, and so on. A place has two barriers: a
    phase of one passes with each copy, of the other when all of them are through with a group.
    """

    a: Arrays
    work: Work
    target: Pointer  # the places of the warpgroups that share them
    barriers: Pointer
    s: Settings

    @classmethod
    def of(cls, a: Arrays, work: Work, smem: Pointer, s: Settings) -> "Ring":
        m, depth = Memory.of(s, a.groups, a.scale_bytes), s.depth
        barriers = smem.at(lane.integer(m.token_barriers)).at(work.split * (16 * depth))
        return cls(a, work, smem.at(work.split * (depth * s.token_bytes)), barriers, s)

    @property
    def lag(self) -> int:
        """A group's place is filled again so many groups later, when others should be through."""
        return min(2, self.s.depth - 1)

    def place(self, i: Int) -> Pointer:
        return self.target.at(i % self.s.depth * self.s.token_bytes)

    def ready(self, i: Int) -> Pointer:
        return self.barriers.at(i % self.s.depth * 16)

    def free(self, i: Int) -> Pointer:
        return self.barriers.at(i % self.s.depth * 16 + 8)

    def wait(self, i: Int) -> None:
        lane.wait(self.ready(i), i // self.s.depth & 1)

    def prepare(self) -> None:
        """Prepares barriers; one lane of each warpgroup calls it, as the others that follow."""

        def one(i: Int, state: list[Any]) -> list[Any]:
            lane.init_barrier(self.ready(i))
            lane.init_barrier(self.free(i), self.s.tiles)
            return state

        lane.loop(self.work.row, lane.integer(self.s.depth), self.s.tiles, [], one)

    def begin(self) -> None:
        """Starts the first copies, the warpgroup's share of them."""
        end = self.work.count.minimum(self.s.depth)

        def one(i: Int, state: list[Any]) -> list[Any]:
            self._copy(i)
            return state

        lane.loop(self.work.row, end, self.s.tiles, [], one)

    def advance(self, i: Int) -> None:
        """Once the warpgroup is through with all groups before `i`: tells it, and starts a copy."""
        with lane.when(i > 0):
            lane.arrive(self.free(i - 1))
        later = i + (self.s.depth - self.lag)
        is_mine = (later % self.s.tiles).equals(self.work.row)
        with lane.when((later >= self.s.depth) & (later < self.work.count) & is_mine):
            lane.wait(self.free(later), (later // self.s.depth & 1) ^ 1)
            self._copy(later)

    def _copy(self, i: Int) -> None:
        lane.expect_bytes(self.ready(i), self.s.token_bytes)
        column = (self.work.begin + i) * GROUP
        lane.copy_box(self.a.x, column, self.s.tokens, self.place(i), self.ready(i))


def load_token_scales(a: Arrays, target: Pointer, s: Settings) -> None:
    assert a.token_scales is not None
    thread = lane.thread()
    with lane.when(thread < s.tokens):
        token = thread.minimum(a.tokens - 1)
        scale = (a.token_scales.at(token << 1).half() << 16).as_float()
        target.at(thread << 2).store(scale)


# A program ---------------------------------------------------------------------------------------


def _program(a: Arrays, ids: list[Int], smem: Pointer, s: Settings) -> None:
    m = Memory.of(s, a.groups, a.scale_bytes)
    number = lane.uniform(lane.thread() >> 7)
    work = Work.of(a, ids, number, s)
    scales = s.share_of(a.groups) * ROWS * a.scale_bytes
    # Hidden from the compiler, which would compute it again for every tile.
    zero = lane.held(0)
    row, t = lane.fragments.row_and_place()
    here = row + zero, t + zero
    own = smem.at(lane.integer(m.slots)).at(number * s.slots_bytes)
    weights = Weights(
        a=a,
        work=work,
        slots=own,
        scales=smem.at(lane.integer(m.scales)).at(number * scales),
        factors=smem.at(lane.integer(m.factors)).at(number * (2 * ROWS * 4)),
        tables=smem.at(lane.integer(m.tables)),
        barriers=smem.at(lane.integer(m.barriers)).at(number * (8 * s.stages)),
        number=number,
        here=here,
        s=s,
    )
    ring = Ring.of(a, work, smem, s) if s.has_ring(a.groups) else None
    # Loads start before the copies of weights, which memory seems to serve first otherwise.
    finish = _start_tokens(a, work, smem, s) if ring is None else None
    with lane.when(is_first_of_warpgroup()):
        for i in range(s.stages):
            lane.init_barrier(weights.barriers.at(8 * i))
        if ring is not None:
            ring.prepare()
        lane.publish_barriers()
        if ring is not None:
            ring.begin()
        weights.begin()
    if a.tables is not None:
        place = (lane.thread() & (TABLES - 1)) * TABLE_BYTES
        words = int4.magnitudes(a.tables.at(place).words(4))
        with lane.when(lane.thread() < TABLES):
            smem.at(lane.integer(m.tables)).at(place).store_words(words)
    if s.rounding is None:
        load_token_scales(a, smem.at(lane.integer(m.token_scales)), s)
    if finish is not None:
        finish()
        lane.publish_stores()
    lane.block_barrier()
    sums = _accumulate(a, weights, ring, smem, s)
    _write(a, sums, weights, smem.at(lane.integer(m.token_scales)), ids[1], s)


def _start_tokens(a: Arrays, work: Work, smem: Pointer, s: Settings) -> Callable[[], None]:
    """Starts to load a program's tokens to shared memory, all of them; returns the rest."""
    if s.rounding is None:
        tokens = Tokens.start(a, work.first, s.resident, s)
        return lambda: tokens.finish(smem)
    m = Memory.of(s, a.groups, a.scale_bytes)
    loads = Loads.start(a.x, work.first, s.rounding)
    places = [smem.at(lane.integer(x)) for x in (m.token_scales, m.maxima)]
    return lambda: loads.finish(smem, *places)


def is_first_of_warpgroup() -> lane.Bool:
    return (lane.thread() & (THREADS - 1)).equals(0)


def _accumulate(
    a: Arrays, weights: Weights, ring: Ring | None, smem: Pointer, s: Settings
) -> list[Float]:
    """A warpgroup's sums over its tiles, in the order of `lane.start_product`'s result."""
    zero, work = lane.integer(0), weights.work

    def tokens_of(i: Int) -> Pointer:
        if ring is None:
            return smem.at((i + (work.begin - work.first)) * s.token_bytes)
        ring.wait(i)
        return ring.place(i)

    def step(i: Int, carry: list[Any]) -> list[Any]:
        *sums, slot, parity = carry
        taken = weights.take(i, slot, parity)
        sums = _add(sums, taken, tokens_of(i), lambda: weights.refill(i, slot, ring), s)
        is_last = slot.equals(s.stages - 1)
        return [*sums, is_last.where(0, slot + 1), is_last.where(parity ^ 1, parity)]

    carry = [*[lane.number(0.0)] * (s.tokens // 2), zero, zero]
    return lane.loop(zero, work.count, 1, carry, step)[:-2]


def _add(
    sums: list[Float],
    taken: Operand,
    tokens: Pointer,
    meanwhile: Callable[[], None],
    s: Settings,
) -> list[Float]:
    """Adds the products of a tile to float32 sums; `meanwhile` runs while they are on their way.

    No operand is written during that time: the compiler would wait for each product.
    """
    product = lane.start_product(taken.plus, tokens, s.tokens, minus=taken.minus)
    meanwhile()
    return [
        lane.fma(x, taken.scales[k // 2 % 2], total)
        for k, (x, total) in enumerate(zip(lane.finish(product), sums, strict=True))
    ]


# Results -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """Four outputs of a token that a lane writes."""

    token: Int  # past the last token, the last once more
    row: Int  # row of the tile that gives the first output; of gated weights that of its gate
    column: Int  # of the output
    is_there: lane.Bool  # whether they exist

    @classmethod
    def all_of(cls, a: Arrays, work: Work, rank: Int, s: Settings) -> "list[Item]":
        """A lane's items, in program `rank` of its cluster."""
        is_gated = s.epilogue.gate is not None
        quads = s.epilogue.outputs // 4
        last = a.width - (4 if a.width % 4 == 0 else 1)
        items = []
        for first in range(0, a.tokens * quads, THREADS * s.shares):
            number = rank * THREADS + (lane.thread() & (THREADS - 1)) + first
            token, quad = number // quads, number % quads
            # Eight rows of a gate alternate with eight of its partner.
            row = ((quad >> 1) << 4) + ((quad & 1) << 2) if is_gated else quad << 2
            column = work.tile * s.epilogue.outputs + (quad << 2)
            is_there = (token < a.tokens) & (column < a.width) & work.is_real
            items.append(cls(token.minimum(a.tokens - 1), row, column.minimum(last), is_there))
        return items


def _write(
    a: Arrays, sums: list[Float], weights: Weights, token_scales: Pointer, rank: Int, s: Settings
) -> None:
    """Adds up the cluster's sums, each program some of them, and writes the outputs."""
    e = s.epilogue
    area = weights.slots.at(weights.work.split * -s.slots_bytes)
    _put(sums, weights, s)
    items = Item.all_of(a, weights.work, rank * s.splits + weights.work.split, s)
    # Before the wait, so that the latencies pass at the same time.
    residuals = [_residual(a, item, e) for item in items]
    areas: list[Any] = [area.at(lane.integer(i * s.slots_bytes)) for i in range(s.splits)]
    if s.parts > 1:
        lane.cluster_barrier()
        areas = [ClusterPointer.of(x, i) for i in range(s.parts) for x in areas]
    elif s.splits > 1:
        lane.block_barrier()
    else:
        weights.meet()
    scales = [token_scales.at(item.token << 2).float() for item in items]
    # All loads before what is computed from them.
    numbers = [_numbers(areas, item, s) for item in items]
    results = [
        _results(a, *of_item, weights, e)
        for of_item in zip(items, numbers, scales, residuals, strict=True)
    ]
    if s.parts > 1:
        lane.arrive_at_cluster()
    for item, values in zip(items, results, strict=True):
        _store(a, values, item, e)
    if s.parts > 1:  # no program ends while others read its memory
        lane.wait_for_cluster()


def _numbers(areas: list[Any], item: Item, s: Settings) -> list[list[list[Float]]]:
    """All shares' sums of an item, those of its gate and its partner or of its row."""
    rows = (item.row, item.row + 8) if s.epilogue.gate else (item.row,)
    places = [(item.token * PITCH + row) << 2 for row in rows]
    return [[x.at(place).floats() for x in areas] for place in places]


def _results(
    a: Arrays,
    item: Item,
    numbers: list[list[list[Float]]],
    scale: Float,
    residual: list[Float] | None,
    weights: Weights,
    e: Epilogue,
) -> list[Float]:
    """An item's outputs from its sums."""

    def values(row: Int, found: list[list[Float]]) -> list[Float]:
        totals = [lane.total(list(x)) * scale for x in zip(*found, strict=True)]
        factors = weights.factors.at(row << 2).floats()
        if a.bias is None:
            return [x * f for x, f in zip(totals, factors, strict=True)]
        biases = weights.factors.at(row << 2, lane.integer(ROWS * 4)).floats()
        return [lane.fma(x, f, b) for x, f, b in zip(totals, factors, biases, strict=True)]

    if e.gate:
        pairs = zip(values(item.row, numbers[0]), values(item.row + 8, numbers[1]), strict=True)
        results = [epilogue.activate(gate, e.gate) * up for gate, up in pairs]
    else:
        results = [epilogue.activate(x, e.activation) for x in values(item.row, numbers[0])]
    if residual is None:
        return results
    return [x + y for x, y in zip(results, residual, strict=True)]


def _put(sums: list[Float], weights: Weights, s: Settings) -> None:
    weights.meet()  # all have read the tiles in this memory
    row, t = lane.fragments.row_and_place()
    for k, x in enumerate(sums):
        token = (t << 1) + (8 * (k // 4) + k % 2)
        weights.slots.at((token * PITCH + row + 8 * (k // 2 % 2)) << 2).store(x)


def _residual(a: Arrays, item: Item, e: Epilogue) -> list[Float] | None:
    if a.residual is None:
        return None
    row = a.residual.times(item.token, 2 * a.width)
    if a.width % 4 == 0:
        words = row.at(item.column << 1).words(2)
    else:
        columns = [(item.column + i).minimum(a.width - 1) for i in range(4)]
        halves = [row.at(column << 1).half() for column in columns]
        words = [halves[i] | (halves[i + 1] << 16) for i in (0, 2)]
    return [x for word in words for x in lane.half.unpack(word, e.dtype)]


def _store(a: Arrays, results: list[Float], item: Item, e: Epilogue) -> None:
    words = [lane.half.pack(results[i], results[i + 1], e.dtype) for i in (0, 2)]
    target = a.out.times(item.token, 2 * a.width).at(item.column << 1)
    if a.width % 4 == 0:
        with lane.when(item.is_there):
            target.store_words(words)
        return
    for i in range(4):
        with lane.when(item.is_there & (item.column + i < a.width)):
            target.at(lane.integer(2 * i)).store_low(words[i // 2] >> (16 * (i % 2)), 16)


# The call ----------------------------------------------------------------------------------------


def few_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array | None,
    x: jax.Array,
    token_scales: jax.Array | None,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    width: int,
    settings: Settings,
) -> jax.Array:
    """Few tokens times INT4 weights: ``[M, width]``.

    Arguments as `int4.int4_matmul`, but: `x` is e4m3 ``[M, inputs]``, `M` at most
    `settings.tokens`, `inputs` a multiple of 16 and at most ``K'``; or, if there is
    `settings.rounding`, bfloat16 or float16, `inputs` a multiple of 8, and `token_scales` are None.
    `residual` is ``[M, width]``.
    """
    scale_dtype = scales.dtype.name if tables is None else "uint8"
    if tables is not None:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    given: dict[str, Any] = {
        "codes": codes,
        "scales": scales,
        "tables": tables,
        "x": x,
        "token_scales": token_scales,
        "output_scales": output_scales,
        "bias": bias,
        "residual": residual,
    }
    names = [name for name, array in given.items() if array is not None]
    tiles, groups = codes.shape[:2]
    sizes: dict[str, Any] = {
        "tiles": tiles,
        "groups": groups,
        "tokens": x.shape[0],
        "inputs": x.shape[1],
    }

    def body(arrays: list[Pointer], ids: list[Int]) -> None:
        *inputs, out, smem = arrays
        at: dict[str, Any] = dict.fromkeys(given) | dict(zip(names, inputs, strict=True))
        a = Arrays(**at, out=out, **sizes, width=width, scale_dtype=scale_dtype)
        _program(a, ids, smem, settings)

    [out] = lanes.launch(
        body,
        "turbojax_int4_few_hopper",
        [given[name] for name in names],
        [jax.ShapeDtypeStruct((x.shape[0], width), jnp.dtype(settings.epilogue.dtype))],
        grid={"rows": -(-tiles // settings.tiles)},
        warpgroups=settings.warpgroups,
        shared=Memory.of(settings, groups, 1 if tables is not None else 2).size,
        cluster={"part": settings.parts},
    )
    return out
