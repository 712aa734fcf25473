"""INT4 weights times e4m3 activations for Hopper, for more than 64 tokens (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 on an H200: products 19 us for 256 tokens (112 tiles, one to a
multiprocessor), 75 for 1,024, 262 for 4,096; conversion, 176 of a tile's 1,024 clocks, and shared
memory hide behind them. Targets: 24, 85 and 330 us. Seen: 26.0 and 91.4 (XLA in e4m3 22.7, 78.5).
What is short is shared by all multiprocessors (half of them take 10 % less for a tile), so that
conversion costs its instructions, hidden or not: without it XLA's speed is left.

What `int4.py` loses, and what is different here:
  - Its products wait for one another and its conversion hides behind nothing: ptxas serializes
    products (C7513) as soon as registers that a product reads are written while one is on its way,
    even the next one's. Here conversion's last instructions write such registers between products
    (`_settle`), and what they write is computed before a wait, which is a loop, over which the
    compiler moves nothing.
  - Warpgroups take turns: one's products are in the matrix unit's queue while another, whose are
    done, starts its next ones.
  - Scales and biases of the outputs are copied ahead, like those of the tokens.
  - The next tile's first weights are converted before this tile's outputs are written.
  - Tiles of 128 tokens may have sums in two levels, as there: each group's products and additions
    of one warpgroup beside those of the other, without turns, as no warp waits for products.
  - With `Settings.is_even` tiles are cut between groups, where whole ones would leave programs
    idle. Sums go from program to program in float32, through memory, added in the groups' order.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.hopper.matmul import epilogue, program
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.lane import fragments
from pallas_kernels.mosaic.pipeline import PROGRAM, ROWS, SCALAR, WARPGROUPS
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES

TILE = WARPGROUPS * ROWS  # weight rows of a tile
# Of every array in shared memory; all barriers together take less.
_ALIGNMENT = 1024
# Tokens that are written at a time, to the staging places in turn.
_WRITTEN, _PLACES = 32, 2
# Registers of a thread that computes, and of one that copies. Together at most what the threads
# have at the start, 168 each: a kernel that asks for more waits forever.
REGISTERS = (232, 40)


@dataclasses.dataclass(frozen=True)
class Settings:
    epilogue: Epilogue
    tokens: int  # of a tile, a multiple of 32, at most 256
    stages: int  # groups of inputs in shared memory
    programs: int = 132  # how many run side by side, one to a multiprocessor
    # Whether tiles are cut between groups, so that all programs have equally many of them. The
    # groups of all tiles times the programs must be below 2**31.
    is_even: bool = False
    # Add every group in float32, see `program.Settings`; for tiles of at most 128 tokens.
    is_two_level: bool = False

    @property
    def width(self) -> int:
        return self.epilogue.outputs

    @property
    def columns(self) -> int:
        return WARPGROUPS * self.width

    @property
    def shared_bytes(self) -> int:
        stages = (TILE * ROW_BYTES, TILE, self.tokens * GROUP)
        factors = (1 + self.epilogue.has_bias) * [4 * TILE]
        out = _PLACES * _WRITTEN * self.columns * 2
        sizes = (
            *[self.stages * n for n in stages],
            *(TABLES * TABLE_BYTES, 2 * self.tokens, *factors, out, 1),
        )
        return sum(-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes)


class Memory(NamedTuple):
    """Shared memory and barriers of a program."""

    codes: Ref
    scales: Ref
    tables: Any
    x: Ref
    token_scales: Ref
    factors: Any
    out: Ref
    ready: Ref
    free: Ref
    tile_ready: Ref
    tile_free: Ref
    residual_ready: Ref
    tables_ready: Ref
    tensor_core_order: Ref


class Arrays(NamedTuple):
    """A product's arguments and its result."""

    codes: Ref
    scales: Ref
    tables: Any
    x: Ref
    token_scales: Ref
    factors: Any
    residual: Any
    out: Ref


