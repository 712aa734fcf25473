"""The gradient of `turbo_attention` in plain JAX: its definition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.sinks import sees_only_sink
from turbojax.attention.turbo.operands import Backward, blocks
from turbojax.attention.turbo.reference import in_groups, visible_pairs
from turbojax.numerics import rounding
from turbojax.numerics.config import Mode, TurboConfig
from turbojax.sharding import varying_like

# Tokens of a tile's side. A tile of float32 scores then is 256 KiB per sequence and head.
_BLOCK = 256

_Arrays = tuple[jax.Array, ...]


@functools.partial(jax.jit, static_argnames=("config", "options", "is_ragged", "dtype"))
def gradient(
    arrays: Backward,
    *,
    config: TurboConfig,
    options: Options,
    is_ragged: bool = True,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    dtype: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, ScoreModifiers]:
    """Gradients straight through the rounding: it counts as the identity.

    The weights ``P = exp(S - lse)`` are those of the forward pass: `S` are its scores, of rounded
    queries and keys, `lse` is its log-sum-exp, and the exponential is the exact one. With ``dP = dO
    V^T`` and a row's ``D = dO . O`` the scores' gradient is ``dS = P (dP - D + d_lse)``. `V` is
    rounded there as it was when it gave `O`: a row's `dS` sum to 0 but for `d_lse` and a sink. A
    bias and slopes get `dS` before its scale and the cap's derivative. With
    ``config.gradient="8bit"`` `dO` is rounded in `dP` and `D`, in blocks as queries are.
    ``dQ = dS K``, ``dK = dS^T Q`` and ``dV = P^T dO`` use the unrounded operands.

    Query blocks run one after the other and walk over the key blocks that they can see. Memory
    grows with ``T + S``.

    Tokens at or past their length get zero gradients. `dtype` is that of the gradients of query,
    key and value, which are summed in float32; None for their own. `is_ragged` is not used here.
    Also returns the modifiers' gradients, except those of sinks, which `turbojax.attention.sinks`
    computes.
    """
    del is_ragged
    query, key, value, query_length, key_length, out, residual, d_out, d_residual = arrays
    batch, length, heads, channels = query.shape
    size, kv_heads = key.shape[1:3]
    block_q, block_kv = min(_BLOCK, length), min(_BLOCK, size)
    padded_size = -(-size // block_kv) * block_kv
    # Float32 products of bfloat16 or float16 need no more than what a matrix unit keeps.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.einsum(subscripts, a, b, precision=precision)

    def query_blocks(x: jax.Array) -> jax.Array:  # [n, B, K, G, q, channels]
        x = blocks(x, query_length, block_q)
        return jnp.moveaxis(x.reshape(batch, kv_heads, -1, *x.shape[2:]), 3, 0)

    def key_blocks(x: jax.Array) -> jax.Array:  # [n, B, K, t, channels]
        return jnp.moveaxis(blocks(x, key_length, block_kv), 2, 0)

    # A query that sees nothing has gradient zero and adds nothing to those of keys and values.
    is_blind = residual == -jnp.inf
    if modifiers.sinks is not None:
        is_blind = is_blind | sees_only_sink(out, residual, modifiers.sinks)
    d_out = jnp.where(is_blind[..., None], jnp.zeros((), d_out.dtype), d_out)
    d_mode = rounding.values_mode(config.mode) if config.gradient == "8bit" else "float"
    rounded_d = _rounded(d_out, query_length, config.block_q, d_mode)
    delta = jnp.sum(rounded_d.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(is_blind, 0, delta - d_residual)
    lse = jnp.where(is_blind, jnp.inf, residual)

    rounded_k = key_blocks(_rounded(key, key_length, config.block_kv, config.mode))
    rounded_v = key_blocks(_rounded_values(value, key_length, config))
    k = key_blocks(key)
    shift = modifiers.shift()
    inputs = (arrays, modifiers)

    def one_query_block(sums: _Arrays, operands: _Arrays) -> tuple[_Arrays, tuple[Any, ...]]:
        number, rounded_q, q, rounded_d, d_o, lse, delta = operands
        first = number * block_q
        position = first + jnp.arange(block_q)
        real = position[None] < query_length[:, None]
        last = jnp.minimum(first + block_q, length) - 1
        start, stop = options.key_range(first, last, key_length, shift)

        def add(j: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            d_q, d_k, d_v, d_modifiers = sums
            keys = j * block_kv + jnp.arange(block_kv)
            mask = visible_pairs(position, keys, key_length, options, modifiers) & real[:, :, None]
            added = modifiers.added(position, keys)
            mask = mask[:, None, None]
            if added is not None:
                added = in_groups(added, kv_heads)
                mask = mask & (added != -jnp.inf)
            scores = dot("bkgqh,bkth->bkgqt", rounded_q, _at(rounded_k, j)) * options.scale
            scores = rounding.cap_logits(scores, options.logits_soft_cap)
            whole = scores if added is None else scores + added
            p = jnp.where(mask, jnp.exp(whole - lse), 0)
            d_p = dot("bkgqh,bkth->bkgqt", rounded_d, _at(rounded_v, j))
            d_whole = p * (d_p - delta)
            d_s = d_whole * options.scale
            if options.logits_soft_cap is not None:
                d_s = d_s * (1 - jnp.square(scores / options.logits_soft_cap))
            d_s = jnp.where(mask, d_s, 0)
            return (
                d_q + dot("bkgqt,bkth->bkgqh", d_s, _at(k, j)),
                _add_at(d_k, j, dot("bkgqt,bkgqh->bkth", d_s, q)),
                _add_at(d_v, j, dot("bkgqt,bkgqh->bkth", p, d_o)),
                _add_modifiers(d_modifiers, modifiers, jnp.where(mask, d_whole, 0), position, keys),
            )

        bounds = (start // block_kv, -(-stop // block_kv))
        nothing = (
            jnp.zeros(q.shape, jnp.float32),
            *sums,
            _no_modifiers(modifiers, block_q, padded_size),
        )
        nothing = varying_like(nothing, inputs)
        d_q, *sums, d_modifiers = jax.lax.fori_loop(*bounds, add, nothing)
        return tuple(sums), (d_q.astype(dtype or query.dtype), d_modifiers)

    q = query_blocks(query)
    numbers = jnp.arange(q.shape[0], dtype=jnp.int32)
    rounded_q = query_blocks(_rounded(query, query_length, config.block_q, config.mode))
    rows = (query_blocks(x[..., None]) for x in (lse, delta))
    d_o = (query_blocks(x) for x in (rounded_d, d_out))
    operands: _Arrays = (numbers, rounded_q, q, *d_o, *rows)
    nothing: _Arrays = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, rounded_v))
    nothing = varying_like(nothing, inputs)
    (d_k, d_v), (d_q, d_modifiers) = jax.lax.scan(one_query_block, nothing, operands)
    d_q = jnp.moveaxis(d_q, 0, 3).reshape(batch, heads, -1, channels)
    d_k, d_v = (jnp.moveaxis(x, 0, 2).reshape(batch, kv_heads, -1, x.shape[-1]) for x in (d_k, d_v))
    return (
        jnp.swapaxes(d_q, 1, 2)[:, :length],
        jnp.swapaxes(d_k, 1, 2)[:, :size].astype(dtype or key.dtype),
        jnp.swapaxes(d_v, 1, 2)[:, :size].astype(dtype or value.dtype),
        _whole_modifiers(d_modifiers, modifiers),
    )


def _no_modifiers(modifiers: ScoreModifiers, block_q: int, size: int) -> ScoreModifiers:
    """Zeros for the modifiers' gradients of one block of queries and `size` keys."""
    bias, slopes = modifiers.bias, modifiers.alibi_slopes
    if bias is not None:
        rows = block_q if bias.shape[2] > 1 else 1
        bias = jnp.zeros((*bias.shape[:2], rows, size), jnp.float32)
    return ScoreModifiers(
        bias=bias, alibi_slopes=slopes if slopes is None else jnp.zeros_like(slopes)
    )


