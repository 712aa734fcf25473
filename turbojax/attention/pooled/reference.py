"""Pooled attention in plain JAX: the definition (multi-scale KV pooling, Li, 2025).

All four pooled versions of the keys, and of the values, are in one array, the *pyramid*. Each of
its rows is visible to a query whose block has chosen the row's level for the row's block, if the
causal rule allows it. One softmax over the whole pyramid then is Algorithm 1 without its loop.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.pooling import group_counts, pool, sum_dtype, unpool
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.sharding import varying_like

# Most queries that are processed together, which bounds the scores that exist at a time.
_LARGEST_TILE = 128

_Arrays = tuple[jax.Array, ...]


class _Pyramid(NamedTuple):
    """The `R` pooled tokens, those of level 1 first.

    Attributes:
      level: int32 ``[R]``.
      first: int32 ``[R]``, its first token.
      block: int32 ``[R]``, number of the key block.
      tokens: int32 ``[B, R]``, how many of its tokens exist.
      last: int32 ``[B, R]``, position of the last of them.
    """

    level: jax.Array
    first: jax.Array
    block: jax.Array
    tokens: jax.Array
    last: jax.Array


class _Tile(NamedTuple):
    """Some queries of one block.

    Attributes:
      position: int32 ``[t]``.
      inside: bool ``[t]``, whether they are queries of this block and not of the next one.
      levels: ``[B or 1, K or 1, G or 1, T_c]``.
      arrays: per-query arrays, ``[B, K, G, t, ...]`` each.
    """

    position: jax.Array
    inside: jax.Array
    levels: jax.Array
    arrays: _Arrays


@functools.partial(jax.jit, static_argnames="options")
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    levels: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """Pooled attention (Algorithm 1). Memory grows with ``T + S``.

    Where `modifiers` have segments, `segments.attended` must have changed the levels. The
    log-sum-exp is float32; float64 is computed in float64 and has a float64 one.
    """
    batch, length, heads, channels = query.shape
    query_length, key_length = _lengths(query, key, query_length, key_length)
    dtype = sum_dtype(query.dtype)
    pyramid = _pyramid(key_length, key.shape[1], options)
    k, v = _pooled(key, key_length), _pooled(value, key_length)

    def one_tile(tile: _Tile) -> _Arrays:
        (q,) = tile.arrays
        real = _real(tile, query_length)
        mask = _visible(tile, real, pyramid, options, modifiers)
        scores = _scores(q, k, mask, pyramid, options)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        shift = jnp.where(highest == -jnp.inf, jnp.zeros((), dtype), highest)
        p = jnp.exp(scores - shift)
        total = jnp.sum(p, axis=-1, keepdims=True)
        out = _weighted_sum("bkgtr,bkrh->bkgth", p, mask, v, of_rows=True)
        out = out / jnp.where(total == 0, jnp.ones((), dtype), total)
        residual = jnp.where(highest == -jnp.inf, highest, shift + jnp.log(total))
        wrong = _invalid(tile.levels) & real
        nan = jnp.asarray(jnp.nan, dtype)
        out_dtype = options.dtype_of_output(query)
        return jnp.where(wrong, nan, out).astype(out_dtype), jnp.where(wrong, nan, residual)

    out, residual = jax.lax.map(one_tile, _tiles(levels, key.shape[2], options, query))
    return (
        _untile(out, length, options).reshape(batch, length, heads, channels),
        _untile(residual, length, options).reshape(batch, length, heads),
    )


@functools.partial(jax.jit, static_argnames=("options", "dtype"))
def gradient(
    arrays: Backward,
    *,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    dtype: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The vector-Jacobian product of `attention` (Algorithms 2 and 3). Memory grows with ``T + S``.

    With ``P = exp(S - L)``, ``dP = dO V^T`` and a row's ``D = dO . O``, the scores' gradient is
    ``dS = P (dP - D + dL)``. Pooled gradients are summed over the queries, block by block, and then
    handed to the tokens of their groups. Rounding the pooled keys to their dtype counts as the
    identity. Gradients are summed in float32 (float64); padding gets zero.
    """
    query, key, value, levels, query_length, key_length, out, residual, d_out, d_residual = arrays
    query_length, key_length = _lengths(query, key, query_length, key_length)
    wide = sum_dtype(query.dtype)
    size, kv_heads = key.shape[1:3]
    pyramid = _pyramid(key_length, size, options)
    k, v = _pooled(key, key_length), _pooled(value, key_length)
    rows = (residual[..., None].astype(wide), d_residual[..., None].astype(wide))

    def one_tile(sums: _Arrays, tile: _Tile) -> tuple[_Arrays, jax.Array]:
        d_k, d_v = sums
        q, o, d_o, lse, d_lse = tile.arrays
        mask = _visible(tile, _real(tile, query_length), pyramid, options, modifiers)
        # Where a row sees nothing, its cotangents may be anything, and `lse` is -inf.
        p = jnp.where(mask, jnp.exp(_scores(q, k, mask, pyramid, options) - lse), _zero(wide))
        d = jnp.sum(d_o.astype(wide) * o.astype(wide), axis=-1, keepdims=True)
        d_p = _dot("bkgth,bkrh->bkgtr", d_o, v)
        d_s = jnp.where(mask, p * (d_p - d + d_lse) * options.scale, _zero(wide))
        d_q = _weighted_sum("bkgtr,bkrh->bkgth", d_s, mask, k, of_rows=True)
        d_k = d_k + _weighted_sum("bkgtr,bkgth->bkrh", d_s, mask, q, of_rows=False)
        d_v = d_v + _weighted_sum("bkgtr,bkgth->bkrh", p, mask, d_o, of_rows=False)
        return (d_k, d_v), d_q.astype(dtype or query.dtype)

    nothing: _Arrays = (jnp.zeros(k.shape, wide),) * 2
    tiles = _tiles(levels, kv_heads, options, query, out, d_out, *rows)
    given = (query, key, value, levels, query_length, key_length, rows, d_out, modifiers)
    nothing = varying_like(nothing, given)
    (d_k, d_v), d_q = jax.lax.scan(one_tile, nothing, tiles)
    return (
        _untile(d_q, query.shape[1], options).reshape(query.shape),
        _unpooled(d_k, key_length, size).astype(dtype or key.dtype),
        _unpooled(d_v, key_length, size).astype(dtype or value.dtype),
    )


