"""`turbo_attention`: arguments, checks and the choice of implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._registry import (
    Implementation,
    ImplementationName,
    Registry,
)
from turbojax.attention import score_modifiers as given
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo import jax_triton, mosaic_gpu, reference, triton, unrounded
from turbojax.attention.turbo.gradient import straight_through
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import together

ATTENTION = Registry(
    "turbo_attention",
    (
        Implementation("mosaic_gpu", mosaic_gpu.attention, mosaic_gpu.attention_unsupported),
        Implementation("jax_triton", jax_triton.attention, jax_triton.unsupported),
        Implementation("triton", triton.attention, triton.attention_unsupported),
        Implementation("xla", reference.attention),
    ),
)


def turbo_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    config: TurboConfig = TurboConfig(),
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    key_bounds: tuple[jax.Array, jax.Array] | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    bias: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention with quantized products (TurboAttention, Algorithm 1).

    Arguments mean what they mean in `jax.nn.dot_product_attention`. Lengths need not be multiples
    of a block; memory grows with ``T + S``, also for the gradient.

    Gradients are straight through the rounding, with the weights of the forward pass and the exact
    exponential; `config.gradient` says what else is rounded. There are no second derivatives and
    no forward mode (`jax.jvp`).

    Args:
      query: ``[B, T, N, H]``, bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, the same dtype; `N` is a multiple of `K`.
      value: ``[B, S, K, Hv]``; `Hv` is usually `H`.
      config: numerics and block sizes; the default is the fastest one with little error. Its bits
        concern caches only.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      is_causal: a query at position `p` sees keys up to `p`; query and key `t` are at `t` (aligned
        at the first token), unless offsets say otherwise.
      query_seq_lengths: optional int ``[B]``: queries at or past it are padding, which gives 0
        and ``-inf`` and changes no other query.
      key_value_seq_lengths: optional int ``[B]``: keys at or past it are ignored. Under `jit`
        values outside the array act as the nearest bound, of queries too.
      local_window_size: optional `w` or ``(left, right)``: a query at `p` sees keys in
        ``[p - left, p + right]``.
      logits_soft_cap: optional `c`: scores become ``c * tanh(score / c)``.
      query_segment_ids: optional integers ``[B, T]``, of packed sequences: a query sees keys of an
        equal id only. Blocks without a common id take no time in kernels. All tokens of a block
        share its scales, whatever their segments.
      key_value_segment_ids: integers ``[B, S]`` beside them.
      key_bounds: optional ``(start, end)``, integers ``[B, T]`` each: query `i` sees keys at
        positions from ``start[b, i]`` to before ``end[b, i]``, of those that causality, window,
        lengths and segments show it; all must. Any integers will do, under `jit` too; where
        ``end <= start`` it sees nothing. `turbojax.bounds` makes them, of prefix-LMs and images,
        which need ``is_causal=False``: the bounds are causal where they should be. Blocks that all
        bounds of a block of queries hide take no time in kernels.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, for parts of a
        longer sequence. Under `jit` values outside ``0..2**29`` act as the nearest bound.
      key_offset: the same of the first key.
      bias: optional ``[B or 1, N or 1, T or 1, S]``, floating-point, added to the scores after
        their scale and cap; ``-inf`` hides a key. Its gradient has its shape.
      alibi_slopes: optional floating-point ``[N]``: ``-slope * |p - k|`` is added too, for a query
        at `p` and a key at `k` (Press et al., 2022).
      sinks: optional floating-point ``[N]``, a logit of each head that takes part only in the
        softmax's denominator, as in gpt-oss; it is the log-sum-exp of a query that sees nothing.
      output_dtype: float32 for the output of a part that will be merged, see
        `turbojax.merge_attention`; the query's if not given.
      implementation: ``"mosaic_gpu"`` (compute capability 9.0 alone), ``"jax_triton"``,
        ``"triton"`` or ``"xla"``, or None for the first of them that can run this. A name never
        falls back to another. The gradient has ``"mosaic_gpu"`` and ``"xla"``; with the other two
        names it uses the first of these that can run. With None, calls in 16 bits that are too
        short for rounding to pay are exact attention by cuDNN on Hopper, and so is mode
        ``"float"``; not with lengths, a soft cap, SAS, a window unless it is causal, causal calls
        with ``T != S``, segments, bounds, offsets, a bias, slopes, sinks, an `output_dtype`, values
        of another head dim, or the residual. When differentiated, all calls are rounded: a short
        call's value then differs from its value without a gradient by what rounding costs.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, Hv]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``, the log-sum-exp. A query that sees nothing gives 0 and ``-inf``. NaN or
      infinity in a key or value makes every query NaN that sees its block (in mode ``"float"``
      what exact attention gives; e4m3 values share one scale, so there a bad value reaches all
      queries of its KV head). In exact short calls it reaches at least those that see it.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if a shape, length, window, cap or name does not fit.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated twice.
    """
    if not isinstance(config, TurboConfig):
        raise TypeError(f"config={config!r} must be a TurboConfig")
    _checks.check_query_key_value(query, key, value, one_head_dim=False)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
        residual=return_residual,
    )
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        key_bounds=key_bounds,
        query_offset=query_offset,
        key_offset=key_offset,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    out, residual = attend(
        query,
        key,
        value,
        query_seq_lengths,
        key_value_seq_lengths,
        config=config,
        options=options,
        modifiers=modifiers,
    )
    if residual is None:
        return out
    return out, residual


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    *,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array | None]:
    """`turbo_attention` of checked queries, keys and values; the log-sum-exp where it is wanted.

    Where it is wanted, the call is always rounded, also if exact attention were faster.
    """
    run = functools.partial(
        _attend_rounded,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        config=config,
        options=options,
        modifiers=modifiers,
    )
    is_ragged = query_lengths is not None or key_lengths is not None
    is_plain = not modifiers.given and options.out_dtype is None and key.shape == value.shape
    is_free = options.implementation is None and not options.residual
    may_be_exact = is_free and not is_ragged and is_plain
    if may_be_exact and unrounded.is_faster(query, key, config, options):
        return unrounded.attend(lambda *x: run(*x)[0], query, key, value, options), None
    out, total = run(query, key, value)
    return out, total if options.residual else None


def _attend_rounded(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    config: TurboConfig,
    options: Options,
    modifiers: ScoreModifiers,
) -> tuple[jax.Array, jax.Array]:
    """`attend` with a gradient straight through the rounding."""
    is_ragged = query_lengths is not None or key_lengths is not None
    batch, size = key.shape[:2]
    keys = _checks.check_lengths("key_value_seq_lengths", key_lengths, batch, size)
    queries = _checks.check_lengths("query_seq_lengths", query_lengths, batch, query.shape[1])
    call = straight_through(_rounded, config=config, options=options, is_ragged=is_ragged)
    queries, keys = jnp.clip(queries, 0, query.shape[1]), jnp.clip(keys, 0, size)
    return call(*together(query, key, value, queries, keys, modifiers))


def _rounded(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    modifiers: ScoreModifiers,
    *,
    config: TurboConfig,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`_attend_rounded` by the implementation for these arrays."""
    static: dict[str, Any] = {"config": config, "options": options, "modifiers": modifiers}
    chosen = ATTENTION.select(options.implementation, query=query, key=key, value=value, **static)
    out, residual = chosen.run(query, key, value, query_lengths, key_lengths, **static)
    return out, residual
