"""The cache of e4m3 keys and 4-bit values: `init_cache`, `prefill`, `append`, `decode`."""

from turbojax.ops.kv4_attention import decode as decode
from turbojax.ops.kv4_attention import prefill as prefill
from turbojax.state.kv4 import K8v4Cache as K8v4Cache
from turbojax.state.kv4 import append as append
from turbojax.state.kv4 import dequantize as dequantize
from turbojax.state.kv4 import init_k8v4_cache as init_cache

__all__ = ["K8v4Cache", "append", "decode", "dequantize", "init_cache", "prefill"]
