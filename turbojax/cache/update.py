"""Writing to a `ProgressiveCache`: a prompt, or new tokens (TurboAttention, section 3.3)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax.cache.blocks import write_blocks
from turbojax.cache.progressive import CacheSide, ProgressiveCache
from turbojax.quantizers import (
    absolute_maximum,
    head_priority,
    quantize_int8,
    quantize_with_scale,
    rank_heads,
    scale_from_maximum,
)


def append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
) -> ProgressiveCache:
    """Adds new tokens, one or many per sequence.

    Tokens go to the int8 buffer with the universal scale, clamped to +-119 codes; a full buffer
    is compressed to blocks and emptied. Without a prefill or a given scale, a head's universal
    scale is twice the maximum of its first token that is not all zero, over 119. The result
    does not depend, bit for bit, on how a run of tokens is split into calls.

    Args:
      cache: the cache to extend.
      key: ``[B, T, K, H]`` in `cache.dtype`.
      value: the same shape and dtype.
      lengths: optional int ``[B]``: how many of the `T` tokens belong to each sequence, the first
        ones; all of them if not given. `decode` takes the same as `query_seq_lengths`. Under
        `jit` values outside ``0..T`` act as the nearest bound, and more than `T` as overflow.

    Returns:
      The extended cache. Under `jit`, tokens past `max_length` are left out and `overflowed`
      turns True for their sequence; nothing that was stored changes.

    Raises:
      TypeError: if a dtype differs from `cache.dtype`, or `lengths` are no integers.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed
        `max_length` or a length is outside ``0..T``.
    """
    check_cache_arguments(cache, key, value)
    batch, tokens = key.shape[:2]
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    if _checks.is_concrete(lengths, cache.lengths):
        total = np.asarray(cache.lengths) + np.asarray(lengths)
        if np.any(total > cache.max_length):
            raise ValueError(
                f"appending would give lengths {total.tolist()}, "
                f"which must be at most max_length={cache.max_length}"
            )
    return refuse_gradients(_append, "append")(cache, key, value, lengths)


def store_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """Stores a prompt in empty sequences: the cache's half of `prefill` (Algorithm 1).

    Args:
      cache: the cache; sequences that are not empty stay as they are and turn `overflowed`.
      key: ``[B, S, K, H]`` in `cache.dtype`.
      value: the same shape and dtype.
      lengths: int32 ``[B]``, tokens of each prompt.

    Returns:
      The cache with ``length // block_kv`` blocks compressed and the rest in the buffer.

    Raises:
      TypeError: if a dtype differs from `cache.dtype`.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence is not empty or longer
        than `max_length`.
    """
    check_cache_arguments(cache, key, value)
    if _checks.is_concrete(lengths, cache.lengths):
        held, new = np.asarray(cache.lengths), np.asarray(lengths)
        if np.any((held > 0) & (new > 0)):
            raise ValueError(f"cache.lengths={held.tolist()} must be 0: prefill starts a sequence")
        if np.any(new > cache.max_length):
            raise ValueError(
                f"prompt lengths {new.tolist()} must be at most max_length={cache.max_length}"
            )
    return refuse_gradients(_store_prompt, "prefill")(cache, key, value, lengths)


def check_cache_arguments(cache: ProgressiveCache, key: jax.Array, value: jax.Array) -> None:
    """Raises unless `key` and `value` are tokens for this cache."""
    if not isinstance(cache, ProgressiveCache):
        raise TypeError(f"cache is a {type(cache).__name__}, must be a ProgressiveCache")
    _checks.check_key_value(key, value)
    expected = (cache.batch_size, cache.num_kv_heads, cache.head_dim)
    if (key.shape[0], key.shape[2], key.shape[3]) != expected:
        batch, heads, channels = expected
        raise ValueError(
            f"{key.shape=} must be [{batch}, T, {heads}, {channels}], as the cache was made for"
        )
    if key.dtype != cache.dtype:
        raise TypeError(f"key.dtype={key.dtype} must equal cache.dtype={cache.dtype}")


@jax.jit
def _append(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    room = cache.max_length - cache.lengths
    accepted = jnp.clip(lengths, 0, jnp.minimum(room, key.shape[1]))
    total = cache.buffer_lengths + accepted
    flushed = total // cache.config.buffer_size
    update = functools.partial(_append_side, cache, accepted=accepted, flushed=flushed)
    low = cache.config.num_low_bit_key_heads, cache.config.num_low_bit_value_heads
    return dataclasses.replace(
        cache,
        key=update(cache.key, key, num_low=low[0]),
        value=update(cache.value, value, num_low=low[1]),
        lengths=cache.lengths + accepted,
        buffer_lengths=total - flushed * cache.config.buffer_size,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def _append_side(
    cache: ProgressiveCache,
    side: CacheSide,
    x: jax.Array,
    *,
    accepted: jax.Array,
    flushed: jax.Array,
    num_low: int,
) -> CacheSide:
    size, block = cache.config.buffer_size, cache.config.block_kv
    x = jnp.swapaxes(x, 1, 2).astype(jnp.float32)  # [B, K, T, H]
    tokens = x.shape[2]
    valid = jnp.arange(tokens)[None] < accepted[:, None]
    scale, is_open = _fix_scale(side.buffer_scale, x, valid)
    # From the first token that is not finite on, the head's codes are 0 and its scale NaN.
    finite = jnp.all(jnp.isfinite(x), axis=-1) | ~valid[:, None]
    broken = jnp.cumsum(~finite, axis=-1) > 0
    broken = broken | jnp.isnan(scale)[..., None]
    codes = quantize_with_scale(x, _or_one(scale)[..., None, None])
    codes = jnp.where(broken[..., None], 0, codes)

    # One stream: what the buffer holds, then the new tokens, cut into runs of one buffer.
    runs = (size - 1 + tokens) // size + 1
    position = jnp.arange(runs * size)[None]
    source = position - cache.buffer_lengths[:, None]
    used = position < (cache.buffer_lengths + accepted)[:, None]
    new = _take(codes, jnp.clip(source, 0, tokens - 1))
    old = jnp.pad(side.buffer, ((0, 0), (0, 0), (0, (runs - 1) * size), (0, 0)))
    stream = jnp.where((source < 0)[:, None, :, None], old, new)
    stream = jnp.where(used[:, None, :, None], stream, 0)
    # A run's blocks have the scale that stood when its last token came.
    last = jnp.arange(1, runs)[None] * size - 1 - cache.buffer_lengths[:, None]
    last = jnp.clip(last, 0, tokens - 1)[:, None]
    run_scale = jnp.where(jnp.take_along_axis(is_open, last, axis=-1), 1, scale[..., None])
    run_scale = jnp.where(jnp.take_along_axis(broken, last, axis=-1), jnp.nan, run_scale)

    batch, heads, _, channels = stream.shape
    full = stream[:, :, : (runs - 1) * size]
    start = (cache.lengths - cache.buffer_lengths) // block
    side = _rank_first_buffer(cache, side, full[:, :, :size], run_scale[..., 0], flushed, num_low)
    side = write_blocks(
        side,
        full.reshape(batch, heads, -1, block, channels),
        jnp.repeat(run_scale, size // block, axis=-1),
        start,
        flushed * (size // block),
    )
    rest = jax.vmap(lambda s, f: jax.lax.dynamic_slice_in_dim(s, f * size, size, axis=1))
    return dataclasses.replace(
        side,
        buffer=rest(stream, flushed),
        buffer_scale=jnp.where(broken[..., -1], jnp.nan, scale),
    )


def _fix_scale(scale: jax.Array, x: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Fixes universal scales that are still open: twice the first token that is not all zero.

    Args:
      scale: float32 ``[B, K]``, 0 where open.
      x: float32 ``[B, K, T, H]``, new tokens.
      valid: bool ``[B, T]``, which of them exist.

    Returns:
      The scales, and bool ``[B, K, T]``: whether a head is still open after each token.
    """
    maximum = absolute_maximum(x, -1)[..., 0]
    seen = jnp.cumsum((maximum != 0) & valid[:, None], axis=-1) > 0
    first = jnp.argmax(seen, axis=-1)[..., None]
    fixed = scale_from_maximum(2 * jnp.take_along_axis(maximum, first, axis=-1)[..., 0])
    is_open = ~seen & (scale == 0)[..., None]
    return jnp.where((scale == 0) & seen[..., -1], fixed, scale), is_open


