"""What kinds for comparison share: prompts attend exactly, new tokens to the dequantized cache."""

import abc
from typing import Any

import jax

from turbojax.attention.optional_arrays import of_layer
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches import exact as exact_attention
from turbojax.caches.base import C, Kind
from turbojax.caches.exact.cache import ExactCache
from turbojax.caches.whole import attend_within


class Dequantized(Kind[C]):
    """A kind without kernels: `exact_attention` sees keys and values as the cache holds them."""

    implementations = exact_attention.IMPLEMENTATIONS
    splits_tokens = False

    @abc.abstractmethod
    def dequantize(self, cache: C) -> tuple[jax.Array, jax.Array]:
        """Keys and values ``[B, max_length, K, H]`` in the cache's dtype, zero past each length."""

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: C,
        lengths: jax.Array,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> tuple[jax.Array, C]:
        """See `Kind.prefill`."""
        out = attend_within(
            query, key, value, lengths, "exact", options, implementation, sinks=sinks
        )
        return out, self.store_prompt(cache, key, value, lengths)

    def decode(
        self,
        query: jax.Array,
        cache: C,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> jax.Array:
        """See `Kind.decode`."""
        key, value = self.dequantize(cache)
        held: Any = cache
        return exact_attention.attend_cache(
            query,
            ExactCache(key, value, held.lengths, held.overflowed),
            options=options.complete(query.shape[3]),
            extras=of_layer(query, sinks),
            implementation=implementation,
        )
