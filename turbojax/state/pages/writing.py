"""What new tokens become in each array of a `PagedCache`, and where they go."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import polar
from turbojax.state.pages.checks import Pool

_BITS = 4


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
    if cache.kv_dtype == "auto":
        return {"key": key, "value": value}
    if cache.kv_dtype == "turbo4":
        key_codes, key_norm = polar.encode(key, cache.rotation, _BITS)
        value_codes, value_norm = polar.encode(value, cache.rotation, _BITS)
        return {
            "key": polar.pack(key_codes),
            "value": polar.pack(value_codes),
            "key_norm": key_norm,
            "value_norm": value_norm,
        }
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    return {
        "key": to_fp8(key, cache.key_scale, cache.key.dtype),
        "value": to_fp8(value, cache.value_scale, cache.value.dtype),
    }


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


def to_fp8(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """``x / scale`` (a product with the reciprocal) in 8 bits; NaN beyond the largest value."""
    information = jnp.finfo(dtype)
    x = x.astype(jnp.float32) * (1 / scale)
    # Rounded here, to nearest, ties to even, so that the conversion is exact: a backend may
    # convert in two steps, which rounds twice. The quantum and its inverse are powers of two, made
    # from their bits.
    smallest = np.float32(information.smallest_normal).view(np.int32)
    exponent = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    exponent = jnp.maximum(exponent, int(smallest)) - (information.nmant << 23)
    quantum = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    rounded = jnp.rint(x * inverse) * quantum
    fits = jnp.abs(x) <= float(information.max)
    return jnp.where(fits, rounded, jnp.nan).astype(dtype)
