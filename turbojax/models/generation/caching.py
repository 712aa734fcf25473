"""KV caches of a whole model, one per layer."""

import dataclasses
import functools

import jax
import numpy as np

from turbojax.kv import CacheKind, LayerCache, init_layer_cache
from turbojax.models.decoder import Decoder
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelCaches:
    """The KV caches of all layers of a model.

    Attributes:
      layers: one cache per layer, all of one kind and size.
    """

    layers: tuple[LayerCache, ...]

    @property
    def max_length(self) -> int:
        """Tokens each sequence can hold."""
        return self.layers[0].max_length

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 caches of the same capacity over `nbytes`."""
        return self.layers[0].compression_ratio


def init_caches(
    model: Transformer | Decoder | QuantizedDecoder,
    batch_size: int,
    max_length: int,
    cache: CacheKind,
) -> ModelCaches:
    """Empty caches for all layers of a model.

    Args:
      model: the model.
      batch_size: sequences.
      max_length: tokens each sequence can hold.
      cache: the kind of cache, see `turbojax.kv.init_layer_cache`.

    Raises:
      ValueError: if `cache` is no kind of cache, or a size does not fit.
    """
    config = model.config
    sizes = (batch_size, max_length, config.num_kv_heads, config.head_dim)
    # Says what is wrong before `jit` says that it cannot hash it.
    jax.eval_shape(lambda: init_layer_cache(*sizes, kind=cache, dtype=model.dtype))
    return ModelCaches(
        tuple(_empty_layer(sizes, cache, model.dtype) for _ in range(config.num_layers))
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_layer(sizes: tuple[int, ...], kind: CacheKind, dtype: np.dtype) -> LayerCache:
    """One program for each size, instead of one for each array."""
    batch_size, max_length, num_kv_heads, head_dim = sizes
    return init_layer_cache(batch_size, max_length, num_kv_heads, head_dim, kind=kind, dtype=dtype)
