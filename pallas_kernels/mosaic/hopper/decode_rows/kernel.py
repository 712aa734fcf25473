"""Decode for 9 and more queries of a KV head against packed codes, for Hopper.

Roofline, for 16 sequences of 32,768 tokens, 8 KV heads of 4 queries each, head dim 128, 4 bits, 8
new tokens: 571 MB, 128 us on an H200; 1,750 instructions for a block of 64 tokens, where 2,300
could be issued in the target; 1,660 of the matrix unit's clocks. Target: 1.15 times one token, 163
us. Seen: 4 tokens 1.25 times, 8 tokens 2.0 (283 us). Instructions bound it: a scheduler issues one
in every second clock.

Several new tokens (speculative decoding) or many query heads of a KV head: `hopper.decode` takes
eight queries a program, and for more it reads and unpacks the blocks again. Here a program takes 16
or 32 and dequantizes a block once for all of them (`operands`, `block`).

Roofline in full and versions: `docs/kernels/decode.md`.
"""

import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels.layouts import LOG2_E, Side
from pallas_kernels.mosaic import lane, warp
from pallas_kernels.mosaic.hopper.decode import frame
from pallas_kernels.mosaic.hopper.decode.inputs import Arrays, Program, Settings, copies_of
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Shape
from pallas_kernels.mosaic.hopper.decode_rows.block import Queries, State, Tokens, query_bytes
from pallas_kernels.mosaic.hopper.decode_rows.operands import channel_of, scratch_bytes
from pallas_kernels.mosaic.hopper.decode_rows.products import Products
from pallas_kernels.mosaic.hopper.decode_rows.query import store_queries
from pallas_kernels.mosaic.hopper.decode_rows.team import Team, exchange_bytes
from pallas_kernels.mosaic.lane import Float, Int, Pointer


def _row(head_dim: int) -> int:
    """Numbers from one row of a result to the next; rows stored together differ in banks."""
    return head_dim + 8


@dataclasses.dataclass(frozen=True)
class RowSettings(Settings):
    """Static settings as of `decode`, with 16 or 32 rows.

    Attributes:
      team: how many warps share blocks, 1 or 2.

    Raises:
      ValueError: if this number of rows or this team is not supported.
    """

    team: int = 1

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
        with lane.when(copies & (unit < stop)):
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
    query_lengths: jax.Array,
    settings: RowSettings,
) -> tuple[jax.Array, jax.Array]:
    """As `decode.kernel.decode`."""
    lengths_of_all = lengths, buffer_lengths, query_lengths
    name = "turbojax_decode_rows_hopper"
    return frame.call(_kernel, name, query, key, value, lengths_of_all, settings)
