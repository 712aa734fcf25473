"""Global arrays from what each device has."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding import Axes


def assemble(part: Callable[[int], Any], specs: Callable[[Any], Any], axes: Axes) -> Any:
    """Global arrays from what each device has, following each other along the axes the specs name.

    `part` returns the arrays of the device with this number along `hidden_axes`, a pytree that is
    alike for all, and is called once for each number of which this process has a device. `specs`
    gives that pytree with a `PartitionSpec` in place of each array. Raises ValueError if parts are
    not alike.
    """
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    names = list(mesh.axis_names)
    over = [names.index(name) for name in hidden_axes(axes)]
    shape = [mesh.devices.shape[axis] for axis in over]
    owners: dict[int, list[jax.Device]] = {}
    for place in np.ndindex(*mesh.devices.shape):
        device: Any = mesh.devices[place]
        if device.process_index == jax.process_index():
            number = int(np.ravel_multi_index([place[axis] for axis in over], shape)) if over else 0
            owners.setdefault(number, []).append(device)
    held: dict[jax.Device, list[jax.Array]] = {}
    tree: Any = None
    for number, devices in owners.items():
        mine = part(number)
        leaves, found = jax.tree.flatten(mine)
        if tree is None:
            tree, wanted = found, jax.tree.leaves(specs(mine))
        elif found != tree:
            raise ValueError(f"parts must be alike, but part {number} is {found}, not {tree}")
        for device in devices:
            held[device] = [jax.device_put(leaf, device) for leaf in leaves]
    arrays = [
        _join([own[i] for own in held.values()], NamedSharding(mesh, spec))
        for i, spec in enumerate(wanted)
    ]
    return jax.tree.unflatten(tree, arrays)


def _join(parts: list[jax.Array], sharding: NamedSharding) -> jax.Array:
    """The global array of the parts of this process's devices."""
    sizes = sharding.mesh.shape
    shape = list(parts[0].shape)
    for axis, names in enumerate(sharding.spec):
        shape[axis] *= math.prod(sizes[x] for x in axes_named(names))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def axes_named(names: Any) -> tuple[str, ...]:
    """The axes of a mesh that one entry of a spec names."""
    return (names,) if isinstance(names, str) else tuple(names or ())
