"""The kind ``"kv4"``: 4 bits and a scale per token and head (FireQ); and what `k8v4` shares."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from turbojax.attention.optional_arrays import of_layer
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches import token_scaled as kv4_attention
from turbojax.caches.base import (
    ROWS,
    Cache,
    Counts,
    Grows,
    Kind,
    rows_in_use,
    sides_of,
    validate_layers,
)
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.whole import causal_attention
from turbojax.numerics.fp8 import quantize_fp8


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


def held(x: jax.Array, codes: DTypeLike) -> jax.Array:
    """Keys or values as a cache holds them in codes of this dtype, float32."""
    stored, scale = kv4.quantize(x, codes)
    return kv4.numbers(stored).astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


class TokenScaled(Kind[kv4.CacheT]):
    """Each token is rounded independently when it arrives; prompts attend in e4m3 before that."""

    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-2, ROWS),
        "key_scale": Grows(-1, ROWS),
        "value_codes": Grows(-2, ROWS),
        "value_scale": Grows(-1, ROWS),
    }
    has_rings = True

    def slots(self, kind: Any, max_length: int) -> tuple[int, int]:
        """See `Kind.slots`."""
        del kind
        return kv4.ALLOCATION, -(-max_length // kv4.ALLOCATION)

    def append(
        self,
        cache: kv4.CacheT,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> kv4.CacheT:
        """See `Kind.append`."""
        name = kv4.APPEND.beside(implementation)
        return kv4.append(cache, key, value, lengths=lengths, implementation=name)

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: kv4.CacheT,
        lengths: jax.Array,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> tuple[Any, kv4.CacheT]:
        """See `Kind.prefill`."""
        (out, _), cache = kv4_attention.attend_prompt(
            query,
            key,
            value,
            cache,
            lengths,
            options=options.complete(query.shape[3]),
            extras=of_layer(query, sinks),
            implementation=implementation,
        )
        return out, cache

    def decode(
        self,
        query: jax.Array,
        cache: kv4.CacheT,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> Any:
        """See `Kind.decode`."""
        out, _ = kv4_attention.attend_cache(
            query,
            cache,
            options=options.complete(query.shape[3]),
            extras=of_layer(query, sinks),
            implementation=implementation,
        )
        return out

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


KV4 = Kv4()