class Work(NamedTuple):
    """A tile, or a part of it.

    Attributes:
      token: the first of its tokens.
      tile: its number among the tiles of outputs.
      begin: the first of its groups of inputs.
      end: the group after the last.
      missing: of the part that has group 0, how many parts come after it.
    """

    token: jax.Array
    tile: jax.Array
    begin: jax.Array
    end: jax.Array
    missing: jax.Array


class Grid(NamedTuple):
    """All tiles: `across` of tokens, which vary fastest, `down` of outputs; of `groups` each."""

    across: int
    down: int
    groups: int

    @property
    def tiles(self) -> int:
        return self.across * self.down

    def whole(self, number: jax.Array, s: Settings) -> Work:
        across, none = jnp.int32(self.across), jnp.int32(0)
        token, tile = lax.rem(number, across) * s.tokens, lax.div(number, across)
        return Work(token, tile, none, jnp.int32(self.groups), none)


@dataclasses.dataclass(frozen=True)
class EvenShare:
    """What the program at one of many places does, if all have equally many groups.

    First `rounds` whole tiles, one after the other with those of the other places; then groups that
    follow one another, of tiles that do. The first of these may begin late, the last end early;
    what is missing there the places after it do right after their whole tiles.
    """

    place: jax.Array
    places: int
    grid: Grid
    s: Settings

    @property
    def is_long(self) -> bool:
        """Whether each place has at least as many groups as a tile."""
        return self.grid.tiles >= self.places

    @property
    def rounds(self) -> int:
        return max(0, self.grid.tiles // self.places - 1)

    @property
    def count(self) -> jax.Array:
        """Of how many tiles it has at least a part."""
        groups = jnp.int32(self.grid.groups)
        begin, end = self._bounds()
        return self.rounds + lax.div(end - 1, groups) - lax.div(begin, groups) + 1

    def work(self, i: jax.Array) -> Work:
        part = self._part(i - self.rounds)
        if not self.rounds:
            return part
        whole = self.grid.whole(self.place + i * self.places, self.s)
        return jax.tree.map(functools.partial(jnp.where, i < self.rounds), whole, part)

    def _part(self, i: jax.Array) -> Work:
        groups = jnp.int32(self.grid.groups)
        begin, end = self._bounds()
        number = lax.div(begin, groups) + i
        before = number * groups
        # The place that has the tile's last group.
        last = lax.div((before + groups) * self.places - 1, groups * self._shared)
        number += self.rounds * self.places
        return self.grid.whole(number, self.s)._replace(
            begin=jnp.maximum(begin - before, 0),
            end=jnp.minimum(end - before, groups),
            missing=jnp.where(begin <= before, last - self.place, 0),
        )

    @property
    def _shared(self) -> int:
        """Tiles of which programs may have parts: those after the whole ones."""
        return self.grid.tiles - self.rounds * self.places

    def _bounds(self) -> tuple[jax.Array, jax.Array]:
        """Its first group and the one after its last, counted over these tiles."""
        total, places = self._shared * self.grid.groups, jnp.int32(self.places)
        return lax.div(self.place * total, places), lax.div((self.place + 1) * total, places)


class Parts(NamedTuple):
    """Where sums of cut tiles go from program to program.

    A program waits for those that started before it alone, and for what they do before they wait:
    it cannot be that all wait. Attributes:
      sums: of each place and warpgroup those that it hands over.
      done: for each of them a word that is 0 until they are there.
      place: the program's own; places are counted from the last program on.
      are_early: whether parts are there before the program comes to the rest of their tile. Then
        it begins with them, and programs do so at different times.
    """

    sums: Ref
    done: Ref
    place: jax.Array
    are_early: bool

    def hand_over(self, total: jax.Array, me: jax.Array) -> None:
        pipeline.inline(epilogue.hand_over, self._types)(total, *self._of(self.place, me))

    def collect(self, total: jax.Array, work: Work, me: jax.Array) -> jax.Array:
        """Adds the parts that are missing, in the order of their groups."""
        kind = pipeline.array(total.shape, total.dtype)
        take = pipeline.inline(epilogue.take_over, self._types, kind)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            added: jax.Array = take(total, *self._of(self.place + 1 + i, me))
            return added

        return lax.fori_loop(jnp.int32(0), work.missing, add, total)

    @property
    def _types(self) -> tuple[Any, ...]:
        return (plgpu.Layout.WGMMA, SCALAR, plgpu.RefType(), plgpu.RefType())

    def _of(self, place: jax.Array, me: jax.Array) -> tuple[jax.Array, Ref, Ref]:
        return place * WARPGROUPS + me, self.sums, self.done


def _operand(m: Memory, slot: jax.Array, me: jax.Array) -> jax.Array:
    """A group's weights, converted but for the choice between their signs."""
    refs = [m.codes.at[slot], m.scales.at[slot], m.tables]
    types = (SCALAR, *[plgpu.RefType()] * len(refs))
    words = pipeline.array((ROWS, 3 * GROUP // 4), jnp.int32)

    def run(row: Any, codes: Any, scales: Any, tables: Any) -> Any:
        return int4.choices_of_operand(codes, scales, tables, row)

    return pipeline.inline(run, types, words)(me * ROWS, *refs)


def _settle(choices: jax.Array) -> jax.Array:
    """The operand of `_operand`, in registers that are written while no product is on its way."""

    def run(choices: Any) -> Any:
        words = fragments.scalars(choices)
        threes = zip(words[::3], words[1::3], words[2::3], strict=True)
        return fragments.carrier([lane.permute_bytes_here(*three) for three in threes])

    kind = pipeline.array((ROWS, GROUP // 4), jnp.int32)
    return pipeline.inline(run, (plgpu.Layout.WGMMA,), kind)(choices)


def _accumulate(
    work: Work,
    total: jax.Array,
    operand: tuple[jax.Array, jax.Array],
    has_next: jax.Array,
    me: jax.Array,
    m: Memory,
    s: Settings,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A warpgroup's sums over a tile's groups of inputs; the first operand of the next tile.

    They are added to `total`. `operand` is the first group's `_operand`, and its slot;
    `has_next` says whether another tile follows.
    """
    # In two levels the matrix unit idles half of the time: who waits for a turn loses it.
    turns = None if s.is_two_level else m.tensor_core_order
    ping_pong = pipeline.PingPong(turns, me, WARPGROUPS)

    def step(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, words, slot = carry
        is_inside = g + 1 < work.end
        following = pipeline.next_slot(slot, s.stages)
        before = None if s.is_two_level else total
        product = program.start(_settle(words), m.x.at[slot], before)
        ping_pong.hand_on()
        pl.when(is_inside | has_next)(lambda: plgpu.barrier_wait(m.ready.at[following]))
        # While the product is in flight. After the last group this converts stale memory.
        words = _operand(m, following, me)
        # Its turn for the next product: a loop, over which the compiler moves no instructions. The
        # next tile's comes after the outputs, for the other warpgroup writes at the same time.
        pl.when(is_inside)(ping_pong.wait)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m.free.at[slot])
        return (total + product if s.is_two_level else product), words, following

    ping_pong.wait()
    carry = (total, *operand)
    total, words, slot = lax.fori_loop(work.begin, work.end, step, carry)
    return total, (words, slot)


def _finish(total: jax.Array, token: int, me: jax.Array, out: Ref, m: Memory, s: Settings) -> None:
    refs = [out, m.token_scales, *m.factors]
    types = [pipeline.tile_type(out), *[plgpu.RefType()] * (len(refs) - 1)]
    span = (token, min(_WRITTEN, s.tokens - token))

    def run(total: Any, row: Any, out: Any, scales: Any, *factors: Any) -> None:
        bias = factors[1] if s.epilogue.has_bias else None
        epilogue.finish(total, span, scales, factors[0], bias, out, row, s.epilogue)

    pipeline.inline(run, (plgpu.Layout.WGMMA, SCALAR, *types))(total, me * ROWS, *refs)


def _store(total: jax.Array, work: Work, me: jax.Array, m: Memory, a: Arrays, s: Settings) -> None:
    columns = pl.ds(work.tile * s.columns + me * s.width, s.width)
    plgpu.barrier_wait(m.tile_ready)
    for number, token in enumerate(range(0, s.tokens, _WRITTEN)):
        tokens, out = pl.ds(work.token + token, _WRITTEN), m.out.at[me, number % _PLACES]
        plgpu.wait_smem_to_gmem(_PLACES - 1, wait_read_only=True)
        if s.epilogue.has_residual:
            barrier = m.residual_ready.at[me]
            plgpu.copy_gmem_to_smem(a.residual.at[tokens, columns], out, barrier)
            plgpu.barrier_wait(barrier)
        _finish(total, token, me, out, m, s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, a.out.at[tokens, columns])
    plgpu.barrier_arrive(m.tile_free)


def _produce(work: Work, slot: jax.Array, m: Memory, a: Arrays, s: Settings) -> jax.Array:
    tokens, tiles = pl.ds(work.token, s.tokens), pl.ds(work.tile * WARPGROUPS, WARPGROUPS)

    def group(g: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(m.free.at[slot])
        ready = m.ready.at[slot]
        plgpu.copy_gmem_to_smem(a.codes.at[tiles, g], m.codes.at[slot], ready)
        plgpu.copy_gmem_to_smem(a.scales.at[tiles, g], m.scales.at[slot], ready)
        inputs = pl.ds(g * GROUP, GROUP)
        plgpu.copy_gmem_to_smem(a.x.at[tokens, inputs], m.x.at[slot], ready)
        return pipeline.next_slot(slot, s.stages)

    slot = lax.fori_loop(work.begin, work.end, group, slot)

    @pl.when(work.begin == 0)
    def _() -> None:
        plgpu.barrier_wait(m.tile_free)
        plgpu.copy_gmem_to_smem(a.token_scales.at[tokens], m.token_scales, m.tile_ready)
        rows = pl.ds(work.tile * TILE, TILE)
        for source, target in zip(a.factors, m.factors, strict=True):
            plgpu.copy_gmem_to_smem(source.at[rows], target, m.tile_ready)

    return slot


def _memory(stages: int, scales: Any, s: Settings) -> Memory:
    barrier, factors = plgpu.Barrier, 1 + s.epilogue.has_bias
    chunk = (ROWS * ROW_BYTES // int4.CHUNK, int4.CHUNK)
    return Memory(
        codes=plgpu.SMEM((stages, WARPGROUPS, *chunk), jnp.uint8),
        scales=plgpu.SMEM((stages, WARPGROUPS, ROWS), scales),
        tables=plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8),
        x=pipeline.tile((stages, s.tokens, GROUP), jnp.float8_e4m3fn),
        token_scales=plgpu.SMEM((s.tokens,), jnp.bfloat16),
        factors=[plgpu.SMEM((TILE,), jnp.float32)] * factors,
        out=pipeline.tile((WARPGROUPS, _PLACES, _WRITTEN, s.width), s.epilogue.dtype),
        ready=barrier(num_arrivals=3, num_barriers=stages),
        free=barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        tile_ready=barrier(num_arrivals=1 + factors),
        tile_free=barrier(num_arrivals=WARPGROUPS),
        residual_ready=barrier(num_barriers=WARPGROUPS),
        tables_ready=barrier(),
        tensor_core_order=pipeline.PingPong.memory(WARPGROUPS),
    )


def _kernel(*refs: Ref, grid: Grid, s: Settings) -> None:
    codes, scales, tables, x, token_scales, *rest = refs
    factors = [rest.pop(0) for _ in range(1 + s.epilogue.has_bias)]
    residual = rest.pop(0) if s.epilogue.has_residual else None
    a = Arrays(codes, scales, tables, x, token_scales, factors, residual, rest.pop(0))
    me = lax.axis_index("warpgroup")
    if s.is_even:
        places = lax.axis_size(PROGRAM)
        place = places - 1 - lax.axis_index(PROGRAM)
        share = EvenShare(place, places, grid, s)
        count, work_of = share.count, share.work
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((places * WARPGROUPS,)))
        parts = Parts(rest.pop(0), done, place, share.is_long)
    else:
        scheduler, parts = pipeline.TileScheduler(grid.tiles), None
        count = scheduler.count

        def work_of(i: jax.Array) -> Work:
            return grid.whole(scheduler.number(i), s)

    def body(m: Memory) -> None:
        def consume(
            i: jax.Array, operand: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            work = work_of(i)
            total = pipeline.full(0.0, (ROWS, s.tokens))
            if parts is not None and parts.are_early:
                total = parts.collect(total, work, me)
            total, operand = _accumulate(work, total, operand, i + 1 < count, me, m, s)
            if parts is None:
                _store(total, work, me, m, a, s)
                return operand

            @pl.when(work.begin > 0)
            def _() -> None:
                parts.hand_over(total, me)

            @pl.when(work.begin == 0)
            def _() -> None:
                whole = total if parts.are_early else parts.collect(total, work, me)
                _store(whole, work, me, m, a, s)

            return operand

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            return _produce(work_of(i), slot, m, a, s)

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, [m.free], m.tile_free)
            pipeline.PingPong(m.tensor_core_order, me, WARPGROUPS).begin()
            plgpu.barrier_wait(m.tables_ready)
            slot = jnp.int32(0)
            plgpu.barrier_wait(m.ready.at[slot])
            first = (_operand(m, slot, me), slot)
            lax.fori_loop(jnp.int32(0), count, consume, first)
            # What is read will be written before the kernel is over.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def start_to_produce() -> None:
            plgpu.copy_gmem_to_smem(a.tables, m.tables, m.tables_ready)
            lax.fori_loop(jnp.int32(0), count, produce, jnp.int32(0))

        pipeline.divide(me, WARPGROUPS, REGISTERS, start_to_consume, start_to_produce)

    pl.run_scoped(body, _memory(s.stages, scales.dtype, s), collective_axes="warpgroup")


def int4_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array,
    x: jax.Array,
    token_scales: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    columns: int,
    settings: Settings,
) -> jax.Array:
    """`int4.int4_matmul` with e4m3 scales, summed by the matrix unit alone; `M` is a multiple of 8.

    Raises:
      ValueError: if there are fewer outputs than a tile has, see `program.launch`.
    """
    s = settings
    if columns < s.columns:
        raise ValueError(f"{columns=} must be at least {s.columns}, those of a tile")
    tiles = pl.cdiv(x.shape[0], s.tokens), pl.cdiv(codes.shape[0], WARPGROUPS)
    grid = Grid(*tiles, codes.shape[1])
    pieces = grid.tiles * (grid.groups if s.is_even else 1)
    out = [jax.ShapeDtypeStruct((x.shape[0], columns), jnp.dtype(s.epilogue.dtype))]
    if s.is_even:
        places = min(pieces, s.programs)
        out.append(jax.ShapeDtypeStruct((places, TILE, s.tokens), jnp.float32))
    kernel = functools.partial(_kernel, grid=grid, s=s)
    run = pipeline.launch(kernel, "turbojax_int4_matmul_many_hopper", out, pieces, s.programs)
    if s.is_even:
        # Under `vmap` one after the other, for all would share the words of `Parts.done`.
        run = jax.custom_batching.sequential_vmap(run)
    weights = (int4.chunks(codes), lax.bitcast_convert_type(scales, jnp.uint8), tables)
    optional = [array for array in (bias, residual) if array is not None]
    result: jax.Array = run(*weights, x, token_scales, output_scales, *optional)[0]
    return result
