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
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from turbojax.models.config import LlamaConfig
from turbojax.models.llama import Llama

BEGINNING_OF_FILE = 0
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"

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
) -> Llama:
    """Loads a Llama checkpoint.

    Args:
      path_or_name: ``"embedded"`` for the shipped model, or a folder with `config.json` and
        `model.safetensors` in Hugging Face's Llama layout.
      dtype: dtype of parameters and computation, by default that of the stored tensors.

    Returns:
      The model, its parameters on JAX's default device.

    Raises:
      FileNotFoundError: if the folder or one of its two files does not exist.
      NotImplementedError: if the architecture is not supported, see `LlamaConfig.from_hf`.
      ValueError: if a file cannot be parsed, or tensors are missing, unexpected or mis-shaped.
    """
    folder = embedded_path() if path_or_name == "embedded" else Path(path_or_name)
    config = LlamaConfig.from_hf(_read_json(_require_file(folder, CONFIG_NAME)))
    weights = _require_file(folder, WEIGHTS_NAME)
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} is not a readable safetensors file: {error}") from error
    _require_tensors(tensors, config, weights)
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
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = to_hf_tensors(model, dtype=dtype)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    # safetensors creates the file readable for its owner alone; a package must be readable to all.
    (folder / WEIGHTS_NAME).chmod(0o644)
    stored = tensors["model.embed_tokens.weight"].dtype.name
    config = {**model.config.to_hf(), "torch_dtype": stored, **(extra_config or {})}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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


def _require_file(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{str(folder)!r} must be 'embedded' or a folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{str(folder)!r} is no checkpoint: it must hold {name}")
    return folder / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _require_tensors(tensors: Mapping[str, np.ndarray], config: LlamaConfig, source: Path) -> None:
    """Raises ValueError unless the tensors are exactly those of the configuration."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{source} lacks {_some(missing)}")
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise ValueError(f"{source} holds unexpected tensors: {_some(unexpected)}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} has shape {tensors[name].shape}, must be {shape}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
