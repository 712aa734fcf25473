"""INT4 weights times e4m3 activations for Hopper, for more than 64 tokens (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 and `M` tokens on an H200, at 1.75 GHz:
  - operations: a tile of 128 outputs and 256 tokens is 1,024 clocks for each 128 inputs, 19 us in
    all. 256 tokens are 112 such tiles, one to a multiprocessor; 1,024 are four rounds, 75 us; 4,096
    14 rounds, 262 us.
  - conversion: 11 instructions for eight weights, 176 clocks for each 128 inputs of each of the two
    warpgroups: hidden behind the 1,024, if nothing waits for it.
  - shared memory: tokens are read by both warpgroups, 64 bytes a clock, and written once, 32, of
    the 128 that there are. Weights in shared memory would take 32 more: they come from registers.
Targets: 24 us for 256 tokens, 85 for 1,024, 330 for 4,096 (XLA in e4m3: 30.6, 101, 378).

What `int4.py` loses, and what is different here:
  - Its products wait for one another and its conversion hides behind nothing: ptxas serializes
    products (C7513) as soon as registers that a product reads are written while one is on its way,
    even the next one's. Here such registers are written between products, by instructions that
    ptxas cannot leave out (`_settle`), and what they are written from is computed before a wait,
    which is a loop, over which the compiler moves nothing.
  - Warpgroups take turns: one's products are in the matrix unit's queue while another, whose are
    done, starts its next ones.
  - Scales and biases of the outputs are copied ahead, like those of the tokens.
  - Tiles of three warpgroups and 128 tokens, three quarters of the work of the large ones, where
    they fill the multiprocessors better: 11,008 outputs of 256 tokens are 116 of them.

Compiled for an H100 with jax 0.11.2 all of this is seen in the instructions; it has not been timed.
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
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.hopper.matmul import epilogue
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.lane import Int, fragments
from pallas_kernels.mosaic.lane.instructions import asm, i32
from pallas_kernels.mosaic.products import int4, wgmma
from pallas_kernels.mosaic.products.int4 import GROUP, ROW_BYTES, TABLE_BYTES, TABLES
from pallas_kernels.mosaic.ring import ROW, ROWS, SCALAR

# Of every array in shared memory; all barriers together take less.
_ALIGNMENT = 1024


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is static in a product.

    Attributes:
      epilogue: what becomes of the sums.
      tokens: of a tile, a multiple of `written`.
      warpgroups: that compute, with 64 outputs each: two of up to 256 tokens, three of up to 192.
      stages: groups of inputs in shared memory.
      is_two_level: sum every group by itself and add it in float32, instead of leaving the sum to
        the matrix unit, whose additions keep about 14 bits. Scales of 16 bits need it; it takes two
        warpgroups and at most 128 tokens.
      parts: how many programs share a tile's inputs and write float32 partial sums.
      written: tokens that are written at a time.
      places: staging places for them.
      takes_turns: whether warpgroups start their products one after the other.
      programs: how many run side by side, one to a multiprocessor.
    """

    epilogue: Epilogue
    tokens: int
    warpgroups: int
    stages: int
    is_two_level: bool = False
    parts: int = 1
    written: int = 64
    places: int = 1
    takes_turns: bool = True
    programs: int = 132

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.warpgroups * ROWS

    @property
    def scaled(self) -> int:
        """Weight tiles of 64 rows whose scales are copied: copies are of multiples of 128 bytes."""
        return self.warpgroups + self.warpgroups % 2

    @property
    def width(self) -> int:
        """Outputs of a warpgroup."""
        return ROWS if self.parts > 1 else self.epilogue.outputs

    @property
    def columns(self) -> int:
        """Outputs of a tile."""
        return self.warpgroups * self.width

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that copies.

        Together at most what the threads have at the start (168 each with three warpgroups, 128
        with four): a kernel that asks for more waits forever.
        """
        return (232, 40) if self.warpgroups == 2 else (160, 32)

    def shared_bytes(self, scale_bytes: int) -> int:
        """Shared memory that a program takes, of scales of so many bytes."""
        stages = (self.rows * ROW_BYTES, self.scaled * ROWS * scale_bytes, self.tokens * GROUP)
        factors = (1 + self.epilogue.has_bias) * [4 * self.rows]
        out = self.places * self.written * self.columns * (4 if self.parts > 1 else 2)
        others = (TABLES * TABLE_BYTES, 2 * self.tokens, *factors, out, 1)
        sizes = (*[self.stages * n for n in stages], *others)
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
    turns: Ref


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


class Work:
    """A tile of outputs, or a part of its inputs, by its number; tokens vary fastest."""

    def __init__(self, number: jax.Array, tiles: int, groups: int, s: Settings) -> None:
        self.part = lax.rem(number, jnp.int32(s.parts))
        tile = lax.div(number, jnp.int32(s.parts))
        self.token = lax.rem(tile, jnp.int32(tiles)) * s.tokens
        self.tile = lax.div(tile, jnp.int32(tiles))
        self.begin = lax.div(self.part * groups, jnp.int32(s.parts))
        self.end = lax.div((self.part + 1) * groups, jnp.int32(s.parts))


def _operand(m: Memory, slot: jax.Array, me: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's weights of a group: `int4.operand`."""
    refs = [m.codes.at[slot], m.scales.at[slot], *m.tables]
    types = (SCALAR, *[plgpu.RefType()] * len(refs))
    words = ring.array((ROWS, GROUP // 4), jnp.int32)
    unit = ring.array((ROWS,), jnp.float32, ROW)
    dtype = str(m.scales.dtype)

    def run(row: Any, codes: Any, scales: Any, *tables: Any) -> Any:
        return int4.operand(codes, scales, tables[0] if tables else None, row, dtype)

    return ring.inline(run, types, (words, unit))(me * ROWS, *refs)


def _settle(words: jax.Array, slot: jax.Array) -> jax.Array:
    """The same words in registers that are written here, where no product is on its way."""

    def run(words: Any, slot: Any) -> Any:
        # Zero, which ptxas does not know: it would write the registers where the words are made.
        zero = asm(i32(), [lane.scalar(slot).value], "shr.s32 $0, $1, 31;", "=r,r", True)
        return fragments.carrier(
            [
                Int(asm(i32(), [x.value, zero], "or.b32 $0, $1, $2;", "=r,r,r", True))
                for x in fragments.scalars(words)
            ]
        )

    kind = ring.array(words.shape, jnp.int32)
    return ring.inline(run, (plgpu.Layout.WGMMA, SCALAR), kind)(words, slot)


def _start(words: jax.Array, x: Ref, total: jax.Array | None) -> jax.Array:
    """Starts a group's product, added to `total`."""
    kind = ring.array((ROWS, x.shape[0]), jnp.float32)
    arrays = [words] if total is None else [words, total]
    types = (ring.tile_type(x), *[plgpu.Layout.WGMMA] * len(arrays))

    def run(x: Any, words: Any, *total: Any) -> Any:
        return wgmma.start(words, x, swizzle=128, total=total[0] if total else None)

    return ring.inline(run, types, kind)(x, *arrays)


def _hand_on(m: Memory, me: jax.Array, s: Settings) -> None:
    """Gives the turn to the next warpgroup, or keeps it."""
    following = ring.next_slot(me, s.warpgroups) if s.takes_turns else me
    plgpu.barrier_arrive(m.turns.at[following])


def _accumulate(
    work: Work, slot: jax.Array, me: jax.Array, m: Memory, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's sums over all groups of inputs, the first in `slot`; the slot after."""

    def step(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, words, unit, slot = carry
        following = ring.next_slot(slot, s.stages)
        product = _start(_settle(words, slot), m.x.at[slot], None if s.is_two_level else total)
        _hand_on(m, me, s)

        @pl.when(g + 1 < work.end)
        def _() -> None:
            plgpu.barrier_wait(m.ready.at[following])

        # While the product is on its way. After the last group this converts whatever is there.
        words, next_unit = _operand(m, following, me)
        # Its own turn for the next product. A loop, over which the compiler moves no instructions.
        plgpu.barrier_wait(m.turns.at[me])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m.free.at[slot])
        if s.is_two_level:
            product = total + product * lax.broadcast_in_dim(unit, product.shape, (0,))
        return product, words, next_unit, following

    plgpu.barrier_wait(m.ready.at[slot])
    words, unit = _operand(m, slot, me)
    zeros = jnp.full((ROWS, s.tokens), 0.0, jnp.float32)
    carry = (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), words, unit, slot)
    total, _, _, slot = lax.fori_loop(work.begin, work.end, step, carry)
    return total, slot


def _finish(total: jax.Array, token: int, me: jax.Array, out: Ref, m: Memory, s: Settings) -> None:
    """Writes tokens from `token` on to `out`: `epilogue.finish`."""
    refs = [out, m.token_scales, *m.factors]
    types: list[Any] = [plgpu.RefType() for _ in refs]
    if s.parts == 1:
        types[0] = ring.tile_type(out)

    def run(total: Any, row: Any, out: Any, scales: Any, *factors: Any) -> None:
        if s.parts > 1:
            epilogue.partial_sums(total, (token, s.written), out)
            return
        bias = factors[1] if s.epilogue.has_bias else None
        epilogue.finish(total, (token, s.written), scales, factors[0], bias, out, row, s.epilogue)

    ring.inline(run, (plgpu.Layout.WGMMA, SCALAR, *types))(total, me * ROWS, *refs)


def _store(total: jax.Array, work: Work, me: jax.Array, m: Memory, a: Arrays, s: Settings) -> None:
    """What becomes of a tile's sums."""
    columns = pl.ds(work.tile * s.columns + me * s.width, s.width)
    target = a.out.at[work.part] if s.parts > 1 else a.out
    plgpu.barrier_wait(m.tile_ready)
    for number, token in enumerate(range(0, s.tokens, s.written)):
        tokens, out = pl.ds(work.token + token, s.written), m.out.at[me, number % s.places]
        plgpu.wait_smem_to_gmem(s.places - 1, wait_read_only=True)
        if s.epilogue.has_residual:
            barrier = m.residual_ready.at[me]
            plgpu.copy_gmem_to_smem(a.residual.at[tokens, columns], out, barrier)
            plgpu.barrier_wait(barrier)
        _finish(total, token, me, out, m, s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, target.at[tokens, columns])
    plgpu.barrier_arrive(m.tile_free)


def _copy_tokens(source: Ref, target: Ref, ready: Ref) -> None:
    """A group of inputs of a tile's tokens."""
    plgpu.copy_gmem_to_smem(source, target, ready)


def _produce(work: Work, slot: jax.Array, m: Memory, a: Arrays, s: Settings) -> jax.Array:
    """Copies a tile's groups of inputs, as room comes free; the slot after."""
    first = work.tile * s.warpgroups
    tokens, tiles = pl.ds(work.token, s.tokens), pl.ds(first, s.warpgroups)
    scaled = pl.ds(first, s.scaled)

    def group(g: jax.Array, slot: jax.Array) -> jax.Array:
        plgpu.barrier_wait(m.free.at[slot])
        ready = m.ready.at[slot]
        plgpu.copy_gmem_to_smem(a.codes.at[tiles, g], m.codes.at[slot], ready)
        plgpu.copy_gmem_to_smem(a.scales.at[scaled, g], m.scales.at[slot], ready)
        _copy_tokens(a.x.at[tokens, pl.ds(g * GROUP, GROUP)], m.x.at[slot], ready)
        return ring.next_slot(slot, s.stages)

    slot = lax.fori_loop(work.begin, work.end, group, slot)
    plgpu.barrier_wait(m.tile_free)
    plgpu.copy_gmem_to_smem(a.token_scales.at[tokens], m.token_scales, m.tile_ready)
    for source, target in zip(a.factors, m.factors, strict=True):
        plgpu.copy_gmem_to_smem(source.at[pl.ds(work.tile * s.rows, s.rows)], target, m.tile_ready)
    return slot


def _kernel(*refs: Ref, tiles: tuple[int, int], s: Settings, has_tables: bool) -> None:
    rest = list(refs)
    codes, scales = rest.pop(0), rest.pop(0)
    tables = [rest.pop(0)] if has_tables else []
    x, token_scales = rest.pop(0), rest.pop(0)
    factors = [rest.pop(0) for _ in range(1 + s.epilogue.has_bias)]
    residual = rest.pop(0) if s.epilogue.has_residual else None
    a = Arrays(codes, scales, tables, x, token_scales, factors, residual, rest.pop(0))
    me = lax.axis_index("warpgroup")

    def body(m: Memory) -> None:
        share = ring.Share(tiles[0] * tiles[1] * s.parts)

        def work_of(number: jax.Array) -> Work:
            return Work(number, tiles[0], codes.shape[1], s)

        def consume(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = work_of(number)
            total, slot = _accumulate(work, slot, me, m, s)
            _store(total, work, me, m, a, s)
            return slot

        def start_to_consume() -> None:
            ring.free_at_first(s.stages, [m.free], m.tile_free)
            if s.takes_turns:
                pl.when(me == 0)(lambda: plgpu.barrier_arrive(m.turns.at[0]))
            if has_tables:
                plgpu.barrier_wait(m.tables_ready)
            # A turn before the first product, and one more for who has started the last.
            if s.takes_turns:
                plgpu.barrier_wait(m.turns.at[me])
            share.loop(consume)
            if s.takes_turns:
                _hand_on(m, me, s)
            # What is read will be written before the kernel is over.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def start_to_produce() -> None:
            if has_tables:
                plgpu.copy_gmem_to_smem(a.tables[0], m.tables[0], m.tables_ready)
            share.loop(lambda number, slot: _produce(work_of(number), slot, m, a, s))

        ring.divide(me, s.warpgroups, s.registers, start_to_consume, start_to_produce)

    count, barrier = s.warpgroups, plgpu.Barrier
    shape = (count, s.places, s.written, s.width)
    if s.parts > 1:
        out = plgpu.SMEM(shape, jnp.float32)
    else:
        out = ring.tile(shape, s.epilogue.dtype)
    memory = Memory(
        codes=plgpu.SMEM((s.stages, count, *codes.shape[2:]), jnp.uint8),
        scales=plgpu.SMEM((s.stages, s.scaled, ROWS), scales.dtype),
        tables=[plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8)] * has_tables,
        x=ring.tile((s.stages, s.tokens, GROUP), x.dtype),
        token_scales=plgpu.SMEM((s.tokens,), jnp.bfloat16),
        factors=[plgpu.SMEM((s.rows,), jnp.float32)] * len(factors),
        out=out,
        ready=barrier(num_arrivals=3, num_barriers=s.stages),
        free=barrier(num_arrivals=count, num_barriers=s.stages),
        tile_ready=barrier(num_arrivals=1 + len(factors)),
        tile_free=barrier(num_arrivals=count),
        residual_ready=barrier(num_barriers=count),
        tables_ready=barrier(),
        turns=ring.Turns.memory(count),
    )
    pl.run_scoped(body, memory, collective_axes="warpgroup")


def int4_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array | None,
    x: jax.Array,
    token_scales: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    columns: int,
    settings: Settings,
) -> jax.Array:
    """Tokens times INT4 weights.

    Args:
      codes: uint8 ``[N' / 64, K' / 128, 64, 64]``, as for `int4.int4_matmul`.
      scales: ``[N' / 64, K' / 128, 64]``, e4m3 (with `tables`), bfloat16 or float16.
      tables: uint8 ``[128, 16]``, as there.
      x: e4m3 ``[M, K']``; `M` a multiple of 8.
      token_scales: bfloat16 ``[M]``.
      output_scales: float32 ``[N']``.
      bias: float32 ``[N']``.
      residual: ``[M, columns]`` in the output's dtype.
      columns: of the output: at least `N`, or half of it for gated weights, and those of one tile;
        a multiple of 8.
      settings: what is static.

    Returns:
      ``[M, columns]``; with several parts their float32 sums, ``[parts, M, columns]``, before
      everything that the epilogue does.

    Raises:
      ValueError: if there are fewer outputs than a tile has, see `program.launch`.
    """
    s = settings
    if columns < s.columns:
        raise ValueError(f"{columns=} must be at least {s.columns}, those of a tile")
    codes = int4.chunks(codes)
    weights = [codes, scales]
    if tables is not None:
        weights = [codes, lax.bitcast_convert_type(scales, jnp.uint8), tables]
    tiles = (pl.cdiv(x.shape[0], s.tokens), pl.cdiv(codes.shape[0], s.warpgroups))
    kernel = functools.partial(_kernel, tiles=tiles, s=s, has_tables=tables is not None)
    shape, dtype = (x.shape[0], columns), jnp.dtype(s.epilogue.dtype)
    out = jax.ShapeDtypeStruct(shape, dtype)
    if s.parts > 1:
        out = jax.ShapeDtypeStruct((s.parts, *shape), jnp.float32)
    run = ring.launch(
        kernel,
        "turbojax_int4_matmul_many_hopper",
        out,
        tiles[0] * tiles[1] * s.parts,
        s.programs,
        consumers=s.warpgroups,
    )
    optional = [array for array in (bias, residual) if array is not None]
    return run(*weights, x, token_scales, output_scales, *optional)
