"""INT4 weights, e4m3 activations, smoothing and the KV4 cache (FireQ, Baek et al., 2025)."""

from typing import TYPE_CHECKING

from turbojax.caches.token_scaled import decode as decode
from turbojax.caches.token_scaled import prefill as prefill
from turbojax.caches.token_scaled.cache import Kv4Cache as Kv4Cache
from turbojax.caches.token_scaled.cache import append as append
from turbojax.caches.token_scaled.cache import init_cache as init_cache
from turbojax.matmul.fp8_tokens import quantize_activation as quantize_activation
from turbojax.matmul.fp8_tokens import rms_norm_quantize as rms_norm_quantize
from turbojax.matmul.grouped import grouped_matmul as grouped_matmul
from turbojax.matmul.int4 import matmul as matmul
from turbojax.matmul.int4.codes import PlainCodes as PlainCodes
from turbojax.matmul.int4.codes import from_codes as from_codes
from turbojax.matmul.int4.codes import to_codes as to_codes
from turbojax.matmul.int4.experts import expert_of as expert_of
from turbojax.matmul.int4.experts import quantize_experts as quantize_experts
from turbojax.matmul.int4.experts import stack_experts as stack_experts
from turbojax.matmul.int4.qwix import from_qwix as from_qwix
from turbojax.matmul.int4.qwix import to_qwix as to_qwix
from turbojax.matmul.int4.storage import from_tensors as from_tensors
from turbojax.matmul.int4.storage import load_weights as load_weights
from turbojax.matmul.int4.storage import save_weights as save_weights
from turbojax.matmul.int4.storage import to_tensors as to_tensors
from turbojax.matmul.int4.weight import Int4Weight as Int4Weight
from turbojax.matmul.int4.weight import concatenate as concatenate
from turbojax.matmul.int4.weight import dequantize as dequantize
from turbojax.matmul.int4.weight import gate_and_up as gate_and_up
from turbojax.matmul.int4.weight import quantize_weight as quantize_weight
from turbojax.matmul.routing import Dispatch as Dispatch
from turbojax.matmul.routing import Routing as Routing
from turbojax.matmul.routing import combine as combine
from turbojax.matmul.routing import dispatch as dispatch
from turbojax.matmul.routing import route as route
from turbojax.numerics.fp8 import Fp8Tokens as Fp8Tokens
from turbojax.numerics.fp8 import quantize_tokens as quantize_tokens
from turbojax.smoothing import channel_absmean_scale as channel_absmean_scale
from turbojax.smoothing import channel_rope_scale as channel_rope_scale
from turbojax.smoothing import per_tensor_scale as per_tensor_scale
from turbojax.smoothing import rope_preserving_norm as rope_preserving_norm

if TYPE_CHECKING:
    from turbojax.models import quantize_model as quantize_model

__all__ = [
    "Dispatch",
    "Fp8Tokens",
    "Int4Weight",
    "Kv4Cache",
    "PlainCodes",
    "Routing",
    "append",
    "channel_absmean_scale",
    "channel_rope_scale",
    "combine",
    "concatenate",
    "decode",
    "dequantize",
    "dispatch",
    "expert_of",
    "from_codes",
    "from_qwix",
    "from_tensors",
    "gate_and_up",
    "grouped_matmul",
    "init_cache",
    "load_weights",
    "matmul",
    "per_tensor_scale",
    "prefill",
    "quantize_activation",
    "quantize_experts",
    "quantize_model",
    "quantize_tokens",
    "quantize_weight",
    "rms_norm_quantize",
    "rope_preserving_norm",
    "route",
    "save_weights",
    "stack_experts",
    "to_codes",
    "to_qwix",
    "to_tensors",
]


def __getattr__(name: str) -> object:
    """Imports `quantize_model`, and with it Flax, when it is first used."""
    if name == "quantize_model":
        import importlib

        return importlib.import_module("turbojax.models").quantize_model
    raise AttributeError(f"module 'turbojax.fireq' has no attribute {name!r}")