def _or_one(scale: jax.Array) -> jax.Array:
    """Scales to divide by: 1 where a head is still open and all its tokens are zero."""
    return jnp.where(scale == 0, 1, scale)


def _rank_first_buffer(
    cache: ProgressiveCache,
    side: CacheSide,
    codes: jax.Array,
    scale: jax.Array,
    flushed: jax.Array,
    num_low: int,
) -> CacheSide:
    """Ranks the heads on the first full buffer, if no block was compressed before."""
    if len(side.codes) == 1:
        return side
    tokens = jnp.swapaxes(codes.astype(jnp.float32) * scale[..., None, None], 1, 2)
    slots = rank_heads(head_priority(tokens, cache.config.head_priority))
    first = (cache.lengths == cache.buffer_lengths) & (flushed > 0)
    return dataclasses.replace(side, head_slots=jnp.where(first[:, None], slots, side.head_slots))


@jax.jit
def _store_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    empty = cache.lengths == 0
    kept = jnp.where(empty, jnp.clip(lengths, 0, min(key.shape[1], cache.max_length)), 0)
    blocks = kept // cache.config.block_kv
    rest = kept - blocks * cache.config.block_kv
    return dataclasses.replace(
        cache,
        key=_store_prompt_side(cache, cache.key, key, kept),
        value=_store_prompt_side(cache, cache.value, value, kept),
        lengths=cache.lengths + kept,
        buffer_lengths=jnp.where(empty, rest, cache.buffer_lengths),
        overflowed=cache.overflowed | (lengths > kept),
    )


