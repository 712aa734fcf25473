"""Attention of new queries to pages of 4-bit codes or 8-bit floats, for Hopper.

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128:
  - bytes that must move: 16 * 8 * 32768 tokens * 132 = 554 MB for turbo4, 256 bytes a token and
    1,074 MB for 8-bit floats; at the 3.0 TB/s of a copy 185 and 358 us. One multiprocessor has 650
    clocks for a block of 64 tokens of turbo4, and 1,260 of 8-bit floats.
  - instructions, by count: some 1,000 for a block and warp of either; four schedulers issue 2,600
    and 5,000 in those clocks.
Memory is the floor. Target: 80 % of it, 230 and 450 us.

As in `decode`, every warp takes its own blocks of tokens, brings them to shared memory by itself
with the copy engine, a page or a part of one with each copy, and works without a barrier that other
warps share. Rows of the products are tokens and channels, columns queries; each query has two, a
high and a low part, which makes eight of four queries, the fewest that a product takes.

A program takes one part of a sequence, `Settings.part` tokens at a fixed place: what is added up,
and in which order, depends on a token's position alone, not on the length of its sequence, on how a
prompt is cut into chunks, or on the rest of the batch. Parts are merged by a second kernel.

Versions, H100, jax 0.11.2, device time of both kernels (cuDNN on dense bfloat16 in the same run):
  turbo4                   16 x 32k   64 x 4k   1 x 32k   1 x 4k
    cuDNN                    702 us    351 us     51 us    9.5 us
    parts of 1024, taken     209       112        20      12.6     3.35 times, 88 % of a copy's rate
    parts of 512             218       118        26      10.1
    parts of 2048            205       111        20      18.0
    1 block in flight        231       125
    blocks of 32 tokens      212       113
    two warpgroups           253       145        24               too few programs at a time
    32 parts merged at once  207       116        19      12.7     1 x 128k: 65, not 82 us
  pages of 16, 32, 128       225, 214, 208 us
  fp8, parts of 1024         373       195        32      12.4     1.88 times, 96 %
  16 queries of 4 x 8k, 4, 8, 16 in a program: 175, 142, 117 us of turbo4, 327, 200, 130 of fp8
  1 x 1k: 9.6 us, where cuDNN takes 6.4: one program of four blocks a warp for each KV head.
These and more rows are in `benchmarks/results/paged_versions_2026-11-21.json`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.merge import merge_parts
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.paged import fp8, turbo4
from pallas_kernels.mosaic.hopper.paged.types import BARRIER_BYTES, Arrays, Place, Program
from pallas_kernels.mosaic.hopper.paged.types import Pages as Pages
from pallas_kernels.mosaic.hopper.paged.types import Settings as Settings
from pallas_kernels.mosaic.hopper.paged.warp import combine, keep, walk
from pallas_kernels.mosaic.lane import Pointer

_GRID = ("tile", "part", "pair")


def _kernel(*refs: Any, s: Settings) -> None:
    """One program; its body is written for single lanes."""
    inputs, (slots, barriers) = refs[:-2], refs[-2:]
    ids = tuple(lax.axis_index(name) for name in _GRID)
    types = jax.tree.map(lambda _: plgpu.RefType(), (inputs, slots, barriers))

    @plgpu.inline_mgpu(arg_types=(*types, (plgpu.Layout.WG_SPLAT(()),) * len(ids)))
    def body(ctx: Any, refs: Any, slots: Any, barriers: Any, ids: Any) -> None:
        del ctx
        a = Arrays.of(refs, inputs)
        at = Program.of(a, [lane.scalar(x) for x in ids], s)
        if a.is_final:  # an empty sequence has a result too
            _run(a, at, (Pointer.to(slots), Pointer.to(barriers)), s)
            return
        with lane.when(at.start < at.stop):
            _run(a, at, (Pointer.to(slots), Pointer.to(barriers)), s)

    body(inputs, slots, barriers, ids)


def _run(a: Arrays, at: Program, smem: tuple[Pointer, Pointer], s: Settings) -> None:
    pages = turbo4 if s.has_norms else fp8
    products = (turbo4.Turbo4 if s.has_norms else fp8.Fp8).of(a.head_dim, s)
    here, warp = Place.here(), lane.uniform(lane.thread() >> 5)
    area = smem[0].at(warp * s.warp_bytes(a.head_dim))
    state = walk(a, at, here, products, (area, smem[1].at(warp * (BARRIER_BYTES * s.stages))), s)
    keep(state, area, here, a.head_dim, pages.channel, s)
    combine(a, at, smem[0], s)


def attend(
    query: jax.Array,
    pages: Pages,
    tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the last `T` tokens' queries of each sequence to its pages.

    Args:
      query: ``[B, T, N, H]``, `H` 64, 128 or 256.
      pages: the pool.
      tables: int32 ``[B, max_pages]``, numbers of the sequences' pages; those past its length are
        not read.
      lengths: int32 ``[B]``, tokens held.
      query_lengths: int32 ``[B]``, how many of the `T` queries are real.
      settings: numerics and launch.

    Returns:
      float32 ``[B, T, N, H]``, in units of the stored values, and the log-sum-exp ``[B, T, N]``.
    """
    s = settings
    if s.part % (s.block * s.warps):
        raise ValueError(f"{s.part=} must be a multiple of {s.block=} times {s.warps=}")
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page_size = pages.key.shape[1:3]
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    parts = pl.cdiv(tables.shape[1] * page_size, s.part)
    shape = (pairs, parts, rows)
    out = [(*shape, head_dim), shape, shape]
    if parts == 1:
        out = [query.shape, query.shape[:3]]
    results = plgpu.kernel(
        functools.partial(_kernel, s=s),
        out_type=[jax.ShapeDtypeStruct(x, jnp.float32) for x in out],
        scratch_types=[
            plgpu.SMEM((s.warps * s.warp_bytes(head_dim),), jnp.uint8),
            plgpu.SMEM((s.warps * s.stages * BARRIER_BYTES // 4,), jnp.int32),
        ],
        grid=(pl.cdiv(rows, s.rows), parts, pairs),
        grid_names=_GRID,
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        kernel_name="turbojax_paged_hopper",
    )(query, pages, tables, lengths, query_lengths)
    if parts == 1:
        return results[0], results[1]
    o, m, l = results
    return merge_parts(
        o,
        m,
        l,
        lengths,
        query_lengths,
        part=s.part,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        window=s.window,
    )
