"""Quantized decoders that are split over a mesh, read part by part from folders of this package.

The process reads what its devices need of a layer into host arrays of the layer's whole size;
the rest of these is zeros that nothing reads. The devices' weights are cut out of them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.matmul.int4.layout import BLOCK, GATED_ROWS, OUT_MULTIPLE, stored_inputs
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.models.checkpoint.folder import Stored, whole_box
from turbojax.models.checkpoint.on_mesh import Counted, Progress
from turbojax.models.config import TransformerConfig
from turbojax.models.lora import Adapters, layer_with_adapters
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.quantized_layer import QuantizedLayer, QuantizedMlp
from turbojax.models.tensor_parallel import placing
from turbojax.models.tensor_parallel.layout import parts, qkv_outputs, share
from turbojax.models.tensor_parallel.specs import owners
from turbojax.sharding.axes import Axes


class Sparse:
    """A tensor of a file, with the places along one axis that are to be read."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._axis = 0
        self._wanted: np.ndarray | None = None
        self._is_whole = False
        self._kept: np.ndarray | None = None

    def want_all(self) -> None:
        """Marks the whole tensor to be read."""
        self._is_whole = True

    def look(self) -> np.ndarray:
        """Reads the whole now and keeps it, because what else to read depends on it."""
        self.want_all()
        if self._kept is None:
            self._kept = self.read()
        return self._kept

    def want(self, axis: int, places: np.ndarray) -> None:
        """Marks these places along an axis to be read; all calls must name the same axis."""
        if self._wanted is None:
            self._axis, self._wanted = axis, np.zeros(self.stored.shape[axis], bool)
        assert axis == self._axis
        self._wanted[places] = True

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted."""
        if self._is_whole or self._wanted is None:
            return self.stored.nbytes if self._is_whole else 0
        return self.stored.nbytes * int(self._wanted.sum()) // max(1, self._wanted.size)

    def read(self) -> np.ndarray:
        """The tensor, with zeros at places that are not marked."""
        if self._is_whole:
            return self.stored.read() if self._kept is None else self._kept
        array = np.zeros(self.stored.shape, self.stored.numpy_dtype)
        if self._wanted is None:
            return array
        box = whole_box(self.stored.shape)
        before, after = box[: self._axis], box[self._axis + 1 :]
        edges = np.flatnonzero(np.diff(self._wanted, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            run = (*(slice(None),) * self._axis, slice(first, last))
            array[run] = self.stored.read_box((*before, (first, last), *after))
        return array


def own_numbers(axes: Axes) -> list[int]:
    """The parts of a model, counted along `hidden_axes`, that this process's devices hold."""
    return sorted(owners(axes))


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Within this context arrays are made in the host's memory, if jax has a CPU backend."""
    try:
        [device, *_] = jax.local_devices(backend="cpu")
    except RuntimeError:
        yield
        return
    with jax.default_device(device):
        yield


def wanted_bytes(tensors: Mapping[str, Sparse]) -> int:
    """Bytes that will be read."""
    return sum(x.nbytes for x in tensors.values())


TILED = ("codes", "scales", "zeros")
"""Parts of an INT4 weight that lie in tiles."""

Named = Sequence[tuple[str, Any]]
"""Arrays, or their shapes, with their names in files."""


def read(
    template: QuantizedDecoder,
    named: Named,
    tensors: Mapping[str, Stored],
    restore: Callable[[str, np.ndarray], np.ndarray],
    axes: Axes,
    progress: Progress | None,
    *,
    whole: bool = False,
    adapters: Adapters | None = None,
) -> QuantizedDecoder:
    """Reads a decoder, split as `partition_specs` says.

    `template` is the whole decoder as shapes, `named` its leaves with their names in `tensors`.
    ``restore(name, array)`` makes the array in memory of what the file holds. With `whole` each
    process reads all, because the file has another layout than memory.
    """
    config, numbers = template.config, own_numbers(axes)
    sparse = {name: Sparse(tensors[name]) for name, _ in named}
    pieces = list(_pieces(template, [name for name, _ in named]))
    for piece, names in pieces:
        for name in names:
            if whole:
                sparse[name].want_all()
                continue
            for number in numbers:
                _want(sparse[name], name, piece, config, axes, number)
    counted = Counted(progress, wanted_bytes(sparse))

    def load(piece: Any, names: Sequence[str]) -> Any:
        leaves = []
        for name in names:
            leaves.append(jnp.asarray(restore(name, sparse[name].read())))
            counted.add(sparse[name].nbytes)
        return jax.tree.unflatten(jax.tree.structure(piece), leaves)

    def layer(piece: QuantizedLayer, names: Sequence[str], number: int) -> QuantizedLayer:
        held = load(piece, names)
        if adapters is not None:
            held = layer_with_adapters(held, number, adapters, config)
        return jax.block_until_ready(placing.place_layer(held, config, axes))

    def table(name: str, piece: Any, names: Sequence[str]) -> Any:
        held = load(piece, names)
        return jax.block_until_ready(placing.place_table(name, held, config, axes))

    def whole_norm(piece: Any, names: Sequence[str]) -> jax.Array:
        held = {"norm": load(piece, names)}
        return jax.block_until_ready(placing.place(lambda _: held, config, axes)["norm"])

    embedding, *layers, norm, head = pieces
    with on_host():
        return QuantizedDecoder(
            embedding=table("embedding", *embedding),
            layers=tuple(layer(*x, i) for i, x in enumerate(layers)),
            norm=whole_norm(*norm),
            lm_head=table("lm_head", *head),
            config=config,
            dtype=template.dtype,
            axes=axes,
        )


