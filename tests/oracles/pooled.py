"""Pooled attention in float64: every pooled key listed one by one, all pairs looked at at once.

It shares no code with `turbojax`. Its gradient is that of the same sum over all pairs (`Dense`),
which in float32 also says how far plain arithmetic is from the truth (`plain`, `plain_gradient`).
"""

import numpy as np

LEVELS = (1, 2, 4, 8)


def f64(x):
    return np.asarray(x).astype(np.float64)


def _groups(size, length):
    """(level, first token, end) of every group in the pyramid, `end` == `first` if it is empty."""
    return [
        (r, first, max(first, min(first + r, length)))
        for r in LEVELS
        for first in range(0, size, r)
    ]


def _seen(
    levels, groups, tokens, length, *, block_q, block_kv, is_causal, ids=None, key_length, shift=0
):
    """Which queries see which groups, bool [T, groups], from one head's levels [T_r, T_c].

    `ids` are the segments of one sequence's queries and keys.
    """
    level, first, end = np.array(groups).T
    query = np.arange(tokens)[:, None]
    if ids is not None:
        levels = np.array(levels)
        for j in range(levels.shape[1]):
            if len(set(ids[1][j * block_kv : min((j + 1) * block_kv, key_length)])) > 1:
                levels[:, j] = np.minimum(levels[:, j], 1)
    seen = (levels[query // block_q, first // block_kv] == level) & (end > first) & (query < length)
    if ids is not None:
        seen = seen & (ids[0][query] == ids[1][np.minimum(first, len(ids[1]) - 1)])
    return seen & (end - 1 <= query + shift) if is_causal else seen


def structure(
    q_shape,
    size,
    levels,
    *,
    block_q,
    block_kv,
    is_causal,
    query_lengths,
    key_lengths,
    modifiers=None,
):
    """Groups per sequence, and which query sees which: bool [B, N, T, groups]."""
    batch, tokens, heads, _ = q_shape
    levels, modifiers = np.asarray(levels), modifiers or {}
    all_groups, all_seen = [], []
    for b in range(batch):
        key_length = size if key_lengths is None else int(key_lengths[b])
        groups = _groups(size, key_length)
        length = tokens if query_lengths is None else int(query_lengths[b])
        blocks = {"block_q": block_q, "block_kv": block_kv, "is_causal": is_causal}
        blocks["shift"] = sum(
            sign * int(modifiers[name][b])
            for name, sign in (("query_offset", 1), ("key_offset", -1))
            if name in modifiers
        )
        if "query_segment_ids" in modifiers:
            names = ("query_segment_ids", "key_value_segment_ids")
            blocks["ids"] = [np.asarray(modifiers[name])[b] for name in names]
        table = levels[b % len(levels)]
        seen = [_seen(x, groups, tokens, length, key_length=key_length, **blocks) for x in table]
        all_groups.append(groups)
        all_seen.append(np.stack([seen[n % len(table)] for n in range(heads)]))
    return all_groups, np.stack(all_seen)


def real_queries(batch, tokens, query_lengths):
    """bool [B, T]."""
    lengths = [tokens] * batch if query_lengths is None else query_lengths
    return np.arange(tokens) < np.asarray(lengths)[:, None]


def sunk(out, residual, modifiers, query_lengths):
    """Output [B, T, N, H] and log-sum-exp [B, T, N] with the sinks, if there are any."""
    if not modifiers or "sinks" not in modifiers:
        return out, residual
    total = np.logaddexp(residual, f64(np.asarray(modifiers["sinks"], np.float64)))
    share = np.where(np.isneginf(residual), 0, np.exp(residual - total))
    real = real_queries(*residual.shape[:2], query_lengths)[..., None]
    return out * share[..., None], np.where(real, total, residual)


def oracle(
    query,
    key,
    value,
    levels,
    *,
    block_q,
    block_kv,
    scale,
    is_causal,
    query_lengths=None,
    key_lengths=None,
    modifiers=None,
):
    """Output [B, T, N, H] and log-sum-exp [B, T, N] in float64.

    NaN or infinity in a key or value reaches exactly the queries that see its group. Query blocks
    with a level that is none give NaN.
    """
    q, k, v = (f64(x) for x in (query, key, value))
    groups, seen = structure(
        q.shape,
        k.shape[1],
        levels,
        block_q=block_q,
        block_kv=block_kv,
        is_causal=is_causal,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        modifiers=modifiers,
    )
    out, residual = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(q.shape[0]):
        real = [(g, first, end) for g, (_, first, end) in enumerate(groups[b]) if end > first]
        for n in range(q.shape[2]):
            head = n // (q.shape[2] // k.shape[2])
            keys, values = (
                np.stack([x[b, first:end, head].mean(0) for _, first, end in real])
                if real
                else np.zeros((0, q.shape[3]))
                for x in (k, v)
            )
            counts = np.array([end - first for _, first, end in real], np.float64)
            mine = seen[b, n][:, [g for g, *_ in real]]
            for t in range(q.shape[1]):
                if not mine[t].any():
                    continue
                scores = scale * keys[mine[t]] @ q[b, t, n] + np.log(counts[mine[t]])
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values[mine[t]] / weights.sum()
                residual[b, t, n] = scores.max() + np.log(weights.sum())
    out, residual = sunk(out, residual, modifiers, query_lengths)
    return _poison(out, residual, levels, block_q, query_lengths)


def _poison(out, residual, levels, block_q, query_lengths):
    """NaN where a block of queries has a level that is none; not in the padding."""
    levels = np.asarray(levels)
    wrong = ~np.isin(levels, (0, *LEVELS)).all(-1)
    batch, tokens, heads = residual.shape
    wrong = np.broadcast_to(wrong, (batch, heads, wrong.shape[-1]))
    wrong = np.moveaxis(np.repeat(wrong, block_q, -1)[..., :tokens], 1, 2)
    if query_lengths is not None:
        wrong = wrong & (np.arange(tokens) < np.asarray(query_lengths)[:, None])[..., None]
    return np.where(wrong[..., None], np.nan, out), np.where(wrong, np.nan, residual)


class Dense:
    """The same from matrices: averages [B, groups, S], counts [B, groups], seen [B, N, T, groups].

    In the precision of `dtype`; `pooled_dtype` rounds the pooled keys and values, which is what
    keeping them in the inputs' dtype does.
    """

    def __init__(
        self,
        query,
        key,
        value,
        averages,
        counts,
        seen,
        *,
        scale,
        dtype,
        pooled_dtype=None,
        sinks=None,
        real=None,
    ):
        self.scale, self.dtype, self.pooled_dtype = dtype(scale), dtype, pooled_dtype
        self.averages = averages.astype(dtype)
        self.group = query.shape[2] // key.shape[2]
        self.query, self.key, self.value = (
            np.swapaxes(np.asarray(query).astype(dtype), 1, 2),
            self._pooled(key),
            self._pooled(value),
        )
        scores = self.query @ self.key.mT * self.scale
        scores = scores + np.log(np.maximum(counts, 1)).astype(dtype)[:, None, None]
        some = seen.any(-1, keepdims=True)
        shift = np.where(some, np.where(seen, scores, -np.inf).max(-1, keepdims=True), dtype(0))
        weights = np.where(seen, np.exp(np.where(seen, scores - shift, dtype(0))), dtype(0))
        total = np.where(some, weights.sum(-1, keepdims=True), dtype(1))
        self.weights = weights / total
        self.residual = np.where(some, np.log(total) + shift, dtype(-np.inf))[..., 0]
        self.sinks = None if sinks is None else np.asarray(sinks).astype(dtype)[:, None]
        if sinks is not None:
            with_it = np.logaddexp(self.residual, self.sinks)
            share = np.where(some[..., 0], np.exp(self.residual - with_it), dtype(0))
            self.weights = self.weights * share[..., None]
            self.residual = np.where(real[:, None], with_it, self.residual)

    def _pooled(self, x):
        """Of ``[B, S, K, H]`` every query head's groups, ``[B, N, groups, H]``."""
        x = np.asarray(x).astype(self.dtype).swapaxes(1, 2)
        x = self.averages[:, None] @ x
        if self.pooled_dtype is not None:
            x = x.astype(self.pooled_dtype).astype(self.dtype)
        return np.repeat(x, self.group, axis=1)

    def results(self):
        """Output ``[B, T, N, H]`` and log-sum-exp ``[B, T, N]``."""
        return np.swapaxes(self.weights @ self.value, 1, 2), np.swapaxes(self.residual, 1, 2)

    def gradients(self, d_out, d_residual):
        """Of query, key and value, for the cotangents of `results`."""
        d_out = np.swapaxes(np.asarray(d_out).astype(self.dtype), 1, 2)
        d_residual = np.swapaxes(np.asarray(d_residual).astype(self.dtype), 1, 2)[..., None]
        d_weights = d_out @ self.value.mT
        mean = (self.weights * d_weights).sum(-1, keepdims=True)
        d_scores = self.weights * (d_weights - mean + d_residual) * self.scale
        d_query = np.swapaxes(d_scores @ self.key, 1, 2)
        return (
            d_query,
            self._pooled_transposed(d_scores.mT @ self.query),
            self._pooled_transposed(self.weights.mT @ d_out),
        )

    def gradient_of_sinks(self, d_out, d_residual):
        """float ``[N]``."""
        d_out = np.swapaxes(np.asarray(d_out).astype(self.dtype), 1, 2)
        d_residual = np.swapaxes(np.asarray(d_residual).astype(self.dtype), 1, 2)
        real = ~np.isneginf(self.residual)
        weight = np.exp(self.sinks - np.where(real, self.residual, np.inf))
        mean = (d_out * (self.weights @ self.value)).sum(-1)
        return (weight * np.where(real, d_residual - mean, 0)).sum((0, 2))

    def _pooled_transposed(self, x):
        """The transpose of `_pooled`."""
        x = x.reshape(x.shape[0], -1, self.group, *x.shape[2:]).sum(2)
        if self.pooled_dtype is not None:
            x = x.astype(self.pooled_dtype).astype(self.dtype)
        return np.swapaxes(self.averages.mT[:, None] @ x, 1, 2)


def _dense_operands(query, key, value, levels, *, scale, **kwargs):
    """Operands of `dense`; keys and values that are not there are zeros."""
    del scale
    kwargs = {"query_lengths": None, "key_lengths": None, "modifiers": None, **kwargs}
    size = key.shape[1]
    groups, seen = structure(query.shape, size, levels, **kwargs)
    tokens = np.arange(size)
    averages = np.stack(
        [
            [(tokens >= first) & (tokens < end) for _, first, end in of_sequence]
            for of_sequence in groups
        ]
    ).astype(np.float64)
    counts = averages.sum(-1)
    averages /= np.maximum(counts, 1)[..., None]
    there = averages.any(1)[..., None, None]
    key, value = (np.where(there, x, np.zeros((), x.dtype)) for x in (key, value))
    return query, key, value, averages, counts, seen


def _dense_sinks(query, kwargs):
    """Keyword arguments of `Dense`."""
    sinks = (kwargs.get("modifiers") or {}).get("sinks")
    real = real_queries(*query.shape[:2], kwargs.get("query_lengths"))
    return {} if sinks is None else {"sinks": sinks, "real": real}


def plain(query, key, value, levels, *, scale, **kwargs):
    """Output and residual of dense float32 arithmetic, pooled keys in the inputs' dtype."""
    arrays = _dense_operands(query, key, value, levels, scale=scale, **kwargs)
    more = _dense_sinks(query, kwargs)
    rounded = Dense(*arrays, scale=scale, dtype=np.float32, pooled_dtype=query.dtype, **more)
    return rounded.results()


def oracle_gradient(query, key, value, levels, d_out, d_residual, *, scale, **kwargs):
    """Gradients of query, key and value in float64, of `Dense`; and of sinks, if there are any.

    The pooled keys are not rounded. The cotangents of queries that see nothing are ignored, but by
    sinks.
    """
    arrays = _dense_operands(query, key, value, levels, scale=scale, **kwargs)
    some = arrays[5].any(-1).swapaxes(1, 2)
    q, k, v, d_out, d_residual = (f64(x) for x in (*arrays[:3], d_out, d_residual))
    q = np.where(some.any(-1)[..., None, None], q, 0)
    more = _dense_sinks(query, kwargs)
    exact = Dense(q, k, v, *arrays[3:], scale=scale, dtype=np.float64, **more)
    d_out = np.where(some[..., None], d_out, 0)
    of_sinks = (exact.gradient_of_sinks(d_out, d_residual),) if more else ()
    return *exact.gradients(d_out, np.where(some, d_residual, 0)), *of_sinks


def plain_gradient(query, key, value, levels, d_out, d_residual, *, scale, **kwargs):
    """Gradients of `plain`, float32 throughout but for pooled keys, their gradients and results."""
    arrays = _dense_operands(query, key, value, levels, scale=scale, **kwargs)
    some = arrays[5].any(-1).swapaxes(1, 2)
    more = _dense_sinks(query, kwargs)
    rounded = Dense(*arrays, scale=scale, dtype=np.float32, pooled_dtype=query.dtype, **more)
    gradients = rounded.gradients(d_out, np.where(some, d_residual, 0))
    of_sinks = (rounded.gradient_of_sinks(d_out, d_residual),) if more else ()
    return *(x.astype(query.dtype) for x in gradients), *of_sinks
