"""Decode for 9 and more queries of a KV head against packed codes, for Hopper.

Several new tokens (speculative decoding) or many query heads of a KV head: `hopper.decode` takes
eight queries a program, and for more it reads and unpacks the blocks again. Here a program takes 16
or 32 and dequantizes a block once for all of them (`operands`, `block`).

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128, 4 bits, 8
new tokens, that is 32 queries:
  - bytes that must move: 571 MB, as for one token; 128 us on an H200 at 4.5 TB/s. One token takes
    142 us; the target is 1.15 times that, 163 us.
  - instructions for a block of 64 tokens: dequantizing 512 codes of a lane 640, products 256, the
    softmax of 64 scores of a lane 500, adding to 128 outputs 130, the rest 200: 1,750; for 16
    queries 1,200. A multiprocessor takes 496 blocks; its four schedulers could issue 2,300 a block
    in 163 us. `hopper.decode` needs 4,000 for 32 queries.
  - the matrix unit: 256 products of 16 x 8 x 16 at some 6.5 clocks: 1,660 of the same 2,300.

Versions, H200, jax 0.11.2, device time in us, 4 bits, cuDNN on bfloat16 keys and values in the same
run with one token:
                                            16 x 32k        64 x 4k         1 x 8k
    tokens                               1    4    8     1    4    8     1    4     8
    cuDNN                              473             242             14.6
    `hopper.decode`, programs of 8     142  276  520    79  166  321  10.5  15.5  20.2
    v1, a warp for 16 or 32, masks          184  311        115  206
      within a branch
    v2, two warps share a block for         209  283             202
      32 (team), not for 16
    v3, results without bank conflicts      181  287        113  176        14.6  17.4
    v4, blocks with masks by themselves     177  283        106  169
  A warp for 32 queries has 255 registers and its loop 30 KB of code; two warps that share a block
  have 168 and 16 KB, and 12 of them fit a multiprocessor. All versions issue an instruction in
  every second clock of a scheduler, as `hopper.decode` does for 8 queries, so their number counts:
  without dequantizing 38 us less for 16 queries and 32 for 32, without products 19 and 40, without
  the branch with masks 16 and 12, so in v4 blocks that need them have a loop of their own. Twelve
  warps instead of eight for 16 queries: no gain. Warps that begin every block together, to share
  fetched instructions: 12 to 20 % slower. More programs than run at once cost 10 us a wave each.
  Of the target of 1.15 times one token 4 tokens reach 1.25 and 1.38, 8 tokens 2.0 and 2.2.
  Rows: `benchmarks/results/bytes_versions_2026-11-24.json`, v4's `hopper_2026-11-24.json`.

Tried instead: a warpgroup shares a block. Dequantized keys, then values, are the left operand of
asynchronous products (wgmma) in registers, queries and weights the right one in shared memory;
scores go through shared memory, so that a lane has 8 or 16 tokens of one query. 128 registers, so
four warpgroups run at once; a loop of 8 to 10 KB. us, one run in which one token takes 139, 75, 10:
                                            16 x 32k        64 x 4k         1 x 8k
    tokens                                    4    8          4    8          4     8
    v4                                      175  282        103  166       14.1  16.8
    warpgroups                              213  274        114  150       13.6  16.4
    values dequantized before the softmax   218  288        117  147
    the first product in two halves         218  271
    three warpgroups                             297                       12.0  14.9
    five, which spills                      228
  16 queries take 385 instructions of each warp for a block, 1,540 in all, and 32 some 450: no fewer
  than here, as a lane loads the scales of its keys' channels for two tokens, not for eight. 32 gain
  3 % in long caches and some 10 % in short ones, which is not worth a third kernel. What keeps it
  from more was not found.
  Not timed: a lane that a warp elects (elect.sync) starts a block's copies in 28 instructions where
  one that a condition finds takes 66, as the compiler then knows that there is one alone.
  Rows: `benchmarks/results/bytes_tuning_2026-11-25.json`.
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
