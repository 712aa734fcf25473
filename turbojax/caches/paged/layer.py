"""`PagedLayer`: a layer's KV cache in pages, for sequences that come and go together."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree
from turbojax.caches.arrays import CacheArrays
from turbojax.caches.paged.pool import KV_DTYPES, PagedCache, init_paged_cache
from turbojax.caches.paged.pool import append as append_to_pages
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born

PagedKind = str
"""One of `PAGED_KINDS`."""

_NAMES = {
    "auto": "paged",
    **{name: f"paged_{name}" for name in ("int8", "int8_v4", "k8v4")},
}
_KV_DTYPES = {_NAMES.get(kv_dtype, kv_dtype): kv_dtype for kv_dtype in KV_DTYPES}

PAGED_KINDS = tuple(_KV_DTYPES)
"""Names of caches that are kept in pages: the `KV_DTYPES`, but for four. ``"paged"`` stores keys
and values as they are; ``"k8v4"`` and ``"int8"``, which are caches without pages, and ``"int8_v4"``
are ``"paged_k8v4"``, ``"paged_int8"`` and ``"paged_int8_v4"``."""

PAGE_SIZE = 64
"""Tokens of a page."""

NEW_TOKENS = 128
"""New tokens that can be stored, then attended to, where a window keeps no more than it needs. As
many as prompts take at a time, see `turbojax.caches.paged.kind.query_chunk`, with 64 query rows or
more."""


@pytree
@dataclasses.dataclass(frozen=True)
class PagedLayer(CacheArrays):
    """A layer's KV cache in pages, for `B` sequences that come and go together.

    Every sequence has pages for `max_length` tokens from the start, so nothing is allocated later.
    Where requests come and go, an engine shares one pool between them instead.

    For a layer with a sliding window it has only as many pages as the window and some new tokens
    need: a rolling buffer, whose pages the table names again and again. New tokens then overwrite
    those that no query sees any more.

    Made by `init_layer`; `append` takes it and never changes it in place (donate it to `jit` to
    reuse its memory).

    Attributes:
      pages: the pool, ``B * max_pages`` pages, or fewer if it is a rolling buffer.
      block_tables: int32 ``[B, max_pages]``, the pages of each sequence. No page has two owners; in
        a rolling buffer of `n` pages entry `i` is that of entry ``i % n``.
      lengths: int32 ``[B]``, tokens held, at most `max_length`.
      overflowed: bool ``[B]``, True where a call under `jit` had to leave tokens out.
      max_length: tokens each sequence may grow to.
      window: tokens that a query may see, its own included; None if it may see all.
    """

    pages: PagedCache
    block_tables: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "block_tables": "BL",
        "lengths": "B",
        "overflowed": "B",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`. The pool has
    its own.
    """

    @property
    def rolling_pages(self) -> int:
        """Pages of a sequence."""
        return rolling_pages(self.max_length, self.window, self.pages.page_size)

    @property
    def is_rolling(self) -> bool:
        """Whether there is room for less than `max_length` tokens."""
        return self.rolling_pages * self.pages.page_size < self.max_length

    @property
    def room(self) -> int:
        """Tokens of a sequence that are kept at any time, the newest ones."""
        if not self.is_rolling:
            return self.max_length
        # The newest page, which has replaced the oldest, may hold a single token.
        return (self.rolling_pages - 1) * self.pages.page_size + 1

    @property
    def batch_size(self) -> int:
        """Number of sequences, `B`."""
        return self.block_tables.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.pages.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head, `H`."""
        return self.pages.head_dim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the keys and values it takes."""
        return self.pages.dtype


