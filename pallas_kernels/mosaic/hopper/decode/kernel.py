"""Decode: a few new queries per sequence against packed codes, for Hopper.

Roofline, for 16 sequences, 8 KV heads with 4 queries each, 32,768 tokens, head dim 128, 4 bits:
  - bytes that must move: 571 MB (see `pallas_kernels.triton.decode`); at the 3.0 TB/s of a copy
    190 us. One multiprocessor has some 790 clocks for a block of 64 tokens at 80 % of that.
  - instructions: about 750 for a block and warp, see `block`; four schedulers issue 3,160
    in those clocks.
Memory is the floor. Target: 80 % of it, 235 us.

Every warp takes its own blocks, brings them to shared memory by itself with the copy engine, and
works without a barrier that other warps share, so that one warp's latencies are hidden by the
eleven others of its multiprocessor. Rows of the products are tokens and channels, columns queries:
codes are register operands after a shift and a mask (`block`). The warps' results are
merged in shared memory; programs that share a KV head merge in a cluster where there is little to
do, and by a second small kernel elsewhere.

Versions, H100, jax 0.11.2, device time (cuDNN on bfloat16 keys and values in the same run):
  Triton, tokens as rows            323 us, 2.14 times cuDNN: 8 warps a multiprocessor, loads and
                                    products of a warp wait for each other.
  v1, as above, 2 blocks in flight, 16 x 32k, cuDNN 701 us
    one wave of 384 programs        215 us
    512 programs                    198 us, 3.54 times, 95 % of a copy's bandwidth: a wave and a
                                    third is served more evenly
    3 blocks in flight, 256         203 us;  two warpgroups in a program: 202 us; 6 blocks: 212 us
  SAS instead of the exact softmax  198 us
  2 bits                            116 us, 5.9 times;  half of the heads 2 bits: 158 us, 4.5 times
  64 x 4k                           104 us, 3.4 times;  1 x 128k: 57 us, 3.1 times
  1 x 1k                            6.4 us, 1.0 times: the launch of the merge is 1.8 us of it; one
                                    program of 16 warps without it 8.8 us
  v2, merged within a cluster       1 x 1k: 6.0 us against 6.7 without in the same run, 1.07 times;
                                    1 x 4k: 7.8 against 7.6; 16 x 32k: 219 against 198, since
                                    programs of a cluster start and leave together
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Side as Side
from pallas_kernels.merge import merge
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.hopper.decode.inputs import BARRIER_BYTES, Arrays, Program
from pallas_kernels.mosaic.hopper.decode.inputs import Settings as Settings
from pallas_kernels.mosaic.hopper.decode.inputs import stage_bytes as stage_bytes
from pallas_kernels.mosaic.hopper.decode.result import combine
from pallas_kernels.mosaic.hopper.decode.types import SparseExponential as SparseExponential
from pallas_kernels.mosaic.hopper.decode.warp import walk
from pallas_kernels.mosaic.lane import Pointer

_GRID, _CLUSTER = ("tile", "part", "pair"), ("member",)


def _kernel(*refs: Any, s: Settings) -> None:
    """One program; its body is written for single lanes."""
    inputs, (slots, barriers) = refs[:-2], refs[-2:]
    ids = tuple(lax.axis_index(name) for name in _GRID + _CLUSTER)
    types = jax.tree.map(lambda _: plgpu.RefType(), (inputs, slots, barriers))

    @plgpu.inline_mgpu(arg_types=(*types, (plgpu.Layout.WG_SPLAT(()),) * len(ids)))
    def body(ctx: Any, refs: Any, slots: Any, barriers: Any, ids: Any) -> None:
        del ctx
        a = Arrays.of(refs, inputs)
        at = Program.of(a, [lane.scalar(x) for x in ids], s)
        smem = (Pointer.to(slots), Pointer.to(barriers))
        choice = lane.integer(0)
        for side in (a.key, a.value):
            if len(side.codes) == 2:
                is_low = side.slot(at.pair) >= side.heads[0]
                choice = (choice << 1) + is_low.where(lane.integer(1), 0)
        groups = [(i, j) for i in range(len(a.key.codes)) for j in range(len(a.value.codes))]
        for number, widths in enumerate(groups):
            if len(groups) == 1:
                walk(a, at, widths, smem, s)
                continue
            with lane.when(choice.equals(number)):
                walk(a, at, widths, smem, s)
        combine(a, at, smem[0], s)

    body(inputs, slots, barriers, ids)


def decode(
    query: jax.Array,
    key: Side,
    value: Side,
    lengths: jax.Array,
    buffer_lengths: jax.Array,
    query_lengths: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Attends the last `T` cached tokens' queries to a cache; mode ``"int8"``.

    Args:
      query: ``[B, T, N, H]``, `H` 64, 128 or 256.
      key: the keys.
      value: the values.
      lengths: int32 ``[B]``, tokens held.
      buffer_lengths: int32 ``[B]``, those of them in the buffer.
      query_lengths: int32 ``[B]``, how many of the `T` queries are real.
      settings: numerics and launch.

    Returns:
      ``[B, T, N, H]`` in the query's dtype and the float32 log-sum-exp ``[B, T, N]``.
    """
    s = settings
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.buffer.shape[1]
    rows, pairs = heads // kv_heads * tokens, batch * kv_heads
    parts = (pairs, s.parts, rows)
    out: list[Any] = [((*parts, head_dim), jnp.float32), (parts, jnp.float32), (parts, jnp.float32)]
    if s.parts == 1:
        out = [(query.shape, query.dtype), (query.shape[:3], jnp.float32)]
    results = plgpu.kernel(
        functools.partial(_kernel, s=s),
        out_type=[jax.ShapeDtypeStruct(*x) for x in out],
        scratch_types=[
            plgpu.SMEM((s.warps * s.warp_bytes(head_dim),), jnp.uint8),
            plgpu.SMEM((s.warps * s.stages * BARRIER_BYTES // 4,), jnp.int32),
        ],
        grid=(pl.cdiv(rows, s.rows), s.parts, pairs),
        grid_names=_GRID,
        cluster=(s.cluster,),
        cluster_names=_CLUSTER,
        num_threads=s.warpgroups,
        thread_name="warpgroup",
        kernel_name="turbojax_decode_hopper",
    )(query, key, value, lengths, buffer_lengths, query_lengths)
    if s.parts == 1:
        return results[0], results[1]
    o, m, l = results
    return merge(o, m, l, query, kv_heads, interpret=False)
