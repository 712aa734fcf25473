"""KV caches of a whole model, one per layer, and how a layer attends through its own."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax.baselines import exact
from turbojax.cache import ProgressiveCache, append, init_cache, kv4
from turbojax.cache.update import store_prompt
from turbojax.config import TurboConfig
from turbojax.models import paged
from turbojax.models.decoder import Decoder
from turbojax.models.llama import Attend, Llama
from turbojax.models.pooled import PooledAttention
from turbojax.models.quantized import QuantizedDecoder
from turbojax.ops import kv4_attention
from turbojax.ops.registry import writer_beside
from turbojax.ops.turbo_attention import decode, prefill

CacheKind = Literal["exact", "kv4"] | paged.PagedKind | TurboConfig
LayerCache = exact.ExactCache | ProgressiveCache | kv4.Kv4Cache | paged.PagedLayer
CACHE_NAMES = ("exact", "4bit", "2/4bit", "3bit", "2bit", "kv4", *paged.PAGED_KINDS)


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


def cache_by_name(name: str, num_kv_heads: int) -> CacheKind:
    """The cache that a name on a command line stands for.

    Args:
      name: ``"exact"``, the bits of all heads (``"4bit"``, ``"3bit"``, ``"2bit"``),
        ``"2/4bit"``: half of the KV heads at 2 bits, the others at 4, ``"kv4"``: 4 bits with a
        scale per token and head (FireQ), or pages of tokens as they are (``"paged"``), in an 8-bit
        float (``"fp8_e4m3"``, ``"fp8_e5m2"``) or as ``"turbo4"``.
      num_kv_heads: of the model.

    Raises:
      ValueError: if the name is another one, or half of the heads is no whole number.
    """
    if name not in CACHE_NAMES:
        raise ValueError(f"cache {name!r} must be one of {', '.join(CACHE_NAMES)}")
    if name == "exact":
        return "exact"
    if name == "kv4":
        return "kv4"
    for kind in paged.PAGED_KINDS:
        if name == kind:
            return kind
    if name == "2/4bit":
        if num_kv_heads % 2:
            raise ValueError(f"cache {name!r} needs an even number of KV heads, not {num_kv_heads}")
        half = num_kv_heads // 2
        return TurboConfig(num_low_bit_key_heads=half, num_low_bit_value_heads=half)
    bits = int(name[0])
    return TurboConfig(key_bits=bits, value_bits=bits)


def init_caches(
    model: Llama | Decoder | QuantizedDecoder, batch_size: int, max_length: int, cache: CacheKind
) -> ModelCaches:
    """Empty caches for all layers of a model.

    Args:
      model: the model.
      batch_size: sequences.
      max_length: tokens each sequence can hold.
      cache: ``"exact"`` for uncompressed caches, in the model's dtype if that has 16 bits and
        otherwise in bfloat16, ``"kv4"``, pages of tokens in the model's dtype (``"paged"``), in
        8-bit floats (``"fp8_e4m3"``, ``"fp8_e5m2"``: at scale 1, so that keys and values must be
        within 448 or 57344) or as ``"turbo4"``, or the config of progressively compressed caches.

    Raises:
      ValueError: if `cache` is none of these, or a size does not fit.
    """
    sizes = (batch_size, max_length, model.config.num_kv_heads, model.config.head_dim)

    def layer() -> LayerCache:
        if isinstance(cache, TurboConfig):
            return init_cache(*sizes, config=cache, dtype=model.dtype)
        if cache == "exact":
            return exact.init_cache(
                *sizes, dtype=model.dtype if model.dtype.itemsize == 2 else jnp.bfloat16
            )
        if cache == "kv4":
            return kv4.init_cache(*sizes, dtype=model.dtype)
        if cache in paged.PAGED_KINDS:
            return paged.init_layer(*sizes, kind=cache, dtype=model.dtype)
        names = ", ".join(repr(kind) for kind in ("exact", "kv4", *paged.PAGED_KINDS))
        raise ValueError(f"{cache=} must be {names} or a TurboConfig")

    return ModelCaches(tuple(layer() for _ in range(model.config.num_layers)))


def take_sequences(cache: LayerCache, first: jax.Array | int, count: int) -> LayerCache:
    """Sequences ``first`` to ``first + count - 1`` of a layer's cache, as a cache of their own."""
    if isinstance(cache, paged.PagedLayer):
        return paged.take_sequences(cache, first, count)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), cache)


