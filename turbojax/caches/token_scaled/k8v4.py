"""The kind ``"k8v4"``: keys in e4m3, values in 4 bits, a scale per token and head of each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches.base import Cache, sides_of
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled.kv4 import TokenScaled, held
from turbojax.caches.whole import causal_attention


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


K8V4 = K8v4()
