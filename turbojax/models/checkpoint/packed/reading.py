"""A folder or GGUF file of packed weights, read into a `QuantizedDecoder`, layer by layer.

One layer's tensors are read, unpacked on the device and packed again as `Int4Weight` holds them,
before the next layer's: besides the model, the host holds the tensors of one linear layer, and the
device one layer's codes in 8 bits. On a mesh only the rows or columns of codes and scales are read
that the process's devices have. Zero points, and which group each input is in, are read whole: all
processes must agree on whether there are any.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from turbojax._json import shown_name
from turbojax.matmul.int4.layout import BLOCK, stored_inputs
from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import on_mesh
from turbojax.models.checkpoint.int4_on_mesh import (
    Sparse,
    on_host,
    own_numbers,
    own_rows,
    table_rows,
    wanted_bytes,
)
from turbojax.models.checkpoint.packed import awq, compressed_tensors, gptq, q4_0
from turbojax.models.checkpoint.packed.codes import Codes, PackedFormat, Part, Places, weights
from turbojax.models.checkpoint.weights import (
    FLOATS,
    Progress,
    check_dtype,
    check_rotation,
    require_equal,
)
from turbojax.models.config import TransformerConfig, model_config, stored_dtype
from turbojax.models.families.tensors import (
    EMBEDDING,
    HEAD,
    LAYERS,
    TensorSpec,
    checkpoint_tensors,
    is_ignored,
    text_tensors,
)
from turbojax.models.lora import Adapters, layer_with_adapters
from turbojax.models.quantized import QuantizedDecoder, check_quantizable, norm_shapes
from turbojax.models.quantized_layer import QuantizedLayer, QuantizedLinear, join_layer
from turbojax.models.tensor_parallel import placing
from turbojax.models.tensor_parallel.layout import parts, share
from turbojax.sharding.axes import Axes

_NORM = "model.norm.weight"
_Read = Callable[[str], np.ndarray]


def read(
    folder: Path,
    hf: Mapping[str, Any],
    *,
    dtype: DTypeLike | None,
    max_length: int | None = None,
    progress: Progress | None = None,
    mesh: Mesh | Axes | None = None,
    adapters: Adapters | None = None,
    packing: PackedFormat | None = None,
) -> QuantizedDecoder:
    """Reads a folder, or a GGUF file, whose linear layers are packed; see `load_decoder`.

    `packing` is by default what `hf`, the `config.json`, says, and must be given for a GGUF file.
    """
    if packing is None:
        packing = parse(hf["quantization_config"])
    config = model_config(folder, hf, max_length)
    check_quantizable(config)
    if config.experts is not None:
        raise NotImplementedError(
            f"{folder / _folder.CONFIG_NAME}: quant_method={packing.name!r} is not supported of a "
            "model with experts: must be left out, and weights floating point; quantize_model "
            "rounds them"
        )
    axes = on_mesh.decoder_axes(config, mesh)
    tensors = _tensors(folder, hf, config, packing, axes)
    given = stored_dtype(hf) or tensors[EMBEDDING].numpy_dtype
    compute = check_dtype(given if dtype is None else dtype)
    wanted = _wanted_of(tensors, config, packing, axes)
    counted = on_mesh.Counted(progress, wanted_bytes(wanted))

    def take(name: str) -> np.ndarray:
        array = wanted[name].read()
        counted.add(wanted[name].nbytes)
        return array

    def table(name: str) -> jax.Array:
        array = jnp.asarray(_folder.cast(take(name), compute, name))
        return array if axes is None else placing.place_table("embedding", array, config, axes)

    def layer(number: int) -> QuantizedLayer:
        found = layers.read(number)
        if adapters is not None:
            found = layer_with_adapters(found, number, adapters, config)
        return found if axes is None else placing.place_layer(found, config, axes)

    layers = _Layers(config, packing, tensors, take)
    with contextlib.nullcontext() if axes is None else on_host():
        embedding = table(EMBEDDING)
        read_layers = tuple(jax.block_until_ready(layer(i)) for i in range(config.num_layers))
        norm = jnp.asarray(take(_NORM).astype(np.float32) + np.float32(config.norm_offset))
        if axes is not None:
            norm = jax.device_put(norm, NamedSharding(axes.require_mesh(), PartitionSpec()))
        lm_head = None if config.tie_embeddings else table(HEAD)
    return QuantizedDecoder(
        embedding=embedding,
        layers=read_layers,
        norm=norm,
        lm_head=lm_head,
        config=config,
        dtype=compute,
        axes=axes,
    )


def _wanted_of(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes | None,
) -> dict[str, Sparse]:
    """The tensors, with what is to be read marked: all, or what this process's devices need."""
    wanted = {name: Sparse(stored) for name, stored in tensors.items()}
    if axes is None:
        for tensor in wanted.values():
            tensor.want_all()
        return wanted
    numbers = own_numbers(axes)
    packed: dict[int | None, list[tuple[str, TensorSpec]]] = {}
    for spec in checkpoint_tensors(config):
        if _is_packed(spec):
            packed.setdefault(spec.placements[0].layer, []).append((_stem(spec), spec))
        elif spec.name in (EMBEDDING, HEAD):
            for number in numbers:
                wanted[spec.name].want(0, table_rows(config, axes, number))
        else:
            wanted[spec.name].want_all()
    for linears in packed.values():
        want(wanted, linears, config, packing, axes, numbers)
    return wanted


