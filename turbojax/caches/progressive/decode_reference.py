"""Attention over a `ProgressiveCache` in plain JAX: the definition of `decode` (Algorithm 2).

Every block of the cache, and of the buffer, is one split: its softmax is taken relative to the
split's own row maximum, and the splits are merged by their log-sum-exp with the exact exponential.
The result does not depend on how blocks are grouped or in which order they are merged.

The codes are integers: products are of int8 in every 8-bit mode.
"""

import functools

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.progressive.blocks import read_blocks
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics import rounding
from turbojax.sharding import varying_like

_State = tuple[jax.Array, jax.Array, jax.Array]
# Codes int8 [B, K, splits, tokens, H] and scales float32 [B, K, splits].
_Splits = tuple[jax.Array, jax.Array]
# Tokens dequantized at a time: enough to amortize a loop step, small enough to stay in a cache.
_CHUNK_TOKENS = 1024


@functools.partial(jax.jit, static_argnames="options")
def decode(
    query: jax.Array,
    cache: ProgressiveCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`turbojax.decode` in plain JAX; also gives the log-sum-exp.

    `query_length` (int32 ``[B]``) counts the real queries, None for all; padding gives 0 and
    ``-inf``.
    """
    query_length = _checks.check_lengths("query_seq_lengths", query_length, *query.shape[:2])
    batch, length, heads, channels = query.shape
    kv_heads, block = cache.num_kv_heads, cache.config.block_kv
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, channels)
    q, q_scale = rounding.quantize_scores_operand(
        jnp.moveaxis(grouped, 1, 3), rounding.stored_mode(cache.config.mode), axis=-1
    )  # [B, K, G, T, H], [B, K, G, T]
    q_scale = q_scale * options.scale
    begin = modifiers.begin(cache.lengths, query_length)
    position = begin[:, None] + jnp.arange(length)[None]
    is_query = (jnp.arange(length)[None] < query_length[:, None])[:, :, None]
    compressed, first_tokens = cache.lengths - cache.buffer_lengths, cache.config.num_first_tokens

    def attend(
        state: _State, key: _Splits, value: _Splits, keys: jax.Array, visible: jax.Array
    ) -> _State:
        splits, tokens = key[0].shape[2:4]
        mask = options.mask(position, keys, cache.lengths) & visible[:, None] & is_query
        mask = mask.reshape(batch, 1, 1, length, splits, tokens)
        scores = rounding.exact_dot("bkgqh,bkcth->bkgqct", q, key[0])
        factor = q_scale[..., None] * key[1][:, :, None, None]
        scores = rounding.cap_logits(scores * factor[..., None], options.logits_soft_cap)
        return _merge_splits(state, scores, mask, value, cache)

    # A rolling buffer's blocks are read in order, in the same chunks as those of a cache that keeps
    # all.
    total = cache.blocks_of_length
    count = min(total, max(1, _CHUNK_TOKENS // block))

    def chunk(i: jax.Array, state: _State) -> _State:
        # The last chunk starts early enough to stay inside; what it reads twice is masked.
        first = jnp.minimum(i * count, total - count)
        number = first + jnp.arange(count * block)[None] // block
        visible = (number >= i * count) & (number < cache.num_blocks[:, None])
        key, value = (
            read_blocks(side, first, count, is_rolling=cache.is_rolling)
            for side in (cache.key, cache.value)
        )
        keys = first_tokens + first * block + jnp.arange(count * block)
        return attend(state, key, value, jnp.broadcast_to(keys, visible.shape), visible)

    rows = q.shape[:-1]
    state = (
        jnp.zeros((*rows, channels), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    first, stop = options.key_range(
        jnp.min(begin), jnp.max(modifiers.end(cache.lengths, query_length)) - 1, compressed
    )
    chunk_tokens = count * block
    state = varying_like(state, query, cache, query_length, modifiers)
    # Positions by block, without the first tokens, which are in no block.
    first = jnp.maximum(first - first_tokens, 0) // chunk_tokens
    state = jax.lax.fori_loop(first, -(-stop // chunk_tokens), chunk, state)
    slot = jnp.arange(cache.config.buffer_size)[None]
    keys = jnp.where(slot < first_tokens, slot, compressed[:, None] + slot)
    buffered = slot < cache.buffer_lengths[:, None]
    key, value = (_buffer(side, block) for side in (cache.key, cache.value))
    out, residual = rounding.finish(*attend(state, key, value, keys, buffered))
    out = jnp.moveaxis(out, 3, 1).reshape(batch, length, heads, channels)
    residual = jnp.moveaxis(residual, 3, 1).reshape(batch, length, heads)
    return out.astype(options.dtype_of_output(query)), residual


def _buffer(side: CacheSide, block: int) -> _Splits:
    codes = side.buffer.reshape(*side.buffer.shape[:2], -1, block, side.buffer.shape[3])
    return codes, jnp.broadcast_to(side.buffer_scale[..., None], codes.shape[:3])


def _merge_splits(
    state: _State, scores: jax.Array, mask: jax.Array, value: _Splits, cache: ProgressiveCache
) -> _State:
    """Adds splits to a running softmax.

    The state holds outputs ``[B, K, G, T, H]``, row maxima and row sums ``[B, K, G, T]``; scores
    are float32 ``[B, K, G, T, splits, tokens]``, the mask is bool ``[B, 1, 1, T, splits, tokens]``.
    """
    o, m, l = state
    config = cache.config
    exp = rounding.exponential(config)
    scores = jnp.where(mask, scores, -jnp.inf)
    split_max = jnp.max(scores, axis=-1)  # [B, K, G, T, splits]
    shift = rounding.finite_maximum(split_max)
    p = jnp.where(mask, exp(scores - shift[..., None]), 0)
    largest = exp(split_max - shift)[..., None]
    codes, p_scale = rounding.round_probabilities(p, largest, rounding.stored_mode(config.mode))
    new_max = jnp.maximum(m, jnp.max(split_max, axis=-1))
    total_shift = rounding.finite_maximum(new_max)
    weight = jnp.exp(split_max - total_shift[..., None])
    factor = weight * p_scale[..., 0] * value[1][:, :, None, None]
    # A split that a row does not see must not reach it, not even as 0 * NaN.
    factor = jnp.where(jnp.any(mask, axis=-1), factor, 0)
    product = rounding.exact_dot("bkgqct,bkcth->bkgqh", codes * factor[..., None], value[0])
    alpha = jnp.exp(m - total_shift)
    row_sum = jnp.sum(jnp.sum(p, axis=-1) * weight, axis=-1)
    return o * alpha[..., None] + product, new_max, l * alpha + row_sum
