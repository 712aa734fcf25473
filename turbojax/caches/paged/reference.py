"""Attention over pages in plain JAX: the definition of `paged_attention`.

A query's result is the same to the bit whatever else is in the batch, wherever the pages lie,
however wide the table is and however a prompt is cut into chunks: a product is always that of one
query token with one run of `_TILE` tokens, and loops have bounds that XLA cannot see, so that it
does not unroll the shorter ones into other programs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.paged.checks import in_tiles
from turbojax.caches.paged.pool import PagedCache
from turbojax.numerics import rounding
from turbojax.sharding import varying_like

# Tokens taken at a time, whole pages of any size.
_TILE = 256

_State = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted sums ``[T, K, G, H]``, maxima and sums of weights ``[T, K, G]`` of one sequence."""


class _Tile(NamedTuple):
    """Keys and values of a run of tokens, and the factors of a token's score and weight."""

    key: jax.Array  # float32 [K, t, H]
    key_norm: jax.Array | None  # float32 [K, t]
    value: jax.Array
    value_norm: jax.Array | None


@functools.partial(jax.jit, static_argnames="options")
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to their sequences' pages, and gives the log-sum-exp.

    Queries are rotated, in float32, if keys are, and the float32 output if values are. All pages of
    `block_tables` must be within the pool.
    """
    if query.shape[1] == 1:
        # An axis of one would be dropped, and the remaining products added in another order.
        query = jnp.pad(query, ((0, 0), (0, 1), (0, 0), (0, 0)))
        out, residual = attend(
            query,
            cache,
            block_tables,
            lengths,
            query_lengths,
            modifiers,
            options=options,
        )
        return out[:, :1], residual[:, :1]
    batch, tokens, heads, channels = query.shape
    kv_heads = cache.num_kv_heads
    rows = (batch, tokens, kv_heads, heads // kv_heads)
    q = query.astype(jnp.float32).reshape(*rows, channels)
    tables = in_tiles(block_tables, cache.page_size, _TILE)
    key_factor = cache.formats.key.factor(channels, cache.key_scale)
    value_factor = cache.formats.value.factor(channels, cache.value_scale)
    score = functools.partial(
        _score, factor=options.scale * key_factor, soft_cap=options.logits_soft_cap
    )

    def sequence(b: jax.Array, results: _State) -> _State:
        begin, last = lengths[b] - query_lengths[b], lengths[b] - 1
        if modifiers.query_offset is not None:
            begin = modifiers.begin(lengths, query_lengths)[b]
            last = begin + query_lengths[b] - 1

        def tile(i: jax.Array, state: _State) -> _State:
            content = _read(cache, tables[b, i])
            token = i * _TILE + jnp.arange(_TILE)

            def one(t: jax.Array, state: _State) -> _State:
                o_all, m_all, l_all = state
                seen = options.mask((begin + t)[None, None], token[None], lengths[b][None]).reshape(
                    _TILE
                )
                scores = score(q[b, t], content)
                o, m, l = _step((o_all[t], m_all[t], l_all[t]), scores, seen, content)
                return o_all.at[t].set(o), m_all.at[t].set(m), l_all.at[t].set(l)

            # Queries before the tile see nothing of it.
            return jax.lax.fori_loop(
                jnp.maximum(i * _TILE - begin, 0), query_lengths[b], one, state
            )

        start, stop = options.key_range(begin, last, lengths[b][None])
        bounds = jnp.maximum(start, 0) // _TILE, -(-stop // _TILE)
        out, top, total = results
        o, m, l = jax.lax.fori_loop(*bounds, tile, (out[b], top[b], total[b]))
        return out.at[b].set(o), top.at[b].set(m), total.at[b].set(l)

    empty = (
        jnp.zeros((*rows, channels), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    empty = varying_like(empty, query, cache, block_tables, lengths, query_lengths, modifiers)
    count = jax.lax.optimization_barrier(jnp.asarray(batch, jnp.int32))
    out, residual = rounding.finish(*jax.lax.fori_loop(0, count, sequence, empty))
    out = (out * value_factor).reshape(query.shape)
    return out, residual.reshape(batch, tokens, heads)


def _read(cache: PagedCache, pages: jax.Array) -> _Tile:
    """Tokens of `pages` one after the other."""

    def take(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x[pages], 1, 0).reshape(x.shape[1], _TILE, *x.shape[3:])

    key_norm, value_norm = (
        None if x is None else take(x).astype(jnp.float32)
        for x in (cache.key_norm, cache.value_norm)
    )
    key, value = (
        cache.formats.key.read(take(cache.key)),
        cache.formats.value.read(take(cache.value)),
    )
    return _Tile(key, key_norm, value, value_norm)


def _score(q: jax.Array, tile: _Tile, *, factor: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores ``[K, G, t]`` of one query token ``[K, G, H]``."""
    products = rounding.exact_dot("kgh,kth->kgt", q, tile.key)
    if tile.key_norm is None:
        return rounding.cap_logits(products * factor, soft_cap)
    return rounding.cap_logits(products * (factor * tile.key_norm)[:, None], soft_cap)


def _step(state: _State, scores: jax.Array, seen: jax.Array, tile: _Tile) -> _State:
    """Adds a tile to an online softmax of one query token.

    The state holds sums ``[K, G, H]``, maxima and sums of weights ``[K, G]``; scores are float32
    ``[K, G, t]``, `seen` is bool ``[t]``.
    """
    o, m, l = state
    mask = seen[None, None]
    new = jnp.maximum(m, jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1))
    shift = rounding.finite_maximum(new)
    p = jnp.where(mask, jnp.exp(scores - shift[..., None]), 0)
    weights, value = p, tile.value
    # A token that is not seen must not reach the query, not even as 0 * NaN.
    if tile.value_norm is None:
        value = jnp.where(seen[None, :, None], value, 0)
    else:
        weights = jnp.where(mask, p * tile.value_norm[:, None], 0)
    product = rounding.exact_dot("kgt,kth->kgh", weights, value)
    alpha = jnp.exp(m - shift)
    return o * alpha[..., None] + product, new, l * alpha + jnp.sum(p, axis=-1)
