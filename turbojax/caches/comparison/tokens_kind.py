"""The kinds ``"int8"``, ``"int4"`` and ``"e4m3"``, for comparison: each token rounded by itself."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.caches.base import Grows
from turbojax.caches.comparison import tokens
from turbojax.caches.dequantized import Dequantized

C = TypeVar("C", bound=tokens.TokenCache)


class Tokens(Dequantized[C]):
    """What `Int8`, `Int4` and `E4m3` share."""

    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-3),
        "value_codes": Grows(-3),
        "key_shared": Grows(-2),
        "value_shared": Grows(-2),
    }

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
    ) -> C:
        """See `Kind.init`."""
        del kind
        sizes = (batch_size, max_length, num_kv_heads, head_dim)
        return tokens.init_cache(self.cls, *sizes, dtype=dtype)

    def append(
        self,
        cache: C,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> C:
        """See `Kind.append`."""
        del implementation
        return tokens.append(cache, key, value, lengths=lengths)

    def dequantize(self, cache: C) -> tuple[jax.Array, jax.Array]:
        """See `Dequantized.dequantize`."""
        return tokens.dequantize(cache)


class Int8(Tokens[tokens.Int8Cache]):
    """`Int8Cache`."""

    cls = tokens.Int8Cache
    names = ("int8",)
    takes = ("int8",)
    stored_as = "int8"

    def why_nan(self, cache: tokens.Int8Cache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 127 * 65504 become NaN: scales are in float16"


class Int4(Tokens[tokens.Int4Cache]):
    """`Int4Cache`."""

    cls = tokens.Int4Cache
    names = ("int4",)
    takes = ("int4",)
    stored_as = "int4"

    def why_nan(self, cache: tokens.Int4Cache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 65504 become NaN: minima are in float16"


class E4m3(Tokens[tokens.E4m3Cache]):
    """`E4m3Cache`."""

    cls = tokens.E4m3Cache
    names = ("e4m3",)
    takes = ("e4m3",)
    stored_as = "e4m3"

    def why_nan(self, cache: tokens.E4m3Cache) -> str | None:
        """See `Kind.why_nan`."""
        del cache
        return "keys or values beyond 448 become NaN in e4m3, which has no scale here"


INT8, INT4, E4M3 = Int8(), Int4(), E4m3()
