"""INT4 weights to e4m3 in memory with their outputs last, for Hopper: a gradient's operand.

Roofline, for 14336 x 4096 weights: 29.8 MB in and 58.7 MB out, 21 us at the 4.3 TB/s that a copy
reaches on an H200, 29 at an H100's 3.0; and 2.2 instructions for each weight, 1.3 of them
permutations of bytes, of which a multiprocessor does 64 lanes a clock: 5 us. The bytes are the
floor; target: 80 % of its speed. Seen on an H200: 26.0 us, 82 %.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import ring
from pallas_kernels.mosaic.products import int4_transposed
from pallas_kernels.mosaic.products.int4 import CHUNK, GROUP, ROW_BYTES, TABLE_BYTES, TABLES
from pallas_kernels.mosaic.products.int4_transposed import ROWS
from pallas_kernels.mosaic.ring import SCALAR, WARPGROUPS

_STAGES = 6
_OUTPUTS = 2
_TILE_ROWS = 64
_LINES = _TILE_ROWS * ROW_BYTES // CHUNK
_TILES = ROWS // _TILE_ROWS


def _expand(codes: Ref, scales: Ref, tables: Ref, group: jax.Array, out: Ref) -> None:
    types = (SCALAR, *[plgpu.RefType()] * 3, ring.tile_type(out))

    def run(group: Any, codes: Any, scales: Any, tables: Any, out: Any) -> None:
        int4_transposed.expand(codes, scales, tables, group, out)

    ring.inline(run, types)(group, codes, scales, tables, out)


def _kernel(codes_ref: Ref, scales_ref: Ref, tables_ref: Ref, out_ref: Ref) -> None:
    """One program; rows vary fastest, so that programs side by side write to the same lines."""
    me = lax.axis_index("warpgroup")
    across = jnp.int32(pl.cdiv(codes_ref.shape[0], _TILES))
    down = pl.cdiv(codes_ref.shape[1], WARPGROUPS)
    share = ring.Share(pl.cdiv(codes_ref.shape[0], _TILES) * down)

    def place(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = share.number(i)
        return lax.rem(number, across), lax.div(number, across) * WARPGROUPS

    def body(
        codes: Ref, scales: Ref, tables: Ref, out: Ref, ready: Ref, free: Ref, tables_ready: Ref
    ) -> None:
        def consume(i: jax.Array, slot: jax.Array) -> jax.Array:
            column, g = place(i)
            buffer = out.at[me, lax.rem(i, jnp.int32(_OUTPUTS))]
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wait_smem_to_gmem(_OUTPUTS - 1, wait_read_only=True)
            _expand(codes.at[slot], scales.at[slot], tables, me, buffer)
            plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[slot])
            inputs, rows = pl.ds((g + me) * GROUP, GROUP), pl.ds(column * ROWS, ROWS)
            # Of an odd number of groups the last has no other; what lies past it is not written.
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[inputs, rows])
            return ring.slot_after(slot, 1, _STAGES)

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            column, g = place(i)
            part = pl.ds(column * _TILES, _TILES), pl.ds(g, WARPGROUPS)
            plgpu.barrier_wait(free.at[slot])
            plgpu.copy_gmem_to_smem(codes_ref.at[part], codes.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(scales_ref.at[part], scales.at[slot], ready.at[slot])
            return ring.slot_after(slot, 1, _STAGES)

        def start_to_consume() -> None:
            ring.free_at_first(_STAGES, [free])
            plgpu.barrier_wait(tables_ready)
            share.by_index(consume)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def start_to_produce() -> None:
            plgpu.copy_gmem_to_smem(tables_ref, tables, tables_ready)
            share.by_index(produce)

        ring.divide(me, WARPGROUPS, None, start_to_consume, start_to_produce)

    pl.run_scoped(
        body,
        plgpu.SMEM((_STAGES, _TILES, WARPGROUPS, _LINES, CHUNK), jnp.uint8),
        plgpu.SMEM((_STAGES, _TILES, WARPGROUPS, _TILE_ROWS), jnp.uint8),
        plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8),
        ring.tile((WARPGROUPS, _OUTPUTS, GROUP, ROWS), jnp.uint8),
        plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=_STAGES),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def int4_expand_transposed(
    codes: jax.Array, scales: jax.Array, tables: jax.Array, *, programs: int = 132
) -> jax.Array:
    """e4m3 weights with outputs last: float8_e4m3fn ``[K, N']``.

    `codes`, `scales` (e4m3) and `tables` are as for `int4_matmul`. `N` is rounded up to a multiple
    of 128, with zeros there.
    """
    tiles, groups = codes.shape[:2]
    total = pl.cdiv(tiles, _TILES)
    run = ring.launch(
        _kernel,
        "turbojax_int4_expand_transposed_hopper",
        jax.ShapeDtypeStruct((groups * GROUP, total * ROWS), jnp.uint8),
        total * pl.cdiv(groups, WARPGROUPS),
        programs,
    )
    lines = codes.reshape(tiles, groups, _LINES, CHUNK)
    out = run(lines, lax.bitcast_convert_type(scales, jnp.uint8), tables)
    return lax.bitcast_convert_type(out, jnp.float8_e4m3fn)
