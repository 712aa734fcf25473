"""The contract of `fireq.decode` and `fireq.prefill`, of KV4 and K8V4: a float64 oracle; NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.caches.cache_helpers import assert_same_bits
from tests.contracts.implementations import interpreted
from turbojax.caches.token_scaled import cache as kv4

UNIT = 2.0**-24
# Of the largest: 16 terms and the sum cut off, and the new sum.
ADDED = 18 * UNIT
# The most tokens that Hopper's kernel multiplies at once.
BLOCK = 64
STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
decode = jax.jit(tj.decode, static_argnames=STATIC)
prefill = jax.jit(tj.prefill, static_argnames=(*STATIC, "is_causal"))
append = jax.jit(kv4.append)
INIT = {"kv4": kv4.init_cache, "k8v4": kv4.init_k8v4_cache}
KINDS = pytest.mark.parametrize("kind", INIT)

# Kernels round weights: to bfloat16, to the nearest, or to two float16.
WEIGHT_UNIT = {"xla": 0.0, "triton": 2.0**-8, "mosaic_gpu": 2.0**-21}
# What Hopper's kernel adds to codes before it multiplies them.
OFFSET = {"xla": 0, "triton": 0, "mosaic_gpu": 8}


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.cache
def filled(kind, heads, head_dim, lengths, dtype=jnp.float32, room=0):
    """A cache of ragged lengths; of the keys a few channels are loud, as they are in models."""
    shape = (len(lengths), max(1, *lengths), heads, head_dim)
    loud = np.where(np.random.default_rng(head_dim).random(head_dim) < 0.1, 4.0, 1.0)
    key = (np.asarray(normal(1, shape)) * loud).astype(jnp.dtype(dtype))
    cache = INIT[kind](len(lengths), shape[1] + room, heads, head_dim, dtype=dtype)
    value = normal(2, shape, dtype)
    return append(cache, jnp.asarray(key), value, lengths=jnp.asarray(lengths, jnp.int32))


def queries_of(query, cache, implementation):
    """Queries as they are multiplied, in float64, and how far a kernel may round them.

    Of KV4 the definition rounds them to e4m3. Of K8V4 it does not: Triton's are rounded to 11 bits,
    or to 2**-24 of the row's largest; those for Hopper to 22 bits of a row over its largest.
    """
    if isinstance(cache, kv4.Kv4Cache):
        codes, scale = oracles.quantize_fp8(query, axis=-1)
        return codes.astype(np.float64) * scale.astype(np.float64)[..., None], np.zeros(query.shape)
    q = np.asarray(query, np.float64)
    unit = 2.0**-21 if implementation == "mosaic_gpu" else 2.0**-11
    if implementation == "xla" or (implementation == "triton" and query.dtype != jnp.float32):
        return q, np.zeros(q.shape)
    return q, np.abs(q) * unit + np.abs(q).max(-1, keepdims=True) * 2.0**-24


def oracle(
    query, cache, implementation, *, offset, scale=None, window=None, soft_cap=None, real=None
):
    """Outputs, log-sum-exps and how far an implementation may be from them.

    A score is a sum of `H` products, each rounded, times scales: off by ``(H + 8) * 2**-24`` of the
    sum of absolute values, which an exponential turns into a relative error of the weight. Sums
    over tokens round once a term, the exponential and its argument a few times. With an `offset`
    sums are of codes plus that, and what it contributes is taken off again. A matrix unit adds 16
    terms to a sum at a time and cuts all of them off at ``2**-24`` of the largest, so each addition
    is off by `ADDED`: in a block of `BLOCK` tokens one for every 16, and as many for the sum of
    its weights. Sums of products with queries are of random signs: no more than four standard
    deviations.
    """
    weight_unit = WEIGHT_UNIT[implementation]
    key_unit, value_unit = (
        offset * np.asarray(x, np.float64) for x in (cache.key_scale, cache.value_scale)
    )
    if not isinstance(cache, kv4.Kv4Cache):  # keys in e4m3 are multiplied as they are
        key_unit = np.zeros(key_unit.shape)
    key, value = (np.asarray(x, np.float64) for x in kv4.dequantize(cache, dtype=jnp.float32))
    q, q_slack = queries_of(query, cache, implementation)
    batch, tokens, heads, dim = q.shape
    group, scale = heads // key.shape[2], dim**-0.5 if scale is None else scale
    out, slack = np.zeros(q.shape), np.zeros(q.shape)
    lse, lse_slack = np.full(q.shape[:3], -np.inf), np.zeros(q.shape[:3])
    for b, t, h in np.ndindex(batch, tokens, heads):
        count = tokens if real is None else real[b]
        position = int(cache.lengths[b]) - count + t
        first, last = 0, position if t < count else -1
        if window is not None:
            first, last = max(first, position - window[0]), min(last, position + window[1])
        seen = slice(first, max(last, -1) + 1)
        k, v = key[b, seen, h // group], value[b, seen, h // group]
        if not len(k):
            continue
        k_unit, v_unit = (x[b, h // group, seen] for x in (key_unit, value_unit))
        score = scale * k @ q[b, t, h]
        error = abs(scale) * np.abs(k) @ (np.abs(q[b, t, h]) * (dim + 8) * UNIT + q_slack[b, t, h])
        sums = 4 * np.linalg.norm(q[b, t, h])
        error = error + (dim / 16 + 2) * ADDED * abs(scale) * k_unit * sums
        if soft_cap is not None:
            score = soft_cap * np.tanh(score / soft_cap)
            error = error + 16 * UNIT * soft_cap
        top = score.max()
        p = np.exp(score - top)
        error = error + (np.abs(score - top) + np.abs(top) + 8 + len(k)) * 4 * UNIT
        out[b, t, h] = p @ v / p.sum()
        spread = (p * (error + weight_unit)) @ np.abs(v) + (p @ error) * np.abs(out[b, t, h])
        spread = spread + 2 * (BLOCK // 16) * ADDED * (p @ v_unit)
        slack[b, t, h] = spread / p.sum()
        lse[b, t, h] = top + np.log(p.sum())
        lse_slack[b, t, h] = error.max() + 4 * UNIT * (1 + np.abs(lse[b, t, h]))
    return out, slack, lse, lse_slack


def assert_matches(implementation, query, cache, call=None, offset=None, **options):
    """Within the derived bound, which is small; outputs in the query's dtype."""
    names = {
        "local_window_size": "window",
        "logits_soft_cap": "soft_cap",
        "query_seq_lengths": "real",
    }
    given = {names.get(name, name): x for name, x in options.items()}
    given["offset"] = OFFSET[implementation] if offset is None else offset
    want, slack, want_lse, lse_slack = oracle(query, cache, implementation, **given)
    out, lse = (call or run(implementation))(query, cache, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert (lse.dtype, lse.shape) == (jnp.float32, query.shape[:3])
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    excess = np.abs(np.asarray(out, np.float64) - want) - slack - own * (np.abs(want) + 1e-3)
    assert excess.max() <= 0, f"beyond the derived tolerance by {excess.max()}"
    lse, finite = np.asarray(lse, np.float64), np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~finite], want_lse[~finite])
    assert (np.abs(lse[finite] - want_lse[finite]) <= lse_slack[finite]).all()
    largest = float(jnp.max(cache.value_scale)) * 7
    is_rounded = implementation == "triton" and not isinstance(cache, kv4.Kv4Cache)
    unit = WEIGHT_UNIT[implementation] + is_rounded * 2.0**-9
    assert np.median(slack) <= (1e-3 + unit) * largest


