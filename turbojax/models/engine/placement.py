"""Where an engine runs: on the devices that hold its model's weights.

Arrays that were put on a device (`jax.device_put`) are committed to it, and jax runs there what
reads them. Pools and slots are put beside them. Weights that nobody put anywhere stay on jax's
default device, and so does everything else.

A decoder that is split over a mesh is on all of its devices: each has some heads of every page, and
a part of the vocabulary. A step is one program under `shard_map`. Tables, lengths and tokens are
the same on all devices, and so is what is chosen. The most likely token of all is found among each
device's most likely one by one small gather; only programs that need all logits gather them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turbojax.models.decoder import Decoder, unstack
from turbojax.models.engine.pools import Pools
from turbojax.models.generation.sampling import NOTHING, Kind, SamplingRows, sample
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.layout import gather_logits, hidden_axes, likeliest, share
from turbojax.models.tensor_parallel.placing import shard
from turbojax.models.tensor_parallel.specs import cache_specs
from turbojax.models.transformer import Transformer
from turbojax.sharding import Axes

_T = TypeVar("_T")
Model = Transformer | Decoder | QuantizedDecoder


Place: TypeAlias = jax.Device | NamedSharding | None
"""Where slots are: on a device, on all of a mesh, or wherever jax puts them."""


def replicate(model: Model, axes: Axes | None = None) -> list[Decoder | QuantizedDecoder]:
    """The model once for each part of a mesh that `axes.batch` makes, for an engine each.

    Args:
      model: the model; a `Transformer` is unstacked. One that is split over the mesh already, as
        loaded with it, is taken apart: nothing is copied.
      axes: of a mesh of devices; without axes of a batch there is one part, the whole mesh. Those
        of heads and of the sequence split the model over each part (tensor parallelism). To be left
        out for a model that is split already.

    Returns:
      The same weights on the devices of each part: a decoder that is split over them, or one
      without axes where a part is one device.

    Raises:
      TypeError: if the mesh is an abstract one.
      ValueError: if there is no mesh, or `axes` are not the model's, or the model cannot be split.
      NotImplementedError: if a device belongs to another process; see also
        `turbojax.models.tensor_parallel.layout.check_axes`.
    """
    decoder = unstack(model) if isinstance(model, Transformer) else model
    if decoder.axes is not None:
        if axes is not None and axes != decoder.axes:
            raise ValueError(f"{axes=} must be left out, or the model's own: {decoder.axes}")
        return [_taken_apart(decoder, part) for part in parts_of(decoder.axes)]
    if axes is None:
        raise ValueError(f"{axes=} must be given for a model that is not split")
    return [_put_on(decoder, part) for part in parts_of(axes)]


def _put_on(decoder: Decoder | QuantizedDecoder, part: Axes) -> Decoder | QuantizedDecoder:
    """A whole decoder on the devices of a part."""
    devices = _devices(part)
    if len(devices) == 1:
        return jax.device_put(decoder, devices[0])
    whole: Any = decoder  # of either kind, as the result is
    placed: Decoder | QuantizedDecoder = shard(whole, part)
    return placed


def _taken_apart(decoder: Decoder | QuantizedDecoder, part: Axes) -> Decoder | QuantizedDecoder:
    """What a part of the mesh has of a decoder that is split over all of it."""
    devices, mesh = _devices(part), part.require_mesh()

    def own(x: jax.Array) -> jax.Array:
        there = [shard.data for shard in x.addressable_shards if shard.device in devices]
        if len(devices) == 1:
            return there[0]
        sharding: Any = x.sharding
        held = NamedSharding(mesh, sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, held, there)

    arrays = jax.tree.map(own, decoder)
    return dataclasses.replace(arrays, axes=part if len(devices) > 1 else None)


def parts_of(axes: Axes) -> list[Axes]:
    """The parts of a mesh that `axes.batch` makes, each with the other axes."""
    mesh = axes.require_mesh()
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh} must be one of devices, not an abstract one")
    names = mesh.axis_names
    of_batch = [names.index(name) for name in axes.of_dimension("batch")]
    others = [i for i in range(len(names)) if i not in of_batch]
    shape = [mesh.devices.shape[i] for i in others]
    devices = mesh.devices.transpose(*of_batch, *others).reshape(-1, *shape)
    left, kinds = tuple(names[i] for i in others), tuple(mesh.axis_types[i] for i in others)
    return [
        dataclasses.replace(axes, batch=None, mesh=Mesh(np.asarray(x), left, axis_types=kinds))
        for x in devices
    ]


def place_of(decoder: Decoder | QuantizedDecoder) -> Place:
    """Where a model's weights are: the device to which they are committed, or the mesh."""
    axes = decoder.axes
    if axes is not None:
        _devices(axes)
        if axes.size("batch") > 1:
            raise ValueError(
                f"an engine runs on one part of the axes {axes.of_dimension('batch')}, of which "
                f"there are {axes.size('batch')}: replicate gives the model of each, for Replicas"
            )
        return NamedSharding(axes.require_mesh(), PartitionSpec())
    arrays = [x for x in jax.tree.leaves(decoder) if isinstance(x, jax.Array)]
    found = {device for x in arrays if x.committed for device in x.devices()}
    if len(found) > 1:
        named = ", ".join(sorted(map(str, found)))
        raise ValueError(f"the model's weights are on {named}, must be on one device")
    return next(iter(found), None)


