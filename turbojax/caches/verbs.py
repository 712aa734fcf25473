"""The verbs of every contiguous cache: `append`, `prefill`, `decode`, both in one, `dequantize`.

They check and complete the options of a call, once, and hand it to the cache's kind.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention import score_modifiers as given
from turbojax.attention.options import Options
from turbojax.caches.base import Kind
from turbojax.caches.kinds import kind_of

C = TypeVar("C", bound=Any)
"""The class of a cache."""


def append(
    cache: C,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: str | None = None,
) -> C:
    """Adds new tokens, one or many per sequence.

    A `ProgressiveCache` (TurboAttention, section 3.3) takes them into its int8 buffer with the
    universal scale, clamped to +-119 codes; when the buffer is full, its oldest block is
    compressed, or all of it (`TurboConfig.flush`). Without a prefill or a given scale, a head's
    universal scale is twice the maximum of its first token that is not all zero, over 119. Other
    kinds round each token by itself, or keep it as it is. The result does not depend, bit for bit,
    on how a run of tokens is split into calls.

    Args:
      cache: the cache to extend, of any kind whose keys and values have heads.
      key: ``[B, T, K, H]`` in `cache.dtype`, after the rotary embedding.
      value: the same shape and dtype.
      lengths: optional int ``[B]``: how many of the `T` tokens belong to each sequence, the first
        ones; all of them if not given. `decode` takes the same as `query_seq_lengths`. Under
        `jit` values outside ``0..T`` act as the nearest bound, and more than `T` as overflow.
      implementation: of a `ProgressiveCache` ``"mosaic_gpu"`` (one token, one kernel), ``"triton"``
        (one token, one kernel for keys and one for values) or ``"xla"``; of a `Kv4Cache` or
        `K8v4Cache` ``"mosaic_gpu"`` (one kernel; compiles for Ada to Blackwell, run only on Hopper)
        or ``"xla"``; of pages those of `turbojax.paged.append`; of the others ``"xla"``. None
        chooses. All store the same bits. Names that only attend are refused.

    Returns:
      The extended cache. Under `jit`, tokens past `max_length` are left out and `overflowed`
      turns True for their sequence; nothing that was stored changes.

    Raises:
      TypeError: if `cache` is no such cache, a dtype differs from `cache.dtype`, or `lengths` are
        no integers.
      ValueError: if a shape or name does not fit, or, outside `jit`, a sequence would exceed
        `max_length` or a length is outside ``0..T``.
      NotImplementedError: if the implementation asked for cannot run this, or, but for exact
        caches, when it is differentiated.
    """
    kind = _kind(cache)
    extended: C = kind.append(cache, key, value, lengths=lengths, implementation=implementation)
    return extended


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: C,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], C]:
    """Attends within a prompt and stores its keys and values.

    Of a `ProgressiveCache` (TurboAttention, Algorithm 1) attention uses the stage-1 codes, or is
    exact if the prompt is short (see `implementation` of `turbo_attention`); the cache gets the
    stage-2 codes of all whole blocks, and the remaining tokens in its int8 buffer. Of a `Kv4Cache`
    or `K8v4Cache` (FireQ) it is `turbo_attention` in mode ``"fp8"`` with the exact softmax and
    blocks of 128, which does not see the cache's codes. In pages prompts attend to what the pages
    hold. Of other kinds attention is exact.

    Args:
      query: ``[B, S, N, H]`` in `cache.dtype`.
      key: ``[B, S, K, H]``, after the rotary embedding, as the query.
      value: ``[B, S, K, H]``.
      cache: an empty cache for these shapes, of any kind whose keys and values have heads; its
        config sets the numerics.
      scale: see `turbo_attention`.
      is_causal: see `turbo_attention`, but causal if not given. Exact attention and pages are
        causal only.
      key_value_seq_lengths: optional int ``[B]``, the prompts' lengths (padding on the right). The
        content of the padding changes nothing; its outputs are 0 and ``-inf``, of exact attention
        they mean nothing.
      local_window_size: see `turbo_attention`.
      logits_soft_cap: see `turbo_attention`.
      sinks: see `turbo_attention`.
      implementation: of the attention: see `turbo_attention`, of pages `paged_attention`, of exact
        attention `turbojax.caches.exact.attention`. Of a `ProgressiveCache` it also names what
        writes the cache, except for ``"mosaic_gpu"`` and ``"jax_triton"``, which only attend.
      return_residual: also return the log-sum-exp of the scores; not where attention is exact.

    Returns:
      The result of attention, see `turbo_attention`, and the filled cache. Under `jit`, sequences
      that were not empty, or whose prompt exceeds `max_length`, turn `overflowed`: the former keep
      what they hold, the latter the prompt's beginning. Exact caches and pages take prompts of
      sequences that are not empty as `append` does.

    Raises:
      TypeError: if dtypes are not `cache.dtype` (exact caches take any), or `cache` is no such
        cache.
      ValueError: as `turbo_attention`; if the cache was made for other shapes; outside `jit`, if
        a sequence is not empty or a prompt longer than `max_length`.
      NotImplementedError: as `turbo_attention`; where there is no log-sum-exp; or, but for exact
        attention, when it is differentiated, by the query alone too: train with `turbo_attention`.
    """
    kind = _kind(cache)
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        residual=return_residual,
    )
    (out, residual), filled = kind.prefill(
        query,
        key,
        value,
        cache,
        key_value_seq_lengths,
        options=options,
        modifiers=given.of_layer(query, sinks),
    )
    if not return_residual:
        return out, filled
    assert residual is not None
    return (out, residual), filled


def decode(
    query: jax.Array,
    cache: Any,
    *,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to a cache.

    The queries are those of the last `T` tokens of each sequence, which `append` has already
    stored: query `t` is at position ``length - T + t`` and sees the tokens up to there. A
    query before the beginning of a sequence shorter than `T` sees nothing. After an `append` with
    `lengths`, pass the same as `query_seq_lengths`.

    A `ProgressiveCache` (TurboAttention, Algorithm 2) stores integers, so products are of int8
    whichever 8-bit mode prompts attend in; in mode ``"float"`` nothing more is rounded. Of a
    `Kv4Cache` (FireQ, 2025) queries are rounded to e4m3 with one scale per token and head; a score
    is the product of e4m3 and 4-bit codes times both scales, in float32, and so are the softmax and
    the weighted sum of values. For the 8-bit keys of a `K8v4Cache` queries are not rounded: a
    16-bit product takes them at no cost. Other kinds attend exactly to what they hold.

    Args:
      query: ``[B, T, N, H]``, usually `T` = 1, in `cache.dtype`; to exact attention in any dtype.
      cache: of any kind whose keys and values have heads. A `ProgressiveCache`'s config sets the
        softmax, and whether queries and weights are rounded.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      query_seq_lengths: optional int ``[B]``: how many of the `T` queries are real, the first
        ones; they are at ``length - query_seq_lengths + t``, and padding gives 0 and ``-inf``.
        Under `jit` values outside ``0..T`` act as the nearest bound.
      local_window_size: optional `w` or ``(left, right)``, relative to the query's position; at
        most the window that the cache was made for, if it was made for one.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, where it is
        not one of the cache's last tokens: for several caches with parts of a text, see
        `turbojax.merge_attention`. Only plain JAX supports it; but for a `ProgressiveCache`, one
        query without a window stays with the kernels.
      key_offset: the position of the cache's first token, 0 if not given.
      sinks: optional floating-point ``[N]``, see `turbojax.turbo_attention`.
      output_dtype: float32 for results that will be merged; the query's if not given.
      implementation: None for the first that can run this, or its name. A `ProgressiveCache` has
        ``"mosaic_gpu"`` (compiles for Ampere to Blackwell, run only on Hopper; for a cache with
        first tokens without a window, and with at most as many queries as the buffer has room for
        besides a block and the first tokens), ``"triton"`` and ``"xla"``. A `Kv4Cache` or
        `K8v4Cache` has ``"mosaic_gpu"`` (compiles for Ada to Blackwell, run only on Hopper; rounds
        weights times values' scales, and queries for 8-bit keys, to 22 bits), ``"triton"`` (rounds
        those to bfloat16, and float32 queries for 8-bit keys to 11 bits of a row's largest) and
        ``"xla"``. Pages have those of `paged_attention`. Exact attention has ``"cudnn"`` (one query
        per sequence, an output in its own dtype alone, neither window nor cap nor sinks, at most
        128 channels), ``"mosaic_gpu"`` (compiles for Ampere to Blackwell, run only on Hopper;
        bfloat16 or float16, 64, 128 or 256 channels, at most 64 queries of a KV head; with a window
        it reads only that; its gradient is XLA's), ``"xla"``, and ``"repeatable"``: the first but
        cuDNN, whose last bits may differ from run to run.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. An empty sequence gives 0 and ``-inf``, or the sink. A key, value or query that
      is not finite turns the results it takes part in to NaN; of a `ProgressiveCache` those that
      see its block.

    Raises:
      TypeError: if `cache` is no such cache, or the query's dtype is not `cache.dtype`.
      ValueError: if a shape, length, window, cap or name does not fit, or the cache, made for a
        window, does not keep all that so many queries see: append and attend in parts of 16 then.
      NotImplementedError: if the implementation asked for cannot run this, if there is a
        `query_offset` and the cache keeps only a window, or, but for exact attention, when it is
        differentiated.
    """
    kind = _kind(cache)
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
        residual=return_residual,
    )
    offsets = {"query_offset": query_offset, "key_offset": key_offset}
    out, residual = kind.decode(
        query,
        cache,
        query_seq_lengths,
        options=options,
        modifiers=given.of_cache(query, sinks=sinks, **offsets),
    )
    if not return_residual:
        return out
    assert residual is not None
    return out, residual


