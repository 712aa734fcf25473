"""Whole decoders put onto a mesh."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from turbojax.models.decoder import Decoder
from turbojax.models.tensor_parallel.layout import axes_of_model, share
from turbojax.models.tensor_parallel.specs import partition_specs, shardings
from turbojax.sharding import Axes


def shard(decoder: Decoder, axes: Axes) -> Decoder:
    """A decoder split over a mesh: each device has its part of every array.

    The whole is on one device, or in host memory, before. `load_decoder` with a mesh reads parts.

    Args:
      decoder: a decoder without axes.
      axes: over which sequences (`batch`) and heads and hidden sizes (`heads`) are split, with a
        mesh. Of more devices for heads than KV heads some go to the sequence's axis, see
        `axes_of_model`.

    Returns:
      The decoder with these axes, for `start`, `generate`, `stream`, `score` and the engine.

    Raises:
      ValueError, NotImplementedError: if heads cannot be split over so many devices.
    """
    if decoder.axes is not None:
        raise ValueError(f"decoder.axes={decoder.axes} must be None: it is split already")
    axes = axes_of_model(decoder.config, axes)
    sizes = axes.require_mesh().shape

    def padded(array: jax.Array, spec: Any) -> jax.Array:
        """With zeros, so that all devices have as much; only hidden sizes need them."""
        widths = [(0, 0)] * array.ndim
        for axis, names in enumerate(spec):
            count = math.prod(
                sizes[x] for x in ((names,) if isinstance(names, str) else names or ())
            )
            widths[axis] = (0, count * share(array.shape[axis], count) - array.shape[axis])
        return jnp.pad(array, widths) if any(more for _, more in widths) else array

    whole = jax.tree.map(padded, decoder, partition_specs(decoder, axes))
    placed = jax.device_put(whole, shardings(decoder, axes))
    return dataclasses.replace(placed, axes=axes)
