"""The cache of e4m3 keys and 4-bit values; the verbs are those of every cache."""

from turbojax.caches.token_scaled.cache import K8v4Cache as K8v4Cache
from turbojax.caches.token_scaled.cache import init_k8v4_cache as init_cache
from turbojax.caches.verbs import append as append
from turbojax.caches.verbs import decode as decode
from turbojax.caches.verbs import dequantize as dequantize
from turbojax.caches.verbs import prefill as prefill

__all__ = ["K8v4Cache", "append", "decode", "dequantize", "init_cache", "prefill"]
