"""Gradient of the queries of dense attention, for Hopper.

Roofline, for 2 sequences of 8,192 tokens, 32 query heads on 8 of 128 channels, causal: three
products, 1.65 T operations, 1.4 ms at the 989 T/s of 16 bits, 1.1 with output gradients in 8 bits;
bytes come from the L2 cache. Target: 75 % of the matrix unit. Seen on an H200: 1.85 and 1.67 ms, 75
and 66 % of 16 bits' peak. Registers bound it, and shared memory, of which products read 80 bytes a
cycle while copies write.

A program takes tiles of 128 queries of one head in turn. One warpgroup copies 128 keys at a time,
or 64, with their values; two attend with 64 queries each.

Roofline in full and versions: `docs/kernels/gradient.md`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.hopper.gradient import elementwise, tiles
from pallas_kernels.mosaic.hopper.gradient.tiles import (
    ROW,
    ROWS,
    WARPGROUPS,
    Operands,
    Ref,
    Settings,
)

# Queries of a program.
_QUERIES = WARPGROUPS * ROWS


class _Work:
    """A tile of queries of one head, by its number: heads that share keys follow each other."""

    def __init__(self, number: jax.Array, x: Operands, s: Settings) -> None:
        (_, tokens, heads, _), kv_heads = x.q.shape, x.k.shape[2]
        count = pl.cdiv(tokens, _QUERIES)
        row, tile = tiles.place_of(number, count, x.query_order, heads)
        self.b, self.head = lax.div(row, jnp.int32(heads)), lax.rem(row, jnp.int32(heads))
        self.h = lax.div(self.head, jnp.int32(heads // kv_heads))
        self.first, self.shift = tile * _QUERIES, x.shift(self.b)
        self.keys = x.key_lengths[self.b]
        exists = self.first < x.query_lengths[self.b]
        keys = jnp.where(exists, self.keys, 0)
        position = tiles.shifted(self.first, self.shift)
        segments = tiles.bounds_at(x.query_bounds, self.b, tile)
        limits = (position, _QUERIES, keys, s.left, s.right, s.together, segments, s.keys)
        self.steps = tiles.span(*limits)


class _Memory(NamedTuple):
    """Shared memory: queries of each warpgroup and what belongs to them, and what steps need."""

    q8: Ref
    d8: Ref
    lse: Ref
    delta: Ref
    k8: Ref
    v8: Ref
    k: Ref
    out: Ref
    query_ready: Ref
    query_free: Ref
    ready: Ref
    free: Ref
    ids: tuple[Ref, Ref] | None
    own: Ref | None


def _consume(
    work: _Work, slot: jax.Array, me: jax.Array, x: Operands, m: _Memory, s: Settings
) -> tuple[jax.Array, ...]:
    """The sums of a warpgroup's 64 queries, and which of them see nothing; the next slot."""
    first = work.first + me * ROWS
    position = tiles.shifted(first, work.shift)
    kind = x.kind_of_bias
    tile = elementwise.Tile(False, str(m.k.dtype), s, kind)
    q_scale, d_scale = (
        tiles.scale_at(scales, work.b, work.head, first, s.block_q)
        for scales in (x.q_scale, x.d_scale)
    )
    q_scale = q_scale * tiles.scores_factor(s)
    plgpu.barrier_wait(m.query_ready.at[me])
    lse, delta = (pipeline.load(ref.at[me], ROW) for ref in (m.lse, m.delta))
    own = None if m.own is None else (m.own.at[me, 0], m.own.at[me, 1])

    def factors(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        k_scale = tiles.scale_at(x.k_scale, work.b, work.h, key, s.block_kv)
        v_scale = tiles.scale_at(x.v_scale, work.b, work.h, key, s.block_kv)
        return q_scale * k_scale, d_scale * v_scale

    def added(key: jax.Array) -> tuple[jax.Array, ...]:
        """Starts to load the bias."""
        if kind is None:
            return ()
        return (biases.of_queries(x.bias, kind.line(work.b, work.head), first, key),)

    def start(place: tiles.Place) -> tuple[jax.Array, jax.Array]:
        scores = tiles.product(m.q8.at[me], tiles.at(m.k8, place))
        return scores, tiles.product(m.d8.at[me], tiles.at(m.v8, place))

    def add(sums: Any, begin: jax.Array, places: list[tiles.Place], is_masked: bool) -> Any:
        """64 keys of each place: the products of one run under the other's exponentials."""
        total = sums
        keys = [begin + n * ROWS for n in range(len(places))]
        scales = [factors(key) for key in keys]
        products = [start(place) for place in places]
        of_pairs = added(begin)
        for n, key in enumerate(keys):
            # Left: the other place's two products, or the sum that was started last.
            plgpu.wgmma_wait(1 if n else 2 * (len(places) - 1))
            ids = None if m.ids is None else (m.ids[0].at[me], m.ids[1].at[places[n].slot])
            limits = tile.limits_of(position, key, work.keys - key, ids, own, is_masked)
            linear = () if x.slopes is None else (x.slopes[work.head], position - key)
            found = tile.weigh(products[n][0], lse, scales[n][0], limits, linear, of_pairs)
            weights, *slopes = found
            if n + 1 < len(keys):
                of_pairs = added(keys[n + 1])
            rest = (delta, scales[n][1], tuple(slopes), limits)
            words = tile.score_gradients(weights, products[n][1], *rest)
            total = tiles.add_product(total, words, tiles.at(m.k, places[n]))
        plgpu.wgmma_wait(0)
        return tiles.arrived(total)

    def add_whole(sums: Any, begin: jax.Array, slot: jax.Array) -> Any:
        """128 keys of one slot, which all are seen, with one product of scores."""
        total = sums
        places = [tiles.Place(slot, jnp.int32(n)) for n in range(2)]
        scales = [factors(begin + n * ROWS) for n in range(2)]
        scores, products = start(tiles.Place(slot))
        plgpu.wgmma_wait(1)
        weights = [tile.weigh(tiles.columns(scores, n), lse, scales[n][0], ())[0] for n in range(2)]
        plgpu.wgmma_wait(0)
        for n, place in enumerate(places):
            given = (tiles.columns(products, n), delta, scales[n][1], (), ())
            words = tile.score_gradients(weights[n], *given)
            total = tiles.add_product(total, words, tiles.at(m.k, place))
        plgpu.wgmma_wait(0)
        return tiles.arrived(total)

    def edge(i: jax.Array, carry: Any) -> Any:
        sums, slot = carry
        plgpu.barrier_wait(m.ready.at[slot])

        def part(n: jax.Array, sums: Any) -> Any:
            key = i * s.keys + n * ROWS
            place = tiles.Place(slot, n if s.is_wide else None)
            return lax.cond(
                tiles.is_seen(position, key, s),
                lambda: add(sums, key, [place], is_masked=True),
                lambda: sums,
            )

        if s.is_wide:
            sums = lax.fori_loop(jnp.int32(0), jnp.int32(2), part, sums)
        else:
            sums = part(jnp.int32(0), sums)
        plgpu.barrier_arrive(m.free.at[slot])
        return sums, pipeline.next_slot(slot, s.stages)

    def several(i: jax.Array, carry: Any) -> Any:
        sums, slot = carry
        slots = [pipeline.slot_after(slot, n, s.stages) for n in range(s.together)]
        for one in slots:
            plgpu.barrier_wait(m.ready.at[one])
        begin = (work.steps.inner + i * s.together) * s.keys
        if s.is_wide:
            sums = add_whole(sums, begin, slot)
        else:
            sums = add(sums, begin, [tiles.Place(one) for one in slots], is_masked=False)
        for one in slots:
            plgpu.barrier_arrive(m.free.at[one])
        return sums, pipeline.slot_after(slot, s.together, s.stages)

    carry = (tiles.zeros(m.k.shape[-1]), slot)
    steps = work.steps
    carry = lax.fori_loop(steps.begin, steps.inner, edge, carry)
    count = lax.div(steps.outer - steps.inner, jnp.int32(s.together))
    carry = lax.fori_loop(jnp.int32(0), count, several, carry)
    total, slot = lax.fori_loop(steps.outer, steps.end, edge, carry)
    plgpu.barrier_arrive(m.query_free.at[me])
    return total, lse == jnp.inf, slot


def _produce(work: _Work, slot: jax.Array, x: Operands, m: _Memory, s: Settings) -> jax.Array:
    """Copies a tile's queries, and all keys and values that they see; the next slot."""
    for i in range(WARPGROUPS):
        rows = pl.ds(work.first + i * ROWS, ROWS)
        plgpu.barrier_wait(m.query_free.at[i])
        for ref, target in ((x.q8, m.q8), (x.d8, m.d8), (x.lse, m.lse), (x.delta, m.delta)):
            source = tiles.rows_of(ref, work.b, work.head, rows)
            plgpu.copy_gmem_to_smem(source, target.at[i], m.query_ready.at[i])
        if m.ids is not None:
            source = x.query_ids.at[work.b, rows]
            plgpu.copy_gmem_to_smem(source, m.ids[0].at[i], m.query_ready.at[i])
        if m.own is not None:
            source = x.own.at[work.b, slice(None), rows]
            plgpu.copy_gmem_to_smem(source, m.own.at[i], m.query_ready.at[i])

    def step(i: jax.Array, slot: jax.Array) -> jax.Array:
        rows = pl.ds(i * s.keys, s.keys)
        plgpu.barrier_wait(m.free.at[slot])
        copies = [(x.v8, m.v8), (x.k, m.k)]
        if m.k8 is not m.k:
            copies.append((x.k8, m.k8))
        for ref, target in copies:
            source = tiles.rows_of(ref, work.b, work.h, rows)
            plgpu.copy_gmem_to_smem(source, target.at[slot], m.ready.at[slot])
        if m.ids is not None:
            source = x.key_ids.at[work.b, rows]
            plgpu.copy_gmem_to_smem(source, m.ids[1].at[slot], m.ready.at[slot])
        return pipeline.next_slot(slot, s.stages)

    return lax.fori_loop(work.steps.begin, work.steps.end, step, slot)


def _kernel(*refs: Ref, total: int, s: Settings, names: tuple[str, ...]) -> None:
    x = Operands(**dict(zip(names, refs, strict=False)))
    out_ref = refs[len(names)]
    me, share = lax.axis_index("warpgroup"), tiles.share_of(total, x.query_order)
    head_dim = x.q.shape[-1]
    has_k8 = x.k8.dtype != x.k.dtype  # else the same memory serves both products
    has_ids, has_own = x.query_ids is not None, x.own is not None

    def body(*memory: Any) -> None:
        q8, d8, lse, delta, v8, k, out, ready, free, k8, ids, own = memory
        rows = (q8, d8, lse, delta, k8[0] if k8 else k, v8, k, out)
        of_slots = (ready[0], free[0], ready[1], free[1])
        m = _Memory(*rows, *of_slots, tuple(ids) or None, own[0] if own else None)

        def over_tiles(f: Any) -> None:
            share.loop(lambda number, slot: f(_Work(number, x, s), slot))

        def consume(work: _Work, slot: jax.Array) -> jax.Array:
            sums, is_blind, slot = _consume(work, slot, me, x, m, s)
            # A query that sees nothing gets nothing, even from keys with NaN.
            sums = jnp.where(pipeline.along(is_blind, (ROWS, head_dim), 0), 0.0, sums * s.scale)
            rows = (work.b, pl.ds(work.first + me * ROWS, ROWS), work.head)
            tiles.store(sums, m.out.at[me], out_ref.at[rows])
            return slot

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, [m.free], m.query_free.at[me])
            over_tiles(consume)

        def produce() -> None:
            over_tiles(lambda work, slot: _produce(work, slot, x, m, s))

        pipeline.divide(me, WARPGROUPS, (240, 24), start_to_consume, produce)

    pl.run_scoped(
        body,
        *[pipeline.tile((WARPGROUPS, ROWS, head_dim), ref.dtype) for ref in (x.q8, x.d8)],
        *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
        *[pipeline.tile((s.stages, s.keys, head_dim), ref.dtype) for ref in (x.v8, x.k)],
        tiles.staging(out_ref.dtype),
        [
            plgpu.Barrier(num_arrivals=4 + has_ids + has_own, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=2 + has_k8 + has_ids, num_barriers=s.stages),
        ],
        [
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages),
        ],
        [pipeline.tile((s.stages, s.keys, head_dim), x.k8.dtype)] * has_k8,
        [plgpu.SMEM((n, ROWS), jnp.int32) for n in (WARPGROUPS, s.stages) if has_ids],
        [plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.int32)] * has_own,
        collective_axes="warpgroup",
    )


def query_gradient(x: Operands, dtype: jax.typing.DTypeLike, settings: Settings) -> jax.Array:
    """The gradient of the queries, ``[B, T, N, H]`` in `dtype`; 0 where one sees nothing."""
    batch, tokens, heads, _ = x.q.shape
    total = batch * heads * tiles.numbers(tokens, x.query_order)
    run = pipeline.launch(
        functools.partial(_kernel, total=total, s=settings, names=tuple(x.given)),
        "turbojax_query_gradient_hopper",
        jax.ShapeDtypeStruct(x.q.shape, dtype),
        total if x.query_order is not None else total // 2,
        settings.programs,
    )
    return run(*x.given.values())
