"""Prompts as samplers of other projects lay them out, for caches that know lengths."""

import jax
import jax.numpy as jnp

from turbojax.flax._masks import MaskRule, as_mask, read_mask
from turbojax.kv import AttentionOptions, LayerCache, attend_prompt


def attend_left_padded(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache,
    mask: jax.Array,
    options: AttentionOptions,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Attends within prompts that are padded on the left, and stores them without their padding.

    A cache holds a sequence from its first token on, so prompts are moved to the left first, and
    what they attended to is moved back.

    Args:
      query: ``[B, T, N, H]``, rotated.
      key: ``[B, T, K, H]``, rotated.
      value: ``[B, T, K, H]``.
      cache: an empty cache of the layer.
      mask: ``[B, T, S]``, what the tokens see of `S` places of a cache, of which the first `T` are
        their own: causal, but for the padding, which nobody sees.
      options: of the layer.
      implementation: of the cache's ops; None to choose.

    Returns:
      ``[B, T, N, H]``, where rows of padding mean nothing, and the cache. Sequences with another
      mask become NaN, which a `turbojax.flax.MaskWarning` reports.
    """
    batch, tokens = query.shape[:2]
    mask = as_mask(mask[:, None], query, jnp.zeros((batch, mask.shape[2], 1, 1)))
    padding = tokens - mask.any((1, 2)).sum(1)
    shown = _roll(_roll(mask, -padding, axis=2), -padding, axis=3)
    rule = MaskRule(is_causal=True, expects_causal=True, window=None)
    _, lengths, fits = read_mask(shown, batch, tokens, rule, warn_for=attend_left_padded)
    moved = (_roll(x, -padding, axis=1) for x in (query, key, value))
    out, cache = attend_prompt(lengths, implementation=implementation)(*moved, cache, options)
    broken = jnp.where(fits, 1, jnp.nan).astype(out.dtype)[:, None, None, None]
    return _roll(out, padding, axis=1) * broken, cache


def _roll(x: jax.Array, shift: jax.Array, axis: int) -> jax.Array:
    """Rolls each sequence by its own `shift`, int ``[B]``."""
    return jax.vmap(lambda row, by: jnp.roll(row, by, axis - 1))(x, shift)