def append_and_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: C,
    *,
    lengths: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], C]:
    """Stores new tokens, and attends their queries to all tokens so far: a layer's decode step.

    The bits are those of `append`, then `decode`. With pages, under `jit` on Hopper, one kernel
    does both for one token of each sequence, see `turbojax.paged.append_and_attend`.

    Args:
      query: as `decode`.
      key: as `append`.
      value: as `append`.
      cache: the cache to extend, of any kind whose keys and values have heads.
      lengths: optional int ``[B]``: how many of the `T` tokens belong to each sequence, the first
        ones; all of them if not given. Queries of the others are padding.
      scale: as `decode`.
      local_window_size: as `decode`.
      logits_soft_cap: as `decode`.
      sinks: as `decode`.
      output_dtype: as `decode`.
      implementation: as `decode`; what has this name and writes the cache does that, too.
      return_residual: as `decode`.

    Returns:
      The results of `decode`, and the cache as `append` extends it.

    Raises:
      TypeError: as both.
      ValueError: as both.
      NotImplementedError: as both.
    """
    kind = _kind(cache)
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
        residual=return_residual,
    )
    (out, residual), extended = kind.append_and_decode(
        query,
        key,
        value,
        cache,
        lengths,
        lengths,
        options=options,
        modifiers=given.of_layer(query, sinks),
    )
    if not return_residual:
        return out, extended
    assert residual is not None
    return (out, residual), extended


def dequantize(
    cache: Any, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """The keys and values that a cache stands for, for tests and debugging.

    Args:
      cache: of any kind whose keys and values have heads.
      dtype: bfloat16, float16 or float32; `cache.dtype` if not given. In float32 these are exactly
        the numbers stored.

    Returns:
      key, value: ``[B, max_length, K, H]``, zero past each sequence's length, and where a rolling
      buffer holds newer tokens instead.

    Raises:
      TypeError: if `cache` is no such cache, or `dtype` none of these.
    """
    kind = _kind(cache)
    if dtype is not None and jnp.dtype(dtype) not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={jnp.dtype(dtype)} must be bfloat16, float16 or float32")
    return kind.dequantize(cache, dtype=dtype)


def _kind(cache: Any) -> Kind[Any]:
    kind = kind_of(cache)
    if kind.has_latents:
        raise TypeError(
            f"cache is a {type(cache).__name__}, must hold keys and values of heads: latents have "
            "append_latents, latent_attention and dequantize_latents"
        )
    return kind
