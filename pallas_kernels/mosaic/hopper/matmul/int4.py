"""INT4 weights times e4m3 activations for Hopper (FireQ, section 3.1.1).

Roofline, for weights of 14336 x 4096 on an H100: 30 MB, 10 us; products 15 us for 256 tokens, 243
for 4096; conversion 6 us for each tile of tokens. Targets: 17 us for 16 tokens, 38 for 256, 440 for
4096. Seen: 19.6, 34.0 and 396. Part of the conversion is not hidden: with constant words 16 tokens
take 16.3. What runs it: scales of 16 bits, and few tiles, which programs share. With e4m3 scales up
to 64 tokens take `few`, more `int4_many`, 4096 and more weights expanded first (`fp8_matmul`).

Weights are rows, 64 of a warpgroup, and tokens columns: so weights come from registers, where they
are converted, and never go back to memory. Two warpgroups share the tokens' inputs, and while the
matrix unit has one group of 128 inputs they convert the next. For few tokens four warpgroups take
groups in turn, in pairs.

Roofline in full and versions: `docs/kernels/matmul.md`.
"""

import functools

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
from pallas_kernels.mosaic.pipeline import ROWS, WARPGROUPS
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import ROW_BYTES, TABLE_BYTES, TABLES

TABLES_BYTES = TABLES * TABLE_BYTES  # shared memory that the tables take


def stage_bytes(scale_bytes: int) -> int:
    return TILE * (ROW_BYTES + scale_bytes)


def _accumulate(
    work: Work, slot: jax.Array, me: jax.Array, m: Tile, weights: tuple[Ref, ...], s: Settings
) -> tuple[jax.Array, jax.Array]:
    """A warpgroup's sums over its groups of inputs, the first of all in `slot`; the slot after."""
    half, begin, slot, after = program.share_of(work, slot, me, s)
    wait = functools.partial(program.wait_for, work=work, m=m)

    def step(g: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        total, words, unit, slot = carry
        following = pipeline.slot_after(slot, s.teams, s.stages)
        product = program.start(words, m.x.at[slot], None if s.is_two_level else total)
        wait(begin + (g + 1) * s.teams, following)
        # While the product is in flight. After the last group this converts stale memory.
        words, next_unit = program.operand(weights, following, half)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(m.free.at[slot])
        if s.is_two_level:
            product = total + product * lax.broadcast_in_dim(unit, product.shape, (0,))
        return product, words, next_unit, following

    wait(begin, slot)
    words, unit = program.operand(weights, slot, half)
    carry = (pipeline.full(0.0, (ROWS, s.tokens)), words, unit, slot)
    steps = lax.div(jnp.maximum(work.end - begin, 0) + (s.teams - 1), jnp.int32(s.teams))
    total, *_ = lax.fori_loop(jnp.int32(0), steps, step, carry)
    return total, after


def _kernel(*refs: Ref, tiles: tuple[int, int], s: Settings, has_tables: bool) -> None:
    a = program.arrays_of(refs, 2 + has_tables, s.epilogue)
    codes_ref, scales_ref, *tables_ref = a.weights
    me = lax.axis_index("warpgroup")

    def body(m: Tile, codes: Ref, scales: Ref, tables: list[Ref], tables_ready: Ref) -> None:
        def copy(g: jax.Array, slot: jax.Array, work: Work) -> None:
            tiles = pl.ds(work.tile * WARPGROUPS, WARPGROUPS)
            plgpu.copy_gmem_to_smem(codes_ref.at[tiles, g], codes.at[slot], m.ready.at[slot])
            plgpu.copy_gmem_to_smem(scales_ref.at[tiles, g], scales.at[slot], m.ready.at[slot])

        def wait_for_tables() -> None:
            if has_tables:
                plgpu.barrier_wait(tables_ready)

        def copy_tables() -> None:
            if has_tables:
                plgpu.copy_gmem_to_smem(tables_ref[0], tables[0], tables_ready)

        weights = (codes, scales, *tables)
        sums = functools.partial(_accumulate, me=me, m=m, weights=weights, s=s)
        before = (wait_for_tables, copy_tables)
        consume = program.stored(sums, me, m, a, s)
        program.run_program(tiles, codes_ref.shape[1], m, a, s, consume, copy, before)

    pl.run_scoped(
        body,
        program.tile_memory(2, a.x.dtype, s),
        plgpu.SMEM((s.stages, WARPGROUPS, *codes_ref.shape[2:]), jnp.uint8),
        plgpu.SMEM((s.stages, WARPGROUPS, ROWS), scales_ref.dtype),
        [plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8)] * has_tables,
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def int4_matmul(
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array | None,
    x: jax.Array,
    token_scales: jax.Array,
    output_scales: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    columns: int,
    settings: Settings,
) -> jax.Array:
    """Tokens times INT4 weights: ``[M, columns]``.

    `codes` are uint8 ``[N' / 64, K' / 128, 64, 64]``, tiles of 64 rows of 128 inputs in 64 bytes:
    byte ``16 t + 4 s + b`` holds input ``32 s + 4 t + 2 b % 4 + 16 * (b // 2)`` in its low nibble
    and the next one in its high one; signed. `scales` are ``[N' / 64, K' / 128, 64]``, e4m3 (with
    `tables`), bfloat16 or float16. `tables`, uint8 ``[128, 16]``, hold for each e4m3 scale, by its
    bits, e4m3 of its products with 0..7, -8..-1.

    `x` is e4m3 ``[M, K']``, `M` at most 8 or a multiple of 8; `token_scales` bfloat16 ``[M]``;
    `output_scales` and `bias` float32 ``[N']``; `residual` ``[M, columns]`` in the output's dtype.
    `columns` is a multiple of 8, at least `N`, or half of it for gated weights, and at least those
    of one tile (see `program.launch`).

    With several parts it returns their float32 sums, ``[parts, M, columns]``, before the epilogue.
    """
    rows, codes = codes.shape[0] * ROWS, int4.chunks(codes)
    weights = [codes, scales]
    if tables is not None:
        weights = [codes, lax.bitcast_convert_type(scales, jnp.uint8), tables]
    kernel = functools.partial(_kernel, s=settings, has_tables=tables is not None)
    name = "turbojax_int4_matmul_hopper"
    run = program.launch(kernel, name, x.shape[0], rows, columns, settings)
    optional = [array for array in (bias, residual) if array is not None]
    return run(*weights, x, token_scales, output_scales, *optional)
