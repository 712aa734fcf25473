"""Whole decoders put onto a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from turbojax.models.decoder import Decoder
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.assembling import assemble as assemble
from turbojax.models.tensor_parallel.assembling import axes_named
from turbojax.models.tensor_parallel.layout import axes_of_model, share
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
