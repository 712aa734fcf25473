"""Block lists by level, which let the kernels skip blocks at no cost. Plain JAX, on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from turbojax.attention.pooled import segments
from turbojax.attention.pooled.static import LEVELS, PooledOptions
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers

_BITS = 16
"""Of an entry of `KeyLists`, those that say which blocks of the tile are meant."""


class QueryLists(NamedTuple):
    """What each block of queries attends to.

    Attributes:
      blocks: int32 ``[B or 1, N or 1, T_r, T_c]``, key blocks: those of level 1, then 2, 4 and 8,
        of each the complete ones first, each in ascending order; then what is skipped.
      counts: int32 ``[B or 1, N or 1, T_r, 9]``: for levels 1, 2, 4 and 8 the blocks that some
        query of the row sees; for each level how many of those, the first ones, are complete (all
        their tokens are there, and visible to all queries); and 1 if a level of the row is invalid.
    """

    blocks: jax.Array
    counts: jax.Array


class KeyLists(NamedTuple):
    """Which queries attend to each tile of pooled keys of one level.

    Attributes:
      queries: int32 ``[B or 1, N or 1, tiles, T_r]``: ``i << 16 | bits`` in ascending order of the
        query block `i`; bit `p` says that the tile's block number `p` has this level for it.
      counts: int32 ``[B or 1, N or 1, tiles, 2]``: entries, and how many of them, the first ones,
        need the causal mask.
    """

    queries: jax.Array
    counts: jax.Array


Lengths = tuple[jax.Array | None, jax.Array | None]
"""Of queries and keys, int32 ``[B]`` each; None where all tokens are real."""


def _ends(lengths: Lengths, tokens: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Lengths of queries and keys, those of all tokens if not given: ``[B or 1, 1, 1, 1]``."""

    def end(length: jax.Array | None, size: int) -> jax.Array:
        if length is None:
            return jnp.full((1, 1, 1, 1), size, jnp.int32)
        return length[:, None, None, None]

    return end(lengths[0], tokens[0]), end(lengths[1], tokens[1])


def _shift(modifiers: ScoreModifiers) -> jax.Array | None:
    """`ScoreModifiers.shift` as int32 ``[B, 1, 1, 1]``."""
    shift = modifiers.shift()
    return None if shift is None else shift[:, None, None, None]


def _shifted(index: jax.Array, shift: jax.Array | None) -> jax.Array:
    """Positions of queries, counted as those of keys are."""
    return index if shift is None else index + shift


def _visible(
    levels: jax.Array,
    level: jax.Array,
    query_length: jax.Array,
    key_length: jax.Array,
    shift: jax.Array | None,
    s: PooledOptions,
) -> jax.Array:
    """Where some query of the block sees a pooled key of the key block, by lengths and causality.

    `level`, the tokens in a group, broadcasts to `levels`, which gives the shape only.
    """
    i = jnp.arange(levels.shape[2], dtype=jnp.int32)[None, None, :, None]
    j = jnp.arange(levels.shape[3], dtype=jnp.int32)[None, None, None, :]
    visible = (i * s.block_q < query_length) & (j * s.block_kv < key_length)
    if s.is_causal:
        last_query = _shifted(jnp.minimum((i + 1) * s.block_q, query_length) - 1, shift)
        visible &= jnp.minimum(j * s.block_kv + level, key_length) - 1 <= last_query
    return visible


