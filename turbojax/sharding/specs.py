"""How the arrays of caches are split over a mesh, from the letters of their axes."""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import PartitionSpec

from turbojax.sharding.axes import DIMENSIONS, Axes

_POOL = "P"


class Split:
    """A dataclass that says which axis of its arrays is what.

    Attributes:
      AXES: a letter for every axis of every array, see `turbojax.sharding.axes`; for a tuple of
        arrays they hold for each. Fields that hold another `Split`, or several, are not named.
      COPIES: for arrays that are equal on all devices of a sequence's axis: the axis along which
        these copies lie side by side in the whole array. To JAX they are different arrays, since
        each device computes its own, together with what differs.
    """

    AXES: ClassVar[dict[str, str]]
    COPIES: ClassVar[dict[str, int]] = {}

    def partition_specs(self, axes: Axes) -> Any:
        """How every array is split: the same structure, of `jax.sharding.PartitionSpec`.

        Sequences are split over ``axes.batch``, heads over ``axes.heads``, tokens over
        ``axes.sequence``: each device has a run of slots of every sequence. The pages of a pool are
        split over sequences' and tokens' axes, since every device has pages of its own, which its
        tables count from 0. Axes of size 1 are not split.

        Raises ValueError if an axis cannot be split evenly, or heads are ranked among those of
        several devices, see `turbojax.TurboConfig.heads_per_group`.
        """
        return partition_specs(self, axes)

    def check_split(self, axes: Axes) -> None:
        """Raises ValueError where such a cache cannot be split over these axes."""


def partition_specs(cache: Any, axes: Axes) -> Any:
    """How the arrays of a cache, or of a model's caches, are split: see `Split.partition_specs`.

    Args:
      cache: arrays, or their shapes (`jax.eval_shape`), of all devices together.
      axes: the axes of the mesh.

    Raises:
      TypeError: if it is no cache.
      ValueError: if an axis cannot be split evenly, or heads are ranked among those of several
        devices, see `turbojax.TurboConfig.heads_per_group`.
    """
    if not isinstance(cache, Split) or not dataclasses.is_dataclass(cache):
        raise TypeError(f"cache is a {type(cache).__name__}, must be a cache or those of a model")
    cache.check_split(axes)
    specs = {}
    for field in dataclasses.fields(cache):
        if not field.metadata.get("static"):
            specs[field.name] = _of_field(cache, field.name, getattr(cache, field.name), axes)
    return dataclasses.replace(cache, **specs)


def _of_field(cache: Split, name: str, x: Any, axes: Axes) -> Any:
    if x is None:
        return None
    if isinstance(x, tuple):
        return tuple(_of_field(cache, name, part, axes) for part in x)
    if isinstance(x, Split):
        return partition_specs(x, axes)
    try:
        return spec_of(cache.AXES[name], tuple(x.shape), axes, cache.COPIES.get(name))
    except ValueError as error:
        raise ValueError(f"{type(cache).__name__}.{name}: {error}") from None


def spec_of(
    dims: str, shape: tuple[int, ...], axes: Axes, copies: int | None = None
) -> PartitionSpec:
    """How an array is split; ValueError if an axis cannot be split evenly.

    `dims` are letters of the last axes: layers may be stacked before them. `shape` is that of all
    devices together, and for `copies` see `Split.COPIES`.
    """
    stacked = len(shape) - len(dims)
    names: list[tuple[str, ...]] = [()] * stacked + [
        axes_of(letter, axes) if size != 1 else ()
        for letter, size in zip(dims, shape[stacked:], strict=True)
    ]
    if copies is not None:
        names[stacked + copies] = (*names[stacked + copies], *axes.of_dimension("sequence"))
    for i, (size, split) in enumerate(zip(shape, names, strict=True)):
        if size % axes.count(split):
            raise ValueError(
                f"axis {i} of shape {shape} must be a multiple of {axes.count(split)}, to be split "
                f"over {split}"
            )
    return PartitionSpec(*(n[0] if len(n) == 1 else n or None for n in names))


def axes_of(letter: str, axes: Axes) -> tuple[str, ...]:
    """The axes of the mesh over which an axis with this letter is split; pages are, too."""
    if letter == _POOL:
        return (*axes.of_dimension("batch"), *axes.of_dimension("sequence"))
    return axes.of_dimension(DIMENSIONS[letter]) if letter in DIMENSIONS else ()


def shardings(cache: Any, axes: Axes) -> Any:
    """`partition_specs` as shardings of the mesh of these axes, which must be one of devices."""
    mesh = axes.require_mesh()
    return jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec), partition_specs(cache, axes)
    )
