"""The Triton kernels that write a `ProgressiveCache`: what they take, how they are launched."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import interpreting, needs_gpu, unindexable
from turbojax.config import Mode, TurboConfig
from turbojax.quantizers import absolute_maximum
from turbojax.state.progressive import reference
from turbojax.state.progressive.cache import CacheSide, ProgressiveCache

if TYPE_CHECKING:
    from pallas_kernels.triton.compress import BlockLayout, Compressed

_AMPERE = 8.0
_LARGEST_HEAD_DIM = 256
_BLOCKS = (16, 256)


class Operands(NamedTuple):
    """A prompt in 8 bits, padded to whole blocks: what attention reads.

    Attributes:
      key: ``[B, K, Sp, H]``, int8 or, in mode ``"fp8"``, e4m3; tokens past a sequence's length
        are 0.
      key_scale: float32 ``[B, K, Sp / block_kv]``, 1 for a block of zeros, NaN for one with a
        value that is not finite.
      value: ``[B, K, H, Sp]``, tokens last, int8 or, in modes ``"int8_fp8"`` and ``"fp8"``, e4m3.
      value_scale: as `key_scale`, in e4m3 one number per sequence and head.
    """

    key: jax.Array
    key_scale: jax.Array
    value: jax.Array
    value_scale: jax.Array


def store_prompt_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `store_prompt` cannot run this here; None if it can."""
    return _unsupported(cache, key)


def append_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    if key.shape[1] != 1:
        return f"key.shape[1]={key.shape[1]} must be 1: it appends token by token"
    return _unsupported(cache, key)


