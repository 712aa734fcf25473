"""What the tests of pooled attention share: the float64 oracle, named cases, and their operands.

The oracle lists every pooled key one by one and looks at all pairs at once. It shares no code with
`turbojax`. Its gradient is that of the same sum over all pairs (`Dense`), which in float32 also
says how far plain arithmetic is from the truth (`plain`, `plain_gradient`).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

LEVELS = (1, 2, 4, 8)
EPS = float(jnp.finfo(jnp.float32).eps)


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape, its blocks and options, and how its levels are drawn.

    Attributes:
      tokens: `T`, the queries.
      size: `S`, the keys.
      heads: query heads `N`.
      kv_heads: `K`.
      batch: `B`.
      block_q: queries to a row of levels.
      block_kv: keys to a level.
      is_causal: whether it is.
      probabilities: of the levels 0, 1, 2, 4, 8, of which levels are drawn.
      shared: "batch", "heads", "both" or "none": which axes of the levels have size 1.
      scale: of the scores, or None.
      query_lengths: per sequence, or None.
      key_lengths: per sequence, or None.
      segments: of how many each sequence is packed, or None; keys too.
      sorted_ids: whether segments follow each other with ascending ids; otherwise ids come and go.
      query_offsets: per sequence, or None.
      key_offsets: per sequence, or None.
      with_sinks: whether each head has one.
      xla_only: blocks that are no powers of two from 16 on, which no kernel has to take.
    """

    tokens: int
    size: int
    heads: int = 2
    kv_heads: int = 1
    batch: int = 2
    block_q: int = 32
    block_kv: int = 32
    is_causal: bool = False
    probabilities: tuple[float, ...] = (0.2, 0.2, 0.2, 0.2, 0.2)
    shared: str = "none"
    scale: float | None = None
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    segments: int | None = None
    sorted_ids: bool = True
    query_offsets: tuple[int, ...] | None = None
    key_offsets: tuple[int, ...] | None = None
    with_sinks: bool = False
    xla_only: bool = False


def _only(level):
    return tuple(float(r == level) for r in (0, *LEVELS))


CASES = {
    **{f"level {r}": Case(96, 96, probabilities=_only(r)) for r in (0, *LEVELS)},
    **{
        f"level {r}, causal, ragged": Case(101, 101, is_causal=True, probabilities=_only(r))
        for r in LEVELS
    },
    "mixture": Case(128, 160, heads=4, kv_heads=2),
    "mixture, causal": Case(160, 160, heads=4, kv_heads=2, is_causal=True),
    "causal, other blocks": Case(150, 150, block_q=16, block_kv=64, is_causal=True),
    "causal, larger query blocks": Case(150, 150, block_q=64, block_kv=16, is_causal=True),
    "causal, more keys": Case(70, 203, is_causal=True),
    "causal, more queries": Case(203, 70, is_causal=True),
    "blocks of 128": Case(300, 300, batch=1, block_q=128, block_kv=128, is_causal=True),
    "tail of one token": Case(65, 97),
    "tail of seven tokens": Case(65, 103),
    "shorter than a block": Case(11, 13),
    "one token": Case(1, 1, heads=1, probabilities=(0.0, 0.25, 0.25, 0.25, 0.25)),
    "one query": Case(1, 129),
    "mostly skipped": Case(128, 128, heads=4, probabilities=(0.8, 0.05, 0.05, 0.05, 0.05)),
    "grouped queries": Case(90, 110, heads=6, kv_heads=2, is_causal=True),
    "one level array": Case(90, 110, heads=4, kv_heads=2, shared="both"),
    "levels shared by heads": Case(90, 110, heads=4, kv_heads=2, shared="heads"),
    "levels shared by the batch": Case(90, 110, heads=4, kv_heads=2, shared="batch"),
    "scale": Case(70, 70, scale=0.6),
    "negative scale": Case(70, 70, scale=-0.4),
    "keys' lengths": Case(70, 130, batch=4, key_lengths=(130, 61, 0, 5)),
    "queries' lengths": Case(130, 70, batch=3, query_lengths=(130, 61, 0)),
    "both lengths, causal": Case(
        130,
        133,
        batch=4,
        heads=4,
        kv_heads=2,
        is_causal=True,
        query_lengths=(130, 67, 100, 12),
        key_lengths=(133, 67, 0, 43),
    ),
    "smallest blocks": Case(50, 50, block_q=1, block_kv=8, is_causal=True, xla_only=True),
    "odd blocks": Case(77, 131, block_q=7, block_kv=24, is_causal=True, xla_only=True),
    "queries' block beyond a tile": Case(
        700, 60, batch=1, heads=1, block_q=600, is_causal=True, xla_only=True
    ),
}
KERNEL_CASES = {name: case for name, case in CASES.items() if not case.xla_only}


