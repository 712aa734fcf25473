"""Attention within whole sequences, without a cache."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._registry import IMPLEMENTATION_NAMES
from turbojax.attention import cudnn
from turbojax.attention import turbo as turbo_attention
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches import exact as exact_attention
from turbojax.caches.base import Attend, Cache
from turbojax.caches.images import ImageBlocks, own_implementation
from turbojax.caches.pooled import PooledAttention
from turbojax.numerics.config import TurboConfig

WholeAttention = Literal["exact"] | TurboConfig | PooledAttention
"""What attends within whole sequences."""

PromptAttention = WholeAttention | ImageBlocks
"""The same within prompts, which may hold images."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache = None,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Exact causal attention over the given tokens alone; the cache passes through untouched.

    This `Attend` is `jax.nn.dot_product_attention`, which under strict dtype promotion has no
    gradient in bfloat16 on a CPU, but has one in float32. With a cap of the scores, or sinks, it is
    `exact_attention.attend`.
    """
    static = options.complete(query.shape[3])
    if static.logits_soft_cap is not None or sinks is not None:
        modifiers = of_layer(query, sinks)
        return exact_attention.attend(query, key, value, options=static, modifiers=modifiers), cache
    out = cudnn.dot_product_attention(
        query,
        key,
        value,
        scale=static.scale,
        is_causal=static.is_causal,
        local_window_size=static.window,
    )
    return out, cache


def padded_attention(mask: jax.Array) -> Attend:
    """`causal_attention` to tokens that are no padding; the outputs of padding mean nothing.

    Args:
      mask: bool ``[B, T]``, False for padding.
    """

    def attend(query, key, value, cache=None, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        static = options.complete(query.shape[3])
        place = jnp.arange(query.shape[1])[None]
        lengths = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        visible = static.mask(place, place, lengths) & mask[:, None]
        out = exact_attention.masked_attention(
            query,
            key,
            value,
            visible,
            scale=static.scale,
            logits_soft_cap=static.logits_soft_cap,
            sinks=of_layer(query, sinks).sinks,
        )
        return out, cache

    return attend


def within_implementation(
    implementation: str | None, attention: PromptAttention, names: tuple[str, ...]
) -> str | None:
    """The implementation for `attend_within`, given that of a cache's ops, whose names are `names`.

    It is the same; or None, to choose, where the attention and the cache share no names. For images
    it raises ValueError or NotImplementedError, see `own_implementation` there.
    """
    if isinstance(attention, ImageBlocks):
        return own_implementation(implementation, names)
    own = exact_attention.IMPLEMENTATIONS if attention == "exact" else IMPLEMENTATION_NAMES
    return implementation if own == names else None


def attend_within(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
    attention: PromptAttention,
    options: AttentionOptions = PLAIN,
    implementation: str | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within whole sequences, without a cache; within images both ways.

    What lies past `lengths` (optional int32 ``[B]``) is padding, which reaches no other token; its
    rows of the result mean nothing. The implementation is one of `exact_attention.attention` or
    `turbo_attention`; a `PooledAttention` names its own.
    """
    if isinstance(attention, PooledAttention):
        levels = attention.levels(query, key, lengths, options)
        return attention.attend(query, key, value, levels, lengths, options, sinks)
    if isinstance(attention, ImageBlocks):
        arrays = {"lengths": lengths, "sinks": sinks}
        return attention.attend(
            query, key, value, **arrays, options=options, implementation=implementation
        )
    static: dict[str, Any] = {
        "options": options.complete(query.shape[3], implementation),
        "modifiers": of_layer(query, sinks),
    }
    if attention == "exact":
        return exact_attention.attend(query, key, value, lengths, **static)
    _checks.check_query_key_value(query, key, value, one_head_dim=False)
    out, _ = turbo_attention.attend(query, key, value, lengths, lengths, config=attention, **static)
    return out
