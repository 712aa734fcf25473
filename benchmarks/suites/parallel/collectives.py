"""How long devices take to exchange so many bytes, with nothing else to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from benchmarks.suites.parallel.timing import timed
from benchmarks.tables import Row

_AXIS = "devices"


def _gather(x: jax.Array, n: int) -> jax.Array:
    del n
    return jax.lax.all_gather(x, _AXIS)[-1]


def _sum(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.psum(x, _AXIS) / n


def _permute(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % n) for i in range(n)])


KINDS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "all-gather": _gather,
    "all-reduce": _sum,
    "collective-permute": _permute,
}


def measure(kind: str, size: int, loops: int, devices: int) -> Row:
    """One exchange of float32 arrays of `size` bytes on each device."""
    mesh = jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))

    def run(x: jax.Array) -> jax.Array:
        def step(_: Any, x: jax.Array) -> jax.Array:
            return KINDS[kind](x, devices) + 1

        return jax.lax.fori_loop(0, loops, step, x)

    spec = PartitionSpec(_AXIS)
    call = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.zeros((devices, size // 4), jnp.float32, device=jax.NamedSharding(mesh, spec))
    found = timed(call, x, loops=loops)
    return {**found, "gigabytes_per_second": size / found["us"] / 1e3}
