"""The kind ``"exact"``: keys and values as they are; ``"bfloat16"``: rounded to that."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.optional_arrays import of_layer
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.caches import exact as exact_attention
from turbojax.caches.base import ROWS, Counts, Grows, Kind, rows_in_use, sides_of
from turbojax.caches.exact import cache as exact
from turbojax.caches.whole import attend_within, causal_attention


class Exact(Kind[exact.ExactCache]):
    """`ExactCache`, with exact attention."""

    cls = exact.ExactCache
    names = ("exact",)
    takes = ("exact", "bfloat16")
    implementations = exact_attention.IMPLEMENTATIONS
    in_one_pass = staticmethod(causal_attention)
    stored_as = "exact"
    grows: ClassVar[Mapping[str, Grows]] = {"key": Grows(-3, ROWS), "value": Grows(-3, ROWS)}
    has_rings = True

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
    ) -> exact.ExactCache:
        """See `Kind.init`."""
        return exact.init_cache(
            batch_size,
            max_length,
            num_kv_heads,
            head_dim,
            dtype=jnp.bfloat16 if kind == "bfloat16" else dtype,
            local_window_size=sides_of(local_window_size),
        )

    def append(
        self,
        cache: exact.ExactCache,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> exact.ExactCache:
        """See `Kind.append`."""
        del implementation
        return exact.append(cache, key, value, lengths=lengths)

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: exact.ExactCache,
        lengths: jax.Array,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> tuple[jax.Array, exact.ExactCache]:
        """See `Kind.prefill`."""
        out = attend_within(
            query, key, value, lengths, "exact", options, implementation, sinks=sinks
        )
        return out, exact.append(cache, key, value, lengths=lengths)

    def decode(
        self,
        query: jax.Array,
        cache: exact.ExactCache,
        *,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
        implementation: Any = None,
    ) -> jax.Array:
        """See `Kind.decode`."""
        return exact_attention.attend_cache(
            query,
            cache,
            options=options.complete(query.shape[3]),
            extras=of_layer(query, sinks),
            implementation=implementation,
        )

    def counts(self, lengths: Counts, cache: exact.ExactCache) -> Counts:
        """See `Stored.counts`."""
        return rows_in_use(lengths, cache.room)


EXACT = Exact()
