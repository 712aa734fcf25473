"""Gradients of keys and values of dense attention, for Hopper.

Roofline, for 2 sequences of 8,192 tokens, 32 query heads on 8 of 128 channels, causal: four
products, 2.2 T operations, 1.95 ms at the 989 T/s of 16 bits, 1.67 with output gradients in 8 bits;
bytes come from the L2 cache. Target: 75 % of the matrix unit. Seen on an H200: 2.7 ms, 72 % of 16
bits' peak, and on a warm one 2.8 in 8 bits, 59 %. Registers bound it, nothing stays under way from
step to step, and shared memory, which products of 64 columns read without a pause.

A program takes tiles of 128 keys of one KV head in turn. One warpgroup copies 64 queries at a time,
with what belongs to them; two have 64 keys each as rows, so that weights and score gradients are
the left operands of the products that follow, in registers. Sums of all queries of all heads of
the group stay in registers: every result is written once, in one order, the same in every run.

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
    ROWS,
    WARPGROUPS,
    Operands,
    Ref,
    Settings,
)

# Keys of a program, and channels whose sums it holds.
_KEYS = WARPGROUPS * ROWS
_CHANNELS = 128


class _Work:
    """A tile of keys of one head, and which of the result's channels, by its number."""

    def __init__(self, number: jax.Array, x: Operands, s: Settings) -> None:
        heads, (_, size, kv_heads, head_dim) = x.q.shape[2], x.k.shape
        parts, count = pl.cdiv(head_dim, _CHANNELS), pl.cdiv(size, _KEYS)
        row, self.tile = tiles.place_of(number, count, x.key_order, kv_heads * parts)
        part, row = lax.rem(row, jnp.int32(parts)), lax.div(row, jnp.int32(parts))
        self.b, self.h = lax.div(row, jnp.int32(kv_heads)), lax.rem(row, jnp.int32(kv_heads))
        self.group = heads // kv_heads
        self.first, self.shift = self.tile * _KEYS, x.shift(self.b)
        self.length = x.key_lengths[self.b]
        self.queries = x.query_lengths[self.b]
        width = min(head_dim, _CHANNELS)
        self.channels = pl.ds(part * width, width)
        # A tile without keys has no queries.
        queries = jnp.where(self.first < self.length, self.queries, 0)
        # The number of the query at the first key's position.
        number = self.first if isinstance(self.shift, int) else self.first - self.shift
        segments = tiles.bounds_at(x.key_bounds, self.b, self.tile)
        self.steps = tiles.span(number, _KEYS, queries, s.right, s.left, segments=segments)


class _Memory(NamedTuple):
    """Shared memory: keys and values of each warpgroup, and what steps need."""

    k8: Ref
    v8: Ref
    q8: Ref
    d8: Ref
    q: Ref
    d_out: Ref
    lse: Ref
    delta: Ref
    out: Ref
    key_ready: Ref
    key_free: Ref
    ready: Ref
    free: Ref
    tensor_core_order: Ref | None
    ids: tuple[Ref, Ref] | None
    own: Ref | None


