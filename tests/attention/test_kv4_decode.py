"""The contract of `fireq.decode` and `fireq.prefill`: a float64 oracle of their numerics; NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.contracts.implementations import interpreted, kernel_is_slow
from turbojax.caches.token_scaled import api
from turbojax.caches.token_scaled import cache as kv4

UNIT = 2.0**-24
# Of the largest: 16 terms and the sum cut off, and the new sum.
ADDED = 18 * UNIT
# The most tokens that Hopper's kernel multiplies at once.
BLOCK = 64
STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
decode = jax.jit(api.decode, static_argnames=STATIC)
prefill = jax.jit(api.prefill, static_argnames=(*STATIC, "is_causal"))
append = jax.jit(kv4.append)


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@functools.cache
def filled(heads, head_dim, lengths, dtype=jnp.float32, room=0):
    """A cache of ragged lengths; of the keys a few channels are loud, as they are in models."""
    shape = (len(lengths), max(1, *lengths), heads, head_dim)
    loud = np.where(np.random.default_rng(head_dim).random(head_dim) < 0.1, 4.0, 1.0)
    key = (np.asarray(normal(1, shape)) * loud).astype(jnp.dtype(dtype))
    cache = kv4.init_cache(len(lengths), shape[1] + room, heads, head_dim, dtype=dtype)
    value = normal(2, shape, dtype)
    return append(cache, jnp.asarray(key), value, lengths=jnp.asarray(lengths, jnp.int32))


def oracle(
    query, cache, *, scale=None, window=None, soft_cap=None, real=None, weight_unit=0.0, offset=0
):
    """Outputs, log-sum-exps and how far float32 (and weights of `weight_unit`) may be from them.

    A score is a sum of `H` products, each rounded, times scales: off by ``(H + 8) * 2**-24`` of the
    sum of absolute values, which an exponential turns into a relative error of the weight. Sums
    over tokens round once a term, the exponential and its argument a few times. With an `offset`
    sums are of codes plus that, and what it contributes is taken off again. A matrix unit adds 16
    terms to a sum at a time and cuts all of them off at ``2**-24`` of the largest, so each addition
    is off by `ADDED`: in a block of `BLOCK` tokens one for every 16, and as many for the sum of
    its weights. Sums of products with queries are of random signs: no more than four standard
    deviations.
    """
    key_unit, value_unit = (
        offset * np.asarray(x, np.float64) for x in (cache.key_scale, cache.value_scale)
    )
    key, value = (np.asarray(x, np.float64) for x in kv4.dequantize(cache, dtype=jnp.float32))
    codes, q_scale = oracles.quantize_fp8(query, axis=-1)
    q = codes.astype(np.float64) * q_scale.astype(np.float64)[..., None]
    batch, tokens, heads, dim = q.shape
    group, scale = heads // key.shape[2], dim**-0.5 if scale is None else scale
    shape = (batch, tokens, heads)
    out, slack, lse, lse_slack = (
        np.zeros(q.shape),
        np.zeros(q.shape),
        np.zeros(shape),
        np.zeros(shape),
    )
    for b, t, h in np.ndindex(shape):
        length = int(cache.lengths[b])
        count = tokens if real is None else real[b]
        position = length - count + t
        seen = np.arange(key.shape[1])
        first, last = 0, position if t < count else -1
        if window is not None:
            first, last = max(first, position - window[0]), min(last, position + window[1])
        seen = seen[first : max(last, -1) + 1]
        if not len(seen):
            lse[b, t, h] = -np.inf
            continue
        k, v = key[b, seen, h // group], value[b, seen, h // group]
        k_unit, v_unit = (x[b, h // group, seen] for x in (key_unit, value_unit))
        score, size = scale * k @ q[b, t, h], abs(scale) * np.abs(k) @ np.abs(q[b, t, h])
        error = (dim + 8) * UNIT * size
        sums = 4 * np.linalg.norm(q[b, t, h])
        error = error + (dim / 16 + 2) * ADDED * abs(scale) * k_unit * sums
        if soft_cap is not None:
            score = soft_cap * np.tanh(score / soft_cap)
            error = error + 16 * UNIT * soft_cap
        top = score.max()
        p = np.exp(score - top)
        error = error + (np.abs(score - top) + np.abs(top) + 8 + len(seen)) * 4 * UNIT
        out[b, t, h] = p @ v / p.sum()
        spread = (p * (error + weight_unit)) @ np.abs(v) + (p @ error) * np.abs(out[b, t, h])
        spread = spread + 2 * (BLOCK // 16) * ADDED * (p @ v_unit)
        slack[b, t, h] = spread / p.sum()
        lse[b, t, h] = top + np.log(p.sum())
        lse_slack[b, t, h] = error.max() + 4 * UNIT * (1 + np.abs(lse[b, t, h]))
    return out, slack, lse, lse_slack


def assert_matches_oracle(query, cache, weight_unit=0.0, call=decode, offset=0, **options):
    """Within the derived bound, which is small; outputs in the query's dtype."""
    names = {
        "local_window_size": "window",
        "logits_soft_cap": "soft_cap",
        "query_seq_lengths": "real",
    }
    given = {names.get(name, name): x for name, x in options.items()}
    given |= {"weight_unit": weight_unit, "offset": offset}
    want, slack, want_lse, lse_slack = oracle(query, cache, **given)
    out, lse = call(query, cache, return_residual=True, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert (lse.dtype, lse.shape) == (jnp.float32, query.shape[:3])
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    excess = np.abs(np.asarray(out, np.float64) - want) - slack - own * (np.abs(want) + 1e-3)
    assert excess.max() <= 0, f"beyond the derived tolerance by {excess.max()}"
    lse, finite = np.asarray(lse, np.float64), np.isfinite(want_lse)
    np.testing.assert_array_equal(lse[~finite], want_lse[~finite])
    assert (np.abs(lse[finite] - want_lse[finite]) <= lse_slack[finite]).all()
    largest = float(jnp.max(cache.value_scale)) * 7
    assert np.median(slack) <= (1e-3 + weight_unit) * largest


# Sequences, KV heads, head dim, query heads and tokens; lengths around chunks and none.
SHAPES = {
    "one query": ((200, 64, 1), 2, 64, 4, 1),
    "several": ((1100, 3, 0), 1, 32, 2, 5),
    "head dim 8": ((130,), 2, 8, 2, 2),
    "head dim 80": ((50, 129), 1, 80, 7, 1),
    "head dim 256": ((70, 2), 2, 256, 2, 3),
    "heads of their own": ((40, 30), 3, 48, 3, 4),
}


# Kernels round weights: to bfloat16, to the nearest, or to two float16.
WEIGHT_UNIT = {"xla": 0.0, "triton": 2.0**-8, "mosaic_gpu": 2.0**-21}
# What Hopper's kernel adds to codes before it multiplies them.
OFFSET = {"xla": 0, "triton": 0, "mosaic_gpu": 8}


def run(implementation):
    """`decode` with the implementation, interpreted if it is a kernel."""

    def call(*arguments, **options):
        with interpreted(implementation):
            return decode(*arguments, implementation=implementation, **options)

    return call


def matches(implementation, query, cache, **options):
    unit = WEIGHT_UNIT[implementation]
    assert_matches_oracle(
        query, cache, unit, run(implementation), OFFSET[implementation], **options
    )


# First of all more tokens than plain JAX reads at a time.
@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("several", "xla"),
        ("several", "triton"),
        ("head dim 8", "xla"),
        ("one query", "triton"),
        ("head dim 80", "triton"),
        ("heads of their own", "xla"),
        ("head dim 256", "xla"),
    ],
)
def test_equals_the_oracle(name, implementation):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    matches(implementation, query, filled(kv_heads, dim, lengths))


