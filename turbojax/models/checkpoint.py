"""Hugging Face Llama folders: `config.json` and one `model.safetensors`.

The model shipped with this package is such a folder, named ``"embedded"``. It is byte-level:
token i is the byte of value i, and byte 0 stands before the first byte of every document
(`BEGINNING_OF_FILE`), in training and wherever the model is used.
"""

import importlib.resources
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from turbojax.models import _folder, quantized_checkpoint
from turbojax.models._folder import WEIGHTS_NAME as WEIGHTS_NAME
from turbojax.models.config import LlamaConfig
from turbojax.models.llama import Llama
from turbojax.models.quantized import QuantizedDecoder

BEGINNING_OF_FILE = 0

# Per-layer tensors: name under "model.layers.{i}." -> (path under `blocks`, is a matrix). Hugging
# Face stores matrices as [out, in], nnx as [in, out].
_LAYER_TENSORS = {
    "input_layernorm.weight": (("attention_norm", "scale"), False),
    "self_attn.q_proj.weight": (("attention", "q_proj", "kernel"), True),
    "self_attn.k_proj.weight": (("attention", "k_proj", "kernel"), True),
    "self_attn.v_proj.weight": (("attention", "v_proj", "kernel"), True),
    "self_attn.o_proj.weight": (("attention", "o_proj", "kernel"), True),
    "post_attention_layernorm.weight": (("mlp_norm", "scale"), False),
    "mlp.gate_proj.weight": (("mlp", "gate_proj", "kernel"), True),
    "mlp.up_proj.weight": (("mlp", "up_proj", "kernel"), True),
    "mlp.down_proj.weight": (("mlp", "down_proj", "kernel"), True),
}


def embedded_path() -> Path:
    """The folder of the model shipped with this package."""
    return Path(str(importlib.resources.files("turbojax.models") / "embedded"))


def held_out_modules() -> tuple[str, ...]:
    """File names of the standard library modules the embedded model was not trained on."""
    content = json.loads((embedded_path() / "held_out.json").read_text(encoding="utf-8"))
    return tuple(content["modules"])


def load(
    path_or_name: str | os.PathLike[str] = "embedded", *, dtype: DTypeLike | None = None
) -> Llama | QuantizedDecoder:
    """Loads a Llama checkpoint, or a quantized one.

    Args:
      path_or_name: ``"embedded"`` for the shipped model, or a folder with `config.json` and
        `model.safetensors`, in Hugging Face's Llama layout or written by `save_quantized`.
      dtype: dtype of parameters and computation, by default that of the stored tensors. Codes and
        scales of a quantized checkpoint stay as they are.

    Returns:
      The model, its parameters on JAX's default device.

    Raises:
      FileNotFoundError: if the folder or one of its two files does not exist.
      NotImplementedError: if the architecture or the quantization is not supported, see
        `LlamaConfig.from_hf`.
      ValueError: if a file cannot be parsed, or tensors are missing, unexpected or mis-shaped.
    """
    folder, hf = checkpoint_folder(path_or_name), read_config(path_or_name)
    if quantized_checkpoint.is_quantized(hf):
        return quantized_checkpoint.read(folder, hf, dtype=dtype)
    return _read(folder, hf, dtype)


def load_llama(
    path_or_name: str | os.PathLike[str] = "embedded", *, dtype: DTypeLike | None = None
) -> Llama:
    """Loads a checkpoint whose weights are floating point, as `load` does.

    Raises:
      FileNotFoundError, NotImplementedError, ValueError: as `load`.
      ValueError: also if the checkpoint is quantized.
    """
    folder, hf = checkpoint_folder(path_or_name), read_config(path_or_name)
    if quantized_checkpoint.is_quantized(hf):
        raise ValueError(
            f"{str(folder)!r} is a quantized model: the weights must be floating point"
        )
    return _read(folder, hf, dtype)


def checkpoint_folder(path_or_name: str | os.PathLike[str]) -> Path:
    """The folder that a name or path stands for; see `load`."""
    return embedded_path() if path_or_name == "embedded" else Path(path_or_name)


