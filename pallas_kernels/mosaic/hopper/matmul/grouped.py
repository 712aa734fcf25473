"""INT4 weights of many experts times e4m3 tokens that are sorted by expert, for Hopper.

Roofline, for 8 experts of 28672 x 4096 and 512 tokens with 2 each, H200: 485 MB, 113 us; products
127 us; conversion 87. Target: 160 us. Seen: 271 (PyTorch's grouped e4m3 product 357); for 256
tokens 231 (284). Bound by how a warpgroup's products and conversion wait for each other.

A program takes tiles: 64 rows for each of the warpgroups that compute, and tokens of one expert,
which are cut into equal parts. Products have the least of a few widths that is enough for them.
Where experts begin each program finds by itself; tiles of tokens with the same rows follow each
other, so that weights come from the cache after the first. All tiles have equally many groups of
inputs, and the groups of all of a program's tiles are one sequence: while a group's product is on
its way the next one is converted. What is read past an expert's last token is not written.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import lane, pipeline
from pallas_kernels.mosaic.hopper.matmul import epilogue, program
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.pipeline import PROGRAM, ROWS, SCALAR
from pallas_kernels.mosaic.products import int4, wgmma
from pallas_kernels.mosaic.products.int4 import GROUP, TABLE_BYTES, TABLES

NAN = 0x7FFF7FFF  # A word of two float16 or bfloat16 NaNs
_LANES = 32


class Plan:
    """Where each expert's tokens and tiles begin: each program computes it, in shared memory.

    `held` are int32: for every expert, and after the last one, the number of tokens before it; then
    the same of tiles of tokens; then how many tiles there are, how many tokens they hold, and the
    word of two numbers that the other rows are filled with. If sizes of groups are not valid, there
    are no tiles.
    """

    def __init__(self, held: Any, experts: int) -> None:
        self.held, self.experts = held, experts

    @staticmethod
    def size(experts: int) -> int:
        return 2 * (experts + 1) + 3

    def token(self, expert: Any) -> Any:
        return self.held[expert]

    def tile(self, expert: Any) -> Any:
        return self.held[expert + (self.experts + 1)]

    def bound(self, i: int) -> Any:
        """Number of tiles, of tokens, and what rows of no expert hold."""
        return self.held[2 * (self.experts + 1) + i]

    def expert(self, tile: Any) -> Any:
        low, high = jnp.int32(0), jnp.int32(self.experts - 1)
        for _ in range((self.experts - 1).bit_length()):
            middle = (low + high) >> 1
            is_past = self.tile(middle + 1) > tile
            low, high = jnp.where(is_past, low, middle + 1), jnp.where(is_past, middle, high)
        return low


def make_plan(sizes: Pointer, held: Pointer, experts: int, rows: int, tile: int) -> None:
    """Writes a `Plan` to `held`; one warp calls it.

    `sizes` are int32 in global memory, of each expert's group; if they are negative or hold more
    than `rows` tokens, they are not valid. `tile` is the most tokens of a tile.
    """
    number, each = lane.special("laneid"), -(-experts // _LANES)
    tokens = tiles = lane.integer(0)
    is_bad = number < 0
    mine = []
    for j in range(each):
        expert = number * each + j
        size = sizes.at(expert.minimum(experts - 1) << 2).word()
        size = (expert < experts).where(size, 0)
        is_bad = is_bad | (size < 0) | (size > rows)
        tokens, tiles = tokens + size, tiles + (size + (tile - 1)) // tile
        mine.append((expert, tokens, tiles))
    all_tokens, all_tiles = _running(tokens, number), _running(tiles, number)
    before = all_tokens - tokens, all_tiles - tiles
    for expert, *found in mine:
        with lane.when(expert < experts):
            for i, (own, others) in enumerate(zip(found, before, strict=True)):
                held.at((expert + (i * (experts + 1) + 1)) << 2).store(own + others)
    last = lane.integer(_LANES - 1)
    total, count = lane.from_lane(all_tokens, last), lane.from_lane(all_tiles, last)
    is_bad = (lane.ballot(is_bad) > 0) | (lane.ballot(is_bad) < 0) | (total > rows)
    bounds = is_bad.where(0, count), is_bad.where(0, total), is_bad.where(NAN, lane.integer(0))
    with lane.when(number < 1):
        for i in range(2):
            held.at(4 * i * (experts + 1)).store(lane.integer(0))
        for i, bound in enumerate(bounds):
            held.at(4 * (2 * (experts + 1) + i)).store(bound)


def _running(x: Int, number: Int) -> Int:
    """The sum of this lane's number and those of the lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        x = x + (number >= distance).where(lane.from_lane(x, number - distance), 0)
    return x


