"""What a process reads of packed weights that are split over a mesh.

Codes and scales are most of a folder: only the rows or columns that the process's devices have are
read. Zero points, and which group each input is in, are read whole: all processes must agree on
whether there are any.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from turbojax.matmul.int4.layout import BLOCK, stored_inputs
from turbojax.models.checkpoint.int4_on_mesh import inner_rows
from turbojax.models.checkpoint.packed.codes import PackedFormat, Places
from turbojax.models.checkpoint.sparse import Sparse
from turbojax.models.config import TransformerConfig
from turbojax.models.families.tensors import TensorSpec
from turbojax.models.tensor_parallel.layout import parts, share
from turbojax.sharding.axes import Axes

_INDEX = ("g_idx", "weight_g_idx")


def want(
    tensors: Mapping[str, Sparse],
    linears: Iterable[tuple[str, TensorSpec]],
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes,
    numbers: Iterable[int],
) -> None:
    """Marks what devices, numbered along `hidden_axes`, need of one layer's linear layers.

    `linears` are the stored ones, each with the beginning of its tensors' names.
    """
    linears, numbers = list(linears), list(numbers)
    # With act-order a device's groups may have any inputs, which are outputs of the layers before.
    is_ordered = any(
        _is_ordered(tensors, stem, packing)
        for stem, spec in linears
        if _names(spec) == ("down_proj",)
    )
    for stem, spec in linears:
        any_inner = is_ordered and spec.placements[0].path[-3] == "mlp"
        for part in packing.parts(*spec.shape):
            tensor = tensors.get(f"{stem}.{part}")
            if tensor is None:
                continue
            places = packing.places.get(part)
            if places is None or any_inner:
                tensor.want_all()
                continue
            for number in numbers:
                _want_part(tensor, places, spec, config, packing, axes, number)


def _want_part(
    tensor: Sparse,
    places: Places,
    spec: TensorSpec,
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes,
    number: int,
) -> None:
    """Marks one device's rows or columns of codes or scales."""
    kinds = [kind for kind, _ in places]
    [name, *_] = _names(spec)
    if name not in ("o_proj", "down_proj"):
        axis = kinds.index("outputs")
        tensor.want(axis, _units(_outputs(spec, config, packing, axes, number), places[axis][1]))
        return
    inputs, group = spec.shape[1], _group(packing)
    each = share(inputs, parts(axes), group) if name == "down_proj" else inputs // parts(axes)
    first = number * each
    if "inputs" in kinds:
        axis, columns = kinds.index("inputs"), np.arange(first, min(first + each, inputs))
        tensor.want(axis, _units(columns, places[axis][1]))
        return
    # Padding has the scale of the group that it would lie in.
    axis, columns = kinds.index("groups"), np.arange(first, first + stored_inputs(each, group))
    tensor.want(axis, _units(np.minimum(columns, inputs - 1), packing.group_size or inputs))


def _outputs(
    spec: TensorSpec, config: TransformerConfig, packing: PackedFormat, axes: Axes, number: int
) -> np.ndarray:
    """A device's outputs of a stored linear layer, which may hold several of the model's."""
    width, found = config.head_dim, []
    for name, place in zip(_names(spec), spec.placements, strict=True):
        start, size = (0, spec.shape[0]) if place.rows is None else place.rows
        size -= start
        if name in ("gate_proj", "up_proj"):
            each = share(size, parts(axes), _group(packing))
            rows = inner_rows(size, axes, number, each)
        else:
            is_query = name == "q_proj"
            heads = config.num_heads if is_query else config.num_kv_heads
            count = parts(axes) if is_query else axes.size("heads")
            index = number if is_query else number // axes.size("sequence")
            each = heads // count * width
            rows = np.arange(index * each, (index + 1) * each)
        found.append(start + rows)
    return np.concatenate(found)


def _group(packing: PackedFormat) -> int:
    """The group size of the `Int4Weight` that is made, at most a block."""
    return min(packing.group_size or BLOCK, BLOCK)


def _units(places: np.ndarray, each: int) -> np.ndarray:
    return np.unique(places // each)


def _names(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(place.path[-2] for place in spec.placements)


def _is_ordered(tensors: Mapping[str, Sparse], stem: str, packing: PackedFormat) -> bool:
    """Whether a layer's groups are not runs of inputs."""
    for name in _INDEX:
        tensor = tensors.get(f"{stem}.{name}")
        if tensor is None:
            continue
        groups = tensor.look()
        size = packing.group_size or groups.size
        runs = np.arange(groups.size) // size
        # -1 means that groups are not known, and inputs are in order.
        return bool((groups >= 0).all()) and not np.array_equal(groups, runs)
    return False
