"""Models whose weights are split over a mesh: a process reads its devices' parts of the files.

An array of the model is made of one tensor, some of its rows or columns, or a stack of tensors.
Arrays that share tensors are made together, so that no byte is read twice. One device's part is
read, cast, and sent there before the next device's: besides the model, the host holds one tensor,
or one device's part of a stack.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint.folder import Box, whole_box
from turbojax.models.config import STACKS, TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.families.tensors import (
    Placement,
    TensorSpec,
    checkpoint_tensors,
    stacked,
)
from turbojax.models.tensor_parallel.layout import axes_of_model, stored_config
from turbojax.models.tensor_parallel.specs import spec_of
from turbojax.models.transformer import Transformer
from turbojax.sharding.axes import Axes, Names

_Key = TypeVar("_Key", bound=Hashable)
Progress = Callable[[int, int], None]
"""Called after each tensor with the bytes read so far and the bytes to read in all."""


class Counted:
    """Tells `progress`, if there is one, how many of `total` bytes are read."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        """Adds so many bytes."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclasses.dataclass(frozen=True)
class Target:
    """An array of the model, over all devices, and the tensors that it is made of.

    `sources` have an index into its leading axes, a tensor's name, and which part of it. Where
    `shape` is larger than what the tensors hold, zeros are added at the end.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    sources: tuple[tuple[tuple[int, ...], str, Placement], ...]

    @property
    def is_transposed(self) -> bool:
        """Whether tensors hold the last two axes in the other order."""
        return self.sources[0][2].transpose

    @property
    def stored(self) -> "Target":
        """The same target with its axes in the tensors' order."""
        if not self.is_transposed:
            return self
        *lead, one, two = self.shape
        spec = (*self.sharding.spec, *[None] * (len(self.shape) - len(self.sharding.spec)))
        sharding = NamedSharding(self.sharding.mesh, PartitionSpec(*spec[:-2], spec[-1], spec[-2]))
        sources = tuple(
            (index, name, dataclasses.replace(x, transpose=False))
            for index, name, x in self.sources
        )
        return Target((*lead, two, one), self.dtype, sharding, sources)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """One copy from a tensor, of which `box` and its `columns` go into a device's part of an array.

    `target` is the array's number and `index` that in the part's leading axes; `size` is how much
    of the part's other axes is filled, the rest is zeros.
    """

    target: int
    index: tuple[int, ...]
    name: str
    box: Box
    columns: tuple[int, int] | None
    size: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Part:
    """What some devices hold alike of arrays that share tensors, so that it is read once."""

    devices: tuple[jax.Device, ...]
    boxes: tuple[Box, ...]
    copies: tuple[_Copy, ...]


def read(
    targets: Mapping[_Key, Target],
    tensors: Mapping[str, _folder.Stored],
    progress: Progress | None = None,
) -> dict[_Key, jax.Array]:
    """Reads arrays; `progress` counts the bytes that this process reads."""
    groups = [[targets[key].stored for key in keys] for keys in _groups(targets)]
    plans = [_parts(group, tensors) for group in groups]
    total = sum(_cost(x, tensors) for plan in plans for x in _reads(plan))
    counted, found = Counted(progress, total), dict[_Key, jax.Array]()

    def count(tensor: tuple[str, Box]) -> None:
        counted.add(_cost(tensor, tensors))

    for keys, group, plan in zip(_groups(targets), groups, plans, strict=True):
        arrays = _read_group(group, plan, tensors, count)
        for key, array in zip(keys, arrays, strict=True):
            target = targets[key]
            if target.is_transposed:
                array = _transposed(target.sharding)(array)
            found[key] = jax.block_until_ready(array)
    return found


def local_devices(sharding: NamedSharding) -> frozenset[jax.Device]:
    """The devices that this process has data for."""
    return frozenset(sharding.addressable_devices)


