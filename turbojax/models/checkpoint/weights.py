"""Weights from a checkpoint's files to the device, one tensor at a time, at once or when asked for.

The arrays of the model are made first. A tensor is read, cast, and written into its place, which is
donated, before the next one is read: besides the model, at most one tensor exists on the host and
on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import mxfp4, on_mesh
from turbojax.models.checkpoint.on_mesh import Progress as Progress
from turbojax.models.checkpoint.on_mesh import insert as insert
from turbojax.models.checkpoint.on_mesh import variable as variable
from turbojax.models.config import DTYPES, TransformerConfig, stored_dtype
from turbojax.models.decoder import Decoder, LayerParams
from turbojax.models.families.tensors import (
    EMBEDDING,
    HEAD,
    LAYERS,
    Placement,
    TensorSpec,
    checkpoint_tensors,
    experts_tensors,
    is_ignored,
    stacked,
    text_tensors,
)
from turbojax.models.transformer import Transformer
from turbojax.sharding.axes import Axes

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Names of dtypes in safetensors files that weights may have."""
# Rows of two tables are compared in pieces of this size.
_COMPARED_BYTES = 1 << 26

_Path = tuple[str, ...]


def read_transformer(
    folder: Path,
    hf: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
    mesh: Mesh | Axes | None = None,
) -> Transformer:
    """Reads a folder's weights into a `Transformer`; `config` is what `hf` describes."""
    axes = None if mesh is None else on_mesh.axes_of(mesh)
    tensors, target = prepare(folder, hf, config, dtype)
    if axes is not None:
        return on_mesh.read_transformer(tensors, config, target, axes, progress)
    model = nnx.eval_shape(lambda: Transformer(config, param_dtype=target, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    dtypes = {
        stacked(placement, config).path: spec.dtype(target)
        for spec in checkpoint_tensors(config)
        for placement in spec.placements
        if placement.layer is not None
    }
    arrays = {path: jnp.zeros(_shape(state, path), dtypes[path]) for path in sorted(dtypes)}

    def put(placement: Placement, tensor: np.ndarray) -> None:
        placement = stacked(placement, config)
        path, layer = placement.path, placement.layer
        if layer is None:
            array = jnp.asarray(tensor)
        else:
            index = index_of(layer, placement.expert)
            array = _insert(arrays.pop(path), tensor, index, transpose=placement.transpose)
        arrays[path] = jax.block_until_ready(array)

    _read(tensors, config, target, put, progress)
    for path, array in arrays.items():
        variable(state, path).set_value(array)
    nnx.update(model, state)
    return model


def read_decoder(
    folder: Path,
    hf: Mapping[str, Any],
    config: TransformerConfig,
    *,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
    mesh: Mesh | Axes | None = None,
) -> Decoder:
    """Reads a folder's weights into a `Decoder`; see `read_transformer`."""
    axes = on_mesh.decoder_axes(config, mesh)
    tensors, target = prepare(folder, hf, config, dtype, axes)
    if axes is not None:
        return on_mesh.read_decoder(tensors, config, target, axes, progress)
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    others: dict[_Path, jax.Array] = {}

    def put(placement: Placement, tensor: np.ndarray) -> None:
        if placement.layer is None:
            others[placement.path] = _on_device(placement, tensor)
        else:
            _put(layers[placement.layer], placement, tensor, config)

    _read(tensors, config, target, put, progress)
    return Decoder(
        embedding=others["embedding",],
        layers=tuple(layers),
        norm=others["norm", "scale"],
        lm_head=others.get(("lm_head",)),
        config=config,
        dtype=target,
    )


def read_parts(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    dtype: np.dtype,
    layer: int | None,
    path: _Path | None = None,
) -> dict[_Path, jax.Array]:
    """The arrays of one layer, or for None of what lies outside; with a `path` only that one."""
    found: dict[_Path, jax.Array] = {}
    for spec in checkpoint_tensors(config):
        wanted = [
            x for x in spec.placements if x.layer == layer and (path is None or x.path == path)
        ]
        if not wanted:
            continue
        tensor = _folder.cast(tensors[spec.name].read(), spec.dtype(dtype), spec.name)
        for placement in wanted:
            before = found.pop(placement.path, None)
            found[placement.path] = _beside(before, placement, placement.of(tensor), config)
    return found


def _put(
    tree: dict[str, Any], placement: Placement, tensor: np.ndarray, config: TransformerConfig
) -> None:
    """Puts a tensor into a layer's nested dicts, or an expert's into the array of all experts."""
    *parents, last = placement.path[1:]
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = _beside(tree.pop(last, None), placement, tensor, config)


def _beside(
    before: jax.Array | None, placement: Placement, tensor: np.ndarray, config: TransformerConfig
) -> jax.Array:
    """A tensor on the device; for an expert, the array of all experts with this one written."""
    if placement.expert is None:
        return _on_device(placement, tensor)
    assert config.experts is not None
    if before is None:
        shape = tensor.shape[::-1] if placement.transpose else tensor.shape
        before = jnp.zeros((config.experts.count, *shape), tensor.dtype)
    index = index_of(placement.expert)
    return jax.block_until_ready(_insert(before, tensor, index, transpose=placement.transpose))


def index_of(*numbers: int | None) -> tuple[np.int32, ...]:
    """Numbers as an index into leading axes, without those that are None."""
    return tuple(np.int32(x) for x in numbers if x is not None)


def _on_device(placement: Placement, tensor: np.ndarray) -> jax.Array:
    array = _transpose(tensor) if placement.transpose else jnp.asarray(tensor)
    return jax.block_until_ready(array)


def _shape(state: Any, path: _Path) -> tuple[int, ...]:
    return variable(state, path).get_value().shape


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """A dtype of weights and computation; ValueError if it is none of `DTYPES`."""
    wanted = f"must be one of {', '.join(DTYPES)}"
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{dtype=} {wanted}") from error
    if found.name not in DTYPES:
        raise ValueError(f"dtype={found.name} {wanted}")
    return found


def check_rotation(config: TransformerConfig, folder: Path) -> None:
    """Raises ValueError unless all rotary frequencies are finite.

    To be called after the tensors' shapes are checked, because there is one frequency per channel.
    """
    with np.errstate(all="ignore"):
        frequencies = [
            rope.frequencies(np.float32, longest)
            for rope in config.ropes
            for longest in (1, config.max_length)
        ]
    if not np.isfinite(frequencies).all():
        scaling, local = config.rope_scaling, config.local_rope_theta
        bases = f"rope_theta={config.rope_theta}" + (f", local_rope_theta={local}" if local else "")
        raise ValueError(
            f"{folder / _folder.CONFIG_NAME}: {bases} and {scaling=} must give finite rotary "
            "frequencies"
        )


def require_floats(tensors: Mapping[str, _folder.Stored]) -> None:
    """Raises NotImplementedError if a tensor's dtype is not one of `FLOATS`."""
    for name, stored in tensors.items():
        if stored.dtype not in FLOATS:
            raise NotImplementedError(
                f"{stored.file}: {name} has dtype {stored.dtype}, which is not supported: must "
                f"be {', '.join(sorted(FLOATS))}"
            )


def prepare(
    folder: Path,
    hf: Mapping[str, Any],
    config: TransformerConfig,
    dtype: DTypeLike | None,
    axes: Axes | None = None,
) -> tuple[dict[str, _folder.Stored], np.dtype]:
    """The tensors to be read, all there and of the right shape, and the dtype they are cast to.

    If a checkpoint with tied embeddings repeats the table, both are compared; for a decoder split
    over `axes`, only the rows that this process holds.
    """
    target = None if dtype is None else check_dtype(dtype)
    found = text_tensors(hf, _folder.stored_tensors(folder))
    _folder.require_config(folder, hf)
    if mxfp4.is_packed(hf):
        found = mxfp4.unpacked(found)
    tensors = {name: x for name, x in found.items() if not is_ignored(name, config)}
    repeated = tensors.pop(HEAD, None) if config.tie_embeddings else None
    _folder.require_layers(tensors, config.num_layers, LAYERS, folder)
    _folder.require_count(tensors, experts_tensors(config), folder)
    expected = {spec.name: spec.shape for spec in checkpoint_tensors(config)}
    _folder.require_tensors(tensors, expected, folder)
    check_rotation(config, folder)
    require_floats(tensors)
    if repeated is not None:
        rows = None if axes is None else on_mesh.table_rows(config, axes)
        require_equal(tensors[EMBEDDING], repeated, rows)
    if target is None:
        target = stored_dtype(hf) or tensors[EMBEDDING].numpy_dtype
    return tensors, check_dtype(target)


def _read(
    tensors: Mapping[str, _folder.Stored],
    config: TransformerConfig,
    dtype: np.dtype,
    put: Callable[[Placement, np.ndarray], None],
    progress: Progress | None,
) -> None:
    """Calls ``put(placement, part)`` for each tensor in the files' order, cast to `dtype`."""
    specs: dict[str, TensorSpec] = {spec.name: spec for spec in checkpoint_tensors(config)}
    counted = on_mesh.Counted(progress, sum(stored.nbytes for stored in tensors.values()))
    for name, stored in tensors.items():
        tensor = _folder.cast(stored.read(), specs[name].dtype(dtype), name)
        for placement in specs[name].placements:
            put(placement, placement.of(tensor))
        counted.add(stored.nbytes)


def require_equal(
    embedding: _folder.Stored,
    head: _folder.Stored,
    parts: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Raises ValueError unless two tables of tied embeddings are the same, in some rows or all."""
    same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    if same:
        rows = max(1, _COMPARED_BYTES * head.shape[0] // head.nbytes)
        same = all(
            embedding.read(first, min(rows, last - first)).tobytes()
            == head.read(first, min(rows, last - first)).tobytes()
            for start, last in parts or [(0, head.shape[0])]
            for first in range(start, last, rows)
        )
    if not same:
        raise ValueError(
            f"{head.file}: {HEAD} differs from {EMBEDDING}, and config.json ties them: must be "
            "equal or absent, or tie_word_embeddings must be false"
        )


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transpose")
def _insert(
    stacked: jax.Array, tensor: jax.Array, index: tuple[jax.Array, ...], *, transpose: bool
) -> Any:
    """Writes the tensor of one layer, or of one of its experts, in place."""
    # As integers: XLA may take bfloat16 through float32, which changes the bits of NaN.
    bits = jnp.dtype(f"uint{8 * stacked.dtype.itemsize}")
    target, part = (jax.lax.bitcast_convert_type(x, bits) for x in (stacked, tensor))
    part = part.T if transpose else part
    start = (*index, *(jnp.int32(0),) * part.ndim)
    target = jax.lax.dynamic_update_slice(
        target, part.reshape((1,) * len(index) + part.shape), start
    )
    return jax.lax.bitcast_convert_type(target, stacked.dtype)


@jax.jit
def _transpose(tensor: jax.Array) -> jax.Array:
    return tensor.T


@dataclasses.dataclass(frozen=True)
class StoredDecoder:
    """What a `Decoder` is, but every access reads the weights from files anew; nothing is kept.

    Made by `open_decoder`. `quantize_model` and `token_bits` take it, layer by layer.

    Attributes:
      tensors: the checkpoint's tensors by name: all that the config asks for.
      config: the shape.
      dtype: of weights and computation.
      axes: of the mesh that arrays are split over when they are read, or None for one device.
    """

    tensors: Mapping[str, _folder.Stored] = dataclasses.field(repr=False)
    config: TransformerConfig
    dtype: np.dtype
    axes: Axes | None = None

    @property
    def embedding(self) -> jax.Array:
        """``[V, D]``."""
        return self._one("embedding")

    @property
    def layers(self) -> Sequence[LayerParams]:
        """One tree of arrays per layer, see `Decoder`, each read when it is taken."""
        return _Layers(self)

    @property
    def norm(self) -> jax.Array:
        """``[D]``, scale of the last norm."""
        return self._one("norm", "scale")

    @property
    def lm_head(self) -> jax.Array | None:
        """``[V, D]``, or None where the embedding serves."""
        return None if self.config.tie_embeddings else self._one("lm_head")

    def _one(self, *path: str) -> jax.Array:
        [array] = self._parts(None, path).values()
        return array

    def _parts(
        self, layer: int | None, path: tuple[str, ...] | None = None
    ) -> dict[tuple[str, ...], jax.Array]:
        """Arrays of a layer, or for None of what lies outside of layers, by their paths there."""
        if self.axes is not None:
            return on_mesh.read_parts(self.tensors, self.config, self.dtype, self.axes, layer, path)
        found = read_parts(self.tensors, self.config, self.dtype, layer, path)
        return found if layer is None else {path[1:]: x for path, x in found.items()}


class _Layers(Sequence[LayerParams]):
    def __init__(self, decoder: StoredDecoder) -> None:
        self._decoder = decoder

    def __len__(self) -> int:
        return self._decoder.config.num_layers

    @overload
    def __getitem__(self, index: int) -> LayerParams: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerParams]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        tree = dict[str, Any]()
        for path, array in self._decoder._parts(range(len(self))[index]).items():
            on_mesh.insert(tree, path, array)
        return tree
