"""What the Hopper kernels of quantized linear layers share: tiles, copies, and what is written.

A program takes tiles of 128 outputs, two warpgroups with 64 each, and some tokens. One warpgroup
copies groups of 128 inputs to shared memory, the others multiply.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue
from pallas_kernels.mosaic.lane import Int, fragments
from pallas_kernels.mosaic.lane.instructions import asm
from pallas_kernels.mosaic.lane.numbers import i32
from pallas_kernels.mosaic.pipeline import ROW, ROWS, SCALAR, WARPGROUPS
from pallas_kernels.mosaic.products import int4, wgmma
from pallas_kernels.mosaic.products.int4 import GROUP

TILE = WARPGROUPS * ROWS  # outputs of a tile, before a gated product halves them
# Copies are of multiples of this many bytes.
_COPY_UNIT = 128
# Tokens of a tile that are written at a time, to the staging places in turn.
_MOST_WRITTEN, _PLACES = 64, 2


@dataclasses.dataclass(frozen=True)
class Settings:
    epilogue: Epilogue
    tokens: int  # of a tile: 8, 16, 32, 64, 128 or 256
    stages: int  # groups of inputs in shared memory, a multiple of `teams`
    # Pairs of warpgroups that take groups of inputs in turn and add up at the end: 1 or 2.
    teams: int = 1
    parts: int = 1  # how many programs share a tile's inputs and write float32 partial sums
    # Sum each group separately and add it in float32, instead of leaving the sum to the matrix
    # unit, whose additions keep about 14 bits. Scales in bfloat16 need it.
    is_two_level: bool = True
    programs: int = 132  # how many run side by side, one to a multiprocessor

    @property
    def columns(self) -> int:
        return WARPGROUPS * self.width

    @property
    def width(self) -> int:
        return ROWS if self.parts > 1 else self.epilogue.outputs

    @property
    def written(self) -> int:
        return min(self.tokens, _MOST_WRITTEN)

    @property
    def places(self) -> int:
        """Staging places in shared memory for tokens that are written."""
        return 1 if self.tokens <= _MOST_WRITTEN else _PLACES

    @property
    def scaled(self) -> int:
        unit = _COPY_UNIT // 2
        return -(-self.tokens // unit) * unit

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that copies.

        Together at most what the threads have at the start (168 each with three warpgroups, 96 with
        five): a kernel that asks for more waits forever.
        """
        return (232, 40) if self.teams == 1 else (112, 32)

    @property
    def warpgroups(self) -> int:
        return WARPGROUPS * self.teams

    def shared_bytes(self, stage: int) -> int:
        """Shared memory besides tables, if a stage's weights take `stage` bytes."""
        out = self.places * self.written * self.columns * (4 if self.parts > 1 else 2)
        sums = TILE * self.tokens * 4 * (self.teams - 1)
        return self.stages * (stage + self.tokens * GROUP) + out + sums + 2 * self.scaled + 1024


class Tile(NamedTuple):
    """Memory and barriers of a tile, besides what its weights need."""

    x: Ref
    token_scales: Ref
    out: Ref
    sums: Ref
    ready: Ref
    free: Ref
    tile_ready: Ref
    tile_free: Ref
    residual_ready: Ref
    sums_ready: Ref
    sums_free: Ref


class Arrays(NamedTuple):
    """A product's arguments and its result."""

    weights: tuple[Ref, ...]
    x: Ref
    token_scales: Ref
    output_scales: Ref
    bias: Ref
    residual: Ref
    out: Ref


class Work:
    """A tile of outputs, or a part of its inputs, by its number; tokens vary fastest."""

    def __init__(self, number: jax.Array, tiles: int, groups: int, s: Settings) -> None:
        self.part = lax.rem(number, jnp.int32(s.parts))
        tile = lax.div(number, jnp.int32(s.parts))
        self.token = lax.rem(tile, jnp.int32(tiles)) * s.tokens
        self.tile = lax.div(tile, jnp.int32(tiles))
        self.row = self.tile * TILE
        self.begin = lax.div(self.part * groups, jnp.int32(s.parts))
        self.end = lax.div((self.part + 1) * groups, jnp.int32(s.parts))


