"""Tensors of which a process reads only some rows or columns; the others are zeros on the host."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from turbojax.models.checkpoint.folder import Stored, whole_box
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding.axes import Axes


class Sparse:
    """A tensor of a file, with the places along one axis that are to be read."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._axis = 0
        self._wanted: np.ndarray | None = None
        self._is_whole = False
        self._kept: np.ndarray | None = None

    def want_all(self) -> None:
        """Marks the whole tensor to be read."""
        self._is_whole = True

    def look(self) -> np.ndarray:
        """Reads the whole now and keeps it, because what else to read depends on it."""
        self.want_all()
        if self._kept is None:
            self._kept = self.read()
        return self._kept

    def want(self, axis: int, places: np.ndarray) -> None:
        """Marks these places along an axis to be read; all calls must name the same axis."""
        if self._wanted is None:
            self._axis, self._wanted = axis, np.zeros(self.stored.shape[axis], bool)
        assert axis == self._axis
        self._wanted[places] = True

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted."""
        if self._is_whole or self._wanted is None:
            return self.stored.nbytes if self._is_whole else 0
        return self.stored.nbytes * int(self._wanted.sum()) // max(1, self._wanted.size)

    def read(self) -> np.ndarray:
        """The tensor, with zeros at places that are not marked."""
        if self._is_whole:
            return self.stored.read() if self._kept is None else self._kept
        array = np.zeros(self.stored.shape, self.stored.numpy_dtype)
        if self._wanted is None:
            return array
        box = whole_box(self.stored.shape)
        before, after = box[: self._axis], box[self._axis + 1 :]
        edges = np.flatnonzero(np.diff(self._wanted, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            run = (*(slice(None),) * self._axis, slice(first, last))
            array[run] = self.stored.read_box((*before, (first, last), *after))
        return array


def own_numbers(axes: Axes) -> list[int]:
    """The parts of a model, counted along `hidden_axes`, that this process's devices hold."""
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    names = list(mesh.axis_names)
    over = [names.index(name) for name in hidden_axes(axes)]
    shape = [mesh.devices.shape[axis] for axis in over]
    found = set()
    for place in np.ndindex(*mesh.devices.shape):
        device: Any = mesh.devices[place]
        if device.process_index == jax.process_index():
            index = [place[axis] for axis in over]
            found.add(int(np.ravel_multi_index(index, shape)) if over else 0)
    return sorted(found)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Within this context arrays are made in the host's memory, if jax has a CPU backend."""
    try:
        [device, *_] = jax.local_devices(backend="cpu")
    except RuntimeError:
        yield
        return
    with jax.default_device(device):
        yield


def wanted_bytes(tensors: Mapping[str, Sparse]) -> int:
    """Bytes that will be read."""
    return sum(x.nbytes for x in tensors.values())
