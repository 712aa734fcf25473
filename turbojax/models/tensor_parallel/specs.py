"""How every array of a decoder and of its caches is split over a mesh, and made of its parts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding import Axes
from turbojax.sharding.axes import DIMENSIONS, Names

AnyDecoder = TypeVar("AnyDecoder", bound=Any)

_OUTPUTS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")
_KV = ("k_proj", "v_proj", "k_norm")


def partition_specs(decoder: AnyDecoder, axes: Axes | None = None) -> AnyDecoder:
    """The decoder with a `PartitionSpec` in place of each array.

    Args:
      decoder: a `Decoder` or a `QuantizedDecoder`, whose arrays may be abstract.
      axes: over which it is split; its own if not given.

    Returns:
      A pytree of the decoder's structure.
    """
    axes = decoder.axes if axes is None else axes

    if axes is None:
        whole: AnyDecoder = jax.tree.map(lambda _: PartitionSpec(), decoder)
        return whole
    return specs_of_part(decoder, decoder.config, axes)


def specs_of_part(part: AnyDecoder, config: TransformerConfig, axes: Axes) -> AnyDecoder:
    """`partition_specs` of a decoder, or of one of its layers; arrays may be abstract."""

    def of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        names = tuple(_name(key) for key in path if not isinstance(key, SequenceKey))
        names = names[1:] if names[0] == "layers" else names
        # A layer of a `Decoder` is a dictionary, and one of a `QuantizedDecoder` an object.
        is_float = any(isinstance(key, DictKey) for key in path[1:])
        if is_float or names[0] in ("embedding", "lm_head", "norm"):
            return spec_of(names, leaf.ndim, config, axes)
        return int4_spec_of(names, leaf.ndim, config, axes)

    specs: AnyDecoder = jax.tree_util.tree_map_with_path(of, part)
    return specs


def shardings(decoder: AnyDecoder, axes: Axes | None = None) -> AnyDecoder:
    """`partition_specs` on the mesh."""
    axes = decoder.axes if axes is None else axes
    mesh = axes.require_mesh()
    specs: AnyDecoder = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), partition_specs(decoder, axes)
    )
    return specs


def spec_of(
    path: tuple[str, ...], ndim: int, config: TransformerConfig, axes: Axes
) -> PartitionSpec:
    """How an array of a `Decoder` with `ndim` axes is split.

    `path` is ``("embedding",)``, or within a layer ``("attention", "q_proj", "kernel")``, as in
    `Block`.
    """
    if path[0] in ("embedding", "lm_head"):
        return _split(0, ndim, hidden_axes(axes))
    if path[0] not in ("attention", "mlp"):
        return PartitionSpec()
    names = axes.of_dimension("heads") if path[1] in _KV else hidden_axes(axes)
    layer = path[-2]
    if path[-1] == "sinks" or (config.joint_qk_norm and layer in ("q_norm", "k_norm")):
        return _split(0, ndim, names)
    if layer in _OUTPUTS or layer in ("k_proj", "v_proj"):
        return PartitionSpec() if path[-1] == "lora_a" else _split(ndim - 1, ndim, names)
    if layer in _INPUTS and path[-1] in ("kernel", "lora_a"):
        return _split(ndim - 2, ndim, names)
    return PartitionSpec()


def int4_spec_of(
    path: tuple[str, ...], ndim: int, config: TransformerConfig, axes: Axes
) -> PartitionSpec:
    """How an array of a `QuantizedDecoder` is split: by devices, see `placing.local_layer`.

    `path` is as ``("qkv", "weight", "codes")``, or ``("mlp", "down", "codes")`` of experts.
    """
    names, last = hidden_axes(axes), path[-1]
    if last in ("q_norm", "sinks"):
        return _split(0, ndim, names)
    if last in ("k_norm", "key_channel_scale"):
        return _split(0, ndim, axes.of_dimension("heads"))
    lead = 1 if _is_of_experts(path) else 0
    if path[0] == "qkv" or path[:2] in (("mlp", "gate_up"), ("mlp", "gate_up_bias")):
        if last in ("inputs", "a"):
            return PartitionSpec()
        return _split(lead, ndim, names)
    if path[0] == "o" or path[:2] in (("mlp", "down"), ("mlp", "down_bias")):
        if last in ("codes", "scales", "zeros", "a"):
            return _split(lead + 1, ndim, names)
        if last in ("bias", "down_bias"):
            return _split(lead, ndim, names)
    return PartitionSpec()


def _is_of_experts(path: tuple[str, ...]) -> bool:
    """Whether an array has an axis of experts, whose weights are in no linear layers."""
    if path[:2] in (("mlp", "gate_up_bias"), ("mlp", "down_bias")):
        return True
    weights = ("codes", "scales", "zeros", "output_scale")
    return len(path) == 3 and path[0] == "mlp" and path[2] in weights


def cache_specs(caches: Any, axes: Axes) -> Any:
    """A model's or a layer's caches with a `PartitionSpec` in place of each array.

    Arrays may be abstract. Pages are split as sequences are: every device has those of its own
    sequences, and tables count them from the device's first one.
    """

    def of(dims: str, leaf: Any) -> PartitionSpec:
        return PartitionSpec(*(_of_letter(x, axes) for x in dims[: leaf.ndim]))

    def walk(x: Any, dims: str | None) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(walk(part, dims) for part in x)
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return None if x is None else of(dims or "", x)
        table: dict[str, str] = getattr(type(x), "AXES", {})
        changed = {
            field.name: walk(getattr(x, field.name), table.get(field.name))
            for field in dataclasses.fields(x)
            if not field.metadata.get("static")
        }
        return dataclasses.replace(x, **changed)

    return walk(caches, None)


def _of_letter(letter: str, axes: Axes) -> Names:
    dimension = "batch" if letter == "P" else DIMENSIONS.get(letter)
    if dimension is None:
        return None
    names = axes.of_dimension(dimension)
    return names[0] if len(names) == 1 else names or None


def _split(axis: int, ndim: int, names: tuple[str, ...]) -> PartitionSpec:
    if not names:
        return PartitionSpec()
    found: list[Names] = [None] * ndim
    found[axis] = names[0] if len(names) == 1 else names
    return PartitionSpec(*found)


def _name(key: Any) -> str:
    return key.name if isinstance(key, GetAttrKey) else str(key.key)


def owners(axes: Axes) -> dict[int, list[jax.Device]]:
    """The devices of this process, by their number along `hidden_axes`."""
    mesh = axes.require_mesh()
    assert isinstance(mesh, Mesh)
    names = list(mesh.axis_names)
    over = [names.index(name) for name in hidden_axes(axes)]
    shape = [mesh.devices.shape[axis] for axis in over]
    found: dict[int, list[jax.Device]] = {}
    for place in np.ndindex(*mesh.devices.shape):
        device: Any = mesh.devices[place]
        if device.process_index == jax.process_index():
            number = int(np.ravel_multi_index([place[axis] for axis in over], shape)) if over else 0
            found.setdefault(number, []).append(device)
    return found


def assemble(part: Callable[[int], Any], specs: Callable[[Any], Any], axes: Axes) -> Any:
    """Global arrays from what each device has, following each other along the axes the specs name.

    `part` returns the arrays of the device with this number along `hidden_axes`, a pytree that is
    alike for all, and is called once for each number of which this process has a device. `specs`
    gives that pytree with a `PartitionSpec` in place of each array.
    """
    held: dict[jax.Device, list[jax.Array]] = {}
    tree: Any = None
    for number, devices in owners(axes).items():
        mine = part(number)
        leaves, found = jax.tree.flatten(mine)
        if tree is None:
            tree, wanted = found, jax.tree.leaves(specs(mine))
        elif found != tree:
            raise ValueError(f"parts must be alike, but part {number} is {found}, not {tree}")
        for device in devices:
            held[device] = [jax.device_put(leaf, device) for leaf in leaves]
    arrays = [
        _join([own[i] for own in held.values()], NamedSharding(axes.require_mesh(), spec))
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


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_split(make: Callable[[], Any], axes: Axes) -> Any:
    """The caches that each device makes for itself, as one: no device holds more than its part.

    `make`, for the sequences and KV heads of one device, must be hashable, and equal to others that
    make the same.
    """
    return jax.shard_map(
        make,
        mesh=axes.require_mesh(),
        in_specs=(),
        out_specs=cache_specs(jax.eval_shape(make), axes),
        check_vma=False,
    )()


def whole_slots(max_length: int, slots: Iterable[int], axes: Axes | None) -> int:
    """The next length of caches that gives all devices of the sequence's axis as many slots.

    `slots` says how many tokens a slot of each layer holds.
    """
    count = 1 if axes is None else axes.size("sequence")
    if count == 1:
        return max_length
    multiple = count * math.lcm(*slots)
    return -(-max_length // multiple) * multiple


def check_batch(batch_size: int, axes: Axes | None) -> None:
    """Raises ValueError unless there are as many sequences on all devices."""
    count = 1 if axes is None else axes.size("batch")
    if batch_size % count:
        assert axes is not None
        raise ValueError(
            f"{batch_size} sequences must be a multiple of {count}, the devices of the axes "
            f"{axes.of_dimension('batch')}"
        )
