"""`LatentCache`: latents and rotary keys of sequences that come and go together."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._pytrees import nbytes, pytree
from turbojax.caches import checks
from turbojax.caches.latent import formats
from turbojax.caches.latent.pages import LatentPages
from turbojax.sharding import tables
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.per_device import per_device
from turbojax.sharding.specs import Split

PAGE_SIZE = 64
"""Rows of a sequence are a multiple of this: they are read as pages of so many tokens."""


@pytree
@dataclasses.dataclass(frozen=True)
class LatentCache(formats.Holder, Split):
    """Latents and rotary keys of `B` sequences (MLA, DeepSeek-V2, 2024).

    `LatentPages` says what is stored of a token, and what `kv_dtype` means. `S` is
    `max_length` rounded up to a multiple of 64.

    Made by `init_latent_cache`; functions take it and never change it in place (donate it to `jit`
    to reuse its memory). What is stored past a sequence's length is arbitrary.

    Attributes:
      latent: ``[B, S, C]``, for codes uint8 ``[B, S, C / 2]``.
      scale: float32 ``[B, S]``, or None for latents as they are.
      rope: ``[B, S, R]``.
      lengths: int32 ``[B]``, tokens held.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      max_length: tokens each sequence may grow to.
      kv_dtype: one of `LATENT_DTYPES`.
      latent_dim: channels of the latent, `C`.
      dtype: of the queries, latents and rotary keys it takes.
      seed: of the rotation of codes.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    latent_dim: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    seed: int = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "latent": "BLC",
        "scale": "BL",
        "rope": "BLR",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.latent.shape[-3]

    @property
    def room(self) -> int:
        """Rows of a sequence, `S`."""
        return self.latent.shape[-2]

    @property
    def num_kv_heads(self) -> int:
        """1: all heads share what is stored."""
        return 1

    @property
    def head_dim(self) -> int:
        """Channels of what is stored of a token, ``C + R``."""
        return self.latent_dim + self.rope_dim

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, bookkeeping included."""
        return nbytes(self)

    @property
    def compression_ratio(self) -> float:
        """Bytes of bfloat16 latents and rotary keys of `max_length` tokens over `nbytes`."""
        return 2 * self.lengths.size * self.max_length * self.head_dim / self.nbytes

    def validate(self) -> None:
        """Checks shapes and dtypes and, outside `jit`, that lengths are within ``0..max_length``.

        Raises:
          ValueError: naming the field and what it breaks.
        """
        sizes = (self.batch_size, self.max_length, self.latent_dim, self.rope_dim)
        wanted = jax.eval_shape(
            lambda: init_latent_cache(
                *sizes, kv_dtype=self.kv_dtype, dtype=self.dtype, seed=self.seed
            )
        )
        names = ("latent", "scale", "rope", "lengths", "overflowed")
        checks.check_arrays(self, wanted, names)
        if _checks.is_concrete(self.lengths):
            held = np.asarray(self.lengths)
            if np.any((held < 0) | (held > self.max_length)):
                raise ValueError(
                    f"cache.lengths={held.tolist()} must be between 0 and {self.max_length}"
                )


def init_latent_cache(
    batch_size: int,
    max_length: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
    *,
    kv_dtype: str = "bfloat16",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    seed: int = 0,
    axes: Axes | None = None,
) -> LatentCache:
    """An empty cache.

    Args:
      batch_size: sequences, `B`.
      max_length: tokens each may grow to.
      latent_dim: channels of the latent, `C`; for codes one that `turbojax.polar.rotation` knows.
      rope_dim: channels of the rotary key, `R`.
      kv_dtype: one of `LATENT_DTYPES`, see `LatentPages`.
      dtype: of the queries, latents and rotary keys to come: bfloat16, float16 or float32.
      seed: for codes, of the rotation.
      axes: of a mesh, over which sequences, heads and tokens are split, see `partition_specs`: each
        device makes its part, and none the whole. Tokens are split evenly: every device has as
        many times 64.

    Raises:
      TypeError: if `dtype` is none of these, or a size or the seed not an integer.
      ValueError: if a size is not positive or does not fit, `kv_dtype` is unknown, or a seed is
        given that it has no use for.
    """
    _checks.check_sizes(batch_size=batch_size, max_length=max_length)
    if axes is not None:
        given = {"kv_dtype": kv_dtype, "dtype": jnp.dtype(dtype), "seed": seed}
        sizes = Sizes(batch_size, max_length, 1, PAGE_SIZE, -(-max_length // PAGE_SIZE))
        widths = {"latent_dim": latent_dim, "rope_dim": rope_dim}
        return born(_without_heads, axes, sizes, **widths, **given)
    rows = (batch_size, -(-max_length // PAGE_SIZE) * PAGE_SIZE)
    return LatentCache(
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        max_length=int(max_length),
        **formats.empty(rows, latent_dim, rope_dim, kv_dtype, dtype, seed),
    )


def _without_heads(batch_size: int, max_length: int, _: int, **static: Any) -> LatentCache:
    return init_latent_cache(batch_size, max_length, **static)


def append_latents(
    cache: LatentCache, latent: jax.Array, rope: jax.Array, *, lengths: jax.Array | None = None
) -> LatentCache:
    """Adds new tokens, one or many per sequence; a prompt is as many to an empty cache.

    Args:
      cache: the cache to extend.
      latent: ``[B, T, C]`` in `cache.dtype`, after its norm.
      rope: ``[B, T, R]`` in `cache.dtype`, after the rotary embedding.
      lengths: optional int ``[B]``: how many of the `T` tokens belong to each sequence, the first
        ones; all of them if not given.

    Returns:
      The extended cache. Under `jit`, tokens past `max_length` are left out and `overflowed` turns
      True for their sequence; nothing that was stored changes.

    Raises:
      TypeError: if `cache` is another kind, or a dtype differs from `cache.dtype`.
      ValueError: if a shape does not fit, or, outside `jit`, a sequence would exceed `max_length`
        or a latent is too long for codes (under `jit` it becomes NaN).
      NotImplementedError: when it is differentiated.
    """
    checks.check_kind(cache, LatentCache)
    formats.check_tokens(cache, latent, rope)
    batch, tokens = latent.shape[:2]
    if batch != cache.batch_size:
        raise ValueError(
            f"{latent.shape=} must have {cache.batch_size} sequences, as the cache has"
        )
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    checks.check_room(cache, lengths)
    run = per_device(tables.LATENT_APPEND, _append)
    cache, scale = refuse_gradients(run, "append")(cache, latent, rope, lengths)
    formats.check_range(latent, scale, lengths)
    return cache


def dequantize_latents(cache: LatentCache) -> tuple[jax.Array, jax.Array]:
    """What attention works with: float32 ``[B, max_length, C]`` and ``[B, max_length, R]``.

    Zero past each length. For tests and debugging.

    Raises:
      TypeError: if `cache` is another kind.
    """
    checks.check_kind(cache, LatentCache)
    return _dequantize(cache)


@jax.jit
def _dequantize(cache: LatentCache) -> tuple[jax.Array, jax.Array]:
    held = (jnp.arange(cache.max_length)[None] < cache.lengths[:, None])[..., None]
    latent, rope = (
        jnp.where(held, x[:, : cache.max_length], 0) for x in formats.decode(cache, cache.tokens)
    )
    return latent, rope


def as_pages(cache: LatentCache) -> tuple[LatentPages, jax.Array]:
    """The same arrays, without a copy, as a pool of pages, and the sequences' block tables."""
    batch, pages = cache.batch_size, cache.room // PAGE_SIZE

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(batch * pages, PAGE_SIZE, *x.shape[2:])

    pool = LatentPages(
        latent=split(cache.latent),
        scale=None if cache.scale is None else split(cache.scale),
        rope=split(cache.rope),
        dropped_tokens=jnp.zeros((), jnp.int32),
        kv_dtype=cache.kv_dtype,
        latent_dim=cache.latent_dim,
        dtype=cache.dtype,
        seed=cache.seed,
    )
    return pool, jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)


@jax.jit
def _append(
    cache: LatentCache, latent: jax.Array, rope: jax.Array, lengths: jax.Array
) -> tuple[LatentCache, jax.Array | None]:
    """The cache with the tokens, and their scales as stored, ``[B, T]``."""
    tokens = latent.shape[1]
    content = formats.encode(cache, latent, rope)
    room = jnp.minimum(cache.max_length - cache.lengths, tokens)
    accepted = jnp.clip(lengths, 0, room)
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    # Rows past the end are those that the scatter drops; no row is named twice.
    row = jnp.where(
        offset < accepted[:, None], cache.lengths[:, None] + offset, cache.room + offset
    )
    put = jax.vmap(lambda old, i, new: old.at[i].set(new, mode="drop", unique_indices=True))
    arrays: dict[str, Any] = {
        name: put(getattr(cache, name), row, new)
        for name, new in content._asdict().items()
        if new is not None
    }
    overflowed = cache.overflowed | (lengths > accepted)
    return (
        dataclasses.replace(
            cache, lengths=cache.lengths + accepted, overflowed=overflowed, **arrays
        ),
        content.scale,
    )
