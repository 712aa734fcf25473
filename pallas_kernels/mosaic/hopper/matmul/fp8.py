"""e4m3 weights times e4m3 activations for Hopper, with the epilogue of `int4_matmul`.

Roofline, for weights of 14336 x 4096 and 4096 tokens: 243 us at the 1,979 T/s of an H100's 8-bit
matrix units; 0.19 GB, 64 us. Target: 80 % of the first, 300 us. Seen: 331 (XLA 294).

What INT4 weights become when there are so many tokens that it pays to expand them first.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.hopper.matmul import program
from pallas_kernels.mosaic.hopper.matmul.epilogue import Epilogue as Epilogue
from pallas_kernels.mosaic.hopper.matmul.program import TILE, Tile, Work
from pallas_kernels.mosaic.hopper.matmul.program import Settings as Settings
from pallas_kernels.mosaic.pipeline import ROWS
from pallas_kernels.mosaic.products import wgmma
from pallas_kernels.mosaic.products.int4 import GROUP

STAGE_BYTES = TILE * GROUP  # shared memory that the weights of a stage take


def _start(w: Ref, x: Ref, total: jax.Array | None) -> jax.Array:
    kind = pipeline.array((ROWS, x.shape[0]), jnp.float32)
    arrays = [] if total is None else [total]
    types = (pipeline.tile_type(w), pipeline.tile_type(x), *[plgpu.Layout.WGMMA] * len(arrays))

    def run(w: Any, x: Any, *total: Any) -> Any:
        return wgmma.start(w, x, swizzle=128, a_swizzle=128, total=total[0] if total else None)

    return pipeline.inline(run, types, kind)(w, x, *arrays)


def _accumulate(
    work: Work, slot: jax.Array, me: jax.Array, m: Tile, w: Ref, s: Settings
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's sums over all groups of inputs, from `slot` on; and the slot after."""
    rows = pl.ds(me * ROWS, ROWS)

    def step(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, slot, before = carry
        plgpu.barrier_wait(m.ready.at[slot])
        total = _start(w.at[slot, rows], m.x.at[slot], total)
        # The product before is over, and its memory free.
        plgpu.wgmma_wait(1)

        @pl.when(g > work.begin)
        def _() -> None:
            plgpu.barrier_arrive(m.free.at[before])

        return total, pipeline.slot_after(slot, 1, s.stages), slot

    carry = (pipeline.full(0.0, (ROWS, s.tokens)), slot, slot)
    total, after, last = lax.fori_loop(work.begin, work.end, step, carry)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(m.free.at[last])
    return total, after


def _kernel(*refs: Ref, tiles: tuple[int, int], s: Settings) -> None:
    a = program.arrays_of(refs, 1, s.epilogue)
    [w_ref] = a.weights
    me = lax.axis_index("warpgroup")

    def body(m: Tile, w: Ref) -> None:
        def copy(g: jax.Array, slot: jax.Array, work: Work) -> None:
            source = w_ref.at[pl.ds(work.row, TILE), pl.ds(g * GROUP, GROUP)]
            plgpu.copy_gmem_to_smem(source, w.at[slot], m.ready.at[slot])

        sums = functools.partial(_accumulate, me=me, m=m, w=w, s=s)
        consume = program.stored(sums, me, m, a, s)
        program.run_program(tiles, w_ref.shape[1] // GROUP, m, a, s, consume, copy)

    pl.run_scoped(
        body,
        program.tile_memory(1, a.x.dtype, s),
        pipeline.tile((s.stages, TILE, GROUP), w_ref.dtype),
        collective_axes="warpgroup",
    )


def fp8_matmul(
    weights: jax.Array,
    x: jax.Array,
    token_scales: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    columns: int,
    settings: Settings,
) -> jax.Array:
    """Tokens times e4m3 weights, summed by the matrix unit alone: ``[M, columns]``.

    `weights` are ``[N', K']``, multiples of 64 and of 128; others as `int4.int4_matmul`. `settings`
    have one team and one part.
    """
    kernel = functools.partial(_kernel, s=settings)
    name = "turbojax_fp8_matmul_hopper"
    run = program.launch(kernel, name, x.shape[0], weights.shape[0], columns, settings)
    optional = [array for array in (bias, residual) if array is not None]
    return run(weights, x, token_scales, output_scales, *optional)
