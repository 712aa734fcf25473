"""A KIVI-style cache: keys quantized per channel, values per token, dequantized before attention.

After Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache* (2024): what is
possible without a fused kernel. The newest tokens are kept as they are until a residual of them is
full. KIVI slides the values' residual by one token at a time; here keys and values share one
schedule, so up to `residual_length` values fewer are exact.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.ops import exact_attention
from turbojax.quantizers import pack, packed_size, unpack
from turbojax.sharding.specs import Split
from turbojax.state.exact import ExactCache

SUPPORTED_BITS = (2, 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KiviCache(Split):
    """Keys and values of `B` sequences in asymmetric codes, and the newest tokens as they are.

    Shapes: `T` = ``max_length`` rounded up to groups, `K` KV heads, head dim `H`, groups of
    `g` = ``group_size``. ``x = minimum + code * scale`` within a group.

    Attributes:
      key_codes: uint8 ``[B, T, K, H * bits / 8]``, packed along channels.
      key_minimum: ``[B, T / g, K, H]``, of each channel over a group of tokens.
      key_scale: the same.
      value_codes: as `key_codes`.
      value_minimum: ``[B, T, K, H / g]``, of each token over a group of channels.
      value_scale: the same.
      key_residual: ``[B, residual_length, K, H]``, tokens that are not quantized yet.
      value_residual: the same.
      lengths: int32 ``[B]``, tokens held; the last ``lengths % residual_length`` of them are in
        the residual.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      bits: 2 or 4.
      group_size: `g`.
      max_length: tokens each sequence can hold.
    """

    key_codes: jax.Array
    key_minimum: jax.Array
    key_scale: jax.Array
    value_codes: jax.Array
    value_minimum: jax.Array
    value_scale: jax.Array
    key_residual: jax.Array
    value_residual: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})
    max_length: int = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "key_codes": "BLKC",
        "key_minimum": "BLKH",
        "key_scale": "BLKH",
        "value_codes": "BLKC",
        "value_minimum": "BLKC",
        "value_scale": "BLKC",
        "key_residual": "BRKH",
        "value_residual": "BRKH",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    @property
    def dtype(self) -> np.dtype:
        """Of the keys and values it takes, and of minima and scales."""
        return self.key_residual.dtype

    @property
    def residual_length(self) -> int:
        """Tokens of the residual."""
        return self.key_residual.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 keys and values of `max_length` tokens over `nbytes`."""
        batch, _, heads, channels = self.key_residual.shape
        return 4 * batch * self.max_length * heads * channels / self.nbytes


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bits: int = 4,
    group_size: int = 64,
    residual_length: int = 128,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> KiviCache:
    """An empty cache of these sizes.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each can hold.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`, a multiple of `group_size`.
      bits: of a code, 2 or 4.
      group_size: tokens (keys) or channels (values) that share a minimum and a scale.
      residual_length: tokens that are gathered before they are quantized, a multiple of
        `group_size`.
      dtype: of keys, values, minima and scales.

    Raises:
      TypeError: if `dtype` is none of bfloat16, float16, float32, or a size is not an integer.
      ValueError: if a size is not positive or not such a multiple, or `bits` another number.
    """
    _checks.check_sizes(
        batch_size=batch_size,
        max_length=max_length,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        group_size=group_size,
        residual_length=residual_length,
    )
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"{bits=} must be one of {SUPPORTED_BITS}")
    if head_dim % group_size:
        raise ValueError(f"{head_dim=} must be a multiple of {group_size=}")
    if residual_length % group_size:
        raise ValueError(f"{residual_length=} must be a multiple of {group_size=}")
    if jnp.dtype(dtype) not in _checks.FLOAT_DTYPES:
        raise TypeError(f"dtype={jnp.dtype(dtype)} must be bfloat16, float16 or float32")
    tokens = -(-max_length // group_size) * group_size

    def zeros(length: int, channels: int, dtype: jax.typing.DTypeLike = dtype) -> jax.Array:
        return jnp.zeros((batch_size, length, num_kv_heads, channels), dtype)

    return KiviCache(
        key_codes=zeros(tokens, packed_size(head_dim, bits), jnp.uint8),
        key_minimum=zeros(tokens // group_size, head_dim),
        key_scale=zeros(tokens // group_size, head_dim),
        value_codes=zeros(tokens, packed_size(head_dim, bits), jnp.uint8),
        value_minimum=zeros(tokens, head_dim // group_size),
        value_scale=zeros(tokens, head_dim // group_size),
        key_residual=zeros(residual_length, head_dim),
        value_residual=zeros(residual_length, head_dim),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        bits=bits,
        group_size=group_size,
        max_length=max_length,
    )


def append(
    cache: KiviCache, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> KiviCache:
    """Adds a prompt or new tokens; the result does not depend on how they are split into calls.

    Args:
      cache: the cache to extend.
      key: ``[B, T, K, H]`` in `cache.dtype`.
      value: the same.
      lengths: optional int ``[B]``, how many of the `T` tokens are real, the first ones.

    Returns:
      The extended cache; under `jit`, tokens past `max_length` are left out and reported in
      `overflowed`.

    Raises:
      TypeError: if a dtype is not `cache.dtype`.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed
        `max_length`.
    """
    _checks.check_key_value(key, value)
    if key.dtype != cache.dtype:
        raise TypeError(f"key.dtype={key.dtype} must equal cache.dtype={cache.dtype}")
    batch, tokens, *rest = key.shape
    held = cache.key_residual.shape
    if (batch, *rest) != (held[0], *held[2:]):
        raise ValueError(f"{key.shape=} must be [{held[0]}, T, {held[2]}, {held[3]}]")
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    total = cache.lengths + lengths
    if _checks.is_concrete(total) and np.any(np.asarray(total) > cache.max_length):
        raise ValueError(
            f"appending would give lengths {np.asarray(total).tolist()}, "
            f"which must be at most max_length={cache.max_length}"
        )
    return _append(cache, key, value, lengths)


@jax.jit
def _append(cache: KiviCache, key: jax.Array, value: jax.Array, lengths: jax.Array) -> KiviCache:
    size, group = cache.residual_length, cache.group_size
    accepted = jnp.clip(lengths, 0, jnp.minimum(cache.max_length - cache.lengths, key.shape[1]))
    in_residual = cache.lengths % size
    flushed = (in_residual + accepted) // size * size
    start = cache.lengths - in_residual

    # One stream: the residual, then the new tokens, cut into whole residuals.
    room = ((size - 1 + key.shape[1]) // size + 1) * size
    position = jnp.arange(room)[None]
    is_held = position < (in_residual + accepted)[:, None]
    source = jnp.where(
        position < in_residual[:, None], position, position - in_residual[:, None] + size
    )

    def stream(residual: jax.Array, new: jax.Array) -> jax.Array:
        joined = jnp.concatenate([residual, new], axis=1)
        taken = _take(joined, jnp.minimum(source, joined.shape[1] - 1))
        return jnp.where(is_held[:, :, None, None], taken, jnp.zeros((), new.dtype))

    def put(array: jax.Array, new: jax.Array, tokens_per_row: int) -> jax.Array:
        row = jnp.arange(new.shape[1])[None]
        index = start[:, None] // tokens_per_row + row
        # What is not flushed gets an index that the scatter drops.
        index = jnp.where(row < flushed[:, None] // tokens_per_row, index, array.shape[1])
        return jax.vmap(lambda a, i, x: a.at[i].set(x, mode="drop"))(array, index, new)

    keys, values = stream(cache.key_residual, key), stream(cache.value_residual, value)
    batch, _, heads, channels = keys.shape
    k_codes, k_minimum, k_scale = _quantize(
        keys.reshape(batch, -1, group, heads, channels), cache.bits, axis=2
    )
    v_codes, v_minimum, v_scale = _quantize(
        values.reshape(batch, -1, heads, channels // group, group), cache.bits, axis=4
    )
    tail = flushed[:, None] + jnp.arange(size)[None]
    return dataclasses.replace(
        cache,
        key_codes=put(cache.key_codes, pack(k_codes.reshape(keys.shape), cache.bits), 1),
        key_minimum=put(cache.key_minimum, k_minimum, group),
        key_scale=put(cache.key_scale, k_scale, group),
        value_codes=put(cache.value_codes, pack(v_codes.reshape(values.shape), cache.bits), 1),
        value_minimum=put(cache.value_minimum, v_minimum, 1),
        value_scale=put(cache.value_scale, v_scale, 1),
        key_residual=_take(keys, tail),
        value_residual=_take(values, tail),
        lengths=cache.lengths + accepted,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def dequantize(cache: KiviCache) -> tuple[jax.Array, jax.Array]:
    """The keys and values that the cache stands for.

    Args:
      cache: the cache.

    Returns:
      key, value: ``[B, max_length, K, H]`` in `cache.dtype`, zero past each length.
    """
    batch, tokens, heads, _ = cache.key_codes.shape
    group, channels = cache.group_size, cache.key_residual.shape[3]
    in_residual = cache.lengths % cache.residual_length
    position = jnp.arange(cache.max_length)[None]
    offset = position - (cache.lengths - in_residual)[:, None]

    def join(quantized: jax.Array, residual: jax.Array) -> jax.Array:
        out = quantized.reshape(batch, tokens, heads, channels)[:, : cache.max_length]
        recent = _take(residual, jnp.clip(offset, 0, residual.shape[1] - 1))
        out = jnp.where((offset >= 0)[:, :, None, None], recent, out.astype(residual.dtype))
        is_held = (position < cache.lengths[:, None])[:, :, None, None]
        return jnp.where(is_held, out, jnp.zeros((), out.dtype))

    k_codes = unpack(cache.key_codes, cache.bits).reshape(batch, -1, group, heads, channels)
    v_codes = unpack(cache.value_codes, cache.bits).reshape(batch, tokens, heads, -1, group)
    keys = _dequantize(k_codes, cache.key_minimum, cache.key_scale, axis=2)
    values = _dequantize(v_codes, cache.value_minimum, cache.value_scale, axis=4)
    return join(keys, cache.key_residual), join(values, cache.value_residual)


def decode(
    query: jax.Array,
    cache: KiviCache,
    *,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over the dequantized cache; see `turbojax.ops.exact_attention.decode`.

    Args:
      query: ``[B, T, N, H]``, those of the last `T` tokens.
      cache: the cache, which already holds the queries' own keys and values.
      sinks: optional floating-point ``[N]``, see `turbojax.turbo_attention`.
      implementation: of the attention.
      return_residual: also return the log-sum-exp of the scores.

    Returns:
      ``[B, T, N, H]`` in the query's dtype; with `return_residual` also float32 ``[B, T, N]``.

    Raises:
      TypeError: if the query's dtype is not supported.
      ValueError: if a shape or the name does not fit.
      NotImplementedError: if the implementation asked for cannot run this here.
    """
    key, value = dequantize(cache)
    plain = ExactCache(key=key, value=value, lengths=cache.lengths, overflowed=cache.overflowed)
    return exact_attention.decode(
        query,
        plain,
        sinks=sinks,
        implementation=implementation,
        return_residual=return_residual,
    )


def _quantize(x: jax.Array, bits: int, axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Asymmetric codes along one axis, with minimum and scale as they will be stored.

    Args:
      x: floating point.
      bits: of a code.
      axis: the axis that shares a minimum and a scale.

    Returns:
      uint8 codes, and minimum and scale in `x`'s dtype, without `axis`.
    """
    top = 2**bits - 1
    wide = x.astype(jnp.float32)
    minimum = jnp.min(wide, axis=axis)
    scale = (jnp.max(wide, axis=axis) - minimum) * (1 / top)
    # Written out, because not every device's minimum propagates NaN.
    scale = jnp.where(jnp.all(jnp.isfinite(wide), axis=axis), scale, jnp.nan)
    minimum, scale = minimum.astype(x.dtype), scale.astype(x.dtype)
    step = jnp.where(scale == 0, 1, scale.astype(jnp.float32))
    offset = wide - jnp.expand_dims(minimum.astype(jnp.float32), axis)
    codes = jnp.clip(jnp.rint(offset / jnp.expand_dims(step, axis)), 0, top)
    return jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.uint8), minimum, scale


def _dequantize(codes: jax.Array, minimum: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """float32 ``minimum + codes * scale``, `axis` as in `_quantize`."""
    wide = [jnp.expand_dims(x.astype(jnp.float32), axis) for x in (minimum, scale)]
    return wide[0] + codes.astype(jnp.float32) * wide[1]


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens of ``x [B, S, K, H]`` at each sequence's ``index [B, n]``."""
    return jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="clip"))(x, index)
