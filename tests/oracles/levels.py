"""Levels by definition: loops over blocks, samples and pairs, in float64 and Python integers."""

import math
from fractions import Fraction

import numpy as np


def visible_blocks(i, query_length, key_length, block_q, block_kv, is_causal):
    """How many blocks a row sees, by looking at every token."""
    queries = range(i * block_q, min((i + 1) * block_q, query_length))
    if not queries:
        return 0
    seen = [k for k in range(key_length) if not is_causal or k <= queries[-1]]
    return len({k // block_kv for k in seen})


def forced_blocks(i, columns, block_q, block_kv, is_causal):
    if not is_causal:
        return set()
    own = {p // block_kv for p in range(i * block_q, (i + 1) * block_q)}
    return {0, *own, *range(max(own) + 1, columns)}


def importance(
    query,
    key,
    *,
    block_q,
    block_kv,
    is_causal,
    samples,
    means,
    query_length,
    key_length,
    rounded,
    ids=None,
    shift=0,
):
    """Shares of one head's sampled attention.

    Args:
      query: float64 `[T, H]`.
      key: float64 `[S, H]`.
      block_q, block_kv, is_causal, samples, means: as in `block_importance`.
      query_length, key_length: integers.
      rounded: what rounds a mean to the keys' dtype.
      ids: segments of queries and of keys, or None.
      shift: a query's position less that of a key of the same index.

    Returns:
      float64 `[T_r, T_c]`.
    """
    rows, columns = -(-len(query) // block_q), -(-len(key) // block_kv)
    part = block_kv // means
    result = np.zeros((rows, columns))
    for i in range(rows):
        if i * block_q >= query_length:
            continue
        shares = []
        for s in range(samples):
            position = i * block_q + (s + 1) * block_q // samples - 1
            position = min(position, query_length - 1)
            logits = np.full((columns, means), -np.inf)
            for j in range(columns):
                for g in range(means):
                    start = j * block_kv + g * part
                    group = key[start : min(start + part, key_length)]
                    last = start + len(group) - 1
                    if len(group) == 0 or (is_causal and last > position + shift):
                        continue
                    if ids is not None and set(ids[1][start : last + 1]) != {ids[0][position]}:
                        continue
                    score = query[position] @ rounded(group.mean(0)) / math.sqrt(len(query[0]))
                    logits[j, g] = score + math.log(len(group))
            if logits.max() > -np.inf:
                weight = np.exp(logits - logits.max()).sum(1)
                shares.append(weight / weight.sum())
        if shares:
            result[i] = np.mean(shares, 0)
    return result


def segments_meet(queries, keys):
    """Whether blocks with these segments count as having one in common."""
    if not queries or not keys:
        return False
    if len(queries) > 1 and len(keys) > 1:
        return min(queries) <= max(keys) and min(keys) <= max(queries)
    return bool(queries & keys)


def order(row, visible, forced):
    """Blocks of a row from the most to the least important, and their masses in 2^-24.

    `visible` says how many, the first ones, or which.
    """
    visible = range(visible) if isinstance(visible, int) else visible
    bits = (len(row) - 1).bit_length()
    kept = np.minimum(np.where(np.isfinite(row), row, 0), np.float32(1)).astype(np.float32)
    kept = (kept.view(np.int32) >> bits << bits).view(np.float32)
    ranked = sorted(
        visible,
        key=lambda j: (j in forced, not np.isfinite(row[j]), kept[j], j),
        reverse=True,
    )
    return ranked, [math.floor(Fraction(float(kept[j])) * 2**24) for j in ranked]


def top_k(row, visible, forced, fractions):
    """Levels of one row; fractions are strings or Fractions."""
    levels = np.zeros(len(row), int)
    ranked, _ = order(row, visible, forced)
    counts = [math.ceil(Fraction(f) * len(ranked)) for f in fractions]
    counts[0] = max(counts[0], 1)
    for rank, j in enumerate(ranked):
        fitting = [r for r, count in zip((1, 2, 4, 8), counts, strict=True) if rank < count]
        levels[j] = 1 if j in forced else (fitting or [0])[0]
    return levels


def threshold(row, visible, forced, bounds, least):
    levels = np.zeros(len(row), int)
    ranked, masses = order(row, visible, forced)
    covered = 0
    for rank, (j, mass) in enumerate(zip(ranked, masses, strict=True)):
        fitting = [
            r
            for r, bound in zip((1, 2, 4, 8), bounds, strict=True)
            if Fraction(covered, 2**24) < Fraction(bound)
        ]
        first = rank < max(1, math.ceil(Fraction(least) * len(ranked)))
        levels[j] = 1 if first or j in forced else (fitting or [0])[0]
        covered += mass
    return levels


def similarity(key, block_kv, key_length):
    """Mean cosine of all pairs in groups of 2, 4, 8: float64 `[3, T_c]`."""
    columns = -(-len(key) // block_kv)
    result = np.ones((3, columns))
    for level, r in enumerate((2, 4, 8)):
        for j in range(columns):
            cosines = []
            for start in range(j * block_kv, (j + 1) * block_kv, r):
                group = key[start : min(start + r, key_length)]
                for a in range(len(group)):
                    for b in range(a):
                        norm = np.linalg.norm(group[a]) * np.linalg.norm(group[b])
                        cosines.append(group[a] @ group[b] / norm if norm > 0 else 0.0)
            if cosines:
                result[level, j] = np.mean(cosines)
    return result


def capped(level, alike, limits):
    """A level, made finer until the keys are alike enough; `alike` of 2, 4 and 8."""
    while level > 1 and not alike[level.bit_length() - 2] > limits[level.bit_length() - 2]:
        level //= 2
    return level
