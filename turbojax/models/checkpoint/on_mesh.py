"""Models whose weights are split over a mesh, read from a checkpoint's files part by part."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import placing
from turbojax.models.checkpoint.placing import Progress, Target
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

_Key = tuple[int | None, tuple[str, ...]]
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
    found = placing.read(dict(_decoder_targets(config, dtype, axes)), tensors, progress)
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
    return {key[1]: array for key, array in placing.read(wanted, tensors).items()}


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
    for path, array in placing.read(targets, tensors, progress).items():
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
    rows = {rows for rows, _ in placing.local_boxes(sharding, shape).values()}
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
) -> Iterator[tuple[_Key, Target]]:
    """The arrays of a `Decoder`: all, or those of the layers `only`; None is outside of layers."""
    mesh, experts = axes.require_mesh(), config.experts
    found: dict[_Key, list[tuple[tuple[int, ...], str, Placement]]] = {}
    shapes: dict[_Key, tuple[tuple[int, ...], np.dtype]] = {}
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
