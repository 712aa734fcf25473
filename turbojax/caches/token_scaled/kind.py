"""The kinds ``"kv4"`` (FireQ: 4 bits, a scale per token and head) and ``"k8v4"`` (keys in e4m3)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches.base import (
    ROWS,
    Cache,
    Counts,
    Grows,
    rows_in_use,
    sides_of,
    validate_layers,
)
from turbojax.caches.new_tokens import Codes
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled.api import DECODE, prefill
from turbojax.caches.whole import causal_attention
from turbojax.numerics.fp8 import quantize_fp8
from turbojax.sharding import tables


def through_kv4(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache = None,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """The result of decoding token by token through a `Kv4Cache`, for all tokens at once.

    Keys and values are those the cache holds, queries are rounded to e4m3, and the rest is exact.
    """
    codes, scale = quantize_fp8(query, axis=-1)
    rounded = codes.astype(jnp.float32) * scale[..., None]
    out, cache = causal_attention(
        rounded, held(key, jnp.uint8), held(value, jnp.uint8), cache, options, sinks
    )
    return out.astype(query.dtype), cache


def through_k8v4(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache = None,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """The result of decoding token by token through a `K8v4Cache`, for all tokens at once."""
    keys, values = held(key, jnp.float8_e4m3fn), held(value, jnp.uint8)
    out, cache = causal_attention(query.astype(jnp.float32), keys, values, cache, options, sinks)
    return out.astype(query.dtype), cache


def held(x: jax.Array, codes: DTypeLike) -> jax.Array:
    """Keys or values as a cache holds them in codes of this dtype, float32."""
    stored, scale = kv4.quantize(x, codes)
    return kv4.numbers(stored).astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


class TokenScaled(Codes[kv4.CacheT]):
    """Each token is rounded independently when it arrives; prompts attend in e4m3 before that."""

    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-2, ROWS),
        "key_scale": Grows(-1, ROWS),
        "value_codes": Grows(-2, ROWS),
        "value_scale": Grows(-1, ROWS),
    }
    has_rolling_buffers = True
    reads = DECODE
    table = tables.FIREQ_DECODE
    shortens = True

    def slots(self, kind: Any, max_length: int) -> tuple[int, int]:
        """See `Kind.slots`."""
        del kind
        return kv4.ALLOCATION, -(-max_length // kv4.ALLOCATION)

    append = staticmethod(kv4.append)
    prefill = staticmethod(prefill)
    dequantize = staticmethod(kv4.dequantize)

    def writer(self, implementation: Any, tokens: int) -> Any:
        """See `Kind.writer`."""
        del tokens
        return kv4.APPEND.beside(implementation)

    def counts(self, lengths: Counts, cache: kv4.CacheT) -> Counts:
        """See `Stored.counts`."""
        return rows_in_use(lengths, cache.room)

    def validate(self, cache: kv4.CacheT) -> None:
        """See `Stored.validate`."""
        validate_layers(cache)


class Kv4(TokenScaled[kv4.Kv4Cache]):
    """`Kv4Cache`."""

    cls = kv4.Kv4Cache
    names = ("kv4",)
    takes = ("kv4",)
    in_one_pass = staticmethod(through_kv4)
    stored_as = "kv4"

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
        local_window_size: int | None = None,
    ) -> kv4.Kv4Cache:
        """See `Kind.init`."""
        del kind
        sizes, sides = (batch_size, max_length, num_kv_heads, head_dim), sides_of(local_window_size)
        return kv4.init_cache(*sizes, dtype=dtype, local_window_size=sides)


class K8v4(TokenScaled[kv4.K8v4Cache]):
    """`K8v4Cache`."""

    cls = kv4.K8v4Cache
    names = ("k8v4",)
    takes = ("k8v4",)
    in_one_pass = staticmethod(through_k8v4)
    stored_as = "k8v4"

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
        local_window_size: int | None = None,
    ) -> kv4.K8v4Cache:
        """See `Kind.init`."""
        del kind
        sizes, sides = (batch_size, max_length, num_kv_heads, head_dim), sides_of(local_window_size)
        return kv4.init_k8v4_cache(*sizes, dtype=dtype, local_window_size=sides)


KV4, K8V4 = Kv4(), K8v4()
