"""`decode`: arguments, checks and the choice of implementation."""

import functools
from typing import Any

import jax

from turbojax import _checks
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.attention import optional_arrays as given
from turbojax.attention.optional_arrays import NOTHING, Extras
from turbojax.attention.options import Options, require_causal
from turbojax.attention.turbo import triton
from turbojax.caches import checks, new_tokens
from turbojax.caches.progressive import decode_mosaic as mosaic_decode
from turbojax.caches.progressive import decode_reference
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.sharding import tables

DECODE = Registry(
    "decode",
    (
        Implementation("mosaic_gpu", mosaic_decode.decode, mosaic_decode.decode_unsupported),
        Implementation("triton", triton.decode, triton.decode_unsupported),
        Implementation("xla", decode_reference.decode),
    ),
)
_decode = functools.partial(new_tokens.decode, DECODE, tables.DECODE)


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