def _consume(
    work: _Work, slot: jax.Array, me: jax.Array, x: Operands, m: _Memory, s: Settings
) -> Any:
    """Sums over all queries of a warpgroup's 64 keys; the slot after the last."""
    first, width = work.first + me * ROWS, m.q.shape[-1]
    kind = x.kind_of_bias
    tile = elementwise.Tile(True, str(m.q.dtype), s, kind)
    k_scale, v_scale = (
        tiles.scale_at(scales, work.b, work.h, first, s.block_kv)
        for scales in (x.k_scale, x.v_scale)
    )
    k_scale = k_scale * tiles.scores_factor(s)
    ping_pong = pipeline.PingPong(m.tensor_core_order, me, WARPGROUPS)
    plgpu.barrier_wait(m.key_ready.at[me])

    def add(
        d_k: jax.Array,
        d_v: jax.Array,
        query: jax.Array,
        head: jax.Array,
        slot: jax.Array,
        is_masked: bool,
    ) -> tuple[jax.Array, jax.Array]:
        q_factor = k_scale * tiles.scale_at(x.q_scale, work.b, head, query, s.block_q)
        d_factor = v_scale * tiles.scale_at(x.d_scale, work.b, head, query, s.block_q)
        # Before products start, which keep shared memory busy.
        lse = tiles.loaded(m.lse.at[slot])
        scores = tiles.product(m.k8.at[me], m.q8.at[slot])
        products = tiles.product(m.v8.at[me], m.d8.at[slot])
        added: tuple[jax.Array, ...] = ()
        if kind is not None:
            added = (biases.of_keys(x.bias, kind.line(work.b, head), query, first),)
        ping_pong.wait()
        plgpu.wgmma_wait(1)
        position = tiles.shifted(query, work.shift)
        ids = None if m.ids is None else (m.ids[0].at[me], m.ids[1].at[slot])
        own = None if m.own is None else (m.own.at[slot, 0], m.own.at[slot, 1])
        limits = tile.limits_of(position, first, work.queries - query, ids, own, is_masked)
        linear = () if x.slopes is None else (x.slopes[head], position - first)
        weights, *slopes, words = tile.weigh(scores, lse, q_factor, limits, linear, added)
        delta = tiles.loaded(m.delta.at[slot])
        d_v = tiles.add_product(d_v, words, m.d_out.at[slot])
        ping_pong.hand_on()
        plgpu.wgmma_wait(1)
        words = tile.score_gradients(weights, products, delta, d_factor, tuple(slopes), limits)
        d_k = tiles.add_product(d_k, words, m.q.at[slot])
        plgpu.wgmma_wait(0)
        return tiles.arrived(d_k), tiles.arrived(d_v)

    def skip(d_k: jax.Array, d_v: jax.Array) -> tuple[jax.Array, jax.Array]:
        ping_pong.wait()
        ping_pong.hand_on()
        return d_k, d_v

    def step(i: jax.Array, carry: Any, head: jax.Array, is_masked: bool) -> Any:
        d_k, d_v, slot = carry
        query = i * ROWS
        plgpu.barrier_wait(m.ready.at[slot])
        add_one = functools.partial(add, d_k, d_v, query, head, slot, is_masked)
        if is_masked:
            is_seen = tiles.is_seen(tiles.shifted(query, work.shift), first, s)
            d_k, d_v = lax.cond(is_seen, add_one, lambda: skip(d_k, d_v))
        else:
            d_k, d_v = add_one()
        plgpu.barrier_arrive(m.free.at[slot])
        return d_k, d_v, pipeline.next_slot(slot, s.stages)

    def head(g: jax.Array, carry: Any) -> Any:
        number = work.h * work.group + g
        masked, plain = (functools.partial(step, head=number, is_masked=x) for x in (True, False))
        carry = lax.fori_loop(work.steps.begin, work.steps.inner, masked, carry)
        carry = lax.fori_loop(work.steps.inner, work.steps.outer, plain, carry)
        return lax.fori_loop(work.steps.outer, work.steps.end, masked, carry)

    carry = (tiles.zeros(width), tiles.zeros(width), slot)
    carry = lax.fori_loop(jnp.int32(0), jnp.int32(work.group), head, carry)
    plgpu.barrier_arrive(m.key_free.at[me])
    return carry


def _produce(work: _Work, slot: jax.Array, x: Operands, m: _Memory, s: Settings) -> jax.Array:
    """Copies a tile's keys and values, and all that attends to them; the next slot."""
    for i in range(WARPGROUPS):
        plgpu.barrier_wait(m.key_free.at[i])
        rows = pl.ds(work.first + i * ROWS, ROWS)
        for ref, target in ((x.k8, m.k8), (x.v8, m.v8)):
            source = tiles.rows_of(ref, work.b, work.h, rows)
            plgpu.copy_gmem_to_smem(source, target.at[i], m.key_ready.at[i])
        if m.ids is not None:
            source = x.key_ids.at[work.b, rows]
            plgpu.copy_gmem_to_smem(source, m.ids[0].at[i], m.key_ready.at[i])

    def head(g: jax.Array, slot: jax.Array) -> jax.Array:
        number = work.h * work.group + g

        def step(i: jax.Array, slot: jax.Array) -> jax.Array:
            rows = pl.ds(i * ROWS, ROWS)
            plgpu.barrier_wait(m.free.at[slot])
            for ref, target in ((x.q, m.q), (x.d_out, m.d_out)):
                source = ref.at[work.b, rows, number, work.channels]
                plgpu.copy_gmem_to_smem(source, target.at[slot], m.ready.at[slot])
            for ref, target in ((x.lse, m.lse), (x.delta, m.delta), (x.q8, m.q8), (x.d8, m.d8)):
                if target is m.q or target is m.d_out:
                    continue
                source = tiles.rows_of(ref, work.b, number, rows)
                plgpu.copy_gmem_to_smem(source, target.at[slot], m.ready.at[slot])
            if m.ids is not None:
                source = x.query_ids.at[work.b, rows]
                plgpu.copy_gmem_to_smem(source, m.ids[1].at[slot], m.ready.at[slot])
            if m.own is not None:
                source = x.own.at[work.b, slice(None), rows]
                plgpu.copy_gmem_to_smem(source, m.own.at[slot], m.ready.at[slot])
            return pipeline.next_slot(slot, s.stages)

        return lax.fori_loop(work.steps.begin, work.steps.end, step, slot)

    return lax.fori_loop(jnp.int32(0), jnp.int32(work.group), head, slot)


