"""4-bit layers and whole folders as other programs store them, written by an oracle in numpy.

The words are made with Python's integers, code by code, from what the formats' documents say; they
share nothing with the code that reads them.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPE_NAMES = {
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Codes and zero points from 0 to 15, and scales: ``[N, K]`` and ``[N, G]``."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group_size: int

    def weight(self) -> np.ndarray:
        """``(code - zero) * scale``, which float32 holds exactly."""
        wide = [
            np.repeat(x.astype(np.float64), self.group_size, axis=1)[:, : self.codes.shape[1]]
            for x in (self.zeros, self.scales)
        ]
        exact = (self.codes - wide[0]) * wide[1]
        assert (exact.astype(np.float32) == exact).all()
        return exact.astype(np.float32)


def random_layer(
    rng: np.random.Generator,
    shape: tuple[int, int],
    group_size: int,
    *,
    symmetric: bool = False,
    dtype: Any = np.float16,
) -> Layer:
    """Any codes; scales that give weights of about ``1 / sqrt(K)``."""
    outputs, inputs = shape
    groups = -(-inputs // group_size)
    codes = rng.integers(0, 16, shape)
    # From 1: what "gptq" stores is one less.
    zeros = np.full((outputs, groups), 8) if symmetric else rng.integers(1, 16, (outputs, groups))
    scales = rng.uniform(0.1, 0.3, (outputs, groups)) * inputs**-0.5
    return Layer(codes, zeros, scales.astype(dtype), group_size)


def words(nibbles: np.ndarray) -> np.ndarray:
    """int32 ``[..., n / 8]`` of numbers 0 to 15 ``[..., n]``, the first in the lowest bits."""
    *lead, count = nibbles.shape
    eights = np.concatenate([nibbles, np.zeros((*lead, -count % 8), nibbles.dtype)], axis=-1)
    flat = eights.reshape(-1, 8).tolist()
    packed = [sum(code << (4 * place) for place, code in enumerate(row)) for row in flat]
    return np.array(packed, np.uint32).view(np.int32).reshape(*lead, -1)


def gptq(layer: Layer, *, less_one: bool = True, index: bool = True) -> dict[str, np.ndarray]:
    stored = (layer.zeros - int(less_one)).T
    parts = {
        "qweight": np.ascontiguousarray(words(layer.codes).T),
        "qzeros": words(stored),
        "scales": np.ascontiguousarray(layer.scales.T),
    }
    if index:
        parts["g_idx"] = (np.arange(layer.codes.shape[1]) // layer.group_size).astype(np.int32)
    return parts


def gptq_act_order(layer: Layer) -> dict[str, np.ndarray]:
    """Groups of inputs from everywhere. Layers of the same number of inputs have the same order.

    A `Layer` knows only groups of neighbours: it is the one with its inputs sorted. Here its codes,
    and in `write_folder` its weights, are put back into the order of the model.
    """
    order = act_order(layer.codes.shape[1])
    parts = gptq(dataclasses.replace(layer, codes=layer.codes[:, np.argsort(order)]))
    groups = np.arange(order.size) // layer.group_size
    parts["g_idx"] = groups[np.argsort(order)].astype(np.int32)
    return parts


def act_order(inputs: int) -> np.ndarray:
    """The input that is sorted to each place."""
    return np.random.default_rng(inputs).permutation(inputs)


def awq_gemm(layer: Layer) -> dict[str, np.ndarray]:
    def interleaved(x: np.ndarray) -> np.ndarray:
        eights = x.T.reshape(x.shape[1], -1, 8)[..., AWQ_ORDER]
        return words(eights.reshape(x.shape[1], -1))

    return {
        "qweight": interleaved(layer.codes),
        "qzeros": interleaved(layer.zeros),
        "scales": np.ascontiguousarray(layer.scales.T),
    }


def awq_gemv(layer: Layer) -> dict[str, np.ndarray]:
    groups = layer.zeros.shape[1]
    # Words in multiples of 1, or of 2 and 4 of small groups.
    words_of = 8 * {32: 4, 64: 2}.get(layer.group_size, 1)
    width = (groups + words_of - 1) // words_of * words_of // 8
    padding = ((0, 0), (0, 8 * width - groups))
    return {
        "qweight": words(layer.codes),
        "qzeros": words(np.pad(layer.zeros, padding)),
        "scales": np.pad(layer.scales, padding),
    }


def compressed(
    layer: Layer, *, symmetric: bool = False, unpacked_zeros: bool = False
) -> dict[str, np.ndarray]:
    parts = {
        "weight_packed": words(layer.codes),
        "weight_scale": layer.scales,
        "weight_shape": np.array(layer.codes.shape, np.int64),
    }
    if unpacked_zeros:
        parts["weight_zero_point"] = (layer.zeros - 8).astype(np.int8)
    elif not symmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(words(layer.zeros.T).T)
    return parts


def gptq_config(group_size: int, **keys: Any) -> dict[str, Any]:
    """What AutoGPTQ and optimum write of such a model, with other `keys`."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "sym": False,
        "desc_act": False,
        "damp_percent": 0.1,
        "true_sequential": True,
        "static_groups": False,
        "checkpoint_format": "gptq",
        "model_name_or_path": None,
        **keys,
    }


