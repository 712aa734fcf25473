"""What new tokens become in each array of a `PagedCache`, and where they go."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax.caches.paged.checks import Pool


class Places(NamedTuple):
    """The page and slot of each token of a call.

    Tokens that are left out have distinct page numbers past the pool's end; `dropped_tokens` counts
    those of them that should be stored and have no place.
    """

    page: jax.Array
    slot: jax.Array
    dropped_tokens: jax.Array


def append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[Pool, Mapping[str, jax.Array]]:
    """The pool with the tokens, and these as stored: ``[B, T, K, ...]`` by field name."""
    content = encode(cache, key=key, value=value)
    place = find_places(cache, key.shape[1], block_tables, lengths, new_lengths)
    return store(cache, content, place), content


@functools.partial(jax.jit, static_argnames="tokens")
def find_places(
    cache: Pool,
    tokens: int,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> Places:
    """Where `tokens` tokens per sequence go."""
    entries = block_tables.shape[1]
    offset = jnp.arange(tokens, dtype=jnp.int32)[None]
    # Where int32 overflows this wraps around to a negative number, which is out of range.
    position = lengths[:, None] + offset
    entry, slot = position // cache.page_size, position % cache.page_size
    page = jnp.take_along_axis(block_tables, jnp.clip(entry, 0, entries - 1), axis=1)
    wanted = offset < new_lengths[:, None]
    has_page = (entry >= 0) & (entry < entries) & (page >= 0) & (page < cache.num_pages)
    # Tokens that are left out get distinct pages past the end, which the scatter drops: no place is
    # named twice.
    nowhere = cache.num_pages + jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape)
    page = jnp.where(wanted & has_page, page, nowhere)
    dropped_tokens = jnp.sum(wanted & ~has_page, dtype=jnp.int32)
    dropped_tokens = dropped_tokens + jnp.sum(jnp.maximum(new_lengths - tokens, 0), dtype=jnp.int32)
    return Places(page, slot, dropped_tokens)


def page_arrays(cache: Pool) -> dict[str, jax.Array]:
    """The arrays whose first axis is that of pages, by field name."""
    names = cache.PAGE_ARRAYS
    return {name: x for name in names if (x := getattr(cache, name)) is not None}


@jax.jit
def encode(cache: Pool, **vectors: jax.Array) -> dict[str, jax.Array]:
    """Encodes `key`, `value` or both, ``[B, T, K, H]``: arrays ``[B, T, K, ...]`` by field name."""
    rotation = cache.rotation if cache.formats.is_rotated else None
    content = {}
    for side, x in vectors.items():
        stored = getattr(cache.formats, side).encode(x, getattr(cache, f"{side}_scale"), rotation)
        content[side] = stored.data
        if stored.norm is not None:
            content[f"{side}_norm"] = stored.norm
    return content


@jax.jit
def store(cache: Pool, content: Mapping[str, jax.Array], place: Places) -> Pool:
    """The pool with the tokens of `encode` stored, and those that have no place counted."""
    arrays: dict[str, Any] = {
        name: getattr(cache, name)
        .at[place.page, :, place.slot]
        .set(new, mode="drop", unique_indices=True)
        for name, new in content.items()
    }
    return dataclasses.replace(
        cache, dropped_tokens=cache.dropped_tokens + place.dropped_tokens, **arrays
    )


def read(pages: jax.Array, place: Places) -> jax.Array:
    """The tokens in one of the `page_arrays`, ``[B, T, K, ...]``; 0 for those left out."""
    return pages.at[place.page, :, place.slot].get(mode="fill", fill_value=0)
