"""Checkpoints of quantized decoders: codes and scales as they lie in memory, bit for bit.

A folder with `config.json`, whose `quantization_config` says what is quantized and how, and
`model.safetensors`, or several files with an index. A tensor is named after its place in
`QuantizedDecoder`, such as ``layers.0.qkv.codes``. e4m3 scales are stored as bytes: not every
reader of safetensors knows the type.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from turbojax import _checks
from turbojax._json import shown
from turbojax.matmul.int4.static import TOKEN_KINDS
from turbojax.matmul.int4.storage import tiles_of_version_1
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import int4_on_mesh, mxfp4, on_mesh
from turbojax.models.checkpoint.packed.reading import METHODS
from turbojax.models.checkpoint.weights import Progress, check_dtype, check_rotation
from turbojax.models.config import TransformerConfig, config_json, model_config, stored_dtype
from turbojax.models.lora import Adapters, LoraLinear, with_adapters
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.quantized_layer import QuantizedLayer, QuantizedLinear
from turbojax.models.random_weights import random_quantized_decoder, random_weight
from turbojax.sharding.axes import Axes

QUANT_METHOD = "turbojax-fireq"
VERSION = 2
"""Since 2 INT4 weights are stored in tiles; those of version 1 are converted when they are read."""
_KINDS: dict[str, tuple[Any, ...]] = {
    "bits": (4,),
    "group_size": (128, 64, 32),
    "scale_dtype": ("e4m3", "bf16", "f16"),
    "key_channel_scale": (True, False),
    "embedding": ("int4", "float"),
    "lm_head": ("int4", "float", None),
    "zeros": (True, False),
    "activations": TOKEN_KINDS,
}
_LATER = {"zeros": False, "activations": "e4m3", "input_order": []}
"""Keys that older files lack, and their values for such files."""
_ORDERED = ("qkv", "o", "gate_up", "down")
"""What `input_order` may name: linear layers whose inputs have an order of their own."""
_E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def save_quantized(
    model: QuantizedDecoder,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = _folder.MAX_SHARD_BYTES,
    extra_config: Mapping[str, Any] | None = None,
    companions: Mapping[str, Path | bytes] | None = None,
) -> None:
    """Writes a quantized decoder into a folder; `load` reads it back bit for bit.

    An interruption loses nothing, see `save`.

    Args:
      model: the decoder.
      path: the folder, created if it does not exist; a checkpoint in it is replaced.
      dtype: dtype in which embedding and head are stored where they are not quantized, and of
        the loaded model; by default the decoder's.
      max_shard_bytes: of the tensors in one file, see `save`.
      extra_config: further keys of `config.json`, such as `bos_token_id`; none that the model's
        own config says.
      companions: further files of the folder by name, such as a tokenizer's, to be copied from
        elsewhere; those of an older checkpoint are removed. If None, they stay.

    Raises:
      BlockingIOError: if another program is writing into the folder.
      NotImplementedError: if `load` would refuse a key of `extra_config`.
      TypeError: if the model is not quantized, or JSON cannot express `extra_config`.
      ValueError: if the model's layers and tables are not all of one kind and the config's sizes;
        it has adapters or is split over a mesh; the dtype is not float32, bfloat16 or float16, or
        too small for a weight; `max_shard_bytes` is not positive; or `extra_config` contradicts the
        model.
    """
    if not isinstance(model, QuantizedDecoder):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a QuantizedDecoder, as quantize_model "
            "returns it"
        )
    _check_model(model)
    _checks.check_sizes(max_shard_bytes=max_shard_bytes)
    stored = check_dtype(model.dtype if dtype is None else dtype)
    tensors = [_tensor(name, leaf, stored) for name, leaf in _named_leaves(model)]
    config = {
        **config_json(model.config, stored, extra_config),
        "quantization_config": _description(model),
    }
    _folder.write(path, config, tensors, max_shard_bytes, companions)


def is_quantized(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to a quantized checkpoint; NotImplementedError if unknown.

    One with experts in MXFP4 does not count: its weights are read as floating-point numbers.
    """
    block = hf.get("quantization_config")
    if block is None:
        return False
    if not isinstance(block, Mapping):
        raise ValueError(f"config.json: quantization_config={shown(block)} must be an object")
    method = block.get("quant_method")
    if mxfp4.is_packed(hf):
        return False
    if method not in (QUANT_METHOD, *METHODS):
        names = ", ".join(map(repr, (QUANT_METHOD, *METHODS, mxfp4.QUANT_METHOD)))
        raise NotImplementedError(
            f"config.json: quant_method={shown(method)} is not supported: must be one of {names}"
        )
    return True


