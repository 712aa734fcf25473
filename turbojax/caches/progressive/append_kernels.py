"""What kernels that write a `ProgressiveCache` share: their operands, and the code around them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax._device import AMPERE, interpreting, needs_gpu
from turbojax.caches.progressive import append_reference
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics.config import Mode, TurboConfig
from turbojax.numerics.int8 import absolute_maximum
from turbojax.sharding import varying_like

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


# Dtypes that the passes over keys and over values can write for attention. The single scale of a
# head's e4m3 values is known only after the pass.
_OPERANDS: Mapping[Mode, tuple[jax.typing.DTypeLike, jax.typing.DTypeLike | None]] = {
    "int8": (jnp.int8, jnp.int8),
    "int8_fp8": (jnp.int8, None),
    "fp8": (jnp.float8_e4m3fn, None),
}


class Prompt(NamedTuple):
    """One side of a prompt, for a kernel that compresses its blocks.

    Attributes:
      side: keys or values, with its heads ranked.
      x: ``[B, S, K, H]``.
      operand: dtype of the codes for attention, or None for none of them.
      every_block: whether maxima of all blocks are wanted, stored or not.
      begin: the token that the first block begins with.
    """

    side: CacheSide
    x: jax.Array
    operand: jax.typing.DTypeLike | None
    every_block: bool
    begin: int = 0


Compress = Callable[[Sequence[Prompt], jax.Array, jax.Array], Sequence[Any]]
"""``compress(prompts, lengths, count)`` gives a `pallas_kernels.layouts.Compressed` a side; of each
prompt int32 ``[B]`` tokens of `Prompt.x`, 0 past them, and whole blocks to store."""
Quantize = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""``quantize(value, lengths, maxima)`` gives values in e4m3 with tokens last, and their scales."""


def unsupported(cache: ProgressiveCache) -> str | None:
    """Why no kernel can write this cache; None if one might."""
    block = cache.config.block_kv
    if block & (block - 1) or not _BLOCKS[0] <= block <= _BLOCKS[1]:
        return f"block_kv={block} must be a power of two from {_BLOCKS[0]} to {_BLOCKS[1]}"
    if cache.head_dim > _LARGEST_HEAD_DIM:
        return f"head_dim={cache.head_dim} must be at most {_LARGEST_HEAD_DIM}"
    return None