def _pieces(
    template: QuantizedDecoder, names: Sequence[str]
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Embedding, layers, norm and head, each with the names of its leaves."""
    left = iter(names)
    for piece in (template.embedding, *template.layers, template.norm, template.lm_head):
        yield piece, tuple(itertools.islice(left, len(jax.tree.leaves(piece))))


def _want(
    tensor: Sparse, name: str, piece: Any, config: TransformerConfig, axes: Axes, number: int
) -> None:
    """Marks what a device, numbered along `hidden_axes`, needs of a leaf; of small leaves all."""
    *_, linear, part = ("", *name.split("."))
    is_tiled = part in TILED
    if isinstance(piece, QuantizedLayer) and is_tiled:
        _want_of_layer(tensor, linear, part, piece, config, axes, number)
    elif isinstance(piece, Int4Weight) and is_tiled:
        tensor.want(0, tiles(piece, table_rows(config, axes, number)))
    elif name in ("embedding", "lm_head"):
        tensor.want(0, table_rows(config, axes, number))
    else:
        tensor.want_all()


def _want_of_layer(
    tensor: Sparse,
    linear: str,
    part: str,
    layer: QuantizedLayer,
    config: TransformerConfig,
    axes: Axes,
    number: int,
) -> None:
    """Marks the tiles, blocks or groups that one device needs of a leaf, see `local_layer`."""
    weight = weight_of(layer, linear)
    lead = len(weight.stack)
    if linear == "qkv":
        return tensor.want(lead, tiles(weight, qkv_outputs(config, axes, number)))
    if linear == "o":
        each = config.num_heads * config.head_dim // parts(axes)
        return tensor.want(lead + 1, columns(weight, part, number * each, each))
    down = weight_of(layer, "down")
    each = share(down.in_size, parts(axes), down.group_size)
    if linear == "down":
        return tensor.want(lead + 1, columns(weight, part, number * each, each))
    if isinstance(layer.mlp, QuantizedMlp) and layer.mlp.down.inputs is not None:
        return tensor.want_all()  # The file says which outputs.
    rows = own_rows(down.in_size, number, each)
    return tensor.want(lead, tiles(weight, np.concatenate([rows, rows + down.in_size])))


def weight_of(layer: QuantizedLayer, linear: str) -> Int4Weight:
    """The weight of one of the linear layers, ``"qkv"``, ``"o"``, ``"gate_up"``, ``"down"``."""
    holder = layer if linear in ("qkv", "o") else layer.mlp
    found: Any = getattr(holder, linear)
    return found if isinstance(found, Int4Weight) else found.weight


def own_rows(size: int, number: int, each: int) -> np.ndarray:
    """The numbers of a device's `each` rows, as far as there are `size`."""
    return np.arange(min(number * each, size), min((number + 1) * each, size))


def table_rows(config: TransformerConfig, axes: Axes, number: int) -> np.ndarray:
    """The rows of a table that a device has."""
    return own_rows(config.vocab_size, number, share(config.vocab_size, parts(axes)))


def tiles(weight: Int4Weight, rows: np.ndarray) -> np.ndarray:
    """The tiles that hold some outputs; those of a gated weight's gate come first."""
    if weight.gated:
        half = weight.result_size
        of_up, rows = rows // half, rows % half
        rows = (2 * (rows // GATED_ROWS) + of_up) * GATED_ROWS + rows % GATED_ROWS
    return np.unique(rows // OUT_MULTIPLE)


def columns(weight: Int4Weight, part: str, start: int, size: int) -> np.ndarray:
    """The blocks, or groups, that hold some inputs; the last one also stands in for padding."""
    unit = BLOCK if part == "codes" else weight.group_size
    count = weight.codes.shape[-3] if part == "codes" else weight.scales.shape[-2]
    last = start + stored_inputs(size, weight.group_size)
    return np.unique(np.minimum(np.arange(start // unit, -(-last // unit)), count - 1))
