"""Gradients of keys and values of pooled attention for Hopper (Li 2025, Algorithm 2).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, density 0.156: 0.69 T operations, 0.69
ms at 989 T/s, up to 1.0 T where blocks have their levels at random; float32 results 0.16 ms.
Target: 450 T/s, products that are masked afterwards included. Seen on an H100: 1.90 ms; 644 T/s
where all blocks have level 1. Queries that attend to few of a tile's blocks bound it.

A program takes tiles of 128 pooled keys in turn. One warpgroup copies 64 queries at a time, with
the gradients of their outputs; two have 64 keys each as rows, so that weights and score gradients
are the left operands of the products that follow, in registers. A warpgroup none of whose blocks
has this level for these queries skips them.

Roofline in full and versions: `docs/kernels/pooled.md`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.hopper.pooled import tiles
from pallas_kernels.mosaic.hopper.pooled.tiles import (
    COLUMN,
    LOG2_E,
    ROW,
    ROWS,
    TILE,
    WARPGROUPS,
    Ref,
    Settings,
)

# Queries that are copied, and multiplied, together.
_QUERIES = 64
_BITS = 16
# Channels of a result that are written at once.
_WIDTH = 32
# Programs that share the first tile of level 1: all queries often see the beginning of a text.
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static: how many tiles there are, and in which order they are taken."""

    batch: int
    heads: int
    kv_heads: int
    tiles: tuple[int, ...]
    """Of each level, for a head; so they follow each other in the lists and in the results."""
    s: Settings

    @property
    def steps(self) -> int:
        return self.s.block_q // _QUERIES

    @property
    def rows(self) -> int:
        return self.batch * self.kv_heads

    @property
    def shared(self) -> int:
        """Parts of first tiles besides the first part; they come before all tiles."""
        return self.rows * (_PARTS - 1)

    @property
    def total(self) -> int:
        return self.shared + self.rows * sum(self.tiles)


