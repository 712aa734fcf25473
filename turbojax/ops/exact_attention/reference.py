"""Exact attention under a mask in plain JAX: the definition of `decode`."""

import functools

import jax
import jax.numpy as jnp

from turbojax.ops import cudnn
from turbojax.ops.numerics import cap_logits


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
) -> jax.Array:
    """Exact attention under a mask, by XLA.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      mask: bool ``[B, T, S]``, what is visible; a row without anything is the mean of all values.
      scale: factor of the scores.
      logits_soft_cap: see `turbojax.decode`.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.
    """
    if logits_soft_cap is None:
        return cudnn.dot_product_attention(query, key, value, scale=scale, mask=mask[:, None])
    batch, tokens, _, channels = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, channels)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = cap_logits(dot("btkgh,bskh->bkgts", grouped, key) * scale, logits_soft_cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    out = dot("bkgts,bskh->btkgh", weights, value)
    return out.reshape(query.shape).astype(query.dtype)