def _unsupported(cache: ProgressiveCache, key: jax.Array) -> str | None:
    block = cache.config.block_kv
    if block & (block - 1) or not _BLOCKS[0] <= block <= _BLOCKS[1]:
        return f"block_kv={block} must be a power of two from {_BLOCKS[0]} to {_BLOCKS[1]}"
    if cache.head_dim > _LARGEST_HEAD_DIM:
        return f"head_dim={cache.head_dim} must be at most {_LARGEST_HEAD_DIM}"
    batch, size, heads, channels = key.shape
    sizes = [batch * heads * channels * (-(-size // block) * block)]
    for side in (cache.key, cache.value):
        sizes += [x.size * x.dtype.itemsize for x in (*side.codes, side.channel_scale, side.buffer)]
    return unindexable(*sizes) or needs_gpu(_AMPERE)


def store_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """`reference.store_prompt` with one kernel a side."""
    return store_prompt_triton(cache, key, value, lengths, with_operands=False)[0]


def store_prompt_triton(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    with_operands: bool,
    permuted: bool = False,
) -> tuple[ProgressiveCache, Operands | None]:
    """Stores a prompt and hands out its codes for attention.

    The codes come from the same pass over keys and values; only values in e4m3, whose one scale
    needs the maximum of all, are read again.

    Args:
      cache: as in `turbojax.state.progressive.update.store_prompt`.
      key: ``[B, S, K, H]``.
      value: the same.
      lengths: int32 ``[B]``. Operands hold this many tokens, also where the cache has no room for
        them.
      with_operands: whether the second result is wanted; not in mode ``"float"``.
      permuted: whether the keys' codes are in the order of `mosaic_gpu`, see
        `turbojax.ops.turbo_attention.operands.Operands`.

    Returns:
      The cache, and the operands or None.
    """
    return _store_prompt(
        cache,
        key,
        value,
        lengths,
        with_operands=with_operands,
        permuted=permuted,
        interpret=interpreting(),
    )


@functools.partial(jax.jit, static_argnames=("with_operands", "permuted", "interpret"))
def _store_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    with_operands: bool,
    permuted: bool = False,
    interpret: bool,
) -> tuple[ProgressiveCache, Operands | None]:
    config = cache.config
    kept = reference.kept_tokens(cache, key.shape[1], lengths)
    inside = jnp.clip(lengths, 0, key.shape[1])
    key_operand, value_operand = _OPERANDS[config.mode] if with_operands else (None, None)
    store = functools.partial(
        _store_prompt_side,
        lengths=inside,
        kept=kept,
        config=config,
        # The buffer's scale follows from the maxima of blocks that a ring does not hold, too.
        every_block=with_operands or cache.is_ring,
        interpret=interpret,
    )
    key_side, keys = store(cache.key, key, operand=key_operand, permuted=permuted)
    value_side, values = store(cache.value, value, operand=value_operand)
    filled = reference.with_prompt(cache, key_side, value_side, lengths, kept)
    if keys.operand is None:
        return filled, None
    if values.operand is not None:
        return filled, Operands(*keys.operand, *values.operand)
    from pallas_kernels.triton.quantize import quantize

    codes = quantize(
        value,
        inside,
        values.maximum,
        block=config.block_kv,
        dtype=jnp.float8_e4m3fn,
        tokens_last=True,
        interpret=interpret,
    )
    return filled, Operands(*keys.operand, *codes)


# What the pass over keys, and that over values, can write for attention. One scale for all of a
# head's values is known only after it.
_OPERANDS: Mapping[Mode, tuple[jax.typing.DTypeLike, jax.typing.DTypeLike | None]] = {
    "int8": (jnp.int8, jnp.int8),
    "int8_fp8": (jnp.int8, None),
    "fp8": (jnp.float8_e4m3fn, None),
}


def _store_prompt_side(
    side: CacheSide,
    x: jax.Array,
    *,
    lengths: jax.Array,
    kept: jax.Array,
    config: TurboConfig,
    operand: jax.typing.DTypeLike | None,
    every_block: bool,
    permuted: bool = False,
    interpret: bool,
) -> tuple[CacheSide, "Compressed"]:
    from pallas_kernels.triton.compress import compress

    count = kept // config.block_kv
    side = reference.rank_prompt(side, x, kept, config)
    written = compress(
        x,
        lengths,
        count,
        side.head_slots,
        side.codes,
        side.channel_scale,
        side.channel_zero,
        side.block_scale,
        layout=_layout(side, config),
        every_block=every_block,
        operand=operand,
        permuted=permuted,
        interpret=interpret,
    )
    side = dataclasses.replace(
        side,
        codes=written.codes,
        channel_scale=written.channel_scale,
        channel_zero=written.channel_zero,
        block_scale=written.block_scale,
    )
    # The largest value kept is in a stored block or in the rest.
    stored = jnp.arange(written.maximum.shape[-1])[None] < count[:, None]
    in_blocks = absolute_maximum(jnp.where(stored[:, None], written.maximum, 0), -1)
    rest = reference.prompt_rest(x, kept, config.block_kv)
    in_rest = absolute_maximum(rest, (2, 3))[..., 0]
    maximum = absolute_maximum(jnp.concatenate([in_blocks, in_rest], axis=-1), -1)[..., 0]
    return reference.buffer_rest(side, rest, maximum, kept, config), written


def append(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """`reference.append` of one token per sequence with one kernel a side."""
    return _append(cache, key, value, lengths, interpret=interpreting())


@functools.partial(jax.jit, static_argnames="interpret")
def _append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    interpret: bool,
) -> ProgressiveCache:
    accepted = reference.accepted_tokens(cache, 1, lengths)
    update = functools.partial(_append_side, cache, accepted=accepted, interpret=interpret)
    key_side, value_side = update(cache.key, key), update(cache.value, value)
    return reference.with_appended(cache, key_side, value_side, lengths, accepted)


def _append_side(
    cache: ProgressiveCache,
    side: CacheSide,
    x: jax.Array,
    *,
    accepted: jax.Array,
    interpret: bool,
) -> CacheSide:
    from pallas_kernels.triton.append import append

    if len(side.codes) > 1:
        slots = _rank_first_buffer(cache, side, x, accepted)
        side = dataclasses.replace(side, head_slots=slots)
    codes, channel_scale, channel_zero, block_scale, buffer, buffer_scale = append(
        x[:, 0],
        accepted,
        cache.buffer_lengths,
        cache.num_blocks % cache.blocks_of_room,
        side.head_slots,
        side.codes,
        side.channel_scale,
        side.channel_zero,
        side.block_scale,
        side.buffer,
        side.buffer_scale,
        layout=_layout(side, cache.config),
        interpret=interpret,
    )
    return dataclasses.replace(
        side,
        codes=codes,
        channel_scale=channel_scale,
        channel_zero=channel_zero,
        block_scale=block_scale,
        buffer=buffer,
        buffer_scale=buffer_scale,
    )


def _rank_first_buffer(
    cache: ProgressiveCache, side: CacheSide, x: jax.Array, accepted: jax.Array
) -> jax.Array:
    """The heads' slots; work is done only in the step that fills some sequence's first buffer."""
    flushed = reference.flushed_buffers(cache, accepted)

    def rank() -> jax.Array:
        stream, run_scale, _ = reference.buffer_stream(cache, side, x, accepted)
        return reference.rank_first_buffer(cache, side, stream, run_scale, flushed)

    first = jnp.any(reference.is_first_flush(cache, flushed))
    return jax.lax.cond(first, rank, lambda: side.head_slots)


def _layout(side: CacheSide, config: TurboConfig) -> "BlockLayout":
    from pallas_kernels.triton.compress import BlockLayout

    return BlockLayout(
        tokens=config.block_kv,
        channels=side.buffer.shape[-1],
        bits=side.bits,
        heads=tuple(codes.shape[1] for codes in side.codes),
        tokens_last=side.tokens_last,
    )
