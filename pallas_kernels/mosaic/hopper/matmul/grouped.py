"""INT4 weights of many experts times e4m3 tokens that are sorted by expert, for Hopper.

Roofline, for 128 experts of 1536 x 2048 and 512 tokens with 8 experts each, H200: 218 MB, 51 us;
products 13 us; conversion, once for each tile of tokens, 37 us. Target: 65 us. Seen: 97 (PyTorch's
grouped e4m3 product 142), for 64 tokens 73 (131). From some 64 tokens an expert on bytes bound it
no longer.

A program takes tiles: 64 rows for each of the warpgroups that compute, and up to `tokens` rows of
one expert. Where experts begin each program finds by itself; tiles of tokens with the same rows
follow each other, so that weights come from the cache after the first. All rows
of inputs are as long, so tiles have equally many groups, and the groups of all of a program's tiles
are one sequence: while a group's product is on its way the next one is converted, of whichever
tile. Tokens of a tile may begin at any row. What is read past an expert's last one is other
experts' tokens, and is not written.

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
from pallas_kernels.mosaic import lane, ring
from pallas_kernels.mosaic.hopper.matmul import epilogue, program
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.mosaic.products import int4, wgmma
from pallas_kernels.mosaic.products.int4 import GROUP, TABLE_BYTES, TABLES
from pallas_kernels.mosaic.ring import PROGRAM, ROWS, SCALAR

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
# Products have multiples of this many tokens, and so many eighths of the most that a tile has.
_FEWEST, _EIGHTHS = 8, (2, 3, 4, 5, 6, 8)
# Bytes that a lane writes at a time, and lanes of a warpgroup.
_CHUNK, _THREADS = 16, 128


@dataclasses.dataclass(frozen=True)
class Settings:
    epilogue: Epilogue  # without a residual
    tokens: int  # of a tile: 8, 16, 32, 64, 128 or 256
    stages: int  # groups of inputs in shared memory
    consumers: int  # warpgroups that compute, each 64 rows: 4, for up to 64 tokens, or 2
    # Sum each group separately and add it in float32, instead of leaving the sum to the matrix
    # unit, whose additions keep about 14 bits. Scales of 16 bits need it.
    is_two_level: bool
    programs: int = 132  # how many run side by side, one to a multiprocessor
    loop: str = "settle"  # EXPERIMENT
    fine: bool = True  # EXPERIMENT

    @property
    def widths(self) -> tuple[int, ...]:
        """How many tokens a tile's product may have, ascending."""
        if not self.fine:
            return (self.tokens,)
        eighths = (self.tokens * n // 8 for n in _EIGHTHS)
        return tuple(n for n in eighths if n % _FEWEST == 0)

    @property
    def written(self) -> int:
        return min(self.tokens, _MOST_WRITTEN)

    @property
    def registers(self) -> tuple[int, int]:
        return (112, 32) if self.consumers == 4 else (232, 40)

    def shared_bytes(self, experts: int, scale_bytes: int, has_tables: bool) -> int:
        """Shared memory, buffers in units of 1,024 bytes."""
        out = self.written * 2 * self.epilogue.outputs
        buffers = [
            self.stages * self.tokens * GROUP,
            self.stages * self.consumers * ROWS * GROUP // 2,
            self.stages * self.consumers * ROWS * scale_bytes,
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


def _start(
    words: jax.Array, x: Ref, size: jax.Array, sums: jax.Array, s: Settings
) -> jax.Array:
    """Starts a group's product; `sums` are added to, unless sums have two levels.

    It has as many of the tokens of `x` as `sums`; if that is all of them, the first `size`, or a
    few more, of which the others' sums stay as they are.
    """
    width = sums.shape[1]
    arrays = [words] if s.is_two_level else [words, sums]
    types = (plgpu.RefType(_SWIZZLE), SCALAR, *[plgpu.Layout.WGMMA] * len(arrays))

    def run(x: Any, size: Any, words: Any, *sums: Any) -> Any:
        chosen = {} if s.is_two_level else {"widths": s.widths, "columns": lane.scalar(size).value}
        # Rows of 128 bytes: eight of them are a tile.
        x = mgpu.memref_slice(x, slice(0, width))
        x = mgpu.memref_unsqueeze(mgpu.memref_unfold(x, 0, (None, 8)), 1)
        return wgmma.start(words, x, swizzle=128, total=sums[0] if sums else None, **chosen)

    return ring.inline(run, types, ring.array(sums.shape, jnp.float32))(x, size, *arrays)


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

    `out` is ``[span[1], outputs]`` as `epilogue.finish` leaves it; `span` is the first of these
    tokens within the tile and how many there is room for. The tile has `count` tokens from `token`
    on, and the warpgroup's outputs begin at `column`.
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
            ring.inline(functools.partial(write, first), types)(total, *numbers, *refs)

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

    write = ring.inline(run, (SCALAR, SCALAR, plgpu.RefType()))

    def step(i: jax.Array, _: None) -> None:
        write(first + i * threads, p.bound(2), a.out)

    rounds = lax.div(jnp.maximum(end - first, 0) + (threads - 1), jnp.int32(threads))
    lax.fori_loop(jnp.int32(0), rounds, step, None)


def _consume(
    me: jax.Array, share: ring.Share, p: Plan, m: Memory, a: Arrays, rows: int, s: Settings
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
            sums, words, unit, slot = carry
            following = ring.next_slot(slot, s.stages)
            if "settle" in s.loop:
                words = program.settle(words, slot)
            product = _start(words, m.x.at[slot], work.size, sums, s)
            wait(i * groups + g + 1, following)
            # While the product is in flight. After the very last this converts stale memory.
            words, next_unit = program.operand(weights, following, me)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(m.free.at[slot])
            if s.is_two_level:
                product = sums + product * lax.broadcast_in_dim(unit, product.shape, (0,))
            return product, words, next_unit, following

        carry = (ring.full(0.0, (ROWS, width)), *carry)
        sums, *rest = lax.fori_loop(jnp.int32(0), groups, step, carry)
        _store(sums, work, me, m, a, rows, s)
        return tuple(rest)

    def some_tile(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        work = _work(share.number(i), p, across, s)
        # In two levels a loop for each width; else one, in which products have different widths.
        # The other way round ptxas lets products wait for one another (C7511).
        loops = [functools.partial(tile, n, i, work) for n in s.widths]
        if not s.is_two_level:
            return loops[-1](carry)
        number = sum((work.size > n).astype(jnp.int32) for n in s.widths[:-1])
        rest: tuple[jax.Array, ...] = lax.switch(jnp.int32(number), loops, carry)
        return rest

    first = jnp.int32(0)
    wait(first, first)
    lax.fori_loop(first, share.count, some_tile, (*program.operand(weights, first, me), first))
    _fill(me, p, a, s)


def _copy_tokens(work: Work, g: jax.Array, x: Ref, target: Ref, ready: Ref, s: Settings) -> None:
    """Copies a group's inputs of the tile's tokens, and of a few tokens more."""
    sizes = s.widths
    if s.loop == "old" and not s.fine:  # EXPERIMENT
        sizes = [n for n in (s.tokens // 4, s.tokens // 2, s.tokens) if n >= _FEWEST]
    for fewer, size in zip((0, *sizes), sizes, strict=False):

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


def _produce(share: ring.Share, p: Plan, m: Memory, a: Arrays, rows: int, s: Settings) -> None:
    groups, across = a.codes.shape[1], pl.cdiv(rows, s.consumers * ROWS)

    def scales(token: Any, source: Any, target: Any) -> None:
        places = Pointer.to(source), Pointer.to(target)
        _copy_scales(*places, lane.scalar(token), a.x.shape[0], s.tokens)

    copy = ring.inline(scales, (SCALAR, plgpu.RefType(), plgpu.RefType()))

    def tile(number: jax.Array, slot: jax.Array) -> jax.Array:
        work = _work(number, p, across, s)
        some = pl.ds(work.expert * (rows // ROWS) + work.tile * s.consumers, s.consumers)

        def group(g: jax.Array, slot: jax.Array) -> jax.Array:
            ready = m.ready.at[slot]
            plgpu.barrier_wait(m.free.at[slot])
            plgpu.copy_gmem_to_smem(a.codes.at[some, g], m.codes.at[slot], ready)
            plgpu.copy_gmem_to_smem(a.scales.at[some, g], m.scales.at[slot], ready)
            _copy_tokens(work, g, a.x, m.x.at[slot], ready, s)
            return ring.next_slot(slot, s.stages)

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
            ring.inline(run, [plgpu.RefType()] * 2)(a.sizes, m.plan)

        ring.inline(lambda: lane.block_barrier(), ())()
        p = Plan(m.plan, experts)
        share = ring.Share(p.bound(0) * pl.cdiv(rows, s.consumers * ROWS))

        def consume() -> None:
            ring.free_at_first(s.stages, [m.free], m.tile_free)
            if has_tables:
                plgpu.barrier_wait(m.tables_ready)
            _consume(me, share, p, m, a, rows, s)

        def produce() -> None:
            if has_tables:
                plgpu.copy_gmem_to_smem(a.tables, m.tables[0], m.tables_ready)
            _produce(share, p, m, a, rows, s)

        ring.divide(me, s.consumers, s.registers, consume, produce)

    barrier, e = plgpu.Barrier, s.epilogue
    pl.run_scoped(
        body,
        Memory(
            codes=plgpu.SMEM((s.stages, s.consumers, *a.codes.shape[2:]), jnp.uint8),
            scales=plgpu.SMEM((s.stages, s.consumers, ROWS), a.scales.dtype),
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
    run = ring.launch(
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