def _kernel(*refs: Ref, total: int, s: Settings, names: tuple[str, ...]) -> None:
    x, (dk_ref, dv_ref) = Operands(**dict(zip(names, refs[:-2], strict=True))), refs[-2:]
    me, share = lax.axis_index("warpgroup"), tiles.share_of(total, x.key_order)
    head_dim, dtype = x.q.shape[-1], x.q.dtype
    width, has_ids = min(head_dim, _CHANNELS), x.key_ids is not None
    has_own = x.own is not None
    # The same memory serves two products where it can.
    apart = [ref.dtype != dtype or head_dim != width for ref in (x.q8, x.d8)]

    def body(*memory: Any) -> None:
        k8, v8, q, d_out, lse, delta, out, ready, free, eights, tensor_core_order, ids, own = memory
        q8, d8 = (eights.pop(0) if mine else x for mine, x in zip(apart, (q, d_out), strict=True))
        rows = (k8, v8, q8, d8, q, d_out, lse, delta, out)
        of_slots = (ready[0], free[0], ready[1], free[1])
        tensor_core_order, own = (x[0] if x else None for x in (tensor_core_order, own))
        m = _Memory(*rows, *of_slots, tensor_core_order, tuple(ids) or None, own)

        def over_tiles(f: Any) -> None:
            share.loop(lambda number, slot: f(_Work(number, x, s), slot))

        def consume(work: _Work, slot: jax.Array) -> jax.Array:
            d_k, d_v, slot = _consume(work, slot, me, x, m, s)
            first = work.first + me * ROWS
            exists = pipeline.along(
                pipeline.iota(pipeline.ROW) + first < work.length, (ROWS, width), 0
            )
            rows = (work.b, pl.ds(first, ROWS), work.h, work.channels)
            for sums, ref in ((d_k * s.scale, dk_ref), (d_v, dv_ref)):
                tiles.store(jnp.where(exists, sums, 0.0), m.out.at[me], ref.at[rows])
            return slot

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, [m.free], m.key_free.at[me])
            pipeline.PingPong(m.tensor_core_order, me, WARPGROUPS).begin()
            over_tiles(consume)

        def produce() -> None:
            over_tiles(lambda work, slot: _produce(work, slot, x, m, s))

        pipeline.divide(me, WARPGROUPS, (240, 24), start_to_consume, produce)

    pl.run_scoped(
        body,
        *[pipeline.tile((WARPGROUPS, ROWS, head_dim), ref.dtype) for ref in (x.k8, x.v8)],
        *[pipeline.tile((s.stages, ROWS, width), dtype)] * 2,
        *[plgpu.SMEM((s.stages, ROWS), jnp.float32)] * 2,
        tiles.staging(dk_ref.dtype),
        [
            plgpu.Barrier(num_arrivals=2 + has_ids, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=4 + sum(apart) + has_ids + has_own, num_barriers=s.stages),
        ],
        [
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages),
        ],
        [
            pipeline.tile((s.stages, ROWS, head_dim), ref.dtype)
            for mine, ref in zip(apart, (x.q8, x.d8), strict=True)
            if mine
        ],
        [pipeline.PingPong.memory(WARPGROUPS)] * s.ping_pong,
        [plgpu.SMEM((n, ROWS), jnp.int32) for n in (WARPGROUPS, s.stages) if has_ids],
        [plgpu.SMEM((s.stages, 2, ROWS), jnp.int32)] * has_own,
        collective_axes="warpgroup",
    )


def key_gradient(
    x: Operands, dtype: jax.typing.DTypeLike, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values, ``[B, S, K, H]`` in `dtype`; 0 past each length."""
    batch, size, kv_heads, head_dim = x.k.shape
    total = batch * kv_heads * pl.cdiv(head_dim, _CHANNELS) * tiles.numbers(size, x.key_order)
    out = jax.ShapeDtypeStruct((batch, size, kv_heads, head_dim), dtype)
    run = pipeline.launch(
        functools.partial(_kernel, total=total, s=settings, names=tuple(x.given)),
        "turbojax_key_gradient_hopper",
        (out, out),
        total if x.key_order is not None else total // 2,
        settings.programs,
    )
    return run(*x.given.values())