def _zero(dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.zeros((), dtype)


def _lengths(
    query: jax.Array, key: jax.Array, query_length: jax.Array | None, key_length: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Lengths within the arrays; those of whole arrays where none are given."""

    def of(x: jax.Array, length: jax.Array | None) -> jax.Array:
        whole = jnp.full(x.shape[0], x.shape[1], jnp.int32)
        return whole if length is None else jnp.minimum(length, whole)

    return of(query, query_length), of(key, key_length)


def _pyramid(key_length: jax.Array, size: int, options: PooledOptions) -> _Pyramid:
    """The rows of the pyramid."""
    firsts = [jnp.arange(0, size, level, dtype=jnp.int32) for level in LEVELS]
    levels = [jnp.full_like(x, level) for x, level in zip(firsts, LEVELS, strict=True)]
    tokens = jnp.concatenate([group_counts(key_length, size, level) for level in LEVELS], axis=1)
    first = jnp.concatenate(firsts)
    return _Pyramid(
        level=jnp.concatenate(levels),
        first=first,
        block=first // options.block_kv,
        tokens=tokens,
        last=first[None] + tokens - 1,
    )


def _pooled(x: jax.Array, key_length: jax.Array) -> jax.Array:
    """``[B, S, K, H]`` to the pyramid ``[B, K, R, H]``."""
    return jnp.swapaxes(
        jnp.concatenate([pool(x, key_length, level) for level in LEVELS], axis=1), 1, 2
    )


def _unpooled(d: jax.Array, key_length: jax.Array, size: int) -> jax.Array:
    """The adjoint of `_pooled`."""
    ends = itertools.accumulate(-(-size // level) for level in LEVELS[:-1])
    parts = jnp.split(jnp.swapaxes(d, 1, 2), list(ends), axis=1)
    tokens = [unpool(part, key_length, size, r) for part, r in zip(parts, LEVELS, strict=True)]
    return functools.reduce(jnp.add, tokens)


def _tile_size(length: int, options: PooledOptions) -> tuple[int, int]:
    """How many tiles a block of queries has, and how many queries are in a tile."""
    block = min(options.block_q, length)
    tiles = -(-block // _LARGEST_TILE)
    return tiles, -(-block // tiles)


def _tiles(levels: jax.Array, kv_heads: int, options: PooledOptions, *arrays: jax.Array) -> _Tile:
    """Arrays ``[B, T, N, ...]`` by tiles, stacked ``[n, B, K, G, t, ...]``."""
    batch, length, heads = arrays[0].shape[:3]
    block_q = min(options.block_q, length)
    tiles, size = _tile_size(length, options)
    blocks = levels.shape[2]

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, blocks * block_q - length), (0, 0), (0, 0)))
        x = x.reshape(batch, blocks, block_q, kv_heads, heads // kv_heads, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, tiles * size - block_q), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(batch, blocks * tiles, size, kv_heads, heads // kv_heads, -1)
        return jnp.transpose(x, (1, 0, 3, 4, 2, 5))

    offset = jnp.arange(tiles * size, dtype=jnp.int32).reshape(1, tiles, size)
    first = jnp.arange(blocks, dtype=jnp.int32).reshape(-1, 1, 1) * block_q
    table = levels.reshape(
        levels.shape[0],
        1 if levels.shape[1] == 1 else kv_heads,
        1 if levels.shape[1] == 1 else heads // kv_heads,
        *levels.shape[2:],
    )
    return _Tile(
        position=(first + offset).reshape(-1, size),
        inside=jnp.broadcast_to(offset < block_q, (blocks, tiles, size)).reshape(-1, size),
        levels=jnp.repeat(jnp.moveaxis(table, 3, 0), tiles, axis=0),
        arrays=tuple(split(x) for x in arrays),
    )


def _untile(x: jax.Array, length: int, options: PooledOptions) -> jax.Array:
    """Tiles ``[n, B, K, G, t, ...]`` back to ``[B, T, K, G, ...]``."""
    block_q = min(options.block_q, length)
    tiles, size = _tile_size(length, options)
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
    x = x.reshape(x.shape[0], -1, tiles * size, *x.shape[3:])[:, :, :block_q]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _real(tile: _Tile, query_length: jax.Array) -> jax.Array:
    """Which of a tile's queries are not padding, bool ``[B, 1, 1, t, 1]``."""
    real = (tile.position[None] < query_length[:, None]) & tile.inside[None]
    return real[:, None, None, :, None]


def _visible(
    tile: _Tile,
    real: jax.Array,
    pyramid: _Pyramid,
    options: PooledOptions,
    modifiers: ScoreModifiers,
) -> jax.Array:
    """Which pooled tokens the queries of a tile see, bool ``[B, K or 1, G or 1, t, R]``."""
    chosen = jnp.take(tile.levels, pyramid.block, axis=-1).astype(jnp.int32)
    chosen = (chosen == pyramid.level[None, None, None])[..., None, :]
    there = (pyramid.tokens > 0)[:, None, None, None]
    if options.is_causal:
        last = pyramid.last[:, None, None, None]
        position, shift = tile.position[None, None, None, :, None], modifiers.shift()
        if shift is not None:
            position = position + shift[:, None, None, None, None]
        there = there & (last <= position)
    # A pooled key never mixes segments, so its first token's segment is its own.
    together = modifiers.visible(tile.position, pyramid.first)
    if together is not None:
        there = there & together[:, None, None]
    return chosen & there & real


def _invalid(levels: jax.Array) -> jax.Array:
    """Whether a level is invalid: bool ``[B or 1, K or 1, G or 1, 1, 1]``."""
    right = functools.reduce(jnp.logical_or, [levels == level for level in (0, *LEVELS)])
    return jnp.any(~right, axis=-1, keepdims=True)[..., None]


def _scores(
    q: jax.Array, k: jax.Array, mask: jax.Array, pyramid: _Pyramid, options: PooledOptions
) -> jax.Array:
    """``scale q . k + log(count)``, ``[B, K, G, t, R]``; ``-inf`` where masked."""
    scores = _dot("bkgth,bkrh->bkgtr", q, k) * options.scale
    bias = jnp.log(jnp.maximum(pyramid.tokens, 1).astype(scores.dtype))
    scores = scores + bias[:, None, None, None]
    return jnp.where(mask, scores, jnp.asarray(-jnp.inf, scores.dtype))


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # Products of bfloat16 or float16 need no more than what a matrix unit keeps.
    dtype = sum_dtype(a.dtype)
    precision = None if 2 in (a.dtype.itemsize, b.dtype.itemsize) else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), precision=precision)


def _weighted_sum(
    subscripts: str, weights: jax.Array, mask: jax.Array, x: jax.Array, *, of_rows: bool
) -> jax.Array:
    """`_dot` of weights ``[B, K, G, t, R]`` and vectors; a masked vector has no effect.

    A vector that is not finite would otherwise reach all sums, as 0 times NaN. Here it is left out,
    and its visible weights are NaN instead. Weights are zero where masked. Vectors are those of
    pooled tokens, ``[B, K, R, H]`` (`of_rows`), or of queries, ``[B, K, G, t, H]``.
    """
    bad = ~jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    seen_bad = jnp.swapaxes(bad, -1, -2)[:, :, None] if of_rows else bad
    weights = jnp.where(mask & seen_bad, jnp.asarray(jnp.nan, weights.dtype), weights)
    return _dot(subscripts, weights, jnp.where(bad, jnp.zeros((), x.dtype), x))
