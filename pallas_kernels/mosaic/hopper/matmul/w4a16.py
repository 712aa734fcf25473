"""INT4 weights times tokens of 16 bits for Hopper.

Roofline, for weights of 14336 x 4096 on an H200: 30 MB, 7.4 us; products 38 us for 256 tokens;
conversion, once for each tile of 128 tokens, 16 % of their clocks. Targets: the speed of XLA's
bfloat16 product from 256 tokens on; 18 us for 64. Seen: 65.1 (43.8) and 22.3. Each tile of 128
tokens converts all weights.

Weights are rows, 64 of a warpgroup, and tokens columns: so weights come from registers, where they
are converted, and never go back to memory. Two warpgroups share the tokens' inputs, and while the
matrix unit has one group of 128 inputs they convert the next. Operands are integers; the scale
multiplies the float32 sum of a group.

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
from pallas_kernels.mosaic.hopper.matmul.program import Settings as Settings
from pallas_kernels.mosaic.hopper.matmul.program import Tile, Work
from pallas_kernels.mosaic.pipeline import ROW, ROWS, SCALAR, WARPGROUPS
from pallas_kernels.mosaic.products import int4_half
from pallas_kernels.mosaic.products.int4 import GROUP

NAME = "turbojax_w4a16_hopper"
_CHUNK = 256
_TILE_BYTES = ROWS * GROUP // 2


def stage_bytes(scale_bytes: int, tokens: int) -> int:
    """Shared memory that a stage takes beyond what `Settings.shared_bytes` counts for tokens."""
    return WARPGROUPS * (_TILE_BYTES + ROWS * scale_bytes) + tokens * GROUP


def _operand(
    weights: tuple[Ref, ...], slot: jax.Array, me: jax.Array, dtype: str, kind: str, rounds: bool
) -> tuple[jax.Array, jax.Array]:
    refs = [x.at[slot] for x in weights]
    types = (SCALAR, *[plgpu.RefType()] * len(refs))
    words = pipeline.array((ROWS, GROUP // 2), jnp.int32)
    unit = pipeline.array((ROWS,), jnp.float32, ROW)

    def run(row: Any, codes: Any, scales: Any, *zeros: Any) -> Any:
        zero = zeros[0] if zeros else None
        return int4_half.operand(codes, scales, zero, row, dtype, kind, rounds)

    return pipeline.inline(run, types, (words, unit))(me * ROWS, *refs)


def _accumulate(
    work: Work,
    slot: jax.Array,
    me: jax.Array,
    m: Tile,
    weights: tuple[Ref, ...],
    kind: str,
    s: Settings,
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's sums over its groups of inputs, the first of all in `slot`; the slot after."""
    half, begin, slot, after = program.share_of(work, slot, me, s)
    wait = functools.partial(program.wait_for, work=work, m=m)

    def operand(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype, rounds = s.epilogue.dtype, not s.is_two_level
        return _operand(weights, slot, half, dtype, kind, rounds)

    def add(total: jax.Array, product: jax.Array, unit: jax.Array) -> jax.Array:
        if not s.is_two_level:
            return product
        return total + product * lax.broadcast_in_dim(unit, product.shape, (0,))

    def overlapped(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, words, unit, slot = carry
        following = pipeline.slot_after(slot, s.teams, s.stages)
        product = program.start(words, m.x.at[slot], None if s.is_two_level else total)
        wait(begin + (g + 1) * s.teams, following)
        # While the product is in flight. After the last group this converts stale memory.
        words, next_unit = operand(following)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m.free.at[slot])
        return add(total, product, unit), words, next_unit, following

    def one_by_one(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, slot = carry
        plgpu.barrier_wait(m.ready.at[slot])
        words, unit = operand(slot)
        product = program.start(words, m.x.at[slot], None if s.is_two_level else total)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m.free.at[slot])
        return add(total, product, unit), pipeline.slot_after(slot, s.teams, s.stages)

    total = pipeline.full(0.0, (ROWS, s.tokens))
    steps = lax.div(jnp.maximum(work.end - begin, 0) + (s.teams - 1), jnp.int32(s.teams))
    if s.teams > 1 and s.tokens > 32:
        # Two operands at once would take too many registers; other warpgroups compute meanwhile.
        total, _ = lax.fori_loop(jnp.int32(0), steps, one_by_one, (total, slot))
    else:
        wait(begin, slot)
        total, *_ = lax.fori_loop(jnp.int32(0), steps, overlapped, (total, *operand(slot), slot))
    return total, after


def _kernel(*refs: Ref, tiles: tuple[int, int], s: Settings, has_zeros: bool) -> None:
    a = program.arrays_of(refs, 2 + has_zeros, s.epilogue)
    codes_ref, scales_ref, *zeros_ref = a.weights
    kinds = {"uint8": "e4m3"}
    kind = kinds.get(scales_ref.dtype.name, scales_ref.dtype.name)
    me = lax.axis_index("warpgroup")

    def body(m: Tile, codes: Ref, scales: Ref, zeros: list[Ref]) -> None:
        def copy(g: jax.Array, slot: jax.Array, work: Work) -> None:
            tiles = pl.ds(work.tile * WARPGROUPS, WARPGROUPS)
            pairs = [(codes_ref, codes), (scales_ref, scales), *zip(zeros_ref, zeros, strict=True)]
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source.at[tiles, g], target.at[slot], m.ready.at[slot])

        weights = (codes, scales, *zeros)
        sums = functools.partial(_accumulate, me=me, m=m, weights=weights, kind=kind, s=s)
        consume = program.stored(sums, me, m, a, s)
        program.run_program(tiles, codes_ref.shape[1], m, a, s, consume, copy)

    pl.run_scoped(
        body,
        program.tile_memory(2 + has_zeros, a.x.dtype, s),
        plgpu.SMEM((s.stages, WARPGROUPS, *codes_ref.shape[2:]), jnp.uint8),
        plgpu.SMEM((s.stages, WARPGROUPS, ROWS), scales_ref.dtype),
        [plgpu.SMEM((s.stages, WARPGROUPS, ROWS), jnp.int8)] * has_zeros,
        collective_axes="warpgroup",
    )


def w4a16(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    x: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    columns: int,
    settings: Settings,
) -> jax.Array:
    """As `w4a16_few.w4a16_few`, with `M` at most 8 or a multiple of 8.

    `columns` is as for `int4.int4_matmul`, sums have two levels, and with several parts the result
    is their float32 sums ``[parts, M, columns]``.
    """
    rows = codes.shape[0] * ROWS
    if scales.dtype == jnp.float8_e4m3fn:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    codes = codes.reshape(*codes.shape[:2], -1, _CHUNK)
    weights = [codes, scales, *([] if zeros is None else [zeros])]
    kernel = functools.partial(_kernel, s=settings, has_zeros=zeros is not None)
    run = program.launch(kernel, NAME, x.shape[0], rows, columns, settings)
    optional = [array for array in (bias, residual) if array is not None]
    unit = jnp.ones((-(-x.shape[0] // 8) * 8,), jnp.bfloat16)
    return run(*weights, x, unit, output_scales, *optional)
