"""`pooled_attention`: arguments, checks, the choice of implementation, and the gradient's rule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.attention import score_modifiers as given
from turbojax.attention.options import check_output_dtype, plain_scale
from turbojax.attention.pooled import mosaic_gpu, reference, segments, triton
from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.sinks import sink_gradient, with_sinks
from turbojax.numerics import rows
from turbojax.remat import ATTENTION_LEVELS, ATTENTION_LSE, named_results
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import like, per_device, per_device_explicit

FORWARD = Registry(
    "pooled_attention",
    (
        Implementation("mosaic_gpu", mosaic_gpu.attention, mosaic_gpu.unsupported),
        Implementation("triton", triton.attention, triton.unsupported),
        Implementation("xla", reference.attention),
    ),
)
GRADIENT = Registry(
    "the gradient of pooled_attention",
    (
        Implementation("mosaic_gpu", mosaic_gpu.gradient, mosaic_gpu.unsupported),
        Implementation("triton", triton.gradient, triton.unsupported),
        Implementation("xla", reference.gradient),
    ),
)

_VALID = (0, *LEVELS)


def pooled_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    *,
    block_q: int = 128,
    block_kv: int = 128,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Block-sparse attention in which each block of keys has a resolution (multi-scale KV pooling).

    ``levels[b, n, i, j]`` says how the queries of block `i` see the keys of block `j`: 0 not at
    all, 1 token by token, and 2, 4 or 8 as means of that many adjacent keys, with the means of
    their values (Li, 2025, Algorithm 1). A mean weighs as many tokens as it stands for: the
    logarithm of their number is added to its score. Where fewer are left at the end of a sequence,
    it is the mean of those, and weighs as many.

    The levels are data: changing them needs no compilation. Apart from the levels, and from lists
    that the kernels make of them (some tens of bytes a level), memory grows with ``T + S``, also
    for the gradient, which passes through the means to every token (Algorithms 2 and 3). There are
    no second derivatives and no forward mode (`jax.jvp`).

    Args:
      query: ``[B, T, N, H]``, bfloat16, float16 or float32.
      key: ``[B, S, K, H]``, the same dtype; `N` is a multiple of `K`.
      value: ``[B, S, K, H]``.
      levels: integers ``[B or 1, N or 1, ceil(T / block_q), ceil(S / block_kv)]``, each 0, 1, 2, 4
        or 8. They have no gradient.
      block_q: queries that share a row of levels.
      block_kv: keys that share a level, a multiple of 8.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      is_causal: a query sees a mean if it sees the last of its tokens, that is, if that is not
        past the query's position; query and key `t` are at `t` (aligned at the first token), unless
        offsets say otherwise.
      query_seq_lengths: optional int ``[B]``: queries at or past it are padding, which gives 0
        and ``-inf`` and changes no other query.
      key_value_seq_lengths: optional int ``[B]``: keys at or past it are ignored. Under `jit`
        values outside the array act as the nearest bound, of queries too.
      query_segment_ids: optional integers ``[B, T]``, of packed sequences: a query sees keys of an
        equal id only. No mean has keys of two segments: a block that holds several is attended
        token by token, whatever its level, unless that is 0. Blocks without a segment of the row's
        queries take no time in kernels.
      key_value_segment_ids: integers ``[B, S]`` beside them.
      query_offset: optional int ``[B]`` or scalar, the position of the first query, for parts of a
        longer sequence. Under `jit` values outside ``0..2**29`` act as the nearest bound.
      key_offset: the same of the first key.
      sinks: optional floating-point ``[N]``, a logit of each head that takes part only in the
        softmax's denominator; it is the log-sum-exp of a query that sees nothing.
      output_dtype: float32 for the output of a part that will be merged, see
        `turbojax.merge_attention`; the query's if not given.
      implementation: ``"mosaic_gpu"`` (compute capability 9.0 alone), ``"triton"`` or ``"xla"``, or
        None for the first of them that can run this. A name never falls back to another, and
        names what computes the gradient too.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype or `output_dtype`; with `return_residual` also float32
      ``[B, T, N]``. A query that sees nothing gives 0 and ``-inf``, and has gradient 0. NaN in a
      key or value reaches the queries of the blocks that attend to its block, of whichever segment.
      Under `jit`, where values cannot be checked, a level that is none of the five makes its whole
      row of queries NaN.

    Raises:
      TypeError: if dtypes are not supported or differ, or if `levels` are not integers.
      ValueError: if a shape, length, block, name or (outside `jit`) level does not fit.
      NotImplementedError: if the implementation asked for cannot run this or its gradient, or when
        it is differentiated twice.
    """
    _checks.check_query_key_value(query, key, value)
    options = PooledOptions(
        is_causal,
        scale=plain_scale(query.shape[3]) if scale is None else scale,
        block_q=block_q,
        block_kv=block_kv,
        out_dtype=check_output_dtype(output_dtype),
        implementation=implementation,
    )
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
        key_offset=key_offset,
        sinks=sinks,
    )
    out, residual = attend(
        query,
        key,
        value,
        levels,
        query_seq_lengths,
        key_value_seq_lengths,
        options=options,
        modifiers=modifiers,
    )
    return (out, residual) if return_residual else out


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    query_lengths: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """`pooled_attention` of checked queries, keys and values; gives the log-sum-exp too."""
    levels = check_levels(levels, query, key, options)
    query_length = _length("query_seq_lengths", query_lengths, query)
    key_length = _length("key_value_seq_lengths", key_lengths, key)
    sizes = {"block_q": options.block_q, "block_kv": options.block_kv}
    attended = per_device_explicit(tables.POOLED_LEVELS, segments.attended, **sizes)
    levels = attended(levels, query_length, key_length, modifiers)
    call = _differentiable(options)
    out, residual, *_ = call(
        *together(query, key, value, levels, query_length, key_length, modifiers)
    )
    return out, residual