def read(
    folder: Path,
    hf: Mapping[str, Any],
    *,
    dtype: DTypeLike | None,
    max_length: int | None = None,
    progress: Progress | None = None,
    mesh: Mesh | Axes | None = None,
    adapters: Adapters | None = None,
) -> QuantizedDecoder:
    """Reads a folder that `save_quantized` wrote; see `load_decoder`.

    On a mesh every process reads the whole of a file of version 1.
    """
    block = hf["quantization_config"]
    version = block.get("version")
    if type(version) is not int or version not in (1, VERSION):
        raise NotImplementedError(
            f"{folder / _folder.CONFIG_NAME}: quantization_config: version={shown(version)} must "
            f"be {VERSION} or 1"
        )
    named_dtype = stored_dtype(hf) or jnp.bfloat16
    compute = check_dtype(named_dtype if dtype is None else dtype)
    config = model_config(folder, hf, max_length)
    axes = on_mesh.decoder_axes(config, mesh)
    tensors = _folder.stored_tensors(folder)
    _folder.require_config(folder, hf)
    _folder.require_layers(tensors, config.num_layers, "layers.", folder)
    if version == 1 and config.experts is not None:
        raise ValueError(
            f"{folder / _folder.CONFIG_NAME}: quantization_config: version=1 must be {VERSION}: "
            "there were no experts in it"
        )
    template = _template(config, block, compute)
    named = _named_leaves(template)
    shapes = {name: _stored_shape(name, leaf.shape, version) for name, leaf in named}
    _folder.require_tensors(tensors, shapes, folder)
    check_rotation(config, folder)
    dtypes = {name: leaf.dtype for name, leaf in named}

    def restore(name: str, array: np.ndarray) -> np.ndarray:
        return _restore(name, array, tensors[name].file, dtypes[name], version)

    if axes is not None:
        return int4_on_mesh.read(
            template, named, tensors, restore, axes, progress, whole=version == 1, adapters=adapters
        )
    counted = on_mesh.Counted(progress, sum(stored.nbytes for stored in tensors.values()))
    leaves = []
    for name, _ in named:
        array = jnp.asarray(restore(name, tensors[name].read()))
        leaves.append(jax.block_until_ready(array))
        counted.add(tensors[name].nbytes)
    decoder: QuantizedDecoder = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return decoder if adapters is None else with_adapters(decoder, adapters)


def _stored_shape(name: str, shape: tuple[int, ...], version: int) -> tuple[int, ...]:
    """The shape of a leaf in a file of this version."""
    if version == 1 and name.endswith(".codes"):
        tiles, blocks, rows, size = shape
        return tiles * rows, blocks * size
    if version == 1 and name.endswith(".scales"):
        tiles, groups, rows = shape
        return groups, tiles * rows
    return shape


def _restore(name: str, array: np.ndarray, file: Path, dtype: np.dtype, version: int) -> np.ndarray:
    """A leaf as memory holds it, made of what the file holds."""
    if dtype == _E4M3 and array.dtype == np.uint8:
        array = array.view(_E4M3)
    if name in ("embedding", "lm_head"):
        array = _folder.cast(array, dtype, name)
    if array.dtype != dtype:
        raise ValueError(f"{file}: {name} has dtype {array.dtype}, must be {dtype}")
    if name.endswith(".inputs") and not np.array_equal(np.sort(array), np.arange(array.size)):
        raise ValueError(f"{file}: {name} must hold every input once")
    return tiles_of_version_1(name.rpartition(".")[2], array, name) if version == 1 else array