def local_boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """What each of this process's devices holds of an array."""
    own = local_devices(sharding)
    return {
        device: tuple(
            (x.start or 0, size if x.stop is None else x.stop)
            for x, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
        if device in own
    }


def assemble(
    shape: tuple[int, ...], sharding: NamedSharding, parts: Mapping[jax.Device, jax.Array]
) -> jax.Array:
    """The array of the parts that this process's devices hold."""
    return jax.make_array_from_single_device_arrays(shape, sharding, list(parts.values()))


def _put(part: np.ndarray, devices: Sequence[jax.Device]) -> dict[jax.Device, jax.Array]:
    return {device: jax.device_put(part, device) for device in devices}


def _groups(targets: Mapping[_Key, Target]) -> list[list[_Key]]:
    """Groups of arrays that share tensors, in the order in which they are given."""
    groups: dict[_Key, list[_Key]] = {}
    first_of: dict[str, _Key] = {}
    for key, target in targets.items():
        names = [name for _, name, _ in target.sources]
        first = next((first_of[name] for name in names if name in first_of), key)
        groups.setdefault(first, []).append(key)
        first_of |= dict.fromkeys(names, first)
    return list(groups.values())


def _parts(group: Sequence[Target], tensors: Mapping[str, _folder.Stored]) -> list[_Part]:
    """What devices hold of arrays that share tensors, one entry for devices that hold the same."""
    boxes = [local_boxes(x.sharding, x.shape) for x in group]
    devices: dict[tuple[Box, ...], list[jax.Device]] = {}
    for device in boxes[0]:
        devices.setdefault(tuple(x[device] for x in boxes), []).append(device)
    parts = []
    for held, holders in devices.items():
        copies = [
            copy
            for number, (target, box) in enumerate(zip(group, held, strict=True))
            for copy in _copies(number, target, box, tensors)
        ]
        # Copies of one tensor one after the other, and tensors in the order of their file.
        copies.sort(key=lambda x: (str(tensors[x.name].file), tensors[x.name].begin))
        parts.append(_Part(tuple(holders), held, tuple(copies)))
    return parts


def _copies(
    number: int, target: Target, box: Box, tensors: Mapping[str, _folder.Stored]
) -> Iterator[_Copy]:
    """The copies that fill the part `box` of an array."""
    for index, name, placement in target.sources:
        lead, rest = box[: len(index)], box[len(index) :]
        if not all(first <= i < last for i, (first, last) in zip(index, lead, strict=True)):
            continue
        shape = list(tensors[name].shape)
        offset, step = 0, 1
        if placement.rows is not None:
            offset = placement.rows[0]
            shape[0] = placement.rows[1] - offset
        if placement.columns is not None:
            step = placement.columns[1]
            shape[-1] //= step
        held = [(min(a, n), min(b, n)) for (a, b), n in zip(rest, shape, strict=True)]
        if any(a == b for a, b in held):
            continue
        wanted = list(held)
        if placement.rows is not None:
            wanted[0] = (held[0][0] + offset, held[0][1] + offset)
        if placement.columns is not None:
            wanted[-1] = (held[-1][0] * step, held[-1][1] * step)
        yield _Copy(
            number,
            tuple(i - first for i, (first, _) in zip(index, lead, strict=True)),
            name,
            tuple(wanted),
            placement.columns,
            tuple(b - a for a, b in held),
        )


def _reads(plan: Sequence[_Part]) -> list[tuple[str, Box]]:
    """What is read of which tensor.

    If all parts come from one tensor, the smallest box around them is read once, unless that is
    more than the parts together. So the parts of a row are read together and cut up here.
    """
    wanted = [dict.fromkeys((x.name, x.box) for x in part.copies) for part in plan]
    every = list(dict.fromkeys(x for part in wanted for x in part))
    if len({name for name, _ in every}) == 1:
        boxes = [box for _, box in every]
        around = tuple(
            (min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*boxes, strict=True)
        )
        if _volume(around) <= sum(map(_volume, boxes)):
            return [(every[0][0], around)]
    return [x for part in wanted for x in part]


def _read_group(
    group: Sequence[Target],
    plan: Sequence[_Part],
    tensors: Mapping[str, _folder.Stored],
    count: Callable[[tuple[str, Box]], None],
) -> list[jax.Array]:
    """Reads arrays that share tensors."""
    reads = _reads(plan)
    together = reads[0] if len(reads) == 1 else None
    last, content = None, np.empty(0)

    def take(copy: _Copy, dtype: np.dtype) -> np.ndarray:
        nonlocal last, content
        wanted = together or (copy.name, copy.box)
        if wanted != last:
            content = np.empty(0)  # Before the next one is there.
            name, last = copy.name, wanted
            content = _folder.cast(tensors[name].read_box(wanted[1]), dtype, name)
            count(wanted)
        part = content[
            tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(copy.box, wanted[1], strict=True))
        ]
        if copy.columns is not None:
            part = part[..., copy.columns[0] :: copy.columns[1]]
        return part

    held: list[dict[jax.Device, jax.Array]] = [{} for _ in group]
    for part in plan:
        own: list[np.ndarray | None] = [None for _ in group]
        for copy in part.copies:
            target, box = group[copy.target], part.boxes[copy.target]
            shape = tuple(last - first for first, last in box)
            found = take(copy, target.dtype)
            if found.shape == shape:
                own[copy.target] = np.ascontiguousarray(found)
                continue
            whole = own[copy.target]
            if whole is None:
                whole = own[copy.target] = np.zeros(shape, target.dtype)
            whole[copy.index][tuple(slice(0, size) for size in copy.size)] = found
        for i, (array, box) in enumerate(zip(own, part.boxes, strict=True)):
            if array is None:
                array = np.zeros([last - first for first, last in box], group[i].dtype)
            held[i] |= _put(array, part.devices)
    return [assemble(x.shape, x.sharding, y) for x, y in zip(group, held, strict=True)]