def read_config(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint's `config.json` says.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it cannot be parsed.
    """
    folder = checkpoint_folder(path_or_name)
    return _folder.read_json(_folder.require_file(folder, _folder.CONFIG_NAME))


def _read(folder: Path, hf: Mapping[str, Any], dtype: DTypeLike | None) -> Llama:
    config = LlamaConfig.from_hf(hf)
    weights = _folder.require_file(folder, _folder.WEIGHTS_NAME)
    tensors = _folder.read_tensors(weights)
    _folder.require_tensors(tensors, expected_shapes(config), weights)
    if dtype is None:
        dtype = tensors["model.embed_tokens.weight"].dtype
    return from_hf_tensors(config, tensors, dtype=dtype)


def save(
    model: Llama,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    extra_config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model as a Hugging Face Llama folder; `load` reads it back bit for bit.

    Args:
      model: the model to save.
      path: the folder, created if it does not exist; its two files are overwritten.
      dtype: dtype of the stored tensors, by default that of the parameters.
      extra_config: further keys of `config.json`, such as `bos_token_id`.

    Raises:
      TypeError: if the model is not a `Llama`.
    """
    if not isinstance(model, Llama):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Llama; save_quantized writes quantized "
            "models"
        )
    tensors = to_hf_tensors(model, dtype=dtype)
    stored = tensors["model.embed_tokens.weight"].dtype.name
    config = {**model.config.to_hf(), "torch_dtype": stored, **(extra_config or {})}
    _folder.write(path, config, tensors)


def from_hf_tensors(
    config: LlamaConfig, tensors: Mapping[str, np.ndarray], *, dtype: DTypeLike
) -> Llama:
    """Builds a model from tensors under Hugging Face names, `[out, in]`, cast to `dtype`."""
    model = nnx.eval_shape(lambda: Llama(config, param_dtype=dtype, rngs=nnx.Rngs(0)))
    state = nnx.state(model)

    def put(path: tuple[str, ...], array: np.ndarray) -> None:
        _variable(state, path).set_value(jnp.asarray(array.astype(jnp.dtype(dtype))))

    for suffix, (path, is_matrix) in _LAYER_TENSORS.items():
        layers = [tensors[_layer_name(i, suffix)] for i in range(config.num_layers)]
        put(("blocks", *path), np.stack([layer.T if is_matrix else layer for layer in layers]))
    put(("embedding",), tensors["model.embed_tokens.weight"])
    put(("norm", "scale"), tensors["model.norm.weight"])
    if not config.tie_embeddings:
        put(("lm_head",), tensors["lm_head.weight"])
    nnx.update(model, state)
    return model


def to_hf_tensors(model: Llama, *, dtype: DTypeLike | None = None) -> dict[str, np.ndarray]:
    """The model's parameters under Hugging Face names, matrices as `[out, in]`, on the host."""
    state = nnx.state(model)

    def get(path: tuple[str, ...]) -> np.ndarray:
        array = np.asarray(jax.device_get(_variable(state, path).get_value()))
        return array if dtype is None else array.astype(jnp.dtype(dtype))

    tensors = {"model.embed_tokens.weight": get(("embedding",))}
    for suffix, (path, is_matrix) in _LAYER_TENSORS.items():
        for i, layer in enumerate(get(("blocks", *path))):
            # safetensors writes the buffer as it lies in memory: a transposed view would be wrong.
            tensors[_layer_name(i, suffix)] = np.ascontiguousarray(layer.T if is_matrix else layer)
    tensors["model.norm.weight"] = get(("norm", "scale"))
    if not model.config.tie_embeddings:
        tensors["lm_head.weight"] = get(("lm_head",))
    return tensors


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this shape holds."""
    return dict(_expected_shapes(config))


def _expected_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    size, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (query_size, size),
        "self_attn.k_proj.weight": (kv_size, size),
        "self_attn.v_proj.weight": (kv_size, size),
        "self_attn.o_proj.weight": (size, query_size),
        "post_attention_layernorm.weight": (size,),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, size)
    for i in range(config.num_layers):
        for suffix, shape in layer.items():
            yield _layer_name(i, suffix), shape
    yield "model.norm.weight", (size,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, size)


def _layer_name(layer: int, suffix: str) -> str:
    return f"model.layers.{layer}.{suffix}"


def _variable(state: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        state = state[key]
    return state
