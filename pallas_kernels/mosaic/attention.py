"""Prefill attention on quantized operands (TurboAttention, Algorithm 1), for Hopper.

Roofline, for 2 sequences, 32 query heads, 8 KV heads, 8192 tokens, head dim 128, not causal:
  - operations: 4 * 2 * 32 * 8192**2 * 128 = 2.2 T; at the 1,980 T/s of an H100's 8-bit matrix
    units 1.11 ms. The exponentials, 16 a clock, take as many clocks, 1,024 for 128 queries by 128
    keys, and the 8 instructions for each score take 1,050.
  - bytes: 2 * 8192 * (32 + 2 * 8) * 128 in and 2 * 2 * 8192 * 32 * 128 out, 0.24 GB: 0.08 ms.
Three units are equally busy, so they must work at the same time. Target: 900 T/s.

A program takes tiles of 128 queries of one head in turn. One warpgroup copies queries, keys and
values to shared memory, two attend with 64 queries each.

Versions, same case, H100, jax 0.11.2, blocks of 128, T/s (cuDNN on bfloat16: 687 to 705):
                                                       int8_fp8     fp8    int8, SAS
  v1  the weights of one block times its values while
      the scores of the next are computed; but the
      compiler serialized all products, because the
      weights' bytes were written under one                  690      577 *      564 *
  v2  bytes written when the product is done; products
      that ignore their accumulator instead of zeroing
      it; barriers against moving what is in flight          775      807       643
  v3  persistent programs that copy ahead over tiles, no
      mask for a first block that is seen, 4 stages
      (3: 798)                                               818      882       738
      the same, SAS by the hardware's powers of two          834      838         -
      causal (cuDNN 647)                                     763      803 **      -
  v3 in another run (cuDNN 699, causal 643)                       894
  v4  `Settings.ahead`: the next block's scores under
      this one's powers of two                               897     966       461 ***
      causal                                                         902
  *  with warpgroups that take turns at the matrix units: 572 and not 690 for int8_fp8 then; in v3
     803 and not 818, 657 and not 738. ** SAS. *** 640 bytes of registers spilled: mode int8 stays
     with v3. Rows of v4: `benchmarks/results/prefill_versions_2026-11-21.json`.
What bounds v3: leaving out the powers of two (1,093 T/s), the maxima (908), the sums of outputs
(965), or all of them (1,915) says that no unit is full, and that a warpgroup's phases (product,
maximum, powers, product) follow each other. v4 answers that, and spills 60 (fp8) to 108 bytes
(int8_fp8). Left: `ex2.approx.f16x2` is two instructions of the unit, not one; integer scores that
are read as floats cost as many moves as they save conversions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import _softmax
from pallas_kernels.mosaic._attention_tile import (
    ROW,
    ROWS,
    SCALAR,
    WARPGROUPS,
    Consumer,
    Ref,
    Settings,
    inline,
    matrix,
    next_slot,
    row_type,
    span,
    tile,
)
from pallas_kernels.mosaic._softmax import Exponential

__all__ = ["Exponential", "Settings", "attention"]


def _out_width(head_dim: int, dtype: Any) -> int:
    """Channels of the output that are written at once: 16 KiB of a warpgroup's rows."""
    return min(head_dim, 2**14 // ROWS // jnp.dtype(dtype).itemsize)


class _Work:
    """A tile of 128 queries of one head, by its number."""

    def __init__(self, number: jax.Array, tiles: int, refs: tuple[Ref, ...], s: Settings) -> None:
        q, _, k, _, _, _, query_lengths, key_lengths = refs
        batch, heads = q.shape[:2]
        rows = jnp.int32(batch * heads)
        row = lax.rem(number, rows)
        self.b, self.head = lax.div(row, jnp.int32(heads)), lax.rem(row, jnp.int32(heads))
        self.h = lax.div(self.head, jnp.int32(heads // k.shape[1]))
        # The last tiles of a causal call have most to do: they start first.
        self.first = (tiles - 1 - lax.div(number, rows)) * (WARPGROUPS * ROWS)
        self.length = key_lengths[self.b]
        self.query_length = query_lengths[self.b]
        self.blocks = span(self.first, self.length, s)


def _produce(
    work: _Work,
    slot: jax.Array,
    refs: tuple[Ref, ...],
    memory: tuple[Ref, ...],
    barriers: tuple[Ref, ...],
    s: Settings,
) -> jax.Array:
    """Copies a tile's queries and blocks to shared memory, as room comes free; the next slot."""
    q_ref, _, k_ref, _, v_ref, *_ = refs
    q, k, v = memory
    q_ready, k_ready, v_ready, q_free, k_free, v_free = barriers
    for i in range(WARPGROUPS):
        rows = pl.ds(work.first + i * ROWS, ROWS)
        plgpu.barrier_wait(q_free.at[i])
        plgpu.copy_gmem_to_smem(q_ref.at[work.b, work.head, rows], q.at[i], q_ready.at[i])

    def block(j: jax.Array, slot: jax.Array) -> jax.Array:
        tokens = pl.ds(j * s.block_kv, s.block_kv)
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.copy_gmem_to_smem(k_ref.at[work.b, work.h, tokens], k.at[slot], k_ready.at[slot])
        plgpu.barrier_wait(v_free.at[slot])
        source = v_ref.at[work.b, work.h, slice(None), tokens]
        plgpu.copy_gmem_to_smem(source, v.at[slot], v_ready.at[slot])
        return next_slot(slot, s)

    return lax.fori_loop(work.blocks.begin, work.blocks.end, block, slot)


def _consume(
    work: _Work,
    slot: jax.Array,
    me: jax.Array,
    refs: tuple[Ref, ...],
    memory: tuple[Ref, ...],
    barriers: tuple[Ref, ...],
    results: tuple[Ref, ...],
    s: Settings,
) -> jax.Array:
    """Attends with a warpgroup's half of a tile, and stores; the next slot."""
    q_ref, q_scale_ref, _, k_scale_ref, _, v_scale_ref, *_ = refs
    q, k, v, out, lse = memory
    q_ready, k_ready, v_ready, q_free, k_free, v_free = barriers
    out_ref, lse_ref = results
    head_dim = q_ref.shape[-1]
    start = work.first + me * ROWS
    block = jnp.minimum(lax.div(start, jnp.int32(s.block_q)), q_scale_ref.shape[2] - 1)
    # With a soft cap scores are scaled to the exponential's units after it.
    unit = 1.0 if s.soft_cap is not None else s.exponential.unit
    factor = q_scale_ref[work.b, work.head, block] * (abs(s.scale) * unit)
    plgpu.barrier_wait(q_ready.at[me])
    consumer = Consumer(
        q=q.at[me],
        buffers=(k, v),
        ready=(k_ready, v_ready),
        free=(k_free, v_free),
        query_free=q_free.at[me],
        scales=(k_scale_ref, v_scale_ref),
        at=(work.b, work.h),
        factor=factor,
        first=start,
        length=work.length,
        blocks=work.blocks,
        s=s,
    )
    o, m, l, slot = (consumer.run_ahead if s.ahead else consumer.run)(slot)
    v_scale = jnp.float32(1.0) if s.mode == "int8" else v_scale_ref[work.b, work.h, 0]
    width = out.shape[-1]
    *parts, residual = inline(
        functools.partial(_softmax.finish, policy=s.policy, width=width),
        (plgpu.Layout.WGMMA, ROW, ROW, SCALAR, SCALAR),
        (*[matrix((ROWS, width), o.dtype)] * (head_dim // width), row_type()),
    )(o, m, l, work.query_length - start, v_scale)
    lse[me] = residual
    rows = pl.ds(start, ROWS)
    for i, part in enumerate(parts):
        out[me] = part.astype(out.dtype)
        plgpu.commit_smem()
        channels = pl.ds(i * width, width)
        plgpu.copy_smem_to_gmem(out.at[me], out_ref.at[work.b, rows, work.head, channels])
        if i == 0:
            plgpu.copy_smem_to_gmem(lse.at[me], lse_ref.at[work.b, work.head, rows])
        plgpu.wait_smem_to_gmem(0)
    return slot


def _kernel(*refs: Ref, s: Settings, tiles: int) -> None:
    """One persistent program, which takes every `s.programs`-th tile."""
    *inputs, out_ref, lse_ref = refs
    batch, heads, _, head_dim = inputs[0].shape
    total = batch * heads * tiles
    me, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    programs = lax.axis_size("program")
    mine = lax.div(total - 1 - program, jnp.int32(programs)) + 1

    def body(q: Ref, k: Ref, v: Ref, out: Ref, lse: Ref, ready: list[Ref], free: list[Ref]) -> None:
        def over_tiles(f: Any) -> None:
            def one(i: jax.Array, slot: jax.Array) -> jax.Array:
                return f(_Work(program + i * programs, tiles, tuple(inputs), s), slot)

            lax.fori_loop(jnp.int32(0), mine, one, jnp.int32(0))

        @pl.when(me < WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_arrive(free[0].at[me])
            for barrier in free[1:]:
                for i in range(s.stages):
                    plgpu.barrier_arrive(barrier.at[i])
            over_tiles(
                lambda work, slot: _consume(
                    work,
                    slot,
                    me,
                    tuple(inputs),
                    (q, k, v, out, lse),
                    (*ready, *free),
                    (out_ref, lse_ref),
                    s,
                )
            )

        @pl.when(me == WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")
            over_tiles(
                lambda work, slot: _produce(
                    work, slot, tuple(inputs), (q, k, v), (*ready, *free), s
                )
            )

    dtypes = inputs[0].dtype, inputs[2].dtype, inputs[4].dtype
    pl.run_scoped(
        body,
        tile((WARPGROUPS, ROWS, head_dim), dtypes[0]),
        tile((s.stages, s.block_kv, head_dim), dtypes[1]),
        tile((s.stages, head_dim, s.block_kv), dtypes[2]),
        tile((WARPGROUPS, ROWS, _out_width(head_dim, out_ref.dtype)), out_ref.dtype),
        plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        [plgpu.Barrier(num_barriers=n) for n in (WARPGROUPS, s.stages, s.stages)],
        [
            plgpu.Barrier(num_barriers=WARPGROUPS),
            *[plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=s.stages)] * 2,
        ],
        collective_axes="warpgroup",
    )


def attention(
    q: jax.Array,
    q_scale: jax.Array,
    k: jax.Array,
    k_scale: jax.Array,
    v: jax.Array,
    v_scale: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    *,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends with operands that are quantized already.

    Args:
      q: ``[B, N, Tp, H]``; `Tp`, `Sp` are padded to whole blocks, `H` is 64, 128 or 256. The sign
        of a negative scale is in it.
      q_scale: float32 ``[B, N, Tp / block_q]``.
      k: ``[B, K, Sp, H]``, q's dtype, tokens permuted within groups of 16: place
        ``8 h + 2 t + r`` holds token ``4 t + 2 h + r`` (`t` in 0..3; `h`, `r` in 0..1). Thread `t`
        of four holds these columns of the scores, and as the next product's operand tokens
        ``4 t .. 4 t + 3``: so no weight changes threads.
      k_scale: float32 ``[B, K, Sp / block_kv]``.
      v: ``[B, K, H, Sp]``.
      v_scale: float32 ``[B, K, Sp / block_kv]``, in the e4m3 modes one number per head.
      query_lengths: int32 ``[B]``.
      key_lengths: int32 ``[B]``.
      tokens: `T`, queries of the output.
      dtype: of the output.
      settings: numerics and launch.

    Returns:
      ``[B, T, N, H]`` and the float32 log-sum-exp ``[B, T, N]``.
    """
    batch, heads, _, head_dim = q.shape
    tiles = pl.cdiv(tokens, WARPGROUPS * ROWS)
    written = -(-tokens // 8) * 8  # copies take tokens in eights
    out, lse = plgpu.kernel(
        functools.partial(_kernel, s=settings, tiles=tiles),
        out_type=(
            jax.ShapeDtypeStruct((batch, written, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * WARPGROUPS * ROWS), jnp.float32),
        ),
        grid=(min(settings.programs, batch * heads * tiles),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="turbojax_attention_hopper",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )(q, q_scale, k, k_scale, v, v_scale, query_lengths, key_lengths)
    return out[:, :tokens], jnp.swapaxes(lse[:, :, :tokens], 1, 2)