def _store_prompt_side(
    cache: ProgressiveCache, side: CacheSide, x: jax.Array, kept: jax.Array
) -> CacheSide:
    block, size = cache.config.block_kv, cache.config.buffer_size
    batch, length, heads, channels = x.shape
    valid = jnp.arange(length)[None] < kept[:, None]
    x = jnp.where(valid[:, :, None, None], x.astype(jnp.float32), 0)
    if len(side.codes) > 1:
        slots = rank_heads(head_priority(x, cache.config.head_priority, valid))
        side = dataclasses.replace(
            side, head_slots=jnp.where((kept >= block)[:, None], slots, side.head_slots)
        )
    maximum = absolute_maximum(x, (1, 3))[:, 0, :, 0]
    # Fewer tokens than a block say little about the range to come.
    headroom = jnp.where(kept < block, 2.0, 1.0)[:, None]
    is_open = (side.buffer_scale == 0) & (maximum != 0)
    scale = jnp.where(is_open, scale_from_maximum(headroom * maximum), side.buffer_scale)

    x = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    x = jnp.swapaxes(x, 1, 2)  # [B, K, S, H]
    codes, block_scale = quantize_int8(x.reshape(batch, heads, -1, block, channels), axis=(3, 4))
    side = write_blocks(side, codes, block_scale, jnp.zeros_like(kept), kept // block)

    # The tokens that fill no block go to the buffer.
    position = (kept // block * block)[:, None] + jnp.arange(block)[None]
    tail = _take(x, jnp.minimum(position, x.shape[2] - 1))
    in_buffer = (position < kept[:, None])[:, None, :, None]
    # A given scale does not know of it.
    broken = jnp.any(~jnp.isfinite(tail) & in_buffer, axis=(2, 3))
    scale = jnp.where(broken, jnp.nan, scale)
    buffer = jnp.where(in_buffer, quantize_with_scale(tail, _or_one(scale)[..., None, None]), 0)
    buffer = jnp.pad(buffer, ((0, 0), (0, 0), (0, size - block), (0, 0)))
    new = (kept > 0)[:, None, None, None]
    return dataclasses.replace(side, buffer=jnp.where(new, buffer, side.buffer), buffer_scale=scale)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens ``[B, K, n, H]`` of ``x [B, K, S, H]`` at each sequence's ``index [B, n]``."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=1))(x, index)
