"""What samplers of other projects ask of a cache: padded prompts, then one token at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from turbojax.caches import AttentionOptions, attend_prompt, kind_of
from turbojax.flax._masks import MaskRule, as_mask, read_mask


def attend_padded_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    mask: jax.Array,
    options: AttentionOptions,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Attends within prompts with padding on either side, and stores them without it.

    A cache holds a sequence from its first token on, so prompts are moved to the left first, and
    the result is moved back. Queries and keys are rotated, and the cache must be empty. `mask`
    ``[B, T, S]`` says what the tokens see of `S` places of a cache, of which the first `T` are
    their own: it is causal, except that no token sees padding.

    Returns ``[B, T, N, H]``, where rows of padding mean nothing, and the cache. Sequences with
    another mask become NaN, which a `turbojax.flax.MaskWarning` reports, and so do those whose
    cache was not empty.
    """
    batch, tokens = query.shape[:2]
    mask = as_mask(mask[:, None], query, jnp.zeros((batch, mask.shape[2], 1, 1)))
    first = jnp.argmax(mask.any((1, 2)), axis=1)
    shown = _roll(_roll(mask, -first, axis=2), -first, axis=3)
    rule = MaskRule(is_causal=True, expects_causal=True, window=None)
    _, lengths, fits = read_mask(shown, batch, tokens, rule, warn_for=attend_padded_prompt)
    broken = ~fits | (cache.lengths > 0)
    query, key, value = (_roll(x, -first, axis=1) for x in (query, key, value))
    attend = attend_prompt(lengths, implementation=implementation)
    out, cache = attend(query, key, value, cache, options)
    factor = jnp.where(broken, jnp.nan, 1).astype(out.dtype)[:, None, None, None]
    return _roll(out, first, axis=1) * factor, cache


def attend_next_token(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    new: jax.Array,
    options: AttentionOptions,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """Stores a token where it is new, and attends to all that is held.

    Query and key, ``[B, 1, N or K, H]``, are rotated. Where `new`, bool ``[B]``, is False, the
    token is not stored, and its query is that of the newest token held.
    """
    kind = kind_of(cache)
    lengths = new.astype(jnp.int32)
    cache = kind.append(cache, key, value, lengths=lengths, implementation=implementation)
    return kind.decode(query, cache, options=options, implementation=implementation), cache


def _roll(x: jax.Array, shift: jax.Array, axis: int) -> jax.Array:
    """Rolls each sequence by its own `shift`, int ``[B]``."""
    return jax.vmap(lambda row, by: jnp.roll(row, by, axis - 1))(x, shift)
