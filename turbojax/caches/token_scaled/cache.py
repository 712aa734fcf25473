"""Caches of codes with one scale per token and head: `Kv4Cache` (FireQ's KV4) and `K8v4Cache`.

A token is rounded once, when it arrives, independently of all others: no buffer, no blocks, and the
cache's bits do not depend on how tokens are split into calls.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._pytrees import pytree
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.arrays import CacheArrays
from turbojax.caches.token_scaled import append_mosaic
from turbojax.caches.token_scaled.codes import numbers as numbers
from turbojax.caches.token_scaled.codes import quantize as quantize
from turbojax.caches.token_scaled.codes import quantize_vectors as quantize_vectors
from turbojax.caches.token_scaled.codes import unpack_codes as unpack_codes
from turbojax.sharding import tables
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.per_device import per_device

ALLOCATION = 128
"""Tokens are allocated in multiples of this, so that kernels read whole tiles."""


@dataclasses.dataclass(frozen=True)
class TokenScaledCache(CacheArrays):
    """What `Kv4Cache` and `K8v4Cache` share: fields, sizes, checks; they differ in the keys' codes.

    Attributes:
      KEY_CODES: dtype of the keys' codes: uint8 holds two 4-bit ones, float8_e4m3fn is one.
    """

    KEY_CODES: ClassVar[np.dtype]

    key_codes: jax.Array
    key_scale: jax.Array
    value_codes: jax.Array
    value_scale: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "key_codes": "BKLH",
        "key_scale": "BKL",
        "value_codes": "BKLH",
        "value_scale": "BKL",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.key_codes.shape[-4]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key_codes.shape[-3]

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.key_codes.shape[-1] * _channels_per_code(self.key_codes.dtype)

    @property
    def room(self) -> int:
        """Tokens of a sequence that are kept at any time."""
        return self.key_scale.shape[-1]

    @property
    def is_rolling(self) -> bool:
        """Whether new tokens overwrite those that no window reaches any more."""
        return self.room < self.max_length

    def validate(self) -> None:
        """Checks the invariants; under `jit` only shapes and dtypes can be seen."""
        sizes = (self.batch_size, self.max_length, self.num_kv_heads, self.head_dim)
        wanted = jax.eval_shape(lambda: _empty(*sizes, type(self), self.dtype, self.window))
        for field in _array_fields():
            leaf, want = getattr(self, field), getattr(wanted, field)
            if (leaf.shape, leaf.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"cache.{field} is {leaf.dtype}{list(leaf.shape)}, "
                    f"must be {want.dtype}{list(want.shape)}"
                )
        if _checks.is_concrete(*jax.tree.leaves(self)):
            _validate_values(self)


@pytree
@dataclasses.dataclass(frozen=True)
class Kv4Cache(TokenScaledCache):
    """Keys and values of `B` sequences in symmetric 4-bit codes (FireQ, Baek et al., 2025).

    Shapes: `K` KV heads, head dim `H`, `S` = `max_length`, or what the window needs, rounded up to
    a multiple of 128; token `p` is in row ``p % S``. ``x = code * scale``. A byte holds channel `c`
    in its low nibble and ``c + H/2`` in its high one, both in two's complement (see
    `turbojax.numerics.packing`).

    Made by `init_cache`; `prefill`, `append` and `decode` take it and never change it in place
    (donate it to `jit` to reuse its memory). The caches of several layers may be stacked along a
    new first axis of every array, and mapped or scanned over.

    Invariants (`validate` checks them): ``0 <= lengths <= max_length``, and scales of tokens held
    are positive or NaN. What is stored past a sequence's length is arbitrary.

    Attributes:
      key_codes: uint8 ``[B, K, S, H / 2]``.
      key_scale: bfloat16 ``[B, K, S]``, a seventh of the token's largest absolute value; 1 where
        all are zero, NaN where one is not finite.
      value_codes: as `key_codes`.
      value_scale: as `key_scale`.
      lengths: int32 ``[B]``, tokens seen; all are held, unless this is a rolling buffer.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out: past
        `max_length`, or a prefill into a sequence that was not empty.
      max_length: tokens each sequence may grow to.
      dtype: dtype of the keys and values it takes.
      window: tokens that a query may see, its own included, see `turbojax.caches.rolling_buffer`;
        None for all.
    """

    KEY_CODES = np.dtype(np.uint8)


@pytree
@dataclasses.dataclass(frozen=True)
class K8v4Cache(TokenScaledCache):
    """Keys in 8-bit floats (e4m3), values in 4-bit codes, with a scale per token and head of each.

    Errors of keys move scores, which an exponential follows; those of values are averaged. So keys
    get more bits here. A channel of a token costs ``12 + 32 / H`` bits, key and value together.

    Made by `turbojax.k8v4.init_cache`. It is used as a `Kv4Cache` is, and keeps the same
    invariants. Shapes: `K` KV heads, head dim `H`, `S` as there. ``x = code * scale``.

    Attributes:
      key_codes: float8_e4m3fn ``[B, K, S, H]``; NaN where the scale is.
      key_scale: bfloat16 ``[B, K, S]``, the token's largest absolute value over 448, so that no
        finite key is out of the codes' range; 1 where all are zero, NaN where one is not finite.
      value_codes: uint8 ``[B, K, S, H / 2]``, 4-bit codes, see `Kv4Cache`.
      value_scale: bfloat16 ``[B, K, S]``, a seventh of the token's largest absolute value.
      lengths: int32 ``[B]``, tokens seen; all are held, unless this is a rolling buffer.
      overflowed: bool ``[B]``, see `Kv4Cache`.
      max_length: tokens each sequence may grow to.
      dtype: dtype of the keys and values it takes.
      window: tokens that a query may see, its own included, see `turbojax.caches.rolling_buffer`;
        None for all.
    """

    KEY_CODES = np.dtype(jnp.float8_e4m3fn)


CacheT = TypeVar("CacheT", bound=TokenScaledCache)


def init_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    local_window_size: int | tuple[int, int] | None = None,
    axes: Axes | None = None,
) -> Kv4Cache:
    """An empty cache.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each may grow to.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`, a multiple of 8.
      dtype: of the keys and values to come: bfloat16, float16 or float32.
      local_window_size: the largest window that `decode` will be called with, if any: tokens that
        it does not reach are not kept, see `turbojax.caches.rolling_buffer`.
      axes: of a mesh, over which sequences, heads and tokens are split, see `partition_specs`: each
        device makes its part, and none the whole. Tokens are split evenly: every device has as
        many times 128.

    Raises:
      TypeError: if `dtype` is none of these or a size not an integer.
      ValueError: if a size is not positive or cannot be split, `head_dim` not a multiple of 8, or
        the window none.
    """
    sizes = (batch_size, max_length, num_kv_heads, head_dim)
    return _init_cache(Kv4Cache, sizes, dtype, local_window_size, axes)


def init_k8v4_cache(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    local_window_size: int | tuple[int, int] | None = None,
    axes: Axes | None = None,
) -> K8v4Cache:
    """An empty cache for keys in e4m3 and values in 4 bits; arguments are those of `init_cache`."""
    sizes = (batch_size, max_length, num_kv_heads, head_dim)
    return _init_cache(K8v4Cache, sizes, dtype, local_window_size, axes)


def append(
    cache: CacheT,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: ImplementationName | None = None,
) -> CacheT:
    """See `turbojax.append`; each token is rounded by itself."""
    check_cache_arguments(cache, key, value)
    batch, tokens = key.shape[:2]
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    checks.check_room(cache, lengths)
    run = per_device(tables.FIREQ_APPEND, _append_here, implementation=implementation)
    return refuse_gradients(run, "append")(cache, key, value, lengths)


def store_prompt(cache: CacheT, key: jax.Array, value: jax.Array, lengths: jax.Array) -> CacheT:
    """Stores a prompt in empty sequences: the cache's half of `prefill`, whose errors it raises.

    The same bits as `append` to an empty cache, without a scatter. Under `jit`, sequences that are
    not empty stay as they are, of prompts that exceed `max_length` the beginning is stored, and
    both turn `overflowed`.
    """
    check_cache_arguments(cache, key, value)
    checks.check_prompt_lengths(cache, lengths)
    run = per_device(tables.FIREQ_APPEND, _store_prompt)
    return refuse_gradients(run, "prefill")(cache, key, value, lengths)


def dequantize(
    cache: TokenScaledCache, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`; in float32 the products of codes and scales are exact."""
    check_cache(cache)
    held, row = rolling_buffer.held(cache)

    def side(codes: jax.Array, scale: jax.Array) -> jax.Array:
        x = numbers(codes).astype(jnp.float32) * scale[..., None].astype(jnp.float32)
        x = jnp.take(jnp.swapaxes(x, 1, 2), row, axis=1)
        return jnp.where(held[:, :, None, None], x, 0).astype(dtype or cache.dtype)

    return (
        side(cache.key_codes, cache.key_scale),
        side(cache.value_codes, cache.value_scale),
    )


def check_cache(cache: TokenScaledCache) -> None:
    """Raises TypeError unless it is a `Kv4Cache` or a `K8v4Cache`."""
    if not isinstance(cache, TokenScaledCache):
        raise TypeError(f"cache is a {type(cache).__name__}, must be a Kv4Cache or a K8v4Cache")


def check_cache_arguments(cache: TokenScaledCache, key: jax.Array, value: jax.Array) -> None:
    """Raises unless `key` and `value` are tokens for this cache."""
    check_cache(cache)
    checks.check_tokens(cache, key, value)


def _init_cache(
    kind: type[CacheT],
    sizes: tuple[int, int, int, int],
    dtype: jax.typing.DTypeLike,
    local_window_size: int | tuple[int, int] | None,
    axes: Axes | None,
) -> CacheT:
    """`init_cache` of either kind, for sizes of `B`, tokens, `K` and `H`."""
    batch_size, max_length, num_kv_heads, head_dim = sizes
    _checks.check_sizes(
        batch_size=batch_size, max_length=max_length, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if head_dim % 8:
        raise ValueError(f"{head_dim=} must be a multiple of 8")
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    window = rolling_buffer.window_of(local_window_size)
    if axes is None:
        return _empty(*sizes, kind, dtype, window)
    split = Sizes(*sizes[:3], ALLOCATION, -(-sizes[1] // ALLOCATION))
    return born(_empty, axes, split, head_dim=head_dim, kind=kind, dtype=dtype, window=window)


def _empty(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    kind: type[CacheT],
    dtype: np.dtype,
    window: int | None,
) -> CacheT:
    tiles = rolling_buffer.units(window, -(-max_length // ALLOCATION), ALLOCATION)
    rows = (batch_size, num_kv_heads, tiles * ALLOCATION)
    channels = head_dim // _channels_per_code(kind.KEY_CODES)
    return kind(
        key_codes=jnp.zeros((*rows, channels), kind.KEY_CODES),
        key_scale=jnp.zeros(rows, jnp.bfloat16),
        value_codes=jnp.zeros((*rows, head_dim // 2), jnp.uint8),
        value_scale=jnp.zeros(rows, jnp.bfloat16),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        max_length=max_length,
        dtype=dtype,
        window=window,
    )


def _channels_per_code(dtype: np.dtype) -> int:
    return 2 if dtype == jnp.uint8 else 1


@jax.jit
def _append(cache: CacheT, key: jax.Array, value: jax.Array, lengths: jax.Array) -> CacheT:
    tokens = key.shape[1]
    accepted = jnp.clip(lengths, 0, jnp.minimum(cache.max_length - cache.lengths, tokens))
    # Rows past the end are those that the scatter drops; no row is named twice.
    index = rolling_buffer.rows_of_new(cache.lengths, accepted, tokens, cache.room)

    @jax.vmap
    def scatter(index: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[:, index].set(new, mode="drop", unique_indices=True)

    put = functools.partial(scatter, index)
    return _with_tokens(cache, put, key, value, lengths, accepted)


APPEND = Registry(
    "fireq.append",
    (
        Implementation("mosaic_gpu", append_mosaic.append, append_mosaic.append_unsupported),
        Implementation("xla", _append),
    ),
)


def _append_here(cache: CacheT, key: jax.Array, *rest: jax.Array, implementation: Any) -> CacheT:
    chosen = APPEND.select(implementation, cache=cache, key=key)
    extended: CacheT = chosen.run(cache, key, *rest)
    return extended


@jax.jit
def _store_prompt(cache: CacheT, key: jax.Array, value: jax.Array, lengths: jax.Array) -> CacheT:
    size = min(key.shape[1], cache.max_length)
    kept = jnp.where(cache.lengths == 0, jnp.clip(lengths, 0, size), 0)
    key, value = (rolling_buffer.newest(x[:, :size], kept, cache.room) for x in (key, value))
    size = key.shape[1]
    stored = jnp.arange(size)[None] < kept[:, None]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        mask = jnp.expand_dims(stored, (1, *range(3, old.ndim)))
        return old.at[:, :, :size].set(jnp.where(mask, new, old[:, :, :size]))

    return _with_tokens(cache, put, key, value, lengths, kept)


def _with_tokens(
    cache: CacheT,
    put: Callable[[jax.Array, jax.Array], jax.Array],
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    accepted: jax.Array,
) -> CacheT:
    """The cache after `put` has stored tokens ``[B, T, K, H]``, with its bookkeeping."""
    key_codes, key_scale = quantize(jnp.swapaxes(key, 1, 2), cache.KEY_CODES)
    value_codes, value_scale = quantize_vectors(jnp.swapaxes(value, 1, 2))
    return dataclasses.replace(
        cache,
        key_codes=put(cache.key_codes, key_codes),
        key_scale=put(cache.key_scale, key_scale),
        value_codes=put(cache.value_codes, value_codes),
        value_scale=put(cache.value_scale, value_scale),
        lengths=cache.lengths + accepted,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def _array_fields() -> list[str]:
    return [f.name for f in dataclasses.fields(TokenScaledCache) if not f.metadata.get("static")]


def _validate_values(cache: TokenScaledCache) -> None:
    lengths = np.asarray(cache.lengths)
    if np.any((lengths < 0) | (lengths > cache.max_length)):
        raise ValueError(f"lengths={lengths.tolist()} must be within 0..{cache.max_length}")
    for name in ("key_scale", "value_scale"):
        scale = np.asarray(getattr(cache, name)).astype(np.float32)
        held = np.arange(scale.shape[2]) < lengths[:, None, None]
        if np.any(held & (scale <= 0)):
            raise ValueError(f"{name} must be positive or NaN for the tokens held")
