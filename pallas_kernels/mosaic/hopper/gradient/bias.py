"""Gradient of a bias of dense attention, for Hopper.

Roofline, for 2 sequences of 8,192 tokens, 16 heads of 128, not causal, 8-bit output gradients:
products 0.6 ms, 8.6 GB from the L2 cache 1.6 ms, some 23 instructions a score 1.7 ms. Target: 2.5
ms. Seen on an H200, causal, so with half of this to do: 3.0 ms, 2.4 times the target. Every tile
compares positions, also where all pairs are seen.

A program takes tiles of 128 queries by 128 keys of the gradient, and adds up in registers what all
sequences and heads give that have the same bias: nothing of the scores' size is in memory but the
gradient itself, every number is written once, zeros too, and sums have one order. With one row for
all queries a tile adds up those of all tiles of queries, and its 128 rows are left to add up.

A launch of its own, which computes weights once more: where nobody asks for this gradient, as of a
bias that is constant, `jit` leaves it out.

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

# Queries and keys of a tile; a warpgroup has 64 queries and all keys, 64 at a time.
_TILE = WARPGROUPS * ROWS
_HALVES = _TILE // ROWS
# Of the shared memory what slots may take, and the most slots that are of use.
_MOST_BYTES, _MOST_SLOTS = 208 * 1024, 3


class _Step(NamedTuple):
    """What is added to a tile: of one sequence and head, and 128 queries; whether any is seen."""

    b: jax.Array
    head: jax.Array
    h: jax.Array
    query: jax.Array
    key: jax.Array
    is_seen: jax.Array


class _Work:
    """A tile of the gradient, by its number."""

    def __init__(self, number: jax.Array, x: Operands, s: Settings) -> None:
        self.x, self.s, self.kind = x, s, biases.Bias.of(x.bias)
        (self.batch, tokens, self.heads, _), keys = x.q.shape, self.kind.shape[3]
        self.rows = pl.cdiv(tokens, _TILE)
        count = jnp.int32(pl.cdiv(keys, _TILE))
        number, self.key = lax.div(number, count), lax.rem(number, count) * _TILE
        count = jnp.int32(1 if self.kind.is_row else self.rows)
        number, self.row = lax.div(number, count), lax.rem(number, count)
        count = jnp.int32(self.kind.shape[1])
        self.b, self.head = lax.div(number, count), lax.rem(number, count)

    @property
    def steps(self) -> int:
        """How many sequences, heads and tiles of queries have the same."""
        batch, heads, _, _ = self.kind.shape
        together = self.batch // batch * (self.heads // heads)
        return together * self.rows if self.kind.is_row else together

    def step(self, i: jax.Array) -> _Step:
        batch, heads, _, _ = self.kind.shape
        row = self.row
        if self.kind.is_row:
            i, row = lax.div(i, jnp.int32(self.rows)), lax.rem(i, jnp.int32(self.rows))
        b, head = self.b, self.head
        if heads < self.heads:
            i, head = lax.div(i, jnp.int32(self.heads)), lax.rem(i, jnp.int32(self.heads))
        if batch < self.batch:
            b = i
        h = lax.div(head, jnp.int32(self.heads // self.x.k.shape[2]))
        return _Step(b, head, h, row * _TILE, self.key, self._is_seen(b, row))

    def _is_seen(self, b: jax.Array, row: jax.Array) -> jax.Array:
        """Whether any of the queries may see any of the keys."""
        x, query, key = self.x, row * _TILE, self.key
        seen = (query < x.query_lengths[b]) & (key < x.key_lengths[b])
        position = tiles.shifted(query, x.shift(b))
        if self.s.right is not None:
            seen = seen & (key <= position + (_TILE - 1 + self.s.right))
        if self.s.left is not None:
            seen = seen & (key + (_TILE - 1) >= position - self.s.left)
        bounds = tiles.bounds_at(x.query_bounds, b, row)
        if bounds is not None:
            seen = seen & (key < bounds.stop) & (key + _TILE > bounds.start)
        return seen


class _Memory(NamedTuple):
    """Shared memory of steps, in slots, by 64 queries or keys; and the slots' barriers."""

    q8: Ref
    d8: Ref
    k8: Ref
    v8: Ref
    lse: Ref
    delta: Ref
    ready: Ref
    free: Ref
    ids: tuple[Ref, Ref] | None
    own: Ref | None