@pytest.mark.quick(1)
def test_edges(implementation):
    """Nothing, one token, exactly one tile, one more, the allocation, many query heads."""
    cache = filled(1, 16, (0, 1, 64, 65, 128))
    matches(implementation, normal(10, (5, 4, 16, 16)), cache)


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


def options_of(name):
    query, cache = normal(4, (3, 3, 4, 32)), filled(2, 32, (150, 7, 0), room=50)
    options = dict(OPTIONS[name])
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.asarray(options["query_seq_lengths"], jnp.int32)
    return query, cache, options


@pytest.mark.quick(first=1, slow=0)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("several", "xla"),
        ("window", "triton"),
        ("window", "xla"),
        ("soft cap", "triton"),
        ("negative scale", "triton"),
        ("scale of zero", "xla"),
        ("scale", "xla"),
        ("window of both sides", "triton"),
        ("padding", "xla"),
    ],
)
def test_options(implementation, name):
    query, cache, options = options_of(name)
    matches(implementation, query, cache, **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("triton", jnp.bfloat16), ("xla", jnp.float16)],
)
def test_half_precision(implementation, dtype):
    matches(implementation, normal(5, (2, 2, 4, 64), dtype), filled(2, 64, (90, 20), dtype))


@pytest.mark.quick(1)
def test_an_empty_cache(implementation):
    out, lse = run(implementation)(
        normal(6, (2, 1, 4, 16)),
        kv4.init_cache(2, 9, 2, 16, dtype=jnp.float32),
        return_residual=True,
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -jnp.inf)


def spoiled(dim, **changes):
    """A cache whose sequences of 150 and 140 tokens hold NaN at ``(b, k, t)``."""
    cache = filled(2, dim, (150, 140), room=20)
    arrays = {name: getattr(cache, name).at[at].set(jnp.nan) for name, at in changes.items()}
    return dataclasses.replace(cache, **arrays)


