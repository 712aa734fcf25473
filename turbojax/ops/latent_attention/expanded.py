"""Latent attention in expanded form: values of fewer channels than keys, with a gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks

Attention = Callable[..., Any]
"""Attention of queries ``[B, T, N, H]``, keys and values ``[B, S, K, H]``."""


def expanded_latent_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *arguments: Any,
    attention: Attention,
    **options: Any,
) -> Any:
    """Attention whose values have fewer channels than its keys, by an op that needs as many.

    Latent attention has such values in prompts and training: 192 channels of queries and keys, 128
    of values (DeepSeek-V2). Values are padded with zeros and the output is cut. Differentiable
    where `attention` is. `turbojax.turbo_attention` takes such values directly.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, V]``, `V` at most `H`.
      *arguments: handed on after these three.
      attention: such as `turbojax.pooled_attention`; its first result, or only one, is
        ``[B, T, N, H]``.
      **options: handed on. The scale is that of `H` if not given.

    Returns:
      What `attention` does, its output ``[B, T, N, V]``.

    Raises:
      ValueError: if a shape does not fit.
      TypeError, ValueError, NotImplementedError: whatever `attention` does.
    """
    _checks.check_query(query)
    if key.ndim != 4 or value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(f"{value.shape=} must be {key.shape=} but for the last axis")
    channels, width = query.shape[3], value.shape[3]
    if not 0 < width <= channels:
        raise ValueError(f"{value.shape=} must have 1 to {channels} channels, those of queries")
    padding = ((0, 0), (0, 0), (0, 0), (0, channels - width))
    out = attention(query, key, jnp.pad(value, padding), *arguments, **options)
    if isinstance(out, tuple):
        return (out[0][..., :width], *out[1:])
    return out[..., :width]
