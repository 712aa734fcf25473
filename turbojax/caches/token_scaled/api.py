"""`prefill` and `decode` of token-scaled caches: arguments, checks, choice of implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.attention import optional_arrays as given
from turbojax.attention.optional_arrays import NOTHING, Extras
from turbojax.attention.options import Options, require_causal
from turbojax.attention.turbo import attend
from turbojax.caches import checks, new_tokens
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import mosaic_gpu, reference, triton
from turbojax.caches.token_scaled.cache import CacheT, TokenScaledCache
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import tables
from turbojax.sharding.per_device import per_device

DECODE = Registry(
    "fireq.decode",
    (
        Implementation("mosaic_gpu", mosaic_gpu.decode, mosaic_gpu.decode_unsupported),
        Implementation("triton", triton.decode, triton.decode_unsupported),
        Implementation("xla", reference.decode),
    ),
)
_decode = functools.partial(new_tokens.decode, DECODE, tables.FIREQ_DECODE, shortens=True)
PREFILL = TurboConfig(mode="fp8", softmax="exact", block_q=128, block_kv=128, buffer_size=128)
"""Numerics of attention within a prompt: e4m3 products and the exact exponential."""


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], CacheT]:
    """Attends within a prompt in e4m3 and stores its keys and values as codes (FireQ, 2025).

    Attention does not see the cache's codes: it is `turbojax.turbo_attention` in mode ``"fp8"``
    with the exact softmax and blocks of 128.

    Args:
      query: ``[B, S, N, H]`` in `cache.dtype`.
      key: ``[B, S, K, H]``, after the rotary embedding, as the query.
      value: ``[B, S, K, H]``.
      cache: an empty `Kv4Cache` or `K8v4Cache` for these shapes.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      is_causal: whether a query sees keys up to its own position only.
      key_value_seq_lengths: optional int ``[B]``, the prompts' lengths (padding on the right). The
        content of the padding changes nothing; its outputs are 0 and ``-inf``.
      local_window_size: see `turbojax.turbo_attention`.
      logits_soft_cap: see `turbojax.turbo_attention`.
      sinks: see `turbojax.turbo_attention`.
      implementation: of the attention, see `turbojax.turbo_attention`; XLA writes the cache.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      The result of `turbojax.turbo_attention`, and the filled cache. Under `jit`, sequences that
      were not empty, or whose prompt exceeds `max_length`, turn `overflowed`: the former keep what
      they hold, the latter the prompt's beginning.

    Raises:
      TypeError: if dtypes are not `cache.dtype` or `cache` is another kind.
      ValueError: as `turbojax.turbo_attention`; if the cache was made for other shapes; outside
        `jit`, if a sequence is not empty or a prompt longer than `max_length`.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    lengths = _check_prompt(query, key, value, cache, key_value_seq_lengths)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
    )
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    extras = given.of_layer(query, sinks)
    (out, residual), cache = _prefill(query, key, value, cache, lengths, extras=extras, **static)
    return ((out, residual) if return_residual else out), cache


def attend_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    extras: Extras = NOTHING,
    implementation: str | None = None,
) -> tuple[tuple[jax.Array, jax.Array], CacheT]:
    """`prefill` for callers that have `Options`; gives ``(output, log-sum-exp), cache``."""
    lengths = _check_prompt(query, key, value, cache, lengths)
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    return _prefill(query, key, value, cache, lengths, extras=extras, **static)


def _check_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array | None,
) -> jax.Array:
    """Raises unless the arrays fit together and into the cache; gives int32 lengths."""
    kv4.check_cache_arguments(cache, key, value)
    batch, size = key.shape[:2]
    if query.ndim != 4 or query.shape[1] != size:
        raise ValueError(f"{query.shape=} must be [B, {size}, N, H]: one query per key")
    _checks.check_query_key_value(query, key, value)
    lengths = _checks.check_lengths("key_value_seq_lengths", lengths, batch, size)
    kv4.check_prompt(cache, key, value, lengths)
    return lengths


