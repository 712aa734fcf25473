"""Exact attention under a mask in plain JAX: the definition of `decode`."""

import functools

import jax
import jax.numpy as jnp

from turbojax.attention import cudnn
from turbojax.attention.sinks import with_sinks
from turbojax.numerics.rounding import cap_logits, exact_dot


def masked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Exact attention under a mask, by XLA.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      mask: bool ``[B, T, S]``, what is visible; a row without anything is the mean of all values,
        or with sinks 0.
      scale: factor of the scores.
      logits_soft_cap: see `turbojax.decode`.
      sinks: optional float32 ``[N]``, see `turbojax.turbo_attention`.

    Returns:
      ``[B, T, N, H]`` in the query's dtype.
    """
    if sinks is not None:
        parts = masked_part(query, key, value, mask, scale=scale, logits_soft_cap=logits_soft_cap)
        return with_sinks(*parts, sinks)[0].astype(query.dtype)
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


def masked_part(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`masked_attention` in float32 and its log-sum-exp; 0 and ``-inf`` if nothing is visible."""
    batch, tokens, _, channels = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, channels)
    scores = exact_dot("btkgh,bskh->btkgs", grouped, key)
    scores = cap_logits(scores * scale, logits_soft_cap)
    seen = mask[:, :, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    total = jnp.sum(weights, axis=-1)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    # What no query sees must not reach one, not even as 0 * NaN.
    held = jnp.any(mask, axis=1)[:, :, None, None]
    value = jnp.where(held, value, jnp.zeros((), value.dtype))
    out = exact_dot("btkgs,bskh->btkgh", weights, value) / total[..., None]
    residual = jnp.where(is_empty, -jnp.inf, top + jnp.log(total))
    return out.reshape(query.shape), residual.reshape(query.shape[:3])