TABLES_BYTES = TABLES * TABLE_BYTES  # shared memory that the tables take
_SWIZZLE = (plgpu.SwizzleTransform(GROUP),)
# Tokens that are written at a time.
_MOST_WRITTEN = 64
# Tokens that are copied at least, and whose multiples products have.
_FEWEST = 8
# With so many, others compute while one waits, and `program.settle` costs more than it gains.
_MOST_CONSUMERS = 4
# Bytes that a lane writes at a time, and lanes of a warpgroup.
_CHUNK, _THREADS = 16, 128


@dataclasses.dataclass(frozen=True)
class Settings:
    epilogue: Epilogue  # without a residual
    # How many tokens a tile's products may have, multiples of 8 up to 256, ascending: each tile has
    # the fewest that are enough. The last is the most that a tile has.
    widths: tuple[int, ...]
    stages: int  # groups of inputs in shared memory
    consumers: int  # warpgroups that compute, each 64 rows: 2, 3 or 4, which have fewer registers
    # Sum each group separately and add it in float32, instead of leaving the sum to the matrix
    # unit, whose additions keep about 14 bits. Scales of 16 bits need it.
    is_two_level: bool
    programs: int = 132  # how many run side by side, one to a multiprocessor

    @property
    def tokens(self) -> int:
        return self.widths[-1]

    @property
    def copied(self) -> list[int]:
        """How many tokens are copied: the fewest of these that are enough."""
        parts = (-(-self.tokens // (_FEWEST * n)) * _FEWEST for n in (4, 2))
        return sorted({*parts, *self.widths})

    @property
    def written(self) -> int:
        return min(self.tokens, _MOST_WRITTEN)

    @property
    def scaled(self) -> int:
        """Warpgroups whose scales are copied: copies are of multiples of 128 bytes."""
        return self.consumers + self.consumers % 2

    @property
    def registers(self) -> tuple[int, int]:
        return {2: (232, 40), 3: (160, 32), 4: (112, 32)}[self.consumers]

    def shared_bytes(self, experts: int, scale_bytes: int, has_tables: bool) -> int:
        """Shared memory, buffers in units of 1,024 bytes."""
        out = self.written * 2 * self.epilogue.outputs
        buffers = [
            self.stages * self.tokens * GROUP,
            self.stages * self.consumers * ROWS * GROUP // 2,
            self.stages * self.scaled * ROWS * scale_bytes,
            self.consumers * out,
            2 * self.tokens,
            TABLES_BYTES * has_tables,
            4 * Plan.size(experts),
        ]
        return sum(-(-size // 1024) * 1024 for size in buffers) + 8 * (2 * self.stages + 3)


class Arrays(NamedTuple):
    """A product's arguments and its result, see `grouped_matmul`."""

    codes: Ref
    scales: Ref
    tables: Any
    x: Ref
    token_scales: Ref
    output_scales: Ref
    bias: Ref | None
    sizes: Ref
    out: Ref


class Memory(NamedTuple):
    """Memory and barriers of a program."""

    codes: Ref
    scales: Ref
    tables: list[Ref]
    x: Ref
    token_scales: Ref
    out: Ref
    plan: Ref
    ready: Ref
    free: Ref
    tile_ready: Ref
    tile_free: Ref
    tables_ready: Ref


class Work(NamedTuple):
    """A tile: its expert, its first token and how many it has, and its number among outputs."""

    expert: jax.Array
    token: jax.Array
    size: jax.Array
    tile: jax.Array


def _work(number: jax.Array, p: Plan, across: int, s: Settings) -> Work:
    """A tile by its number; of one expert's, tokens vary fastest.

    An expert has ``across`` times as many tiles as tiles of tokens, so the number of any of its
    tiles leads to the expert.
    """
    expert = p.expert(lax.div(number, jnp.int32(across)))
    start = p.tile(expert)
    within, of_expert = number - start * across, p.tile(expert + 1) - start
    # Equal parts, so that none is much smaller than its product; in whole multiples none is empty.
    share = pl.cdiv(p.token(expert + 1) - p.token(expert), of_expert)
    share = jnp.bitwise_and(share + (_FEWEST - 1), -_FEWEST)
    token = p.token(expert) + lax.rem(within, of_expert) * share
    count = jnp.minimum(p.token(expert + 1) - token, share)
    return Work(expert, token, count, lax.div(within, of_expert))


def _start(words: jax.Array, x: Ref, width: int, total: jax.Array | None) -> jax.Array:
    """Starts a group's product with the first `width` tokens of `x`."""
    arrays = [words] if total is None else [words, total]
    types = (plgpu.RefType(_SWIZZLE), *[plgpu.Layout.WGMMA] * len(arrays))

    def run(x: Any, words: Any, *total: Any) -> Any:
        # Rows of 128 bytes: eight of them are a tile.
        x = mgpu.memref_unfold(mgpu.memref_slice(x, slice(0, width)), 0, (None, 8))
        x = mgpu.memref_unsqueeze(x, 1)
        return wgmma.start(words, x, swizzle=128, total=total[0] if total else None)

    return pipeline.inline(run, types, pipeline.array((ROWS, width), jnp.float32))(x, *arrays)


def _write(
    out: Pointer,
    target: Pointer,
    columns: int,
    span: tuple[int, int],
    token: Int,
    count: Int,
    column: Int,
    e: Epilogue,
) -> None:
    """Copies a warp's outputs from shared memory to `target`, global memory ``[M, columns]``.

    `out` is ``[span[1], outputs]`` as `epilogue.finish` leaves it, in room for a power of two;
    `span` is the first of these tokens within the tile and how many they are. The tile has `count`
    tokens from `token` on, and the warpgroup's outputs begin at `column`.
    """
    number, warp = lane.special("laneid"), (lane.special("tid.x") >> 5) & 3
    # Chunks of 16 bytes: a warp has 16 outputs of a token, in a gated product 8.
    per_token = e.outputs // 32
    size = span[1] * per_token
    for begin in range(0, size, 32):
        chunk = (number & (pl.next_power_of_2(min(size, 32)) - 1)) + begin
        row = chunk >> (per_token - 1)
        byte = (warp * per_token + (chunk & (per_token - 1))) * _CHUNK
        words = out.at(epilogue.place(row, byte, e)).words(4)
        place = target.times(token + span[0] + row, lane.integer(2 * columns))
        with lane.when((row + span[0] < count) & (number < size)):
            place.at(column * 2, byte).store_words(words)


def _store(
    total: jax.Array, work: Work, me: jax.Array, m: Memory, a: Arrays, rows: int, s: Settings
) -> None:
    """Writes a warpgroup's outputs, except for rows that the experts do not have."""
    e, width = s.epilogue, total.shape[1]
    row = (work.tile * s.consumers + me) * ROWS
    count = jnp.where(row < rows, work.size, 0)
    numbers = work.expert * rows + row, row * e.outputs // ROWS, work.token, count
    refs = [m.out.at[me], m.token_scales, a.out, a.output_scales]
    refs += [a.bias] if e.has_bias else []
    types = (plgpu.Layout.WGMMA, *[SCALAR] * 4, *[plgpu.RefType()] * len(refs))

    def write(
        first: int, total: Any, base: Any, column: Any, token: Any, count: Any, *refs: Any
    ) -> None:
        out, scales, target, output_scales, *bias = refs
        column, token, count = (lane.scalar(x) for x in (column, token, count))
        span = (first, min(s.written, width - first))
        factors = output_scales, bias[0] if bias else None
        epilogue.finish(total, span, scales, *factors, out, base, e)
        lane.warp_barrier()
        places = Pointer.to(out), Pointer.to(target)
        _write(*places, a.out.shape[1], span, token, count, column, e)
        lane.warp_barrier()

    plgpu.barrier_wait(m.tile_ready)
    for first in range(0, width, s.written):

        @pl.when(first < count)
        def _(first: int = first) -> None:
            pipeline.inline(functools.partial(write, first), types)(total, *numbers, *refs)

    plgpu.barrier_arrive(m.tile_free)


def _fill(me: jax.Array, p: Plan, a: Arrays, s: Settings) -> None:
    columns = a.out.shape[1]
    size = 2 * columns // _CHUNK
    end = a.out.shape[0] * size
    threads = lax.axis_size(PROGRAM) * s.consumers * _THREADS
    first = p.bound(1) * size + (lax.axis_index(PROGRAM) * s.consumers + me) * _THREADS

    def run(first: Any, word: Any, target: Any) -> None:
        number = lane.scalar(first) + (lane.special("tid.x") & (_THREADS - 1))
        with lane.when(number < end):
            place = Pointer.to(target).times(number, lane.integer(_CHUNK))
            place.store_words([lane.scalar(word)] * 4)

    write = pipeline.inline(run, (SCALAR, SCALAR, plgpu.RefType()))

    def step(i: jax.Array, _: None) -> None:
        write(first + i * threads, p.bound(2), a.out)

    rounds = lax.div(jnp.maximum(end - first, 0) + (threads - 1), jnp.int32(threads))
    lax.fori_loop(jnp.int32(0), rounds, step, None)


def _consume(
    me: jax.Array,
    share: pipeline.TileScheduler,
    p: Plan,
    m: Memory,
    a: Arrays,
    rows: int,
    s: Settings,
) -> None:
    groups, across = a.codes.shape[1], pl.cdiv(rows, s.consumers * ROWS)
    steps, weights = share.count * groups, (m.codes, m.scales, *m.tables)

    def wait(step: jax.Array, slot: jax.Array) -> None:
        @pl.when(step < steps)
        def _() -> None:
            plgpu.barrier_wait(m.ready.at[slot])

    def tile(
        width: int, i: jax.Array, work: Work, carry: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        def step(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            total, words, unit, slot = carry
            following = pipeline.next_slot(slot, s.stages)
            if s.consumers < _MOST_CONSUMERS:
                words = program.settle(words, slot)
            product = _start(words, m.x.at[slot], width, None if s.is_two_level else total)
            wait(i * groups + g + 1, following)
            # While the product is in flight. After the very last this converts stale memory.
            words, next_unit = program.operand(weights, following, me)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(m.free.at[slot])
            if s.is_two_level:
                product = total + product * lax.broadcast_in_dim(unit, product.shape, (0,))
            return product, words, next_unit, following

        carry = (pipeline.full(0.0, (ROWS, width)), *carry)
        total, *rest = lax.fori_loop(jnp.int32(0), groups, step, carry)
        _store(total, work, me, m, a, rows, s)
        return tuple(rest)

    def some_tile(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        work = _work(share.number(i), p, across, s)
        loops = [functools.partial(tile, width, i, work) for width in s.widths]
        number = sum(((work.size > n).astype(jnp.int32) for n in s.widths[:-1]), jnp.int32(0))
        rest: tuple[jax.Array, ...] = lax.switch(number, loops, carry)
        return rest

    first = jnp.int32(0)
    wait(first, first)
    lax.fori_loop(first, share.count, some_tile, (*program.operand(weights, first, me), first))
    _fill(me, p, a, s)


def _copy_tokens(work: Work, g: jax.Array, x: Ref, target: Ref, ready: Ref, s: Settings) -> None:
    """Copies a group's inputs of the tile's tokens, and of a few tokens more."""
    for fewer, size in zip([0, *s.copied], s.copied, strict=False):

        @pl.when((work.size > fewer) & (work.size <= size))
        def _(size: int = size) -> None:
            source = x.at[pl.ds(work.token, size), pl.ds(g * GROUP, GROUP)]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, size)], ready)


def _copy_scales(source: Pointer, target: Pointer, token: Int, rows: int, tokens: int) -> None:
    """Copies the bfloat16 scales of `tokens` tokens from `token` on; one warpgroup calls it.

    A bulk copy of them would have to begin at a multiple of 16 bytes; tiles begin at any token.
    `source` has `rows`; past the last the last is read.
    """
    for begin in range(0, tokens, _THREADS):
        number = (lane.special("tid.x") & (_THREADS - 1)) + begin
        with lane.when(number < tokens):
            scale = source.at((token + number).minimum(rows - 1) << 1).half()
            target.at(number << 1).store_low(scale, 16)


def _produce(
    share: pipeline.TileScheduler, p: Plan, m: Memory, a: Arrays, rows: int, s: Settings
) -> None:
    groups, across = a.codes.shape[1], pl.cdiv(rows, s.consumers * ROWS)

    def scales(token: Any, source: Any, target: Any) -> None:
        places = Pointer.to(source), Pointer.to(target)
        _copy_scales(*places, lane.scalar(token), a.x.shape[0], s.tokens)

    copy = pipeline.inline(scales, (SCALAR, plgpu.RefType(), plgpu.RefType()))

    def tile(number: jax.Array, slot: jax.Array) -> jax.Array:
        work = _work(number, p, across, s)
        first = work.expert * (rows // ROWS) + work.tile * s.consumers
        some, scaled = pl.ds(first, s.consumers), pl.ds(first, s.scaled)

        def group(g: jax.Array, slot: jax.Array) -> jax.Array:
            ready = m.ready.at[slot]
            plgpu.barrier_wait(m.free.at[slot])
            plgpu.copy_gmem_to_smem(a.codes.at[some, g], m.codes.at[slot], ready)
            plgpu.copy_gmem_to_smem(a.scales.at[scaled, g], m.scales.at[slot], ready)
            _copy_tokens(work, g, a.x, m.x.at[slot], ready, s)
            return pipeline.next_slot(slot, s.stages)

        slot = lax.fori_loop(jnp.int32(0), groups, group, slot)
        plgpu.barrier_wait(m.tile_free)
        copy(work.token, a.token_scales, m.token_scales)
        plgpu.barrier_arrive(m.tile_ready)
        return slot

    share.loop(tile)


def _kernel(*refs: Ref, rows: int, s: Settings, has_tables: bool) -> None:
    given = list(refs)
    has = (True, True, has_tables, True, True, True, s.epilogue.has_bias, True, True)
    a = Arrays(*[given.pop(0) if x else None for x in has])
    me = lax.axis_index("warpgroup")

    experts = a.sizes.shape[0]

    def run(sizes: Any, held: Any) -> None:
        make_plan(Pointer.to(sizes), Pointer.to(held), experts, a.x.shape[0], s.tokens)

    def body(m: Memory) -> None:
        @pl.when(me == s.consumers)
        def _() -> None:
            # Each of its four warps does the same.
            pipeline.inline(run, [plgpu.RefType()] * 2)(a.sizes, m.plan)

        pipeline.inline(lambda: lane.block_barrier(), ())()
        p = Plan(m.plan, experts)
        share = pipeline.TileScheduler(p.bound(0) * pl.cdiv(rows, s.consumers * ROWS))

        def consume() -> None:
            pipeline.free_at_first(s.stages, [m.free], m.tile_free)
            if has_tables:
                plgpu.barrier_wait(m.tables_ready)
            _consume(me, share, p, m, a, rows, s)

        def produce() -> None:
            if has_tables:
                plgpu.copy_gmem_to_smem(a.tables, m.tables[0], m.tables_ready)
            _produce(share, p, m, a, rows, s)

        pipeline.divide(me, s.consumers, s.registers, consume, produce)

    barrier, e = plgpu.Barrier, s.epilogue
    pl.run_scoped(
        body,
        Memory(
            codes=plgpu.SMEM((s.stages, s.consumers, *a.codes.shape[2:]), jnp.uint8),
            scales=plgpu.SMEM((s.stages, s.scaled, ROWS), a.scales.dtype),
            tables=[plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8)] * has_tables,
            x=plgpu.SMEM((s.stages, s.tokens, GROUP), a.x.dtype, transforms=_SWIZZLE),
            token_scales=plgpu.SMEM((s.tokens,), jnp.bfloat16),
            out=plgpu.SMEM((s.consumers, s.written, e.outputs), e.dtype),
            plan=plgpu.SMEM((Plan.size(experts),), jnp.int32),
            ready=barrier(num_arrivals=3, num_barriers=s.stages),
            free=barrier(num_arrivals=s.consumers, num_barriers=s.stages),
            tile_ready=barrier(),
            tile_free=barrier(num_arrivals=s.consumers),
            tables_ready=barrier(),
        ),
        collective_axes="warpgroup",
    )


def grouped_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array | None,
    x: jax.Array,
    token_scales: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    *,
    settings: Settings,
) -> jax.Array:
    """Tokens, sorted by expert, times their experts' INT4 weights.

    `codes`, `scales`, `output_scales` and `bias` are as for `int4.int4_matmul` with a leading axis
    `E`; `x` is e4m3 ``[M, K']``. `group_sizes`, int32 ``[E]``, are the tokens of each expert; if
    they are not valid, all rows are NaN. Returns ``[M, N']``, for gated weights ``[M, N' / 2]``.
    """
    experts, blocks, groups = codes.shape[:3]
    rows = blocks * ROWS
    flat = (experts * blocks, groups)
    weights = [int4.chunks(codes.reshape(*flat, *codes.shape[3:])), scales.reshape(*flat, ROWS)]
    if tables is not None:
        weights = [weights[0], lax.bitcast_convert_type(weights[1], jnp.uint8), tables]
    kernel = functools.partial(_kernel, rows=rows, s=settings, has_tables=tables is not None)
    columns = rows * settings.epilogue.outputs // ROWS
    run = pipeline.launch(
        kernel,
        "turbojax_grouped_matmul_hopper",
        jax.ShapeDtypeStruct((x.shape[0], columns), jnp.dtype(settings.epilogue.dtype)),
        settings.programs,
        settings.programs,
        consumers=settings.consumers,
    )
    vectors = [output_scales, *([] if bias is None else [bias])]
    vectors = [v.reshape(experts * rows) for v in vectors]
    return run(*weights, x, token_scales, *vectors, group_sizes)
