"""Decode: a few new queries per sequence against packed codes, for Hopper.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, 4 bits: 571
MB, 190 us at the 3.0 TB/s of a copy on an H100; about 750 instructions for a block and warp
(`block`) of 3,160 that its time holds. Memory is the floor. Target: 80 % of it. Seen: 198 us, 95 %
of a copy's bandwidth and 3.54 times as fast as cuDNN on bfloat16; on an H200 140 us. Short calls
are bound by launches: 1 x 1k tokens take 6.0 us.

Every warp takes its own blocks, brings them to shared memory by itself with the copy engine, and
works without a barrier that other warps share, so that one warp's latencies are hidden by the
eleven others of its multiprocessor. Rows of the products are tokens and channels, columns queries:
codes are register operands after a shift and a mask (`block`). The warps' results are
merged in shared memory; programs that share a KV head merge in a cluster where there is little to
do, and by a second small kernel elsewhere.

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.layouts import LOG2_E
from pallas_kernels.layouts import Side as Side
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode import frame
from pallas_kernels.mosaic.hopper.decode.block import (
    add_block,
    channel_words,
    code_words,
    load_query,
    load_words,
    plain_queries,
    scaled_queries,
    scores,
    softmax,
    token_words,
)
from pallas_kernels.mosaic.hopper.decode.frame import Arrays, Program, copies_of
from pallas_kernels.mosaic.hopper.decode.frame import Settings as Settings
from pallas_kernels.mosaic.hopper.decode.frame import stage_bytes as stage_bytes
from pallas_kernels.mosaic.hopper.decode.types import (
    Numerics,
    Place,
    Query,
    Shape,
    State,
    Width,
    runs_of,
)
from pallas_kernels.mosaic.hopper.decode.types import SparseExponential as SparseExponential
from pallas_kernels.mosaic.lane import Float, Int, Pointer


def _kernel(*refs: Any, s: Settings) -> None:
    frame.body(refs, lambda a, ids, memory: _program(a, ids, memory, s), s)


def _program(a: Arrays, ids: list[Int], memory: tuple[Pointer, Pointer], s: Settings) -> None:
    at = Program.of(a, ids, s)
    _walk(a, at, memory, s)
    found = frame.Results(
        area=memory[0],
        count=s.warps,
        each=s.warp_bytes(a.head_dim),
        row=a.head_dim,
        channel=lambda place: place,
    )
    frame.combine(a, at, found, s, is_unrolled=True)


def _walk(a: Arrays, at: Program, smem: tuple[Pointer, Pointer], s: Settings) -> None:
    shape = Shape(a.head_dim, s.block, max(s.key_bits), max(s.value_bits), s.rows)
    is_masked = a.tokens > 1 or s.window is not None
    n = Numerics(s.exponential, s.window, s.soft_cap, is_masked)
    here, warps = Place.here(), s.warps
    number = lane.uniform(lane.thread() >> 5)
    stage = s.warp_bytes(a.head_dim) // s.stages
    memory = s.warp_bytes(a.head_dim), stage, s.stages, s.arrivals
    slots = warp.Slots.of(smem, number, *memory)
    leader = (here.g | here.t).equals(0)
    widths = a.key.width(at.pair, s.key_bits), a.value.width(at.pair, s.value_bits)
    start_copy = copies_of(a, at, shape, widths, s)
    first, stop = at.start + number, at.stop.minimum(at.blocks)

    def start_first_copies() -> None:
        for i in range(s.stages):
            unit = first + i * warps
            with lane.when(unit < stop):
                start_copy(unit, slots.slot(i), slots.barrier(i))

    with lane.when(leader):
        slots.init()
        if not s.copies_words:
            start_first_copies()
    lane.warp_barrier()
    if s.copies_words:
        start_first_copies()
    products = Products.of(shape, *widths, here, n)
    query = products.query(a, at, s.scale)

    def block_scales(unit: Int) -> list[Float]:
        index = (at.pair * a.blocks + a.place(unit, s)) << 2
        return [side.block_scale.at(index).float() for side in (a.key, a.value)]

    def attend(unit: Int, state: list[Any], slot: Pointer, following: list[Float]) -> list[Any]:
        *flat, key_scale, value_scale = state
        before, scales = State.of(flat, shape), (key_scale, value_scale)
        after = products.attend_block(before, slot, scales, unit * s.block, query)
        return [*after.flat(), *following]

    def refill(unit: Int, slot: Pointer, barrier: Pointer, _: Any) -> None:
        later = unit + warps * s.stages
        with lane.when(later < stop), frame.copying(s):
            start_copy(later, slot, barrier)

    carry = [*State.empty(shape).flat(), *block_scales(first)]
    *flat, _, _ = warp.over_blocks(
        first, stop, warps, slots, carry, lambda u: block_scales(u + warps), attend, refill
    )
    begin, end = at.of_buffer(first, warps, s)

    def attend_buffer(unit: Int, x: list[Any]) -> list[Any]:
        return products.attend_buffer(a, State.of(x, shape), at, unit - at.blocks, query).flat()

    flat = lane.loop(begin, end, warps, flat, attend_buffer)
    _keep(shape, State.of(flat, shape), slots.area, here, n)


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """What a warp computes of blocks and the buffer, with code for each width of the codes."""

    shape: Shape  # sizes, with the widest codes
    key: Width  # width of the head's keys
    value: Width  # width of its values
    here: Place
    n: Numerics
    tokens: list[Int]  # the first of each of the lane's words of four

    @classmethod
    def of(cls, shape: Shape, key: Width, value: Width, here: Place, n: Numerics) -> "Products":
        def tokens(bits: int) -> list[Int]:
            return token_words(dataclasses.replace(shape, value_bits=bits), here)

        return cls(shape, key, value, here, n, value.either([Int] * shape.words, tokens))

    def _of(self, key: int | None = None, value: int | None = None) -> Shape:
        widest = self.shape
        return dataclasses.replace(
            widest, key_bits=key or widest.key_bits, value_bits=value or widest.value_bits
        )

    def query(self, a: Arrays, at: Program, scale: float) -> Query:
        def load(bits: int) -> list[Any]:
            return load_query(a, at, self._of(key=bits), self.here, scale, self.n.unit).flat()

        kinds = Query.kinds(self.shape.score_tiles, a.head_dim)
        return Query.of(self.key.either(kinds, load), self.shape.score_tiles)

    def _scores(self, f: Callable[[Shape], list[list[Int]]]) -> list[list[Int]]:
        """Integer scores of each tile, from `f` for the width of the keys."""
        tiles, count = self.shape.score_tiles, self.shape.block // 8
        flat = self.key.either(
            [Int] * (tiles * count),
            lambda bits: [x for tile in f(self._of(key=bits)) for x in tile],
        )
        return [flat[i * count : (i + 1) * count] for i in range(tiles)]

    def _add(self, state: State, f: Callable[[Shape], State]) -> State:
        """The new state, from `f` for the width of the values."""
        kinds = [Float] * len(state.flat())
        flat = self.value.either(kinds, lambda bits: f(self._of(value=bits)).flat())
        return State.of(flat, self.shape)

    def attend_block(
        self,
        state: State,
        slot: Pointer,
        scales: tuple[Float, Float],
        first_token: Int,
        query: Query,
    ) -> State:
        """Adds the block in shared memory at `slot`."""
        here, n, head_dim = self.here, self.n, self.shape.head_dim

        def of_keys(shape: Shape) -> list[list[Int]]:
            def words(i: int) -> list[Int]:
                token = self.tokens[i // 4] + (here.rotation ^ (i % 4))
                return code_words(slot, token * shape.key_row, here, head_dim, shape.key_bits)

            scale, zero = (
                channel_words(slot.at(self.shape.offset(name)), here, head_dim, shape.key_bits)
                for name in ("key_scale", "key_zero")
            )
            return scores(shape, words, scaled_queries(query, scale, here), zero)

        products = self._scores(of_keys)
        weights = softmax(
            products, query, scales[0], first_token, self.tokens, here, n, n.is_masked
        )
        per_lane = head_dim // 8

        def channels(name: str) -> list[Int]:
            place = slot.at(here.g * per_lane, self.shape.offset(name))
            words = load_words(place, per_lane // 4)
            return [lane.permute_bytes(x, 0, here.selector) for x in words]

        def of_values(shape: Shape) -> State:
            row, values = shape.value_row, slot.at(self.shape.offset("value"))

            def words(i: int) -> list[Int]:
                channel = here.g * per_lane + ((here.rotation ^ (i % 4)) + i // 4 * 4)
                return code_words(values, channel * row, here, shape.block, shape.value_bits)

            of_channels = channels("value_scale"), channels("value_zero")
            return add_block(shape, state, weights, words, of_channels, scales[1], here, n)

        return self._add(state, of_values)

    def attend_buffer(
        self, a: Arrays, state: State, at: Program, number: Int, query: Query
    ) -> State:
        here, n, begin = self.here, self.n, number * self.shape.block
        key, value = (x.buffer.times(at.pair, a.buffer_size * a.head_dim) for x in (a.key, a.value))
        scales = [x.buffer_scale.at(at.pair << 2).float() for x in (a.key, a.value)]

        def row_of(token: Int) -> Int:
            return (token + begin).minimum(a.buffer_size - 1) * a.head_dim

        def of_keys(shape: Shape) -> list[list[Int]]:
            def words(i: int) -> list[Int]:
                row = key.at(row_of(self.tokens[i // 4] + (here.rotation ^ (i % 4))))
                return channel_words(row, here, a.head_dim, shape.key_bits)

            return scores(shape, words, plain_queries(query, here), None)

        products = self._scores(of_keys)
        first = at.compressed + begin
        weights = softmax(products, query, scales[0], first, self.tokens, here, n, True)

        def of_values(shape: Shape) -> State:
            groups: dict[int, list[list[Int]]] = {}

            def words(i: int) -> list[Int]:
                if i // 4 not in groups:
                    groups.clear()
                    groups[i // 4] = transposed(a, shape, value, i // 4, here, row_of)
                return [words[i % 4] for words in groups[i // 4]]

            return add_block(shape, state, weights, words, None, scales[1], here, n)

        return self._add(state, of_values)


def transposed(
    a: Arrays, shape: Shape, value: Pointer, group: int, here: Place, row_of: Any
) -> list[list[Int]]:
    """Four channels of the buffer's values for each operand word, from rows of tokens."""
    runs = runs_of(shape.value_bits)
    out = []
    for number in range(2 * shape.words):
        word, run = divmod(number, runs)
        span = shape.block // runs
        first = here.t * (span // 4) + (4 * word + run * span)
        column = here.g * (a.head_dim // 8)
        rows = [
            lane.permute_bytes(
                value.at(row_of(first + b), column, 4 * group).word(), 0, here.selector
            )
            for b in range(4)
        ]
        out.append(warp.transposed(rows))
    return out


def _keep(shape: Shape, state: State, area: Pointer, here: Place, n: Numerics) -> None:
    """Writes a warp's result to shared memory: outputs, maxima in powers of two, sums."""
    lane.warp_barrier()
    size = shape.rows * shape.head_dim * 4
    per_tile = shape.outputs // shape.output_tiles
    with lane.when((here.t << 1) < min(shape.rows, 8)):
        for tile in range(shape.output_tiles):
            for k in range(shape.head_dim // 8):
                channel = here.g * (shape.head_dim // 8) + ((here.rotation ^ (k % 4)) + k // 4 * 4)
                for j in (0, 1):
                    row = (here.t << 1) + (8 * tile + j)
                    index = (row * shape.head_dim + channel) << 2
                    area.at(index).store(state.outputs[tile * per_tile + 2 * k + j])
    for tile in range(shape.score_tiles):
        total = lane.reduce_lanes(state.totals[tile], lambda x, y: x + y, (4, 8, 16))
        with lane.when(here.g.equals(0)):
            at = area.at((here.t + 4 * tile) << 2, size)
            at.store(state.maxima[tile] * (LOG2_E / n.unit))
            at.at(4 * shape.rows).store(total)


def decode(
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: jax.Array,
    buffer_lengths: jax.Array,
    query_lengths: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the last `T` cached tokens' queries to a cache; mode ``"int8"``.

    `query` is ``[B, T, N, H]``, `H` a multiple of 32 up to 256, of 64 if keys have 2- or 3-bit
    codes. int32 ``[B]`` each: `lengths`, tokens seen so far; `buffer_lengths`, how many of them are
    in the buffer; `query_lengths`, how many of the `T` queries are real, None if all are.

    With a window the cache may be a rolling buffer: block `i` is in place ``i % n``, and every
    block that a query sees is there. Returns ``[B, T, N, H]`` in the query's dtype or
    `settings.out_dtype`, and the float32 log-sum-exp ``[B, T, N]``.
    """
    lengths_of_all = lengths, buffer_lengths, query_lengths
    name = "turbojax_decode_hopper"
    return frame.call(_kernel, name, query, key, value, lengths_of_all, settings)
