"""Records what packages make of small 4-bit layers.

    python -m tests.recordings.make_packed_recordings

Needs the packages of `PACKAGES`, none of which the tests need: an environment of its own with
`pip install gptqmodel autoawq compressed-tensors`. `packed_recordings.py` reads what this writes.
"""

import importlib.metadata
import json
from typing import Any

import numpy as np
import torch

from tests.recordings import packed_recordings as recordings

PACKAGES = ("gptqmodel", "autoawq", "compressed-tensors", "torch")
OUTPUTS, INPUTS = 32, 256


def draws(group_size: int, seed: int, outputs: int = OUTPUTS) -> tuple[torch.Tensor, ...]:
    """Codes 0 to 15 ``[N, K]``, scales float16 ``[N, G]`` and zero points 0 to 15."""
    generator = torch.Generator().manual_seed(seed)
    groups = INPUTS // group_size
    codes = torch.randint(0, 16, (outputs, INPUTS), generator=generator)
    scales = torch.rand((outputs, groups), generator=generator) * 0.02 + 0.001
    # Some below the smallest normal number of float16.
    scales[: outputs // 8] *= 2.0**-9
    zeros = torch.randint(0, 16, (outputs, groups), generator=generator)
    return codes, scales.half(), zeros


def linear_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.nn.Linear:
    """A layer whose weights lie on the grid, in float32."""
    size = INPUTS // scales.shape[1]
    wide = [x.float().repeat_interleave(size, dim=1) for x in (zeros, scales)]
    linear = torch.nn.Linear(INPUTS, codes.shape[0], bias=False)
    linear.weight.data = (codes.float() - wide[0]) * wide[1]
    return linear


def gptq(group_size: int, symmetric: bool, stored: str, seed: int) -> dict[str, Any]:
    """GPTQModel packs, converts as it does when it saves and loads, and dequantizes."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils import model as convert

    size = INPUTS if group_size == -1 else group_size
    codes, scales, zeros = draws(size, seed)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    elif stored == "gptq":
        # Zero points of 0 are stored as 15, and borrow from the next output's.
        zeros[::5] = 0
    layer = TorchLinear(
        bits=4,
        group_size=group_size,
        sym=symmetric,
        desc_act=False,
        in_features=INPUTS,
        out_features=OUTPUTS,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
    )
    index = torch.arange(INPUTS, dtype=torch.int32) // size
    layer.pack_original(linear_of(codes, scales, zeros), scales, zeros, index)
    if stored == "gptq":
        config = QuantizeConfig(bits=4)
        convert.convert_gptq_v2_to_v1_format_module(layer, config)
    parts = {
        name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")
    }
    if stored == "gptq":
        convert.convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.post_init()
    config = {"bits": 4, "group_size": group_size, "sym": symmetric, "checkpoint_format": stored}
    return recorded("gptq", config, parts, layer.dequantize_weight().T)


def awq(group_size: int, version: str, seed: int) -> dict[str, Any]:
    """AutoAWQ packs, and dequantizes the version `gemm`."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    size = INPUTS if group_size == -1 else group_size
    codes, scales, zeros = draws(size, seed)
    linear = linear_of(codes, scales, zeros)
    if version == "gemm":
        layer = WQLinear_GEMM.from_linear(
            linear, 4, group_size, scales=scales.float().T, zeros=zeros.float().T
        )
        weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, size).T
    else:
        layer = WQLinear_GEMV.from_linear(
            linear, 4, group_size, scales=scales.float(), zeros=zeros.float()
        )
        # It computes on GPUs alone.
        weight = linear.weight.detach().half()
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"bits": 4, "group_size": group_size, "zero_point": True, "version": version}
    return recorded("awq", config, parts, weight)


def compressed(
    group_size: int, symmetric: bool, dtype: torch.dtype, outputs: int, seed: int
) -> dict[str, Any]:
    """compressed-tensors packs and unpacks."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    size = INPUTS if group_size == -1 else group_size
    codes, scales, zeros = draws(size, seed, outputs)
    scales = scales.to(dtype)
    if symmetric:
        zeros = torch.full_like(zeros, 8)
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {
        "weight": linear_of(codes, scales, zeros).weight.detach(),
        "weight_scale": scales,
        "weight_zero_point": (zeros - 8).to(torch.int8),
    }
    parts = PackedQuantizationCompressor.compress(state, scheme)
    weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": json.loads(scheme.weights.model_dump_json())}
    config = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {**group, "input_activations": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    return recorded("compressed-tensors", config, parts, weight)


def recorded(
    method: str, config: dict[str, Any], parts: dict[str, torch.Tensor], weight: torch.Tensor
) -> dict[str, Any]:
    assert weight.dtype in (torch.float16, torch.bfloat16)
    return {
        "config": {"quant_method": method, **config},
        "arrays": {name: bits(x) for name, x in {**parts, "weight": weight}.items()},
        "dtypes": {
            name: str(x.dtype).removeprefix("torch.")
            for name, x in {**parts, "weight": weight}.items()
        },
    }


def bits(x: torch.Tensor) -> np.ndarray:
    x = x.detach().contiguous()
    return (x.view(torch.int16) if x.is_floating_point() else x).numpy()


CASES = {
    "gptq-sym": lambda: gptq(128, True, "gptq", 1),
    "gptq-asym": lambda: gptq(64, False, "gptq", 2),
    "gptq-v2": lambda: gptq(-1, False, "gptq_v2", 3),
    "awq-gemm": lambda: awq(128, "gemm", 4),
    "awq-gemm-32": lambda: awq(32, "gemm", 5),
    "awq-gemv": lambda: awq(64, "gemv", 6),
    "compressed-sym": lambda: compressed(128, True, torch.bfloat16, 32, 7),
    "compressed-asym": lambda: compressed(32, False, torch.float16, 29, 8),
    "compressed-channel": lambda: compressed(-1, False, torch.bfloat16, 32, 9),
}


if __name__ == "__main__":
    cases = {name: make() for name, make in CASES.items()}
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    recordings.write(cases, versions)
    print(recordings.FILE, recordings.FILE.stat().st_size)