Step = Callable[[Work, jax.Array], jax.Array]
"""``step(work, slot)`` of a tile that begins at `slot`; returns the slot after its last group."""


def tile_memory(copies: int, x: Any, s: Settings) -> Tile:
    """What a program allocates besides its weights, whose stage takes `copies` copies."""
    e, barrier = s.epilogue, plgpu.Barrier
    shape = (WARPGROUPS, s.places, s.written, s.width)
    if s.parts > 1:
        out = plgpu.SMEM(shape, jnp.float32)
    else:
        out = pipeline.tile(shape, e.dtype) if e.swizzle else plgpu.SMEM(shape, e.dtype)
    free = barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages)
    sums = [plgpu.SMEM((WARPGROUPS, ROWS, s.tokens), jnp.float32)] * (s.teams - 1)
    return Tile(
        x=pipeline.tile((s.stages, s.tokens, GROUP), x),
        token_scales=plgpu.SMEM((s.scaled,), jnp.bfloat16),
        out=out,
        sums=sums,
        ready=barrier(num_arrivals=copies + 1, num_barriers=s.stages),
        free=free,
        tile_ready=barrier(),
        tile_free=barrier(num_arrivals=WARPGROUPS),
        residual_ready=barrier(num_barriers=WARPGROUPS),
        sums_ready=barrier(num_barriers=WARPGROUPS),
        sums_free=barrier(num_barriers=WARPGROUPS),
    )


# Products of INT4 weights ------------------------------------------------------------------------


