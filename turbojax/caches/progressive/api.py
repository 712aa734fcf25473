"""`prefill` and `decode`: arguments, checks and the choice of implementation."""

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
from turbojax.attention.turbo import unrounded
from turbojax.attention.turbo.api import ATTENTION
from turbojax.caches import checks, new_tokens
from turbojax.caches.progressive import decode_mosaic, decode_reference, decode_triton
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.caches.progressive.update import (
    SHARES_CODES,
    STORE_PROMPT,
    check_cache_arguments,
    check_prompt,
)
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device

DECODE = Registry(
    "decode",
    (
        Implementation("mosaic_gpu", decode_mosaic.decode, decode_mosaic.unsupported),
        Implementation("triton", decode_triton.decode, decode_triton.unsupported),
        Implementation("xla", decode_reference.decode),
    ),
)
_decode = functools.partial(new_tokens.decode, DECODE, tables.DECODE)


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], ProgressiveCache]:
    """Attends within a prompt and stores its keys and values (Algorithm 1).

    Attention uses the stage-1 codes, or is exact if the prompt is short (see `implementation` of
    `turbo_attention`); the cache gets the stage-2 codes of all whole blocks, and
    the remaining tokens in its int8 buffer.

    Args:
      query: ``[B, S, N, H]`` in `cache.dtype`.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, H]``.
      cache: an empty cache for these shapes; its config sets the numerics.
      scale: see `turbo_attention`.
      is_causal: see `turbo_attention`, but causal if not given.
      key_value_seq_lengths: optional int ``[B]``, the prompts' lengths (padding on the right). The
        content of the padding changes nothing; its outputs are 0 and ``-inf``.
      local_window_size: see `turbo_attention`.
      logits_soft_cap: see `turbo_attention`.
      sinks: see `turbo_attention`.
      implementation: see `turbo_attention`; it also names what writes the cache, except for
        ``"mosaic_gpu"`` and ``"jax_triton"``, which only attend: what writes is chosen then.
      return_residual: see `turbo_attention`.

    Returns:
      The result of `turbo_attention`, and the filled cache. Under `jit`, sequences that were not
      empty, or whose prompt exceeds `max_length`, turn `overflowed`: the former keep what they
      hold, the latter the prompt's beginning.

    Raises:
      TypeError: if dtypes are not `cache.dtype`.
      ValueError: as `turbo_attention`; if the cache was made for other shapes; outside `jit`, if
        a sequence is not empty or a prompt longer than `max_length`.
      NotImplementedError: as `turbo_attention`, or when it is differentiated, by the query alone
        too: train with `turbo_attention`.
    """
    lengths = _check_prompt(query, key, value, cache, key_value_seq_lengths)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
    )
    is_plain = key_value_seq_lengths is None and sinks is None and not return_residual
    (out, residual), filled = _prefill(
        query,
        key,
        value,
        cache,
        lengths,
        options=options,
        extras=given.of_layer(query, sinks),
        implementation=implementation,
        may_be_exact=implementation is None and is_plain,
    )
    return ((out, residual) if return_residual else out), filled


def attend_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array | None = None,
    *,
    options: Options,
    extras: Extras = NOTHING,
    implementation: ImplementationName | None = None,
) -> tuple[tuple[jax.Array, jax.Array], ProgressiveCache]:
    """`prefill` for callers that have `Options`; gives ``(output, log-sum-exp), cache``."""
    lengths = _check_prompt(query, key, value, cache, lengths)
    static: dict[str, Any] = {"options": options, "implementation": implementation}
    return _prefill(query, key, value, cache, lengths, extras=extras, **static)


def _check_prompt(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array | None,
) -> jax.Array:
    """Raises unless the arrays fit together and into the cache; gives int32 lengths."""
    check_cache_arguments(cache, key, value)
    batch, size = key.shape[:2]
    if query.ndim != 4 or query.shape[1] != size:
        raise ValueError(f"{query.shape=} must be [B, {size}, N, H]: one query per key")
    _checks.check_query_key_value(query, key, value)
    lengths = _checks.check_lengths("key_value_seq_lengths", lengths, batch, size)
    check_prompt(cache, key, value, lengths)
    return lengths