def put_sequences(cache: LayerCache, part: LayerCache, first: jax.Array | int) -> LayerCache:
    """A layer's cache with its sequences from `first` on replaced by those of `part`."""
    if isinstance(cache, paged.PagedLayer):
        assert isinstance(part, paged.PagedLayer)
        return paged.put_sequences(cache, part, first)
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, first, 0), cache, part
    )


def attend_prompt(
    lengths: jax.Array,
    first: jax.Array | int = 0,
    implementation: str | None = None,
    pooled: PooledAttention | None = None,
) -> Attend:
    """Attention within prompts, which also fills their part of the layer's cache.

    Into pages the prompts are written first, and attend to what these hold, as later tokens will.

    Args:
      lengths: int32 ``[b]``, of the prompts.
      first: the prompts' first sequence in the cache, which may hold more than `b`.
      implementation: of `prefill`, or of the exact cache's attention; None to choose. With
        `pooled` it only writes the cache, where it can.
      pooled: attend with this instead, to the prompts' own keys and values.
    """

    def attend(query, key, value, cache):  # type: ignore[no-untyped-def]
        part = take_sequences(cache, first, query.shape[0])
        name: Any = implementation  # which names there are, the ops know
        out: Any
        if pooled is not None:
            levels = pooled.levels(query, key, lengths)
            out = pooled.attend(query, key, value, levels, lengths)
        if isinstance(part, ProgressiveCache):
            if pooled is None:
                out, part = prefill(
                    query, key, value, part, key_value_seq_lengths=lengths, implementation=name
                )
            else:
                part = store_prompt(part, key, value, lengths, implementation=writer_beside(name))
        elif isinstance(part, paged.PagedLayer):
            part = paged.append(part, key, value, lengths=lengths)
            if pooled is None:
                out = paged.attend(query, part, query_lengths=lengths, implementation=name)
        elif isinstance(part, kv4.Kv4Cache):
            if pooled is None:
                out, part = kv4_attention.prefill(
                    query, key, value, part, key_value_seq_lengths=lengths, implementation=name
                )
            else:
                part = kv4.append(part, key, value, lengths=lengths)
        else:
            if pooled is None:
                out = exact.attention(query, key, value, implementation=implementation)
            part = exact.append(part, key, value, lengths=lengths)
        return out, put_sequences(cache, part, first)

    return attend


def attend_new_tokens(implementation: str | None = None) -> Attend:
    """Attention of new tokens to everything cached, themselves included.

    Args:
      implementation: of `decode`, and of `append` if it can write caches, or of the exact
        cache's; None to choose.
    """

    def attend(query, key, value, cache):  # type: ignore[no-untyped-def]
        name: Any = implementation  # which names there are, the ops know
        if isinstance(cache, paged.PagedLayer):
            cache = paged.append(cache, key, value)
            return paged.attend(query, cache, implementation=name), cache
        if isinstance(cache, kv4.Kv4Cache):
            cache = kv4.append(cache, key, value)
            return kv4_attention.decode(query, cache, implementation=name), cache
        if isinstance(cache, ProgressiveCache):
            cache = append(cache, key, value, implementation=writer_beside(name))
            return decode(query, cache, implementation=name), cache
        cache = exact.append(cache, key, value)
        return exact.decode(query, cache, implementation=implementation), cache

    return attend
