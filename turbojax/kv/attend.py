"""How a layer attends: to its own tokens, to a prompt, or to what its cache holds."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax._registry import writer_beside
from turbojax.baselines import exact
from turbojax.config import TurboConfig
from turbojax.kv import pages as paged
from turbojax.kv.base import Attend, Cache
from turbojax.kv.kinds import LayerCache, put_sequences, take_sequences
from turbojax.kv.pooled import PooledAttention
from turbojax.ops import kv4_attention
from turbojax.ops.options import PLAIN, AttentionOptions
from turbojax.ops.turbo_attention import decode, prefill, turbo_attention
from turbojax.state import kv4
from turbojax.state.progressive import ProgressiveCache, append
from turbojax.state.progressive.update import store_prompt

WholeAttention = Literal["exact"] | TurboConfig | PooledAttention
"""What attends within whole sequences."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache = None,
    options: AttentionOptions = PLAIN,
) -> tuple[jax.Array, Cache]:
    """Exact causal attention over the given tokens alone; the cache passes through untouched.

    `jax.nn.dot_product_attention`, which under strict dtype promotion has no gradient in bfloat16
    on a CPU; in float32 it has. With a cap of the scores, `exact.attention`. An `Attend`.
    """
    arguments = options.arguments()
    if arguments.pop("logits_soft_cap") is not None:
        return exact.attention(query, key, value, **options.arguments()), cache
    # jax's own function promotes bfloat16 with float32 inside: not allowed under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True, **arguments)
    return out, cache


def padded_attention(mask: jax.Array) -> Attend:
    """`causal_attention` to tokens that are there; the others' outputs mean nothing.

    Args:
      mask: bool ``[B, T]``, False for padding.
    """

    def attend(query, key, value, cache=None, options=PLAIN):  # type: ignore[no-untyped-def]
        static = options.complete(query.shape[3])
        place = jnp.arange(query.shape[1])[None]
        lengths = jnp.full(query.shape[0], query.shape[1], jnp.int32)
        visible = static.mask(place, place, lengths) & mask[:, None]
        out = exact.masked_attention(
            query,
            key,
            value,
            visible,
            scale=static.scale,
            logits_soft_cap=static.logits_soft_cap,
        )
        return out, cache

    return attend


def attend_prompt(
    lengths: jax.Array,
    first: jax.Array | int = 0,
    implementation: str | None = None,
    attention: WholeAttention | None = None,
) -> Attend:
    """Attention within prompts, which also fills their part of the layer's cache.

    An exact cache's prompts attend exactly, those of a `ProgressiveCache` by `turbo_attention` with
    its config, those of a `Kv4Cache` by `turbo_attention` in e4m3. With pages, prompts are written
    first and attend to what the pages hold, as later tokens will.

    Args:
      lengths: int32 ``[b]``, of the prompts.
      first: the prompts' first sequence in the cache, which may hold more than `b`.
      implementation: of `prefill`, or of the exact cache's attention; None to choose. With
        `attention` it writes the cache, where it can, and attends as `attend_within` says.
      attention: attend with this instead, to the prompts' own keys and values.
    """

    def attend(query, key, value, cache, options=PLAIN):  # type: ignore[no-untyped-def]
        part = take_sequences(cache, first, query.shape[0])
        if attention is None:
            out, part = _prefill(query, key, value, part, lengths, options, implementation)
        else:
            name = within_implementation(
                implementation, attention, isinstance(part, exact.ExactCache)
            )
            out = attend_within(query, key, value, lengths, attention, options, name)
            part = _store(part, key, value, lengths, implementation)
        return out, put_sequences(cache, part, first)

    return attend


def within_implementation(
    implementation: str | None, attention: WholeAttention, exact_cache: bool
) -> str | None:
    """The implementation that `attend_within` gets, given that of a cache's ops.

    Exact attention and exact caches share names, and so do `turbo_attention` and the other caches.
    Where the attention and the cache share no names, None: the attention chooses for itself.
    """
    return implementation if (attention == "exact") == exact_cache else None


