"""A decoder that stays in its checkpoint's files: each layer is read when it is asked for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import on_mesh
from turbojax.models.checkpoint import weights as _weights
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import LayerParams
from turbojax.sharding.axes import Axes


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
        found = _weights.read_parts(self.tensors, self.config, self.dtype, layer, path)
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