def _tensor(name: str, leaf: jax.Array, stored: np.dtype) -> _folder.Tensor:
    """A leaf to be written; tables that are not quantized are stored as `stored`."""
    dtype = stored if name in ("embedding", "lm_head") else np.dtype(leaf.dtype)

    def make() -> np.ndarray:
        array = _folder.cast(np.asarray(leaf), dtype, name)
        return array.view(np.uint8) if dtype == _E4M3 else array

    written = np.dtype(np.uint8) if dtype == _E4M3 else dtype
    return _folder.Tensor(name, written, leaf.shape, make)


def _named_leaves(tree: QuantizedDecoder) -> list[tuple[str, Any]]:
    """Every array with its place, such as ``layers.0.qkv.codes``, without `weight` and `mlp`."""
    with_path, _ = jax.tree.flatten_with_path(tree)

    def name(path: Any) -> str:
        place = jax.tree_util.keystr(path, simple=True, separator=".")
        return place.replace(".weight.", ".").replace(".mlp.", ".")

    return [(name(path), x) for path, x in with_path]


def _check_model(model: QuantizedDecoder) -> None:
    """Raises ValueError unless `read` could make this model from its description."""
    if model.axes is not None:
        raise ValueError(
            f"axes={model.axes} must be None: a device's weights are not those of files"
        )
    for i, layer in enumerate(model.layers):
        parts = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, LoraLinear))
        if any(isinstance(x, LoraLinear) for x in parts):
            raise ValueError(
                f"layers[{i}] has adapters, must have none: see save_adapters and without_adapters"
            )
    if len(model.layers) != model.config.num_layers:
        raise ValueError(
            f"{len(model.layers)} layers must be config.num_layers={model.config.num_layers}"
        )
    expected = _template(model.config, _description(model), model.dtype)
    for i, (layer, template) in enumerate(zip(model.layers, expected.layers, strict=True)):
        if _described(layer) != _described(template):
            raise ValueError(
                f"layers[{i}] must have the sizes of the config, and the scales, groups, zeros, "
                "orders of inputs, activations and key_channel_scale (or none) of layers[0]"
            )
    for name in ("embedding", "lm_head"):
        table, template = getattr(model, name), getattr(expected, name)
        # Floats may be stored in another dtype, which the caller chooses.
        is_int4 = isinstance(table, Int4Weight)
        if is_int4 and _described(table) != _described(template):
            raise ValueError(
                f"{name} is {_kind(table)}, must be {_kind(template)}, with the scales of "
                f"layers[0], which are {model.layers[0].qkv.weight.scale_dtype}"
            )
        if not is_int4 and table is not None and table.shape != template.shape:
            raise ValueError(f"{name}.shape={table.shape} must be {template.shape}")


def _described(tree: Any) -> Any:
    kinds = [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), kinds


def _kind(weight: Int4Weight) -> str:
    zeros = "without zeros" if weight.zeros is None else "with zeros"
    return (
        f"{weight.shape} in groups of {weight.group_size} with scales in {weight.scale_dtype}, "
        f"{zeros}"
    )


def _description(model: QuantizedDecoder) -> dict[str, Any]:
    layer, head = model.layers[0], model.lm_head
    first = layer.qkv.weight
    orders = {name for name, linear in _linears(layer).items() if linear.inputs is not None}
    return {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "bits": 4,
        "group_size": first.group_size,
        "scale_dtype": first.scale_dtype,
        "zeros": first.zeros is not None,
        "activations": layer.qkv.activations,
        "input_order": sorted(orders),
        "key_channel_scale": layer.key_channel_scale is not None,
        "embedding": "int4" if isinstance(model.embedding, Int4Weight) else "float",
        "lm_head": None if head is None else "int4" if isinstance(head, Int4Weight) else "float",
    }


