"""Caches that are made where they belong: every device makes its own part, and none the whole."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax

from turbojax.sharding.axes import Axes
from turbojax.sharding.specs import Split, axes_of, partition_specs

C = TypeVar("C")


class Sizes(NamedTuple):
    """Sizes of a cache on all devices together, or of a pool.

    `batch_size` counts sequences, or pages of a pool; `max_length` is tokens each may grow to, or
    those of a page. A sequence has `slots` slots of `unit` tokens; `unit` is 0 for a pool, whose
    pages are split and not their tokens.
    """

    batch_size: int
    max_length: int
    num_kv_heads: int
    unit: int = 0
    slots: int = 0

    def own(self, axes: Axes) -> tuple[int, int, int]:
        """The first three, of one device's part; axes of size 1 stay whole.

        Raises ValueError if devices would not have equally many slots.
        """
        batch, length, heads = self[:3]
        # `partition_specs` has refused what does not divide.
        if heads > 1:
            heads //= axes.size("heads")
        if not self.unit:
            return batch // axes.count(axes_of("P", axes)), length, heads
        if batch > 1:
            batch //= axes.size("batch")
        devices = axes.size("sequence")
        if devices > 1:
            if self.slots % devices or not self.slots:
                raise ValueError(
                    f"max_length={length} makes {self.slots} slots of {self.unit} tokens, must "
                    f"make a multiple of {devices}, to be split over {axes.sequence}"
                )
            length = self.slots // devices * self.unit
        return batch, length, heads


def born(make: Callable[..., C], axes: Axes, sizes: Sizes, **static: Any) -> C:
    """An empty cache, split over a mesh.

    `make(batch_size, max_length, num_kv_heads, **static)` makes one on one device; `static` must be
    hashable, and `sizes` are those of all devices together. Raises ValueError if a size cannot be
    split, or tokens of a cache that keeps only a window.
    """
    found: C = program(make, axes, sizes, **static)()
    return found


def program(make: Callable[..., Any], axes: Axes, sizes: Sizes, **static: Any) -> Any:
    """What `born` runs, jitted: once for the same arguments."""
    axes = dataclasses.replace(axes, mesh=axes.require_mesh())
    return _program(make, axes, sizes, tuple(sorted(static.items())))


@functools.lru_cache(maxsize=256)
def _program(
    make: Callable[..., Any], axes: Axes, sizes: Sizes, static: tuple[tuple[str, Any], ...]
) -> Any:
    given = dict(static)
    whole = jax.eval_shape(lambda: make(*sizes[:3], **given))
    if axes.size("sequence") > 1 and getattr(whole, "is_rolling", False):
        raise ValueError(
            f"{axes.sequence=} must be () for a cache that keeps a window of {whole.window} tokens "
            f"alone and not max_length={whole.max_length}"
        )
    specs = partition_specs(widened(whole, axes.size("sequence")), axes)
    own = sizes.own(axes)
    fields = [f.name for f in dataclasses.fields(whole) if f.metadata.get("static")]
    of_whole = {name: getattr(whole, name) for name in fields}

    def local() -> Any:
        return dataclasses.replace(make(*own, **given), **of_whole)

    return jax.jit(jax.shard_map(local, mesh=axes.mesh, in_specs=(), out_specs=specs))


def widened(cache: Any, devices: int) -> Any:
    """Shapes of a cache with room for the copies of so many devices, see `Split.COPIES`."""
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
