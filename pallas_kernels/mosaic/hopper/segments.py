"""Which tiles of keys a tile of queries has to do with, by segments or bounds, in plain JAX.

A tile of tokens has the ids from its least to its largest one. Tiles of queries and keys whose
ranges do not meet have no pair of one segment: a kernel walks from the first tile that meets its
own to the last one, and masks those of which something is hidden. With sorted ids, as packing gives
them, no other tile is loaded. Where each query has bounds of its keys, the same is known from the
least and the greatest of a tile's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

# Beyond every token, and far enough from the largest int32 to be added to.
_FAR = 2**30
_LIMITS = np.iinfo(np.int32)


class Segments(NamedTuple):
    """Ids of a call's tokens: int32 ``[B, T]`` of queries and ``[B, S]`` of keys."""

    queries: jax.Array
    keys: jax.Array


class Bounds(NamedTuple):
    """For each of a row's tiles, in tokens of the other side: int32 numbers, or arrays of them."""

    start: jax.Array  # no token before it has an id of the tile, or is within bounds of it
    stop: jax.Array  # no token from there on has, or is
    # All tokens from there to `full_stop` are of the tile's only segment, or within the bounds of
    # all.
    full_start: jax.Array
    full_stop: jax.Array


def visible(
    first: jax.Array,
    last: jax.Array,
    length: jax.Array,
    before: int | None,
    after: int | None,
    segments: Bounds | None,
) -> Bounds:
    """What positions `first` to `last` see of `length` others: `before` back and `after` ahead."""
    start, stop, full_start, full_stop = jnp.int32(0), length, jnp.int32(0), length
    if after is not None:
        stop = jnp.minimum(stop, last + (after + 1))
        full_stop = jnp.minimum(full_stop, first + (after + 1))
    if before is not None:
        start = jnp.maximum(first - before, 0)
        full_start = jnp.maximum(last - before, 0)
    if segments is not None:
        start, stop = jnp.maximum(start, segments.start), jnp.minimum(stop, segments.stop)
        full_start = jnp.maximum(full_start, segments.full_start)
        full_stop = jnp.minimum(full_stop, segments.full_stop)
    return Bounds(start, stop, full_start, full_stop)


def bounds(
    own: jax.Array,
    own_lengths: jax.Array,
    rows: int,
    other: jax.Array,
    other_lengths: jax.Array,
    columns: int,
) -> jax.Array:
    """`Bounds` of each tile of `rows` tokens among tiles of `columns` others.

    Ids are int32 ``[B, T]`` and ``[B, S]``; tokens past the lengths do not count. Returns int32
    ``[B, 4, ceil(T / rows)]``.
    """
    low, high = (x[:, :, None] for x in _ranges(own, own_lengths, rows))
    least, most = (x[:, None, :] for x in _ranges(other, other_lengths, columns))
    meets = (low <= most) & (least <= high)
    is_full = (low == high) & (least == most) & (low == least)
    return _ranges_of(meets, is_full, columns)


def of_key_bounds(
    key_bounds: tuple[jax.Array, jax.Array],
    query_lengths: jax.Array,
    rows: int,
    size: int,
    columns: int,
) -> jax.Array:
    """`Bounds` of each tile of `rows` queries among tiles of `columns` keys.

    Of all queries int32 ``[B, T]`` each say from which of `size` keys, and up to which, they see;
    those past the lengths do not count. Returns int32 ``[B, 4, ceil(T / rows)]``.
    """
    return _ranges_of(*_pairs(key_bounds, query_lengths, rows, size, columns), columns)


def of_bound_keys(
    key_bounds: tuple[jax.Array, jax.Array],
    query_lengths: jax.Array,
    rows: int,
    size: int,
    columns: int,
) -> jax.Array:
    """The reverse: `Bounds` of each tile of `columns` keys among tiles of `rows` queries.

    Returns int32 ``[B, 4, ceil(size / columns)]``.
    """
    pairs = _pairs(key_bounds, query_lengths, rows, size, columns)
    meets, is_full = (jnp.swapaxes(x, 1, 2) for x in pairs)
    return _ranges_of(meets, is_full, rows)


