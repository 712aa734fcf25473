"""KV caches of a whole model, one per layer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal, TypeVar, get_args

import jax
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree
from turbojax.caches import (
    CacheKind,
    LayerCache,
    PagedLayer,
    init_layer_cache,
    kind_for,
    window_to_keep,
)
from turbojax.models.config import TransformerConfig
from turbojax.models.decoder import Decoder
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.tensor_parallel.specs import check_batch, whole_slots
from turbojax.models.transformer import Transformer
from turbojax.numerics.config import TurboConfig
from turbojax.sharding import Axes
from turbojax.sharding.specs import Split

_Edges = Literal["exact", "bfloat16", "paged", "latent"]
"""Kinds of caches that are not compressed."""


@dataclasses.dataclass(frozen=True)
class UncompressedEdges:
    """Caches of one kind, but for the first and the last layers, whose caches are not compressed.

    These layers lose most where they are compressed, in many models: the first one's errors reach
    all others, the last one's the logits. Static under `jit`, and taken wherever a cache of a whole
    model is chosen: ``models.generate(..., cache=UncompressedEdges("k8v4", 2))``.

    Attributes:
      kind: of the layers between.
      layers: how many layers at either end are not compressed, at least 1.
      edges: of those: ``"exact"``, ``"paged"`` or ``"latent"`` in the model's dtype, or
        ``"bfloat16"``. By default ``"paged"`` where `kind` is one of pages, ``"latent"`` where it
        is one of latents (keys and values made of them would take many times the memory of the
        layers between), and ``"exact"`` elsewhere. An ``implementation=`` that is asked for must be
        one of all layers: beside exact ones, only ``"xla"`` is; beside ``"paged"`` ones, those of
        pages are, such as ``"triton"``.

    Raises:
      TypeError: if `layers` is not an integer, or `kind` stands for all layers of a model: another
        `UncompressedEdges`, or a tuple.
      ValueError: if `layers` is less than 1, `kind` is unknown or not compressed, or there are no
        such `edges`.
    """

    kind: CacheKind
    layers: int = 2
    edges: _Edges | None = None

    def __post_init__(self) -> None:
        if isinstance(self.kind, UncompressedEdges | tuple):
            raise TypeError(f"kind={self.kind} must be a cache of one layer")
        if self.kind in get_args(_Edges):
            raise ValueError(f"kind={self.kind!r} must be one that is compressed")
        kind_for(self.kind)  # refuses unknown ones now
        _checks.check_sizes(layers=self.layers)
        if self.edges not in (None, *get_args(_Edges)):
            names = ", ".join(map(repr, get_args(_Edges)))
            raise ValueError(f"edges={self.edges!r} must be {names} or None")

    def of_layers(self, num_layers: int) -> tuple[CacheKind, ...]:
        """The kind of every layer's cache.

        Raises:
          ValueError: if no layer of so many would be compressed.
        """
        return with_edges(self.kind, self.edges or self._usual_edges, self.layers, num_layers)

    @property
    def _usual_edges(self) -> _Edges:
        kind = kind_for(self.kind)
        if kind.has_latents:
            return "latent"
        return "paged" if kind.cls is PagedLayer else "exact"


_KindT = TypeVar("_KindT")


def with_edges(between: _KindT, edge: _KindT, count: int, num_layers: int) -> tuple[_KindT, ...]:
    """`edge` for the first and last `count` layers, `between` for the others."""
    if 2 * count >= num_layers:
        raise ValueError(
            f"{count} layers at either end, uncompressed, must leave some of the model's "
            f"{num_layers} layers between"
        )
    return (edge,) * count + (between,) * (num_layers - 2 * count) + (edge,) * count


ModelCacheKind = CacheKind | UncompressedEdges | tuple[CacheKind, ...]
"""What the caches of a whole model can be: of one kind, or a tuple with a kind for every layer.

An ``implementation=`` that is asked for must be one of all layers, see `UncompressedEdges`."""


def with_uncompressed(
    cache: CacheKind,
    layers: int,
    edges: _Edges | None = None,
) -> ModelCacheKind:
    """The caches of `UncompressedEdges`, or for 0 layers `cache` itself; raises what that does."""
    _checks.check_integer("uncompressed_layers", layers)
    if layers < 0:
        raise ValueError(f"uncompressed_layers={layers} must be at least 0")
    return UncompressedEdges(cache, layers, edges) if layers else cache


def kinds_of_layers(cache: ModelCacheKind, num_layers: int) -> tuple[CacheKind, ...]:
    """The kind of every layer's cache."""
    if isinstance(cache, UncompressedEdges):
        return cache.of_layers(num_layers)
    if not isinstance(cache, tuple):
        return (cache,) * num_layers
    if len(cache) != num_layers:
        raise ValueError(
            f"cache has {len(cache)} kinds, must have one for each of the model's {num_layers} "
            "layers"
        )
    for layer, kind in enumerate(cache):
        try:
            kind_for(kind)
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
    return cache


