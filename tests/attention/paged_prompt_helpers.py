"""What the tests of many queries to pages share: the checks of `paged_helpers` with many rows."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.attention.paged_helpers import (
    assert_matches_oracle,
    attend,
    equal,
    filled,
    normal,
    oracle,
    stored,
)
from tests.oracles import quantize_fp8
from tests.oracles.paged import code_bits, int8_sides

HEAD_DIMS = (128, 64, 256)
KINDS = ("auto", "turbo4", "fp8_e4m3", "fp8_e5m2", "int8", "k8v4", "int8_v4", "turbo_k2v3")
# The query rows of a KV head up to which a call is one of few queries.
_FEW_ROWS = 64
# Channels up to which e4m3 keys and values are multiplied as they are.
_MOST_E4M3_CHANNELS = 128


def with_many(call):
    """A call of few queries as one of many: the others are padding, and hold NaN."""

    @functools.wraps(call)
    def run(query, cache, tables, lengths, *, return_residual=False, **options):
        batch, count = query.shape[:2]
        counts = options.pop("query_seq_lengths", None)
        counts = jnp.full(batch, count, jnp.int32) if counts is None else counts
        tokens = max(count, _FEW_ROWS * cache.num_kv_heads // query.shape[2] + 1)
        padded = jnp.full((batch, tokens, *query.shape[2:]), jnp.nan, query.dtype)
        out, lse = call(
            padded.at[:, :count].set(query),
            cache,
            tables,
            jnp.asarray(lengths, jnp.int32),
            query_seq_lengths=jnp.asarray(counts, jnp.int32),
            return_residual=True,
            **options,
        )
        assert not np.asarray(out[:, count:].astype(jnp.float32)).any()
        return (out[:, :count], lse[:, :count]) if return_residual else out[:, :count]

    return run


mosaic = with_many(functools.partial(attend, implementation="mosaic_gpu"))


def units(cache):
    """What rounding of weights and values, and of queries and keys, costs; see `oracle`.

    All in 16 bits, codes after they were rotated back, int8 times its scales.
    """
    unit = float(jnp.finfo(cache.dtype).eps) / 2
    rounded = zip(code_bits(cache.kv_dtype), int8_sides(cache.kv_dtype), strict=True)
    is_key, is_value = (bool(bits) or is_int8 for bits, is_int8 in rounded)
    return 2 * unit if is_value else unit, unit if is_key else 0.0


def assert_right(query, cache, tables, lengths, call, **options):
    """Within the derived bound in 16 bits; of e4m3 products, off as far as their rounding is."""
    if cache.kv_dtype == "fp8_e4m3" and cache.head_dim <= _MOST_E4M3_CHANNELS:
        assert_as_e4m3(query, cache, tables, lengths, call, **options)
    else:
        given = {**options, "units": units(cache), "call": call}
        assert_matches_oracle(query, cache, tables, lengths, **given)


def assert_as_e4m3(query, cache, tables, lengths, call, **options):
    """At most twice as far from float64 as queries and weights in e4m3 are, in the mean square."""
    lengths = np.asarray(lengths, np.int32)
    out, lse = call(query, cache, tables, lengths, return_residual=True, **options)
    want, _, want_lse, _ = oracle(query, cache, tables, lengths, **options)
    plain, plain_lse = in_e4m3(query, cache, tables, lengths, **options)
    finite = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.asarray(lse, np.float64)[~finite], want_lse[~finite])
    own = float(jnp.finfo(query.dtype).eps)
    results = ((out, plain, want, own), (lse, plain_lse, want_lse, 2.0**-20))
    for got, rounded, exact, unit in results:
        got, rounded, exact = (np.asarray(x, np.float64)[finite] for x in (got, rounded, exact))
        error, allowed = _size(got - exact), 2 * _size(rounded - exact) + unit * _size(exact)
        assert error <= allowed, f"{error} must be at most {allowed}"


def _size(x):
    return np.sqrt(np.mean(np.square(x)))


def in_e4m3(query, cache, tables, lengths, **options):
    """Outputs and log-sum-exps with e4m3 queries, a scale for each row, and e4m3 weights of 448."""
    codes, scales = quantize_fp8(query, axis=-1)
    rounded = codes.astype(np.float64) * np.asarray(scales, np.float64)[..., None]
    _, _, lse, _ = oracle(rounded, cache, tables, lengths, **options)
    out, (batch, count, heads, dim) = np.zeros(rounded.shape), rounded.shape
    scale, cap = options.get("scale"), options.get("logits_soft_cap")
    window, real = options.get("local_window_size"), options.get("query_seq_lengths")
    scale = dim**-0.5 if scale is None else scale
    for b in range(batch):
        keys, values = stored(cache, tables, b, int(lengths[b]))
        n = count if real is None else int(real[b])
        for t, h in np.ndindex(n, heads):
            last = int(lengths[b]) - n + t
            if last < 0:
                continue
            seen = slice(0 if window is None else max(0, last - window[0]), last + 1)
            k, v = (x[seen, h // (heads // x.shape[1])] for x in (keys, values))
            score = scale * k @ rounded[b, t, h]
            score = score if cap is None else cap * np.tanh(score / cap)
            p = np.exp(score - score.max())
            weights = (448 * p).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448
            out[b, t, h] = weights @ v / p.sum()
    return out, lse


# Lengths, KV heads, head dim, query heads and tokens, page size.
LARGE = {
    "a prompt": ((1300,), 2, 128, 8, 1300, 64),
    "chunks of two": ((3000, 1030), 4, 128, 16, 256, 16),
    "odd tokens": ((700, 5, 0), 2, 64, 12, 77, 32),
    "no groups": ((515, 300), 4, 64, 4, 300, 128),
    "head dim 256": ((900, 130), 2, 256, 16, 130, 128),
    "eight heads a group": ((2500, 1025), 2, 128, 16, 100, 64),
}
OPTIONS = {
    "plain": {},
    "window": {"local_window_size": (200, 0)},
    "soft cap": {"logits_soft_cap": 5.0},
    "window, cap, negative scale": {
        "local_window_size": 33, "logits_soft_cap": 3.0, "scale": -0.2,
    },
    "scale of zero": {"scale": 0.0},
}  # fmt: skip


def large(name, kv_dtype, dtype=jnp.bfloat16):
    """Arguments of a call of full size, some of whose queries are padding."""
    lengths, kv_heads, dim, heads, count, page_size = LARGE[name]
    cache, tables = filled(kv_dtype, lengths, kv_heads, dim, page_size, dtype=dtype)
    query = normal(4, (len(lengths), count, heads, dim), dtype)
    counts = np.asarray([count, max(count - 3, 0), 2][: len(lengths)], np.int32)
    return query, cache, tables, np.asarray(lengths, np.int32), counts


# Tokens held, the last ones that are queries, and these cut into chunks: how many, and for how many
# their program was made. Programs take long to compile, and chunks share them.
CUTS = (
    (1030, 1030, ((300, 400), (400, 400), (330, 400))),
    (4400, 200, ((17, 17), (33, 100), (100, 100), (50, 100))),
)


def check_cuts(call, kv_dtype, dtype=jnp.bfloat16, head_dim=128, options=None):
    """A prompt in chunks, whole ones and then in parts: of either the same bits of every query."""
    for length, last, chunks in CUTS:
        _check_cuts(call, kv_dtype, dtype, head_dim, options or {}, length, last, chunks)


def _check_cuts(call, kv_dtype, dtype, head_dim, options, length, last, chunks):
    cache, tables = filled(kv_dtype, (length,), head_dim=head_dim, dtype=dtype)
    query = normal(13, (1, last, 8, head_dim), dtype)
    run = functools.partial(call, return_residual=True, **options)
    whole = jax.device_get(run(query, cache, tables, jnp.asarray([length], jnp.int32)))
    start = 0
    for size, room in chunks:
        stop = start + size
        chunk = jnp.full((1, room, *query.shape[2:]), jnp.nan, dtype)
        chunk = chunk.at[:, :size].set(query[:, start:stop])
        held = jnp.asarray([length - last + stop], jnp.int32)
        got = run(chunk, cache, tables, held, query_seq_lengths=jnp.asarray([size], jnp.int32))
        equal([x[:, :size] for x in jax.device_get(got)], [x[:, start:stop] for x in whole])
        start = stop
    assert start == last
