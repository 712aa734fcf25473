"""Where an engine runs: on the devices that hold its model's weights.

Arrays that were put on a device (`jax.device_put`) are committed to it, and jax runs what reads
them there. Pools and slots are put beside them. Weights that nobody put anywhere stay with jax's
default device, and so does all else.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from turbojax.models.decoder import Decoder, unstack
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.transformer import Transformer
from turbojax.sharding import Axes

_T = TypeVar("_T")
Model = Transformer | Decoder | QuantizedDecoder


def replicate(
    model: Transformer | Decoder | QuantizedDecoder, axes: Axes
) -> list[Decoder | QuantizedDecoder]:
    """The model once for each part of a mesh that `axes.batch` makes, for an engine each.

    Args:
      model: the model; a `Transformer` is unstacked.
      axes: of a mesh of devices; without axes of a batch there is one part, the whole mesh.

    Returns:
      The same weights, committed to the devices of each part. What is there already is not copied.

    Raises:
      ValueError: if there is no mesh.
      TypeError: if its devices are not known: it is an abstract one.
      NotImplementedError: if a part has several devices.
    """
    decoder = unstack(model) if isinstance(model, Transformer) else model
    parts = parts_of(axes)
    for part in parts:
        if part.size > 1:
            raise NotImplementedError(f"a replica on {part.size} devices, must be 1")
    return [jax.device_put(decoder, part.devices.item()) for part in parts]


def parts_of(axes: Axes) -> list[Mesh]:
    """The parts of a mesh that `axes.batch` makes, each with all other axes.

    Raises:
      ValueError: if there is no mesh.
      TypeError: if it is an abstract one.
    """
    mesh = axes.require_mesh()
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh} must be one of devices, not an abstract one")
    names = mesh.axis_names
    of_batch = [names.index(name) for name in axes.batch or ()]
    others = [i for i in range(len(names)) if i not in of_batch]
    shape = [mesh.devices.shape[i] for i in others]
    devices = mesh.devices.transpose(*of_batch, *others).reshape(-1, *shape)
    kinds = tuple(mesh.axis_types[i] for i in others)
    return [Mesh(np.asarray(x), tuple(names[i] for i in others), axis_types=kinds) for x in devices]


def device_of(weights: Any) -> jax.Device | None:
    """The device to which a model's weights are committed; None if to none.

    Args:
      weights: a pytree of arrays.

    Raises:
      ValueError: if they are on several.
    """
    arrays = [x for x in jax.tree.leaves(weights) if isinstance(x, jax.Array)]
    found = {device for x in arrays if x.committed for device in x.devices()}
    if len(found) > 1:
        raise ValueError(f"the model's weights are on {_named(found)}, must be on one device")
    return next(iter(found), None)


def check_beside(draft: Any, device: jax.Device | None) -> None:
    """Raises ValueError unless a draft model's weights are where the model's are.

    Args:
      draft: its weights.
      device: of the model, see `device_of`.
    """
    found = device_of(draft)
    if found != device:
        where = ["jax's default device" if x is None else str(x) for x in (found, device)]
        raise ValueError(f"the draft model is on {where[0]}, must be on {where[1]} like the model")


@contextlib.contextmanager
def made_on(device: jax.Device | None) -> Iterator[None]:
    """Inside, new arrays are made on a device, and nowhere else before."""
    if device is None:
        yield
        return
    with jax.default_device(device):
        yield


def put(tree: _T, device: jax.Device | None) -> _T:
    """A pytree of arrays, committed to the device; as it is for None."""
    placed: _T = tree if device is None else jax.device_put(tree, device)
    return placed


def _named(devices: set[jax.Device]) -> str:
    return ", ".join(sorted(map(str, devices)))