def check_levels(
    levels: jax.Array,
    query: jax.Array,
    key: jax.Array | jax.ShapeDtypeStruct,
    options: PooledOptions,
) -> jax.Array:
    """Levels as int8, checked; under `jit` a value that is not a level stays invalid."""
    levels = jnp.asarray(levels)
    if not jnp.issubdtype(levels.dtype, jnp.integer):
        raise TypeError(f"levels.dtype={levels.dtype} must be an integer type")
    batch, length, heads, _ = query.shape
    rows, columns = -(-length // options.block_q), -(-key.shape[1] // options.block_kv)
    fits = levels.ndim == 4 and levels.shape[2:] == (rows, columns)
    if not fits or levels.shape[0] not in (1, batch) or levels.shape[1] not in (1, heads):
        raise ValueError(
            f"{levels.shape=} must be ({batch} or 1, {heads} or 1, {rows}, {columns}): sequences, "
            f"heads, blocks of {options.block_q} queries, blocks of {options.block_kv} keys"
        )
    if _checks.is_concrete(levels):
        values = np.unique(np.asarray(levels))
        wrong = values[~np.isin(values, _VALID)]
        if wrong.size:
            raise ValueError(f"levels hold {wrong.tolist()}, must be among {_VALID}")
    if levels.dtype == jnp.int8:
        return levels
    # A value beyond int8 must not become a level by wrapping around.
    return jnp.where((levels < 0) | (levels > LEVELS[-1]), 9, levels).astype(jnp.int8)


def _length(name: str, lengths: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """Lengths of ``[B, T, ...]`` within its bounds, or None where all tokens exist."""
    if lengths is None:
        return None
    batch, size = x.shape[:2]
    return jnp.clip(_checks.check_lengths(name, lengths, batch, size), 0, size)


def _select(registry: Registry, *arrays: Any, options: PooledOptions) -> Callable[..., Any]:
    """The implementation for these operands, levels and, last, modifiers."""
    query, key, value, levels, *_, modifiers = arrays
    without = dataclasses.replace(modifiers, sinks=None)
    arguments = {"query": query, "key": key, "value": value, "levels": levels}
    name = options.implementation
    return registry.select(name, **arguments, options=options, modifiers=without).run


def _forward(*arrays: Any, options: PooledOptions) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The output, the residual and, where there are sinks, the residual without them."""
    run = _select(FORWARD, *arrays, options=options)
    # The gradient is chosen here too: what cannot run is refused now, not in a backward pass.
    _select(GRADIENT, *arrays, options=options)
    *operands, modifiers = arrays
    if modifiers.sinks is None:
        return *run(*operands, options=options, modifiers=modifiers), None
    # In float32, so that the output is rounded once.
    wide = dataclasses.replace(options, out_dtype="float32")
    without = dataclasses.replace(modifiers, sinks=None)
    out, residual = run(*operands, options=wide, modifiers=without)
    out, total = with_sinks(out, residual, modifiers.sinks, _real(out, operands[4]))
    return out.astype(options.dtype_of_output(operands[0])), total, residual


def _gradient(
    *saved: Any, options: PooledOptions
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreModifiers]:
    """The backward pass, from what was kept and the cotangents."""
    *operands, modifiers = saved[:7]
    run = _select(GRADIENT, *operands, modifiers, options=options)
    arrays = Backward(*operands, *saved[7:])
    without = dataclasses.replace(modifiers, sinks=None)
    gradients = run(arrays, options=options, modifiers=without)
    if modifiers.sinks is None:
        return *gradients, NO_MODIFIERS
    return *gradients, ScoreModifiers(sinks=_of_sinks(modifiers.sinks, arrays))


def _differentiable(options: PooledOptions) -> Callable[..., tuple[jax.Array, ...]]:
    """The op with its options bound, differentiable in reverse mode.

    Kept for the backward pass: query, key, value, levels, lengths, modifiers, the output and the
    residual; what is made here under the names of `turbojax.remat`. Implementations know nothing
    of sinks: the weights and all gradients follow from the log-sum-exp with them. It is kept as
    ``-inf`` where a query sees nothing but a sink.
    """
    attend = per_device(tables.POOLED, _forward, options=options)
    differentiate_once = refuse_gradients(
        per_device(tables.POOLED_GRADIENT, _gradient, options=options),
        "the gradient of pooled_attention",
        because="only first derivatives are supported",
    )

    @jax.custom_vjp
    def call(*arrays: Any) -> tuple[jax.Array, ...]:
        results: tuple[jax.Array, ...] = attend(*arrays)
        return results

    def forward(*arrays: Any) -> Any:
        # `call`, not `attend`: a second derivative must not find a way through the implementation.
        arrays = *arrays[:3], checkpoint_name(arrays[3], ATTENTION_LEVELS), *arrays[4:]
        *results, without = call(*arrays)
        out, residual = named_results(*results)
        kept = residual
        if without is not None:
            kept = jnp.where(without == -jnp.inf, -jnp.inf, residual)
            kept = checkpoint_name(kept, ATTENTION_LSE)
        return (out, residual, without), (*arrays, out, kept)

    def backward(saved: Any, cotangents: Any) -> Any:
        *gradients, d_modifiers = differentiate_once(*saved, *cotangents[:2])
        *gradients, d_modifiers = like(
            (*gradients, d_modifiers), (*saved[:3], _differentiated(saved[6]))
        )
        # Levels and lengths are integers.
        return *gradients, None, None, None, d_modifiers

    call.defvjp(forward, backward)
    return call


def _differentiated(modifiers: ScoreModifiers) -> ScoreModifiers:
    return ScoreModifiers(sinks=modifiers.sinks)


def _real(x: jax.Array, query_length: jax.Array | None) -> jax.Array:
    """Queries of ``[B, T, ...]`` that are no padding: bool ``[B, T]``."""
    if query_length is None:
        return jnp.ones(x.shape[:2], bool)
    return jnp.arange(x.shape[1])[None] < query_length[:, None]


def _of_sinks(sinks: jax.Array, x: Backward) -> jax.Array:
    """The sinks' gradient, from the residual as it is kept."""
    d_out = rows.without_blind(x.d_out, x.residual)
    delta = jnp.sum(d_out.astype(jnp.float32) * x.out.astype(jnp.float32), axis=-1) - x.d_residual
    total = jnp.where(x.residual == -jnp.inf, sinks, x.residual)
    return sink_gradient(total, sinks, delta, _real(x.out, x.query_length))
