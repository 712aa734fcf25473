"""Vision towers in Hugging Face folders: beside a text model, or in a folder of their own."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint.weights import check_dtype, require_floats
from turbojax.models.config import stored_dtype
from turbojax.models.families.base import VISION_PARTS
from turbojax.models.families.gemma import GEMMA3_WITH_IMAGES
from turbojax.models.families.table import whole_of
from turbojax.models.vision.config import VISION, VisionConfig
from turbojax.models.vision.model import VisionModel, read_preprocessing

FOLDER = "vision"
"""The folder within that of a text model alone in which `load_vision` looks for images' part."""

_TOWER, _PROJECTOR = VISION_PARTS
_LINEARS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "out_proj": "self_attn.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_NORMS = {"norm1": "layer_norm1", "norm2": "layer_norm2"}
# The head pools all patches for a purpose of SigLIP's own; the file may hold it.
_IGNORED = (f"{_TOWER}.head.", f"{_TOWER}.embeddings.position_ids")


def load_vision(path: str | os.PathLike[str], *, dtype: DTypeLike | None = None) -> VisionModel:
    """Loads what reads images in a checkpoint of Gemma 3 with 4, 12 or 27 billion parameters.

    Its text model is what `load` and `load_decoder` read of the same folder. Tensors may have the
    names of any version of transformers.

    Args:
      path: a folder of a `Gemma3ForConditionalGeneration`, or one of a text model with such a
        folder named ``"vision"`` in it, as `save_vision` writes it beside a quantized model.
      dtype: of weights and computation: float32, bfloat16 or float16; by default what
        `config.json` names, or else float32.

    Raises:
      OSError: if the folder or a file is missing.
      NotImplementedError: if the model reads no images, or a key or tensor is not supported.
      ValueError: naming it, if a tensor is missing, unexpected or mis-shaped, or too large for
        `dtype`; or if a file cannot be parsed.
    """
    return _folder.steady(_own_folder(Path(path)), functools.partial(_read, dtype=dtype))


