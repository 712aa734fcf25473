"""Kernels inside `jax.shard_map`, which tracks the axes of the mesh over which arrays vary.

Where it does (``check_vma=True``, the default), an array's type names the mesh axes along which it
differs from device to device. jax infers that for its own operations; for what a kernel writes it
must be told: it varies wherever any input does. Outside of `shard_map` nothing here does anything.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax

_STRUCT = inspect.signature(jax.ShapeDtypeStruct).parameters


def axes_of(arrays: Any) -> frozenset[str]:
    """The mesh axes along which at least one array of a pytree varies.

    Outside of `shard_map`, and with ``check_vma=False``, there are none.
    """
    axes: frozenset[str] = frozenset()
    return axes.union(*(axes_of_type(jax.typeof(x)) for x in jax.tree.leaves(arrays)))


def axes_of_type(kind: Any) -> frozenset[str]:
    """The axes along which an array's type varies, or a `ShapeDtypeStruct` that has them."""
    # Versions of jax name this differently.
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset((getattr(kind, "vma", None) or ()) if manual is None else manual.varying)


def cast(arrays: Any, axes: frozenset[str]) -> Any:
    """A pytree whose arrays count as varying along these axes, too; costs nothing at run time."""

    def one(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - axes_of(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, arrays) if axes else arrays


def typed_shapes(shapes: Any, axes: frozenset[str]) -> Any:
    """`ShapeDtypeStruct`s of arrays that vary along these axes.

    Also where there are none: within `shard_map` a kernel must be told so.
    """
    if "manual_axis_type" in _STRUCT:
        kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    else:
        kind = {"vma": axes}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **kind), shapes)


def typed(launch: Callable[[Any], Callable[..., Any]], shapes: Any) -> Callable[..., Any]:
    """The call of a kernel, whose results vary wherever an input does.

    `launch` takes the `ShapeDtypeStruct`s of what the kernel writes and returns its call; `shapes`
    are those without axes.
    """

    def call(*inputs: Any) -> Any:
        axes = axes_of(inputs)
        return cast(launch(typed_shapes(shapes, axes))(*cast(inputs, axes)), axes)

    return call


def pallas_call(kernel: Callable[..., None], *, out_shape: Any, **options: Any) -> Any:
    """`pl.pallas_call` with `typed`."""
    from jax.experimental import pallas as pl  # turbojax imports this module, but not Pallas

    return typed(lambda out: pl.pallas_call(kernel, out_shape=out, **options), out_shape)


def own(name: str) -> str:
    """The name that a launch uses for an axis of its grid or cluster, which no mesh may have.

    Inside `jax.shard_map` `jax.lax.axis_index` of a name that both have is the mesh's: a kernel
    would take the device's number for its program's.
    """
    return f"turbojax_kernel_{name}"


def all_own(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(own(name) for name in names)