class _Work:
    """A tile of pooled keys of one head, by its number.

    The shared first tiles come first. Then the coarsest level, to whose tiles most queries attend.
    Those of one head, which share queries, follow each other, and every other head's are in reverse
    order: in a causal call the first ones have most to do, and all programs should have about
    equally much to do.
    """

    def __init__(self, number: jax.Array, plan: _Plan) -> None:
        is_shared = number < plan.shared
        tile = jnp.maximum(number - plan.shared, 0)
        # Where the levels end, the coarsest first.
        ends = [plan.rows * sum(plan.tiles[-n:]) for n in range(1, len(tiles.LEVELS) + 1)]
        kind = 3 - tiles.level_of(tile, tuple(jnp.int32(end) for end in ends[:-1]))
        tile = tile - tiles.pick(3 - kind, (0, *ends[:-1]))
        per_head = tiles.pick(kind, plan.tiles)
        row, place = lax.div(tile, per_head), lax.rem(tile, per_head)
        place = jnp.where(lax.rem(row, jnp.int32(2)) == 0, place, per_head - 1 - place)
        self.kind = jnp.where(is_shared, 0, kind)
        self.tile = jnp.where(is_shared, 0, place)
        row = jnp.where(is_shared, lax.div(number, jnp.int32(_PARTS - 1)), row)
        self.part = jnp.where(is_shared, lax.rem(number, jnp.int32(_PARTS - 1)) + 1, 0)
        self.b = lax.div(row, jnp.int32(plan.kv_heads))
        self.h = lax.rem(row, jnp.int32(plan.kv_heads))
        self.group = plan.heads // plan.kv_heads
        before = tuple(sum(plan.tiles[:n]) for n in range(len(tiles.LEVELS)))
        self.listed = self.tile + tiles.pick(self.kind, before)
        self.result = jnp.where(is_shared, sum(plan.tiles) + self.part - 1, self.listed)
        # log2 of the groups of a block.
        self.shift = jnp.int32(plan.s.block_kv.bit_length() - 1) - self.kind

    def share(self, entries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first of a tile's entries that this piece of work has, and the end of them."""
        is_split = (self.kind == 0) & (self.tile == 0)
        first = lax.div(entries * self.part, jnp.int32(_PARTS))
        last = lax.div(entries * (self.part + 1), jnp.int32(_PARTS))
        return jnp.where(is_split, first, 0), jnp.where(is_split, last, entries)


class _Rows(NamedTuple):
    """A warpgroup's pooled keys."""

    bias: jax.Array  # float32 ``[64]``, log2 of the tokens, ``-inf`` where there are none
    last: jax.Array  # int32 ``[64]``, the last token
    bit: jax.Array  # int32 ``[64]``, the number of the block within the tile
    mine: jax.Array  # int32, the bits of the blocks


def _rows(work: _Work, me: jax.Array, key_length: jax.Array) -> _Rows:
    within = pipeline.iota(ROW) + me * ROWS

    def fill(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, within.shape)

    begin = lax.shift_left(within + work.tile * TILE, fill(work.kind))
    end = jnp.minimum(begin + lax.shift_left(jnp.int32(1), work.kind), key_length)
    count = jnp.where(end > begin, end - begin, 1).astype(jnp.float32)
    bias = jnp.where(end > begin, jnp.log(count) * LOG2_E, -jnp.inf)
    bit = lax.shift_right_logical(within, fill(work.shift))
    blocks = jnp.maximum(lax.shift_right_logical(jnp.int32(ROWS), work.shift), 1)
    mine = lax.shift_left(jnp.int32(1), blocks) - 1
    first = lax.shift_right_logical(me * ROWS, work.shift)
    return _Rows(bias, end - 1, bit, lax.shift_left(mine, first))


def _is_among(entry: jax.Array, rows: _Rows) -> jax.Array:
    """Which of the pooled keys belong to a block that the entry (or several combined) names."""
    bits = jnp.broadcast_to(entry & ((1 << _BITS) - 1), rows.bit.shape)
    return (lax.shift_right_logical(bits, rows.bit) & 1) == 1


def _step(
    sums: tuple[jax.Array, jax.Array],
    entry: jax.Array,
    position: jax.Array,
    rows: _Rows,
    keys: tuple[Ref, Ref],
    queries: tuple[Ref, ...],
    segments: tuple[Ref, ...],
    s: Settings,
    is_masked: bool,
) -> tuple[jax.Array, jax.Array]:
    """Adds what 64 queries, the first at `position`, contribute to the gradients of 64 keys.

    `segments` are those of keys and of queries, or empty.
    """
    d_k, d_v = sums
    k, values = keys
    q, d_o, lse, delta = queries
    shape = (ROWS, _QUERIES)
    pairs = (k, pipeline.transposed(q)), (values, pipeline.transposed(d_o))
    x, d_p = tiles.product(*pairs, columns=_QUERIES)
    bias = jnp.where(_is_among(entry, rows), rows.bias, -jnp.inf)
    lse = pipeline.load(lse, COLUMN)
    x = x * s.factor + (pipeline.along(bias, shape, 0) - pipeline.along(lse, shape, 1))
    if is_masked and s.is_causal:
        at = pipeline.iota(COLUMN, _QUERIES) + position
        x = jnp.where(
            pipeline.along(rows.last, shape, 0) <= pipeline.along(at, shape, 1), x, -jnp.inf
        )
    if is_masked and segments:
        mine, other = (pipeline.load(*x) for x in zip(segments, (ROW, COLUMN), strict=True))
        seen = pipeline.along(mine, shape, 0) == pipeline.along(other, shape, 1)
        x = jnp.where(seen, x, -jnp.inf)
    p = jnp.exp2(x)
    d_v = tiles.add_product(d_v, p.astype(q.dtype), d_o)
    d_s = p * (d_p - pipeline.along(pipeline.load(delta, COLUMN), shape, 1))
    return tiles.add_product(d_k, d_s.astype(q.dtype), q), d_v


def _kernel(*refs: Ref, plan: _Plan) -> None:
    q_ref, d_o_ref, lse_ref, delta_ref, *rest = refs
    ks, vs, (entries, counts, lengths, *others) = rest[:4], rest[4:8], rest[8:-2]
    outputs, s = rest[-2:], plan.s
    marks = tiles.Marks.of(others, s)
    me, head_dim = lax.axis_index("warpgroup"), q_ref.shape[-1]

    def list_at(work: _Work, g: jax.Array) -> tuple[Any, ...]:
        head = work.h * work.group + g
        b = work.b if entries.shape[0] > 1 else 0
        return b, head if entries.shape[1] > 1 else 0, work.listed

    def over_tiles(f: Any) -> None:
        pipeline.TileScheduler(plan.total).loop(lambda number, slot: f(_Work(number, plan), slot))

    def body(
        q: Ref,
        d_o: Ref,
        lse: Ref,
        delta: Ref,
        k: Ref,
        values: Ref,
        out: Ref,
        segments: list[list[Ref]],
        ready: Any,
        free: Any,
    ) -> None:
        (key_ready, query_ready), (key_free, query_free) = ready, free

        def consume(work: _Work, slot: jax.Array) -> jax.Array:
            rows = _rows(work, me, lengths[work.b])
            plgpu.barrier_wait(key_ready.at[me])

            def step(t: jax.Array, carry: Any, at: tuple[Any, ...], is_masked: bool) -> Any:
                *sums, seen, slot = carry
                entry = entries[(*at, lax.div(t, jnp.int32(plan.steps)))]
                begin = lax.rem(t, jnp.int32(plan.steps)) * _QUERIES
                position = lax.shift_right_logical(entry, jnp.int32(_BITS)) * s.block_q + begin
                plgpu.barrier_wait(query_ready.at[slot])
                queries = tuple(x.at[slot] for x in (q, d_o, lse, delta))
                keys = (k.at[me], values.at[me])
                marked = tuple(
                    x.at[i] for of, i in zip(segments, (me, slot), strict=True) for x in of
                )
                at_key = marks.position(position, work.b)
                arrays = (entry, at_key, rows, keys, queries, marked)
                sums = lax.cond(
                    (entry & rows.mine) != 0,
                    lambda: _step(tuple(sums), *arrays, s, is_masked),
                    lambda: tuple(sums),
                )
                plgpu.barrier_arrive(query_free.at[slot])
                return *sums, seen | entry, pipeline.next_slot(slot, s.stages)

            def head(g: jax.Array, carry: Any) -> Any:
                at = list_at(work, g)
                first, last = work.share(counts[(*at, 0)])
                if s.is_causal or s.has_segments:
                    masked = jnp.clip(counts[(*at, 1)], first, last)
                    one = functools.partial(step, at=at, is_masked=True)
                    carry = lax.fori_loop(first * plan.steps, masked * plan.steps, one, carry)
                    first = masked
                one = functools.partial(step, at=at, is_masked=False)
                return lax.fori_loop(first * plan.steps, last * plan.steps, one, carry)

            zeros = pipeline.full(0.0, (ROWS, head_dim), plgpu.Layout.WGMMA)
            carry = (zeros, zeros, jnp.int32(0), slot)
            carry = lax.fori_loop(jnp.int32(0), jnp.int32(work.group), head, carry)
            d_k, d_v, seen, slot = carry
            plgpu.barrier_arrive(key_free.at[me])
            # A block to which nothing attends gets nothing, even if it holds NaN.
            is_seen = pipeline.along(_is_among(seen, rows), zeros.shape, 0)
            d_k, d_v = (jnp.where(is_seen, x, 0.0) for x in (d_k, d_v))
            span = pl.ds(work.result * TILE + me * ROWS, ROWS)
            for ref, x in zip(outputs, (d_k * s.scale, d_v), strict=True):
                tiles.store(x, out.at[me], ref.at[work.b, work.h, span])
            return slot

        def produce(work: _Work, slot: jax.Array) -> jax.Array:
            for i in range(WARPGROUPS):
                plgpu.barrier_wait(key_free.at[i])
                span = pl.ds(work.tile * TILE + i * ROWS, ROWS)
                for n in range(len(tiles.LEVELS)):
                    index = (work.b, work.h, span) if n else (work.b, span, work.h)

                    @pl.when(work.kind == n)
                    def _(n: int = n, i: int = i, index: Any = index) -> None:
                        for source, target in ((ks[n], k), (vs[n], values)):
                            plgpu.copy_gmem_to_smem(source.at[index], target.at[i], key_ready.at[i])

                for x in segments[0]:
                    span = pl.ds(work.listed * TILE + i * ROWS, ROWS)
                    source = marks.keys.at[work.b, span]
                    plgpu.copy_gmem_to_smem(source, x.at[i], key_ready.at[i])

            def head(g: jax.Array, slot: jax.Array) -> jax.Array:
                at, number = list_at(work, g), work.h * work.group + g

                def step(t: jax.Array, slot: jax.Array) -> jax.Array:
                    entry = entries[(*at, lax.div(t, jnp.int32(plan.steps)))]
                    begin = lax.rem(t, jnp.int32(plan.steps)) * _QUERIES
                    block = lax.shift_right_logical(entry, jnp.int32(_BITS))
                    span = pl.ds(block * s.block_q + begin, _QUERIES)
                    plgpu.barrier_wait(query_free.at[slot])
                    for source, target in ((q_ref, q), (d_o_ref, d_o)):
                        source = source.at[work.b, span, number]
                        plgpu.copy_gmem_to_smem(source, target.at[slot], query_ready.at[slot])
                    for source, target in ((lse_ref, lse), (delta_ref, delta)):
                        source = source.at[work.b, number, span]
                        plgpu.copy_gmem_to_smem(source, target.at[slot], query_ready.at[slot])
                    for x in segments[1]:
                        source = marks.queries.at[work.b, span]
                        plgpu.copy_gmem_to_smem(source, x.at[slot], query_ready.at[slot])
                    return pipeline.next_slot(slot, s.stages)

                first, last = work.share(counts[(*at, 0)])
                return lax.fori_loop(first * plan.steps, last * plan.steps, step, slot)

            return lax.fori_loop(jnp.int32(0), jnp.int32(work.group), head, slot)

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, [query_free], key_free.at[me])
            over_tiles(consume)

        pipeline.divide(me, WARPGROUPS, (240, 24), start_to_consume, lambda: over_tiles(produce))

    pl.run_scoped(
        body,
        *[pipeline.tile((s.stages, _QUERIES, head_dim), q_ref.dtype)] * 2,
        *[plgpu.SMEM((s.stages, _QUERIES), jnp.float32)] * 2,
        *[pipeline.tile((WARPGROUPS, ROWS, head_dim), q_ref.dtype)] * 2,
        pipeline.tile((WARPGROUPS, ROWS, _WIDTH), jnp.float32),
        [tiles.segment_memory(s, WARPGROUPS, ROWS), tiles.segment_memory(s, s.stages, _QUERIES)],
        [
            plgpu.Barrier(num_arrivals=2 + s.has_segments, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=4 + s.has_segments, num_barriers=s.stages),
        ],
        [
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages),
        ],
        collective_axes="warpgroup",
    )