def _add(
    sums: tuple[jax.Array, ...],
    step: _Step,
    slot: jax.Array,
    me: jax.Array,
    x: Operands,
    m: _Memory,
    s: Settings,
) -> tuple[jax.Array, ...]:
    """Adds what a warpgroup's 64 queries give, to sums ``[64, 64]`` of each 64 keys."""
    kind, query = biases.Bias.of(x.bias), step.query + me * ROWS
    tile = elementwise.Tile(False, str(x.q.dtype), s, kind)
    position = tiles.shifted(query, x.shift(step.b))
    q_scale, d_scale = (
        tiles.scale_at(scales, step.b, step.head, query, s.block_q)
        for scales in (x.q_scale, x.d_scale)
    )
    q_scale = q_scale * tiles.scores_factor(s)
    gain = jnp.float32(1.0) if x.gains is None else x.gains[step.b]
    lse, delta = (pipeline.load(ref.at[slot, me], ROW) for ref in (m.lse, m.delta))
    own = None if m.own is None else (m.own.at[slot, 0, me], m.own.at[slot, 1, me])
    found = []
    for n, total in enumerate(sums):
        key = step.key + n * ROWS
        k_scale, v_scale = (
            tiles.scale_at(scales, step.b, step.h, key, s.block_kv)
            for scales in (x.k_scale, x.v_scale)
        )
        scores = tiles.product(m.q8.at[slot, me], m.k8.at[slot, n])
        products = tiles.product(m.d8.at[slot, me], m.v8.at[slot, n])
        added = biases.of_queries(x.bias, kind.line(step.b, step.head), query, key)
        plgpu.wgmma_wait(1)
        ids = None if m.ids is None else (m.ids[0].at[slot, me], m.ids[1].at[slot, n])
        length = x.key_lengths[step.b]
        limits = tile.limits_of(position, key, length - key, ids, own, is_masked=True)
        linear = () if x.slopes is None else (x.slopes[step.head], position - key)
        weights, *_ = tile.weigh(scores, lse, q_scale * k_scale, limits, linear, (added,))
        plgpu.wgmma_wait(0)
        rest = (delta, lse, d_scale * v_scale, gain, limits)
        found.append(tile.add_gradients(total, weights, products, *rest))
    return tuple(found)


def _copy(step: _Step, slot: jax.Array, x: Operands, m: _Memory) -> None:
    """Copies what a step needs, once the slot is free."""
    plgpu.barrier_wait(m.free.at[slot])
    ready = m.ready.at[slot]
    of_queries = [(x.q8, m.q8), (x.d8, m.d8), (x.lse, m.lse), (x.delta, m.delta)]
    for i in range(WARPGROUPS):
        rows = pl.ds(step.query + i * ROWS, ROWS)
        for ref, target in of_queries:
            source = tiles.rows_of(ref, step.b, step.head, rows)
            plgpu.copy_gmem_to_smem(source, target.at[slot, i], ready)
        if m.ids is not None:
            plgpu.copy_gmem_to_smem(x.query_ids.at[step.b, rows], m.ids[0].at[slot, i], ready)
        if m.own is not None:
            for n in range(2):
                plgpu.copy_gmem_to_smem(x.own.at[step.b, n, rows], m.own.at[slot, n, i], ready)
    for i in range(_HALVES):
        rows = pl.ds(step.key + i * ROWS, ROWS)
        for ref, target in ((x.k8, m.k8), (x.v8, m.v8)):
            source = tiles.rows_of(ref, step.b, step.h, rows)
            plgpu.copy_gmem_to_smem(source, target.at[slot, i], ready)
        if m.ids is not None:
            plgpu.copy_gmem_to_smem(x.key_ids.at[step.b, rows], m.ids[1].at[slot, i], ready)


