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
from turbojax.attention.merging import merge_attention as merge_attention
from turbojax.attention.pooled import pooled_attention as pooled_attention
from turbojax.attention.turbo import turbo_attention as turbo_attention
from turbojax.caches.latent import expanded_latent_attention as expanded_latent_attention
from turbojax.caches.latent import latent_attention as latent_attention
from turbojax.caches.latent.cache import LatentCache as LatentCache
from turbojax.caches.latent.cache import append_latents as append_latents
from turbojax.caches.latent.cache import dequantize_latents as dequantize_latents
from turbojax.caches.latent.cache import init_latent_cache as init_latent_cache
from turbojax.caches.latent.pages import LatentPages as LatentPages
from turbojax.caches.latent.pages import init_latent_pages as init_latent_pages
from turbojax.caches.paged import paged_attention as paged_attention
from turbojax.caches.paged.allocator import PageAllocator as PageAllocator
from turbojax.caches.paged.pool import PagedCache as PagedCache
from turbojax.caches.paged.pool import init_paged_cache as init_paged_cache
from turbojax.caches.progressive import CacheSide as CacheSide
from turbojax.caches.progressive import ProgressiveCache as ProgressiveCache
from turbojax.caches.progressive import init_cache as init_cache
from turbojax.caches.verbs import append as append
from turbojax.caches.verbs import append_and_decode as append_and_decode
from turbojax.caches.verbs import decode as decode
from turbojax.caches.verbs import dequantize as dequantize
from turbojax.caches.verbs import prefill as prefill
from turbojax.levels import level_density as level_density
from turbojax.levels import select_levels as select_levels
from turbojax.numerics.config import TurboConfig as TurboConfig
from turbojax.numerics.sas import SAS as SAS
from turbojax.numerics.sas import sas_softmax as sas_softmax
from turbojax.quantizers import head_priority as head_priority

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
    "append_and_decode",
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
