"""The Triton kernels that write a `ProgressiveCache`: what they take, how they are launched."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from turbojax._device import AMPERE, interpreting, needs_gpu, unindexable
from turbojax.caches.progressive import append_kernels
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.numerics.config import TurboConfig

if TYPE_CHECKING:
    from pallas_kernels.layouts import Compressed


def store_prompt_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `store_prompt` cannot run this here; None if it can."""
    return append_kernels.unsupported(cache) or _unsupported(cache, key)


def append_unsupported(*, cache: ProgressiveCache, key: jax.Array) -> str | None:
    """Why `append` cannot run this here; None if it can."""
    return append_kernels.append_unsupported(cache, key) or _unsupported(cache, key)


def _unsupported(cache: ProgressiveCache, key: jax.Array) -> str | None:
    block = cache.config.block_kv
    batch, size, heads, channels = key.shape
    sizes = [batch * heads * channels * (-(-size // block) * block)]
    for side in (cache.key, cache.value):
        sizes += [x.size * x.dtype.itemsize for x in (*side.codes, side.channel_scale, side.buffer)]
    return unindexable(*sizes) or needs_gpu(AMPERE)


def store_prompt(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """`reference.store_prompt` with one kernel a side."""
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
    """Stores a prompt and returns its codes for attention, or None for these.

    Operands hold all of `lengths`, even where the cache has no room for so many tokens. There are
    none in mode ``"float"``, nor if first tokens stay in the buffer. With `permuted` the keys'
    codes are in the order of `mosaic_gpu`, see `turbojax.attention.turbo.operands.Operands`.
    """
    from pallas_kernels.triton.quantize import quantize

    config = cache.config
    return append_kernels.stored_prompt(
        *(cache, key, value, lengths),
        with_operands=with_operands,
        compress=functools.partial(_compress, config=config, permuted=permuted),
        quantize=functools.partial(
            quantize,
            block=config.block_kv,
            dtype=jnp.float8_e4m3fn,
            tokens_last=True,
            interpret=interpreting(),
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
    from pallas_kernels.triton.compress import BlockLayout, compress

    written = []
    for side, x, operand, every_block, begin in prompts:
        written.append(
            compress(
                x,
                lengths,
                count,
                side.places_for_kernels,
                side.codes,
                side.channel_scale,
                side.channel_zero,
                side.block_scale,
                layout=BlockLayout(**append_kernels.layout_of(side, config)),
                every_block=every_block,
                operand=operand,
                permuted=permuted and not side.tokens_last,
                begin=begin,
                interpret=interpreting(),
            )
        )
    return written


@jax.jit
def append(
    cache: ProgressiveCache, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ProgressiveCache:
    """`reference.append` of one token per sequence with one kernel a side."""
    run = functools.partial(_append_sides, config=cache.config)
    return append_kernels.appended(cache, key, value, lengths, run)


def _append_sides(
    sides: Sequence[CacheSide],
    tokens: Sequence[jax.Array],
    accepted: jax.Array,
    row: jax.Array,
    start: jax.Array,
    *,
    config: TurboConfig,
) -> list[CacheSide]:
    from pallas_kernels.triton.append import append
    from pallas_kernels.triton.compress import BlockLayout

    out = []
    for side, x in zip(sides, tokens, strict=True):
        codes, channel_scale, channel_zero, block_scale, buffer, buffer_scale = append(
            x,
            accepted,
            row,
            start,
            side.places_for_kernels,
            side.codes,
            side.channel_scale,
            side.channel_zero,
            side.block_scale,
            side.buffer,
            side.buffer_scale,
            layout=BlockLayout(**append_kernels.layout_of(side, config)),
            flush=config.flush_size,
            first_tokens=config.num_first_tokens,
            interpret=interpreting(),
        )
        out.append(
            dataclasses.replace(
                side,
                codes=codes,
                channel_scale=channel_scale,
                channel_zero=channel_zero,
                block_scale=block_scale,
                buffer=buffer,
                buffer_scale=buffer_scale,
            )
        )
    return out
