"""What kernels that write pages share: what they take, and codes as they need them described."""

import math
from typing import TYPE_CHECKING

import jax

from turbojax.caches.paged.checks import Pool
from turbojax.polar.codec import level_tables

if TYPE_CHECKING:
    from pallas_kernels.layouts import Codec

_HEAD_DIMS = (16, 256)


def unsupported(cache: Pool, key: jax.Array) -> str | None:
    """Why no kernel can append these tokens; None if one might."""
    dim = cache.head_dim
    if dim & (dim - 1) or not _HEAD_DIMS[0] <= dim <= _HEAD_DIMS[1]:
        return f"head_dim={dim} must be a power of two from {_HEAD_DIMS[0]} to {_HEAD_DIMS[1]}"
    if not math.prod(key.shape):
        return f"key.shape={key.shape} is empty"
    return None


def codec(bits: int, channels: int) -> "Codec":
    """How codes of so many bits are computed, for vectors of `channels`."""
    from pallas_kernels.layouts import Codec

    tables, half = level_tables(bits, channels), 2 ** (bits - 1)
    return Codec(bits, tables.thresholds[half:], tables.squares[half:], tables.unit)