def init_layer(
    batch_size: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kind: PagedKind,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    page_size: int = PAGE_SIZE,
    local_window_size: int | None = None,
    axes: Axes | None = None,
) -> PagedLayer:
    """One layer's empty cache, see `turbojax.caches.init_layer_cache`; 8-bit floats have scale 1.

    Pages are whole, so there may be memory for a few more tokens than `max_length`; with a window
    there are pages for what it needs, see `NEW_TOKENS`. On a mesh every device has the same number
    of pages of a sequence, and its tables count from its own first page.
    """
    if local_window_size is not None:
        _checks.check_sizes(local_window_size=local_window_size)
    _checks.check_sizes(batch_size=batch_size, max_length=max_length, page_size=page_size)
    if kind not in PAGED_KINDS:
        raise ValueError(f"{kind=} must be one of {', '.join(PAGED_KINDS)}")
    if axes is not None:
        sizes = Sizes(batch_size, max_length, num_kv_heads, page_size, -(-max_length // page_size))
        given = {"kind": kind, "dtype": jnp.dtype(dtype), "head_dim": head_dim}
        window = {"local_window_size": local_window_size}
        return born(init_layer, axes, sizes, page_size=page_size, **given, **window)
    pages = init_paged_cache(
        batch_size * rolling_pages(max_length, local_window_size, page_size),
        page_size,
        num_kv_heads,
        head_dim,
        kv_dtype=_KV_DTYPES[kind],
        dtype=dtype,
    )
    return empty_layer(pages, batch_size, max_length, local_window_size)


def check_room(
    layer: PagedLayer, key: jax.Array, value: jax.Array, lengths: jax.Array | None
) -> jax.Array:
    """The lengths that `append` of these would lead to, int32 ``[B]``; raises as `append`."""
    _checks.check_key_value(key, value)
    if key.shape[0] != layer.batch_size:
        raise ValueError(f"{key.shape=} must have {layer.batch_size} sequences, as the cache has")
    lengths = _checks.check_lengths("lengths", lengths, layer.batch_size, key.shape[1])
    total = layer.lengths + jnp.clip(lengths, 0, key.shape[1])
    if _checks.is_concrete(total) and np.any(np.asarray(total) > layer.max_length):
        raise ValueError(
            f"appending would give lengths {np.asarray(total).tolist()}, "
            f"which must be at most max_length={layer.max_length}"
        )
    return total


def rolling_pages(max_length: int, window: int | None, page_size: int) -> int:
    """Pages of a sequence: for `max_length` tokens, or what a window and new tokens need."""
    whole = -(-max_length // page_size)
    if window is None:
        return whole
    return min(whole, -(-(window + NEW_TOKENS - 2) // page_size) + 1)


def rolling_tables(batch_size: int, pages: int, max_length: int, page_size: int) -> jax.Array:
    """Block tables of sequences with so many pages each, dealt out in order."""
    entry = jnp.arange(-(-max_length // page_size), dtype=jnp.int32)[None]
    return pages * jnp.arange(batch_size, dtype=jnp.int32)[:, None] + entry % pages


def empty_layer(
    pages: PagedCache, batch_size: int, max_length: int, window: int | None
) -> PagedLayer:
    """A layer of these pages, dealt out in order."""
    count = pages.num_pages // batch_size
    return PagedLayer(
        pages=pages,
        block_tables=rolling_tables(batch_size, count, max_length, pages.page_size),
        lengths=jnp.zeros(batch_size, jnp.int32),
        overflowed=jnp.zeros(batch_size, jnp.bool_),
        max_length=max_length,
        window=window,
    )


def append(
    cache: PagedLayer,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: Any = None,
) -> PagedLayer:
    """See `turbojax.append`; `implementation` is that of `turbojax.paged.append`."""
    total = check_room(cache, key, value, lengths)
    kept = jnp.minimum(total, cache.max_length)
    first = before(cache)
    counts = kept - first
    size = cache.rolling_pages * cache.pages.page_size
    if cache.is_rolling and key.shape[1] > size:
        # If there are more tokens than room, only the newest are stored.
        skipped = jnp.maximum(counts - size, 0)
        token = skipped[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        token = jnp.minimum(token, key.shape[1] - 1)[:, :, None, None]
        key, value = (jnp.take_along_axis(x, token, axis=1) for x in (key, value))
        first, counts = first + skipped, counts - skipped
    where: Any = {"new_lengths": counts, "implementation": implementation}
    pages = append_to_pages(cache.pages, key, value, cache.block_tables, first, **where)
    return extended(cache, pages, total)


def before(cache: PagedLayer) -> jax.Array:
    """The lengths, int32 ``[B]``, for what writes new tokens beside the lengths after.

    The bound changes nothing. Of the array itself, which those after replace in place, XLA would
    make a copy, a launch in every step; this it computes with them.
    """
    return jnp.maximum(cache.lengths, 0)


def extended(cache: PagedLayer, pages: PagedCache, total: jax.Array) -> PagedLayer:
    """The layer with these pages, after tokens that lead to `total`, see `check_room`."""
    kept = jnp.minimum(total, cache.max_length)
    overflowed = cache.overflowed | (total > kept)
    return dataclasses.replace(cache, pages=pages, lengths=kept, overflowed=overflowed)
