"""The cache of e4m3 keys and 4-bit values: `init_cache`, `prefill`, `append`, `decode`."""

from turbojax.caches.token_scaled import decode as decode
from turbojax.caches.token_scaled import prefill as prefill
from turbojax.caches.token_scaled.cache import K8v4Cache as K8v4Cache
from turbojax.caches.token_scaled.cache import append as append
from turbojax.caches.token_scaled.cache import dequantize as dequantize
from turbojax.caches.token_scaled.cache import init_k8v4_cache as init_cache

__all__ = ["K8v4Cache", "append", "decode", "dequantize", "init_cache", "prefill"]