def _template(
    config: TransformerConfig, block: Mapping[str, Any], dtype: np.dtype
) -> QuantizedDecoder:
    """A decoder of shapes and dtypes, without arrays, as its description says."""
    block = {**_LATER, **block}
    for name, allowed in _KINDS.items():
        if name not in block:
            raise ValueError(f"config.json: quantization_config lacks {name}")
        value = block[name]
        # 1 and 4.0 equal True and 4.
        if not any(type(value) is type(x) and value == x for x in allowed):
            raise ValueError(
                f"config.json: quantization_config: {name}={shown(value)} must be "
                f"{' or '.join(map(str, allowed))}"
            )
    orders = block["input_order"]
    if not isinstance(orders, list) or not all(name in _ORDERED for name in orders):
        raise ValueError(
            f"config.json: quantization_config: input_order={shown(orders)} must be a list of "
            f"{', '.join(_ORDERED)}"
        )
    if config.experts is not None and (block["activations"] != "e4m3" or orders):
        raise NotImplementedError(
            f"config.json: quantization_config: activations={block['activations']!r} and "
            f"input_order={shown(orders)} must be 'e4m3' and [] of a model with experts"
        )
    scale_dtype = block["scale_dtype"]

    def table(kind: str | None) -> Any:
        shape = (config.vocab_size, config.hidden_size)
        if kind == "int4":
            return jax.eval_shape(lambda: random_weight(jax.random.key(0), shape, 1.0, scale_dtype))
        return None if kind is None else jax.ShapeDtypeStruct(shape, dtype)

    decoder = jax.eval_shape(
        lambda: random_quantized_decoder(config, scale_dtype=scale_dtype, dtype=dtype)
    )
    layers = tuple(_layer_template(layer, block) for layer in decoder.layers)
    if block["key_channel_scale"]:
        sizes = jax.ShapeDtypeStruct((config.num_kv_heads, config.head_dim), jnp.float32)
        layers = tuple(dataclasses.replace(layer, key_channel_scale=sizes) for layer in layers)
    return QuantizedDecoder(
        embedding=table(block["embedding"]),
        layers=layers,
        norm=decoder.norm,
        lm_head=table(block["lm_head"]),
        config=config,
        dtype=dtype,
    )


def _layer_template(layer: QuantizedLayer, block: Mapping[str, Any]) -> Any:
    """A layer of shapes and dtypes whose linear layers are as described."""
    struct: Any = jax.ShapeDtypeStruct

    def described(weight: Int4Weight) -> Int4Weight:
        size = block["group_size"]
        *lead, _, rows = weight.scales.shape
        shape = (*lead, weight.padded_shape[1] // size, rows)
        return dataclasses.replace(
            weight,
            scales=struct(shape, weight.scales.dtype),
            zeros=struct(shape, jnp.int8) if block["zeros"] else None,
            group_size=size,
        )

    def linear(path: Any, x: Any) -> Any:
        if isinstance(x, Int4Weight):
            return described(x)
        if not isinstance(x, QuantizedLinear):
            return x
        is_ordered = path[-1].name in block["input_order"]
        return QuantizedLinear(
            weight=described(x.weight),
            bias=x.bias,
            inputs=struct((x.weight.in_size,), jnp.int32) if is_ordered else None,
            activations=block["activations"],
        )

    def is_weight(x: Any) -> bool:
        return _is_linear(x) or isinstance(x, Int4Weight)

    return jax.tree_util.tree_map_with_path(linear, layer, is_leaf=is_weight)


def _linears(layer: QuantizedLayer) -> dict[str, QuantizedLinear]:
    with_path, _ = jax.tree.flatten_with_path(layer, is_leaf=_is_linear)
    return {path[-1].name: x for path, x in with_path if _is_linear(x)}


def _is_linear(x: Any) -> bool:
    return isinstance(x, QuantizedLinear)