def _prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array,
    *,
    options: Options,
    extras: Extras,
    implementation: ImplementationName | None,
    may_be_exact: bool = False,
) -> tuple[tuple[jax.Array, Any], ProgressiveCache]:
    """`prefill` of checked arguments; no log-sum-exp where attention may be exact, and is."""
    run = per_device(
        tables.PREFILL,
        _attend_and_store,
        options=options,
        implementation=implementation,
        may_be_exact=may_be_exact,
    )
    return refuse_gradients(run, "prefill")(query, key, value, cache, lengths, extras)


def _attend_and_store(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: ProgressiveCache,
    lengths: jax.Array,
    extras: Extras,
    *,
    options: Options,
    implementation: ImplementationName | None,
    may_be_exact: bool,
) -> tuple[tuple[jax.Array, Any], ProgressiveCache]:
    """`prefill` by the implementation for these arrays."""
    static: dict[str, Any] = {"config": cache.config, "options": options}
    is_exact = may_be_exact and unrounded.is_faster(query, key, **static)
    attend = ATTENTION.select(
        implementation, query=query, key=key, value=value, extras=extras, **static
    )
    store = STORE_PROMPT.select(STORE_PROMPT.beside(implementation), cache=cache, key=key)
    attends_to_codes = attend.name != "xla" and cache.config.mode != "float" and not is_exact
    inside = jnp.clip(lengths, 0, key.shape[1])
    # One pass over keys and values serves both, unless first tokens move the cache's blocks.
    if store.name in SHARES_CODES and attends_to_codes:
        permuted = attend.name == "mosaic_gpu"
        store_both = SHARES_CODES[store.name]
        filled, codes = store_both(cache, key, value, lengths, permuted=permuted)
        extra = {"stage1": codes and tuple(codes)}
    else:
        filled, extra = store.run(cache, key, value, lengths), {}
    query, key, value, inside, extras = together(query, key, value, inside, extras)
    if is_exact:
        return (unrounded.exact(query, key, value, options), None), filled
    out = attend.run(query, key, value, inside, inside, extras=extras, **static, **extra)
    return out, filled


def decode(
    query: jax.Array,
    cache: ProgressiveCache,
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
    """Attends the newest tokens' queries to the compressed cache (Algorithm 2).

    The queries are those of the last `T` tokens of each sequence, which `append` has already
    stored: query `t` is at position ``length - T + t`` and sees the tokens up to there. A
    query before the beginning of a sequence shorter than `T` sees nothing. After an `append` with
    `lengths`, pass the same as `query_seq_lengths`.

    The cache stores integers, so products are of int8 whichever 8-bit mode prompts attend in, and
    in mode ``"float"`` nothing more is rounded.

    Args:
      query: ``[B, T, N, H]``, usually `T` = 1, in `cache.dtype`.
      cache: the cache; its config sets the softmax, and whether queries and weights are rounded.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      query_seq_lengths: optional int ``[B]``: how many of the `T` queries are real, the first
        ones; they are at ``length - query_seq_lengths + t``, and padding gives 0 and ``-inf``.
        Under `jit` values outside ``0..T`` act as the nearest bound.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position; at
        most the window that the cache was made for, if it was made for one.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, where it is
        not one of the cache's last tokens: for several caches with parts of a text, see
        `turbojax.merge_attention`. Only plain JAX supports it.
      key_offset: the position of the cache's first token, 0 if not given.
      sinks: optional floating-point ``[N]``, see `turbojax.turbo_attention`.
      output_dtype: float32 for results that will be merged; the query's if not given.
      implementation: ``"mosaic_gpu"`` (compiles for Ampere to Blackwell, run only on Hopper; for a
        cache with first tokens without a window, and with at most as many queries as the buffer has
        room for besides a block and the first tokens), ``"triton"`` or ``"xla"``, or None for the
        first that can run this.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. An empty sequence gives 0 and ``-inf``, or the sink.

    Raises:
      TypeError: if `cache` is another kind or the query's dtype is not `cache.dtype`.
      ValueError: if a shape, window, cap or name does not fit, or the cache, made for a window,
        does not keep all that so many queries see: append and attend in parts of 16 then.
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
    cache: ProgressiveCache,
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
    query: jax.Array, cache: ProgressiveCache, query_lengths: jax.Array | None
) -> jax.Array:
    """Raises unless the queries fit the cache; gives their int32 lengths."""
    checks.check_kind(cache, ProgressiveCache)
    checks.check_query(cache, query)
    return _checks.check_lengths("query_seq_lengths", query_lengths, query.shape[0], query.shape[1])
