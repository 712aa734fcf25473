"""Attention of many queries to pages of 16-bit keys and values, or of e4m3, for Hopper.

Roofline, for one sequence, 32 query heads, 8 KV heads, head dim 128, H200:
  - a prompt of 8,192 tokens: 2 * 32 * 8192**2 * 128 = 0.55 T operations, at the 989 T/s of the
    16-bit matrix units 0.56 ms; a copy takes 60 us for queries, output, keys and values.
  - a chunk of 1,024 tokens after 31,744 others: 4 * 32 * 1024 * 32256 * 128 = 0.54 T operations;
    keys and values are 134 MB, 31 us at 4.3 TB/s, if all tiles of queries read them from the cache
    at about the same time.
  - in e4m3 half the time for operations. Values must have the tokens of a channel side by side,
    which pages have not: `turn` makes such tiles of them before, once a call, in 4 % of the time of
    1,024 queries. (Converted to 16 bits they could be multiplied as they are: 0.75 of the time in
    16 bits, not 0.5.)
Arithmetic is the floor. Target: 0.9 of cuDNN's dense causal attention on bfloat16, 585 T/s, in e4m3
1.2, 780 T/s.

A program takes tiles of 128 query rows of one KV head in turn: up to eight heads of its group, as
many as a power of two divides it by, with 16 to 128 tokens side by side, so that a tile of keys is
read once for all of them and few rows see a part of it alone. Where rows are few a program takes a
part of the keys alone, and `join` makes results of the parts; rows of all heads of a group lie side
by side then, whatever their number. One warpgroup copies: it reads the
block table and puts pages together to tiles of 128 tokens (64 of 256 channels); two attend with 64
rows each and take turns at the matrix units, as in `pooled.forward`.

Versions, whole calls, pages of 64 tokens in random order, H200, jax 0.11.2, us and T/s of what is
visible; cuDNN on dense bfloat16 in the same run, causal for 8k, else with nothing hidden:
                              8k of 8k          1k of 32k         256 of 32k
  cuDNN, bf16                900, 611          791, 695          378, 364
  v1    bf16                 857, 642          832, 650          408, 336
        fp8                  626, 879          603, 897          327, 419
        turbo4               881, 624          898, 603          466, 294
  cuDNN, bf16                891, 617          795, 692          374, 367
  v2    the next tile's queries in memory, and a warpgroup half a step behind the other from tile to
        tile: who copies goes on while a tile ends
        bf16                 846, 650          816, 663          403, 340
        fp8                  642, 856          609, 889          327, 419
        turbo4               870, 632          884, 612          466, 294
Before it `expand` takes 18 us of 8k and 63 of 32k tokens, `turn` 7 and 18. With 240 and 24
registers 843 and 816, in fp8 637 and 608; fp8 with 3 stages 636 and 612: within a percent.

64 and 256 queries are 16 and 64 tiles for 132 multiprocessors, so up to 1,024 rows (256 queries of
four heads each) a program takes a part of the keys. bf16 but where said; Triton has parts of 1,024:
                              64 of 32k   256 of 32k   4 x 64 of 8k   16 of 32k   64 of 1k
  cuDNN, bf16                    376         379          102
  Triton                         246         861          260            157         62
  v2    without parts            404         411
  v3    parts of 2,048, those of a tile one after the other: the programs that run at the same time
        read all keys, and for every tile again
                                  84         298
  v4    tiles of a part one after the other, no program for parts past the longest sequence
                                  74         258
  v5    rows of a group's heads side by side
                                  75         258           75             48         25
        parts of 1,024            87         296           86             56         25
        parts of 4,096            68         236
        fp8: v3, v5           82, 84    233, 231
        fp8, Triton              245         867          261            102         72
        turbo4                   145         318          142            117         41
        turbo4, Triton           432                      451            129        103
16 queries of 32k tokens with 28 heads on 4: v4 128, v5 40, Triton 73. Parts of 4,096 are better
where sequences are long, but 64 of 4k would be 16 programs, and 32 of 32k 64. 512 of 32k take 420
without parts, 493 and 457 in parts of 2,048 and 4,096; 8 x 64 of 8k 123 without and 142 with: what
is written and read of parts. Results of parts stored from registers, without shared memory: the
same; `join` with the loads of four parts at once 21 us, one after the other 19.
16 queries are 64 rows, which `paged.kernel` takes, so that single tokens and several have the same
bits; it and this one, of 1k, 4k, 8k, 32k: bf16 25 and 25, 44 and 37, 45 and 38, 127 and 48 (parts
of 1,024: 27 of 8k, 56 of 32k), fp8 24 and 27, 39 and 39, 40 and 41, 103 and 60, turbo4 of 4k 38 and
51, of 32k 99 and 117. Triton: bf16 26, 32, 52, 157, fp8 43, 44, 45, 100, turbo4 of 4k 51, 32k 129.
Rows: `benchmarks/results/bytes_versions_2026-11-24.json`, `bytes_tuning_2026-11-25.json`.

Tiles of keys are at fixed positions, they are added up in order, and hidden ones change nothing: a
query's bits depend on its own position and on what the sequence holds alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import LOG2_E, Ref
from pallas_kernels.mosaic import ring
from pallas_kernels.mosaic.hopper.paged_prompt import join, lost
from pallas_kernels.mosaic.hopper.paged_prompt.memory import Memory, memory, pieces
from pallas_kernels.mosaic.hopper.paged_prompt.products import Eight, Sixteen, along
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import (
    Inputs,
    Settings,
    Span,
    Work,
    count,
    count_parts,
    parts_seen,
    query_slots,
    together,
)
from pallas_kernels.mosaic.ring import COLUMN, ROW, ROWS, WARPGROUPS


def with_sink(
    o: jax.Array, m: jax.Array, l: jax.Array, shift: jax.Array, work: Work, sinks: Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds each row's head's sink; returns the new outputs, maxima and sums.

    `m` are maxima, ``-inf`` where nothing is seen; `o` and `l` are not normalized, and to be
    multiplied by two to the power ``m - shift``. `sinks` are in powers of two, ``[N]``.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    each = work.tokens // WARPGROUPS
    sink = jnp.full_like(l, sinks[work.head])
    for g in range(1, work.together):
        sink = jnp.where(row >= g * each, sinks[work.head + g], sink)
    top = m - shift
    new = jnp.maximum(top, sink)
    new = jnp.where(new == -jnp.inf, 0.0, new)
    weight = jnp.exp2(top - new)
    # What sees nothing may have been multiplied with 0 times NaN.
    o = jnp.where(along(l == 0, o.shape, 0), 0.0, o) * along(weight, o.shape, 0)
    return o, new + shift, l * weight + jnp.exp2(sink - new)


__all__ = ["Settings", "attention"]

_MATRIX = plgpu.Layout.WGMMA


def _full(x: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)


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

    def turned(j: jax.Array, slot: jax.Array) -> jax.Array:
        pages = _pages(work, j, x, tile)
        plgpu.barrier_wait(y.k_free.at[slot])
        _copy_tile(pages, work, j, x.k, y.k.at[slot], y.k_ready.at[slot])
        plgpu.barrier_wait(y.v_free.at[slot])
        source = x.v.at[work.turned(j, x), work.h]
        plgpu.copy_gmem_to_smem(source, y.v.at[slot], y.v_ready.at[slot])
        return ring.next_slot(slot, s.stages)

    if x.is_turned:
        return lax.fori_loop(work.tiles.begin, work.tiles.end, turned, slot)

    def step(j: jax.Array, slot: jax.Array, is_edge: bool) -> jax.Array:
        pages = _pages(work, j, x, tile)
        plgpu.barrier_wait(y.k_free.at[slot])
        _copy_tile(pages, work, j, x.k, y.k.at[slot], y.k_ready.at[slot])
        plgpu.barrier_wait(y.v_free.at[slot])
        ready = y.v_ready.at[slot]
        if not is_edge:
            _copy_tile(pages, work, j, x.v, y.v.at[slot], ready)
            plgpu.barrier_arrive(ready)
            return ring.next_slot(slot, s.stages)
        _copy_tile(pages, work, j, x.v, y.v.at[slot], y.v_here)
        plgpu.barrier_wait(y.v_here)
        lost.clean(y.v.at[slot], y.lost.at[slot], work.length - j * tile)
        plgpu.commit_smem()
        for _ in range(arrivals):
            plgpu.barrier_arrive(ready)
        return ring.next_slot(slot, s.stages)

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
        return x * (along(factor, x.shape, 0) if factor.ndim and x.ndim > 1 else factor)

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
    return jnp.exp2(scaled(x) - along(shift - extra, x.shape, 0)), top, alpha


def _attend(
    q: Ref, slot: jax.Array, work: Work, me: jax.Array, x: Inputs, y: Memory, s: Settings
) -> tuple[Any, ...]:
    """Attends a warpgroup's rows to all tiles.

    Returns unnormalized outputs, maxima, sums, the power of two that both contain, and the slot
    after.
    """
    tile, head_dim = y.k.shape[1:]
    shape, end = (ROWS, tile), work.tiles.end
    products = (Eight.of if x.is_turned else Sixteen)(q, y.k, y.v)
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

    def lost_of(j: jax.Array, slot: jax.Array) -> list[jax.Array]:
        words = range(tile // lost.BITS)
        if x.lost is None:
            return [y.lost[slot, i] for i in words]
        return [x.lost[work.turned(j, x), work.h, i] for i in words]

    def step(j: jax.Array, carry: tuple[jax.Array, ...], is_edge: bool) -> tuple[jax.Array, ...]:
        o, m, l, slot = carry
        following = ring.next_slot(slot, s.stages)
        found = products.scores(slot, y.turns)
        plgpu.barrier_arrive(y.k_free.at[slot])
        seen = None
        if is_edge:
            last, first = seen_of(j)
            key = along(plgpu.broadcasted_iota(jnp.int32, (tile,), 0, layout=COLUMN), shape, 1)
            seen = key <= along(last, shape, 0)
            if first is not None:
                seen = seen & (key >= along(first, shape, 0))
        p, m, alpha = _weights(found, m, seen, factor, products.shift, s)
        l = l * alpha + jnp.sum(p, axis=1)
        o, p = products.prepare(o, p, alpha)
        o, l, m, p = lax.optimization_barrier((o, l, m, p))
        plgpu.barrier_arrive(y.turn)
        plgpu.barrier_wait(y.v_ready.at[slot])
        plgpu.barrier_wait(y.turn)
        o = products.add(o, p, alpha, slot, lambda: wait_for_key(j + 1, following))
        if is_edge:
            last, first = seen_of(j)
            first = jnp.zeros_like(last) if first is None else first
            o = lost.spoil(o, lost_of(j, slot), first, last)
        plgpu.barrier_arrive(y.v_free.at[slot])
        return o, m, l, following

    o = _full(0.0, (ROWS, head_dim), _MATRIX)
    carry = (o, _full(-jnp.inf, (ROWS,), ROW), _full(0.0, (ROWS,), ROW), slot)
    wait_for_key(work.tiles.begin, slot)
    _keep_apart(me == 1, y, is_always=False)
    if y.is_ahead:
        # A warpgroup that sees nothing takes its turns, too: otherwise the first could wait for
        # copies that only start once the second has ended the tile before.
        @pl.when(work.tiles.begin >= end)
        def _() -> None:
            y.turns()
            y.turns()

    o, m, l, slot = _over_tiles(work.tiles, step, carry, s)
    _keep_apart(me == 0, y, is_always=False)
    return o, m, l, products.shift, slot


def _keep_apart(is_this: jax.Array, y: Memory, *, is_always: bool) -> None:
    """Takes the second warpgroup's turn before its first one, or the first one's after its last.

    So the second is half a step behind: always, or only within a tile of queries if the warpgroup
    that copies waits for both before it goes on to the next.
    """
    if y.is_ahead == is_always:
        pl.when(is_this)(y.turns)


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
    o = jnp.where(along(nothing, o.shape, 0), 0.0, o) * along(share, o.shape, 0)
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
    share = ring.Share(total if s.part is None else total * x.parts[1], turns=True)

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
            ring.free_at_first(s.stages, (y.k_free, y.v_free))
            _keep_apart(me == 1, y, is_always=True)
            share.by_index(consume)
            _keep_apart(me == 0, y, is_always=True)
            plgpu.wait_smem_to_gmem(0)

        ring.divide(me, WARPGROUPS, s.registers, start_to_consume, lambda: share.by_index(produce))

    pl.run_scoped(body, collective_axes="warpgroup", **memory(x, out_ref, s)._asdict())


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    factors: jax.Array,
    lost_values: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to their sequences' pages.

    `q` is bfloat16 or float16 ``[B, T, N, H]``, `T` a multiple of 8, `H` 64, 128 or 256; `k` and
    `v` are ``[P, K, page_size, H]`` of that dtype, or keys in float8_e4m3fn; pages have 16, 32, 64
    or 128 tokens. With e4m3 keys `H` is 64 or 128, and `v` and `lost_values` are `turn.turn`'s
    results.

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
    if lost_values is not None:
        some = lost_values.reshape(len(q), -1, *lost_values.shape[1:]) != 0
        extra = lost_values, jnp.any(some, axis=(1, 3)).astype(jnp.int32)
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
    run = ring.launch(
        functools.partial(_kernel, s=s, total=tiles),
        "turbojax_paged_prompt_hopper",
        tuple(shapes),
        tiles * parts,
        s.programs,
        approx_math=True,
    )
    out, lse = run(q, k, *rest)
    return out, lse
