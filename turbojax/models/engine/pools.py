"""The pools of pages of a model's layers: one for each, stored alike or not.

Those of a group of layers have the same pages.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from turbojax import _checks, paged
from turbojax.caches.latent.formats import LATENT_DTYPES
from turbojax.models.config import LatentConfig, TransformerConfig
from turbojax.models.engine.groups import Windows, layers_of
from turbojax.models.engine.pool_access import Pool
from turbojax.models.generation.caching import with_edges

Pools = tuple[Pool, ...]


def kv_dtypes(num_layers: int, kv_dtype: str, uncompressed_layers: int) -> tuple[str, ...]:
    """How the pages of every layer are stored, see `Engine`.

    Raises TypeError or ValueError if `uncompressed_layers` does not fit the model, or nothing is
    compressed anyway.
    """
    _checks.check_integer("uncompressed_layers", uncompressed_layers)
    if uncompressed_layers < 0:
        raise ValueError(f"{uncompressed_layers=} must be at least 0")
    if uncompressed_layers and kv_dtype == "auto":
        raise ValueError(f"{uncompressed_layers=} has no use with {kv_dtype=}: none is compressed")
    return with_edges(kv_dtype, "auto", uncompressed_layers, num_layers)


def pages_of_layers(
    config: TransformerConfig, windows: Windows, num_pages: Sequence[int]
) -> tuple[int, ...]:
    """Pages of every layer's pool, from those of the groups."""
    pages = dict[int, int]()
    for layers, count in zip(layers_of(config, windows), num_pages, strict=True):
        pages |= dict.fromkeys(layers, count)
    return tuple(pages[layer] for layer in range(config.num_layers))


def init_pools(
    config: TransformerConfig,
    dtype: np.dtype,
    num_pages: Sequence[int],
    page_size: int,
    *,
    kv_dtype: str,
    uncompressed_layers: int,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    seed: int = 0,
) -> Pools:
    """Empty pools, one for each layer; pools of latents for a model with latent attention.

    `num_pages` is per layer. Raises what `kv_dtypes` and `turbojax.init_paged_cache` do.
    """
    given: dict[str, Any] = {"key_scale": key_scale, "value_scale": value_scale, "seed": seed}
    kinds = kv_dtypes(config.num_layers, kv_dtype, uncompressed_layers)
    if config.latent is not None:
        _check_no_scales(key_scale=key_scale, value_scale=value_scale)
        seeds = [seed if kind == kv_dtype else 0 for kind in kinds]
        sizes_of_all = zip(num_pages, kinds, seeds, strict=True)
        return tuple(_latent_pool(config.latent, dtype, page_size, *x) for x in sizes_of_all)
    sizes = (page_size, config.num_kv_heads, config.head_dim)
    return tuple(
        paged.init_cache(
            count, *sizes, kv_dtype=kind, dtype=dtype, **(given if kind == kv_dtype else {})
        )
        for count, kind in zip(num_pages, kinds, strict=True)
    )


def _check_no_scales(**scales: float) -> None:
    for name, scale in scales.items():
        if scale != 1:
            raise ValueError(
                f"{name}={scale} has no use with latents: tokens have their own scales"
            )


def _latent_pool(
    latent: LatentConfig, dtype: np.dtype, page_size: int, count: int, kind: str, seed: int
) -> paged.LatentPages:
    """A pool of latents; its kind ``"auto"`` is what `LatentPages` calls ``"bfloat16"``.

    That one keeps the model's dtype. The name ``"bfloat16"`` raises ValueError as unknown names do:
    pages that are not compressed have one name in an engine, for which `kv_dtypes` looks.
    """
    names = ["auto" if x == "bfloat16" else x for x in LATENT_DTYPES]
    if kind not in names:
        raise ValueError(f"kv_dtype={kind!r} must be one of {', '.join(names)}")
    return paged.init_latent_pages(
        count,
        page_size,
        latent.rank,
        latent.rope_dim,
        kv_dtype="bfloat16" if kind == "auto" else kind,
        dtype=dtype,
        seed=seed,
    )


def page_bytes(
    config: TransformerConfig,
    dtype: np.dtype,
    page_size: int,
    *,
    kv_dtype: str,
    uncompressed_layers: int,
    layers: Sequence[int] | None = None,
) -> int:
    """Bytes of one page of these layers, by default of all, without making one."""
    one = jax.eval_shape(
        lambda: init_pools(
            config,
            dtype,
            (1,) * config.num_layers,
            page_size,
            kv_dtype=kv_dtype,
            uncompressed_layers=uncompressed_layers,
        )
    )
    return sum(one[i].page_bytes for i in (range(len(one)) if layers is None else layers))


def token_bytes(pools: Pools) -> int:
    """Bytes of one token, in all layers."""
    return sum(pool.token_bytes for pool in pools)


def compression_ratio(pools: Pools) -> float:
    """Bytes of a token in bfloat16, in all layers, over `token_bytes`."""
    # Whole numbers, as the ratio of one pool is one over another.
    plain = sum(round(pool.compression_ratio * pool.token_bytes) for pool in pools)
    return plain / token_bytes(pools)
