"""The progressively compressed KV cache and the operations that do not attend."""

from turbojax.caches.progressive.cache import CacheSide as CacheSide
from turbojax.caches.progressive.cache import ProgressiveCache as ProgressiveCache
from turbojax.caches.progressive.cache import init_cache as init_cache
from turbojax.caches.progressive.read import dequantize as dequantize
from turbojax.caches.progressive.update import append as append
