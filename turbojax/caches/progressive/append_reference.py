"""Writing to a `ProgressiveCache` in plain JAX: the definition of `append` and `store_prompt`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from turbojax.caches.progressive.blocks import write_blocks
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.head_priority import head_priority, rank_heads
from turbojax.numerics.int8 import (
    absolute_maximum,
    quantize_int8,
    quantize_with_scale,
    scale_from_maximum,
)

# New tokens --------------------------------------------------------------------------------------


@jax.jit
def append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array | None = None,
) -> ProgressiveCache:
    """Adds tokens: `turbojax.append` of checked arguments; with `first` see `write_blocks`."""
    accepted = accepted_tokens(cache, key.shape[1], lengths)
    flushed = flushes_of_append(cache, accepted)
    update = functools.partial(_append_side, cache, accepted=accepted, flushed=flushed, first=first)
    return with_appended(
        cache, update(cache.key, key), update(cache.value, value), lengths, accepted
    )


def accepted_tokens(cache: ProgressiveCache, tokens: int, lengths: jax.Array) -> jax.Array:
    """int32 ``[B]``: how many of each sequence's `lengths` new tokens there is room for."""
    room = cache.max_length - cache.lengths
    return jnp.clip(lengths, 0, jnp.minimum(room, tokens))


def flushes(config: TurboConfig, tokens: jax.Array) -> jax.Array:
    """How many times a buffer that takes in so many tokens is full and flushed."""
    beyond = tokens - config.buffer_size
    return jnp.where(beyond < 0, 0, beyond // config.flush_size + 1)


def flushes_of_append(cache: ProgressiveCache, accepted: jax.Array) -> jax.Array:
    """int32 ``[B]``: how many times the accepted tokens fill the buffer."""
    return flushes(cache.config, cache.buffer_lengths + accepted)


def stored_blocks(config: TurboConfig, kept: jax.Array) -> jax.Array:
    """How many blocks a prompt of so many tokens fills: the buffer keeps the rest."""
    if config.flush == "all":  # none of it has to go through the buffer
        return kept // config.block_kv
    return flushes(config, kept)


def with_appended(
    cache: ProgressiveCache,
    key: CacheSide,
    value: CacheSide,
    lengths: jax.Array,
    accepted: jax.Array,
) -> ProgressiveCache:
    """The cache with new sides, and its bookkeeping brought up to date."""
    flushed = flushes_of_append(cache, accepted) * cache.config.flush_size
    return dataclasses.replace(
        cache,
        key=key,
        value=value,
        lengths=cache.lengths + accepted,
        buffer_lengths=cache.buffer_lengths + accepted - flushed,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def _append_side(
    cache: ProgressiveCache,
    side: CacheSide,
    x: jax.Array,
    *,
    accepted: jax.Array,
    flushed: jax.Array,
    first: jax.Array | None,
) -> CacheSide:
    config, block = cache.config, cache.config.block_kv
    size, flush, first_tokens = config.buffer_size, config.flush_size, config.num_first_tokens
    stream, run_scale, buffer_scale = buffer_stream(cache, side, x, accepted)
    batch, heads, _, channels = stream.shape
    stay, move = stream[:, :, :first_tokens], stream[:, :, first_tokens:]
    full = move[:, :, : run_scale.shape[-1] * flush]
    start = (cache.lengths - cache.buffer_lengths) // block
    if len(side.codes) > 1:
        slots = rank_first_buffer(cache, side, stream, run_scale, flushed)
        side = dataclasses.replace(side, head_slots=slots)
    side = write_blocks(
        side,
        full.reshape(batch, heads, -1, block, channels),
        jnp.repeat(run_scale, flush // block, axis=-1),
        start,
        flushed * (flush // block),
        first,
    )
    rest = jax.vmap(
        lambda s, f: jax.lax.dynamic_slice_in_dim(s, f * flush, size - first_tokens, axis=1)
    )
    buffer = jnp.concatenate([stay, rest(move, flushed)], axis=2)
    return dataclasses.replace(side, buffer=buffer, buffer_scale=buffer_scale)


def buffer_stream(
    cache: ProgressiveCache, side: CacheSide, x: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One stream of codes: what the buffer holds, then the new tokens.

    Every time the stream fills the buffer, a run of `TurboConfig.flush_size` tokens leaves it. `x`
    is ``[B, T, K, H]``, of which `accepted` tokens (int32 ``[B]``) count.

    Returns int8 codes ``[B, K, buffer_size + runs * flush_size, H]``, 0 past the last token; the
    scales of as many runs as there may be, float32 ``[B, K, runs]``; and the buffer's scale
    afterwards ``[B, K]``.
    """
    size, flush = cache.config.buffer_size, cache.config.flush_size
    x = jnp.swapaxes(x, 1, 2).astype(jnp.float32)  # [B, K, T, H]
    tokens = x.shape[2]
    valid = jnp.arange(tokens)[None] < accepted[:, None]
    scale, is_open = _fix_scale(side.buffer_scale, x, valid)
    # From the first token on that is not finite, the head's codes are 0 and its scale is NaN.
    finite = jnp.all(jnp.isfinite(x), axis=-1) | ~valid[:, None]
    broken = jnp.cumsum(~finite, axis=-1) > 0
    broken = broken | jnp.isnan(scale)[..., None]
    codes = quantize_with_scale(x, _or_one(scale)[..., None, None])
    codes = jnp.where(broken[..., None], 0, codes)

    runs = -(-tokens // flush)
    position = jnp.arange(size + runs * flush)[None]
    source = position - cache.buffer_lengths[:, None]
    used = position < (cache.buffer_lengths + accepted)[:, None]
    new = _take(codes, jnp.clip(source, 0, tokens - 1))
    old = jnp.pad(side.buffer, ((0, 0), (0, 0), (0, runs * flush), (0, 0)))
    stream = jnp.where((source < 0)[:, None, :, None], old, new)
    stream = jnp.where(used[:, None, :, None], stream, 0)
    # A run's blocks have the scale in effect when the token arrived that filled the buffer.
    last = size + jnp.arange(runs)[None] * flush - 1 - cache.buffer_lengths[:, None]
    last = jnp.clip(last, 0, tokens - 1)[:, None]
    run_scale = jnp.where(jnp.take_along_axis(is_open, last, axis=-1), 1, scale[..., None])
    run_scale = jnp.where(jnp.take_along_axis(broken, last, axis=-1), jnp.nan, run_scale)
    return stream, run_scale, jnp.where(broken[..., -1], jnp.nan, scale)


def _fix_scale(scale: jax.Array, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fixes universal scales that are still open: twice the first token that is not all zero.

    Open scales ``[B, K]`` are 0. `x` is float32 ``[B, K, T, H]``, `valid` bool ``[B, T]``. Also
    returns bool ``[B, K, T]``: whether a head is still open after each token.
    """
    maximum = absolute_maximum(x, -1)[..., 0]
    seen = jnp.cumsum((maximum != 0) & valid[:, None], axis=-1) > 0
    first = jnp.argmax(seen, axis=-1)[..., None]
    fixed = scale_from_maximum(2 * jnp.take_along_axis(maximum, first, axis=-1)[..., 0])
    is_open = ~seen & (scale == 0)[..., None]
    return jnp.where((scale == 0) & seen[..., -1], fixed, scale), is_open


def _or_one(scale: jax.Array) -> jax.Array:
    """Scales to divide by: 1 where a head is still open, since all its tokens are zero."""
    return jnp.where(scale == 0, 1, scale)


def is_first_flush(cache: ProgressiveCache, flushed: jax.Array) -> jax.Array:
    """Bool ``[B]``: whether a sequence's first blocks come from its buffer in this step."""
    return (cache.lengths == cache.buffer_lengths) & (flushed > 0)


def rank_first_buffer(
    cache: ProgressiveCache,
    side: CacheSide,
    stream: jax.Array,
    run_scale: jax.Array,
    flushed: jax.Array,
) -> jax.Array:
    """Slots ``[B, K]``: ranked on the first full buffer, if no block was compressed before.

    `stream` and `run_scale` come from `buffer_stream`, `flushed` from `flushes_of_append`.
    """
    codes = stream[:, :, : cache.config.buffer_size].astype(jnp.float32)
    tokens = jnp.swapaxes(codes * run_scale[..., :1, None], 1, 2)
    config = cache.config
    slots = rank_heads(head_priority(tokens, config.head_priority), config.heads_per_group)
    return jnp.where(is_first_flush(cache, flushed)[:, None], slots, side.head_slots)


# A prompt ----------------------------------------------------------------------------------------


@jax.jit
def store_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array | None = None,
) -> ProgressiveCache:
    """`update.store_prompt` of checked arguments; with `first` of a part, see `write_blocks`."""
    kept = kept_tokens(cache, key.shape[1], lengths)
    key_side = _store_prompt_side(cache, cache.key, key, kept, first)
    value_side = _store_prompt_side(cache, cache.value, value, kept, first)
    return with_prompt(cache, key_side, value_side, lengths, kept)


def kept_tokens(cache: ProgressiveCache, size: int, lengths: jax.Array) -> jax.Array:
    """int32 ``[B]``: tokens of each prompt that are stored; none if the sequence has some."""
    return jnp.where(cache.lengths == 0, jnp.clip(lengths, 0, min(size, cache.max_length)), 0)


def with_prompt(
    cache: ProgressiveCache,
    key: CacheSide,
    value: CacheSide,
    lengths: jax.Array,
    kept: jax.Array,
) -> ProgressiveCache:
    """The cache with new sides, and its bookkeeping brought up to date."""
    rest = kept - stored_blocks(cache.config, kept) * cache.config.block_kv
    return dataclasses.replace(
        cache,
        key=key,
        value=value,
        lengths=cache.lengths + kept,
        buffer_lengths=jnp.where(cache.lengths == 0, rest, cache.buffer_lengths),
        overflowed=cache.overflowed | (lengths > kept),
    )


def _store_prompt_side(
    cache: ProgressiveCache,
    side: CacheSide,
    x: jax.Array,
    kept: jax.Array,
    first: jax.Array | None,
) -> CacheSide:
    config, block = cache.config, cache.config.block_kv
    side = rank_prompt(side, x, kept, config)
    maximum = prompt_maximum(x, kept)
    x = _without_padding(x, kept)
    to_blocks = x[:, config.num_first_tokens :]
    padded = jnp.pad(to_blocks, ((0, 0), (0, -to_blocks.shape[1] % block), (0, 0), (0, 0)))
    padded = jnp.swapaxes(padded, 1, 2)  # [B, K, S, H]
    blocks = padded.reshape(*padded.shape[:2], -1, block, padded.shape[3])
    codes, block_scale = quantize_int8(blocks, axis=(3, 4))
    count = stored_blocks(config, kept)
    side = write_blocks(side, codes, block_scale, jnp.zeros_like(kept), count, first)
    return buffer_rest(side, prompt_rest(x, kept, config), maximum, kept, config)


def rank_prompt(side: CacheSide, x: jax.Array, kept: jax.Array, config: TurboConfig) -> CacheSide:
    """Ranks the heads of sequences whose prompt ``x [B, S, K, H]`` becomes blocks."""
    if len(side.codes) == 1:
        return side
    valid = jnp.arange(x.shape[1])[None] < kept[:, None]
    priority = head_priority(_without_padding(x, kept), config.head_priority, valid)
    slots = rank_heads(priority, config.heads_per_group)
    ranked = (stored_blocks(config, kept) > 0)[:, None]
    return dataclasses.replace(side, head_slots=jnp.where(ranked, slots, side.head_slots))


def prompt_maximum(x: jax.Array, kept: jax.Array) -> jax.Array:
    """The largest absolute value of the kept tokens of ``x [B, S, K, H]``: float32 ``[B, K]``."""
    return absolute_maximum(_without_padding(x, kept), (1, 3))[:, 0, :, 0]


def prompt_rest(x: jax.Array, kept: jax.Array, config: TurboConfig) -> jax.Array:
    """The `kept` tokens that go to the buffer: float32 ``[B, K, buffer_size, H]``, 0 past them."""
    slot = jnp.arange(config.buffer_size)[None]
    compressed = (stored_blocks(config, kept) * config.block_kv)[:, None]
    position = jnp.where(slot < config.num_first_tokens, slot, compressed + slot)
    index = jnp.minimum(position, x.shape[1] - 1)
    rest = jax.vmap(lambda a, i: jnp.take(a, i, axis=0))(x, index).astype(jnp.float32)
    rest = jnp.where((position < kept[:, None])[..., None, None], rest, 0)
    return jnp.swapaxes(rest, 1, 2)


def buffer_rest(
    side: CacheSide,
    rest: jax.Array,
    maximum: jax.Array,
    kept: jax.Array,
    config: TurboConfig,
) -> CacheSide:
    """Fixes the universal scales and puts the tokens that become no block into the buffer.

    `rest` and `maximum` are as `prompt_rest` and `prompt_maximum` give them.
    """
    # Fewer tokens than a block say little about the range to come.
    headroom = jnp.where(kept < config.block_kv, 2.0, 1.0)[:, None]
    is_open = (side.buffer_scale == 0) & (maximum != 0)
    scale = jnp.where(is_open, scale_from_maximum(headroom * maximum), side.buffer_scale)
    # Needed where the scale was given and not taken from `maximum`.
    broken = jnp.any(~jnp.isfinite(rest), axis=(2, 3))
    scale = jnp.where(broken, jnp.nan, scale)
    buffer = quantize_with_scale(rest, _or_one(scale)[..., None, None])
    new = (kept > 0)[:, None, None, None]
    return dataclasses.replace(side, buffer=jnp.where(new, buffer, side.buffer), buffer_scale=scale)


def _without_padding(x: jax.Array, kept: jax.Array) -> jax.Array:
    """``x [B, S, K, H]`` as float32, 0 from token `kept` on."""
    valid = jnp.arange(x.shape[1])[None] < kept[:, None]
    return jnp.where(valid[:, :, None, None], x.astype(jnp.float32), 0)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens ``[B, K, n, H]`` of ``x [B, K, S, H]`` at each sequence's ``index [B, n]``."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=1))(x, index)