def _add_modifiers(
    sums: ScoreModifiers,
    modifiers: ScoreModifiers,
    d_scores: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
) -> ScoreModifiers:
    """Adds a tile's share of the modifiers' gradients to `sums`, which `_no_modifiers` makes.

    `d_scores` is float32 ``[B, K, G, q, t]``, of the scores to which bias and slopes were added.
    """
    bias, slopes = sums.bias, sums.alibi_slopes
    of_heads = d_scores.reshape(d_scores.shape[0], -1, *d_scores.shape[3:])
    if bias is not None:
        axes = tuple(i for i in range(3) if bias.shape[i] == 1)
        share = jnp.sum(of_heads, axis=axes, keepdims=True)
        before = jax.lax.dynamic_slice_in_dim(bias, keys[0], len(keys), axis=3)
        bias = jax.lax.dynamic_update_slice_in_dim(bias, before + share, keys[0], axis=3)
    if slopes is not None:
        distance = modifiers.distances(queries, keys)[:, None].astype(jnp.float32)
        slopes = slopes - jnp.sum(of_heads * distance, axis=(0, 2, 3))
    return ScoreModifiers(bias=bias, alibi_slopes=slopes)


def _whole_modifiers(d_modifiers: ScoreModifiers, modifiers: ScoreModifiers) -> ScoreModifiers:
    """The modifiers' gradients, in their shapes and dtypes, from those of ``n`` query blocks."""
    bias, slopes = d_modifiers.bias, d_modifiers.alibi_slopes
    if bias is not None and modifiers.bias is not None:
        like = modifiers.bias
        bias = jnp.moveaxis(bias, 0, 2) if like.shape[2] > 1 else jnp.sum(bias, axis=0)
        bias = bias.reshape(*like.shape[:2], -1, bias.shape[-1])
        bias = bias[:, :, : like.shape[2], : like.shape[3]].astype(like.dtype)
    return ScoreModifiers(
        bias=bias, alibi_slopes=None if slopes is None else jnp.sum(slopes, axis=0)
    )


def _rounded(x: jax.Array, length: jax.Array, block: int, mode: Mode) -> jax.Array:
    """``[B, S, K, H]`` rounded to its codes, float32; unchanged in mode ``"float"``."""
    if mode == "float":
        return x
    pieces = blocks(x, length, block)
    return _tokens(*rounding.quantize_scores_operand(pieces, mode, axis=(-2, -1)), x.shape[1])


def _rounded_values(x: jax.Array, length: jax.Array, config: TurboConfig) -> jax.Array:
    """``[B, S, K, H]`` as the forward pass rounded it, float32; unchanged in mode ``"float"``."""
    if config.mode == "float":
        return x
    pieces = blocks(x, length, config.block_kv)
    return _tokens(*rounding.quantize_values(pieces, config.mode), x.shape[1])


def _tokens(codes: jax.Array, scale: jax.Array, size: int) -> jax.Array:
    """Codes in blocks ``[B, K, n, block, H]``, times their scales, as ``[B, size, K, H]``."""
    tokens = codes.astype(jnp.float32) * scale[..., None, None]
    tokens = tokens.reshape(*codes.shape[:2], -1, codes.shape[-1])
    return jnp.swapaxes(tokens, 1, 2)[:, :size]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _add_at(x: jax.Array, index: jax.Array, change: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, _at(x, index) + change, index, 0)
