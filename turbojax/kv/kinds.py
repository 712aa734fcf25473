"""Which KV caches a layer can have."""

from typing import Literal

import jax
import jax.numpy as jnp

from turbojax.baselines import exact
from turbojax.config import TurboConfig
from turbojax.kv import pages as paged
from turbojax.state import kv4
from turbojax.state.progressive import ProgressiveCache, init_cache

CacheKind = Literal["exact", "kv4", "bfloat16"] | paged.PagedKind | TurboConfig
LayerCache = exact.ExactCache | ProgressiveCache | kv4.Kv4Cache | paged.PagedLayer
CACHE_NAMES = ("exact", "4bit", "2/4bit", "3bit", "2bit", "kv4", *paged.PAGED_KINDS)


def cache_by_name(name: str, num_kv_heads: int) -> CacheKind:
    """The cache that a name on a command line stands for.

    Args:
      name: ``"exact"``, the bits of all heads (``"4bit"``, ``"3bit"``, ``"2bit"``),
        ``"2/4bit"``: half of the KV heads at 2 bits, the others at 4, ``"kv4"``: 4 bits with a
        scale per token and head (FireQ), or pages of tokens as they are (``"paged"``), in an 8-bit
        float (``"fp8_e4m3"``, ``"fp8_e5m2"``) or as ``"turbo4"``.
      num_kv_heads: of the model.

    Raises:
      ValueError: if the name is another one, or half of the heads is not a whole number.
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


def init_layer_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kind: CacheKind,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> LayerCache:
    """An empty cache of one layer.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each can hold.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`.
      kind: ``"exact"`` for keys and values as they are, ``"bfloat16"`` for the same rounded to
        that, ``"kv4"``, pages of tokens in `dtype` (``"paged"``), in 8-bit floats
        (``"fp8_e4m3"``, ``"fp8_e5m2"``: at scale 1, so that keys and values must be within 448 or
        57344) or as ``"turbo4"``, or the config of a progressively compressed cache.
      dtype: of queries, keys and values.

    Raises:
      ValueError: if `kind` is none of these, or a size does not fit.
    """
    sizes, dtype = (batch_size, max_length, num_kv_heads, head_dim), jnp.dtype(dtype)
    if isinstance(kind, TurboConfig):
        return init_cache(*sizes, config=kind, dtype=dtype)
    if kind in ("exact", "bfloat16"):
        return exact.init_cache(*sizes, dtype=dtype if kind == "exact" else jnp.bfloat16)
    if kind == "kv4":
        return kv4.init_cache(*sizes, dtype=dtype)
    if kind in paged.PAGED_KINDS:
        return paged.init_layer(*sizes, kind=kind, dtype=dtype)
    names = ", ".join(repr(name) for name in ("exact", "kv4", *paged.PAGED_KINDS, "bfloat16"))
    raise ValueError(f"cache={kind!r} must be {names} or a TurboConfig")


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
