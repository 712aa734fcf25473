"""Caches that are made where they belong: every device makes its own part, and none the whole."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from turbojax.sharding.axes import Axes
from turbojax.sharding.specs import Split, partition_specs

C = TypeVar("C")
Sizes = tuple[int, int, int]
"""Sequences (or pages), tokens and KV heads."""


def born(make: Callable[..., C], axes: Axes, sizes: Sizes, unit: int, **static: Any) -> C:
    """An empty cache, split over a mesh.

    Args:
      make: ``make(batch_size, max_length, num_kv_heads, **static)`` gives one of one device.
      axes: of the mesh.
      sizes: of all devices together.
      unit: tokens of a slot, of which every device has as many.
      **static: hashable.

    Raises:
      ValueError: if a size cannot be split.
    """
    found: C = program(make, axes, sizes, unit, **static)()
    return found


def program(
    make: Callable[..., Any], axes: Axes, sizes: Sizes, unit: int, **static: Any
) -> Callable[[], Any]:
    """What `born` runs: compiled once for the same arguments."""
    axes = dataclasses.replace(axes, mesh=axes.require_mesh())
    return _program(make, axes, sizes, unit, tuple(sorted(static.items())))


@functools.lru_cache(maxsize=256)
def _program(
    make: Callable[..., Any], axes: Axes, sizes: Sizes, unit: int, static: tuple[Any, ...]
) -> Callable[[], Any]:
    given = dict(static)
    whole = jax.eval_shape(lambda: make(*sizes, **given))
    specs = partition_specs(widened(whole, axes.size("sequence")), axes)
    own = _own_sizes(sizes, unit, axes)
    fields = [f.name for f in dataclasses.fields(whole) if f.metadata.get("static")]
    of_whole = {name: getattr(whole, name) for name in fields}

    def local() -> Any:
        return dataclasses.replace(make(*own, **given), **of_whole)

    return jax.jit(jax.shard_map(local, mesh=axes.mesh, in_specs=(), out_specs=specs))


def widened(cache: Any, devices: int) -> Any:
    """Shapes of a cache with room for what so many devices have alike, see `Split.COPIES`."""
    changes = {}
    for field in dataclasses.fields(cache):
        x = getattr(cache, field.name)
        if isinstance(x, Split):
            changes[field.name] = widened(x, devices)
        elif field.name in cache.COPIES:
            shape, axis = list(x.shape), cache.COPIES[field.name]
            shape[axis] *= devices
            changes[field.name] = jax.ShapeDtypeStruct(shape, x.dtype)
    return dataclasses.replace(cache, **changes)


def _own_sizes(sizes: Sizes, unit: int, axes: Axes) -> Sizes:
    """What a device's own part has; axes of size 1 are not split."""
    batch, length, heads = sizes
    devices, slots = axes.size("sequence"), length // unit
    if slots % devices or (devices > 1 and not slots):
        raise ValueError(
            f"max_length={length} must hold a multiple of {devices} times {unit} tokens, so that "
            f"every device of {axes.sequence} has as many slots"
        )
    if devices > 1:
        length = slots // devices * unit
    # `partition_specs` has refused what does not divide.
    batch, heads = (
        size // axes.size(dimension) if size > 1 else size
        for size, dimension in ((batch, "batch"), (heads, "heads"))
    )
    return batch, length, heads
