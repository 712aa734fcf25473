"""An estimate of where attention goes, from a few queries and from means of keys."""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention import score_modifiers as given
from turbojax.attention.pooled import segments
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.levels.grid import Grid

# Sums of at most this many tokens are written out. XLA then reads the keys in wide loads, which it
# does not for a reduction over few rows.
_UNROLLED = 64


def block_importance(
    query: jax.Array,
    key: jax.Array,
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
    """Estimates the share of a query block's attention that falls on each key block.

    Each query block is cut into `query_samples` equal parts, and the last query of each part is
    sampled. The samples attend to `key_means` means of each key block, those of as many equal
    parts; a mean of `c` keys counts as `c`. A sampled query sees a mean if it sees the last of its
    keys, and if they all are of its segment. The weights are added over a block and averaged over
    those samples that see something.

    Args:
      query: ``[B, T, N, H]``; only the samples are read.
      key: ``[B, S, K, H]``, read once.
      block_q: queries of a block.
      block_kv: keys of a block, a multiple of 8.
      is_causal: a query sees the keys up to its own position.
      scale: factor of the scores; ``1 / sqrt(H)`` if not given.
      query_seq_lengths: optional int ``[B]``; what is past them is not sampled.
      key_value_seq_lengths: optional int ``[B]``; keys past them are ignored.
      query_segment_ids: optional integers ``[B, T]``, see `turbojax.pooled_attention`.
      key_value_segment_ids: integers ``[B, S]`` beside them.
      query_offset: optional int ``[B]`` or scalar, the position of the first query.
      key_offset: the same of the first key.
      query_samples: queries that are sampled of a block, at most `block_q`.
      key_means: means of a key block, a divisor of `block_kv`.

    Returns:
      float32 ``[B, N, ceil(T / block_q), ceil(S / block_kv)]``, rows that sum to 1 (or 0, where
      nothing is seen). A block with which some sample has a score that is not finite, as with NaN
      or infinity among its keys, has infinity, and the rest of the row sums to 1.

    Raises:
      TypeError: if dtypes are not supported or differ.
      ValueError: if shapes, blocks, lengths or numbers of samples do not fit.
    """
    grid = check_arguments(query, key, block_q, block_kv, is_causal)
    sampling = Sampling.of(query, grid, scale, query_samples, key_means)
    lengths = check_lengths(query, key, query_seq_lengths, key_value_seq_lengths)
    modifiers = given.complete(
        query,
        key,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_offset=query_offset,
        key_offset=key_offset,
    )
    return importance(
        jax.lax.stop_gradient(query),
        jax.lax.stop_gradient(key),
        *lengths,
        modifiers,
        grid=grid,
        sampling=sampling,
    )


def check_arguments(
    query: jax.Array, key: jax.Array, block_q: int, block_kv: int, is_causal: bool
) -> Grid:
    """Checks what every policy takes, and returns the grid of blocks."""
    _checks.check_query_key_value(query, key, key)
    return Grid(query.shape[1], key.shape[1], block_q, block_kv, bool(is_causal))


def check_lengths(
    query: jax.Array,
    key: jax.Array,
    query_seq_lengths: jax.Array | None,
    key_value_seq_lengths: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Lengths as int32 ``[B]``; None stays None, so that full sequences cost no masks."""
    checked = []
    for name, lengths, x in (
        ("query_seq_lengths", query_seq_lengths, query),
        ("key_value_seq_lengths", key_value_seq_lengths, key),
    ):
        absent = lengths is None
        checked.append(None if absent else _checks.check_lengths(name, lengths, *x.shape[:2]))
    return checked[0], checked[1]


class Sampling(NamedTuple):
    """What importance is estimated from: so many queries and means of keys of each block."""

    scale: float
    queries: int
    means: int

    @staticmethod
    def of(
        query: jax.Array, grid: Grid, scale: float | None, queries: int, means: int
    ) -> "Sampling":
        """Checks the numbers of samples and of means; `scale` is that of the scores."""
        _checks.check_number("scale", scale)
        _checks.check_sizes(query_samples=queries, key_means=means)
        if queries > grid.block_q:
            raise ValueError(f"query_samples={queries} must be at most block_q={grid.block_q}")
        if grid.block_kv % means:
            raise ValueError(f"key_means={means} must divide block_kv={grid.block_kv}")
        whole = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        return Sampling(whole, queries, means)


@functools.partial(jax.jit, static_argnames=("grid", "sampling"))
def importance(
    query: jax.Array,
    key: jax.Array,
    query_length: jax.Array | None,
    key_length: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    grid: Grid,
    sampling: Sampling,
) -> jax.Array:
    """`block_importance` of checked arguments."""
    scale, samples, means = sampling
    batch, _, heads, channels = query.shape
    kv_heads = key.shape[2]
    sampled, position = _sample_queries(query, query_length, grid, samples)
    pooled = mean_keys(key, key_length, grid, means)
    scores = jnp.einsum(
        "bkph,bkmh->bkpm",
        sampled.reshape(batch, kv_heads, -1, channels),
        pooled.reshape(batch, kv_heads, -1, channels),
        preferred_element_type=jnp.float32,
    ).reshape(batch, heads, grid.rows * samples, means, grid.columns)
    mass = _block_log_mass(scores, scale, position, key_length, grid, modifiers)
    shares = _average(mass.reshape(batch, heads, grid.rows, samples, grid.columns))
    if query_length is None:
        return shares
    there = grid.last_query(grid.lengths(query_length, None)[0]) > 0
    return jnp.where(there[:, None, :, None], shares, 0.0)


def _sample_queries(
    query: jax.Array, query_length: jax.Array | None, grid: Grid, samples: int
) -> tuple[jax.Array, jax.Array]:
    """The last query of each of a block's equal parts, or of the sequence where that ends earlier.

    As ``[B, N, T_r * samples, H]``, the heads of a key/value head next to each other; and their
    positions, int32 ``[B or 1, T_r * samples]``.
    """
    parts = (np.arange(1, samples + 1) * grid.block_q) // samples - 1
    wanted = (np.arange(grid.rows)[:, None] * grid.block_q + parts[None, :]).reshape(-1)
    wanted = np.minimum(wanted, grid.query_tokens - 1).astype(np.int32)
    if query_length is None:
        sampled = jnp.take(query, wanted, axis=1, mode="clip")
        position = jnp.asarray(wanted)[None]
    else:
        last = jnp.clip(query_length, 1, grid.query_tokens) - 1
        position = jnp.minimum(jnp.asarray(wanted)[None], last[:, None])
        sampled = jnp.take_along_axis(query, position[:, :, None, None], axis=1, mode="clip")
    return jnp.swapaxes(sampled, 1, 2), position


def mean_keys(key: jax.Array, key_length: jax.Array | None, grid: Grid, means: int) -> jax.Array:
    """Means of a key block's equal parts, ``[B, K, means, T_c, H]`` in the keys' dtype.

    For each part the blocks are side by side: then operations on the scores over a block's means
    are elementwise, on rows of `T_c`.
    """
    batch, size, kv_heads, channels = key.shape
    part = grid.block_kv // means
    padding = grid.columns * grid.block_kv - size
    if padding:
        key = jnp.pad(key, ((0, 0), (0, padding), (0, 0), (0, 0)))
    parts = key.reshape(batch, grid.columns, means, part, kv_heads, channels)
    count = _counts(key_length, grid, means)
    token = jnp.arange(part, dtype=jnp.int32)[None, None, None]
    there = token < jnp.transpose(count, (0, 2, 1))[..., None]

    def widen(x: jax.Array, there: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)  # without lengths, what is not there is zeros
        return wide if key_length is None else jnp.where(there[..., None, None], wide, 0.0)

    if part <= _UNROLLED:
        tokens = (widen(parts[:, :, :, t], there[:, :, :, t]) for t in range(part))
        total = functools.reduce(operator.add, tokens)
    else:
        total = jnp.sum(widen(parts, there), axis=3)
    inverse = jnp.transpose(1 / jnp.maximum(count, 1).astype(jnp.float32), (0, 2, 1))
    mean = (total * inverse[:, :, :, None, None]).astype(key.dtype)
    return jnp.transpose(mean, (0, 3, 2, 1, 4))


def _counts(key_length: jax.Array | None, grid: Grid, means: int) -> jax.Array:
    """Keys that each mean stands for: int32 ``[B or 1, means, T_c]``."""
    part = grid.block_kv // means
    length = grid.lengths(None, key_length)[1]
    return jnp.clip(length[:, None, None] - _part_starts(grid, means)[None], 0, part)


def _part_starts(grid: Grid, means: int) -> jax.Array:
    """First token of each mean: int32 ``[means, T_c]``."""
    column = jnp.arange(grid.columns, dtype=jnp.int32)[None, :] * grid.block_kv
    return column + jnp.arange(means, dtype=jnp.int32)[:, None] * (grid.block_kv // means)


def _block_log_mass(
    scores: jax.Array,
    scale: float,
    position: jax.Array,
    key_length: jax.Array | None,
    grid: Grid,
    modifiers: ScoreModifiers,
) -> jax.Array:
    """Log-sum-exp of a sample's scores over each block, written out over the block's means.

    `scores` is float32 ``[B, N, P, means, T_c]``, `position` of the samples int32 ``[B or 1, P]``.
    The result is float32 ``[B, N, P, T_c]``: -inf where nothing is visible, NaN where a visible
    score is not finite.
    """
    means = scores.shape[3]
    count = _counts(key_length, grid, means)
    last = _part_starts(grid, means)[None] + count - 1
    is_ragged = key_length is not None or grid.key_tokens % grid.block_kv != 0
    together = _of_one_segment(position, key_length, grid, means, modifiers)
    shift = modifiers.shift()
    if shift is not None:
        position = position + shift[:, None]
    logits = []
    for g in range(means):
        score = scores[:, :, :, g] * scale
        score = jnp.where(jnp.isfinite(score), score, jnp.nan)
        there = (count[:, g] > 0)[:, None, :]
        if grid.is_causal:
            there = there & (last[:, g][:, None, :] <= position[:, :, None])
        if together is not None:
            there = there & together[:, :, :, g]
        if is_ragged:
            weight = jnp.log(jnp.maximum(count[:, g], 1).astype(jnp.float32))
            score = score + weight[:, None, None, :]
        logits.append(jnp.where(there[:, None], score, -jnp.inf))
    peak = functools.reduce(jnp.maximum, logits)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    return shift + jnp.log(functools.reduce(operator.add, (jnp.exp(x - shift) for x in logits)))


def _of_one_segment(
    position: jax.Array,
    key_length: jax.Array | None,
    grid: Grid,
    means: int,
    modifiers: ScoreModifiers,
) -> jax.Array | None:
    """Whether a mean's keys all are of a sample's segment: None or bool ``[B, P, T_c, means]``."""
    queries, keys = modifiers.query_segment_ids, modifiers.key_value_segment_ids
    if queries is None or keys is None:
        return None
    mine = jnp.take_along_axis(
        queries, jnp.broadcast_to(position, (queries.shape[0], position.shape[1])), axis=1
    )
    keys = jnp.pad(keys, ((0, 0), (0, grid.columns * grid.block_kv - grid.key_tokens)))
    found = segments.blocks(keys, grid.lengths(None, key_length)[1], grid.block_kv // means)
    least, is_one = (x.reshape(-1, 1, grid.columns, means) for x in (found.least, found.is_one))
    return is_one & (least == mine[:, :, None, None])


def _average(mass: jax.Array) -> jax.Array:
    """Normalizes log masses ``[..., samples, T_c]`` over the blocks and averages the samples."""
    broken = jnp.isnan(mass)
    mass = jnp.where(broken, -jnp.inf, mass)
    peak = jnp.max(mass, axis=-1, keepdims=True)
    weight = jnp.exp(mass - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    share = weight / jnp.where(total > 0, total, 1.0)
    seeing = jnp.sum((total > 0).astype(jnp.float32), axis=-2)
    mean = jnp.sum(share, axis=-2) / jnp.maximum(seeing, 1.0)
    return jnp.where(jnp.any(broken, axis=-2), jnp.inf, mean)
