"""INT4 weights to e4m3, for products of so many tokens that it pays to expand them first.

Roofline, for 14336 x 4096 weights: 29.8 MB in and 58.7 MB out, 29 us at the 3.0 TB/s of a copy on
an H100, 21 at an H200's 4.3; and 1.4 instructions for each weight, 10 us, or transposed 2.2, 1.3 of
them permutations of bytes, of which a multiprocessor does 64 lanes a clock: 5 us. The bytes are the
floor; target: 80 % of its speed. Seen with jax 0.11.2: on an H100 30 us, 2.9 TB/s; transposed on an
H200 26.0 us, 82 %.

Two warpgroups expand tiles while a third copies codes and scales ahead. `int4_expand` leaves
weights in the order of their rows; `int4_expand_transposed` puts their outputs last, for a
gradient, whose product sums over them: rows vary fastest there, so that programs side by side write
to the same lines.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic import pipeline
from pallas_kernels.mosaic.pipeline import ROWS, SCALAR, WARPGROUPS
from pallas_kernels.mosaic.products import int4
from pallas_kernels.mosaic.products.int4 import GROUP, MOST_ROWS, TABLE_BYTES, TABLES

_OUTPUTS = 2
# Tiles of 64 rows that a transposed one has.
_TILES = MOST_ROWS // ROWS
Place = tuple[jax.Array, jax.Array]


class _Order(NamedTuple):
    """How a kernel takes tiles of `total`, by their places, and which slices those are."""

    name: str
    stages: int
    total: int
    place: Callable[[jax.Array], Place]
    source: Callable[[Place], Any]
    target: Callable[[Place, jax.Array], Any]
    expand: Callable[..., None]
    first: Callable[[jax.Array], jax.Array]
    held: tuple[int, ...]
    tile: tuple[int, int]


def _by_rows(tiles: int, groups: int) -> _Order:
    def place(number: jax.Array) -> Place:
        return lax.div(number, jnp.int32(groups)) * WARPGROUPS, lax.rem(number, jnp.int32(groups))

    return _Order(
        name="turbojax_int4_expand_hopper",
        stages=8,
        total=pl.cdiv(tiles, WARPGROUPS) * groups,
        place=place,
        source=lambda at: (pl.ds(at[0], WARPGROUPS), at[1]),
        target=lambda at, me: (pl.ds((at[0] + me) * ROWS, ROWS), pl.ds(at[1] * GROUP, GROUP)),
        expand=int4.expand,
        first=lambda me: me * ROWS,
        held=(WARPGROUPS,),
        tile=(ROWS, GROUP),
    )


def _by_inputs(tiles: int, groups: int) -> _Order:
    across = jnp.int32(pl.cdiv(tiles, _TILES))

    def place(number: jax.Array) -> Place:
        return lax.rem(number, across), lax.div(number, across) * WARPGROUPS

    def target(at: Place, me: jax.Array) -> Any:
        # Of an odd number of groups the last has no other; what lies past it is not written.
        return pl.ds((at[1] + me) * GROUP, GROUP), pl.ds(at[0] * MOST_ROWS, MOST_ROWS)

    return _Order(
        name="turbojax_int4_expand_transposed_hopper",
        stages=6,
        total=pl.cdiv(tiles, _TILES) * pl.cdiv(groups, WARPGROUPS),
        place=place,
        source=lambda at: (pl.ds(at[0] * _TILES, _TILES), pl.ds(at[1], WARPGROUPS)),
        target=target,
        expand=int4.expand_transposed,
        first=lambda me: me,
        held=(_TILES, WARPGROUPS),
        tile=(GROUP, MOST_ROWS),
    )


def _expand(order: _Order, refs: tuple[Ref, Ref, Ref], me: jax.Array, out: Ref) -> None:
    types = (SCALAR, *[plgpu.RefType()] * 3, pipeline.tile_type(out))

    def run(first: Any, codes: Any, scales: Any, tables: Any, out: Any) -> None:
        order.expand(codes, scales, tables, first, out)

    pipeline.inline(run, types)(order.first(me), *refs, out)


def _kernel(
    codes_ref: Ref,
    scales_ref: Ref,
    tables_ref: Ref,
    out_ref: Ref,
    ordered: Callable[[int, int], _Order],
) -> None:
    """One program."""
    me, order = lax.axis_index("warpgroup"), ordered(*codes_ref.shape[:2])
    share, stages = pipeline.TileScheduler(order.total), order.stages

    def body(
        codes: Ref, scales: Ref, tables: Ref, out: Ref, ready: Ref, free: Ref, tables_ready: Ref
    ) -> None:
        def consume(i: jax.Array, slot: jax.Array) -> jax.Array:
            at = order.place(share.number(i))
            buffer = out.at[me, lax.rem(i, jnp.int32(_OUTPUTS))]
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wait_smem_to_gmem(_OUTPUTS - 1, wait_read_only=True)
            _expand(order, (codes.at[slot], scales.at[slot], tables), me, buffer)
            plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[slot])
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[order.target(at, me)])
            return pipeline.slot_after(slot, 1, stages)

        def produce(i: jax.Array, slot: jax.Array) -> jax.Array:
            source = order.source(order.place(share.number(i)))
            plgpu.barrier_wait(free.at[slot])
            plgpu.copy_gmem_to_smem(codes_ref.at[source], codes.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(scales_ref.at[source], scales.at[slot], ready.at[slot])
            return pipeline.slot_after(slot, 1, stages)

        def start_to_consume() -> None:
            pipeline.free_at_first(stages, [free])
            plgpu.barrier_wait(tables_ready)
            share.by_index(consume)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def start_to_produce() -> None:
            plgpu.copy_gmem_to_smem(tables_ref, tables, tables_ready)
            share.by_index(produce)

        pipeline.divide(me, WARPGROUPS, None, start_to_consume, start_to_produce)

    pl.run_scoped(
        body,
        plgpu.SMEM((stages, *order.held, *codes_ref.shape[2:]), jnp.uint8),
        plgpu.SMEM((stages, *order.held, ROWS), jnp.uint8),
        plgpu.SMEM((TABLES, TABLE_BYTES), jnp.uint8),
        pipeline.tile((WARPGROUPS, _OUTPUTS, *order.tile), jnp.uint8),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def _launch(
    ordered: Callable[[int, int], _Order],
    codes: jax.Array,
    scales: jax.Array,
    tables: jax.Array,
    out: tuple[int, int],
    programs: int,
) -> jax.Array:
    kernel, order = functools.partial(_kernel, ordered=ordered), ordered(*codes.shape[:2])
    kind = jax.ShapeDtypeStruct(out, jnp.uint8)
    run = pipeline.launch(kernel, order.name, kind, order.total, programs)
    expanded = run(int4.chunks(codes), lax.bitcast_convert_type(scales, jnp.uint8), tables)
    return lax.bitcast_convert_type(expanded, jnp.float8_e4m3fn)


def int4_expand(
    codes: jax.Array, scales: jax.Array, tables: jax.Array, *, programs: int = 132
) -> jax.Array:
    """e4m3 weights ``[N', K']`` of INT4 ones, arguments as of `int4_matmul`."""
    out = (codes.shape[0] * ROWS, codes.shape[1] * GROUP)
    return _launch(_by_rows, codes, scales, tables, out, programs)


def int4_expand_transposed(
    codes: jax.Array, scales: jax.Array, tables: jax.Array, *, programs: int = 132
) -> jax.Array:
    """As `int4_expand`, but ``[K, N']``, `N` rounded up to a multiple of 128, with zeros there."""
    out = (codes.shape[1] * GROUP, pl.cdiv(codes.shape[0], _TILES) * MOST_ROWS)
    return _launch(_by_inputs, codes, scales, tables, out, programs)
