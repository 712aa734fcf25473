"""Whole decoders put onto a mesh, and what each device has of a quantized layer."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.matmul.int4.parts import NOTHING, split_group_size, take_inputs, take_outputs
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.lora import LoraLinear
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.quantized_layer import (
    QuantizedExperts,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedMlp,
)
from turbojax.models.tensor_parallel.layout import (
    axes_of_model,
    channels,
    check_axes,
    parts,
    picked,
    qkv_outputs,
    share,
)
from turbojax.models.tensor_parallel.specs import assemble as assemble
from turbojax.models.tensor_parallel.specs import (
    axes_named,
    partition_specs,
    shardings,
    specs_of_part,
)
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
        quantized: Any = _shard_quantized(decoder, axes)
        return quantized
    sizes = axes.require_mesh().shape

    def padded(array: jax.Array, spec: Any) -> jax.Array:
        """Adds zeros so that all devices have equally much; only hidden sizes need them."""
        widths = [(0, 0)] * array.ndim
        for axis, names in enumerate(spec):
            count = math.prod(sizes[x] for x in axes_named(names))
            widths[axis] = (0, count * share(array.shape[axis], count) - array.shape[axis])
        return jnp.pad(array, widths) if any(more for _, more in widths) else array

    whole = jax.tree.map(padded, decoder, partition_specs(decoder, axes))
    placed: _DecoderT = jax.device_put(whole, shardings(decoder, axes))
    return dataclasses.replace(placed, axes=axes)


def _shard_quantized(decoder: QuantizedDecoder, axes: Axes) -> QuantizedDecoder:
    config = decoder.config
    ends = {
        name: place_table(name, getattr(decoder, name), config, axes)
        for name in ("embedding", "lm_head")
    }
    layers = [place_layer(layer, config, axes) for layer in decoder.layers]
    norm = jax.device_put(decoder.norm, NamedSharding(axes.require_mesh(), PartitionSpec()))
    return dataclasses.replace(decoder, layers=tuple(layers), norm=norm, axes=axes, **ends)


def place(part: Callable[[int], Any], config: TransformerConfig, axes: Axes) -> Any:
    """Global arrays of the parts of a decoder that ``part(number)`` gives for each device."""
    return assemble(part, lambda tree: specs_of_part(tree, config, axes), axes)


def place_layer(layer: QuantizedLayer, config: TransformerConfig, axes: Axes) -> QuantizedLayer:
    """Splits a layer over a mesh."""
    found: QuantizedLayer = place(functools.partial(local_layer, layer, config, axes), config, axes)
    return found


def place_table(name: str, table: Any, config: TransformerConfig, axes: Axes) -> Any:
    """Splits the embedding or the head, which `name` says, over a mesh."""
    found = place(lambda d: {name: local_table(table, config, axes, d)}, config, axes)
    return found[name]


def local_layer(
    layer: QuantizedLayer, config: TransformerConfig, axes: Axes, index: int
) -> QuantizedLayer:
    """The weights of one device as a layer of its own, whose outputs are added to the others'.

    Biases of what is added are those of the first device, and zeros elsewhere. `layer` may have
    adapters; `index` is the device's number along `hidden_axes`.
    """
    check_axes(config, axes)
    count = parts(axes)
    queries = config.num_heads * config.head_dim // count
    kv_heads = config.num_kv_heads // axes.size("heads")
    first_kv = index // axes.size("sequence") * kv_heads
    heads = slice(index * (config.num_heads // count), (index + 1) * (config.num_heads // count))
    kv = slice(first_kv, first_kv + kv_heads)

    def rows(x: jax.Array | None, which: slice) -> jax.Array | None:
        return None if x is None else x[which]

    return dataclasses.replace(
        layer,
        qkv=_outputs(layer.qkv, qkv_outputs(config, axes, index)),
        o=_inputs(layer.o, index * queries + np.arange(queries), index * queries, index),
        mlp=_mlp(layer.mlp, count, index),
        q_norm=rows(layer.q_norm, heads),
        k_norm=rows(layer.k_norm, kv),
        key_channel_scale=rows(layer.key_channel_scale, kv),
        sinks=rows(layer.sinks, heads),
    )


def local_table(table: Any, config: TransformerConfig, axes: Axes, index: int) -> Any:
    """A device's rows of an embedding or a head ``[V, D]``, with zeros past its end."""
    if table is None:
        return None
    each = share(config.vocab_size, parts(axes))
    wanted = index * each + np.arange(each)
    if isinstance(table, Int4Weight):
        return take_outputs(table, np.where(wanted < table.out_size, wanted, NOTHING))
    return picked(table, np.where(wanted < len(table), wanted, NOTHING))