@pytree
@dataclasses.dataclass(frozen=True)
class ModelCaches(Split):
    """The KV caches of all layers of a model.

    Attributes:
      layers: one cache per layer, all of one size; of one kind, or of several, see
        `ModelCacheKind`.
    """

    layers: tuple[LayerCache, ...]

    AXES: ClassVar[dict[str, str]] = {}
    """None of its own: every layer has its cache's."""

    @property
    def max_length(self) -> int:
        """Tokens each sequence may grow to."""
        return self.layers[0].max_length

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 caches of the same capacity over `nbytes`."""
        # Whole numbers, so that equal layers give the ratio of one of them to the bit.
        plain = sum(round(layer.compression_ratio * layer.nbytes) for layer in self.layers)
        return plain / self.nbytes


def init_caches(
    model: Transformer | Decoder | QuantizedDecoder,
    batch_size: int,
    max_length: int,
    cache: ModelCacheKind,
) -> ModelCaches:
    """Empty caches for all layers of a model.

    A layer with a window keeps what that needs and not all tokens, see
    `turbojax.caches.rolling_buffer`.

    Args:
      model: the model. Of a split decoder each device makes caches of its own sequences, KV heads
        and, where the axis of the sequence has devices, slots: then layers with a window keep all
        tokens, and `max_length` is rounded up so that devices have as many slots.
      batch_size: sequences, of a split decoder as many on all devices.
      max_length: tokens each sequence may grow to.
      cache: the kind of cache, see `turbojax.caches.init_layer_cache`, `UncompressedEdges`, or a
        tuple with a kind for every layer.

    Raises:
      ValueError: if `cache` is no kind of cache, or has not one for every layer, a size does not
        fit, or no layer would be compressed, or it is one of latents and the model has none.
      NotImplementedError: if slots are to be split over devices, and the model has latents but the
        cache none: each device has heads of its own there.
    """
    axes = None if isinstance(model, Transformer) else model.axes
    check_batch(batch_size, axes)
    config = model.config
    kinds = kinds_of_layers(cache, config.num_layers)
    if config.latent is not None and axes is not None and axes.size("sequence") > 1:
        _require_latents(kinds, axes)
    slots = (kind_for(kind).slots(kind, max_length)[0] for kind in kinds)
    max_length = whole_slots(max_length, slots, axes)
    # Says what is wrong before `jit` says that it cannot hash it.
    middle = kinds[len(kinds) // 2]
    sizes = [(batch_size, max_length, *widths_of(config, kind)) for kind in kinds]
    jax.eval_shape(lambda: _init(sizes[len(kinds) // 2], middle, model.dtype, None))
    windows = windows_of_layers(config, kinds)
    if axes is not None and axes.size("sequence") > 1:
        # Devices' parts hold all tokens, and where a window ends none apart from the others.
        kinds = tuple(
            dataclasses.replace(kind, first_tokens=0)
            if isinstance(kind, TurboConfig) and window is not None
            else kind
            for kind, window in zip(kinds, windows, strict=True)
        )
        windows = (None,) * len(kinds)
    return ModelCaches(
        tuple(
            _one_device(size, kind, model.dtype, window)
            if axes is None
            else _init(size, kind, model.dtype, window, axes)
            for size, kind, window in zip(sizes, kinds, windows, strict=True)
        )
    )


def _require_latents(kinds: Sequence[CacheKind], axes: Axes) -> None:
    """Raises NotImplementedError if a cache is not one of latents."""
    for kind in kinds:
        if not kind_for(kind).has_latents:
            raise NotImplementedError(
                f"cache={kind!r} of a model with latent attention cannot be split over "
                f"{axes.of_dimension('sequence')}: must be one of latents"
            )


def widths_of(config: TransformerConfig, kind: CacheKind) -> tuple[int, int, int | None]:
    """What a layer's cache of this kind holds of a token: KV heads, their channels, and None.

    A cache of latents holds 1, ``C + R`` and R, the channels that rotary embeddings rotate.
    """
    if not kind_for(kind).has_latents:
        return config.num_kv_heads, config.head_dim, None
    latent = config.latent
    if latent is None:
        raise ValueError(f"cache={kind!r} must be one of keys and values: the model has no latents")
    return 1, latent.rank + latent.rope_dim, latent.rope_dim


def windows_of_layers(
    config: TransformerConfig, kinds: Sequence[CacheKind]
) -> tuple[int | None, ...]:
    """For every layer how many tokens its cache must keep; None for all."""
    return tuple(
        window_to_keep(kind, config.attention_options(layer).local_window_size)
        for layer, kind in enumerate(kinds)
    )


_Sizes = tuple[int, int, int, int, int | None]
"""Sequences, tokens, heads, channels, and of latents those that are rotated."""


def _init(
    sizes: _Sizes,
    kind: CacheKind,
    dtype: np.dtype,
    window: int | None,
    axes: Axes | None = None,
) -> LayerCache:
    *sizes_of_all, rope_dim = sizes
    return init_layer_cache(
        *sizes_of_all,
        kind=kind,
        dtype=dtype,
        local_window_size=window,
        rope_dim=rope_dim,
        axes=axes,
    )


# One program for each size, instead of one for each array.
_one_device = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(_init)