def _kernel(*refs: Ref, total: int, s: Settings, names: tuple[str, ...]) -> None:
    x, out = Operands(**dict(zip(names, refs[:-1], strict=True))), refs[-1]
    me, share = lax.axis_index("warpgroup"), pipeline.TileScheduler(total)
    head_dim, has_ids, has_own = x.q.shape[-1], x.query_ids is not None, x.own is not None

    def body(*memory: Any) -> None:
        q8, d8, k8, v8, lse, delta, ready, free, ids, own = memory
        arrays = (q8, d8, k8, v8, lse, delta)
        m = _Memory(*arrays, ready, free, tuple(ids) or None, own[0] if own else None)

        def consume(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = _Work(number, x, s)

            def one(i: jax.Array, carry: Any) -> Any:
                *sums, slot = carry
                step = work.step(i)

                def add() -> tuple[jax.Array, ...]:
                    plgpu.barrier_wait(m.ready.at[slot])
                    found = _add(tuple(sums), step, slot, me, x, m, s)
                    plgpu.barrier_arrive(m.free.at[slot])
                    return found

                sums = lax.cond(step.is_seen, add, lambda: tuple(sums))
                return *sums, _after(step, slot, s)

            carry = (*[tiles.zeros(ROWS)] * _HALVES, slot)
            *sums, slot = lax.fori_loop(jnp.int32(0), jnp.int32(work.steps), one, carry)
            line = biases.Bias.of(out).line(work.b, work.head)
            row = work.row * _TILE + me * ROWS
            for n, found in enumerate(sums):
                biases.store(out, found, line, row, work.key + n * ROWS)
            return slot

        def produce(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = _Work(number, x, s)

            def one(i: jax.Array, slot: jax.Array) -> jax.Array:
                step = work.step(i)
                pl.when(step.is_seen)(lambda: _copy(step, slot, x, m))
                return _after(step, slot, s)

            return lax.fori_loop(jnp.int32(0), jnp.int32(work.steps), one, slot)

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, [m.free])
            share.loop(consume)

        pipeline.divide(me, WARPGROUPS, (240, 24), start_to_consume, lambda: share.loop(produce))

    copies = WARPGROUPS * (4 + has_ids + 2 * has_own) + _HALVES * (2 + has_ids)
    pl.run_scoped(
        body,
        *[pipeline.tile((s.stages, 2, ROWS, head_dim), r.dtype) for r in (x.q8, x.d8, x.k8, x.v8)],
        *[plgpu.SMEM((s.stages, WARPGROUPS, ROWS), jnp.float32)] * 2,
        plgpu.Barrier(num_arrivals=copies, num_barriers=s.stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages),
        [plgpu.SMEM((s.stages, 2, ROWS), jnp.int32)] * (2 * has_ids),
        [plgpu.SMEM((s.stages, 2, WARPGROUPS, ROWS), jnp.int32)] * has_own,
        collective_axes="warpgroup",
    )


def _after(step: _Step, slot: jax.Array, s: Settings) -> jax.Array:
    return jnp.where(step.is_seen, pipeline.next_slot(slot, s.stages), slot)


def stages_of(x: Operands) -> int:
    """How many steps' operands fit into shared memory."""
    sizes = [jnp.dtype(a.dtype).itemsize for a in (x.q8, x.d8, x.k8, x.v8)]
    return max(1, min(_MOST_SLOTS, _MOST_BYTES // (_TILE * x.q.shape[-1] * sum(sizes))))


def bias_gradient(x: Operands, settings: Settings) -> jax.Array:
    """The gradient of `x.bias`, in its shape and dtype; of ``S'`` keys, zeros where none is seen.

    With one row for all queries there are 128 in float32, whose sum is the gradient.
    """
    kind = biases.Bias.of(x.bias)
    batch, heads, _, keys = kind.shape
    tiles_of_rows = 1 if kind.is_row else pl.cdiv(x.q.shape[1], _TILE)
    total = batch * heads * tiles_of_rows * pl.cdiv(keys, _TILE)
    out = jax.ShapeDtypeStruct(kind.shape, x.bias.dtype)
    if kind.is_row:
        out = jax.ShapeDtypeStruct((batch, heads, _TILE, keys), jnp.float32)
    run = pipeline.launch(
        functools.partial(_kernel, total=total, s=settings, names=tuple(x.given)),
        "turbojax_bias_gradient_hopper",
        out,
        total,
        settings.programs,
    )
    found: jax.Array = run(*x.given.values())
    return found
