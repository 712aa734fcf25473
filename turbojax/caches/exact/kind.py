"""The kind ``"exact"``: keys and values as they are; ``"bfloat16"``: rounded to that."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from turbojax.caches.base import ROWS, Counts, Grows, Kind, rows_in_use, sides_of
from turbojax.caches.exact import api
from turbojax.caches.exact import cache as exact
from turbojax.caches.whole import causal_attention


class Exact(Kind[exact.ExactCache]):
    """`ExactCache`, with exact attention."""

    cls = exact.ExactCache
    names = ("exact",)
    takes = ("exact", "bfloat16")
    implementations = api.IMPLEMENTATIONS
    in_one_pass = staticmethod(causal_attention)
    stored_as = "exact"
    grows: ClassVar[Mapping[str, Grows]] = {"key": Grows(-3, ROWS), "value": Grows(-3, ROWS)}
    has_rolling_buffers = True

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

    append = staticmethod(exact.append)
    prefill = staticmethod(api.prefill)
    decode = staticmethod(api.decode)
    dequantize = staticmethod(exact.dequantize)

    def counts(self, lengths: Counts, cache: exact.ExactCache) -> Counts:
        """See `Stored.counts`."""
        return rows_in_use(lengths, cache.room)


EXACT = Exact()
