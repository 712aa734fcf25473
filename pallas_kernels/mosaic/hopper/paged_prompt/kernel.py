"""Attention of many queries to pages of 16-bit keys and values, or of e4m3, for Hopper.

Roofline, for 32 query heads on 8 of 128 channels, H200: a prompt of 8,192 tokens is 0.55 T
operations, 0.56 ms in 16 bits, and 60 us of bytes; a chunk of 1,024 tokens after 31,744 others the
same, and 31 us; in e4m3 half the time for operations, but `transpose` must put values' tokens side
by side before. Arithmetic is the floor. Target: 0.9 of cuDNN's dense causal attention on bfloat16,
in e4m3 1.2. Seen for 8k: 1.05 (650 T/s), e4m3 1.39, turbo4 1.02.

A program takes tiles of 128 query rows of one KV head in turn: up to eight heads of its group, as
many as a power of two divides it by, with 16 to 128 tokens side by side, so that a tile of keys is
read once for all of them and few rows see a part of it alone. Where rows are few a program takes a
part of the keys alone, and `join` makes results of the parts; rows of all heads of a group lie side
by side then, whatever their number. One warpgroup copies: it reads the
block table and puts pages together to tiles of 128 tokens (64 of 256 channels); two attend with 64
rows each and take turns at the matrix units, as in `pooled.forward`.

Tiles of keys are at fixed positions, they are added up in order, and hidden ones change nothing: a
query's bits depend on its own position and on what the sequence holds alone.

Roofline in full and versions: `docs/kernels/paged.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LOG2_E, Ref
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.hopper.paged_prompt import join, nonfinite
from pallas_kernels.mosaic.hopper.paged_prompt.products import Eight, Sixteen
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import (
    Inputs,
    Settings,
    Span,
    Work,
    count,
    count_parts,
    parts_seen,
    pieces,
    query_slots,
    tile_tokens,
    together,
)
from pallas_kernels.mosaic.pipeline import COLUMN, ROW, ROWS, WARPGROUPS

# Bytes of a row of the output that are stored at once.
_WIDTH = 128


class Memory(NamedTuple):
    """Shared memory, and the barriers of its slots."""

    q: Ref
    k: Ref
    v: Ref
    known_nonfinite: Ref
    out: Ref
    lse: Ref
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    v_here: Ref
    q_free: Ref
    k_free: Ref
    v_free: Ref
    tensor_core_order: Ref

    @property
    def overlaps_tiles(self) -> bool:
        """Whether the next tile's operands are copied, and used, while this one ends."""
        return self.q.shape[0] > WARPGROUPS

    def take_turns(self) -> None:
        """Lets the other warpgroup go on, and waits until that does the same."""
        plgpu.barrier_arrive(self.tensor_core_order)
        plgpu.barrier_wait(self.tensor_core_order)


def memory(x: Inputs, out: Ref, s: Settings) -> Memory:
    head_dim = x.q.shape[3]
    tile = tile_tokens(head_dim)
    copies = pieces(x.k.shape[2], tile)
    heads = together(x.q.shape[2] // x.k.shape[1])
    rows, queries = (WARPGROUPS, ROWS), query_slots(head_dim) * WARPGROUPS
    width = _WIDTH // jnp.dtype(out.dtype).itemsize
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages)
    return Memory(
        q=pipeline.tile((queries, ROWS, head_dim), x.q.dtype),
        k=pipeline.tile((s.stages, tile, head_dim), x.k.dtype),
        v=pipeline.tile(
            (s.stages, *(x.v.shape[2:] if x.is_transposed else (tile, head_dim))), x.v.dtype
        ),
        known_nonfinite=nonfinite.memory(s.stages),
        out=pipeline.tile((*rows, width), out.dtype),
        lse=plgpu.SMEM(rows, jnp.float32),
        q_ready=plgpu.Barrier(num_arrivals=heads, num_barriers=queries),
        k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        # The warpgroup that checks values arrives too, or instead of all.
        v_ready=plgpu.Barrier(
            num_arrivals=1 if x.is_transposed else copies + 1, num_barriers=s.stages
        ),
        v_here=plgpu.Barrier(num_arrivals=copies),
        q_free=plgpu.Barrier(num_barriers=queries),
        k_free=free,
        v_free=free,
        tensor_core_order=plgpu.Barrier(num_arrivals=WARPGROUPS),
    )


