"""Which tiles of keys a tile of queries has to do with, by ids of packed segments, in plain JAX.

A tile of tokens has the ids from its least to its largest one. Tiles of queries and keys whose
ranges do not meet have no pair of one segment: a kernel walks from the first tile that meets its
own to the last one, and masks those of which something is hidden. With sorted ids, as packing gives
them, no other tile is loaded.
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
    """For each of a row's tiles, in tokens of the other side: int32 numbers, or arrays of them.

    Attributes:
      start: no token before it has an id of the tile.
      stop: no token from there on has.
      full_start: all tokens from there to `full_stop` are of the tile's only segment.
    """

    start: jax.Array
    stop: jax.Array
    full_start: jax.Array
    full_stop: jax.Array


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
    number = jnp.arange(least.shape[2], dtype=jnp.int32)[None, None]
    start = jnp.min(jnp.where(meets, number * columns, _FAR), axis=2)
    stop = jnp.max(jnp.where(meets, (number + 1) * columns, 0), axis=2)
    # The first full tiles that follow each other: with sorted ids there are no others.
    first = jnp.min(jnp.where(is_full, number, _FAR), axis=2)
    is_after = ~is_full & (number > first[:, :, None])
    last = jnp.min(jnp.where(is_after, number, least.shape[2]), axis=2)
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
