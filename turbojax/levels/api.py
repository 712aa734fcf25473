"""Choosing the levels of a pooled attention, and what they cost."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention import score_modifiers as given
from turbojax.attention.pooled import segments
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.levels import estimate
from turbojax.levels.grid import LEVELS, Grid
from turbojax.levels.patterns import LocalWindow, Pattern, Strided
from turbojax.levels.ranking import Threshold, TopK, assign
from turbojax.levels.similarity import SimilarityCap, cap, similarity

Policy = TopK | Threshold | LocalWindow | Strided | SimilarityCap
"""What chooses levels: frozen, hashable, static under `jit`."""


def select_levels(
    query: jax.Array,
    key: jax.Array,
    policy: Policy,
    *,
    block_q: int = 128,
    block_kv: int = 128,
    is_causal: bool = False,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_offset: jax.Array | int | None = None,
    key_offset: jax.Array | int | None = None,
    query_samples: int = 4,
    key_means: int = 4,
) -> jax.Array:
    """Chooses at which level each query block attends to each key block.

    `TopK` and `Threshold` rank blocks by `block_importance`. With `is_causal` the first block and
    those that hold the positions of the row's own queries are at level 1, and what no query of the
    row sees is 0. Every row that sees something has a block at level 1. Equal arguments give equal
    levels; among equally important blocks the later ones come first.

    In packed sequences a row ranks, and counts, the blocks that have a segment of its queries; the
    others are 0, and of those that hold several segments none is coarser than 1. The first block is
    the first of these. (Where blocks of queries and of keys both hold several segments, they count
    as having one in common if their ranges of ids overlap.)

    A block with keys that are NaN or infinite counts as more important than any finite one, so that
    it is attended to and shows up in the output instead of being skipped silently; the same holds
    for all blocks of a row with such a sampled query, and ranks are then by position. The choice
    has no gradient.

    Args:
      query: ``[B, T, N, H]``, bfloat16, float16 or float32. Patterns use its shape alone.
      key: ``[B, S, K, H]`` of the same dtype, N a multiple of K. Patterns use its shape alone.
      policy: a `TopK`, `Threshold`, `SimilarityCap`, `LocalWindow` or `Strided`.
      block_q: queries of a block.
      block_kv: keys of a block, a multiple of 8.
      is_causal: a query sees the keys up to its own position.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      query_seq_lengths: optional int ``[B]``; blocks wholly past them are 0. Under `jit` values out
        of range act as the nearest bound.
      key_value_seq_lengths: optional int ``[B]``, the same for keys.
      query_segment_ids: optional integers ``[B, T]``, see `turbojax.pooled_attention`.
      key_value_segment_ids: integers ``[B, S]`` beside them.
      query_offset: optional int ``[B]`` or scalar, the position of the first query.
      key_offset: the same of the first key.
      query_samples: see `block_importance`.
      key_means: see `block_importance`.

    Returns:
      int8 ``[B, N, ceil(T / block_q), ceil(S / block_kv)]`` of 0, 1, 2, 4 and 8, for
      `pooled_attention`.

    Raises:
      TypeError: if the policy is none of those above, or dtypes are not supported or differ.
      ValueError: if shapes, blocks, lengths or numbers of samples do not fit.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is a {type(policy).__name__}, must be one of turbojax.levels")
    grid = estimate.check_arguments(query, key, block_q, block_kv, is_causal)
    sampling = estimate.Sampling.of(query, grid, scale, query_samples, key_means)
    lengths = estimate.check_lengths(query, key, query_seq_lengths, key_value_seq_lengths)
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
        key_offset=key_offset,
    )
    return _select(
        jax.lax.stop_gradient(query),
        jax.lax.stop_gradient(key),
        *lengths,
        modifiers,
        policy=policy,
        grid=grid,
        sampling=sampling,
    )


@functools.partial(jax.jit, static_argnames=("policy", "grid", "sampling"))
def _select(
    query: jax.Array,
    key: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    policy: Policy,
    grid: Grid,
    sampling: estimate.Sampling,
) -> jax.Array:
    inner = policy.policy if isinstance(policy, SimilarityCap) else policy
    lengths = grid.lengths(query_length, key_length)
    if isinstance(inner, Pattern):
        shape = (query.shape[0], query.shape[2], grid.rows, grid.columns)
        levels = jnp.broadcast_to(inner.on(grid, *lengths, modifiers)[:, None], shape)
    else:
        importance = estimate.importance(
            query, key, query_length, key_length, modifiers, grid=grid, sampling=sampling
        )
        levels = assign(importance, inner, *lengths, grid, modifiers)
    if isinstance(policy, SimilarityCap):
        levels = cap(levels, similarity(key, lengths[1], grid), policy.limits)
    return segments.attended(levels, *lengths, modifiers, grid.block_q, grid.block_kv)


def level_density(
    levels: jax.Array, *, is_causal: bool = False, block_q: int = 128, block_kv: int = 128
) -> jax.Array:
    """The work that levels stand for, relative to dense attention: the mean of ``1 / level``.

    A skipped block counts 0. The mean is over all blocks, with `is_causal` over those that some
    query of the row sees: the blocks of a dense causal attention. All blocks count the same, also
    those on the diagonal, of which half is masked, and those in the padding of shorter sequences.
    The ideal speed-up over dense attention is the inverse.

    Args:
      levels: integers ``[..., T_r, T_c]`` of 0, 1, 2, 4 and 8.
      is_causal: compare with causal attention. What lies above the diagonal does not count.
      block_q: queries of a block; matters if `is_causal`.
      block_kv: keys of a block; matters if `is_causal`.

    Returns:
      float32 scalar; NaN under `jit` if a value is not a level.

    Raises:
      TypeError: if levels are not integers.
      ValueError: if they have no two axes or an empty one, or, outside `jit`, a value is not a
        level.
    """
    if not jnp.issubdtype(levels.dtype, jnp.integer):
        raise TypeError(f"levels.dtype={levels.dtype} must be an integer type")
    if levels.ndim < 2 or 0 in levels.shape:
        raise ValueError(f"{levels.shape=} must be [..., T_r, T_c], no axis empty")
    _checks.check_sizes(block_q=block_q, block_kv=block_kv)
    if _checks.is_concrete(levels):
        wrong = np.setdiff1d(np.asarray(levels), (0, *LEVELS))
        if wrong.size:
            raise ValueError(f"levels hold {wrong.tolist()}, must be among {(0, *LEVELS)}")
    return _density(levels, is_causal=bool(is_causal), block_q=block_q, block_kv=block_kv)


@functools.partial(jax.jit, static_argnames=("is_causal", "block_q", "block_kv"))
def _density(levels: jax.Array, *, is_causal: bool, block_q: int, block_kv: int) -> jax.Array:
    rows, columns = levels.shape[-2:]
    stop = (np.arange(rows) + 1) * block_q
    counts = np.minimum(-(-stop // block_kv), columns) if is_causal else np.full(rows, columns)
    visible = np.arange(columns)[None, :] < counts[:, None]
    # In eighths: integers add up exactly.
    eighths = sum((levels == r).astype(jnp.int32) * (LEVELS[-1] // r) for r in LEVELS)
    eighths = jnp.where(np.broadcast_to(visible, levels.shape), eighths, 0)
    per_row = jnp.sum(eighths, axis=-1).astype(jnp.float32)
    share = jnp.sum(per_row) / (LEVELS[-1] * float(counts.sum()) * math.prod(levels.shape[:-2]))
    is_level = functools.reduce(jnp.logical_or, (levels == r for r in (0, *LEVELS)))
    return jnp.where(jnp.all(is_level), share, jnp.nan)
