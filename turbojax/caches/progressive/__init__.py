"""The progressively compressed cache (FlashQ): state, what writes and reads it, attention."""

from turbojax.caches.progressive.blocks import dequantize as dequantize
from turbojax.caches.progressive.cache import CacheSide as CacheSide
from turbojax.caches.progressive.cache import ProgressiveCache as ProgressiveCache
from turbojax.caches.progressive.cache import init_cache as init_cache
from turbojax.caches.progressive.update import append as append