def awq_config(group_size: int, **keys: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **keys,
    }


def compressed_config(group_size: int, symmetric: bool = False, **keys: Any) -> dict[str, Any]:
    by_row = group_size == -1
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if by_row else "group",
        "group_size": None if by_row else group_size,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "global_compression_ratio": None,
        **keys,
    }


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a folder's layers are stored: config, parts of a layer, and what its layers are like."""

    config: dict[str, Any]
    pack: Any
    group_size: int
    symmetric: bool = False
    dtype: Any = np.float16
    has_act_order: bool = False


FORMATS = {
    "gptq": Stored(gptq_config(64), gptq, 64),
    "gptq-sym": Stored(gptq_config(32, sym=True), gptq, 32, symmetric=True),
    "gptq-act-order": Stored(
        gptq_config(32, desc_act=True), gptq_act_order, 32, has_act_order=True
    ),
    "awq": Stored(awq_config(64), awq_gemm, 64),
    "awq-gemv": Stored(awq_config(32, version="GEMV"), awq_gemv, 32),
    "compressed": Stored(compressed_config(32), compressed, 32, dtype=ml_dtypes.bfloat16),
    "compressed-sym": Stored(
        compressed_config(-1, symmetric=True),
        lambda layer: compressed(layer, symmetric=True),
        -1,
        symmetric=True,
        dtype=ml_dtypes.bfloat16,
    ),
}


def write_folder(
    folder: Path,
    hf: Mapping[str, Any],
    floats: Mapping[str, np.ndarray],
    stored: Stored,
    *,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Writes a folder whose linear layers are random ones, and its other tensors `floats`.

    Args:
      folder: where to.
      hf: its `config.json`, but for the quantization.
      floats: tensors of the model that is not quantized; 16-bit floats are kept.
      stored: how the layers are stored.
      seed: of the layers.

    Returns:
      The tensors of the same model with floating-point weights, those of the formulas.
    """
    rng, content, plain = np.random.default_rng(seed), {}, {}
    for name, array in floats.items():
        if not name.endswith("_proj.weight"):
            content[name] = plain[name] = array
            continue
        size = array.shape[1] if stored.group_size == -1 else stored.group_size
        layer = random_layer(rng, array.shape, size, symmetric=stored.symmetric, dtype=stored.dtype)
        stem = name.removesuffix(".weight")
        content |= {f"{stem}.{part}": x for part, x in stored.pack(layer).items()}
        plain[name] = layer.weight()
        if stored.has_act_order:
            order = np.argsort(act_order(array.shape[1]))
            plain[name] = np.ascontiguousarray(plain[name][:, order])
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, {**hf, "quantization_config": stored.config})
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    return plain


def write_config(folder: Path, hf: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
