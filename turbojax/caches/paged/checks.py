"""Block tables, lengths and page numbers: checked against the pool they are for, cut into tiles."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks

Pool = Any
"""A `PagedCache`."""


def check_block_tables(block_tables: jax.Array, batch_size: int | None = None) -> jax.Array:
    """Returns block tables as int32 ``[B, max_pages]``; TypeError or ValueError for others."""
    # Entries past a sequence's length may be anything.
    block_tables = _checks.as_int32("block_tables", block_tables, saturate=True)
    batch = "B" if batch_size is None else batch_size
    fits = block_tables.ndim == 2 and batch_size in (None, block_tables.shape[0])
    if not fits or 0 in block_tables.shape:
        raise ValueError(f"{block_tables.shape=} must be [{batch}, max_pages], no axis empty")
    return block_tables


def check_lengths(name: str, lengths: jax.Array, batch_size: int) -> jax.Array:
    """Returns lengths as int32 ``[B]``; whether they fit their tables is checked elsewhere."""
    lengths = _checks.as_int32(name, lengths)
    if lengths.shape != (batch_size,):
        raise ValueError(f"{name}.shape={lengths.shape} must be ({batch_size},), one per sequence")
    return lengths


def first_seen(
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    tokens: int,
    window: tuple[int, int] | None,
) -> jax.Array | None:
    """The first token of each sequence that one of its newest queries sees: int32 ``[B]``.

    None without a window. `query_lengths` are clipped to ``0..tokens``; None means `tokens`.
    """
    if window is None:
        return None
    real = tokens if query_lengths is None else jnp.clip(query_lengths, 0, tokens)
    return jnp.maximum(lengths - real - window[0], 0)


def lengths_of_readable(
    pool: Pool, block_tables: jax.Array, lengths: jax.Array, first: jax.Array | None = None
) -> jax.Array:
    """Int32 ``[B]``: the lengths of `readable` sequences, -1 of others; one kernel in XLA."""
    entries = _readable_entries(pool, block_tables, lengths, first)
    return jnp.min(jnp.where(entries, lengths[:, None], -1), axis=1)


def readable(
    pool: Pool, block_tables: jax.Array, lengths: jax.Array, first: jax.Array | None = None
) -> jax.Array:
    """Bool ``[B]``: whether the length fits the table and all pages needed are in the pool.

    Needed are those that hold tokens from `first`, int32 ``[B]``, on; by default all tokens held.
    """
    return jnp.all(_readable_entries(pool, block_tables, lengths, first), axis=1)


def _readable_entries(
    pool: Pool, block_tables: jax.Array, lengths: jax.Array, first: jax.Array | None
) -> jax.Array:
    """Bool ``[B, max_pages]``: all True for a sequence that is `readable`."""
    entries, size = block_tables.shape[1], pool.page_size
    fits = (lengths >= 0) & (lengths <= entries * size)
    start = jnp.arange(entries, dtype=jnp.int32)[None] * size
    unneeded = start >= lengths[:, None]
    if first is not None:
        unneeded = unneeded | (start // size < first[:, None] // size)
    has_page = (block_tables >= 0) & (block_tables < pool.num_pages)
    return fits[:, None] & (has_page | unneeded)


def check_readable(
    pool: Pool, block_tables: jax.Array, lengths: jax.Array, first: jax.Array | None = None
) -> None:
    """Raises ValueError unless all sequences are `readable`; under `jit`, nothing can be seen."""
    if not _checks.is_concrete(block_tables, lengths, *([] if first is None else [first])):
        return
    tables, held = np.asarray(block_tables), np.asarray(lengths)
    room = tables.shape[1] * pool.page_size
    if np.any((held < 0) | (held > room)):
        raise ValueError(
            f"lengths={held.tolist()} must be between 0 and {room}, "
            f"what {tables.shape[1]} pages of {pool.page_size} tokens hold"
        )
    entry = np.arange(tables.shape[1])[None]
    needed = entry * pool.page_size < held[:, None]
    if first is not None:
        needed &= entry >= np.asarray(first)[:, None] // pool.page_size
    _check_entries(pool, tables, needed)


def check_places(
    pool: Pool, block_tables: jax.Array, lengths: jax.Array, new_lengths: jax.Array
) -> None:
    """Raises ValueError unless each new token has a place of its own; not under `jit`."""
    if not _checks.is_concrete(block_tables, lengths, new_lengths):
        return
    tables, before = np.asarray(block_tables), np.asarray(lengths).astype(np.int64)
    after = before + np.asarray(new_lengths)
    room = tables.shape[1] * pool.page_size
    if np.any((before < 0) | (before > room)):
        raise ValueError(f"lengths={before.tolist()} must be between 0 and {room}")
    if np.any(after > room):
        raise ValueError(
            f"appending would give lengths {after.tolist()}, which must be at most {room}, "
            f"what {tables.shape[1]} pages of {pool.page_size} tokens hold"
        )
    first = np.arange(tables.shape[1])[None] * pool.page_size
    written = (first + pool.page_size > before[:, None]) & (first < after[:, None])
    _check_entries(pool, tables, written)
    _check_distinct(pool, tables, written, before, after)


def _check_distinct(
    pool: Pool, tables: np.ndarray, written: np.ndarray, before: np.ndarray, after: np.ndarray
) -> None:
    pages, counts = np.unique(tables[written], return_counts=True)
    for page in pages[counts > 1]:
        taken = np.zeros(pool.page_size, np.int64)
        for b, entry in np.argwhere(written & (tables == page)):
            start = entry * pool.page_size
            taken[max(before[b] - start, 0) : max(after[b] - start, 0)] += 1
        if np.any(taken > 1):
            raise ValueError(
                f"two tokens would be written to slot {int(np.argmax(taken > 1))} of page {page}: "
                "a shared page must be copied before it is extended"
            )


def check_page_numbers(pool: Pool, name: str, pages: jax.Array, count: int | None) -> jax.Array:
    """Page numbers as int32 ``[count]``; -1 is padding, others must be in the pool."""
    pages = _checks.as_int32(name, pages)
    if pages.ndim != 1 or count not in (None, pages.size):
        raise ValueError(f"{name}.shape={pages.shape} must be [{'n' if count is None else count}]")
    if _checks.is_concrete(pages):
        numbers = np.asarray(pages)
        if np.any((numbers < -1) | (numbers >= pool.num_pages)):
            raise ValueError(
                f"{name}={numbers.tolist()} must be within 0..{pool.num_pages - 1}, or -1 to skip"
            )
    return pages


def check_destinations(name: str, pages: jax.Array, sources: jax.Array | None = None) -> None:
    """Raises ValueError, outside `jit`, where a page would be written twice; -1 writes nothing."""
    sources = pages if sources is None else sources
    if _checks.is_concrete(pages, sources):
        written = np.asarray(pages)[np.asarray(sources) != -1]
        numbers, counts = np.unique(written, return_counts=True)
        if np.any(twice := (counts > 1) & (numbers != -1)):
            raise ValueError(f"{name} names page {numbers[twice][0]} more than once")


def check_range(
    pool: Pool,
    key: jax.Array,
    value: jax.Array,
    content: Mapping[str, jax.Array],
    new_lengths: jax.Array,
) -> None:
    """Raises ValueError, outside `jit`, where a finite value is beyond what the format stores."""
    seen = _checks.is_concrete(key, value, new_lengths, *content.values())
    if not seen:
        return
    real = np.arange(key.shape[1])[None] < np.asarray(new_lengths)[:, None]
    for name, x in (("key", key), ("value", value)):
        side = getattr(pool.formats, name)
        if not side.is_bounded:
            continue
        stored = content[f"{name}_norm" if side.has_norm else name]
        beyond = np.asarray(_beyond(x, stored)) & real
        if np.any(beyond):
            b, t = np.argwhere(beyond)[0]
            scale = float(getattr(pool, f"{name}_scale")) if side.has_scale else 1.0
            raise ValueError(f"{name}[{b}, {t}] {side.refusal(pool.kv_dtype, name, scale)}")


@jax.jit
def _beyond(x: jax.Array, stored: jax.Array) -> jax.Array:
    """Bool ``[B, T]``: finite vectors that became NaN."""
    axes = tuple(range(2, x.ndim))
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    # Compared before a conversion, so exactly: NaN differs from itself.
    nan = jnp.isnan(stored.astype(jnp.float32))
    nonfinite = finite & (nan if nan.ndim == finite.ndim else jnp.any(nan, axis=-1))
    return jnp.any(nonfinite, axis=axes[:-1])


def _check_entries(pool: Pool, tables: np.ndarray, needed: np.ndarray) -> None:
    bad = needed & ((tables < 0) | (tables >= pool.num_pages))
    if np.any(bad):
        b, entry = np.argwhere(bad)[0]
        raise ValueError(
            f"block_tables[{b}, {entry}]={tables[b, entry]} is needed and must be within "
            f"0..{pool.num_pages - 1}"
        )


def in_tiles(block_tables: jax.Array, page_size: int, tile: int) -> jax.Array:
    """Page ids ``[B, tiles, pages of a tile]`` of `tile` tokens; page 0 past the table's end."""
    per_tile = tile // page_size
    missing = -block_tables.shape[1] % per_tile
    padded = jnp.pad(block_tables, ((0, 0), (0, missing)))
    return padded.reshape(padded.shape[0], -1, per_tile)
