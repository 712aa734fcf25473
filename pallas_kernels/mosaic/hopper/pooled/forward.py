"""Pooled attention's forward pass for Hopper (multi-scale KV pooling, Li 2025, Algorithm 1).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, density 0.156: 0.34 T operations, 0.35
ms at the 989 T/s of an H100's 16-bit matrix units; 0.4 GB, 0.13 ms. Target: 0.6 ms, as a dense
kernel of this kind reaches. Seen: 0.598 ms, with all blocks at level 1 3.35 (cuDNN 3.15).

A program takes tiles of 128 queries of one head in turn. One warpgroup gathers blocks of one level
into tiles of 128 pooled keys, two attend with 64 queries each and take turns at the matrix units.

Roofline in full and versions: `docs/kernels/pooled.md`.
"""

import functools
from collections.abc import Sequence
from typing import Any

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

__all__ = ["Settings", "attention"]


class Work:
    """A tile of 128 queries of one head, by its number: tiles of one head follow each other."""

    def __init__(self, number: jax.Array, q: Ref, k: Ref, s: Settings) -> None:
        heads, per_head = q.shape[2], pl.cdiv(q.shape[1], WARPGROUPS * ROWS)
        row = lax.div(number, jnp.int32(per_head))
        place = lax.rem(number, jnp.int32(per_head))
        # The last tiles of a causal call have most to do: every other head begins with them, so
        # that all programs have about equally much to do.
        place = jnp.where(lax.rem(row, jnp.int32(2)) == 0, per_head - 1 - place, place)
        self.b, self.head = lax.div(row, jnp.int32(heads)), lax.rem(row, jnp.int32(heads))
        self.h = lax.div(self.head, jnp.int32(heads // k.shape[2]))
        self.first = place * (WARPGROUPS * ROWS)
        self.i = lax.div(self.first, jnp.int32(s.block_q))


def over_tiles(q: Ref, step: pipeline.Step) -> None:
    """Calls `step` for each of a program's tiles of queries."""
    total = q.shape[0] * q.shape[2] * pl.cdiv(q.shape[1], WARPGROUPS * ROWS)
    pipeline.TileScheduler(total).loop(step)


def _attend(
    w: tiles.Walk,
    slot: jax.Array,
    work: Work,
    columns: Sequence[Ref],
    me: jax.Array,
    buffers: tuple[Ref, ...],
    barriers: tuple[Ref, ...],
    rows: tuple[jax.Array, Sequence[Ref]],
    s: Settings,
) -> tuple[jax.Array, ...]:
    """Attends a warpgroup's rows to all tiles: unnormalized output, maxima, sums, the slot after.

    `rows` are the position of the first row, and with segments the rows' segments.
    """
    q, k, v = buffers
    k_ready, v_ready, k_free, v_free, tensor_core_order = barriers
    head_dim, shape = q.shape[-1], (ROWS, TILE)

    def take_turns() -> None:
        plgpu.barrier_arrive(tensor_core_order)
        plgpu.barrier_wait(tensor_core_order)

    def wait_for_key(t: jax.Array, slot: jax.Array) -> None:
        @pl.when(t < w.total)
        def _() -> None:
            plgpu.barrier_wait(k_ready.at[slot])

    def weights(t: jax.Array, x: jax.Array, m: jax.Array, edge: Any) -> tuple[jax.Array, ...]:
        """From products `x`: relative weights, the maxima, and what the weights are relative to."""
        if edge is None:
            bias = tiles.bias_of(w, t)
            top = jnp.maximum(m, jnp.max(x, axis=1) * s.factor + bias)
            return jnp.exp2(x * s.factor - pipeline.along(top - bias, shape, 0)), top, top
        bias, *others = edge
        x = tiles.hide(x * s.factor + pipeline.along(bias, shape, 1), *rows, others, s)
        top = jnp.maximum(m, jnp.max(x, axis=1))
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        return jnp.exp2(x - pipeline.along(shift, shape, 0)), top, shift

    def step(t: jax.Array, carry: tuple[jax.Array, ...], is_edge: bool) -> tuple[jax.Array, ...]:
        o, m, l, slot = carry
        following = pipeline.next_slot(slot, s.stages)

        def scores(out: Ref) -> jax.Array:
            plgpu.wgmma(out, q, pipeline.transposed(k.at[slot]))
            take_turns()
            return out[...]

        x = pl.run_scoped(scores, tiles.accumulator(shape, jnp.float32))
        edge = [pipeline.load(ref.at[slot], COLUMN) for ref in columns] if is_edge else None
        plgpu.barrier_arrive(k_free.at[slot])
        p, m_new, shift = weights(t, x, m, edge)
        alpha = jnp.exp2(m - shift)
        o = o * pipeline.along(alpha, o.shape, 0)
        l = l * alpha + jnp.sum(p, axis=1)
        p16 = p.astype(q.dtype)
        o, l, m_new, p16 = lax.optimization_barrier((o, l, m_new, p16))
        plgpu.barrier_arrive(tensor_core_order)
        plgpu.barrier_wait(v_ready.at[slot])
        plgpu.barrier_wait(tensor_core_order)

        def output(out: Ref) -> None:
            plgpu.wgmma(out, p16, v.at[slot])
            wait_for_key(t + 1, following)

        o = pl.run_state(output)(tiles.accumulator.init(o))
        plgpu.barrier_arrive(v_free.at[slot])
        return o, m_new, l, following

    o = pipeline.full(0.0, (ROWS, head_dim), plgpu.Layout.WGMMA)
    carry = (o, pipeline.full(-jnp.inf, (ROWS,), ROW), pipeline.full(0.0, (ROWS,), ROW), slot)
    wait_for_key(jnp.int32(0), slot)
    # The second warpgroup is half a step behind. Only within a tile: the producer waits for both
    # before it goes on to the next one.
    pl.when(me == 1)(take_turns)
    plain, edge = (functools.partial(step, is_edge=x) for x in (False, True))
    carry = lax.fori_loop(jnp.int32(0), w.num_whole, plain, carry)
    carry = lax.fori_loop(w.num_whole, w.total, edge, carry)
    pl.when(me == 0)(take_turns)
    return carry


def _finish(
    o: jax.Array, m: jax.Array, l: jax.Array, is_there: jax.Array, invalid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Normalized output and log-sum-exp; 0 and ``-inf`` in rows that saw nothing."""
    l = jnp.where(invalid != 0, jnp.nan, l)
    nothing = ~is_there | (l == 0)
    share = jnp.where(nothing, 0.0, 1 / l)
    lse = jnp.where(nothing, -jnp.inf, m * (1 / LOG2_E) + jnp.log(l))
    o = jnp.where(pipeline.along(nothing, o.shape, 0), 0.0, o * pipeline.along(share, o.shape, 0))
    return o, lse


def _kernel(*refs: Ref, s: Settings) -> None:
    q_ref, *rest = refs
    ks, vs, (blocks, counts, query_lengths, key_lengths, *others, out_ref, lse_ref) = (
        rest[:4],
        rest[4:8],
        rest[8:],
    )
    marks = tiles.Marks.of(others, s)
    me, head_dim = lax.axis_index("warpgroup"), q_ref.shape[-1]

    def body(
        q: Ref,
        k: Ref,
        v: Ref,
        out: Ref,
        lse: Ref,
        segments: list[Ref],
        columns: Any,
        ready: Any,
        free: Any,
        tensor_core_order: Ref,
    ) -> None:
        (q_ready, k_ready, v_ready), (q_free, k_free, v_free) = ready, free

        def consume(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = Work(number, q_ref, ks[0], s)
            w = tiles.walk(blocks, counts, (work.b, work.head, work.i), s)
            first = work.first + me * ROWS
            plgpu.barrier_wait(q_ready.at[me])
            o, m, l, slot = _attend(
                w,
                slot,
                work,
                columns,
                me,
                (q.at[me], k, v),
                (k_ready, v_ready, k_free, v_free, tensor_core_order),
                (marks.position(first, work.b), [x.at[me] for x in segments]),
                s,
            )
            plgpu.barrier_arrive(q_free.at[me])
            is_there = pipeline.iota(ROW) + first < query_lengths[work.b]
            o, residual = _finish(o, m, l, is_there, w.invalid)
            rows = pl.ds(first, ROWS)
            target = out_ref.at[work.b, rows, work.head]
            if out.shape[-1] < head_dim:  # as many bytes at a time
                tiles.store(o, out.at[me], target)
            else:
                out[me] = o.astype(out.dtype)
            lse[me] = residual
            plgpu.commit_smem()
            if out.shape[-1] == head_dim:
                plgpu.copy_smem_to_gmem(out.at[me], target)
            plgpu.copy_smem_to_gmem(lse.at[me], lse_ref.at[work.b, work.head, rows])
            plgpu.wait_smem_to_gmem(0)
            return slot

        def produce(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = Work(number, q_ref, ks[0], s)
            w = tiles.walk(blocks, counts, (work.b, work.head, work.i), s)
            for i in range(WARPGROUPS):
                plgpu.barrier_wait(q_free.at[i])
                rows = pl.ds(work.first + i * ROWS, ROWS)
                source = q_ref.at[work.b, rows, work.head]
                plgpu.copy_gmem_to_smem(source, q.at[i], q_ready.at[i])
                for x in segments:
                    source = marks.queries.at[work.b, rows]
                    plgpu.copy_gmem_to_smem(source, x.at[i], q_ready.at[i])

            given = ((ks, k, k_ready, k_free), (vs, v, v_ready, v_free))
            sources = [tiles.Source((work.b, work.h), *x) for x in given]
            length = key_lengths[work.b]
            return tiles.produce(w, slot, blocks, sources, columns, length, s, marks.keys)

        def start_to_consume() -> None:
            pipeline.free_at_first(s.stages, free[1:], q_free.at[me])
            over_tiles(q_ref, consume)

        pipeline.divide(
            me, WARPGROUPS, (232, 40), start_to_consume, lambda: over_tiles(q_ref, produce)
        )

    width = head_dim * q_ref.dtype.itemsize // out_ref.dtype.itemsize
    pl.run_scoped(
        body,
        pipeline.tile((WARPGROUPS, ROWS, head_dim), q_ref.dtype),
        pipeline.tile((s.stages, TILE, head_dim), q_ref.dtype),
        pipeline.tile((s.stages, TILE, head_dim), q_ref.dtype),
        pipeline.tile((WARPGROUPS, ROWS, width), out_ref.dtype),
        plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        tiles.segment_memory(s, WARPGROUPS, ROWS),
        tiles.column_memory(s),
        *tiles.barriers(2 if s.has_segments else 1, s),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        collective_axes="warpgroup",
    )


def attention(
    q: jax.Array,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    blocks: jax.Array,
    counts: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    settings: Settings,
    marks: tuple[jax.Array, ...] = (),
    out_dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends to pooled keys, block by block at the level that the lists give.

    `q` is ``[B, T, N, H]`` of 16 bits, `T` a multiple of 8, `H` 64 or 128. `keys` and `values` are
    ``[B, S, K, H]``, and pooled by 2, 4 and 8, ``[B, K, G, H]``; `S` and `G` are multiples of 8,
    with zeros where there is no token. int32: `blocks` ``[B or 1, N or 1, T_r, T_c]``, key blocks
    of levels 1, 2, 4 and 8; `counts` ``[B or 1, N or 1, T_r, 9]``, blocks of each level, how many
    of them are complete, and whether a level is invalid; lengths ``[B]``.

    With segments `marks` has those of queries, int32 ``[B, Tp]``, `T` rounded up to 128, and of
    keys, int32 ``[B, 128 + Sp + 128]``, `S` rounded up to whole blocks, from 128 on; then, if it
    `is_shifted`, int32 ``[B]``, a query's position less a key's of the same index.

    Returns ``[B, T, N, H]`` in `out_dtype` (float32, or by default q's) and the float32 log-sum-exp
    ``[B, N, T]``, `T` rounded up to 128.
    """
    batch, tokens, heads, _ = q.shape
    per_head = pl.cdiv(tokens, WARPGROUPS * ROWS)
    run = pipeline.launch(
        functools.partial(_kernel, s=settings),
        "turbojax_pooled_attention_hopper",
        (
            jax.ShapeDtypeStruct(q.shape, out_dtype or q.dtype),
            jax.ShapeDtypeStruct((batch, heads, per_head * WARPGROUPS * ROWS), jnp.float32),
        ),
        batch * heads * per_head,
        settings.programs,
        approx_math=True,
    )
    out, lse = run(q, *keys, *values, blocks, counts, query_lengths, key_lengths, *marks)
    return out, lse
