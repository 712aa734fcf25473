"""Whole decoders put onto a mesh, and what devices make of their own put together."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turbojax.models.decoder import Decoder
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.layout import axes_of_model, hidden_axes, share
from turbojax.models.tensor_parallel.quantized_parts import local_layer, local_table
from turbojax.models.tensor_parallel.specs import partition_specs, shardings, specs_of_part
from turbojax.sharding import Axes

_DecoderT = TypeVar("_DecoderT", Decoder, QuantizedDecoder)


def shard(decoder: _DecoderT, axes: Axes) -> _DecoderT:
    """A decoder split over a mesh: each device has its part of every array.

    The whole is on one device, or in host memory, before. `load_decoder` with a mesh reads parts.

    Args:
      decoder: a decoder without axes. One with adapters is split with them.
      axes: over which sequences (`batch`) and heads and hidden sizes (`heads`) are split, with a
        mesh. Of more devices for heads than KV heads some go to the sequence's axis, see
        `axes_of_model`.

    Returns:
      The decoder with these axes, for `start`, `generate`, `stream`, `score` and the engine.

    Raises:
      ValueError: if it has axes already, or heads cannot be split over so many devices.
      NotImplementedError: if they cannot here, or groups of INT4 weights cannot.
    """
    if decoder.axes is not None:
        raise ValueError(f"decoder.axes={decoder.axes} must be None: it is split already")
    axes = axes_of_model(decoder.config, axes)
    if isinstance(decoder, QuantizedDecoder):
        return _shard_quantized(decoder, axes)
    sizes = axes.require_mesh().shape

    def padded(array: jax.Array, spec: Any) -> jax.Array:
        """With zeros, so that all devices have as much; only hidden sizes need them."""
        widths = [(0, 0)] * array.ndim
        for axis, names in enumerate(spec):
            count = math.prod(sizes[x] for x in _names(names))
            widths[axis] = (0, count * share(array.shape[axis], count) - array.shape[axis])
        return jnp.pad(array, widths) if any(more for _, more in widths) else array

    whole = jax.tree.map(padded, decoder, partition_specs(decoder, axes))
    placed: Decoder = jax.device_put(whole, shardings(decoder, axes))
    return dataclasses.replace(placed, axes=axes)


def _shard_quantized(decoder: QuantizedDecoder, axes: Axes) -> QuantizedDecoder:
    config = decoder.config

    def placed(part: Callable[[int], Any]) -> Any:
        return assemble(part, lambda tree: specs_of_part(tree, config, axes), axes)

    ends = placed(
        lambda d: {
            name: local_table(getattr(decoder, name), config, axes, d)
            for name in ("embedding", "lm_head")
        }
    )
    layers = [
        placed(functools.partial(local_layer, layer, config, axes)) for layer in decoder.layers
    ]
    norm = jax.device_put(decoder.norm, NamedSharding(axes.require_mesh(), PartitionSpec()))
    return dataclasses.replace(decoder, layers=tuple(layers), norm=norm, axes=axes, **ends)


def assemble(part: Callable[[int], Any], specs: Callable[[Any], Any], axes: Axes) -> Any:
    """Global arrays of what each device has of its own.

    Args:
      part: the arrays of the device with this number along `hidden_axes`: a pytree of the same
        structure, static fields included, and shapes for all. Called once for each number of which
        this process has a device.
      specs: how such a pytree is split: a `PartitionSpec` in place of each array.
      axes: with a mesh of devices.

    Returns:
      The pytree with global arrays, in which the devices' follow each other along the axes that
      the specs name. Its static fields are those of a part.
    """
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    names = list(mesh.axis_names)
    over = [names.index(name) for name in hidden_axes(axes)]
    shape = [mesh.devices.shape[axis] for axis in over]
    owners: dict[int, list[jax.Device]] = {}
    for place in np.ndindex(*mesh.devices.shape):
        device = mesh.devices[place]
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
        shape[axis] *= math.prod(sizes[x] for x in _names(names))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def _names(names: Any) -> tuple[str, ...]:
    """Axes of a mesh, of a part of a spec."""
    return (names,) if isinstance(names, str) else tuple(names or ())
