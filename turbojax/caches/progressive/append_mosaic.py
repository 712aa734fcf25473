"""The Mosaic GPU kernels that write a `ProgressiveCache`: one launch for both sides."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from turbojax._device import needs_updates
from turbojax.caches.progressive import append_kernels
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics.config import TurboConfig

if TYPE_CHECKING:
    from pallas_kernels.layouts import Compressed
    from pallas_kernels.mosaic.stage2 import Layout


_OLDEST = "flush='oldest'"


def store_prompt_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `store_prompt` cannot run this here; None if it can."""
    return append_kernels.unsupported(cache) or needs_updates(cache, key)


def append_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    return append_kernels.append_unsupported(cache, key) or needs_updates(cache, key)


def append_part_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `append` to a part of a cache cannot run this here; None if it can."""
    config = cache.config
    if config.flush_size != config.block_kv:  # blocks of one buffer might have different places
        return f"buffer_size={config.buffer_size} must be block_kv={config.block_kv}, or {_OLDEST}"
    return append_unsupported(cache=cache, key=key)


def store_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """`reference.store_prompt` with one kernel."""
    return store_prompt_with_operands(cache, key, value, lengths, with_operands=False)[0]


@functools.partial(jax.jit, static_argnames=("with_operands", "permuted"))
def store_prompt_with_operands(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    with_operands: bool = True,
    permuted: bool = False,
) -> tuple[ProgressiveCache, append_kernels.Operands | None]:
    """Stores a prompt and returns its codes for attention, as `triton` does."""
    from pallas_kernels.mosaic.hopper.quantize import quantize

    config = cache.config
    return append_kernels.stored_prompt(
        *(cache, key, value, lengths),
        with_operands=with_operands,
        compress=functools.partial(_compress, config=config, permuted=permuted),
        quantize=functools.partial(
            quantize, block=config.block_kv, dtype=jnp.float8_e4m3fn, tokens_last=True
        ),
    )


def _compress(
    prompts: Sequence[append_kernels.Prompt],
    lengths: jax.Array,
    count: jax.Array,
    *,
    config: TurboConfig,
    permuted: bool,
) -> list["Compressed"]:
    from pallas_kernels.mosaic.hopper.compress import Prompt, compress

    given = [
        Prompt(x, s.places_for_kernels, s.codes, s.channel_scale, s.channel_zero, s.block_scale)
        for s, x, *_ in prompts
    ]
    return compress(
        *(given, lengths, count),
        layouts=[_layout(p.side, config) for p in prompts],
        operands=[p.operand for p in prompts],
        every_block=[p.every_block for p in prompts],
        permuted=permuted,
        begin=prompts[0].begin,
    )


@jax.jit
def store_part_of_prompt(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array,
) -> ProgressiveCache:
    """`reference.store_prompt` of a part of a cache with one kernel."""
    compress = functools.partial(_compress, config=cache.config, permuted=False)
    return append_kernels.stored_part_of_prompt(
        cache, key, value, lengths, first, compress=compress
    )


@jax.jit
def append(
    cache: ProgressiveCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    first: jax.Array | None = None,
) -> ProgressiveCache:
    """`reference.append` of one token per sequence with one kernel.

    Or two, of which one counts, for a single sequence whose heads have one width.
    """
    run = functools.partial(_append_sides, config=cache.config)
    sides = cache.key, cache.value
    if cache.batch_size != 1 or first is not None or any(len(s.codes) > 1 for s in sides):
        return append_kernels.appended(cache, key, value, lengths, run, first)
    plan, (held, buffered, overflowed) = counted(cache, lengths)
    key_side, value_side = run(sides, [x[:, 0] for x in (key, value)], *plan)
    return dataclasses.replace(
        cache,
        key=key_side,
        value=value_side,
        lengths=held,
        buffer_lengths=buffered,
        overflowed=overflowed,
    )


def counted(cache: ProgressiveCache, lengths: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """What `_append_sides` is to do, and the cache's counts after it, by one kernel."""
    from pallas_kernels.mosaic.hopper.append import Counting, count

    config = cache.config
    sizes = Counting(
        max_length=cache.max_length,
        buffer_size=config.buffer_size,
        flush=config.flush_size,
        block=config.block_kv,
        room=cache.blocks_of_room,
    )
    return count(lengths, (cache.lengths, cache.buffer_lengths, cache.overflowed), sizes)


def _append_sides(
    sides: Sequence[CacheSide],
    tokens: Sequence[jax.Array],
    accepted: jax.Array,
    row: jax.Array,
    start: jax.Array,
    *,
    config: TurboConfig,
) -> list[CacheSide]:
    from pallas_kernels.mosaic.hopper.append import append

    layouts = [_layout(s, config) for s in sides]
    written = append(
        *(tokens, accepted, row, start, [s.for_kernels() for s in sides]),
        layouts=layouts,
        flush=config.flush_size,
        first_tokens=config.num_first_tokens,
    )
    return [
        dataclasses.replace(side, **{**new._asdict(), "head_slots": side.head_slots})
        for side, new in zip(sides, written, strict=True)
    ]


def _layout(side: CacheSide, config: TurboConfig) -> "Layout":
    from pallas_kernels.mosaic.stage2 import Layout

    return Layout(**append_kernels.layout_of(side, config))
