"""A decoder that stays in its checkpoint's files: each layer is read when it is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np

from turbojax.models.checkpoint import folder as _folder
from turbojax.models.checkpoint import weights as _weights
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import LayerParams


class StoredDecoder:
    """What a `Decoder` is, read from files anew whenever it is asked for; nothing is kept.

    Made by `open_decoder`. `quantize_model` and `token_bits` take it, layer by layer.

    Attributes:
      config: the shape.
      dtype: of weights and computation.
      layers: one tree of arrays per layer, see `Decoder`.
    """

    def __init__(
        self,
        tensors: Mapping[str, _folder.Stored],
        config: TransformerConfig,
        dtype: np.dtype,
    ) -> None:
        """Takes tensors that are known to be there, and of the right shapes."""
        self.config = config
        self.dtype = dtype
        self.layers: Sequence[LayerParams] = _Layers(tensors, config, dtype)
        self._tensors = tensors

    @property
    def embedding(self) -> jax.Array:
        """``[V, D]``."""
        return self._one("embedding")

    @property
    def norm(self) -> jax.Array:
        """``[D]``, scale of the last norm."""
        return self._one("norm", "scale")

    @property
    def lm_head(self) -> jax.Array | None:
        """``[V, D]``, or None where the embedding serves."""
        return None if self.config.tie_embeddings else self._one("lm_head")

    def _one(self, *path: str) -> jax.Array:
        [array] = _weights.read_parts(self._tensors, self.config, self.dtype, None, path).values()
        return array


class _Layers(Sequence[LayerParams]):
    """The layers of a `StoredDecoder`, each read when it is taken."""

    def __init__(
        self,
        tensors: Mapping[str, _folder.Stored],
        config: TransformerConfig,
        dtype: np.dtype,
    ) -> None:
        self._read = tensors, config, dtype
        self._count = config.num_layers

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> LayerParams: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerParams]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        number = range(self._count)[index]
        tree: LayerParams = {}
        for path, array in _weights.read_parts(*self._read, number).items():
            _weights.insert(tree, path[1:], array)
        return tree

    def __iter__(self) -> Iterator[LayerParams]:
        return (self[i] for i in range(self._count))