def with_sink(
    o: jax.Array, m: jax.Array, l: jax.Array, shift: jax.Array, work: Work, sinks: Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds each row's head's sink; returns the new outputs, maxima and sums.

    `m` are maxima, ``-inf`` where nothing is seen; `o` and `l` are not normalized, and to be
    multiplied by two to the power ``m - shift``. `sinks` are in powers of two, ``[N]``.
    """
    row = pipeline.iota(ROW)
    each = work.tokens // WARPGROUPS
    sink = jnp.full_like(l, sinks[work.head])
    for g in range(1, work.together):
        sink = jnp.where(row >= g * each, sinks[work.head + g], sink)
    top = m - shift
    new = jnp.maximum(top, sink)
    new = jnp.where(new == -jnp.inf, 0.0, new)
    weight = jnp.exp2(top - new)
    # What sees nothing may have been multiplied with 0 times NaN.
    o = jnp.where(pipeline.along(l == 0, o.shape, 0), 0.0, o) * pipeline.along(weight, o.shape, 0)
    return o, new + shift, l * weight + jnp.exp2(sink - new)


__all__ = ["Settings", "attention"]

_MATRIX = plgpu.Layout.WGMMA


# What copies --------------------------------------------------------------------------------------


def _copy_queries(work: Work, place: jax.Array, x: Inputs, y: Memory) -> None:
    each = work.tokens // WARPGROUPS
    for i in range(WARPGROUPS):
        at = place * WARPGROUPS + i
        plgpu.barrier_wait(y.q_free.at[at])
        tokens = pl.ds(work.first + i * each, each)
        for g in range(work.together):
            source = x.q.at[work.b, tokens, work.head + g]
            plgpu.copy_gmem_to_smem(source, y.q.at[at, pl.ds(g * each, each)], y.q_ready.at[at])


def _pages(work: Work, j: jax.Array, x: Inputs, tile: int) -> list[jax.Array]:
    """The pages of a tile's pieces; past the end numbers outside the pool, which give zeros."""
    pool, _, page_size, _ = x.k.shape
    found = []
    for i in range(pieces(page_size, tile)):
        first = j * tile + i * min(page_size, tile)
        entry = lax.div(first, jnp.int32(page_size))
        page = x.tables[work.b, jnp.minimum(entry, x.tables.shape[1] - 1)]
        found.append(jnp.where(first < work.length, page, pool))
    return found


def _copy_tile(
    pages: list[jax.Array], work: Work, j: jax.Array, source: Ref, target: Ref, barrier: Ref
) -> None:
    tile, page_size = target.shape[0], source.shape[2]
    size = min(page_size, tile)
    within = lax.rem(j * tile, jnp.int32(page_size)) if page_size > tile else 0
    for i, page in enumerate(pages):
        piece = source.at[page, work.h, pl.ds(within, size)]
        plgpu.copy_gmem_to_smem(piece, target.at[pl.ds(i * size, size)], barrier)


def _copy_keys(work: Work, slot: jax.Array, x: Inputs, y: Memory, s: Settings) -> jax.Array:
    """Copies a tile's keys and values as room comes free; returns the next slot."""
    tile = y.k.shape[1]
    arrivals = pieces(x.k.shape[2], tile) + 1

    def transposed(j: jax.Array, slot: jax.Array) -> jax.Array:
        pages = _pages(work, j, x, tile)
        plgpu.barrier_wait(y.k_free.at[slot])
        _copy_tile(pages, work, j, x.k, y.k.at[slot], y.k_ready.at[slot])
        plgpu.barrier_wait(y.v_free.at[slot])
        source = x.v.at[work.transposed(j, x), work.h]
        plgpu.copy_gmem_to_smem(source, y.v.at[slot], y.v_ready.at[slot])
        return pipeline.next_slot(slot, s.stages)

    if x.is_transposed:
        return lax.fori_loop(work.tiles.begin, work.tiles.end, transposed, slot)

    def step(j: jax.Array, slot: jax.Array, is_edge: bool) -> jax.Array:
        pages = _pages(work, j, x, tile)
        plgpu.barrier_wait(y.k_free.at[slot])
        _copy_tile(pages, work, j, x.k, y.k.at[slot], y.k_ready.at[slot])
        plgpu.barrier_wait(y.v_free.at[slot])
        ready = y.v_ready.at[slot]
        if not is_edge:
            _copy_tile(pages, work, j, x.v, y.v.at[slot], ready)
            plgpu.barrier_arrive(ready)
            return pipeline.next_slot(slot, s.stages)
        _copy_tile(pages, work, j, x.v, y.v.at[slot], y.v_here)
        plgpu.barrier_wait(y.v_here)
        nonfinite.clean(y.v.at[slot], y.known_nonfinite.at[slot], work.length - j * tile)
        plgpu.commit_smem()
        for _ in range(arrivals):
            plgpu.barrier_arrive(ready)
        return pipeline.next_slot(slot, s.stages)

    return _over_tiles(work.tiles, step, slot, s)


def _over_tiles(tiles: Span, step: Any, carry: Any, s: Settings) -> Any:
    """Runs ``step(j, carry, is_edge)`` for each tile of keys in order."""
    edge, plain = (functools.partial(step, is_edge=x) for x in (True, False))
    if s.window is not None:
        carry = lax.fori_loop(tiles.begin, tiles.inner, edge, carry)
    carry = lax.fori_loop(tiles.inner, tiles.outer, plain, carry)
    return lax.fori_loop(tiles.outer, tiles.end, edge, carry)


# What attends -------------------------------------------------------------------------------------


def _weights(
    x: jax.Array,
    m: jax.Array,
    seen: jax.Array | None,
    factor: jax.Array,
    extra: float,
    s: Settings,
) -> tuple[jax.Array, ...]:
    """From products `x`: weights, the maxima, and what the sums before are multiplied by.

    Scores are in powers of two: `factor` (of all, or of each row) takes products there, or with a
    cap to the argument of ``1 - 2 / (2**x + 1)``, the hyperbolic tangent. Weights are ``2**extra``
    at most.
    """

    def scaled(x: jax.Array) -> jax.Array:
        return x * (pipeline.along(factor, x.shape, 0) if factor.ndim and x.ndim > 1 else factor)

    if s.soft_cap is not None:
        # Absolute errors are what counts: they are multiplied by the cap.
        x = (1.0 - 2.0 / (jnp.exp2(scaled(x)) + 1.0)) * (s.soft_cap * LOG2_E)
        factor = jnp.float32(1.0)
    if seen is not None:
        x = jnp.where(seen, x, -jnp.inf)
    top = jnp.maximum(m, scaled(jnp.max(x, axis=1)))
    # 0 in rows where nothing was visible yet.
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    alpha = jnp.exp2(m - shift)
    return jnp.exp2(scaled(x) - pipeline.along(shift - extra, x.shape, 0)), top, alpha


def _attend(
    q: Ref, slot: jax.Array, work: Work, me: jax.Array, x: Inputs, y: Memory, s: Settings
) -> tuple[Any, ...]:
    """Attends a warpgroup's rows to all tiles.

    Returns unnormalized outputs, maxima, sums, the power of two that both contain, and the slot
    after.
    """
    tile, head_dim = y.k.shape[1:]
    shape, end = (ROWS, tile), work.tiles.end
    products = (Eight.of if x.is_transposed else Sixteen)(q, y.k, y.v)
    factor = x.factors[0]
    if products.query_factor is not None:
        factor = products.query_factor * factor

    def wait_for_key(j: jax.Array, slot: jax.Array) -> None:
        @pl.when(j < end)
        def _() -> None:
            plgpu.barrier_wait(y.k_ready.at[slot])

    def seen_of(j: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The last token of tile `j` that each row sees, and the first."""
        last = work.token_of(me) + (work.begin - j * tile)
        return last, None if s.window is None else last - s.window

    def nonfinite_of(j: jax.Array, slot: jax.Array) -> list[jax.Array]:
        words = range(tile // nonfinite.BITS)
        if x.nonfinite is None:
            return [y.known_nonfinite[slot, i] for i in words]
        return [x.nonfinite[work.transposed(j, x), work.h, i] for i in words]

    def step(j: jax.Array, carry: tuple[jax.Array, ...], is_edge: bool) -> tuple[jax.Array, ...]:
        o, m, l, slot = carry
        following = pipeline.next_slot(slot, s.stages)
        found = products.scores(slot, y.take_turns)
        plgpu.barrier_arrive(y.k_free.at[slot])
        seen = None
        if is_edge:
            last, first = seen_of(j)
            key = pipeline.along(pipeline.iota(COLUMN, tile), shape, 1)
            seen = key <= pipeline.along(last, shape, 0)
            if first is not None:
                seen = seen & (key >= pipeline.along(first, shape, 0))
        p, m, alpha = _weights(found, m, seen, factor, products.shift, s)
        l = l * alpha + jnp.sum(p, axis=1)
        o, p = products.prepare(o, p, alpha)
        o, l, m, p = lax.optimization_barrier((o, l, m, p))
        plgpu.barrier_arrive(y.tensor_core_order)
        plgpu.barrier_wait(y.v_ready.at[slot])
        plgpu.barrier_wait(y.tensor_core_order)
        o = products.add(o, p, alpha, slot, lambda: wait_for_key(j + 1, following))
        if is_edge:
            last, first = seen_of(j)
            first = jnp.zeros_like(last) if first is None else first
            o = nonfinite.spoil(o, nonfinite_of(j, slot), first, last)
        plgpu.barrier_arrive(y.v_free.at[slot])
        return o, m, l, following

    o = pipeline.full(0.0, (ROWS, head_dim), _MATRIX)
    carry = (o, pipeline.full(-jnp.inf, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW), slot)
    wait_for_key(work.tiles.begin, slot)
    _keep_apart(me == 1, y, is_always=False)
    if y.overlaps_tiles:
        # A warpgroup that sees nothing takes its turns, too: otherwise the first could wait for
        # copies that only start once the second has ended the tile before.
        @pl.when(work.tiles.begin >= end)
        def _() -> None:
            y.take_turns()
            y.take_turns()

    o, m, l, slot = _over_tiles(work.tiles, step, carry, s)
    _keep_apart(me == 0, y, is_always=False)
    return o, m, l, products.shift, slot


def _keep_apart(is_this: jax.Array, y: Memory, *, is_always: bool) -> None:
    """Takes the second warpgroup's turn before its first one, or the first one's after its last.

    So the second is half a step behind: always, or only within a tile of queries if the warpgroup
    that copies waits for both before it goes on to the next.
    """
    if y.overlaps_tiles == is_always:
        pl.when(is_this)(y.take_turns)


def _store(
    work: Work,
    me: jax.Array,
    found: tuple[jax.Array, ...],
    x: Inputs,
    y: Memory,
    results: Any,
) -> None:
    """Normalizes and stores: 0 and ``-inf`` in rows that saw nothing, NaN in a broken sequence.

    A part's results are stored row by row in this order, others where `attention` returns them.
    """
    o, m, l, shift = found
    out_ref, lse_ref = results
    if x.sinks is not None:
        o, m, l = with_sink(o, m, l, shift, work, x.sinks)
    nothing = (work.token_of(me) >= work.real) | (l == 0)
    # A constant plus a scalar is a row array that loops can carry.
    broken = jnp.where(work.is_broken, jnp.nan, 0.0)
    share = jnp.where(nothing, 0.0, x.factors[1] / l) + broken
    lse = jnp.where(nothing, -jnp.inf, (m - shift) * (1 / LOG2_E) + jnp.log(l)) + broken
    o = jnp.where(pipeline.along(nothing, o.shape, 0), 0.0, o) * pipeline.along(share, o.shape, 0)
    each = work.tokens // WARPGROUPS
    tokens = pl.ds(work.first + me * each, each)
    width, is_part = y.out.shape[-1], len(out_ref.shape) == 5
    rows = pl.ds((work.place * WARPGROUPS + me) * ROWS, ROWS)
    at = (work.b, work.set)
    for first in range(0, o.shape[1], width):
        # Waits as late as possible until the last results have left.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        channels = pl.ds(first, width)
        y.out[me] = o[:, first : first + width].astype(y.out.dtype)
        if first == 0:
            y.lse[me] = lse
        plgpu.commit_smem()
        if first == 0:
            target = lse_ref.at[(work.part, *at, rows) if is_part else (*at, rows)]
            plgpu.copy_smem_to_gmem(y.lse.at[me], target)
        if is_part:
            target = out_ref.at[work.part, work.b, work.set, rows, channels]
            plgpu.copy_smem_to_gmem(y.out.at[me], target)
            continue
        for g in range(work.together):
            target = out_ref.at[work.b, tokens, work.head + g, channels]
            plgpu.copy_smem_to_gmem(y.out.at[me, pl.ds(g * each, each)], target)


def _kernel(*refs: Ref, s: Settings, total: int) -> None:
    """One persistent program, which takes every `s.programs`-th tile of query rows."""
    *inputs, out_ref, lse_ref = refs
    named = {"sinks": inputs.pop()} if s.has_sinks else {}
    x, me = Inputs(*inputs, **named), lax.axis_index("warpgroup")
    share = pipeline.TileScheduler(total if s.part is None else total * x.parts[1], zigzag=True)

    def body(**memory: Ref) -> None:
        y = Memory(**memory)
        slots = query_slots(x.q.shape[3])

        def consume(i: jax.Array, slot: jax.Array) -> jax.Array:
            work, at = Work(share.number(i), x, s), lax.rem(i, jnp.int32(slots)) * WARPGROUPS + me
            plgpu.barrier_wait(y.q_ready.at[at])
            *found, slot = _attend(y.q.at[at], slot, work, me, x, y, s)
            plgpu.barrier_arrive(y.q_free.at[at])
            store = functools.partial(_store, work, me, tuple(found), x, y, (out_ref, lse_ref))
            if s.part is None:
                store()
            else:
                pl.when(work.tiles.begin < work.tiles.end)(store)
            return slot

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            work = Work(share.number(i), x, s)
            _copy_queries(work, lax.rem(i, jnp.int32(slots)), x, y)
            return _copy_keys(work, slot, x, y, s)

        def start_to_consume() -> None:
            for i in range(slots):
                plgpu.barrier_arrive(y.q_free.at[i * WARPGROUPS + me])
            pipeline.free_at_first(s.stages, (y.k_free, y.v_free))
            _keep_apart(me == 1, y, is_always=True)
            share.by_index(consume)
            _keep_apart(me == 0, y, is_always=True)
            plgpu.wait_smem_to_gmem(0)

        pipeline.divide(
            me, WARPGROUPS, s.registers, start_to_consume, lambda: share.by_index(produce)
        )

    pl.run_scoped(body, collective_axes="warpgroup", **memory(x, out_ref, s)._asdict())


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    factors: jax.Array,
    nonfinite_values: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to their sequences' pages.

    `q` is bfloat16 or float16 ``[B, T, N, H]``, `T` a multiple of 8, `H` 64, 128 or 256; `k` and
    `v` are ``[P, K, page_size, H]`` of that dtype, or keys in float8_e4m3fn; pages have 16, 32, 64
    or 128 tokens. With e4m3 keys `H` is 64 or 128, and `v` and `nonfinite_values` are
    `transpose.transpose`'s results.

    int32: `tables` ``[B, max_pages]``, all within the pool; `lengths` ``[B]``, tokens held,
    negative for a sequence that cannot be read, whose results are NaN; `query_lengths` ``[B]``, the
    real queries. `factors`, float32 ``[2]``, are those of the products, not negative, see
    `_weights`, and of the outputs. `sinks`, float32 ``[N]``, are logits in the softmax's
    denominator alone, not with parts.

    Returns ``[B, T, N, H]`` in the queries' dtype, or the settings', and the float32 log-sum-exp
    ``[B, T, N]``.
    """
    if settings.group != 1:
        raise ValueError(f"{settings.group=} must be 1: it follows from the heads")
    extra: tuple[jax.Array, ...] = ()
    if nonfinite_values is not None:
        some = nonfinite_values.reshape(len(q), -1, *nonfinite_values.shape[1:]) != 0
        extra = nonfinite_values, jnp.any(some, axis=(1, 3)).astype(jnp.int32)
    if sinks is not None:
        extra = *extra, sinks * LOG2_E
        settings = dataclasses.replace(settings, has_sinks=True)
    inputs = (k, v, tables, lengths, query_lengths, factors)
    if settings.part is None:
        return _whole(q, *inputs, parts_seen(lengths, query_lengths, settings), *extra, s=settings)
    settings = dataclasses.replace(settings, group=q.shape[2] // k.shape[1])
    seen = parts_seen(lengths, query_lengths, settings)
    found = _run(join.side_by_side(q, settings), *inputs, seen, *extra, s=settings)
    dtype = settings.out_dtype or q.dtype
    return join.join(*found, lengths, query_lengths, q.shape, dtype, settings)


def _whole(
    q: jax.Array, k: jax.Array, *rest: jax.Array, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """`attention` if every program takes all that its rows see."""
    batch, tokens, heads, _ = q.shape
    each = together(heads // k.shape[1])
    out, lse = _run(q, k, *rest, s=s)
    # Rows are warpgroup by warpgroup, in each head by head.
    lse = lse.reshape(batch, heads // each, -1, each, ROWS // each)
    lse = lse.transpose(0, 2, 4, 1, 3).reshape(batch, -1, heads)
    return out, lse[:, :tokens]


def _run(q: jax.Array, k: jax.Array, *rest: jax.Array, s: Settings) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on `Inputs`.

    Returns outputs as the queries and float32 ``[B, sets, R]`` of its rows, or with parts float32
    ``[parts, B, sets, R, H]`` and ``[parts, B, sets, R]``.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    tiles, sets = count(q, kv_heads), heads // together(heads // kv_heads)
    rows = (batch, sets, tiles // (batch * sets) * WARPGROUPS * ROWS)
    parts = count_parts(rest[1], k, s)
    shapes = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)]
    if s.part is not None:
        shapes = [
            jax.ShapeDtypeStruct((parts, *rows, *last), jnp.float32) for last in ((head_dim,), ())
        ]
    run = pipeline.launch(
        functools.partial(_kernel, s=s, total=tiles),
        "turbojax_paged_prompt_hopper",
        tuple(shapes),
        tiles * parts,
        s.programs,
        approx_math=True,
    )
    out, lse = run(q, k, *rest)
    return out, lse