def _prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array,
    *,
    options: Options,
    extras: Extras,
    implementation: str | None,
) -> tuple[tuple[jax.Array, jax.Array], CacheT]:
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    run = per_device(tables.FIREQ_PREFILL, _attend_and_store, **static)
    return refuse_gradients(run, "fireq.prefill")(query, key, value, cache, lengths, extras)


def _attend_and_store(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: CacheT,
    lengths: jax.Array,
    extras: Extras,
    *,
    options: Options,
    implementation: str | None,
) -> tuple[tuple[jax.Array, jax.Array], CacheT]:
    """`prefill` by the implementation for these arrays."""
    inside = jnp.clip(lengths, 0, key.shape[1])
    out = attend(
        query,
        key,
        value,
        inside,
        inside,
        config=PREFILL,
        options=options,
        extras=extras,
        implementation=implementation,
    )
    return out, kv4.store_prompt(cache, key, value, lengths)


def decode(
    query: jax.Array,
    cache: TokenScaledCache,
    *,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to a cache of codes with scales (FireQ, 2025).

    For 4-bit keys, queries are rounded to e4m3 with one scale per token and head; a score is the
    product of e4m3 and 4-bit codes times both scales, in float32, and so are the softmax and the
    weighted sum of values. For the 8-bit keys of a `K8v4Cache` queries are not rounded: a 16-bit
    product takes them at no cost.

    The queries are those of the last `T` tokens of each sequence, which `append` has already
    stored: query `t` is at position ``length - T + t`` and sees the tokens up to there. A query
    before the beginning of a sequence shorter than `T` sees nothing. After an `append` with
    `lengths`, pass the same as `query_seq_lengths`.

    Args:
      query: ``[B, T, N, H]``, usually `T` = 1, in `cache.dtype`.
      cache: a `Kv4Cache` or a `K8v4Cache`.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      query_seq_lengths: optional int ``[B]``: how many of the `T` queries are real, the first
        ones; they are at ``length - query_seq_lengths + t``, and padding gives 0 and ``-inf``.
        Under `jit` values outside ``0..T`` act as the nearest bound.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position; at
        most the window that the cache was made for, if it was made for one.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      query_offset: see `turbojax.decode`; one query without a window stays with the kernels.
      key_offset: see `turbojax.decode`.
      sinks: the same.
      output_dtype: the same.
      implementation: ``"mosaic_gpu"`` (compiles for Ada to Blackwell, run only on Hopper; rounds
        weights times values' scales, and queries for 8-bit keys, to 22 bits), ``"triton"`` (rounds
        those to bfloat16, and float32 queries for 8-bit keys to 11 bits of a row's largest),
        ``"xla"``, or None for the first of them that can run this.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. An empty sequence gives 0 and ``-inf``, or the sink. A key, value or query that
      is not finite turns the results it takes part in to NaN, and no others.

    Raises:
      TypeError: if `cache` is another kind or the query's dtype is not `cache.dtype`.
      ValueError: if a shape, length, window, cap or name does not fit, or the cache, made for a
        window, does not keep all that so many queries see: append and attend in parts of 16 then.
      NotImplementedError: if the implementation asked for cannot run this, when it is
        differentiated, or if there is a `query_offset` and the cache keeps only a window.
    """
    query_lengths = _check_newest(query, cache, query_seq_lengths)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
    )
    extras = given.of_cache(query, sinks=sinks, query_offset=query_offset, key_offset=key_offset)
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    out, residual = _decode(query, cache, query_lengths, extras=extras, **static)
    return (out, residual) if return_residual else out


def attend_cache(
    query: jax.Array,
    cache: TokenScaledCache,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    extras: Extras = NOTHING,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`decode` for callers that have causal `Options`; gives the log-sum-exp too."""
    require_causal(options)
    query_lengths = _check_newest(query, cache, query_lengths)
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    return _decode(query, cache, query_lengths, extras=extras, **static)


def _check_newest(
    query: jax.Array, cache: TokenScaledCache, query_lengths: jax.Array | None
) -> jax.Array:
    """Raises unless the queries fit the cache; gives their int32 lengths."""
    kv4.check_cache(cache)
    checks.check_query(cache, query)
    return _checks.check_lengths("query_seq_lengths", query_lengths, query.shape[0], query.shape[1])
