"""The Mosaic GPU kernel behind `fireq.decode`: what it takes, how it is launched."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._device import has_bulk_copies, needs_e4m3, needs_mosaic
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.paged import mosaic_gpu as paged
from turbojax.caches.token_scaled.cache import TokenScaledCache
from turbojax.numerics.rows import HEAD_DIMS

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged.kernel import Settings


class Launch(NamedTuple):
    """How the kernel is laid out on the GPU; results differ by rounding only.

    Attributes:
      is_split: whether a program takes as few tokens as it can, for short calls.
      part: tokens of a program otherwise.
      few: tokens of a program that takes few.
      block: tokens that a warp takes at a time, 32 or 64.
      stages: blocks in flight of a warp.
      rows: queries of a program at most.
    """

    is_split: bool
    part: int = 2048
    few: int = 256
    block: int = 64
    stages: int = 2
    warpgroups: int = 1
    rows: int = 16


def default_launch(query: jax.Array, cache: TokenScaledCache) -> Launch:
    """Programs take whole parts, or, where those would be few, a few blocks.

    A block is about 8 KiB, so that three programs share a multiprocessor's memory.
    """
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    parts = -(-cache.max_length // Launch(False).part)
    programs = parts * cache.batch_size * cache.num_kv_heads
    is_split = rows <= paged.MOST_SPLIT_ROWS and programs < paged.FEW_PROGRAMS
    bytes_of_token = sum(x.shape[-1] for x in (cache.key_codes, cache.value_codes))
    return Launch(is_split, block=64 if bytes_of_token <= 128 else 32)


def decode_unsupported(
    *,
    query: jax.Array,
    cache: TokenScaledCache,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `decode` cannot run this here; None if it can."""
    del options
    refusal = modifiers.refusal()
    if refusal is not None:
        return refusal
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    if cache.head_dim not in HEAD_DIMS:
        return f"head_dim={cache.head_dim} must be one of {HEAD_DIMS}"
    if rows > paged.MOST_QUERY_ROWS:
        return f"{rows} queries of a KV head must be at most {paged.MOST_QUERY_ROWS}"
    return needs_mosaic() or needs_e4m3()


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def decode(
    query: jax.Array,
    cache: TokenScaledCache,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`reference.decode` by the kernel of pages and its merge: a sequence is one page."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    del modifiers  # see `decode_unsupported`
    settings = settings_of(query, cache, options, launch or default_launch(query, cache))
    settings = paged.fitting(settings, query.shape[3])
    pages = kernel.Pages(
        key=cache.key_codes,
        value=cache.value_codes,
        key_norm=cache.key_scale,
        value_norm=cache.value_scale,
        key_scale=None,
        value_scale=None,
        signs=None,
    )
    # Token `p` is in row ``p % room``: of a rolling buffer, a sequence's page repeats.
    pages_of = -(-cache.max_length // cache.room)
    # A constant, which costs no kernel.
    tables = jnp.asarray(
        np.repeat(np.arange(cache.batch_size, dtype=np.int32)[:, None], pages_of, 1)
    )
    return kernel.attend(query, pages, tables, cache.lengths, query_length, settings)


def settings_of(
    query: jax.Array,
    cache: TokenScaledCache,
    options: Options,
    launch: Launch,
) -> "Settings":
    """The static settings of a call."""
    from pallas_kernels.mosaic.hopper.paged import kernel
    from pallas_kernels.mosaic.hopper.paged.scaled import OUTPUT_UNIT

    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    return kernel.Settings(
        kind="kv4" if cache.key_codes.dtype == jnp.uint8 else "k8v4",
        centroids=(),
        middle=0.0,
        scale=options.scale,
        value_unit=OUTPUT_UNIT,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        out_dtype=options.out_dtype,
        rows=min(launch.rows, -(-rows // 4) * 4),
        part=launch.part,
        is_split=launch.is_split,
        few=launch.few,
        block=launch.block,
        warpgroups=launch.warpgroups,
        stages=launch.stages,
        copies_words=not has_bulk_copies(),
    )
