"""The Mosaic GPU kernel behind `paged_attention` on Hopper: what it takes, how it is launched."""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import polar
from turbojax._device import needs_hopper
from turbojax.ops.options import Options
from turbojax.state.pages.pool import PagedCache

if TYPE_CHECKING:
    from pallas_kernels.mosaic.hopper.paged.kernel import Settings

_KV_DTYPES = ("turbo4", "fp8_e4m3", "fp8_e5m2")
_HEAD_DIMS = (64, 128, 256)
_MOST_QUERY_ROWS = 64


class Launch(NamedTuple):
    """What is tuned; `part` and `warpgroups` must not depend on the batch.

    Attributes:
      part: tokens of a program.
      warpgroups: of a program.
      stages: blocks in flight of a warp.
      rows: queries of a program at most.
    """

    part: int = 1024
    warpgroups: int = 1
    stages: int = 2
    rows: int = 16


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
    """`reference.attend` as one kernel, and a merge where a sequence may have several parts.

    `launch` is for tuning.
    """
    from pallas_kernels.mosaic.hopper.paged import kernel

    settings, unit = settings_of(query, cache, options, launch or Launch())
    key_scale = None if cache.key_scale is None else cache.key_scale[None]
    pages = kernel.Pages(cache.key, cache.value, cache.key_norm, cache.value_norm, key_scale)
    out, residual = kernel.attend(query, pages, block_tables, lengths, query_lengths, settings)
    factor = jnp.float32(unit) if cache.value_scale is None else cache.value_scale
    return out * factor, residual


def settings_of(
    query: jax.Array,
    cache: PagedCache,
    options: Options,
    launch: Launch,
) -> tuple["Settings", float]:
    """What is static in a call, and the unit of the stored values."""
    from pallas_kernels.mosaic.hopper.paged import kernel

    rows = query.shape[1] * query.shape[2] // cache.num_kv_heads
    centroids: tuple[int, ...] = ()
    middle, unit = 0.0, 1.0
    if cache.kv_dtype == "turbo4":
        table, middle, step = polar.integer_centroids(4)
        centroids, unit = tuple(table), step / math.sqrt(cache.head_dim)
    settings = kernel.Settings(
        kind=cache.kv_dtype,
        centroids=centroids,
        middle=middle,
        scale=options.scale * unit,
        window=options.window,
        soft_cap=options.logits_soft_cap,
        rows=min(launch.rows, -(-rows // 4) * 4),
        block=_block(cache),
        part=launch.part,
        warpgroups=launch.warpgroups,
        stages=launch.stages,
    )
    return settings, unit


def _block(cache: PagedCache) -> int:
    """Tokens that a warp takes at a time: about 8 KiB, so that three programs share the memory."""
    is_small = cache.key.shape[-1] * cache.key.dtype.itemsize <= 64
    return 64 if is_small else 32