def _volume(box: Box) -> int:
    return math.prod(last - first for first, last in box)


def _cost(tensor: tuple[str, Box], tensors: Mapping[str, _folder.Stored]) -> int:
    """About how many bytes a part of a tensor has."""
    stored = tensors[tensor[0]]
    return stored.nbytes * _volume(tensor[1]) // max(1, _volume(whole_box(stored.shape)))


@functools.lru_cache(maxsize=256)
def _transposed(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A program that exchanges the last two axes; each device already has the numbers it needs."""
    return jax.jit(lambda x: jnp.swapaxes(x, -1, -2), out_shardings=sharding)


_Array = tuple[int | None, tuple[str, ...]]
"""An array of a `Decoder`: its layer, or None, and its path."""


def axes_of(mesh: Mesh | Axes) -> Axes:
    """The axes of a loader's `mesh`; TypeError or ValueError if it is not one that fits."""
    if not isinstance(mesh, Mesh | Axes):
        raise TypeError(f"mesh is a {type(mesh).__name__}, must be a jax.sharding.Mesh or Axes")
    axes = Axes.of(mesh) if isinstance(mesh, Mesh) else mesh
    if not isinstance(axes.require_mesh(), Mesh):
        raise ValueError(f"the mesh of {axes} must be one of devices")
    return axes


def decoder_axes(config: TransformerConfig, mesh: Mesh | Axes | None) -> Axes | None:
    """The axes of a decoder that is loaded onto a mesh, None without one; see `axes_of_model`."""
    return None if mesh is None else axes_of_model(config, axes_of(mesh))


def read_decoder(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    dtype: np.dtype,
    axes: Axes,
    progress: Progress | None,
) -> Decoder:
    """Reads a decoder, split as `partition_specs` says; for `axes` see `axes_of_model`."""
    found = read(dict(_decoder_targets(config, dtype, axes)), tensors, progress)
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for (layer, path), array in found.items():
        if layer is not None:
            insert(layers[layer], path, array)
    return Decoder(
        embedding=found[None, ("embedding",)],
        layers=tuple(layers),
        norm=found[None, ("norm", "scale")],
        lm_head=found.get((None, ("lm_head",))),
        config=config,
        dtype=dtype,
        axes=axes,
    )


def read_parts(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    dtype: np.dtype,
    axes: Axes,
    layer: int | None,
    path: tuple[str, ...] | None = None,
) -> dict[tuple[str, ...], jax.Array]:
    """The arrays of one layer, or for None of what lies outside; with a `path` only that one."""
    wanted = {
        key: target
        for key, target in _decoder_targets(config, dtype, axes, layer)
        if path in (None, key[1])
    }
    return {key[1]: array for key, array in read(wanted, tensors).items()}


def read_transformer(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    dtype: np.dtype,
    axes: Axes,
    progress: Progress | None,
) -> Transformer:
    """Reads a `Transformer`, each array split as `transformer_spec` says; see `read_decoder`."""
    model = nnx.eval_shape(lambda: Transformer(config, param_dtype=dtype, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    mesh = axes.require_mesh()
    sources: dict[tuple[str, ...], list[Any]] = {}
    dtypes = {}
    for spec in checkpoint_tensors(config):
        for one in spec.placements:
            place = stacked(one, config)
            sources.setdefault(place.path, []).append((_index(place), spec.name, place))
            dtypes[place.path] = spec.dtype(dtype)
    targets: dict[tuple[str, ...], Target] = {}
    for path, found in sources.items():
        shape = variable(state, path).get_value().shape
        sharding = NamedSharding(mesh, transformer_spec(path, shape, config, axes))
        targets[path] = Target(shape, dtypes[path], sharding, tuple(found))
    for path, array in read(targets, tensors, progress).items():
        variable(state, path).set_value(array)
    nnx.update(model, state)
    return model


def transformer_spec(
    path: tuple[str, ...], shape: tuple[int, ...], config: TransformerConfig, axes: Axes
) -> P:
    """How an array of a `Transformer`, which runs by automatic sharding, is split.

    Over `axes.heads` it is split as in a `Decoder`. A matrix is also split over all other axes,
    along its first dimension that is not split yet, as in `Trainer`. Dimensions that the number of
    devices does not divide stay whole. `path` is the array's path in the model's state; arrays of
    blocks, whose path begins with one of `STACKS`, have a leading axis of layers.
    """
    lead = 1 if path[0] in STACKS else 0
    heads = Axes(heads=axes.heads, mesh=axes.mesh)
    one = spec_of(path[lead:], len(shape) - lead, config, heads)
    found: list[Names] = [*[None] * lead, *one]
    found += [None] * (len(shape) - len(found))
    count = axes.size("heads")
    found = [None if x and n % count else x for x, n in zip(found, shape, strict=True)]
    others = (*axes.of_dimension("batch"), *axes.of_dimension("sequence"))
    count = axes.size("batch") * axes.size("sequence")
    if others and len(shape) >= lead + 2:
        free = (i for i in range(lead, len(shape)) if not found[i] and shape[i] % count == 0)
        at = next(free, None)
        if at is not None:
            found[at] = others
    return P(*found)


def table_rows(config: TransformerConfig, axes: Axes) -> list[tuple[int, int]]:
    """The rows of a decoder's table of embeddings that this process holds, in order."""
    shape = (stored_config(config, axes).vocab_size, config.hidden_size)
    sharding = NamedSharding(axes.require_mesh(), spec_of(("embedding",), 2, config, axes))
    rows = {rows for rows, _ in local_boxes(sharding, shape).values()}
    return [(min(a, config.vocab_size), min(b, config.vocab_size)) for a, b in sorted(rows)]


def insert(tree: dict[str, Any], path: tuple[str, ...], array: jax.Array) -> None:
    """Puts an array at its path in nested dicts."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = array


def variable(state: Any, path: tuple[str, ...]) -> Any:
    """The variable at this path of a model's state."""
    for key in path:
        state = state[key]
    return state


def _decoder_targets(
    config: TransformerConfig, dtype: np.dtype, axes: Axes, *only: int | None
) -> Iterator[tuple[_Array, Target]]:
    """The arrays of a `Decoder`: all, or those of the layers `only`; None is outside of layers."""
    mesh, experts = axes.require_mesh(), config.experts
    found: dict[_Array, list[tuple[tuple[int, ...], str, Placement]]] = {}
    shapes: dict[_Array, tuple[tuple[int, ...], np.dtype]] = {}
    padded = checkpoint_tensors(stored_config(config, axes))
    for spec, larger in zip(checkpoint_tensors(config), padded, strict=True):
        for place, wide in zip(spec.placements, larger.placements, strict=True):
            if only and place.layer not in only:
                continue
            key = place.layer, place.path if place.layer is None else place.path[1:]
            index = () if place.expert is None else (place.expert,)
            found.setdefault(key, []).append((index, spec.name, place))
            shape = _shape_of(larger, wide)
            if place.expert is not None and experts is not None:
                shape = (experts.count, *shape)
            shapes[key] = shape, spec.dtype(dtype)
    for key, sources in found.items():
        shape, kind = shapes[key]
        sharding = NamedSharding(mesh, spec_of(key[1], len(shape), config, axes))
        yield key, Target(shape, kind, sharding, tuple(sources))


def _shape_of(spec: TensorSpec, place: Placement) -> tuple[int, ...]:
    """The shape of the part of a tensor that goes to one of its places."""
    shape = list(spec.shape)
    if place.rows is not None:
        shape[0] = place.rows[1] - place.rows[0]
    if place.columns is not None:
        shape[-1] //= place.columns[1]
    return tuple(reversed(shape)) if place.transpose else tuple(shape)


def _index(place: Placement) -> tuple[int, ...]:
    return tuple(x for x in (place.layer, place.expert) if x is not None)
