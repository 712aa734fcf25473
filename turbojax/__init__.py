"""turbojax: quantized, compressed and sparse attention for JAX."""

from typing import TYPE_CHECKING

# First, so that Ctrl-C works while the command is still importing.
from turbojax import _interrupt as _interrupt
from turbojax import bounds as bounds
from turbojax import device as device
from turbojax import fireq as fireq
from turbojax import levels as levels
from turbojax import paged as paged
from turbojax import polar as polar
from turbojax import quantizers as quantizers
from turbojax import remat as remat
from turbojax.config import TurboConfig as TurboConfig
from turbojax.levels import level_density as level_density
from turbojax.levels import select_levels as select_levels
from turbojax.ops.latent_attention import (
    expanded_latent_attention as expanded_latent_attention,
)
from turbojax.ops.latent_attention import latent_attention as latent_attention
from turbojax.ops.merging import merge_attention as merge_attention
from turbojax.ops.paged_attention import paged_attention as paged_attention
from turbojax.ops.pooled_attention import pooled_attention as pooled_attention
from turbojax.ops.turbo_attention import decode as decode
from turbojax.ops.turbo_attention import prefill as prefill
from turbojax.ops.turbo_attention import turbo_attention as turbo_attention
from turbojax.quantizers import head_priority as head_priority
from turbojax.sas import SAS as SAS
from turbojax.sas import sas_softmax as sas_softmax
from turbojax.state.latent.cache import LatentCache as LatentCache
from turbojax.state.latent.cache import append_latents as append_latents
from turbojax.state.latent.cache import dequantize_latents as dequantize_latents
from turbojax.state.latent.cache import init_latent_cache as init_latent_cache
from turbojax.state.latent.pages import LatentPages as LatentPages
from turbojax.state.latent.pages import init_latent_pages as init_latent_pages
from turbojax.state.pages.allocator import PageAllocator as PageAllocator
from turbojax.state.pages.pool import PagedCache as PagedCache
from turbojax.state.pages.pool import init_paged_cache as init_paged_cache
from turbojax.state.progressive import CacheSide as CacheSide
from turbojax.state.progressive import ProgressiveCache as ProgressiveCache
from turbojax.state.progressive import append as append
from turbojax.state.progressive import dequantize as dequantize
from turbojax.state.progressive import init_cache as init_cache

if TYPE_CHECKING:
    from turbojax import flax as flax
    from turbojax import models as models
    from turbojax import parallel as parallel

__version__ = "0.1.0"

__all__ = [
    "SAS",
    "CacheSide",
    "LatentCache",
    "LatentPages",
    "PageAllocator",
    "PagedCache",
    "ProgressiveCache",
    "TurboConfig",
    "append",
    "append_latents",
    "decode",
    "dequantize",
    "dequantize_latents",
    "device",
    "expanded_latent_attention",
    "fireq",
    "flax",
    "head_priority",
    "init_cache",
    "init_latent_cache",
    "init_latent_pages",
    "init_paged_cache",
    "latent_attention",
    "level_density",
    "levels",
    "merge_attention",
    "models",
    "paged",
    "paged_attention",
    "parallel",
    "polar",
    "pooled_attention",
    "prefill",
    "quantizers",
    "remat",
    "sas_softmax",
    "select_levels",
    "turbo_attention",
]


def __getattr__(name: str) -> object:
    """Imports what is large when it is first used."""
    if name in ("flax", "models", "parallel"):
        import importlib

        return importlib.import_module(f"turbojax.{name}")
    raise AttributeError(f"module 'turbojax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