def append_unsupported(cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why no kernel can append these tokens; None if one might."""
    if key.shape[1] != 1:
        return f"key.shape[1]={key.shape[1]} must be 1: it appends token by token"
    return unsupported(cache)


def stored_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    with_operands: bool,
    compress: Compress,
    quantize: Quantize,
) -> tuple[ProgressiveCache, Operands | None]:
    """Stores a prompt and returns its codes for attention, if they are wanted.

    The codes come from the same pass over keys and values; only values in e4m3, whose single scale
    needs the maximum of all, are read again. There are no codes where first tokens stay in the
    buffer: blocks of the cache then begin elsewhere than those of attention, which makes its own
    codes.
    """
    config, begin = cache.config, cache.config.num_first_tokens
    if key.shape[1] <= begin:  # there is no block to write
        return append_reference.store_prompt(cache, key, value, lengths), None
    with_operands = with_operands and not begin
    kept = append_reference.kept_tokens(cache, key.shape[1], lengths)
    inside = jnp.clip(lengths, 0, key.shape[1])
    operands = _OPERANDS[config.mode] if with_operands else (None, None)
    # The buffer's scale also follows from the maxima of blocks that a rolling buffer no longer
    # holds.
    every_block = with_operands or cache.is_rolling
    prompts = [
        Prompt(append_reference.rank_prompt(side, x, kept, config), x, operand, every_block, begin)
        for side, x, operand in zip((cache.key, cache.value), (key, value), operands, strict=True)
    ]
    count = append_reference.stored_blocks(config, kept)
    written = compress(prompts, inside, count)
    key_side, value_side = (
        _with_blocks(p.side, x, w, kept, config)
        for p, x, w in zip(prompts, (key, value), written, strict=True)
    )
    filled = append_reference.with_prompt(cache, key_side, value_side, lengths, kept)
    keys, values = (w.operand for w in written)
    if keys is None:
        return filled, None
    return filled, Operands(*keys, *(values or quantize(value, inside, written[1].maximum)))


def stored_part_of_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
    *,
    compress: Compress,
) -> ProgressiveCache:
    """`reference.store_prompt` with `first`: compresses only the blocks that have a place here."""
    config = cache.config
    kept = append_reference.kept_tokens(cache, key.shape[1], lengths)
    size = min(-(-key.shape[1] // config.block_kv) * config.block_kv, cache.room)
    begin = first * config.block_kv
    count = append_reference.stored_blocks(config, kept)
    held = jnp.clip(count * config.block_kv - begin, 0, size)
    start = begin + config.num_first_tokens
    prompts = [
        Prompt(
            append_reference.rank_prompt(side, x, kept, config),
            _tokens(x, start, size),
            None,
            False,
        )
        for side, x in ((cache.key, key), (cache.value, value))
    ]
    written = compress(prompts, held, held // config.block_kv)

    def side(i: int, x: jax.Array) -> CacheSide:
        rest = append_reference.prompt_rest(x, kept, config)
        maximum = append_reference.prompt_maximum(x, kept)
        side = _with_codes(prompts[i].side, written[i])
        return append_reference.buffer_rest(side, rest, maximum, kept, config)

    return append_reference.with_prompt(cache, side(0, key), side(1, value), lengths, kept)


def _tokens(x: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    """`size` tokens of ``x [B, S, K, H]`` from `begin` on, zeros past the last."""
    padded = jnp.pad(x, ((0, 0), (0, size), (0, 0), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, jnp.minimum(begin, x.shape[1]), size, axis=1)


def _with_codes(side: CacheSide, written: Any) -> CacheSide:
    return dataclasses.replace(
        side,
        codes=written.codes,
        channel_scale=written.channel_scale,
        channel_zero=written.channel_zero,
        block_scale=written.block_scale,
    )


def _with_blocks(
    side: CacheSide, x: jax.Array, written: Any, kept: jax.Array, config: TurboConfig
) -> CacheSide:
    """A side with its blocks, and the rest of the prompt in its buffer."""
    side = _with_codes(side, written)
    # The largest value kept is in a stored block or in the rest.
    count = append_reference.stored_blocks(config, kept)
    stored = jnp.arange(written.maximum.shape[-1])[None] < count[:, None]
    in_blocks = absolute_maximum(jnp.where(stored[:, None], written.maximum, 0), -1)
    rest = append_reference.prompt_rest(x, kept, config)
    in_rest = absolute_maximum(rest, (2, 3))[..., 0]
    maximum = absolute_maximum(jnp.concatenate([in_blocks, in_rest], axis=-1), -1)[..., 0]
    return append_reference.buffer_rest(side, rest, maximum, kept, config)


Append = Callable[..., Sequence[CacheSide]]
"""``append(sides, tokens, accepted, row, start)`` gives the sides with a token ``[B, K, H]`` each;
int32 ``[B]``: whether there is one, tokens in the buffer, and the place of the next block, negative
if it has none."""


def appended(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    append: Append,
    first: jax.Array | None = None,
) -> ProgressiveCache:
    """`reference.append` of one token per sequence."""
    accepted = append_reference.accepted_tokens(cache, 1, lengths)
    sides = _ranked(cache, key, value, accepted)
    if first is None:
        start = cache.num_blocks % cache.blocks_of_room
    else:
        start = cache.num_blocks - first
        start = jnp.where(start < cache.blocks_of_room, start, -1)
    tokens = [x[:, 0] for x in (key, value)]
    # The bound, which changes nothing, makes XLA compute this with the lengths after. Of the array
    # itself, which these replace in place, it would make a copy first, a launch in every step.
    row = jnp.maximum(cache.buffer_lengths, 0)
    key_side, value_side = append(sides, tokens, accepted, row, start)
    return append_reference.with_appended(cache, key_side, value_side, lengths, accepted)


def _ranked(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, accepted: jax.Array
) -> list[CacheSide]:
    """The sides with their heads' slots; only the step that fills a first buffer computes them."""
    sides, tokens, config = [cache.key, cache.value], (key, value), cache.config
    mixed = [i for i, side in enumerate(sides) if len(side.codes) > 1]
    if not mixed:
        return sides
    flushed = append_reference.flushes_of_append(cache, accepted)
    is_first = append_reference.is_first_flush(cache, flushed)
    if config.head_priority == "entropy" or needs_gpu(AMPERE):
        slots = [_slots_of(cache, sides[i], tokens[i], accepted, is_first) for i in mixed]
    else:
        from pallas_kernels.triton.rank import Side, rank

        given = [
            Side(tokens[i][:, 0], sides[i].buffer, sides[i].buffer_scale, sides[i].head_slots)
            for i in mixed
        ]
        slots = rank(
            is_first.astype(jnp.int32),
            given,
            method=config.head_priority,
            group=config.heads_per_group,
            interpret=interpreting(),
        )
    for i, own in zip(mixed, slots, strict=True):
        sides[i] = dataclasses.replace(sides[i], head_slots=own)
    return sides


def _slots_of(
    cache: ProgressiveCache,
    side: CacheSide,
    x: jax.Array,
    accepted: jax.Array,
    is_first: jax.Array,
) -> jax.Array:
    """A side's slots in plain JAX, for which XLA asks the device on the host in every step."""
    inputs = (cache, side, x, accepted)

    def rank() -> jax.Array:
        stream, run_scale, _ = append_reference.buffer_stream(cache, side, x, accepted)
        flushed = append_reference.flushes_of_append(cache, accepted)
        slots = append_reference.rank_first_buffer(cache, side, stream, run_scale, flushed)
        return varying_like(slots, inputs)

    def keep() -> jax.Array:
        return varying_like(side.head_slots, inputs)

    slots: jax.Array = jax.lax.cond(jnp.any(is_first), rank, keep)
    return slots


def layout_of(side: CacheSide, config: TurboConfig) -> dict[str, Any]:
    """The arguments of the kernels' own descriptions of a stored block."""
    return {
        "tokens": config.block_kv,
        "channels": side.buffer.shape[-1],
        "bits": side.bits,
        "heads": tuple(codes.shape[1] for codes in side.codes),
        "tokens_last": side.tokens_last,
    }