def operand(
    weights: tuple[Ref, ...], slot: jax.Array, half: jax.Array
) -> tuple[jax.Array, jax.Array]:
    codes, scales, *tables = weights
    refs = [codes.at[slot], scales.at[slot], *tables]
    types = (SCALAR, *[plgpu.RefType()] * len(refs))
    words = pipeline.array((ROWS, GROUP // 4), jnp.int32)
    unit = pipeline.array((ROWS,), jnp.float32, ROW)
    dtype = "float16" if scales.dtype == jnp.float16 else "bfloat16"

    def run(row: Any, codes: Any, scales: Any, *tables: Any) -> Any:
        return int4.operand(codes, scales, tables[0] if tables else None, row, dtype)

    return pipeline.inline(run, types, (words, unit))(half * ROWS, *refs)


def settle(words: jax.Array, slot: jax.Array) -> jax.Array:
    """The same words in newly written registers, while no product is on its way."""

    def run(words: Any, slot: Any) -> Any:
        # Zero, which ptxas does not know: it would write the registers where the words are made.
        zero = asm(i32(), [lane.scalar(slot).value], "shr.s32 $0, $1, 31;", "=r,r", True)
        return fragments.carrier(
            [
                Int(asm(i32(), [x.value, zero], "or.b32 $0, $1, $2;", "=r,r,r", True))
                for x in fragments.scalars(words)
            ]
        )

    kind = pipeline.array(words.shape, jnp.int32)
    return pipeline.inline(run, (plgpu.Layout.WGMMA, SCALAR), kind)(words, slot)


def start(words: jax.Array, x: Ref, total: jax.Array | None) -> jax.Array:
    kind = pipeline.array((ROWS, x.shape[0]), jnp.float32)
    arrays = [words] if total is None else [words, total]
    types = (pipeline.tile_type(x), *[plgpu.Layout.WGMMA] * len(arrays))

    def run(x: Any, words: Any, *total: Any) -> Any:
        return wgmma.start(words, x, swizzle=128, total=total[0] if total else None)

    return pipeline.inline(run, types, kind)(x, *arrays)


def share_of(
    work: Work, slot: jax.Array, me: jax.Array, s: Settings
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A warpgroup's half of the rows, its first group of inputs and slot; the tile's last slot + 1.

    The first group of all is in `slot`. A team keeps to its slots: barriers count every warpgroup's
    waits.
    """
    half, team = lax.rem(me, jnp.int32(WARPGROUPS)), lax.div(me, jnp.int32(WARPGROUPS))
    after = pipeline.slot_after(slot, work.end - work.begin, s.stages)
    late = lax.rem(team + slot, jnp.int32(s.teams))
    return half, work.begin + late, pipeline.slot_after(slot, late, s.stages), after


def wait_for(g: jax.Array, slot: jax.Array, work: Work, m: Tile) -> None:
    """Waits until group `g`, if it is one of the tile's, is in shared memory."""

    @pl.when(g < work.end)
    def _() -> None:
        plgpu.barrier_wait(m.ready.at[slot])


# A program ---------------------------------------------------------------------------------------


def add_teams(total: jax.Array, me: jax.Array, m: Tile, s: Settings) -> jax.Array:
    """The first team's sums plus those of the second, which come through shared memory."""
    if s.teams == 1:
        return total
    half = lax.rem(me, jnp.int32(WARPGROUPS))
    place = m.sums[0].at[half]
    types = (plgpu.Layout.WGMMA, plgpu.RefType())
    put = pipeline.inline(epilogue.put, types)
    add = pipeline.inline(epilogue.add, types, pipeline.array(total.shape, total.dtype))

    @pl.when(me >= WARPGROUPS)
    def _() -> None:
        plgpu.barrier_wait(m.sums_free.at[half])
        put(total, place)
        plgpu.barrier_arrive(m.sums_ready.at[half])

    def collect() -> jax.Array:
        plgpu.barrier_wait(m.sums_ready.at[half])
        both = add(total, place)
        plgpu.barrier_arrive(m.sums_free.at[half])
        return both

    return lax.cond(me < WARPGROUPS, collect, lambda: total)


def _finish(
    total: jax.Array, token: int, row: jax.Array, out: Ref, m: Tile, a: Arrays, s: Settings
) -> None:
    """Writes tokens from `token` on to `out`: `epilogue.finish`, or partial sums."""
    e = s.epilogue
    refs = [out, m.token_scales, a.output_scales, *([a.bias] if e.has_bias else [])]
    types = [plgpu.RefType() for _ in refs]
    if s.parts == 1 and e.swizzle:
        types[0] = pipeline.tile_type(out)

    def run(total: Any, row: Any, out: Any, scales: Any, *rest: Any) -> None:
        span = (token, min(s.written, s.tokens - token))
        if s.parts > 1:
            epilogue.partial_sums(total, span, out)
            return
        bias = rest[1] if e.has_bias else None
        epilogue.finish(total, span, scales, rest[0], bias, out, row, e)

    pipeline.inline(run, (plgpu.Layout.WGMMA, SCALAR, *types))(total, row, *refs)


def store(total: jax.Array, work: Work, me: jax.Array, m: Tile, a: Arrays, s: Settings) -> None:
    """Writes the outputs of a tile's sums; the first team calls it."""
    columns = pl.ds(work.tile * s.columns + me * s.width, s.width)
    target = a.out.at[work.part] if s.parts > 1 else a.out

    @pl.when(me < WARPGROUPS)
    def _() -> None:
        plgpu.barrier_wait(m.tile_ready)
        for number, token in enumerate(range(0, s.tokens, s.written)):
            size = min(s.written, s.tokens - token)
            tokens, out = pl.ds(work.token + token, size), m.out.at[me, number % s.places]
            part = out.at[pl.ds(0, size)]
            plgpu.wait_smem_to_gmem(s.places - 1, wait_read_only=True)
            if s.epilogue.has_residual and s.parts == 1:
                barrier = m.residual_ready.at[me]
                plgpu.copy_gmem_to_smem(a.residual.at[tokens, columns], part, barrier)
                plgpu.barrier_wait(barrier)
            _finish(total, token, work.row + me * ROWS, out, m, a, s)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(part, target.at[tokens, columns])
        plgpu.barrier_arrive(m.tile_free)


def produce(
    work: Work,
    slot: jax.Array,
    m: Tile,
    a: Arrays,
    s: Settings,
    copy: Callable[[jax.Array, jax.Array, Work], None],
) -> jax.Array:
    """Copies a tile's groups of inputs as room comes free; returns the slot after.

    `slot` is that of the first group; ``copy(g, slot, work)`` copies the weights.
    """
    tokens = pl.ds(work.token, s.tokens)

    def group(g: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(m.free.at[slot])
        copy(g, slot, work)
        source = a.x.at[tokens, pl.ds(g * GROUP, GROUP)]
        plgpu.copy_gmem_to_smem(source, m.x.at[slot], m.ready.at[slot])
        return pipeline.slot_after(slot, 1, s.stages)

    slot = lax.fori_loop(work.begin, work.end, group, slot)
    plgpu.barrier_wait(m.tile_free)
    some = pl.ds(work.token, m.token_scales.shape[0])
    plgpu.copy_gmem_to_smem(a.token_scales.at[some], m.token_scales, m.tile_ready)
    return slot


def stored(
    accumulate: Callable[[Work, jax.Array], tuple[jax.Array, jax.Array]],
    me: jax.Array,
    m: Tile,
    a: Arrays,
    s: Settings,
) -> Step:
    """A function that stores a tile's sums, which `accumulate` returns with the slot after."""

    def consume(work: Work, slot: jax.Array) -> jax.Array:
        total, slot = accumulate(work, slot)
        store(add_teams(total, me, m, s), work, me, m, a, s)
        return slot

    return consume


def run_program(
    tiles: tuple[int, int],
    groups: int,
    m: Tile,
    a: Arrays,
    s: Settings,
    consume: Step,
    copy: Callable[[jax.Array, jax.Array, Work], None],
    before: tuple[Callable[[], None], Callable[[], None]] | None = None,
) -> None:
    """Runs one program, which takes every `s.programs`-th tile.

    `tiles` are how many there are of tokens and of outputs. ``consume(work, slot)`` runs in the
    warpgroups that compute, see `stored`; ``copy(g, slot, work)`` copies weights. `before`
    are what the warpgroups that compute, and the one that copies, run first.
    """
    me = lax.axis_index("warpgroup")
    share = pipeline.TileScheduler(tiles[0] * tiles[1] * s.parts)

    def over_tiles(f: Step) -> None:
        share.loop(lambda number, slot: f(Work(number, tiles[0], groups, s), slot))

    def start_to_consume() -> None:
        @pl.when(me < WARPGROUPS)
        def _() -> None:
            plgpu.barrier_arrive(m.tile_free)
            if s.teams > 1:
                plgpu.barrier_arrive(m.sums_free.at[me])

        for i in range(s.stages):

            @pl.when(lax.div(me, jnp.int32(WARPGROUPS)) == i % s.teams)
            def _(i: int = i) -> None:
                plgpu.barrier_arrive(m.free.at[i])

        if before is not None:
            before[0]()
        over_tiles(consume)
        # What is read will be written before the kernel is over.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def start_to_produce() -> None:
        if before is not None:
            before[1]()
        over_tiles(lambda work, slot: produce(work, slot, m, a, s, copy))

    pipeline.divide(me, s.warpgroups, s.registers, start_to_consume, start_to_produce)


def launch(kernel: Any, name: str, tokens: int, rows: int, columns: int, s: Settings) -> Any:
    """The call of a kernel ``kernel(*refs, tiles=)`` for the given tokens, weight rows and outputs.

    Raises:
      ValueError: if there are fewer outputs than a tile has. Rows of one warpgroup's outputs alone
        would be copied as one run of bytes, the other warpgroup's into the rows that follow.
    """
    if columns < s.columns:
        raise ValueError(f"{columns=} must be at least {s.columns}, those of a tile")
    tiles = (pl.cdiv(tokens, s.tokens), pl.cdiv(rows, TILE))
    shape, dtype = (tokens, columns), jnp.dtype(s.epilogue.dtype)
    out = jax.ShapeDtypeStruct(shape, dtype)
    if s.parts > 1:
        out = jax.ShapeDtypeStruct((s.parts, *shape), jnp.float32)

    def run(*refs: Ref) -> None:
        kernel(*refs, tiles=tiles)

    total = tiles[0] * tiles[1] * s.parts
    return pipeline.launch(run, name, out, total, s.programs, consumers=s.warpgroups)


def arrays_of(refs: tuple[Ref, ...], weights: int, e: Epilogue) -> Arrays:
    """A kernel's references by name: weights, `x`, scales, bias and residual if any, the output."""
    first, rest = refs[:weights], list(refs[weights:])
    x, token_scales, output_scales = rest[:3]
    optional = rest[3:-1]
    bias = optional.pop(0) if e.has_bias else None
    residual = optional.pop(0) if e.has_residual else None
    return Arrays(first, x, token_scales, output_scales, bias, residual, rest[-1])