def key_gradient(
    q: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    entries: jax.Array,
    counts: jax.Array,
    key_lengths: jax.Array,
    *,
    settings: Settings,
    marks: tuple[jax.Array, ...] = (),
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The gradients of keys and values: by level float32 ``[B, K, G, H]``, `G` rounded up to 128.

    Arguments as `query_gradient.query_gradient`, but `lse` and `delta` have `T` rounded up to whole
    query blocks: a copy from beyond the end would take the next head's. int32: `entries`
    ``[B or 1, N or 1, tiles, T_r]``: for each tile of 128 pooled keys, those of level 1 first, the
    query blocks `i` that attend to them, ``i << 16 | bits``; bit `p`: to the tile's block `p`.
    `counts` ``[B or 1, N or 1, tiles, 2]``: entries, and how many, the first ones, need a mask. In
    `marks`, segments of keys are int32 ``[B, tiles * 128]``, those of the tiles' pooled keys.
    """
    batch, head_dim, kv_heads = q.shape[0], q.shape[3], keys[0].shape[2]
    if lse.shape[2] % settings.block_q or delta.shape != lse.shape:
        raise ValueError(
            f"{lse.shape=} and {delta.shape=} must be the same, with whole blocks of "
            f"{settings.block_q} queries"
        )
    # Keys are padded by less than a tile, so that this is the number of tiles without padding too.
    counted = tuple(pl.cdiv(keys[0].shape[1], TILE * level) for level in tiles.LEVELS)
    plan = _Plan(batch, q.shape[2], kv_heads, counted, settings)
    if entries.shape[2] != sum(counted):
        raise ValueError(f"{entries.shape=} must have {sum(counted)} tiles of pooled keys")
    groups = sum(counted) * TILE
    shape = (batch, kv_heads, groups + (_PARTS - 1) * TILE, head_dim)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    run = pipeline.launch(
        functools.partial(_kernel, plan=plan),
        "turbojax_pooled_key_gradient_hopper",
        (out, out),
        plan.total,
        settings.programs,
        approx_math=True,
    )
    results = run(q, d_out, lse, delta, *keys, *values, entries, counts, key_lengths, *marks)
    ends = [sum(counted[: n + 1]) * TILE for n in range(len(counted))]

    def by_level(x: jax.Array) -> tuple[jax.Array, ...]:
        parts = x[:, :, groups:].reshape(batch, kv_heads, _PARTS - 1, TILE, head_dim)
        first = x[:, :, :TILE] + jnp.sum(parts, axis=2)
        x = lax.dynamic_update_slice(x, first, (0, 0, 0, 0))
        return tuple(jnp.split(x, ends, axis=2))[:-1]

    d_keys, d_values = results
    return by_level(d_keys), by_level(d_values)
