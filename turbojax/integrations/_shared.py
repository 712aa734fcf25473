"""What adapters share: their checked arguments, and what samplers ask of a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from turbojax.attention.options import check_implementation
from turbojax.caches import (
    AttentionOptions,
    CacheKind,
    attend_prompt,
    init_layer_cache,
    kind_for,
    kind_of,
    window_to_keep,
)
from turbojax.caches.attend import of_call
from turbojax.flax import TurboAttentionFn
from turbojax.flax._masks import MaskRule, as_mask, read_mask

TRAINING = TurboAttentionFn(is_causal=True, segments=True)
"""Attention of the training step if no other is asked for."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model attends; hashable, so that what is compiled is shared.

    `attention` attends where there is no cache; None for the model's own attention. Raises
    TypeError if it is no `TurboAttentionFn`; ValueError if it is not causal, or there is no such
    cache or implementation.
    """

    attention: TurboAttentionFn | None
    cache: CacheKind
    implementation: str | None

    def __post_init__(self) -> None:
        if self.attention is not None:
            check_attention(self.attention)
        check_implementation(self.implementation, kind_for(self.cache).implementations)

    def init_cache(
        self, batch: int, tokens: int, heads: int, channels: int, dtype: Any, window: int | None
    ) -> Any:
        """An empty cache of a layer, only as long as its window reaches if the kind can do that."""
        return init_layer_cache(
            batch,
            tokens,
            heads,
            channels,
            kind=self.cache,
            dtype=dtype,
            local_window_size=window_to_keep(self.cache, window),
        )

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array,
        options: AttentionOptions,
    ) -> jax.Array:
        """Attends within whole sequences under a mask ``[B or 1, T, S]``."""
        assert self.attention is not None
        fn = dataclasses.replace(self.attention, **options.arguments())
        return fn(query, key, value, mask=mask[:, None])


def check_attention(attention: object) -> None:
    """Raises TypeError or ValueError unless it is a causal `TurboAttentionFn`."""
    if not isinstance(attention, TurboAttentionFn):
        raise TypeError(f"{attention=} must be a TurboAttentionFn")
    if not attention.is_causal:
        raise ValueError(f"{attention=} must be causal: is_causal=True")


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
    given = of_call(query, options, None, implementation)
    (out, _), cache = kind.append_and_decode(query, key, value, cache, lengths, **given)
    return out, cache


def _roll(x: jax.Array, shift: jax.Array, axis: int) -> jax.Array:
    """Rolls each sequence by its own `shift`, int ``[B]``."""
    return jax.vmap(lambda row, by: jnp.roll(row, by, axis - 1))(x, shift)
