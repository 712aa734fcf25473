"""The Mosaic GPU kernel behind `paged_attention` on Hopper: what it takes, how it is launched."""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax

from turbojax import polar
from turbojax._device import needs_hopper
from turbojax.ops.options import Options
from turbojax.state.pages.pool import PagedCache

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged.kernel import Settings

_KV_DTYPES = ("turbo4", "fp8_e4m3", "fp8_e5m2")
_HEAD_DIMS = (64, 128, 256)
_MOST_QUERY_ROWS = 64
# Where a program takes few tokens, each of its results is as large as what it reads.
_MOST_SPLIT_ROWS = 16
# Fewer programs than this, each with a part, leave half of an H100 idle.
_FEW_PROGRAMS = 64


class Launch(NamedTuple):
    """What is tuned; `part` must not depend on the call, nor `warpgroups`. No other changes a bit.

    Attributes:
      is_split: whether a program takes as few tokens as it can, for short calls.
      part: tokens of a program otherwise.
      warpgroups: of a program.
      stages: blocks in flight of a warp.
      rows: queries of a program at most.
    """

    is_split: bool
    part: int = 2048
    warpgroups: int = 1
    stages: int = 2
    rows: int = 16


def default_launch(query: jax.Array, cache: PagedCache, block_tables: jax.Array) -> Launch:
    """Programs take whole parts, or, where those would be few, a few blocks."""
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    pairs = query.shape[0] * cache.num_kv_heads
    parts = -(-block_tables.shape[1] * cache.page_size // Launch(False).part)
    return Launch(rows <= _MOST_SPLIT_ROWS and parts * pairs < _FEW_PROGRAMS)


def unsupported(
    *,
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    options: Options,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    del block_tables, options
    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    if cache.kv_dtype not in _KV_DTYPES:
        return f"kv_dtype={cache.kv_dtype!r} must be one of {_KV_DTYPES}"
    if cache.head_dim not in _HEAD_DIMS:
        return f"head_dim={cache.head_dim} must be one of {_HEAD_DIMS}"
    if rows > _MOST_QUERY_ROWS:
        return f"{rows} queries of a KV head must be at most {_MOST_QUERY_ROWS}"
    return needs_hopper()


@functools.partial(jax.jit, static_argnames=("options", "launch"))
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array,
    *,
    options: Options,
    launch: Launch | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` as one kernel, and a merge.

    Args:
      query: ``[B, T, N, H]``, not rotated.
      cache: the pages.
      block_tables: int32 ``[B, max_pages]``.
      lengths: int32 ``[B]``.
      query_lengths: int32 ``[B]``.
      options: of the call.
      launch: for tuning.

    Returns:
      What `paged_attention` returns: sequences that cannot be read are NaN.
    """
    from pallas_kernels.mosaic.hopper.paged import kernel

    launch = launch or default_launch(query, cache, block_tables)
    settings = settings_of(query, cache, options, launch)
    key_scale, value_scale = (
        None if x is None else x[None] for x in (cache.key_scale, cache.value_scale)
    )
    pages = kernel.Pages(
        cache.key,
        cache.value,
        cache.key_norm,
        cache.value_norm,
        key_scale,
        value_scale,
        cache.rotation.signs if cache.formats.is_rotated else None,
    )
    return kernel.attend(query, pages, block_tables, lengths, query_lengths, settings)


def settings_of(
    query: jax.Array,
    cache: PagedCache,
    options: Options,
    launch: Launch,
) -> "Settings":
    """What is static in a call."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    centroids: tuple[int, ...] = ()
    middle, unit = 0.0, 1.0
    if cache.kv_dtype == "turbo4":
        table, middle, step = polar.integer_centroids(4)
        centroids, unit = tuple(table), step / math.sqrt(cache.head_dim)
    return kernel.Settings(
        kind=cache.kv_dtype,
        centroids=centroids,
        middle=middle,
        scale=options.scale * unit,
        value_unit=unit,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        rows=min(launch.rows, -(-rows // 4) * 4),
        block=_block(cache),
        part=launch.part,
        is_split=launch.is_split,
        warpgroups=launch.warpgroups,
        stages=launch.stages,
    )


def _block(cache: PagedCache) -> int:
    """Tokens that a warp takes at a time: about 8 KiB, so that three programs share the memory."""
    is_small = cache.key.shape[-1] * cache.key.dtype.itemsize <= 64
    return 64 if is_small else 32
