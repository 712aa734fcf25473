"""Packed sequences in blocks: which blocks have a segment in common, and at which level then.

A mean never stands for keys of several segments: a block that holds more than one is attended token
by token, whatever its level, and a block without a segment of the row's queries is skipped. Both
are done by changing the levels before anything else reads them. For each pair of a query and a
pooled key it only remains to check whether they are of one segment.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.attention.pooled.static import LEVELS
from turbojax.attention.score_modifiers import ScoreModifiers

_LIMITS = jnp.iinfo(jnp.int32)


class Blocks(NamedTuple):
    """The segments in blocks of tokens.

    Attributes:
      ids: int32 ``[B, blocks, block]``.
      there: bool, the same shape: tokens that are no padding.
      least: int32 ``[B, blocks]``, the smallest id of these; the largest int32 if there are none.
      most: the largest id; the smallest int32 if there are none.
    """

    ids: jax.Array
    there: jax.Array
    least: jax.Array
    most: jax.Array

    @property
    def is_one(self) -> jax.Array:
        """Blocks of exactly one segment, bool ``[B, blocks]``."""
        return self.least == self.most

    @property
    def is_mixed(self) -> jax.Array:
        """Blocks of several segments, bool ``[B, blocks]``."""
        return self.least < self.most


class Segments(NamedTuple):
    """The segments of queries and of keys, by blocks."""

    queries: Blocks
    keys: Blocks

    def meet(self) -> jax.Array:
        """Which blocks may have a segment in common: bool ``[B, T_r, T_c]``.

        Exact where one of the two blocks holds a single segment: the other is searched for its id.
        Two blocks of several segments each are compared by their ranges of ids, and may seem to
        meet although they do not; the kernel's mask then finds nothing in them.
        """
        q, k = self.queries, self.keys
        meet = (q.least[:, :, None] <= k.most[:, None]) & (k.least[:, None] <= q.most[:, :, None])
        of_query = (q.ids[..., None] == k.least[:, None, None]) & q.there[..., None]
        of_key = (k.ids[:, None] == q.least[:, :, None, None]) & k.there[:, None]
        meet &= jnp.any(of_query, axis=2) | ~k.is_one[:, None]
        return meet & (jnp.any(of_key, axis=3) | ~q.is_one[:, :, None])

    def equal(self) -> jax.Array:
        """Pairs of blocks that hold one and the same segment: bool ``[B, T_r, T_c]``."""
        q, k = self.queries, self.keys
        one = q.is_one[:, :, None] & k.is_one[:, None]
        return one & (q.least[:, :, None] == k.least[:, None])


def blocks(ids: jax.Array, length: jax.Array | None, block: int) -> Blocks:
    """The segments int32 ``[B, T]`` of tokens up to a length, int32 ``[B or 1]``, in blocks."""
    batch, size = ids.shape
    token = jnp.arange(size + -size % block, dtype=jnp.int32)[None]
    stop = jnp.full((1, 1), size) if length is None else jnp.minimum(length, size)[:, None]
    there = jnp.broadcast_to(token < stop, (batch, token.shape[1])).reshape(batch, -1, block)
    ids = jnp.pad(ids, ((0, 0), (0, -size % block))).reshape(batch, -1, block)
    return Blocks(
        ids=ids,
        there=there,
        least=jnp.min(jnp.where(there, ids, _LIMITS.max), axis=2),
        most=jnp.max(jnp.where(there, ids, _LIMITS.min), axis=2),
    )


def of(
    modifiers: ScoreModifiers,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    block_q: int,
    block_kv: int,
) -> Segments | None:
    """The segments of a call, None if it has none; lengths are optional int32 ``[B or 1]``."""
    if modifiers.query_segment_ids is None or modifiers.key_value_segment_ids is None:
        return None
    return Segments(
        blocks(modifiers.query_segment_ids, query_length, block_q),
        blocks(modifiers.key_value_segment_ids, key_length, block_kv),
    )


def attended(
    levels: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    modifiers: ScoreModifiers,
    block_q: int,
    block_kv: int,
) -> jax.Array:
    """The levels at which blocks are attended: those asked for, but for segments.

    A pooled level becomes 1 where the key block holds several segments, and any level 0 where the
    two blocks share none. Levels are ``[B or 1, N or 1, T_r, T_c]`` and become ``[B, ...]`` where
    there are segments; invalid ones stay. Lengths are optional int32 ``[B or 1]``.
    """
    found = of(modifiers, query_length, key_length, block_q, block_kv)
    if found is None:
        return levels
    fine = jnp.asarray(LEVELS[0], levels.dtype)
    is_pooled = functools.reduce(jnp.logical_or, [levels == level for level in LEVELS[1:]])
    levels = jnp.where(is_pooled & found.keys.is_mixed[:, None, None], fine, levels)
    is_level = functools.reduce(jnp.logical_or, [levels == level for level in LEVELS])
    return jnp.where(is_level & ~found.meet()[:, None], jnp.zeros_like(fine), levels)
