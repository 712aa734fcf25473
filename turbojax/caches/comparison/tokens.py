"""Caches that round each token by itself, as engines without kernels of their own do.

`Int4Cache` has asymmetric codes with a minimum and a scale per token and head, `Int8Cache`
symmetric ones with a scale per token and head, and `E4m3Cache` casts. What is shared takes 16
bits, see `codes.stored_dtype`. For comparison: attention reads them dequantized.
"""

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree
from turbojax.attention.options import check_implementation
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.comparison.base import BaselineCache
from turbojax.caches.comparison.codes import dequantize as numbers
from turbojax.caches.comparison.codes import quantize, rounded, stored_dtype
from turbojax.numerics.fp8 import E4M3_MAX, round_to_e4m3
from turbojax.numerics.int8 import absolute_maximum
from turbojax.numerics.packing import pack, unpack
from turbojax.sharding import tables
from turbojax.sharding.per_device import per_device_explicit

_INT8_RANGE = 127


@dataclasses.dataclass(frozen=True)
class TokenCache(BaselineCache):
    """Keys and values of `B` sequences, each token and head rounded by itself.

    `K` KV heads, head dim `H`. Invariants: ``0 <= lengths <= max_length``. What is stored past a
    sequence's length is arbitrary.

    Attributes:
      key_codes: ``[B, max_length, K, C]``, see the subclasses.
      value_codes: the same.
      key_shared: arrays ``[B, max_length, K]``, what a token's channels share; NaN where one of
        them is not finite.
      value_shared: the same.
      lengths: int32 ``[B]``, tokens held.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      head_dim: `H`.
      dtype: of the keys and values it takes.
    """

    key_codes: jax.Array
    value_codes: jax.Array
    key_shared: tuple[jax.Array, ...]
    value_shared: tuple[jax.Array, ...]
    lengths: jax.Array
    overflowed: jax.Array
    head_dim: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "key_codes": "BRKC",
        "value_codes": "BRKC",
        "key_shared": "BRK",
        "value_shared": "BRK",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`: tokens stay whole."""

    @staticmethod
    def quantize(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Codes ``[..., C]`` of vectors ``[..., H]``, and what each vector's channels share."""
        raise NotImplementedError

    @staticmethod
    def numbers(codes: jax.Array, shared: tuple[jax.Array, ...]) -> jax.Array:
        """float32 ``[..., H]`` of what `quantize` gave."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.key_codes.shape[-4]

    @property
    def max_length(self) -> int:
        """Tokens each sequence can hold."""
        return self.key_codes.shape[-3]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key_codes.shape[-2]


@pytree
@dataclasses.dataclass(frozen=True)
class Int4Cache(TokenCache):
    """Asymmetric 4-bit codes: ``x = minimum + code * scale``, both per token and head.

    Codes are uint8 ``[B, max_length, K, H / 2]``, two in a byte.
    """

    @staticmethod
    def quantize(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `TokenCache.quantize`: the scale is a fifteenth of the range."""
        codes, *shared = quantize(x, 4, x.ndim - 1, stored_dtype(x.dtype))
        return pack(codes, 4), tuple(shared)

    @staticmethod
    def numbers(codes: jax.Array, shared: tuple[jax.Array, ...]) -> jax.Array:
        """See `TokenCache.numbers`."""
        minimum, scale = shared
        return numbers(unpack(codes, 4), minimum, scale, codes.ndim - 1)


@pytree
@dataclasses.dataclass(frozen=True)
class Int8Cache(TokenCache):
    """Symmetric 8-bit codes: ``x = code * scale``, a scale per token and head.

    Codes are int8 ``[B, max_length, K, H]`` within 127.
    """

    @staticmethod
    def quantize(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `TokenCache.quantize`: the scale is the largest absolute value over 127."""
        wide, dtype = x.astype(jnp.float32), stored_dtype(x.dtype)
        scale = rounded(absolute_maximum(wide, x.ndim - 1) * (1 / _INT8_RANGE), dtype)
        codes = jnp.rint(wide / jnp.where(scale == 0, 1, scale))
        codes = jnp.where(jnp.isnan(codes), 0, jnp.clip(codes, -_INT8_RANGE, _INT8_RANGE))
        return codes.astype(jnp.int8), (scale[..., 0].astype(dtype),)

    @staticmethod
    def numbers(codes: jax.Array, shared: tuple[jax.Array, ...]) -> jax.Array:
        """See `TokenCache.numbers`."""
        [scale] = shared
        return codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]


@pytree
@dataclasses.dataclass(frozen=True)
class E4m3Cache(TokenCache):
    """8-bit floats at scale 1; what would not be within 448 is NaN.

    Codes are float8_e4m3fn ``[B, max_length, K, H]``, and nothing is shared.
    """

    @staticmethod
    def quantize(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `TokenCache.quantize`."""
        wide = x.astype(jnp.float32)
        # Up to half a step above the largest number, values are rounded to it.
        is_inside = jnp.abs(wide) <= E4M3_MAX + 16
        inside = jnp.clip(wide, -E4M3_MAX, E4M3_MAX)
        return round_to_e4m3(jnp.where(is_inside, inside, jnp.nan)), ()

    @staticmethod
    def numbers(codes: jax.Array, shared: tuple[jax.Array, ...]) -> jax.Array:
        """See `TokenCache.numbers`."""
        del shared
        return codes.astype(jnp.float32)


C = TypeVar("C", bound=TokenCache)


def init_cache(
    cls: type[C],
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> C:
    """An empty cache of these sizes.

    Args:
      cls: `Int4Cache`, `Int8Cache` or `E4m3Cache`.
      batch_size: sequences, `B`.
      max_length: tokens each can hold.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`, an even number for `Int4Cache`.
      dtype: of keys and values.

    Raises:
      TypeError: if `dtype` is none of bfloat16, float16, float32, or a size is not an integer.
      ValueError: if a size is not positive or `head_dim` cannot be packed.
    """
    _checks.check_sizes(
        batch_size=batch_size, max_length=max_length, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={dtype} must be bfloat16, float16 or float32")
    vectors = jax.ShapeDtypeStruct((batch_size, max_length, num_kv_heads, head_dim), dtype)
    try:
        stored = jax.eval_shape(cls.quantize, vectors)
    except ValueError as error:
        raise ValueError(f"{head_dim=} cannot be packed: {error}") from None
    key, value = (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored) for _ in range(2))
    return cls(
        key_codes=key[0],
        value_codes=value[0],
        key_shared=key[1],
        value_shared=value[1],
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        head_dim=head_dim,
        dtype=dtype,
    )


def append(
    cache: C,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: str | None = None,
) -> C:
    """See `turbojax.append`; the result does not depend on how tokens are split into calls."""
    check_implementation(implementation, ("xla",))
    checks.check_kind(cache, TokenCache)
    checks.check_tokens(cache, key, value)
    lengths = _checks.check_lengths("lengths", lengths, *key.shape[:2])
    checks.check_room(cache, lengths)
    extended: C = per_device_explicit(tables.APPEND, _append)(cache, key, value, lengths)
    return extended


@jax.jit
def _append(cache: C, key: jax.Array, value: jax.Array, lengths: jax.Array) -> C:
    tokens = key.shape[1]
    accepted = jnp.clip(lengths, 0, jnp.minimum(cache.max_length - cache.lengths, tokens))
    rows = rolling_buffer.rows_of_new(cache.lengths, accepted, tokens, cache.max_length)
    put = jax.vmap(lambda old, i, x: old.at[i].set(x, mode="drop", unique_indices=True))
    changes: dict[str, Any] = {}
    for side, x in (("key", key), ("value", value)):
        codes, shared = cache.quantize(x)
        changes[f"{side}_codes"] = put(getattr(cache, f"{side}_codes"), rows, codes)
        olds = getattr(cache, f"{side}_shared")
        changes[f"{side}_shared"] = tuple(
            put(old, rows, new) for old, new in zip(olds, shared, strict=True)
        )
    return dataclasses.replace(
        cache,
        **changes,
        lengths=cache.lengths + accepted,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def dequantize(
    cache: TokenCache, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`."""
    checks.check_kind(cache, TokenCache)
    key, value = per_device_explicit(tables.DEQUANTIZE, _dequantize)(cache)
    return (key, value) if dtype is None else (key.astype(dtype), value.astype(dtype))


def _dequantize(cache: TokenCache) -> tuple[jax.Array, ...]:
    is_held = jnp.arange(cache.max_length)[None] < cache.lengths[:, None]
    sides = ((cache.key_codes, cache.key_shared), (cache.value_codes, cache.value_shared))
    return tuple(
        jnp.where(is_held[:, :, None, None], cache.numbers(*side).astype(cache.dtype), 0)
        for side in sides
    )
