"""What new tokens become in each array of a `PagedCache`, and where they go."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax.state.pages.checks import Pool


class Places(NamedTuple):
    """Where the tokens of a call go.

    Attributes:
      page: int32 ``[B, T]``; for tokens that are left out, distinct numbers past the pool's end.
      slot: int32 ``[B, T]``, in the page.
      lost: int32 ``[]``, tokens that should be stored and have no place.
    """

    page: jax.Array
    slot: jax.Array
    lost: jax.Array


def append(
    cache: Pool,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[Pool, Mapping[str, jax.Array]]:
    """The pool with the tokens, and what they became: ``[B, T, K, ...]`` by field name."""
    content = _encode(cache, key, value)
    return _store(cache, content, block_tables, lengths, new_lengths), content


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
    lost = jnp.sum(wanted & ~has_page, dtype=jnp.int32)
    lost = lost + jnp.sum(jnp.maximum(new_lengths - tokens, 0), dtype=jnp.int32)
    return Places(page, slot, lost)


def page_arrays(cache: Pool) -> dict[str, jax.Array]:
    """The arrays with an axis of pages, the first, by field name."""
    names = ("key", "value", "key_norm", "value_norm")
    return {name: x for name in names if (x := getattr(cache, name)) is not None}


@jax.jit
def _encode(cache: Pool, key: jax.Array, value: jax.Array) -> dict[str, jax.Array]:
    """What the tokens ``[B, T, K, H]`` become in each array: ``[B, T, K, ...]``."""
    rotation = cache.rotation if cache.formats.is_rotated else None
    sides = {
        "key": cache.formats.key.encode(key, cache.key_scale, rotation),
        "value": cache.formats.value.encode(value, cache.value_scale, rotation),
    }
    norms = {f"{name}_norm": x.norm for name, x in sides.items() if x.norm is not None}
    return {name: x.data for name, x in sides.items()} | norms


@jax.jit
def _store(
    cache: Pool,
    content: Mapping[str, jax.Array],
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> Pool:
    place = find_places(cache, content["key"].shape[1], block_tables, lengths, new_lengths)
    arrays: dict[str, Any] = {
        name: old.at[place.page, :, place.slot].set(content[name], mode="drop", unique_indices=True)
        for name, old in page_arrays(cache).items()
    }
    return dataclasses.replace(cache, lost=cache.lost + place.lost, **arrays)