def random_levels(rng, shape, probabilities):
    """int8 levels, drawn with the probabilities of 0, 1, 2, 4 and 8."""
    return rng.choice(np.array([0, *LEVELS], np.int8), shape, p=probabilities)


def operands(case, dtype=jnp.float32, head_dim=16, seed=0):
    """Query, key, value, levels and the cotangents of output and residual."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(case.batch, case.tokens, case.heads, head_dim))
    # Neighbours are alike, as where one pools; values have a mean.
    walk = rng.normal(size=(2, case.batch, case.size + 1, case.kv_heads, head_dim))
    k, v = (
        0.8 * walk[:, :, 1:] + 0.6 * walk[:, :, :-1] + np.array([0.0, 0.25]).reshape(2, 1, 1, 1, 1)
    )
    d_out = rng.normal(size=q.shape)
    d_residual = rng.normal(size=q.shape[:3])
    shape = (
        1 if case.shared in ("batch", "both") else case.batch,
        1 if case.shared in ("heads", "both") else case.heads,
        -(-case.tokens // case.block_q),
        -(-case.size // case.block_kv),
    )
    levels = jnp.asarray(random_levels(rng, shape, case.probabilities))
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in (q, k, v, d_out))
    return q, k, v, levels, d_out, jnp.asarray(d_residual, jnp.float32)


def segment_ids(case, tokens, seed):
    """int32 ``[B, tokens]``: pieces of random lengths, of one token too."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(case.batch):
        cuts = np.sort(rng.integers(1, max(tokens, 2), case.segments - 1))
        piece = np.searchsorted(cuts, np.arange(tokens), side="right")
        names = np.arange(case.segments) if case.sorted_ids else rng.integers(-1, 3, case.segments)
        rows.append(names[piece])
    return np.stack(rows).astype(np.int32)


def extras_of(case):
    """What `Case` says of segments, offsets and sinks, by the names of the API."""
    found = {}
    if case.segments is not None:
        same = 7 if case.tokens == case.size else 8
        found["query_segment_ids"] = segment_ids(case, case.tokens, 7)
        found["key_value_segment_ids"] = segment_ids(case, case.size, same)
    if case.query_offsets is not None:
        found["query_offset"] = np.array(case.query_offsets, np.int32)
    if case.key_offsets is not None:
        found["key_offset"] = np.array(case.key_offsets, np.int32)
    if case.with_sinks:
        found["sinks"] = np.linspace(-1, 2, case.heads).astype(np.float32)
    return found


def options(case, head_dim=16):
    """The oracle's keyword arguments."""
    more = extras_of(case)
    return {
        **({"extras": more} if more else {}),
        "block_q": case.block_q,
        "block_kv": case.block_kv,
        "scale": 1 / math.sqrt(head_dim) if case.scale is None else case.scale,
        "is_causal": case.is_causal,
        "query_lengths": case.query_lengths,
        "key_lengths": case.key_lengths,
    }


def api_options(case):
    """What is static in a call of `pooled_attention`, hashable, and the lengths it is given."""
    names = ("block_q", "block_kv", "scale", "is_causal")
    static = tuple((name, getattr(case, name)) for name in names)
    lengths = {
        "query_seq_lengths": case.query_lengths,
        "key_value_seq_lengths": case.key_lengths,
    }
    found = {k: jnp.asarray(v, jnp.int32) for k, v in lengths.items() if v is not None}
    return static, found | {k: jnp.asarray(v) for k, v in extras_of(case).items()}


