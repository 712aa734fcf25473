"""Gradient of the queries of pooled attention for Hopper (Li 2025, Algorithm 2).

Roofline, for one sequence of 16,384 tokens, 16 heads of 128, density 0.156: 0.51 T operations, 0.52
ms at 989 T/s; 0.5 GB, 0.16 ms. Target: 500 T/s, 1.0 ms. Seen on an H100: 0.793 ms, 650 T/s.

The walk is that of `pooled_forward`; of a tile of 128 pooled keys a warpgroup takes 64 at a time,
because scores, their gradients and the sum share its registers.

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
from pallas_kernels.mosaic.hopper.pooled.forward import Work, over_tiles
from pallas_kernels.mosaic.hopper.pooled.tiles import (
    COLUMN,
    ROW,
    ROWS,
    TILE,
    WARPGROUPS,
    Ref,
    Settings,
)

# Pooled keys whose scores are in registers at the same time.
_COLUMNS = 64
# Channels of the result that are written at once: there is no shared memory for more.
_WIDTH = 64


def _gradient(
    w: tiles.Walk,
    slot: jax.Array,
    columns: Sequence[Ref],
    place: tuple[jax.Array, Sequence[Ref]],
    rows: tuple[Any, ...],
    buffers: tuple[Ref, Ref],
    barriers: tuple[Ref, ...],
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's rows over all tiles: the gradient before `scale`, and the slot after.

    `place` is the position of the first row, and with segments the rows' segments.
    """
    q, d_o, lse, delta = rows
    k, v = buffers
    k_ready, v_ready, k_free, v_free = barriers
    shape = (ROWS, _COLUMNS)

    def half(total: jax.Array, t: jax.Array, slot: jax.Array, begin: int, is_edge: bool) -> Any:
        kh, vh = (x.at[slot, pl.ds(begin, _COLUMNS)] for x in (k, v))
        pairs = (q, pipeline.transposed(kh)), (d_o, pipeline.transposed(vh))
        x, d_p = tiles.product(*pairs, columns=_COLUMNS)
        if is_edge:
            span = pl.ds(begin, _COLUMNS)
            bias, *others = (pipeline.load(ref.at[slot, span], COLUMN) for ref in columns)
            x = x * s.factor + (pipeline.along(bias, shape, 1) - pipeline.along(lse, shape, 0))
            x = tiles.hide(x, *place, others, s)
        else:
            x = x * s.factor - pipeline.along(lse - tiles.bias_of(w, t), shape, 0)
        d_s = jnp.exp2(x) * (d_p - pipeline.along(delta, shape, 0))
        return tiles.add_product(total, d_s.astype(q.dtype), kh)

    def step(t: jax.Array, carry: tuple[jax.Array, jax.Array], is_edge: bool) -> Any:
        total, slot = carry
        plgpu.barrier_wait(k_ready.at[slot])
        plgpu.barrier_wait(v_ready.at[slot])
        for begin in range(0, TILE, _COLUMNS):
            total = half(total, t, slot, begin, is_edge)
        plgpu.barrier_arrive(k_free.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        return total, pipeline.next_slot(slot, s.stages)

    carry = (pipeline.full(0.0, (ROWS, q.shape[-1]), plgpu.Layout.WGMMA), slot)
    plain, edge = (functools.partial(step, is_edge=x) for x in (False, True))
    carry = lax.fori_loop(jnp.int32(0), w.num_whole, plain, carry)
    return lax.fori_loop(w.num_whole, w.total, edge, carry)


def _kernel(*refs: Ref, s: Settings) -> None:
    q_ref, d_o_ref, lse_ref, delta_ref, *rest = refs
    ks, vs, (blocks, counts, key_lengths, *others, out_ref) = rest[:4], rest[4:8], rest[8:]
    marks = tiles.Marks.of(others, s)
    me, head_dim = lax.axis_index("warpgroup"), q_ref.shape[-1]

    def body(
        q: Ref,
        d_o: Ref,
        lse: Ref,
        delta: Ref,
        k: Ref,
        v: Ref,
        out: Ref,
        segments: list[Ref],
        columns: Any,
        ready: Any,
        free: Any,
    ) -> None:
        (q_ready, k_ready, v_ready), (q_free, k_free, v_free) = ready, free

        def consume(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = Work(number, q_ref, ks[0], s)
            w = tiles.walk(blocks, counts, (work.b, work.head, work.i), s)
            first = work.first + me * ROWS
            plgpu.barrier_wait(q_ready.at[me])
            rows = [pipeline.load(x.at[me], ROW) for x in (lse, delta)]
            total, slot = _gradient(
                w,
                slot,
                columns,
                (marks.position(first, work.b), [x.at[me] for x in segments]),
                (q.at[me], d_o.at[me], *rows),
                (k, v),
                (k_ready, v_ready, k_free, v_free),
                s,
            )
            plgpu.barrier_arrive(q_free.at[me])
            total = jnp.where(w.invalid != 0, jnp.nan, total * s.scale)
            # A query that sees nothing gets nothing, even from tiles with NaN.
            blind = pipeline.along(rows[0] == jnp.inf, total.shape, 0)
            total = jnp.where(blind, 0.0, total)
            target = out_ref.at[work.b, pl.ds(first, ROWS), work.head]
            for begin in range(0, head_dim, _WIDTH):
                part = lax.slice(total, (0, begin), (ROWS, begin + _WIDTH))
                out[me] = part.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out.at[me], target.at[:, pl.ds(begin, _WIDTH)])
                plgpu.wait_smem_to_gmem(0)
            return slot

        def produce(number: jax.Array, slot: jax.Array) -> jax.Array:
            work = Work(number, q_ref, ks[0], s)
            w = tiles.walk(blocks, counts, (work.b, work.head, work.i), s)
            for i in range(WARPGROUPS):
                plgpu.barrier_wait(q_free.at[i])
                rows = pl.ds(work.first + i * ROWS, ROWS)
                for source, target in ((q_ref, q), (d_o_ref, d_o)):
                    source = source.at[work.b, rows, work.head]
                    plgpu.copy_gmem_to_smem(source, target.at[i], q_ready.at[i])
                for source, target in ((lse_ref, lse), (delta_ref, delta)):
                    source = source.at[work.b, work.head, rows]
                    plgpu.copy_gmem_to_smem(source, target.at[i], q_ready.at[i])
                for target in segments:
                    source = marks.queries.at[work.b, rows]
                    plgpu.copy_gmem_to_smem(source, target.at[i], q_ready.at[i])

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

    pl.run_scoped(
        body,
        *[pipeline.tile((WARPGROUPS, ROWS, head_dim), q_ref.dtype)] * 2,
        *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
        *[pipeline.tile((s.stages, TILE, head_dim), q_ref.dtype)] * 2,
        pipeline.tile((WARPGROUPS, ROWS, _WIDTH), q_ref.dtype),
        tiles.segment_memory(s, WARPGROUPS, ROWS),
        tiles.column_memory(s),
        *tiles.barriers(5 if s.has_segments else 4, s),
        collective_axes="warpgroup",
    )


def query_gradient(
    q: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    blocks: jax.Array,
    counts: jax.Array,
    key_lengths: jax.Array,
    settings: Settings,
    marks: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """The gradient of the queries, ``[B, T, N, H]`` in q's dtype.

    Arguments as `forward.attention`, and: `d_out` ``[B, T, N, H]``, q's dtype; float32
    ``[B, N, Tp]``, `T` rounded up to 128 or more: `lse`, the log-sum-exp in powers of two, ``inf``
    for rows that do not exist or saw nothing, in which `d_out` is 0; and `delta`,
    ``rowsum(d_out * out)`` less the residual's cotangent.
    """
    batch, tokens, heads, _ = q.shape
    total = batch * heads * pl.cdiv(tokens, WARPGROUPS * ROWS)
    run = pipeline.launch(
        functools.partial(_kernel, s=settings),
        "turbojax_pooled_query_gradient_hopper",
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        total,
        settings.programs,
        approx_math=True,
    )
    return run(q, d_out, lse, delta, *keys, *values, blocks, counts, key_lengths, *marks)
