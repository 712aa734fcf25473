"""`decode` over caches of every shape against the oracle, and bounds of what it adds in error."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention_helpers import EXACT, MODES, SAS_2, SAS_E, assert_agrees, oracle_softmax

import turbojax as tj

STATIC = ("scale", "local_window_size", "logits_soft_cap", "return_residual")
decode = jax.jit(tj.decode, static_argnames=STATIC)
append = jax.jit(tj.append)
prefill = jax.jit(tj.prefill)
dequantize = jax.jit(tj.dequantize)


def tokens(seed, batch, count, heads, head_dim):
    """Keys or values [B, count, K, H] with a few loud channels and heads of different size."""
    rng = np.random.default_rng(seed)
    loud = np.where(rng.random((heads, head_dim)) < 0.05, 3.0, 1.0)
    size = 0.6 + 0.3 * rng.permutation(heads)[:, None]
    x = rng.normal(size=(batch, count, heads, head_dim)) * loud * size + 0.2
    return jnp.asarray(x, jnp.float32)


def queries(seed, batch, count, heads, head_dim):
    rng = np.random.default_rng(1000 + seed)
    return jnp.asarray(rng.normal(size=(batch, count, heads, head_dim)), jnp.float32)


@functools.cache
def filled(fields, prompt, added, heads, head_dim, max_length=None):
    """A cache of which `prompt` [B] tokens were prefilled and `added` [B] appended.

    What is stored does not depend on mode and softmax, so that one cache serves all of them.
    """
    batch = len(added)
    max_length = max_length or max(np.add(prompt, added)) + 5
    config = tj.TurboConfig(mode="float", softmax=EXACT, **dict(fields))
    cache = tj.init_cache(batch, max_length, heads, head_dim, config=config, dtype=jnp.float32)
    if max(prompt):
        k, v = (tokens(i, batch, max(prompt), heads, head_dim) for i in (0, 1))
        lengths = jnp.asarray(prompt, jnp.int32)
        _, cache = prefill(k, k, v, cache, key_value_seq_lengths=lengths)
    if max(added):
        k, v = (tokens(i, batch, max(added), heads, head_dim) for i in (2, 3))
        cache = append(cache, k, v, lengths=jnp.asarray(added, jnp.int32))
    cache.validate()
    return cache, tuple(np.asarray(x) for x in dequantize(cache))


def under(cache, mode, softmax=SAS_E):
    """The cache read with other numerics."""
    return dataclasses.replace(
        cache, config=dataclasses.replace(cache.config, mode=mode, softmax=softmax)
    )


def splits(cache):
    """(start, stop) of the blocks of each sequence and of its buffer, from its lengths alone."""
    block = cache.config.block_kv
    result = []
    for length, buffered in zip(cache.lengths.tolist(), cache.buffer_lengths.tolist(), strict=True):
        blocks = [(start, start + block) for start in range(0, length - buffered, block)]
        result.append(blocks + ([(length - buffered, length)] if buffered else []))
    return result


def assert_matches_oracle(query, cache, key, value, **options):
    want = oracles.decode(
        query,
        key,
        value,
        splits(cache),
        lengths=cache.lengths.tolist(),
        mode=cache.config.mode,
        softmax=oracle_softmax(cache.config.softmax),
        **options,
    )
    out, residual = decode(query, cache, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert_agrees(out, residual, want, value)


# Against the oracle ------------------------------------------------------------------------------

SMALL = (("block_q", 16), ("block_kv", 16), ("buffer_size", 16))
HALF = (("num_low_bit_key_heads", 1), ("num_low_bit_value_heads", 1))
# Configuration; (prompt, added) of each sequence; query heads, KV heads, head dim, queries; rest.
CASES = {
    "one token": ((), [(0, 1)], (4, 4, 64, 1), {}),
    "prompt alone": ((), [(130, 0)], (2, 2, 64, 1), {}),
    "ragged": (HALF, [(70, 30), (0, 40), (0, 0), (64, 0)], (4, 2, 80, 1), {}),
    "eight queries a key": ((), [(70, 3)], (8, 1, 96, 1), {}),
    "several tokens, window": (
        SMALL + HALF,
        [(100, 9), (20, 2), (0, 2)],
        (4, 2, 64, 3),
        {"local_window_size": (25, 0)},
    ),
    "wide, soft cap, scale": (
        (("block_kv", 32), ("buffer_size", 64)),
        [(90, 20)],
        (2, 1, 256, 1),
        {"logits_soft_cap": 4.0, "scale": 0.2},
    ),
    "long blocks, symmetric window": (
        (("block_kv", 128), ("buffer_size", 128), ("key_bits", 3), ("value_bits", 3)),
        [(300, 60)],
        (2, 2, 128, 1),
        {"local_window_size": 150},
    ),
    "mixed bits, long buffer": (
        (
            ("value_bits", 3),
            ("num_low_bit_key_heads", 3),
            ("num_low_bit_value_heads", 1),
            ("buffer_size", 128),
        ),
        [(0, 200), (140, 7)],
        (4, 4, 64, 2),
        {},
    ),
}
PAIRS = [(m, s) for s in (EXACT, SAS_E, SAS_2) for m in MODES]
GRID = [
    pytest.param(case, *pair, id="-".join(map(str, (case, *pair))))
    for i, case in enumerate(CASES)
    for pair in (PAIRS[(2 * i) % 12], PAIRS[(2 * i + 5) % 12])
]


def test_the_grid_meets_every_mode_and_softmax():
    assert {param.values[1:] for param in GRID} == set(PAIRS)


@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_oracle(case, mode, softmax):
    """Attention over what `dequantize` reads, with the same numerics, after prompt and appends."""
    fields, sequences, (heads, kv_heads, head_dim, count), options = CASES[case]
    cache, stored = filled(fields, *zip(*sequences, strict=True), kv_heads, head_dim)
    query = queries(1, len(sequences), count, heads, head_dim)
    assert_matches_oracle(query, under(cache, mode, softmax), *stored, **options)


@pytest.mark.parametrize("window", [None, 300])
def test_long_caches(window):
    """Thousands of tokens, more than are read at a time, in a cache not filled to its end."""
    cache, stored = filled((), (0, 0), (2430, 1100), 1, 64, max_length=2600)
    query = queries(2, 2, 1, 2, 64)
    assert_matches_oracle(query, under(cache, "int8"), *stored, local_window_size=window)


def test_the_room_left_does_not_matter():
    """The same tokens in a longer cache: grouped otherwise, merged to the same result."""
    query = queries(3, 2, 1, 4, 64)
    short, long = (
        decode(query, filled(HALF, (0, 0), (100, 30), 2, 64, max_length=n)[0]) for n in (101, 1500)
    )
    np.testing.assert_allclose(short, long, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_one_token_returns_its_value(mode):
    """Whatever the query: its weight is the only one. Queries before it see nothing."""
    cache, (_, value) = filled(SMALL, (0, 0), (1, 1), 2, 64, max_length=32)
    value = np.repeat(value[:, :1], 2, axis=2)
    out = np.asarray(decode(queries(4, 2, 3, 4, 64), under(cache, mode)))
    np.testing.assert_array_equal(out[:, :2], np.zeros((2, 2, 4, 64)))
    # e4m3 holds 0.9996 * 448 as 448.
    np.testing.assert_allclose(out[:, 2:], value, rtol=1e-3 if "fp8" in mode else 1e-5)


# Errors ------------------------------------------------------------------------------------------


def test_int8_errs_by_its_quantizers_alone():
    """Exact softmax: int8 is exact attention of rounded queries over the cache, up to P.

    A weight is rounded by at most half of 1/119 of its split's largest.
    """
    cache, stored = filled(HALF, (0, 0), (100, 30), 2, 64, max_length=101)
    query = queries(5, 2, 1, 4, 64)
    codes, scale = oracles.quantize_int8(query, -1)
    rounded = codes * scale[..., None].astype(np.float64)
    key, value = (x.astype(np.float64) for x in stored)
    k, v = (np.repeat(np.moveaxis(x, 2, 1), 2, 1) for x in (key, value))
    scores = np.moveaxis(rounded, 2, 1) @ np.swapaxes(k, -1, -2) / 8
    here = np.arange(key.shape[1]) < np.asarray(cache.lengths)[:, None, None, None]
    scores = np.where(here, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.moveaxis(p @ v / p.sum(-1, keepdims=True), 1, 2)
    bound = np.zeros((*p.shape[:-1], 64))
    for b, parts in enumerate(splits(cache)):
        for start, stop in parts:
            part = p[b, :, :, start:stop]
            step = np.broadcast_to(part.max(-1, keepdims=True) / 238, part.shape)
            bound[b] += step @ np.abs(v[b, :, start:stop])
    bound = np.moveaxis(bound / p.sum(-1, keepdims=True), 1, 2)
    error = np.abs(np.asarray(decode(query, under(cache, "int8", EXACT)), np.float64) - want)
    assert (error <= bound + 1e-5).all()
    assert error.mean() < 4e-3


@functools.cache
def constant():
    """4150 tokens with a value of 1.5, and the values as they are stored."""
    cache = tj.init_cache(1, 4200, 1, 64, dtype=jnp.float32)
    cache = append(cache, tokens(7, 1, 4150, 1, 64), jnp.full((1, 4150, 1, 64), 1.5))
    return cache, np.asarray(dequantize(cache)[1])[0, :4150]


@pytest.mark.parametrize(
    ("mode", "softmax", "limit"),
    [("float", EXACT, 1e-5), ("float", SAS_E, 1e-5), ("float", SAS_2, 1e-5), ("int8", SAS_E, 5e-3)],
)
def test_constant_values_come_back(mode, softmax, limit):
    """A constant V is returned however long the cache: no split decays another."""
    cache, stored = constant()
    assert np.abs(stored / 1.5 - 1).max() < 0.01
    out = np.asarray(decode(queries(7, 1, 1, 2, 64), under(cache, mode, softmax)))
    # A block's code and the buffer's may round the constant differently.
    assert ((out >= stored.min() * (1 - limit)) & (out <= stored.max() * (1 + limit))).all()


# Non-finite tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prompt", "appended"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("mode", ["int8", "float"])
def test_non_finite_tokens_reach_who_sees_them(mode, side, bad, how):
    """Queries that see the token turn NaN; those that cannot see its block keep their bits.

    Queries stand at 19..78 and see 12 tokens back. The token at 40 lies in the block 32..47; from
    the next block on appended tokens are NaN, and of a prompt only what is buffered, from 64.
    """
    k, v = (tokens(8 + i, 1, 79, 2, 64) for i in (0, 1))
    query = queries(8, 1, 60, 4, 64)
    config = tj.TurboConfig(**dict(SMALL))
    empty = tj.init_cache(1, 100, 2, 64, config=config, dtype=jnp.float32)

    def run(k, v):
        cache = append(empty, k, v) if how == "appended" else prefill(k, k, v, empty)[1]
        return np.asarray(decode(query, under(cache, mode), local_window_size=12))[0]

    clean = run(k, v)
    spoiled = [k, v]
    spoiled[side] = spoiled[side].at[0, 40, 1, 9].set(bad)
    got = run(*spoiled)
    at = dict(zip(range(19, 79), range(60), strict=True))
    np.testing.assert_array_equal(got[:, :2], clean[:, :2])
    np.testing.assert_array_equal(got[: at[32]], clean[: at[32]])
    assert np.isnan(got[at[40] : at[53], 2:]).all()
    assert np.isnan(got[at[64] :, 2:]).all()
    if how == "prompt":
        np.testing.assert_array_equal(got[at[60] : at[64]], clean[at[60] : at[64]])
    else:
        assert np.isnan(got[at[48] :, 2:]).all()


# Memory ------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_cache():
    """Blocks are read a chunk at a time: the cache is never dequantized as a whole."""

    def temporary_bytes(max_length):
        cache = jax.eval_shape(lambda: tj.init_cache(1, max_length, 2, 64, dtype=jnp.float32))
        query = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.float32)
        return jax.jit(tj.decode).lower(query, cache).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(4096), temporary_bytes(16384)
    assert long <= 1.1 * short


def test_gradients_are_refused():
    cache, _ = filled(SMALL, (0, 0), (1, 1), 2, 64, max_length=32)
    with pytest.raises(NotImplementedError, match="gradient"):
        jax.grad(lambda q: tj.decode(q, cache).sum())(queries(9, 2, 3, 4, 64))
