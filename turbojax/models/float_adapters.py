"""Low-rank adapters in the layers of a `Decoder`, beside its weights or merged into them.

Adapters of a layer are pairs by the names of linear layers, float32 ``[in, R]`` and ``[R, out]``,
scaled: what `turbojax.flax.projections.AdaptedLinear` holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import LayerParams, adapted_linears
from turbojax.models.tensor_parallel.assembling import axes_named
from turbojax.models.tensor_parallel.layout import share
from turbojax.models.tensor_parallel.specs import spec_of
from turbojax.models.transformer import Transformer
from turbojax.sharding import Axes

Pairs = Mapping[str, tuple[jax.Array, jax.Array]]


def added(
    params: LayerParams, pairs: Pairs, *, config: TransformerConfig, axes: Axes | None
) -> LayerParams:
    """A layer with these adapters in place of any it had, split like its weights over `axes`.

    Outside of `shard_map`; for a device's arrays see `added_on_device`.
    """
    changed = removed(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = dict(changed[part][linear])
        kernel = arrays["kernel"]
        # On a mesh inner sizes have zeros at their end, so that all devices have equally much.
        wanted = (kernel.shape[0], pair[0].shape[1]), (pair[1].shape[0], kernel.shape[1])
        for leaf, matrix, shape in zip(("lora_a", "lora_b"), pair, wanted, strict=True):
            if axes is not None:
                more = [(0, new - old) for new, old in zip(shape, matrix.shape, strict=True)]
                spec = spec_of((part, linear, leaf), 2, config, axes)
                sharding = NamedSharding(axes.require_mesh(), spec)
                matrix = jax.device_put(jnp.pad(matrix, more), sharding)
            arrays[leaf] = matrix
        changed[part] = {**changed[part], linear: arrays}
    return changed


def added_on_device(
    params: LayerParams, pairs: Pairs, *, config: TransformerConfig, axes: Axes
) -> LayerParams:
    """A device's arrays of a layer with its part of these adapters, which it has whole.

    For use within `shard_map` over `axes`; differentiable in the adapters.
    """
    changed = removed(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = dict(changed[part][linear])
        for leaf, matrix in zip(("lora_a", "lora_b"), pair, strict=True):
            spec = spec_of((part, linear, leaf), 2, config, axes)
            for axis, names in enumerate(spec):
                matrix = _own(matrix, axis, axes_named(names))
            arrays[leaf] = matrix
        changed[part] = {**changed[part], linear: arrays}
    return changed


def _own(matrix: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
    """This device's part of a matrix along an axis, with zeros where all are used up."""
    if not names:
        return matrix
    count = jax.lax.axis_size(names)
    each = share(matrix.shape[axis], count)
    widths = [(0, 0)] * matrix.ndim
    widths[axis] = (0, count * each - matrix.shape[axis])
    first = jax.lax.axis_index(names) * each
    return jax.lax.dynamic_slice_in_dim(jnp.pad(matrix, widths), first, each, axis)


def removed(params: LayerParams) -> LayerParams:
    """A layer without its adapters."""
    changed = dict(params)
    for part, linear in adapted_linears(params):
        arrays = {k: x for k, x in params[part][linear].items() if k not in ("lora_a", "lora_b")}
        changed[part] = {**changed[part], linear: arrays}
    return changed


def merged(params: LayerParams, pairs: Pairs) -> LayerParams:
    """A layer whose kernels have the adapters' products added; ValueError if it has adapters."""
    if found := adapted_linears(params):
        raise ValueError(f"the decoder has adapters of {found}, must have none: without_adapters")
    changed = dict(params)
    for name, pair in pairs.items():
        part, linear = _path(name)
        arrays = changed[part][linear]
        kernel = _sum(arrays["kernel"], *pair)
        changed[part] = {**changed[part], linear: {**arrays, "kernel": kernel}}
    return changed


def merged_transformer(model: Transformer, layers: Sequence[Pairs]) -> Transformer:
    """The same of a `Transformer`, of which `layers` has the adapters of each layer."""
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: x, state)  # The model's own variables stay as they are.
    for layer, pairs in enumerate(layers):
        stack, number = model.config.stack_of(layer)
        for name, pair in pairs.items():
            part, linear = _path(name)
            kernel = state[stack][part][linear]["kernel"]
            stacked = kernel.get_value()
            kernel.set_value(stacked.at[number].set(_sum(stacked[number], *pair)))
    whole: Transformer = nnx.merge(graph, state)
    return whole


def _path(name: str) -> tuple[str, str]:
    return "mlp" if name in ("gate", "up", "down") else "attention", f"{name}_proj"


def _sum(kernel: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return (kernel.astype(jnp.float32) + product).astype(kernel.dtype)