def f64(x):
    return np.asarray(
        jnp.asarray(x).astype(jnp.float32) if x.dtype != np.float64 else x, np.float64
    )


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
    extras=None,
):
    """Groups per sequence, and which query sees which: bool [B, N, T, groups]."""
    batch, tokens, heads, _ = q_shape
    levels, extras = np.asarray(levels), extras or {}
    all_groups, all_seen = [], []
    for b in range(batch):
        key_length = size if key_lengths is None else int(key_lengths[b])
        groups = _groups(size, key_length)
        length = tokens if query_lengths is None else int(query_lengths[b])
        blocks = {"block_q": block_q, "block_kv": block_kv, "is_causal": is_causal}
        blocks["shift"] = sum(
            sign * int(extras[name][b])
            for name, sign in (("query_offset", 1), ("key_offset", -1))
            if name in extras
        )
        if "query_segment_ids" in extras:
            names = ("query_segment_ids", "key_value_segment_ids")
            blocks["ids"] = [np.asarray(extras[name])[b] for name in names]
        table = levels[b % len(levels)]
        seen = [_seen(x, groups, tokens, length, key_length=key_length, **blocks) for x in table]
        all_groups.append(groups)
        all_seen.append(np.stack([seen[n % len(table)] for n in range(heads)]))
    return all_groups, np.stack(all_seen)


def real_queries(batch, tokens, query_lengths):
    """bool [B, T]."""
    lengths = [tokens] * batch if query_lengths is None else query_lengths
    return np.arange(tokens) < np.asarray(lengths)[:, None]


def sunk(out, residual, extras, query_lengths):
    """Output [B, T, N, H] and log-sum-exp [B, T, N] with the sinks, if there are any."""
    if not extras or "sinks" not in extras:
        return out, residual
    total = np.logaddexp(residual, f64(np.asarray(extras["sinks"], np.float64)))
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
    extras=None,
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
        extras=extras,
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
    out, residual = sunk(out, residual, extras, query_lengths)
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
            self._spread(d_scores.mT @ self.query),
            self._spread(self.weights.mT @ d_out),
        )

    def gradient_of_sinks(self, d_out, d_residual):
        """float ``[N]``."""
        d_out = np.swapaxes(np.asarray(d_out).astype(self.dtype), 1, 2)
        d_residual = np.swapaxes(np.asarray(d_residual).astype(self.dtype), 1, 2)
        real = ~np.isneginf(self.residual)
        weight = np.exp(self.sinks - np.where(real, self.residual, np.inf))
        mean = (d_out * (self.weights @ self.value)).sum(-1)
        return (weight * np.where(real, d_residual - mean, 0)).sum((0, 2))

    def _spread(self, x):
        """The transpose of `_pooled`."""
        x = x.reshape(x.shape[0], -1, self.group, *x.shape[2:]).sum(2)
        if self.pooled_dtype is not None:
            x = x.astype(self.pooled_dtype).astype(self.dtype)
        return np.swapaxes(self.averages.mT[:, None] @ x, 1, 2)


def _dense_operands(query, key, value, levels, *, scale, **kwargs):
    """Operands of `dense`; keys and values that are not there are zeros."""
    del scale
    kwargs = {"query_lengths": None, "key_lengths": None, "extras": None, **kwargs}
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
    sinks = (kwargs.get("extras") or {}).get("sinks")
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


def worst(got, want):
    """Largest distance of the finite ones; what is not finite must be equal."""
    got, want = f64(got), f64(want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)).max()


def assert_as_good_as_plain(got, want, of_plain, floor=32 * EPS):
    """Each as near to the oracle as twice plain arithmetic is, plus its own rounding and a floor.

    The floor is a few units in the last place of the largest element.
    """
    for x, y, z in zip(got, want, of_plain, strict=True):
        finite = np.isfinite(y)
        largest = np.abs(np.where(finite, y, 0)).max()
        own = 0 if x.dtype == jnp.float32 else float(jnp.finfo(x.dtype).eps) * largest
        allowed = 2 * worst(z, y) + own + floor * max(largest, 1)
        assert worst(x, y) <= allowed
        assert allowed <= 0.05 * max(largest, 1)  # plain arithmetic is close: no licence
