"""Decode for 9 and more queries of a KV head against packed codes, for Hopper.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, 4 bits: 571
MB, 128 us on an H200; for a block of 64 tokens 980 instructions with 4 new tokens and 1,860 with 8,
of which a multiprocessor issues two a clock, so 130 and 247 us. Target: 1.15 times one token, 161
us. Seen: 4 tokens 149 us, 1.06 times; 8 tokens 247, 1.76. Memory bounds the first, instructions
the second.

Several new tokens (speculative decoding) or many query heads of a KV head: `hopper.decode` takes
eight queries a program, and for more it reads and unpacks the blocks again. Here a program takes 16
or 32 and dequantizes a block once for all of them (`operands`, `block`).

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.layouts import LOG2_E, Side
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode import frame
from pallas_kernels.mosaic.hopper.decode.block import channel_words, row_code, row_scale
from pallas_kernels.mosaic.hopper.decode.frame import Arrays, Program, Settings, copies_of
from pallas_kernels.mosaic.hopper.decode.kernel import transposed
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Shape, Width
from pallas_kernels.mosaic.hopper.decode_rows.block import (
    Queries,
    State,
    Team,
    Tokens,
    Weights,
    add_block,
    exchange_bytes,
    query_bytes,
    scores,
    softmax,
)
from pallas_kernels.mosaic.hopper.decode_rows.operands import (
    UNIT,
    channel_of,
    key_channels,
    key_pairs,
    plain_value,
    prepare_keys,
    prepare_values,
    scales_queries,
    scratch_bytes,
    signed_bytes,
    value_channels,
    value_words,
)
from pallas_kernels.mosaic.lane import Float, Int, Pointer


@dataclasses.dataclass(frozen=True, eq=False)
class Products:
    """What a warp computes of blocks and the buffer, with code for each width of the codes."""

    shape: Shape  # sizes, with the widest codes
    key: Width  # width of the head's keys
    value: Width  # width of its values
    here: Place
    n: Numerics
    tokens: Tokens  # those of the scores' columns
    queries: Queries  # the program's
    scratch: Pointer  # the warp's shared memory of `scratch_bytes`
    team: Team

    def _of_key(self, bits: int) -> Shape:
        return dataclasses.replace(self.shape, key_bits=bits)

    def _of_value(self, bits: int) -> Shape:
        return dataclasses.replace(self.shape, value_bits=bits)

    def _scores(self, f: Callable[[Shape], list[list[Float]]]) -> list[list[Float]]:
        """Scores by row, from `f` for the width of the keys."""
        rows, count = self.shape.rows // 8, self.shape.block // (4 * self.team.size)
        flat = self.key.either(
            [Float] * (rows * count),
            lambda bits: [x for row in f(self._of_key(bits)) for x in row],
        )
        return [flat[i * count : (i + 1) * count] for i in range(rows)]

    def _add(
        self, state: State, weights: Weights, scale: Float, values: Callable[[Shape], Any]
    ) -> State:
        """Adds weighted values, whose operands are ``values(shape)`` for a width of values."""
        flat = self.value.either(
            [Float] * len(state.flat()),
            lambda bits: add_block(
                self.shape, state, weights, values(self._of_value(bits)), scale, self.n
            ).flat(),
        )
        return State.of(flat, self.shape.rows // 16)

    def attend_block(
        self,
        state: State,
        slot: Pointer,
        scales: tuple[Float, Float],
        first_token: Int,
        is_masked: bool,
        when_alone: Callable[[], None],
    ) -> State:
        """Adds the block in shared memory at `slot`; `scales` are those of its keys and values.

        `is_masked` says whether some query may not see all of it. In a team of several warps,
        `when_alone` is called once all of them are done with the block before.
        """
        here, scratch = self.here, self.scratch
        offsets = {name: self.shape.offset(name) for name, _ in self.shape.parts}

        def of_keys(shape: Shape) -> list[list[Float]]:
            prepare_keys(shape, slot, offsets, scratch, here)
            lane.warp_barrier()
            column = self.tokens.of_column(here) * shape.key_row + here.t * (shape.key_row // 4)

            def load(tile: int) -> list[Int]:
                token = slot.at(column, self.tokens.offsets[tile] * shape.key_row)
                return token.words(shape.key_row // 16)

            return scores(
                shape,
                self.shape.block // (8 * self.team.size),
                self.queries,
                here,
                load,
                lambda i: key_channels(scratch, i, here),
                lambda words, i, channels: key_pairs(shape, words, i, channels),
                scales_queries(shape),
            )

        found = self._scores(of_keys)
        lane.warp_barrier()
        fours = self.shape.head_dim // (32 * self.team.size)

        def prepare(bits: int) -> list[Any]:
            shape = self._of_value(bits)
            before = self.team.member * fours
            prepare_values(shape, slot, offsets, scratch, here, fours, before)
            return []

        self.value.either([], prepare)
        weights = self._softmax(found, scales[0], first_token, is_masked)
        lane.warp_barrier()
        if self.team.size > 1:
            when_alone()
        own = self.team.member * (4 * fours)

        def of_values(shape: Shape) -> Callable[[int], list[Int]]:
            of_four: dict[int, list[tuple[Int, Int]]] = {}

            def values(number: int) -> list[Int]:
                four, which = divmod(number, 4)
                if four not in of_four:
                    of_four.clear()
                    of_four[four] = value_channels(shape, scratch, four, here)
                channel = channel_of(number, here.g, shape.head_dim) + own
                place = channel * shape.value_row + here.t * (shape.value_row // 4)
                words = slot.at(place, offsets["value"]).words(shape.value_row // 16)
                return value_words(shape, words, of_four[four][which])

            return values

        return self._add(state, weights, scales[1], of_values)

    def _softmax(
        self, found: list[list[Float]], scale: Float, first: Int, is_masked: bool
    ) -> Weights:
        return softmax(
            found,
            self.queries,
            scale,
            self.tokens,
            first,
            is_masked,
            self.here,
            self.team,
            self.n,
        )

    def attend_buffer(self, a: Arrays, state: State, at: Program, number: Int) -> State:
        here, begin = self.here, number * self.shape.block
        key, value = (x.buffer.times(at.pair, a.buffer_size * a.head_dim) for x in (a.key, a.value))
        scales = [x.buffer_scale.at(at.pair << 2).float() for x in (a.key, a.value)]

        def row_of(token: Int) -> Int:
            return (token + begin).minimum(a.buffer_size - 1) * a.head_dim

        def of_keys(shape: Shape) -> list[list[Float]]:
            def load(tile: int) -> list[Int]:
                row = key.at(row_of(self.tokens.of_column(here) + self.tokens.offsets[tile]))
                return channel_words(row, here, a.head_dim, shape.key_bits)

            return scores(
                shape,
                self.shape.block // (8 * self.team.size),
                self.queries,
                here,
                load,
                lambda _: None,
                lambda words, i, _: signed_bytes(words[i]),
                False,
            )

        found = self._scores(of_keys)
        weights = self._softmax(found, scales[0], at.compressed + begin, True)
        own = self.team.member * (a.head_dim // (8 * self.team.size))

        def of_values(shape: Shape) -> Callable[[int], list[Int]]:
            groups: dict[int, list[list[Int]]] = {}

            def values(number: int) -> list[Int]:
                four, which = divmod(number, 4)
                if four not in groups:
                    groups.clear()
                    groups[four] = transposed(a, shape, value.at(own), four, here, row_of)
                return [plain_value(words[which]) for words in groups[four]]

            return values

        return self._add(state, weights, scales[1], of_values)


def store_queries(
    a: warp.Arrays,
    at: warp.Program,
    shape: Shape,
    here: Place,
    queries: Queries,
    key: Width,
    number: Int,
    factor: float,
    unit: float,
) -> None:
    """Quantizes eight of the program's queries; row ``head * T + token`` of its KV head.

    `key` is the width of the head's keys, which determines the order of channels. `number` is the
    warp's; several warps may store the same. `factor` is the scores', `unit` the exponential's.
    """
    eight = number & (shape.rows // 8 - 1)
    tile, half = eight >> 1, eight & 1
    own = (eight << 3) + here.g
    row = (at.tile * shape.rows + own).minimum(a.rows - 1)
    index = (at.batch * a.tokens + row % a.tokens) * a.heads + at.head * a.group + row // a.tokens
    width = 4 if a.dtype == "float32" else 2
    pointer = a.query.times(index, a.head_dim * width)

    def load(bits: int) -> list[Float]:
        words = channel_words(pointer, here, a.head_dim, bits, width)
        return [v for word in words for v in warp.numbers(word, a.dtype)]

    x = key.either([Float] * (a.head_dim // 4), load)
    # The factor of the scores stays positive, so that it does not move the maximum.
    x = x if factor >= 0 else [-v for v in x]
    scale = row_scale(x)
    codes = [row_code(v, scale).to_float() for v in x]
    place = queries.operands.at(
        (tile * (shape.head_dim // 16 * 512)) + (((here.g << 2) + here.t) << 4) + (half << 2)
    )
    for i in range(0, len(codes), 4):
        for odd in (0, 1):
            pair = lane.half.pack(codes[i + odd], codes[i + odd + 2])
            place.at(128 * i + 8 * odd).store(pair)
    token = row % a.tokens
    is_real = (at.tile * shape.rows + own < a.rows) & (token < at.query_length)
    with lane.when(here.t.equals(0)):
        queries.scales.at(own << 2).store(scale * (abs(factor) * unit / UNIT))
        queries.positions.at(own << 2).store(is_real.where(at.begin + token, -1))


def _row(head_dim: int) -> int:
    """Numbers from one row of a result to the next; rows stored together differ in banks."""
    return head_dim + 8


@dataclasses.dataclass(frozen=True)
class RowSettings(Settings):
    """Static settings as of `decode`, with 16 or 32 rows.

    Raises:
      ValueError: if this number of rows or this team is not supported.
    """

    team: int = 1  # how many warps share blocks, 1 or 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows not in (16, 32):
            raise ValueError(f"{self.rows=} must be 16 or 32")
        if self.team not in (1, 2):
            raise ValueError(f"{self.team=} must be 1 or 2")
        if self.stages < self.team:
            raise ValueError(f"{self.stages=} must be at least {self.team=}")

    @property
    def teams(self) -> int:
        return self.warps // self.team

    def slot_bytes(self, head_dim: int) -> int:
        """Shared memory of a team's blocks in flight, which holds its result in the end."""
        return max(super().warp_bytes(head_dim), self.rows * (_row(head_dim) + 2) * 4)

    def area_bytes(self, head_dim: int) -> int:
        """Shared memory of a team: its blocks, what its warps exchange, their scratch memory."""
        exchange = exchange_bytes(self.team, self.rows, self.block)
        return self.slot_bytes(head_dim) + exchange + self.team * scratch_bytes(head_dim)

    def warp_bytes(self, head_dim: int) -> int:
        """A warp's part of all this, and of the queries' memory, which is behind the areas."""
        total = self.teams * self.area_bytes(head_dim) + query_bytes(self.rows, head_dim)
        return -(-total // (16 * self.warps)) * 16


def _kernel(*refs: Any, s: RowSettings) -> None:
    frame.body(refs, lambda a, ids, memory: _program(a, ids, memory, s), s)


def _program(a: Arrays, ids: list[Int], memory: tuple[Pointer, Pointer], s: RowSettings) -> None:
    at = Program.of(a, ids, s)
    _walk(a, at, memory, s)
    found = frame.Results(
        area=memory[0],
        count=s.teams,
        each=s.area_bytes(a.head_dim),
        row=_row(a.head_dim),
        # `_keep` writes the columns of a tile side by side.
        channel=lambda place: channel_of(place >> 3, place & 7, a.head_dim),
    )
    frame.combine(a, at, found, s, is_unrolled=False)


def _walk(a: Arrays, at: Program, smem: tuple[Pointer, Pointer], s: RowSettings) -> None:
    shape = Shape(a.head_dim, s.block, max(s.key_bits), max(s.value_bits), s.rows)
    n = Numerics(s.exponential, s.window, s.soft_cap, a.tokens > 1 or s.window is not None)
    here, teams, tiles = Place.here(), s.teams, s.rows // 16
    warp_number = lane.uniform(lane.thread() >> 5)
    number, member = warp_number // s.team, warp_number & (s.team - 1)
    area = s.area_bytes(a.head_dim)
    slots = warp.Slots.of(smem, number, area, shape.bytes, s.stages, s.arrivals)
    exchange = slots.area.at(s.slot_bytes(a.head_dim))
    team = Team(s.team, number, member, exchange, s.rows)
    queries = Queries.of(smem[0].at(teams * area), s.rows, a.head_dim)
    leader = (here.g | here.t | member).equals(0)
    copies = member.equals(0) if s.copies_words else leader
    widths = a.key.width(at.pair, s.key_bits), a.value.width(at.pair, s.value_bits)
    start_copy = copies_of(a, at, shape, widths, s)
    first, stop = at.start + number, at.stop.minimum(at.blocks)

    def start_first_copies() -> None:
        for i in range(s.stages if s.team == 1 else s.stages - 1):
            unit = first + i * teams
            with lane.when(unit < stop):
                start_copy(unit, slots.slot(i), slots.barrier(i))

    with lane.when(leader):
        slots.init()
        if not s.copies_words:
            start_first_copies()
    if s.copies_words:
        lane.warp_barrier()
        with lane.when(copies):
            start_first_copies()
    store_queries(a, at, shape, here, queries, widths[0], warp_number, s.scale, n.unit)
    lane.block_barrier()
    own = member * scratch_bytes(a.head_dim) + exchange_bytes(s.team, s.rows, s.block)
    tokens = Tokens.of(a.head_dim, s.block, widths[1], team)
    products = Products(shape, *widths, here, n, tokens, queries, exchange.at(own), team)

    def block_scales(unit: Int) -> list[Float]:
        index = (at.pair * a.blocks + a.place(unit, s)) << 2
        return [side.block_scale.at(index).float() for side in (a.key, a.value)]

    def copy_later(unit: Int, slot: Pointer, barrier: Pointer) -> None:
        with lane.when(member.equals(0) & (unit < stop)), frame.copying(s):
            start_copy(unit, slot, barrier)

    def copy_to_slot_before(unit: Int) -> None:
        # All warps of the team are done with the block before.
        before = ((unit - first) // teams + (s.stages - 1)) % s.stages
        copy_later(unit + teams * (s.stages - 1), slots.slot(before), slots.barrier(before))

    def attend(
        is_masked: bool, unit: Int, state: list[Any], slot: Pointer, following: list[Float]
    ) -> list[Any]:
        *flat, key_scale, value_scale = state
        scales, before = (key_scale, value_scale), State.of(flat, tiles)
        after = products.attend_block(
            before, slot, scales, unit * s.block, is_masked, lambda: copy_to_slot_before(unit)
        )
        return [*after.flat(), *following]

    def refill(unit: Int, slot: Pointer, barrier: Pointer, _: Any) -> None:
        if s.team == 1:
            copy_later(unit + teams * s.stages, slot, barrier)

    carry = [*State.empty(tiles, a.head_dim // s.team).flat(), *block_scales(first)]
    place = lane.integer(0), lane.integer(0)
    # Without a window all queries see all of every block but the last.
    whole = (at.begin + 1) // s.block if s.window is None else lane.integer(0)
    middle = whole.maximum(first).minimum(stop)
    rest = first + ((middle - first).maximum(0) + (teams - 1)) // teams * teams
    runs = ((first, middle, False), (rest, stop, True))
    for begin, end, is_masked in runs if n.is_masked else ((first, stop, False),):
        carry, place = warp.run_of_blocks(
            begin,
            end,
            teams,
            slots,
            carry,
            place,
            lambda u: block_scales(u + teams),
            functools.partial(attend, is_masked),
            refill,
        )
    *flat, _, _ = carry
    begin, end = at.of_buffer(at.start + number, teams, s)

    def attend_buffer(unit: Int, x: list[Any]) -> list[Any]:
        return products.attend_buffer(a, State.of(x, tiles), at, unit - at.blocks).flat()

    flat = lane.loop(begin, end, teams, flat, attend_buffer)
    _keep(shape, State.of(flat, tiles), slots.area, queries, here, team, n)


def _keep(
    shape: Shape,
    state: State,
    area: Pointer,
    queries: Queries,
    here: Place,
    team: Team,
    n: Numerics,
) -> None:
    totals = [lane.reduce_lanes(x, lambda x, y: x + y, (1, 2)) for x in state.totals]
    if team.size == 1:
        lane.warp_barrier()
    else:
        team.sync()  # until here the exchange holds numbers of the last block
        others = team.others(totals, here)
        totals = [x + y for x, y in zip(totals, others, strict=True)]
    tiles, step = shape.rows // 16, _row(shape.head_dim)
    count = shape.head_dim // (8 * team.size)
    for row in range(2 * tiles):
        own = here.g + 8 * row
        # Where there is no query, blocks were not masked.
        is_real = queries.position(row, here) >= 0
        for k in range(count):
            first = (k * tiles + row // 2) * 4 + row % 2 * 2
            pair = [is_real.where(x, 0.0) for x in state.outputs[first : first + 2]]
            place = own * step + ((team.member * count + k) << 3) + (here.t << 1)
            area.at(place << 2).store_words([x.as_int() for x in pair])
        with lane.when((here.t | team.member).equals(0)):
            at = area.at(own << 2, shape.rows * step * 4)
            top = is_real.where(state.maxima[row], float("-inf"))
            at.store(top * (LOG2_E / n.unit))
            at.at(4 * shape.rows).store(is_real.where(totals[row], 0.0))


def decode(
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: jax.Array,
    buffer_lengths: jax.Array,
    query_lengths: jax.Array | None,
    settings: RowSettings,
) -> tuple[jax.Array, jax.Array]:
    """As `decode.kernel.decode`."""
    lengths_of_all = lengths, buffer_lengths, query_lengths
    name = "turbojax_decode_rows_hopper"
    return frame.call(_kernel, name, query, key, value, lengths_of_all, settings)
