"""Latent attention over pages in plain JAX: the definition of `latent_attention`.

An online softmax over runs of tokens at fixed positions, all sequences at a time.
"""

import functools

import jax
import jax.numpy as jnp

from turbojax import _checks, polar
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.latent.formats import Tokens
from turbojax.caches.latent.pages import LatentPages
from turbojax.caches.paged.checks import in_tiles
from turbojax.numerics import rounding
from turbojax.sharding import varying_like

# Tokens taken at a time, whole pages of any size.
_TILE = 256

_State = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted sums ``[B, T, N, C]``, maxima and sums of weights ``[B, T, N]``."""


@functools.partial(jax.jit, static_argnames="options")
def attend(
    query_latent: jax.Array,
    query_rope: jax.Array,
    cache: LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    *,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[jax.Array, jax.Array]:
    """Attends the newest tokens' queries to their sequences' pages, and gives the log-sum-exp.

    All pages of `block_tables` must be within the pool. A sequence whose length is negative gives
    NaN. The output is in float32. Sinks are left to the caller.
    """
    is_rotated, is_broken, lengths = cache.format.is_rotated, lengths < 0, jnp.maximum(lengths, 0)
    if is_rotated:
        query_latent = polar.rotate(query_latent, cache.rotation)
    rows, tokens = query_latent.shape[:3], query_latent.shape[1]
    query_lengths = _checks.check_lengths("query_seq_lengths", query_lengths, *rows[:2])
    tables = in_tiles(block_tables, cache.page_size, _TILE)
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    begin = modifiers.begin(lengths, query_lengths)
    position = begin[:, None] + offset
    real = offset < query_lengths[:, None]
    queries = query_latent.astype(jnp.float32), query_rope.astype(jnp.float32)

    def tile(i: jax.Array, state: _State) -> _State:
        token = i * _TILE + jnp.arange(_TILE, dtype=jnp.int32)[None]
        seen = options.mask(position, token, lengths) & real[:, :, None]
        return _step(state, queries, _read(cache, tables[:, i]), seen[:, :, None], options.scale)

    # All sequences in one program: one that sees nothing of a tile keeps its bits.
    first = jnp.min(jnp.where(query_lengths > 0, position[:, 0], jnp.iinfo(jnp.int32).max))
    last = jnp.max(modifiers.end(lengths, query_lengths)) - 1
    start, stop = options.key_range(first, last, lengths)
    bounds = jnp.maximum(start, 0) // _TILE, -(-jnp.maximum(stop, 0) // _TILE)
    empty = (
        jnp.zeros((*rows, cache.latent_dim), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    empty = varying_like(empty, queries, cache, tables, lengths, query_lengths, modifiers)
    out, residual = rounding.finish(*jax.lax.fori_loop(*bounds, tile, empty))
    if is_rotated:
        out = polar.unrotate(out, cache.rotation)
    out = jnp.where(is_broken[:, None, None, None], jnp.nan, out)
    return out, jnp.where(is_broken[:, None, None], jnp.nan, residual)


def _read(cache: LatentPages, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents ``[B, t, C]``, rotated if stored so, and rotary keys, float32; NaN if not finite."""

    def take(x: jax.Array) -> jax.Array:
        return x[pages].reshape(pages.shape[0], _TILE, *x.shape[2:])

    stored = Tokens(*jax.tree.map(take, tuple(cache.tokens)))
    latent = cache.format.read(stored.latent) * cache.format.factor(cache.latent_dim, None)
    if stored.scale is not None:
        latent = latent * stored.scale[..., None]
    return latent, stored.rope.astype(jnp.float32)


def _step(
    state: _State,
    queries: tuple[jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    seen: jax.Array,
    scale: float,
) -> _State:
    """Adds a tile to an online softmax.

    Queries are float32 ``[B, T, N, C]`` and ``[B, T, N, R]``, keys ``[B, t, C]`` and ``[B, t, R]``,
    `seen` is bool ``[B, T, 1, t]``.
    """
    o, m, l = state
    latent, rope = keys
    # A token that is not finite shows in the scores of the queries that see it. As a value it must
    # not reach the other queries as 0 * NaN.
    finite = jnp.all(jnp.isfinite(latent), axis=-1) & jnp.all(jnp.isfinite(rope), axis=-1)
    value = jnp.where(finite[..., None], latent, 0)
    scores = rounding.exact_dot("btnc,bsc->btns", queries[0], value)
    scores = scores + rounding.exact_dot("btnr,bsr->btns", queries[1], rope)
    scores = jnp.where(finite[:, None, None], scores * scale, jnp.nan)
    new = jnp.maximum(m, jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1))
    shift = rounding.finite_maximum(new)
    p = jnp.where(seen, jnp.exp(scores - shift[..., None]), 0)
    alpha = jnp.exp(m - shift)
    product = rounding.exact_dot("btns,bsc->btnc", p, value)
    return o * alpha[..., None] + product, new, l * alpha + jnp.sum(p, axis=-1)
