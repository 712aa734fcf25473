"""Attention over a `Kv4Cache` or `K8v4Cache` in plain JAX: the definition of `fireq.decode`."""

import functools

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.token_scaled.cache import ALLOCATION, TokenScaledCache, numbers
from turbojax.numerics import rounding
from turbojax.numerics.fp8 import quantize_fp8
from turbojax.sharding import varying_like

_State = tuple[jax.Array, jax.Array, jax.Array]
# Tokens dequantized at a time: enough to amortize a loop step, small enough to stay in a cache.
_CHUNK_TOKENS = 1024


@functools.partial(jax.jit, static_argnames="options")
def decode(
    query: jax.Array,
    cache: TokenScaledCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`turbojax.fireq.decode` in plain JAX, chunk by chunk; also gives the log-sum-exp.

    `query_length` (int32 ``[B]``) counts the real queries, None for all; padding gives 0 and
    ``-inf``.
    """
    query_length = _checks.check_lengths("query_seq_lengths", query_length, *query.shape[:2])
    batch, length, heads, channels = query.shape
    kv_heads = cache.num_kv_heads
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, channels)
    q, q_scale = _query_operand(jnp.moveaxis(grouped, 1, 3), cache)  # [B, K, G, T, H]
    q_scale = (q_scale * options.scale)[..., None]
    begin = modifiers.begin(cache.lengths, query_length)
    position = begin[:, None] + jnp.arange(length)[None]
    is_query = (jnp.arange(length)[None] < query_length[:, None])[:, :, None]
    # A rolling buffer's tokens are read in order, in the same chunks as those of a cache that keeps
    # all.
    total = max(cache.room, -(-cache.max_length // ALLOCATION) * ALLOCATION)
    count = min(total, _CHUNK_TOKENS)

    def read(x: jax.Array, first: jax.Array) -> jax.Array:
        if cache.is_rolling:
            return jnp.take(x, (first + jnp.arange(count)) % cache.room, axis=2)
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis=2)

    def chunk(i: jax.Array, state: _State) -> _State:
        # The last chunk starts early enough to stay inside; what it reads twice is masked.
        first = jnp.minimum(i * count, total - count)
        token = (first + jnp.arange(count))[None]
        mask = options.mask(position, token, cache.lengths) & is_query
        mask = (mask & (token >= i * count)[:, None])[:, None, None]
        key, key_scale, value, value_scale = (
            read(x, first)
            for x in (cache.key_codes, cache.key_scale, cache.value_codes, cache.value_scale)
        )
        scores = rounding.exact_dot("bkgqh,bkth->bkgqt", q, numbers(key))
        scores = scores * (q_scale * _per_token(key_scale))
        scores = rounding.cap_logits(scores, options.logits_soft_cap)
        return _step(state, scores, mask, value, value_scale)

    rows = q.shape[:-1]
    state = (
        jnp.zeros((*rows, channels), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    last = jnp.max(modifiers.end(cache.lengths, query_length)) - 1
    start, stop = options.key_range(jnp.min(begin), last, cache.lengths)
    bounds = jnp.maximum(start, 0) // count, -(-stop // count)
    state = varying_like(state, query, cache, query_length, modifiers)
    out, residual = rounding.finish(*jax.lax.fori_loop(*bounds, chunk, state))
    out = jnp.moveaxis(out, 3, 1).reshape(batch, length, heads, channels)
    residual = jnp.moveaxis(residual, 3, 1).reshape(batch, length, heads)
    return out.astype(options.dtype_of_output(query)), residual


def _step(
    state: _State,
    scores: jax.Array,
    mask: jax.Array,
    value: jax.Array,
    value_scale: jax.Array,
) -> _State:
    """Adds a chunk to an online softmax.

    The state holds outputs ``[B, K, G, T, H]``, row maxima and row sums ``[B, K, G, T]``; scores
    are float32 ``[B, K, G, T, t]``, values packed codes ``[B, K, t, H / 2]`` with scales ``[B, K,
    t]``.
    """
    o, m, l = state
    new = jnp.maximum(m, jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1))
    shift = rounding.finite_maximum(new)
    p = jnp.where(mask, jnp.exp(scores - shift[..., None]), 0)
    # A token that a row does not see must not reach it, not even as 0 * NaN.
    weights = jnp.where(mask, p * _per_token(value_scale), 0)
    product = rounding.exact_dot("bkgqt,bkth->bkgqh", weights, numbers(value))
    alpha = jnp.exp(m - shift)
    return o * alpha[..., None] + product, new, l * alpha + jnp.sum(p, axis=-1)


def _query_operand(x: jax.Array, cache: TokenScaledCache) -> tuple[jax.Array, jax.Array]:
    """Queries and their scales: in e4m3 for 4-bit keys (FireQ), unrounded for 8-bit keys."""
    if jnp.uint8 == cache.KEY_CODES:
        return quantize_fp8(x, axis=-1)
    x = x.astype(jnp.float32)
    # What is not finite must reach every output, also where all scores were -inf.
    return x, jnp.where(jnp.all(jnp.isfinite(x), axis=-1), 1.0, jnp.nan)


def _per_token(scale: jax.Array) -> jax.Array:
    """Scales ``[B, K, t]`` as float32 that broadcast to scores ``[B, K, G, T, t]``."""
    return scale.astype(jnp.float32)[:, :, None, None]