class _Layers:
    """Reads the layers of a checkpoint; ``take(name)`` reads one of its `tensors`."""

    def __init__(
        self,
        config: TransformerConfig,
        packing: PackedFormat,
        tensors: Mapping[str, _folder.Stored],
        take: _Read,
    ):
        self._config, self._packing, self._tensors, self._take = config, packing, tensors, take
        self._specs: dict[int, list[TensorSpec]] = {}
        for spec in checkpoint_tensors(config):
            layer = spec.placements[0].layer
            if layer is not None:
                self._specs.setdefault(layer, []).append(spec)

    def read(self, number: int) -> QuantizedLayer:
        """Reads the layer of this number."""
        codes: dict[str, Codes] = {}
        biases: dict[str, np.ndarray] = {}
        norms: dict[str, np.ndarray] = {}
        for spec in self._specs[number]:
            kind = spec.placements[0].path[-1]
            if kind == "kernel":
                whole = self._linear(spec)
                codes |= {name: whole.rows(*rows) for name, rows in _placed(spec)}
                continue
            array = self._take(spec.name).astype(np.float32)
            target = biases if kind == "bias" else norms
            target |= {name: array[slice(*rows)] for name, rows in _placed(spec)}
        linears = {
            name: QuantizedLinear(
                weight,
                _optional(biases.get(name)),
                activations="bf16",
                inputs=_optional(codes[name].inputs),
            )
            for name, weight in weights(codes).items()
        }
        return join_layer(linears, self._factors(norms))

    def _linear(self, spec: TensorSpec) -> Codes:
        """Reads a stored linear layer and unpacks it."""
        name = _stem(spec)
        wanted = self._packing.parts(*spec.shape)
        found = {part: f"{name}.{part}" for part in wanted if f"{name}.{part}" in self._tensors}
        arrays = {part: self._take(tensor) for part, tensor in found.items()}
        try:
            return self._packing.unpack(arrays, *spec.shape)
        except (NotImplementedError, ValueError) as error:
            file = self._tensors[next(iter(found.values()))].file
            raise type(error)(f"{file}: {name}: {error}") from error

    def _factors(self, norms: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The factors of norms as `QuantizedLayer` has them."""
        offset = np.float32(self._config.norm_offset)
        shapes = norm_shapes(self._config)

        def factor(name: str, shape: tuple[int, ...]) -> jax.Array:
            whole = norms[name] + offset
            joint = whole.size == np.prod(shape)
            return jnp.asarray(whole.reshape(shape) if joint else np.broadcast_to(whole, shape))

        return {name: factor(name, shape) for name, shape in shapes.items()}


def _tensors(
    folder: Path,
    hf: Mapping[str, Any],
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes | None,
) -> dict[str, _folder.Stored]:
    """The tensors to be read, all there, of the right shapes and dtypes."""
    stored = _folder.stored_tensors(folder)
    if _folder.is_gguf(folder):
        stored = q4_0.linear_layers_as_blocks(stored, folder)
    found = text_tensors(hf, stored)
    _folder.require_config(folder, hf)
    tensors = {name: x for name, x in found.items() if not is_ignored(name, config)}
    repeated = tensors.pop(HEAD, None) if config.tie_embeddings else None
    _folder.require_layers(tensors, config.num_layers, LAYERS, folder)
    _refuse_other_layers(tensors, config, packing)
    wanted = _wanted(config, packing, folder)
    _drop_empty_biases(tensors, wanted)
    optional = {name for name, part in wanted.items() if not part.required}
    expected = {
        name: _shape(tensors.get(name), part)
        for name, part in wanted.items()
        if name in tensors or name not in optional
    }
    _folder.require_tensors(tensors, expected, folder)
    for name, tensor in tensors.items():
        if tensor.dtype not in wanted[name].shapes:
            raise NotImplementedError(
                f"{tensor.file}: {name} has dtype {shown_name(tensor.dtype)}, which is not "
                f"supported: must be {', '.join(sorted(wanted[name].shapes))}"
            )
    check_rotation(config, folder)
    if repeated is not None:
        rows = None if axes is None else on_mesh.table_rows(config, axes)
        require_equal(tensors[EMBEDDING], repeated, rows)
    return tensors


def _wanted(config: TransformerConfig, packing: PackedFormat, folder: Path) -> dict[str, Part]:
    """Every tensor that the checkpoint may have."""
    wanted = {}
    for spec in checkpoint_tensors(config):
        if not _is_packed(spec):
            wanted[spec.name] = Part(dict.fromkeys(FLOATS, spec.shape))
            continue
        try:
            parts = packing.parts(*spec.shape)
        except ValueError as error:
            raise ValueError(
                f"{folder / _folder.CONFIG_NAME}: {packing.name} cannot hold {_stem(spec)}: {error}"
            ) from error
        wanted |= {f"{_stem(spec)}.{name}": part for name, part in parts.items()}
    return wanted


def _refuse_other_layers(
    tensors: Mapping[str, _folder.Stored], config: TransformerConfig, packing: PackedFormat
) -> None:
    """Raises NotImplementedError unless exactly `QuantizedLayer`'s linear layers are quantized."""
    for spec in checkpoint_tensors(config):
        name = _stem(spec)
        if _is_packed(spec):
            if spec.name in tensors:
                raise NotImplementedError(
                    f"{tensors[spec.name].file}: {name} is not quantized, which is not supported: "
                    f"all linear layers within {LAYERS}* must be"
                )
            continue
        packed = f"{name}.{packing.codes}"
        if packed in tensors:
            raise NotImplementedError(
                f"{tensors[packed].file}: {name} is quantized, which is not supported: must be "
                "floating point, as everything outside of the linear layers"
            )


def _drop_empty_biases(tensors: dict[str, _folder.Stored], wanted: Mapping[str, Part]) -> None:
    """Removes unknown biases if they are zeros: some programs write one for every linear layer."""
    for name in [x for x in tensors if x.endswith(".bias") and x not in wanted]:
        stored = tensors[name]
        if name.startswith(LAYERS) and stored.dtype in FLOATS and not stored.read().any():
            del tensors[name]


def _optional(array: np.ndarray | None) -> jax.Array | None:
    return None if array is None else jnp.asarray(array)


def _shape(stored: _folder.Stored | None, part: Part) -> tuple[int, ...]:
    first = next(iter(part.shapes.values()))
    return first if stored is None else part.shapes.get(stored.dtype, first)


def _is_packed(spec: TensorSpec) -> bool:
    return spec.placements[0].path[-1] == "kernel"


def _stem(spec: TensorSpec) -> str:
    return spec.name.removesuffix(".weight")


def _placed(spec: TensorSpec) -> list[tuple[str, tuple[int, int]]]:
    """The names in a `QuantizedLayer` that a tensor's rows go to, and the rows of each."""
    whole = (0, spec.shape[0])
    return [(x.path[-2].removesuffix("_proj"), x.rows or whole) for x in spec.placements]


_PARSERS: Mapping[str, Callable[[Mapping[str, Any]], PackedFormat]] = {
    "gptq": gptq.parse,
    "awq": awq.parse,
    "compressed-tensors": compressed_tensors.parse,
}

METHODS = tuple(_PARSERS)
"""What `quant_method` may be."""


def parse(block: Mapping[str, Any]) -> PackedFormat:
    """How linear layers are stored; `block` is a `quantization_config`."""
    return _PARSERS[block["quant_method"]](block)


_INDEX = ("g_idx", "weight_g_idx")


def want(
    tensors: Mapping[str, Sparse],
    linears: Iterable[tuple[str, TensorSpec]],
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes,
    numbers: Iterable[int],
) -> None:
    """Marks what devices, numbered along `hidden_axes`, need of one layer's linear layers.

    `linears` are the stored ones, each with the beginning of its tensors' names.
    """
    linears, numbers = list(linears), list(numbers)
    # With act-order a device's groups may have any inputs, which are outputs of the layers before.
    is_ordered = any(
        _is_ordered(tensors, stem, packing)
        for stem, spec in linears
        if _names(spec) == ("down_proj",)
    )
    for stem, spec in linears:
        any_inner = is_ordered and spec.placements[0].path[-3] == "mlp"
        for part in packing.parts(*spec.shape):
            tensor = tensors.get(f"{stem}.{part}")
            if tensor is None:
                continue
            places = packing.places.get(part)
            if places is None or any_inner:
                tensor.want_all()
                continue
            for number in numbers:
                _want_part(tensor, places, spec, config, packing, axes, number)


def _want_part(
    tensor: Sparse,
    places: Places,
    spec: TensorSpec,
    config: TransformerConfig,
    packing: PackedFormat,
    axes: Axes,
    number: int,
) -> None:
    """Marks one device's rows or columns of codes or scales."""
    kinds = [kind for kind, _ in places]
    [name, *_] = _names(spec)
    if name not in ("o_proj", "down_proj"):
        axis = kinds.index("outputs")
        tensor.want(axis, _units(_outputs(spec, config, packing, axes, number), places[axis][1]))
        return
    inputs, group = spec.shape[1], _group(packing)
    each = share(inputs, parts(axes), group) if name == "down_proj" else inputs // parts(axes)
    first = number * each
    if "inputs" in kinds:
        axis, columns = kinds.index("inputs"), np.arange(first, min(first + each, inputs))
        tensor.want(axis, _units(columns, places[axis][1]))
        return
    # Padding has the scale of the group that it would lie in.
    axis, columns = kinds.index("groups"), np.arange(first, first + stored_inputs(each, group))
    tensor.want(axis, _units(np.minimum(columns, inputs - 1), packing.group_size or inputs))


def _outputs(
    spec: TensorSpec, config: TransformerConfig, packing: PackedFormat, axes: Axes, number: int
) -> np.ndarray:
    """A device's outputs of a stored linear layer, which may hold several of the model's."""
    width, found = config.head_dim, []
    for name, place in zip(_names(spec), spec.placements, strict=True):
        start, size = (0, spec.shape[0]) if place.rows is None else place.rows
        size -= start
        if name in ("gate_proj", "up_proj"):
            each = share(size, parts(axes), _group(packing))
            rows = own_rows(size, number, each)
        else:
            is_query = name == "q_proj"
            heads = config.num_heads if is_query else config.num_kv_heads
            count = parts(axes) if is_query else axes.size("heads")
            index = number if is_query else number // axes.size("sequence")
            each = heads // count * width
            rows = np.arange(index * each, (index + 1) * each)
        found.append(start + rows)
    return np.concatenate(found)


def _group(packing: PackedFormat) -> int:
    """The group size of the `Int4Weight` that is made, at most a block."""
    return min(packing.group_size or BLOCK, BLOCK)


def _units(places: np.ndarray, each: int) -> np.ndarray:
    return np.unique(places // each)


def _names(spec: TensorSpec) -> tuple[str, ...]:
    return tuple(place.path[-2] for place in spec.placements)


def _is_ordered(tensors: Mapping[str, Sparse], stem: str, packing: PackedFormat) -> bool:
    """Whether a layer's groups are not runs of inputs."""
    for name in _INDEX:
        tensor = tensors.get(f"{stem}.{name}")
        if tensor is None:
            continue
        groups = tensor.look()
        size = packing.group_size or groups.size
        runs = np.arange(groups.size) // size
        # -1 means that groups are not known, and inputs are in order.
        return bool((groups >= 0).all()) and not np.array_equal(groups, runs)
    return False