def _pairs(
    key_bounds: tuple[jax.Array, jax.Array],
    query_lengths: jax.Array,
    rows: int,
    size: int,
    columns: int,
) -> tuple[jax.Array, jax.Array]:
    """Which tiles of queries may see one of keys, and which see all: bool ``[B, n, m]`` twice."""
    start, end = key_bounds
    batch, tokens = start.shape
    is_real = jnp.arange(tokens, dtype=jnp.int32)[None] < query_lengths[:, None]
    sees_some = is_real & (start < end)

    def tiles(x: jax.Array, counts: jax.Array, nothing: int) -> jax.Array:
        x = jnp.where(counts, x, nothing)
        x = jnp.pad(x, ((0, 0), (0, -tokens % rows)), constant_values=nothing)
        return x.reshape(batch, -1, rows)

    least = jnp.min(tiles(start, sees_some, _FAR), axis=2)
    most = jnp.max(tiles(end, sees_some, 0), axis=2)
    latest = jnp.max(tiles(start, is_real, 0), axis=2)
    earliest = jnp.min(tiles(end, is_real, _FAR), axis=2)
    first = jnp.arange(pl.cdiv(size, columns), dtype=jnp.int32)[None, None] * columns
    last = jnp.minimum(first + columns, size)
    meets = (least[:, :, None] < last) & (most[:, :, None] > first)
    return meets, (latest[:, :, None] <= first) & (earliest[:, :, None] >= last)


def _ranges_of(meets: jax.Array, is_full: jax.Array, columns: int) -> jax.Array:
    """`Bounds` of tiles, int32 ``[B, 4, n]``, from bool ``[B, n, m]``, of `columns` tokens each."""
    count = meets.shape[2]
    number = jnp.arange(count, dtype=jnp.int32)[None, None]
    start = jnp.min(jnp.where(meets, number * columns, _FAR), axis=2)
    stop = jnp.max(jnp.where(meets, (number + 1) * columns, 0), axis=2)
    # The first full tiles that follow each other: with sorted ids there are no others.
    first = jnp.min(jnp.where(is_full, number, _FAR), axis=2)
    is_after = ~is_full & (number > first[:, :, None])
    last = jnp.min(jnp.where(is_after, number, count), axis=2)
    has_full = first < _FAR
    full_start = jnp.where(has_full, first * columns, _FAR)
    full_stop = jnp.where(has_full, last * columns, 0)
    return jnp.stack([start, stop, full_start, full_stop], axis=1)


def order(
    found: jax.Array, rows: int, shifts: jax.Array | None, before: int | None, after: int | None
) -> jax.Array:
    """Tiles of all sequences, those with most others to attend to first: int32 ``[B * n]``.

    Programs that take every so many-th of them, in turns, then have equally much to do, wherever
    the long segments are. `found` is of `bounds`, int32 ``[B, 4, n]``; `rows` are a tile's tokens,
    `shifts`, int32 ``[B]``, are added to the tiles' positions, and each sees `before` back and
    `after` ahead. A result is the sequence times `n` plus the tile.
    """
    first = (jnp.arange(found.shape[2], dtype=jnp.int32) * rows)[None]
    first = first if shifts is None else first + shifts[:, None]
    start, stop = found[:, 0], found[:, 1]
    if after is not None:
        stop = jnp.minimum(stop, first + (rows + after))
    if before is not None:
        start = jnp.maximum(start, first - before)
    count = jnp.maximum(stop - start, 0).reshape(-1)
    return jnp.argsort(-count, stable=True).astype(jnp.int32)


def _ranges(ids: jax.Array, lengths: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """The least and the largest id of each tile's real tokens: int32 ``[B, ceil(T / tile)]``."""
    is_real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None]

    def tiles(nothing: int) -> jax.Array:
        x = jnp.where(is_real, ids, nothing)
        x = jnp.pad(x, ((0, 0), (0, -ids.shape[1] % tile)), constant_values=nothing)
        return x.reshape(ids.shape[0], -1, tile)

    return jnp.min(tiles(_LIMITS.max), axis=2), jnp.max(tiles(_LIMITS.min), axis=2)


def padded(ids: jax.Array, multiple: int) -> jax.Array:
    """Ids of whole tiles; those that are added are never used."""
    return jnp.pad(ids, ((0, 0), (0, pl.cdiv(ids.shape[1], multiple) * multiple - ids.shape[1])))
