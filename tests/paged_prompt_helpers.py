"""What the tests of many queries to pages share: the checks of `paged_helpers` with many rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracles.paged import code_bits
from paged_helpers import attend, equal, filled, normal

HEAD_DIMS = (128, 64, 256)
KINDS = ("auto", "turbo4", "fp8_e4m3", "fp8_e5m2", "k8v4")
# More than the 64 query rows of a KV head that make a call one of few queries, with two heads.
_TOKENS = 40


def with_many(call):
    """A call of few queries as one of many: the others are padding, and hold NaN."""

    @functools.wraps(call)
    def run(query, cache, tables, lengths, *, return_residual=False, **options):
        batch, count = query.shape[:2]
        counts = options.pop("query_seq_lengths", None)
        counts = jnp.full(batch, count, jnp.int32) if counts is None else counts
        padded = jnp.full((batch, max(count, _TOKENS), *query.shape[2:]), jnp.nan, query.dtype)
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

    All in 16 bits, codes after they were rotated back; e4m3 keys multiply queries that are rounded
    to e4m3, and e4m3 values weights that are.
    """
    unit = float(jnp.finfo(cache.dtype).eps) / 2
    key_bits, value_bits = code_bits(cache.kv_dtype)
    return 2 * unit if value_bits else unit, unit if key_bits else 0.0


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


def check_cuts(call, kv_dtype, dtype=jnp.bfloat16, head_dim=128, options=None):
    """A prompt in chunks, whole ones and then in parts: of either the same bits of every query."""
    options = options or {}
    for length, last, chunks in ((1030, 1030, (300, 400, 330)), (4400, 200, (17, 33, 100, 50))):
        _check_cuts(call, kv_dtype, dtype, head_dim, options, length, last, chunks)


def _check_cuts(call, kv_dtype, dtype, head_dim, options, length, last, chunks):
    cache, tables = filled(kv_dtype, (length,), head_dim=head_dim, dtype=dtype)
    query = normal(13, (1, last, 8, head_dim), dtype)
    run = functools.partial(call, return_residual=True, **options)
    whole = run(query, cache, tables, jnp.asarray([length], jnp.int32))
    start = 0
    for size in chunks:
        stop = start + size
        held = jnp.asarray([length - last + stop], jnp.int32)
        got = run(query[:, start:stop], cache, tables, held)
        equal(jax.device_get(got), [x[:, start:stop] for x in jax.device_get(whole)])
        start = stop
    assert start == last