# Sequences, KV heads, head dim, query heads and tokens; lengths around chunks and none.
SHAPES = {
    "one query": ((200, 64, 1), 2, 64, 4, 1),
    "several": ((1100, 3, 0), 1, 32, 2, 5),
    "head dim 8": ((130,), 2, 8, 2, 2),
    "head dim 80": ((50, 129), 1, 80, 7, 1),
    "head dim 256": ((70, 2), 2, 256, 2, 3),
    "heads of their own": ((40, 30), 3, 48, 3, 4),
}


def run(implementation):
    """`decode` with the implementation, interpreted if it is a kernel."""

    def call(*arguments, **options):
        with interpreted(implementation):
            return decode(*arguments, implementation=implementation, **options)

    return call


# First of all more tokens than plain JAX reads at a time.
@pytest.mark.quick(first=3, slow=0)
@pytest.mark.parametrize(
    ("kind", "name", "implementation"),
    [
        ("kv4", "several", "xla"),
        ("kv4", "several", "triton"),
        ("k8v4", "head dim 80", "xla"),
        ("kv4", "head dim 8", "xla"),
        ("kv4", "one query", "triton"),
        ("kv4", "head dim 80", "triton"),
        ("kv4", "heads of their own", "xla"),
        ("kv4", "head dim 256", "xla"),
        ("k8v4", "several", "triton"),
        ("k8v4", "heads of their own", "triton"),
        ("k8v4", "several", "xla"),
        ("k8v4", "head dim 8", "triton"),
        ("k8v4", "head dim 256", "triton"),
        ("k8v4", "one query", "triton"),
    ],
)
def test_equals_the_oracle(kind, name, implementation):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    assert_matches(implementation, query, filled(kind, kv_heads, dim, lengths))