def nan_of(call, query, cache, **options):
    out, lse = call(query, cache, return_residual=True, **options)
    rows = np.isnan(np.asarray(out)).any(-1)
    np.testing.assert_array_equal(rows, np.isnan(np.asarray(out)).all(-1))
    return rows, np.isnan(np.asarray(lse))


def check_nan(call, dim=32):
    """A key's NaN reaches what attends to it, a value's no log-sum-exp, a query's itself alone."""
    query = normal(7, (2, 3, 4, dim))
    rows, lse = nan_of(call, query, spoiled(dim, key_scale=(0, 1, 147), value_scale=(1, 0, 139)))
    want = np.zeros((2, 3, 4), bool)
    want[0, :, 2:] = True
    np.testing.assert_array_equal(lse, want)
    want[1, 2, :2] = True
    np.testing.assert_array_equal(rows, want)
    # Queries stand at 147, 148 and 149: the first alone is near enough.
    rows, _ = nan_of(call, query, spoiled(dim, key_scale=(0, 0, 100)), local_window_size=(47, 0))
    assert rows.sum() == 2
    np.testing.assert_array_equal(rows[0, 0, :2], True)
    rows, _ = nan_of(call, query.at[1, 2, 3, 0].set(jnp.inf), spoiled(dim))
    assert rows.sum() == 1
    assert rows[1, 2, 3]


@pytest.mark.quick(1)
def test_what_is_not_finite_reaches_what_attends_to_it(implementation):
    check_nan(run(implementation))


def check_beyond_the_length(call, dim=32):
    query, clean = normal(8, (2, 2, 4, dim)), filled(2, dim, (150, 140), room=20)
    beyond = jnp.arange(clean.key_scale.shape[2])[None] >= clean.lengths[:, None]
    beyond = beyond[:, None]
    dirty = dataclasses.replace(
        clean,
        key_scale=jnp.where(beyond, jnp.nan, clean.key_scale),
        value_scale=jnp.where(beyond, jnp.nan, clean.value_scale),
        key_codes=jnp.where(beyond[..., None], 0x77, clean.key_codes),
    )
    for got, want in zip(
        call(query, dirty, return_residual=True),
        call(query, clean, return_residual=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.quick(1)
def test_what_stands_beyond_the_length_is_not_seen(implementation):
    check_beyond_the_length(run(implementation))


@pytest.mark.fuzz
@kernel_is_slow
def test_transforms(implementation):
    """Eager and jitted, vmap over layers, scan: the same numbers; twice the same bits.

    Plain JAX has the same bits eager and jitted; the interpreted kernel is another program then.
    """
    caches = [filled(2, 16, lengths, room=8) for lengths in ((20, 4), (20, 9))]
    stacked = jax.tree.map(lambda *x: np.stack(x), *caches)
    query = normal(9, (2, 2, 1, 4, 16))
    call, one = run(implementation), functools.partial(api.decode, implementation=implementation)
    want = [np.asarray(call(q, c)) for q, c in zip(query, caches, strict=True)]
    np.testing.assert_array_equal(call(query[0], caches[0]), want[0])
    with interpreted(implementation):
        eager = np.asarray(one(query[0], caches[0]))
        np.testing.assert_array_equal(one(query[0], caches[0]), eager)
        mapped = jax.jit(jax.vmap(one))(query, stacked)
        scan = jax.jit(lambda *xs: jax.lax.scan(lambda c, x: (c, one(*x)), None, xs)[1])
        scanned = scan(query, stacked)
    if implementation == "xla":
        np.testing.assert_array_equal(eager, want[0])
    np.testing.assert_allclose(eager, want[0], atol=1e-6)
    np.testing.assert_allclose(mapped, np.stack(want), atol=1e-6)
    np.testing.assert_allclose(scanned, np.stack(want), atol=1e-6)


def test_memory_does_not_grow_with_the_dequantized_cache():
    """Chunk by chunk: far less than the cache as float32 would take."""
    cache = jax.eval_shape(lambda: kv4.init_cache(1, 2**17, 2, 64))
    query = jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16)
    compiled = decode.lower(query, cache).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**17 * 2 * 64 * 4 / 8


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


# Refusals ----------------------------------------------------------------------------------------


def test_gradients_are_refused():
    query, key, value = prompt()
    cache = kv4.init_cache(3, 64, 2, 16, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="fireq.decode has no gradient"):
        jax.grad(lambda q: api.decode(q, cache).sum())(query)
    with pytest.raises(NotImplementedError, match="fireq.prefill has no gradient"):
        jax.grad(lambda q: api.prefill(q, key, value, cache)[0].sum())(query)


QUERY = jnp.zeros((2, 1, 4, 16))


def ask(query=QUERY, cache=None, **options):
    cache = kv4.init_cache(2, 9, 2, 16, dtype=jnp.float32) if cache is None else cache
    return api.decode(query, cache, **options)


WRONG = {
    "cache": (TypeError, lambda: ask(cache=tj.init_cache(2, 9, 2, 16)), "must be a Kv4Cache"),
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
        lambda: api.prefill(
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
