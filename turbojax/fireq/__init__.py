"""INT4 weights, e4m3 activations, smoothing and the KV4 cache (FireQ, Baek et al., 2025)."""

from typing import TYPE_CHECKING

from turbojax.ops.fp8_tokens import quantize_activation as quantize_activation
from turbojax.ops.fp8_tokens import rms_norm_quantize as rms_norm_quantize
from turbojax.ops.grouped_matmul import grouped_matmul as grouped_matmul
from turbojax.ops.int4_matmul import matmul as matmul
from turbojax.ops.kv4_attention import decode as decode
from turbojax.ops.kv4_attention import prefill as prefill
from turbojax.quantizers.fp8 import Fp8Tokens as Fp8Tokens
from turbojax.quantizers.fp8 import quantize_tokens as quantize_tokens
from turbojax.quantizers.int4 import Int4Weight as Int4Weight
from turbojax.quantizers.int4 import concatenate as concatenate
from turbojax.quantizers.int4 import dequantize as dequantize
from turbojax.quantizers.int4 import gate_and_up as gate_and_up
from turbojax.quantizers.int4 import quantize_weight as quantize_weight
from turbojax.quantizers.int4_codes import PlainCodes as PlainCodes
from turbojax.quantizers.int4_codes import from_codes as from_codes
from turbojax.quantizers.int4_codes import to_codes as to_codes
from turbojax.quantizers.int4_experts import expert_of as expert_of
from turbojax.quantizers.int4_experts import quantize_experts as quantize_experts
from turbojax.quantizers.int4_experts import stack_experts as stack_experts
from turbojax.quantizers.int4_qwix import from_qwix as from_qwix
from turbojax.quantizers.int4_qwix import to_qwix as to_qwix
from turbojax.quantizers.int4_storage import from_tensors as from_tensors
from turbojax.quantizers.int4_storage import load_weights as load_weights
from turbojax.quantizers.int4_storage import save_weights as save_weights
from turbojax.quantizers.int4_storage import to_tensors as to_tensors
from turbojax.routing import Dispatch as Dispatch
from turbojax.routing import Routing as Routing
from turbojax.routing import combine as combine
from turbojax.routing import dispatch as dispatch
from turbojax.routing import route as route
from turbojax.smoothing import channel_absmean_scale as channel_absmean_scale
from turbojax.smoothing import channel_rope_scale as channel_rope_scale
from turbojax.smoothing import per_tensor_scale as per_tensor_scale
from turbojax.smoothing import rope_preserving_norm as rope_preserving_norm
from turbojax.state.kv4 import Kv4Cache as Kv4Cache
from turbojax.state.kv4 import append as append
from turbojax.state.kv4 import init_cache as init_cache

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