@pytest.mark.quick(1)
def test_edges(implementation):
    """Nothing, one token, exactly one tile, one more, the allocation, many query heads."""
    cache = filled("kv4", 1, 16, (0, 1, 64, 65, 128))
    assert_matches(implementation, normal(10, (5, 4, 16, 16)), cache)


WINDOW = {"local_window_size": (40, 0)}
OPTIONS = {
    "several": {"scale": 0.7, "logits_soft_cap": 3.0, "query_seq_lengths": (3, 1, 0), **WINDOW},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.3},
    "scale of zero": {"scale": 0.0},
    "soft cap": {"logits_soft_cap": 3.0},
    "window": WINDOW,
    "window of both sides": {"local_window_size": (3, 1)},
    "padding": {"query_seq_lengths": (3, 1, 0)},
}


def options_of(kind, name):
    query, cache = normal(4, (3, 3, 4, 32)), filled(kind, 2, 32, (150, 7, 0), room=50)
    options = dict(OPTIONS[name])
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.asarray(options["query_seq_lengths"], jnp.int32)
    return query, cache, options


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("kind", "name", "implementation"),
    [
        ("kv4", "several", "xla"),
        ("k8v4", "soft cap", "triton"),
        ("kv4", "window", "triton"),
        ("kv4", "window", "xla"),
        ("kv4", "soft cap", "triton"),
        ("kv4", "negative scale", "triton"),
        ("kv4", "scale of zero", "xla"),
        ("kv4", "scale", "xla"),
        ("kv4", "window of both sides", "triton"),
        ("kv4", "padding", "xla"),
        ("k8v4", "window", "triton"),
        ("k8v4", "padding", "xla"),
        ("k8v4", "negative scale", "xla"),
    ],
)
def test_options(kind, implementation, name):
    query, cache, options = options_of(kind, name)
    assert_matches(implementation, query, cache, **options)


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("kind", "implementation", "dtype"),
    [
        ("kv4", "triton", jnp.bfloat16),
        ("k8v4", "triton", jnp.bfloat16),
        ("kv4", "xla", jnp.float16),
    ],
)
def test_half_precision(kind, implementation, dtype):
    """bfloat16's 8 bits fit into float16's 11: of K8V4 only weights are rounded."""
    cache = filled(kind, 2, 64, (90, 20), dtype)
    assert_matches(implementation, normal(5, (2, 2, 4, 64), dtype), cache)


@pytest.mark.quick(1)
def test_an_empty_cache(implementation):
    out, lse = run(implementation)(
        normal(6, (2, 1, 4, 16)),
        kv4.init_cache(2, 9, 2, 16, dtype=jnp.float32),
        return_residual=True,
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -jnp.inf)


def spoiled(kind, dim, **changes):
    """A cache whose sequences of 150 and 140 tokens hold NaN at ``(b, k, t)``."""
    cache = filled(kind, 2, dim, (150, 140), room=20)
    arrays = {name: getattr(cache, name).at[at].set(jnp.nan) for name, at in changes.items()}
    return dataclasses.replace(cache, **arrays)


def nan_of(call, query, cache, **options):
    out, lse = call(query, cache, return_residual=True, **options)
    rows = np.isnan(np.asarray(out)).any(-1)
    np.testing.assert_array_equal(rows, np.isnan(np.asarray(out)).all(-1))
    return rows, np.isnan(np.asarray(lse))


BAD_QUERIES = {"kv4": (jnp.inf,), "k8v4": (jnp.inf, -jnp.inf, jnp.nan)}