def has_vision(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint, a folder or a GGUF file, has a part that `load_vision` may read."""
    hf = _folder.read_config(_own_folder(Path(path)))
    return VISION in hf and whole_of(hf) is GEMMA3_WITH_IMAGES


def save_vision(
    model: VisionModel, path: str | os.PathLike[str], *, dtype: DTypeLike | None = None
) -> None:
    """Writes a vision model into a folder of its own, from which `load_vision` reads it.

    To keep it beside a text model that is saved alone, quantized or not, give ``path=folder /
    "vision"``. An interruption loses nothing, see `save`.

    Args:
      model: the vision model.
      path: the folder, created if it does not exist; a checkpoint in it is replaced.
      dtype: of the stored tensors, by default that of the weights.

    Raises:
      BlockingIOError: if another program is writing into the folder.
      ValueError: if the dtype is not float32, bfloat16 or float16, or too small for a weight.
    """
    leaf = jax.tree.leaves(model)[0]
    stored = check_dtype(leaf.dtype if dtype is None else dtype)
    arrays = to_tensors(model)

    def make(name: str) -> np.ndarray:
        return _folder.cast(np.asarray(arrays[name]), stored, name)

    tensors = [
        _folder.Tensor(name, stored, array.shape, functools.partial(make, name))
        for name, array in arrays.items()
    ]
    settings = model.preprocessing
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = {
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
        "rescale_factor": settings.rescale_factor,
        "size": size,
    }
    config = {**model.config.to_hf(), "torch_dtype": stored.name}
    companions = {"preprocessor_config.json": _folder.encode(processor)}
    _folder.write(path, config, tensors, companions=companions)


def expected_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that is read, without the prefixes of versions."""
    width, inner, size = config.hidden_size, config.intermediate_size, config.patch_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{_TOWER}.embeddings.patch_embedding.weight": (width, 3, size, size),
        f"{_TOWER}.embeddings.patch_embedding.bias": (width,),
        f"{_TOWER}.embeddings.position_embedding.weight": (config.patches_per_side**2, width),
    }
    sizes = {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
    for layer in range(config.num_layers):
        for name in _NORMS.values():
            shapes |= dict.fromkeys(_of_layer(layer, name), (width,))
        for name in _LINEARS.values():
            weight, bias = _of_layer(layer, name)
            shapes[weight] = sizes.get(name, (width, width))
            shapes[bias] = shapes[weight][:1]
    shapes |= dict.fromkeys(_pair(f"{_TOWER}.post_layernorm"), (width,))
    shapes[f"{_PROJECTOR}.mm_soft_emb_norm.weight"] = (width,)
    shapes[f"{_PROJECTOR}.mm_input_projection_weight"] = (width, config.text_size)
    return shapes


def to_tensors(model: VisionModel) -> dict[str, jax.Array]:
    """The weights under the names of `expected_shapes`, matrices as files have them."""
    config, embedding = model.config, model.embedding
    patch = embedding["kernel"].reshape(config.patch_size, config.patch_size, 3, -1)
    found = {
        f"{_TOWER}.embeddings.patch_embedding.weight": patch.transpose(3, 2, 0, 1),
        f"{_TOWER}.embeddings.patch_embedding.bias": embedding["bias"],
        f"{_TOWER}.embeddings.position_embedding.weight": embedding["positions"],
    }
    for layer in range(config.num_layers):
        for ours, name in (*_NORMS.items(), *_LINEARS.items()):
            weight, bias = _of_layer(layer, name)
            arrays = {key: array[layer] for key, array in model.layers[ours].items()}
            found[weight] = arrays["scale"] if "scale" in arrays else arrays["kernel"].T
            found[bias] = arrays["bias"]
    weight, bias = _pair(f"{_TOWER}.post_layernorm")
    found |= {weight: model.norm["scale"], bias: model.norm["bias"]}
    found[f"{_PROJECTOR}.mm_soft_emb_norm.weight"] = model.projector["scale"]
    found[f"{_PROJECTOR}.mm_input_projection_weight"] = model.projector["kernel"]
    return found


def from_tensors(
    tensors: Mapping[str, np.ndarray], config: VisionConfig, **others: Any
) -> VisionModel:
    """The inverse of `to_tensors`; `others` are the model's static fields."""

    def stack(name: str, transposed: bool = False) -> jax.Array:
        arrays = [tensors[f"{_TOWER}.encoder.layers.{i}.{name}"] for i in range(config.num_layers)]
        return jnp.asarray(np.stack([x.T if transposed else x for x in arrays]))

    def of_norm(name: str) -> dict[str, jax.Array]:
        return {"scale": stack(f"{name}.weight"), "bias": stack(f"{name}.bias")}

    def of_linear(name: str) -> dict[str, jax.Array]:
        return {"kernel": stack(f"{name}.weight", True), "bias": stack(f"{name}.bias")}

    patch = tensors[f"{_TOWER}.embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    weight, bias = (jnp.asarray(tensors[x]) for x in _pair(f"{_TOWER}.post_layernorm"))
    return VisionModel(
        embedding={
            "kernel": jnp.asarray(patch.reshape(-1, config.hidden_size)),
            "bias": jnp.asarray(tensors[f"{_TOWER}.embeddings.patch_embedding.bias"]),
            "positions": jnp.asarray(tensors[f"{_TOWER}.embeddings.position_embedding.weight"]),
        },
        layers={
            **{ours: of_norm(name) for ours, name in _NORMS.items()},
            **{ours: of_linear(name) for ours, name in _LINEARS.items()},
        },
        norm={"scale": weight, "bias": bias},
        projector={
            "scale": jnp.asarray(tensors[f"{_PROJECTOR}.mm_soft_emb_norm.weight"]),
            "kernel": jnp.asarray(tensors[f"{_PROJECTOR}.mm_input_projection_weight"]),
        },
        config=config,
        **others,
    )


def _own_folder(folder: Path) -> Path:
    """Where a checkpoint's vision model is: in its folder, or in one within that."""
    beside = folder / FOLDER
    is_beside = (beside / _folder.CONFIG_NAME).is_file()
    return beside if is_beside and VISION not in _folder.read_config(folder) else folder


def _read(folder: Path, *, dtype: DTypeLike | None) -> VisionModel:
    hf = _folder.read_config(folder)
    try:
        config = VisionConfig.from_hf(hf)
    except (NotImplementedError, ValueError) as error:
        text = str(error).removeprefix("config.json").removeprefix(":").strip()
        raise type(error)(f"{folder / _folder.CONFIG_NAME}: {text}") from error
    target = check_dtype(stored_dtype(hf) or np.float32 if dtype is None else dtype)
    stored = _of_images(_folder.stored_tensors(folder))
    _folder.require_config(folder, hf)
    _folder.require_layers(stored, config.num_layers, f"{_TOWER}.encoder.layers.", folder)
    _folder.require_tensors(stored, expected_shapes(config), folder)
    require_floats(stored)
    tensors = {name: _folder.cast(x.read(), target, name) for name, x in stored.items()}
    preprocessing = read_preprocessing(folder, config.image_size)
    return from_tensors(tensors, config, dtype=target, preprocessing=preprocessing)


def _of_images(tensors: Mapping[str, _folder.Stored]) -> dict[str, _folder.Stored]:
    """The tensors that read images, without the prefixes that versions of transformers differ in.

    A text model's are left out, whatever their names.
    """
    found = {}
    for given, stored in tensors.items():
        name = given.removeprefix("model.")
        name = name.replace(f"{_TOWER}.vision_model.", f"{_TOWER}.", 1)
        if name.startswith((f"{_TOWER}.", f"{_PROJECTOR}.")) and not name.startswith(_IGNORED):
            found[name] = stored
    return found


def _of_layer(layer: int, name: str) -> tuple[str, str]:
    return _pair(f"{_TOWER}.encoder.layers.{layer}.{name}")


def _pair(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"