def attend_within(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
    attention: WholeAttention,
    options: AttentionOptions = PLAIN,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention within whole sequences, without a cache.

    Args:
      query: ``[B, T, N, H]``.
      key: ``[B, T, K, H]``.
      value: ``[B, T, K, H]``.
      lengths: optional int32 ``[B]``; what lies past them is padding, which reaches no other token.
      attention: what attends.
      options: of the layer.
      implementation: of `exact.attention` or `turbo_attention`; None to choose. A
        `PooledAttention` names its own.

    Returns:
      ``[B, T, N, H]`` in the query's dtype; rows of padding mean nothing.
    """
    if isinstance(attention, PooledAttention):
        levels = attention.levels(query, key, lengths, options)
        return attention.attend(query, key, value, levels, lengths, options)
    name: Any = implementation
    arguments = {**options.arguments(), "implementation": name}
    if attention == "exact":
        key, value = (_hide_padding(x, lengths) for x in (key, value))
        return exact.attention(query, key, value, **arguments)
    out = turbo_attention(
        query,
        key,
        value,
        config=attention,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        **arguments,
    )
    assert isinstance(out, jax.Array)
    return out


def attend_new_tokens(implementation: str | None = None) -> Attend:
    """Attention of new tokens to everything cached, themselves included.

    Args:
      implementation: of `decode`, and of `append` if it can write caches, or of the exact
        cache's; None to choose.
    """

    def attend(query, key, value, cache, options=PLAIN):  # type: ignore[no-untyped-def]
        name: Any = implementation  # the ops know which names exist
        arguments = {**options.arguments(), "implementation": name}
        if isinstance(cache, paged.PagedLayer):
            cache = paged.append(cache, key, value)
            return paged.attend(query, cache, options=options, implementation=name), cache
        if isinstance(cache, kv4.Kv4Cache):
            cache = kv4.append(cache, key, value)
            return kv4_attention.decode(query, cache, **arguments), cache
        if isinstance(cache, ProgressiveCache):
            cache = append(cache, key, value, implementation=writer_beside(name))
            return decode(query, cache, **arguments), cache
        cache = exact.append(cache, key, value)
        return exact.decode(query, cache, **arguments), cache

    return attend


def _prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache,
    lengths: jax.Array,
    options: AttentionOptions,
    implementation: str | None,
) -> tuple[Any, LayerCache]:
    """Attends within prompts and stores them."""
    name: Any = implementation
    arguments = {**options.arguments(), "implementation": name}
    if isinstance(cache, paged.PagedLayer):
        cache = paged.append(cache, key, value, lengths=lengths)
        out = paged.attend(
            query, cache, query_lengths=lengths, options=options, implementation=name
        )
        return out, cache
    if isinstance(cache, kv4.Kv4Cache):
        return kv4_attention.prefill(
            query, key, value, cache, key_value_seq_lengths=lengths, **arguments
        )
    if isinstance(cache, ProgressiveCache):
        return prefill(query, key, value, cache, key_value_seq_lengths=lengths, **arguments)
    out = attend_within(query, key, value, lengths, "exact", options, implementation)
    return out, exact.append(cache, key, value, lengths=lengths)


def _hide_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """``[B, T, K, H]`` with 0 past the lengths: a masked NaN would still be 0 times NaN."""
    if lengths is None:
        return x
    real = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(real[:, :, None, None], x, 0)


def _store(
    cache: LayerCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    implementation: str | None,
) -> LayerCache:
    """Stores prompts that something else attended to."""
    if isinstance(cache, paged.PagedLayer):
        return paged.append(cache, key, value, lengths=lengths)
    if isinstance(cache, kv4.Kv4Cache):
        return kv4.append(cache, key, value, lengths=lengths)
    if isinstance(cache, ProgressiveCache):
        name: Any = implementation
        return store_prompt(cache, key, value, lengths, implementation=writer_beside(name))
    return exact.append(cache, key, value, lengths=lengths)
