"""INT4 weights to e4m3 in memory, for Hopper.

Roofline, for 14336 x 4096 weights: 29.8 MB in and 58.7 MB out, 29 us at the 3.0 TB/s of a copy;
and 1.4 instructions for each weight, 10 us. The bytes are the floor; target: 80 % of its speed.
Seen on an H100 with jax 0.11.2: 30 us, 2.9 TB/s.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import ring
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, TABLE_BYTES, TABLES
from pallas_kernels.mosaic.ring import ROWS, SCALAR, WARPGROUPS

_STAGES = 8
_OUTPUTS = 2


def _expand(codes: Ref, scales: Ref, tables: Ref, row: jax.Array, out: Ref) -> None:
    types = (SCALAR, *[plgpu.RefType()] * 3, ring.tile_type(out))

    def run(row: Any, codes: Any, scales: Any, tables: Any, out: Any) -> None:
        int4.expand(codes, scales, tables, row, out)

    ring.inline(run, types)(row, codes, scales, tables, out)


def _kernel(codes_ref: Ref, scales_ref: Ref, tables_ref: Ref, out_ref: Ref) -> None:
    """One program, which takes every ``programs``-th group of 128 rows and 128 inputs."""
    groups, me = codes_ref.shape[1], lax.axis_index("warpgroup")
    share = ring.Share(pl.cdiv(codes_ref.shape[0], WARPGROUPS) * groups)

    def place(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = share.number(i)
        return lax.div(number, jnp.int32(groups)) * WARPGROUPS, lax.rem(number, jnp.int32(groups))

    def body(
        codes: Ref, scales: Ref, tables: Ref, out: Ref, ready: Ref, free: Ref, tables_ready: Ref
    ) -> None:
        def consume(i: jax.Array, slot: jax.Array) -> jax.Array:
            tile, g = place(i)
            buffer = out.at[me, lax.rem(i, jnp.int32(_OUTPUTS))]
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wait_smem_to_gmem(_OUTPUTS - 1, wait_read_only=True)
            _expand(codes.at[slot], scales.at[slot], tables, me * ROWS, buffer)
            plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[slot])
            target = out_ref.at[pl.ds((tile + me) * ROWS, ROWS), pl.ds(g * GROUP, GROUP)]
            plgpu.copy_smem_to_gmem(buffer, target)
            return ring.slot_after(slot, 1, _STAGES)

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            tile, g = place(i)
            tiles = pl.ds(tile, WARPGROUPS)
            plgpu.barrier_wait(free.at[slot])
            plgpu.copy_gmem_to_smem(codes_ref.at[tiles, g], codes.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(scales_ref.at[tiles, g], scales.at[slot], ready.at[slot])
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
        plgpu.SMEM((_STAGES, WARPGROUPS, *codes_ref.shape[2:]), jnp.uint8),
        plgpu.SMEM((_STAGES, WARPGROUPS, ROWS), jnp.uint8),
        plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8),
        ring.tile((WARPGROUPS, _OUTPUTS, ROWS, GROUP), jnp.uint8),
        plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=_STAGES),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def int4_expand(
    codes: jax.Array, scales: jax.Array, tables: jax.Array, *, programs: int = 132
) -> jax.Array:
    """e4m3 weights ``[N', K']`` of INT4 ones, arguments as of `int4_matmul`."""
    rows, size = codes.shape[0] * ROWS, codes.shape[1] * GROUP
    run = ring.launch(
        _kernel,
        "turbojax_int4_expand_hopper",
        jax.ShapeDtypeStruct((rows, size), jnp.uint8),
        pl.cdiv(codes.shape[0], WARPGROUPS) * codes.shape[1],
        programs,
    )
    out = run(int4.chunks(codes), lax.bitcast_convert_type(scales, jnp.uint8), tables)
    return lax.bitcast_convert_type(out, jnp.float8_e4m3fn)
