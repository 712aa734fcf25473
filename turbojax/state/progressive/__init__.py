"""The progressively compressed KV cache and the operations that do not attend."""

from turbojax.state.progressive.cache import CacheSide as CacheSide
from turbojax.state.progressive.cache import ProgressiveCache as ProgressiveCache
from turbojax.state.progressive.cache import init_cache as init_cache
from turbojax.state.progressive.read import dequantize as dequantize
from turbojax.state.progressive.update import append as append
