"""The progressively compressed KV cache and the operations that do not attend."""

from turbojax.cache.progressive import CacheSide as CacheSide
from turbojax.cache.progressive import ProgressiveCache as ProgressiveCache
from turbojax.cache.progressive import init_cache as init_cache
from turbojax.cache.read import dequantize as dequantize
from turbojax.cache.update import append as append
