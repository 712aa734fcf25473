"""KV caches of a whole model: one pytree with a leading layer axis, and how a layer attends."""

from typing import Literal

import jax
import jax.numpy as jnp

from turbojax.baselines import exact
from turbojax.cache import ProgressiveCache, append, init_cache
from turbojax.config import TurboConfig
from turbojax.models.llama import Attend, Llama, causal_attention
from turbojax.ops.turbo_attention import decode, prefill

CacheKind = Literal["exact"] | TurboConfig
LayerCache = exact.ExactCache | ProgressiveCache
CACHE_NAMES = ("exact", "4bit", "2/4bit", "3bit", "2bit")


def cache_by_name(name: str, num_kv_heads: int) -> CacheKind:
    """The cache that a name on a command line stands for.

    Args:
      name: ``"exact"``, the bits of all heads (``"4bit"``, ``"3bit"``, ``"2bit"``), or
        ``"2/4bit"``: half of the KV heads at 2 bits, the others at 4.
      num_kv_heads: of the model.

    Raises:
      ValueError: if the name is another one, or half of the heads is no whole number.
    """
    if name not in CACHE_NAMES:
        raise ValueError(f"cache {name!r} must be one of {', '.join(CACHE_NAMES)}")
    if name == "exact":
        return "exact"
    if name == "2/4bit":
        if num_kv_heads % 2:
            raise ValueError(f"cache {name!r} needs an even number of KV heads, not {num_kv_heads}")
        half = num_kv_heads // 2
        return TurboConfig(num_low_bit_key_heads=half, num_low_bit_value_heads=half)
    bits = int(name[0])
    return TurboConfig(key_bits=bits, value_bits=bits)


def init_caches(model: Llama, batch_size: int, max_length: int, cache: CacheKind) -> LayerCache:
    """Empty caches for all layers of a model.

    Args:
      model: the model.
      batch_size: sequences.
      max_length: tokens each sequence can hold.
      cache: ``"exact"`` for uncompressed bfloat16, or the config of compressed caches.

    Returns:
      A cache whose leaves have a leading axis of `num_layers`; its `nbytes` is that of all layers.

    Raises:
      ValueError: if `cache` is neither, or a size does not fit.
    """
    sizes = (batch_size, max_length, model.config.num_kv_heads, model.config.head_dim)
    layer: LayerCache
    if isinstance(cache, TurboConfig):
        layer = init_cache(*sizes, config=cache, dtype=model.dtype)
    elif cache == "exact":
        layer = exact.init_cache(*sizes)
    else:
        raise ValueError(f"{cache=} must be 'exact' or a TurboConfig")
    stack = (model.config.num_layers,)
    return jax.tree.map(lambda x: jnp.tile(x[None], stack + (1,) * x.ndim), layer)


def attend_prompt(lengths: jax.Array) -> Attend:
    """Attention within prompts of these lengths ``[B]``, which also fills the layer's cache."""

    def attend(query, key, value, cache):  # type: ignore[no-untyped-def]
        if isinstance(cache, ProgressiveCache):
            return prefill(query, key, value, cache, key_value_seq_lengths=lengths)
        out, _ = causal_attention(query, key, value)
        return out, exact.append(cache, key, value, lengths=lengths)

    return attend


def attend_new_tokens(query, key, value, cache):  # type: ignore[no-untyped-def]
    """Attention of new tokens to everything cached, themselves included; an `Attend`."""
    if isinstance(cache, ProgressiveCache):
        cache = append(cache, key, value)
        return decode(query, cache), cache
    cache = exact.append(cache, key, value)
    return exact.decode(query, cache), cache
