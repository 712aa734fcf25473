"""The Mosaic GPU kernel that appends to caches of codes with scales: what it takes, its launch."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax._device import needs_e4m3, needs_updates

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.kv4_append import Settings

CacheT = TypeVar("CacheT", bound=Any)
"""A `turbojax.caches.token_scaled.cache.TokenScaledCache`."""

_FIELDS = ("key_codes", "key_scale", "value_codes", "value_scale", "lengths", "overflowed")


def append_unsupported(*, cache: Any, key: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    if not math.prod(key.shape):
        return f"key.shape={key.shape} is empty"
    return needs_updates(cache, key) or needs_e4m3()


@jax.jit
def append(cache: CacheT, key: jax.Array, value: jax.Array, lengths: jax.Array) -> CacheT:
    """Stores tokens by one kernel; for many tokens XLA computes the lengths."""
    from pallas_kernels.mosaic.hopper import kv4_append as kernel

    s = settings_of(cache, key)
    written = kernel.append(key, value, lengths, [getattr(cache, x) for x in _FIELDS], s)
    result = dataclasses.replace(cache, **dict(zip(_FIELDS, written, strict=True)))
    if s.counts:
        return result
    accepted = jnp.clip(lengths, 0, jnp.minimum(cache.max_length - cache.lengths, s.tokens))
    return dataclasses.replace(
        result,
        lengths=cache.lengths + accepted,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def settings_of(cache: Any, key: jax.Array) -> "Settings":
    """The static settings of a call."""
    from pallas_kernels.mosaic.hopper import kv4_append as kernel

    return kernel.Settings(
        dtype=key.dtype.name,
        has_e4m3_keys=cache.key_codes.dtype != jnp.uint8,
        tokens=key.shape[1],
        heads=key.shape[2],
        head_dim=key.shape[3],
        rows=cache.key_scale.shape[2],
        max_length=cache.max_length,
    )