def check_beside(draft: Decoder | QuantizedDecoder, place: Place) -> None:
    """Raises ValueError unless a draft model's weights are at the model's `place_of`."""
    named = [_named(x) for x in (place_of(draft), place)]
    if named[0] != named[1]:
        raise ValueError(f"the draft model is on {named[0]}, must be on {named[1]} like the model")


@contextlib.contextmanager
def made_on(place: Place) -> Iterator[None]:
    """Inside, new arrays are made on the device at once; a mesh or None changes nothing."""
    if not isinstance(place, jax.Device):
        yield
        return
    with jax.default_device(place):
        yield


def put(tree: _T, place: Place) -> _T:
    """Commits a pytree of arrays to the place, the same on all devices; None changes nothing."""
    placed: _T = tree if place is None else jax.device_put(tree, place)
    return placed


def _devices(axes: Axes) -> list[jax.Device]:
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    devices = list(mesh.devices.flat)
    for device in devices:
        if device.process_index != jax.process_index():
            raise NotImplementedError(
                f"{device} of process {device.process_index} is not supported: an engine runs on "
                f"devices of its own process, {jax.process_index()}"
            )
    return devices


def _named(place: Place) -> str:
    if isinstance(place, NamedSharding):
        mesh = place.mesh
        return ", ".join(map(str, mesh.devices.flat)) if isinstance(mesh, Mesh) else str(mesh)
    return "jax's default device" if place is None else str(place)


# Split over a mesh --------------------------------------------------------------------------------


SAME = PartitionSpec()
"""Of arrays that all devices have whole."""


class Vocabulary(NamedTuple):
    """How a vocabulary of `size` tokens is split: each device has the logits of some of them.

    A tuple for the same reason as `programs.PromptProgram`.
    """

    size: int
    axes: Axes | None = None

    @property
    def padded(self) -> int:
        """Columns of an array of logits on all devices together."""
        count = 1
        if self.axes is not None:
            count = self.axes.size("heads") * self.axes.size("sequence")
        return count * share(self.size, count)

    def spec(self, ndim: int) -> PartitionSpec:
        """How logits with so many axes are split; the last axis is the vocabulary."""
        over = hidden_axes(self.axes)
        return PartitionSpec(*[None] * (ndim - 1), over) if over else SAME

    def logits(self, *shape: int) -> jax.ShapeDtypeStruct:
        """Abstract logits ``[..., V]`` as a step returns them, to trace what follows."""
        whole = (*shape, self.padded)
        if self.axes is None:
            return jax.ShapeDtypeStruct(whole, jnp.float32)
        sharding = NamedSharding(self.axes.require_mesh(), self.spec(len(whole)))
        return jax.ShapeDtypeStruct(whole, jnp.float32, sharding=sharding)

    def gathered(self, logits: jax.Array) -> jax.Array:
        """All logits ``[..., V]`` from a device's own, within `run_on`."""
        return gather_logits(logits, self.size, self.axes)

    def sample(self, logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
        """`sample` from a device's own logits ``[R, V / n]``, -inf where it has no token."""
        if kind != "greedy" or not hidden_axes(self.axes):
            return sample(self.gathered(logits), rows, kind)
        best, token = likeliest(logits, self.axes)
        return jnp.where(jnp.isnan(best) | (best == -jnp.inf), NOTHING, token)


def vocabulary_of(decoder: Any) -> Vocabulary:
    """The vocabulary of a `Decoder` or a `QuantizedDecoder`."""
    return Vocabulary(decoder.config.vocab_size, decoder.axes)


def pool_specs(caches: Pools, axes: Axes | None) -> Any:
    """How pools are split, by their KV heads; None without axes.

    With more devices than KV heads several have the same pages, and queries are split over all.
    """
    return None if axes is None else cache_specs(caches, axes)


def page_specs(caches: Pools, axes: Axes | None) -> Any:
    """How the arrays that `paged.read_pages` takes from each pool are split."""
    if axes is None:
        return None
    return tuple(
        {
            name: getattr(specs, name)
            for name in type(pool).PAGE_ARRAYS
            if getattr(pool, name) is not None
        }
        for pool, specs in zip(caches, cache_specs(caches, axes), strict=True)
    )


def run_on(
    run: Callable[..., Any], axes: Axes | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`run` on every device of the axes' mesh, for use within `jit`; without axes `run` itself.

    `run` takes and returns a device's part of each array, split as the specs say.
    """
    if axes is None:
        return run
    # Not checked, as in `turbojax.models.tensor_parallel.programs`.
    return jax.shard_map(
        run, mesh=axes.require_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