def check_nan(kind, call, dim=32):
    """A key's NaN reaches what attends to it, a value's no log-sum-exp, a query's itself alone."""
    query = normal(7, (2, 3, 4, dim))
    cache = spoiled(kind, dim, key_scale=(0, 1, 147), value_scale=(1, 0, 139))
    rows, lse = nan_of(call, query, cache)
    want = np.zeros((2, 3, 4), bool)
    want[0, :, 2:] = True
    np.testing.assert_array_equal(lse, want)
    want[1, 2, :2] = True
    np.testing.assert_array_equal(rows, want)
    # Queries stand at 147, 148 and 149: the first alone is near enough.
    cache = spoiled(kind, dim, key_scale=(0, 0, 100))
    rows, _ = nan_of(call, query, cache, local_window_size=(47, 0))
    assert rows.sum() == 2
    np.testing.assert_array_equal(rows[0, 0, :2], True)
    for bad in BAD_QUERIES[kind]:
        rows, lse = nan_of(call, query.at[1, 2, 3, 0].set(bad), spoiled(kind, dim))
        assert (rows.sum(), lse.sum()) == (1, 1)
        assert rows[1, 2, 3]


kernel_is_quick = pytest.mark.parametrize(
    "implementation", ["triton", pytest.param("xla", marks=pytest.mark.slow)]
)


@KINDS
@kernel_is_quick
def test_what_is_not_finite_reaches_what_attends_to_it(kind, implementation):
    check_nan(kind, run(implementation))