def _mlp(mlp: Any, count: int, index: int) -> Any:
    """A share of the inner channels of the feed-forward layer, or of every expert."""
    is_experts = isinstance(mlp, QuantizedExperts)
    down = mlp.down if is_experts else _base(mlp.down).weight
    each = share(down.in_size, count, down.group_size)
    start = index * each
    order = None if is_experts else _base(mlp.down).inputs
    inner = channels(down.in_size, each, index)
    if order is not None:
        # The columns of the device's groups, whichever channels these are.
        inner = np.where(inner < 0, NOTHING, np.asarray(order)[inner])
    if isinstance(mlp, QuantizedMlp):
        return QuantizedMlp(
            _outputs(mlp.gate_up, inner), _inputs(mlp.down, inner, start, index, sorted_by=order)
        )
    weight, bias, below = mlp.gate_up, mlp.gate_up_bias, mlp.down_bias
    size = weight.out_size // 2
    both = np.concatenate([inner, np.where(inner < 0, inner, inner + size)])
    group = split_group_size(down.group_size, each, down.in_size)
    return dataclasses.replace(
        mlp,
        gate_up=take_outputs(weight, inner if weight.gated else both),
        gate_up_bias=None if bias is None else jax.vmap(lambda x: picked(x, both))(bias),
        down=take_inputs(down, start, each, group),
        down_bias=None if below is None else _of_first(below, index),
    )


def _outputs(linear: Any, outputs: np.ndarray) -> Any:
    """A linear layer with some outputs only; a gated one keeps their pairs."""
    weight = _base(linear).weight
    both = outputs
    if weight.gated:
        half = weight.result_size
        both = np.concatenate([outputs, np.where(outputs < 0, outputs, outputs + half)])

    def of(plain: QuantizedLinear) -> QuantizedLinear:
        bias = plain.bias
        return dataclasses.replace(
            plain,
            weight=take_outputs(plain.weight, outputs),
            bias=None if bias is None else picked(bias, both),
        )

    if not isinstance(linear, LoraLinear):
        return of(linear)
    b = None if linear.b is None else picked(linear.b, both)
    return dataclasses.replace(linear, base=of(linear.base), b=b)


def _inputs(
    linear: Any,
    channels: np.ndarray,
    start: int,
    index: int,
    sorted_by: jax.Array | None = None,
) -> Any:
    """A linear layer with some inputs only: columns from `start` on, which are these channels."""
    base = _base(linear)
    if base.inputs is not None and sorted_by is None:
        raise NotImplementedError(
            "an output projection whose inputs are sorted by group (act-order of GPTQ) cannot be "
            "split over heads: its inputs must be in order"
        )
    weight = base.weight
    group = split_group_size(weight.group_size, len(channels), weight.in_size)
    plain = dataclasses.replace(
        base,
        weight=take_inputs(weight, start, len(channels), group),
        bias=None if base.bias is None else _of_first(base.bias, index),
        inputs=None,
    )
    if not isinstance(linear, LoraLinear):
        return plain
    a = None if linear.a is None else picked(linear.a.T, channels).T
    return dataclasses.replace(linear, base=plain, a=a)


def _base(linear: Any) -> QuantizedLinear:
    base: QuantizedLinear = linear.base if isinstance(linear, LoraLinear) else linear
    return base


def _of_first(x: jax.Array, index: int) -> jax.Array:
    """A part that is added once, by the first device; zeros on the others."""
    return x if index == 0 else jnp.zeros_like(x)