def by_query(
    levels: jax.Array,
    tokens: tuple[int, int],
    lengths: Lengths,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> QueryLists:
    """The lists that the forward pass and the gradient of the queries walk over.

    For segments `segments.attended` must have changed the levels.
    """
    levels = levels.astype(jnp.int32)
    ends, shift = _ends(lengths, tokens), _shift(modifiers)
    i = jnp.arange(levels.shape[2], dtype=jnp.int32)[None, None, :, None]
    j = jnp.arange(levels.shape[3], dtype=jnp.int32)[None, None, None, :]
    visible = _visible(levels, levels, *ends, shift, options)
    complete = (j + 1) * options.block_kv <= ends[1]
    if options.is_causal:
        complete &= (j + 1) * options.block_kv - 1 <= _shifted(i * options.block_q, shift)
    kind = jnp.full_like(levels, len(LEVELS))
    for number, level in enumerate(LEVELS):
        kind = jnp.where(levels == level, number, kind)
    invalid = (kind == len(LEVELS)) & (levels != 0)
    kind = jnp.where(visible, kind, len(LEVELS))
    order, found = kind, _segments(modifiers, lengths, options)
    if found is not None:
        complete &= found.equal()[:, None]
        order = 2 * kind + jnp.where(complete, 0, 1)
    blocks = jnp.sort(order * levels.shape[3] + j, axis=-1) % levels.shape[3]
    has = [kind == number for number in range(len(LEVELS))]
    columns = [*has, *(x & complete for x in has)]
    counts = [jnp.sum(x, axis=-1, dtype=jnp.int32) for x in columns]
    counts.append(jnp.any(invalid, axis=-1).astype(jnp.int32))
    # Lengths may differ where levels are shared by a batch.
    counts = [jnp.broadcast_to(x, blocks.shape[:-1]) for x in counts]
    return QueryLists(blocks, jnp.stack(counts, axis=-1))


def _segments(
    modifiers: ScoreModifiers, lengths: Lengths, options: PooledOptions
) -> segments.Segments | None:
    return segments.of(modifiers, *lengths, options.block_q, options.block_kv)


def by_key(
    levels: jax.Array,
    level: int,
    rows: int,
    tokens: tuple[int, int],
    lengths: Lengths,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> KeyLists:
    """The lists that the gradients of keys and values of one level walk over.

    A tile has `rows` groups of this level: tile `u` begins at group ``u * rows``. `rows` is a power
    of two that covers at most 16 blocks, as `block_kv` is a power of two. The rest is as in
    `by_query`.
    """
    marks = _segments(modifiers, lengths, options), _shift(modifiers)
    ends, levels = _ends(lengths, tokens), levels.astype(jnp.int32)
    found = _attending(levels, level, rows, tokens[1], ends, *marks, options)
    return _listed(*found, masked_first=marks[0] is not None)


def by_every_key(
    levels: jax.Array,
    rows: int,
    tokens: tuple[int, int],
    lengths: Lengths,
    options: PooledOptions,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> KeyLists:
    """`by_key` of levels 1, 2, 4 and 8, one after the other along the axis of tiles."""
    marks = _segments(modifiers, lengths, options), _shift(modifiers)
    ends, levels = _ends(lengths, tokens), levels.astype(jnp.int32)
    found = [_attending(levels, level, rows, tokens[1], ends, *marks, options) for level in LEVELS]
    bits, masked = (jnp.concatenate(x, axis=2) for x in zip(*found, strict=True))
    return _listed(bits, masked, masked_first=marks[0] is not None)


def _attending(
    levels: jax.Array,
    level: int,
    rows: int,
    key_tokens: int,
    lengths: tuple[jax.Array, jax.Array],
    found: segments.Segments | None,
    shift: jax.Array | None,
    options: PooledOptions,
) -> tuple[jax.Array, jax.Array]:
    """The bits of every query block for every tile, and whether it needs a mask."""
    tile = rows * level  # tokens
    blocks, parts = max(1, tile // options.block_kv), max(1, options.block_kv // tile)
    if blocks > _BITS:
        raise ValueError(
            f"a tile of {rows=} of {level=} covers {blocks} blocks, must be <= {_BITS}"
        )
    tiles = -(-key_tokens // tile)
    active = (levels == level) & _visible(levels, jnp.int32(level), *lengths, shift, options)

    def by_tile(active: jax.Array) -> jax.Array:
        active = jnp.pad(active, ((0, 0),) * 3 + ((0, -active.shape[3] % blocks),))
        active = active.reshape(*active.shape[:3], -1, blocks).astype(jnp.int32)
        weights = jnp.left_shift(1, jnp.arange(blocks, dtype=jnp.int32))
        bits = jnp.sum(active * weights[None, None, None, None], axis=-1)
        return jnp.swapaxes(jnp.repeat(bits, parts, axis=-1)[..., :tiles], 2, 3)

    bits = by_tile(active)
    masked = jnp.zeros_like(bits, dtype=bool)
    if options.is_causal:
        i = jnp.arange(levels.shape[2], dtype=jnp.int32)[None, None, None, :]
        end = (jnp.arange(tiles, dtype=jnp.int32)[None, None, :, None] + 1) * tile
        first = _shifted(i * options.block_q, shift)
        masked = (bits != 0) & (first < jnp.minimum(end, lengths[1]) - 1)
    if found is not None:
        masked |= by_tile(active & ~found.equal()[:, None]) != 0
    return bits, masked


def _listed(bits: jax.Array, masked: jax.Array, *, masked_first: bool) -> KeyLists:
    """The entries whose bits are not 0, in order of the query block.

    Those that need a mask must come first. `masked_first` sorts them so; without segments only
    causality masks, and they are in this order already.
    """
    i = jnp.arange(bits.shape[3], dtype=jnp.int32)[None, None, None, :]
    entries = jnp.where(bits != 0, (i << _BITS) | bits, jnp.iinfo(jnp.int32).max)
    counts = [jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (bits != 0, masked)]
    if masked_first:
        _, entries = jax.lax.sort(((~masked).astype(jnp.int32), entries), num_keys=2)
        return KeyLists(entries, jnp.stack(counts, axis=-1))
    return KeyLists(jnp.sort(entries, axis=-1), jnp.stack(counts, axis=-1))