def check_beyond_the_length(kind, call, dim=32):
    query, clean = normal(8, (2, 2, 4, dim)), filled(kind, 2, dim, (150, 140), room=20)
    beyond = jnp.arange(clean.key_scale.shape[2])[None] >= clean.lengths[:, None]
    beyond = beyond[:, None]
    code = 0x77 if kind == "kv4" else jnp.nan
    dirty = dataclasses.replace(
        clean,
        key_scale=jnp.where(beyond, jnp.nan, clean.key_scale),
        value_scale=jnp.where(beyond, jnp.nan, clean.value_scale),
        key_codes=jnp.where(
            beyond[..., None], jnp.asarray(code, clean.key_codes.dtype), clean.key_codes
        ),
    )
    for got, want in zip(
        call(query, dirty, return_residual=True),
        call(query, clean, return_residual=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@KINDS
@kernel_is_quick
def test_what_stands_beyond_the_length_is_not_seen(kind, implementation):
    check_beyond_the_length(kind, run(implementation))


def test_memory_does_not_grow_with_the_dequantized_cache():
    """Chunk by chunk: far less than the cache as float32 would take."""
    cache = jax.eval_shape(lambda: kv4.init_cache(1, 2**17, 2, 64))
    query = jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16)
    compiled = decode.lower(query, cache).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**17 * 2 * 64 * 4 / 8


@pytest.mark.slow
def test_k8v4_under_vmap_over_stacked_layers():
    caches = [filled("k8v4", 2, 16, lengths, room=8) for lengths in ((20, 4), (20, 9))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    query = normal(9, (2, 2, 1, 4, 16))
    want = jnp.stack([decode(q, c) for q, c in zip(query, caches, strict=True)])
    np.testing.assert_allclose(jax.jit(jax.vmap(tj.decode))(query, stacked), want, atol=1e-6)
    assert (stacked.head_dim, stacked.num_kv_heads, stacked.batch_size) == (16, 2, 2)


# A prompt ----------------------------------------------------------------------------------------


def prompt(count=40, dtype=jnp.float32):
    shapes = ((3, count, heads, 16) for heads in (4, 2, 2))
    return tuple(normal(20 + i, shape, dtype) for i, shape in enumerate(shapes))


@pytest.mark.slow
def test_prefill_attends_in_e4m3_and_stores_4_bits():
    query, key, value = prompt()
    lengths = jnp.asarray([40, 13, 0], jnp.int32)
    options = {"key_value_seq_lengths": lengths, "return_residual": True, "logits_soft_cap": 9.0}
    empty = kv4.init_cache(3, 64, 2, 16, dtype=jnp.float32)
    got, cache = prefill(query, key, value, empty, **options)
    assert cache.lengths.tolist() == lengths.tolist()
    config = tj.TurboConfig(mode="fp8", softmax="exact", block_q=128, block_kv=128, buffer_size=128)
    want = tj.turbo_attention(
        query, key, value, config=config, is_causal=True, query_seq_lengths=lengths, **options
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_array_equal(got[0][1, 13:], 0)
    # And it is near exact attention: 4 mantissa bits on both sides of both products.
    exact = jax.nn.dot_product_attention(query[:1], key[:1], value[:1], is_causal=True)
    plain = prefill(query, key, value, empty, key_value_seq_lengths=lengths)[0]
    error = np.linalg.norm(plain[0] - exact[0]) / np.linalg.norm(exact[0])
    assert 1e-3 < error < 4 * 2.0**-4


@pytest.mark.slow
def test_decode_continues_a_prompt():
    """4 bits of range 7: a value is off by a fourteenth of its token's largest at most."""
    query, key, value = prompt()
    empty = kv4.init_cache(3, 64, 2, 16, dtype=jnp.float32)
    _, cache = prefill(query[:, :39], key[:, :39], value[:, :39], empty)
    out = decode(query[:, 39:], append(cache, key[:, 39:], value[:, 39:]))
    exact = jax.nn.dot_product_attention(query, key, value, is_causal=True)[:, 39:]
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.25


@pytest.mark.slow
def test_decode_of_k8v4_is_closer_to_exact_attention():
    """4 bits instead of e4m3's mantissa and exponent cost keys most."""
    query, key, value = prompt()
    exact = jax.nn.dot_product_attention(query, key, value, is_causal=True)[:, 39:]
    errors = []
    for init in INIT.values():
        cache = append(init(3, 64, 2, 16, dtype=jnp.float32), key, value)
        out = decode(query[:, 39:], cache)
        errors.append(float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)))
    # Values are the same in both. The bound is a fourteenth of a token's largest value, of some 2
    # standard deviations, as if errors did not average.
    assert errors[1] < 0.8 * errors[0]
    assert errors[1] < 2 / 14


@pytest.mark.slow
def test_prefill_of_k8v4_attends_as_kv4_does():
    lengths = jnp.asarray([40, 13, 0], jnp.int32)
    options = {"key_value_seq_lengths": lengths, "return_residual": True}
    (want, _), (got, cache) = (
        prefill(*prompt(), init(3, 64, 2, 16, dtype=jnp.float32), **options)
        for init in INIT.values()
    )
    assert_same_bits(got, want)
    assert cache.lengths.tolist() == lengths.tolist()


# Refusals ----------------------------------------------------------------------------------------


def test_gradients_are_refused():
    query, key, value = prompt()
    cache = kv4.init_cache(3, 64, 2, 16, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="fireq.decode has no gradient"):
        jax.grad(lambda q: tj.decode(q, cache).sum())(query)
    with pytest.raises(NotImplementedError, match="fireq.prefill has no gradient"):
        jax.grad(lambda q: tj.prefill(q, key, value, cache)[0].sum())(query)


QUERY = jnp.zeros((2, 1, 4, 16))


def ask(query=QUERY, cache=None, **options):
    cache = kv4.init_cache(2, 9, 2, 16, dtype=jnp.float32) if cache is None else cache
    return tj.decode(query, cache, **options)


WRONG = {
    "cache": (TypeError, lambda: ask(cache=QUERY), "must be one of ExactCache"),
    "rank": (ValueError, lambda: ask(QUERY[0]), r"\(1, 4, 16\).*\[B, T, N, H\]"),
    "dtype": (TypeError, lambda: ask(QUERY.astype(jnp.bfloat16)), "bfloat16.*float32"),
    "batch": (ValueError, lambda: ask(QUERY[:1]), r"\(1, 1, 4, 16\).*\[2, T, N, 16\]"),
    "heads": (ValueError, lambda: ask(QUERY[:, :, :3]), "3 query heads.*multiple of 2"),
    "lengths": (
        ValueError,
        lambda: ask(query_seq_lengths=jnp.asarray([2, 0])),
        r"query_seq_lengths=\[2, 0\].*between 0 and 1",
    ),
    "window": (ValueError, lambda: ask(local_window_size=-1), "integers >= 0"),
    "soft cap": (ValueError, lambda: ask(logits_soft_cap=-1.0), "logits_soft_cap=-1.0.*positive"),
    "scale": (TypeError, lambda: ask(scale="a"), "scale is a str"),
    "name": (ValueError, lambda: ask(implementation="cuda"), "implementation='cuda'.*one of"),
    "no such": (
        NotImplementedError,
        lambda: ask(implementation="jax_triton"),
        "fireq.decode has no implementation='jax_triton'; it has 'mosaic_gpu', 'triton', 'xla'",
    ),
    "queries of a prompt": (
        ValueError,
        lambda: tj.prefill(
            QUERY, *[jnp.zeros((2, 3, 2, 16))] * 2, kv4.init_cache(2, 9, 2, 16, dtype=jnp.float32)
        ),
        r"\(2, 1, 4, 16\).*one query per key",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
