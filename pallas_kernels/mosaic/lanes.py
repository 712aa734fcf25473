"""The frame of kernels whose lanes work by themselves: they load, compute and store.

Nothing is copied ahead; what hides the memory's latency is that many warps run at once. Arrays can
be updated in place (`update`), as the pool of pages is: what a kernel writes to then is a mutable
reference of jax, whose array goes in and out of the kernel in the same memory. Where jax cannot
know that nobody needs the array as it was (it was not donated, or is read later), it is copied
before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import varying
from pallas_kernels.mosaic import lane
from pallas_kernels.mosaic.lane import Int, Pointer
from pallas_kernels.varying import all_own, own

WARPS = 4  # warps of a warpgroup

Body = Callable[[list[Pointer], list[Int]], None]
"""``body(arrays, ids)``: inputs, then what is written, then shared memory, if there is any; and the
program's number along each axis of the grid."""

_THREADS = "warpgroup"
_PARAMETERS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def _kernel(body: Body, names: Sequence[str], shared: int) -> Callable[..., None]:
    """A Pallas kernel from a body for single lanes."""

    def run(*refs: Any) -> None:
        ids = [lax.axis_index(own(name)) for name in names]
        types = ([plgpu.RefType()] * len(refs), [plgpu.Layout.WG_SPLAT(())] * len(ids))

        @plgpu.inline_mgpu(arg_types=types)
        def inside(ctx: Any, refs: list[Any], ids: list[Any]) -> None:
            body([Pointer.to(ref, ctx) for ref in refs], [lane.scalar(x) for x in ids])

        inside(list(refs), ids)

    if not shared:
        return run
    memory = plgpu.SMEM((shared,), jnp.uint8)

    def run_with_memory(*refs: Any) -> None:
        pl.run_scoped(functools.partial(run, *refs), memory, collective_axes=_THREADS)

    return run_with_memory


# Programs along each axis of a grid but the longest, which CUDA takes as its first.
_MOST_PROGRAMS = 2**16 - 1


def _mesh(name: str, grid: dict[str, int], warpgroups: int) -> dict[str, Any]:
    """A launch's parameters for Mosaic; the last axis is CUDA's first, and must be the longest."""
    ordered = dict(sorted(grid.items(), key=lambda axis: axis[1]))
    if any(size > _MOST_PROGRAMS for size in list(ordered.values())[:-1]):
        most = f"must be at most {_MOST_PROGRAMS}"
        raise NotImplementedError(f"{name}: all axes but one of {grid=} {most}")
    return {
        "grid": tuple(ordered.values()),
        "grid_names": all_own(ordered),
        "num_threads": warpgroups,
        "thread_name": _THREADS,
        "kernel_name": name,
    }


def launch(
    body: Body,
    name: str,
    inputs: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: dict[str, int],
    warpgroups: int,
    shared: int = 0,
    cluster: dict[str, int] | None = None,
) -> list[jax.Array]:
    """Runs a kernel that writes new arrays, whose types are `out`; profilers show `name`.

    `grid` and `cluster` are names and sizes of axes; programs along the cluster's can reach each
    other's memory. `shared` bytes are a program's memory.
    """
    cluster = cluster or {}
    call = functools.partial(
        plgpu.kernel,
        _kernel(body, (*grid, *cluster), shared),
        compiler_params=_PARAMETERS,
        cluster=tuple(cluster.values()),
        cluster_names=all_own(cluster),
        **_mesh(name, grid, warpgroups),
    )
    return varying.typed(lambda out: call(out_type=out), list(out))(*inputs)


def unfused(arrays: Any) -> Any:
    """Keeps XLA from making one call of slices and of a kernel that updates arrays.

    Where a loop slices what the kernel reads, or stores what it returns as a slice, as `lax.scan`
    over layers and their caches does, XLA (of jax 0.11) gives the kernel the slices' addresses, and
    forgets that what it updates is input and output in the same memory: what it wrote was lost. And
    where an address changes in every step, the call is recorded anew each time. For all that goes
    into such a kernel and all that comes out.
    """
    return jax.tree.map(lax.optimization_barrier, arrays)


def update(
    body: Body,
    name: str,
    inputs: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
    *,
    grid: dict[str, int],
    warpgroups: int,
    shared: int = 0,
    out: Sequence[jax.ShapeDtypeStruct] = (),
) -> list[jax.Array]:
    """Runs a kernel that reads and writes `arrays`; other arguments as `launch`.

    Under `vmap` its calls follow one another. Returns the arrays after it, in their own memory if
    nobody needs them as they were, and new ones of the types `out`.
    """
    count, axes = len(inputs), varying.axes_of((inputs, arrays))

    @jax.custom_batching.sequential_vmap
    def run(*operands: jax.Array) -> list[jax.Array]:
        kernel = pl.kernel(
            _kernel(body, tuple(grid), shared),
            out_type=varying.typed_shapes(list(out), axes),
            mesh=plgpu.Mesh(**_mesh(name, grid, warpgroups)),
            compiler_params=_PARAMETERS,
            name=name,
        )

        read, before = unfused((list(operands[:count]), list(operands[count:])))

        def write(state: tuple[list[Any], list[Any]]) -> None:
            refs, fresh = state
            found = kernel(*read, *refs)
            for ref, x in zip(fresh, found if out else [], strict=True):
                ref[...] = x

        # What is there first is never used, so no kernel makes it.
        nothing = varying.cast([jnp.zeros(x.shape, x.dtype) for x in out], axes)
        written, fresh = unfused(pl.run_state(write)((before, nothing)))
        return [*written, *fresh]

    return varying.cast(run(*varying.cast([*inputs, *arrays], axes)), axes)
