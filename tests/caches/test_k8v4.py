"""`K8v4Cache`: what differs from a `Kv4Cache`, whose code it shares: keys and their queries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from tests.attention.test_kv4_decode import (
    ADDED,
    BLOCK,
    OFFSET,
    OPTIONS,
    SHAPES,
    UNIT,
    WEIGHT_UNIT,
    decode,
    nan_of,
    normal,
    prefill,
)
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.test_kv4_cache import awkward, oracle_pack, oracle_quantize
from tests.contracts.implementations import interpreted
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import fireq, k8v4, models
from turbojax.attention.options import Options
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import triton
from turbojax.caches.token_scaled.kind import K8V4

append = jax.jit(k8v4.append)
E4M3 = ml_dtypes.float8_e4m3fn


def oracle_e4m3(x):
    """Codes and scales of vectors, by the definition, in float32 as it says."""
    x = np.asarray(x).astype(np.float32)
    tiny = np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        largest = np.abs(x).max(-1)
        scale = np.maximum(largest * np.float32(1 / 448), tiny).astype(ml_dtypes.bfloat16)
        scale = np.where(largest < tiny, 1, scale.astype(np.float32)).astype(np.float32)
        scale = np.where(np.isfinite(largest), scale, np.float32(np.nan))
        codes = np.clip(x * (np.float32(1) / scale)[..., None], -448, 448).astype(E4M3)
    return codes, scale


@functools.cache
def filled(heads, head_dim, lengths, dtype=jnp.float32, room=0):
    """As in `test_kv4_decode`: ragged lengths, and a few loud channels of keys."""
    shape = (len(lengths), max(1, *lengths), heads, head_dim)
    loud = np.where(np.random.default_rng(head_dim).random(head_dim) < 0.1, 4.0, 1.0)
    key = (np.asarray(normal(1, shape)) * loud).astype(jnp.dtype(dtype))
    cache = k8v4.init_cache(len(lengths), shape[1] + room, heads, head_dim, dtype=dtype)
    value = normal(2, shape, dtype)
    return append(cache, jnp.asarray(key), value, lengths=jnp.asarray(lengths, jnp.int32))


# Storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_codes_and_scales_to_the_bit(dtype):
    """Ties, extremes of float32, zeros, what is not finite; jitted too; values as in KV4."""
    check_bits(dtype)


def check_bits(dtype):
    # Larger ones have a scale whose reciprocal may be flushed to 0.
    x = jnp.asarray(np.clip(awkward(16), -1e36, 1e36), dtype).reshape(1, -1, 1, 16)
    count = x.shape[1]
    for call in (k8v4.append, append):
        cache = call(k8v4.init_cache(1, count, 1, 16, dtype=dtype), x, x)
        cache.validate()
        codes, scale = oracle_e4m3(x[0, :, 0])
        held = np.asarray(cache.key_codes)[0, 0, :count]
        finite = np.isfinite(scale)
        assert finite.sum() > 100
        np.testing.assert_array_equal(held[finite].view(np.uint8), codes[finite].view(np.uint8))
        assert np.isnan(held[~finite].astype(np.float32)).all()
        got = np.asarray(cache.key_scale)[0, 0, :count].astype(np.float32)
        np.testing.assert_array_equal(got, scale)
        want, want_scale = oracle_quantize(x[0, :, 0])
        np.testing.assert_array_equal(cache.value_codes[0, 0, :count], oracle_pack(want))
        got = np.asarray(cache.value_scale)[0, 0, :count].astype(np.float64)
        np.testing.assert_array_equal(got, want_scale)


def test_no_finite_key_is_lost_to_the_range_of_e4m3():
    """448 times over and under it, every key is within an e4m3's half step of what was given.

    A bfloat16 scale rounded down makes the largest saturate, by 2**-9 at most: less than that.
    """
    size = 2.0 ** np.arange(-100, 101, 10)
    x = np.asarray(normal(0, (1, len(size), 2, 64))) * size[:, None, None]
    x = jnp.asarray(x, jnp.float32)
    cache = append(k8v4.init_cache(1, len(size), 2, 64, dtype=jnp.float32), x, x)
    key, _ = k8v4.dequantize(cache)
    assert np.isfinite(key).all()
    step = np.maximum(
        np.abs(x) * 2.0**-4, np.asarray(jnp.max(jnp.abs(x), -1))[..., None] * 2.0**-17
    )
    assert (np.abs(np.asarray(key) - np.asarray(x)) <= step * (1 + 2.0**-7)).all()


def test_what_is_not_finite_spoils_its_own_token_and_head_alone():
    key, value = normal(5, (2, 4, 2, 16)), normal(6, (2, 4, 2, 16))
    key, value = key.at[0, 1, 1, 3].set(jnp.inf), value.at[1, 3, 0, 15].set(jnp.nan)
    cache = append(k8v4.init_cache(2, 8, 2, 16, dtype=jnp.float32), key, value)
    shown = [np.isnan(np.asarray(x)) for x in k8v4.dequantize(cache)]
    assert [x.sum() for x in shown] == [16, 16]
    assert shown[0][0, 1, 1].all()
    assert shown[1][1, 3, 0].all()


@pytest.mark.slow
def test_how_tokens_are_split_into_calls_does_not_matter():
    key, value = normal(7, (3, 11, 2, 16)), normal(8, (3, 11, 2, 16))
    new = k8v4.init_cache(3, 60, 2, 16, dtype=jnp.float32)
    at_once, pieces = append(new, key, value), new
    for start, stop in ((0, 1), (1, 6), (6, 11)):
        pieces = append(pieces, key[:, start:stop], value[:, start:stop])
    assert_same_bits(pieces, at_once)
    _, prompt = prefill(key, key, value, new)
    assert_same_bits(prompt, at_once)
    after = append(prompt, *[jnp.zeros((3, 50, 2, 16))] * 2)
    assert after.overflowed.tolist() == [True] * 3
    assert after.lengths.tolist() == [60] * 3


def test_size_and_checks():
    """A token and head takes a byte a channel of the key, half a byte of the value, two scales."""
    cache = k8v4.init_cache(2, 256, 3, 128)
    assert cache.nbytes == 2 * 256 * 3 * (128 + 2 + 64 + 2) + 2 * (4 + 1)
    assert cache.compression_ratio == 2 * 2 * 256 * 3 * 256 / cache.nbytes
    assert (cache.batch_size, cache.num_kv_heads, cache.head_dim) == (2, 3, 128)
    cache.validate()
    other = kv4.init_cache(2, 256, 3, 128)
    with pytest.raises(ValueError, match=r"cache.key_codes is uint8.*must be float8_e4m3fn"):
        dataclasses.replace(cache, key_codes=other.value_codes).validate()
    with pytest.raises(ValueError, match=r"cache.value_scale is float32.*bfloat16"):
        dataclasses.replace(cache, value_scale=cache.value_scale.astype(jnp.float32)).validate()
    with pytest.raises(ValueError, match="head_dim=12 must be a multiple of 8"):
        k8v4.init_cache(1, 8, 1, 12)
    with pytest.raises(TypeError, match="int8 must be bfloat16, float16 or float32"):
        k8v4.init_cache(1, 8, 1, 8, dtype=jnp.int8)
    with pytest.raises(TypeError, match="is a list, must be one of .*K8v4Cache"):
        k8v4.decode(jnp.zeros((1, 1, 1, 8)), [])


def test_a_cache_comes_back_from_a_file(tmp_path):
    """Float8 arrays as they are; only what is held."""
    cache = filled(2, 16, (20, 4), jnp.bfloat16, room=8)
    models.save_cache(tmp_path / "cache", cache)
    again, _ = models.load_cache(tmp_path / "cache")
    assert isinstance(again, k8v4.K8v4Cache)
    for got, want in zip(k8v4.dequantize(again), k8v4.dequantize(cache), strict=True):
        np.testing.assert_array_equal(got, want)
    assert (tmp_path / "cache").stat().st_size < 24 * 2 * (16 + 2 + 8 + 2) + 4096


@pytest.mark.fuzz
def test_in_one_pass_is_what_decoding_attends_to():
    """Prompts aside, a model is scored at once as it would decode token by token."""
    query, key, value = (normal(30 + i, (2, 12, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    at_once, _ = K8V4.in_one_pass(query, key, value)
    cache = k8v4.init_cache(2, 12, 2, 16, dtype=jnp.float32)
    cache = append(cache, key, value)
    # All tokens' queries at once, each of which sees its own past.
    np.testing.assert_allclose(at_once, decode(query, cache), atol=2e-6)


# Decoding ----------------------------------------------------------------------------------------


def oracle(query, cache, implementation, *, scale=None, window=None, soft_cap=None, real=None):
    """Float64 attention over what the cache stands for, and how far results may be from it.

    As in `test_kv4_decode`, but queries are not rounded by the definition. Triton's are, to 11
    bits, or to 2**-24 of the row's largest; those for Hopper to 22 bits of a row over its largest,
    and its sums are of values' codes plus 8.
    """
    key, value = (np.asarray(x, np.float64) for x in k8v4.dequantize(cache, dtype=jnp.float32))
    q, weight_unit = np.asarray(query, np.float64), WEIGHT_UNIT[implementation]
    value_unit = OFFSET[implementation] * np.asarray(cache.value_scale, np.float64)
    q_slack = np.zeros(q.shape)
    if implementation == "triton" and query.dtype == jnp.float32:
        q_slack = np.abs(q) * 2.0**-11 + np.abs(q).max(-1, keepdims=True) * 2.0**-24
    if implementation == "mosaic_gpu":
        q_slack = np.abs(q) * 2.0**-21 + np.abs(q).max(-1, keepdims=True) * 2.0**-24
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
        score = scale * k @ q[b, t, h]
        error = abs(scale) * np.abs(k) @ (np.abs(q[b, t, h]) * (dim + 8) * UNIT + q_slack[b, t, h])
        if soft_cap is not None:
            score = soft_cap * np.tanh(score / soft_cap)
            error = error + 16 * UNIT * soft_cap
        top = score.max()
        p = np.exp(score - top)
        error = error + (np.abs(score - top) + np.abs(top) + 8 + len(k)) * 4 * UNIT
        out[b, t, h] = p @ v / p.sum()
        spread = (p * (error + weight_unit)) @ np.abs(v) + (p @ error) * np.abs(out[b, t, h])
        spread = spread + 2 * (BLOCK // 16) * ADDED * (p @ value_unit[b, h // group, seen])
        slack[b, t, h] = spread / p.sum()
        lse[b, t, h] = top + np.log(p.sum())
        lse_slack[b, t, h] = error.max() + 4 * UNIT * (1 + np.abs(lse[b, t, h]))
    return out, slack, lse, lse_slack


def run(implementation):
    """`decode` with the implementation, interpreted if it is a kernel."""

    def call(*arguments, **options):
        with interpreted(implementation):
            return decode(*arguments, implementation=implementation, **options)

    return call


def assert_matches(implementation, query, cache, call=None, **options):
    names = {"local_window_size": "window", "logits_soft_cap": "soft_cap"}
    given = {names.get(k, k.replace("query_seq_lengths", "real")): x for k, x in options.items()}
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
    kernel = implementation == "triton"
    assert np.median(slack) <= (1e-3 + kernel * 2.0**-8 + kernel * 2.0**-9) * largest


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("several", "triton"),
        ("head dim 80", "xla"),
        ("heads of their own", "triton"),
        ("several", "xla"),
        ("head dim 8", "triton"),
        ("head dim 256", "triton"),
        ("one query", "triton"),
    ],
)
def test_equals_the_oracle(name, implementation):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    assert_matches(implementation, query, filled(kv_heads, dim, lengths))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [("window", "triton"), ("padding", "xla"), ("soft cap", "triton"), ("negative scale", "xla")],
)
def test_options(name, implementation):
    options = dict(OPTIONS[name])
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.asarray(options["query_seq_lengths"], jnp.int32)
    cache = filled(2, 32, (150, 7, 0), room=50)
    assert_matches(implementation, normal(4, (3, 3, 4, 32)), cache, **options)


def test_queries_of_half_precision_lose_nothing_in_the_kernel():
    """bfloat16's 8 bits fit into float16's 11: only weights are rounded."""
    query = normal(5, (2, 2, 4, 64), jnp.bfloat16)
    assert_matches("triton", query, filled(2, 64, (90, 20), jnp.bfloat16))


def check_not_finite(call, dim=32):
    """A key's NaN reaches what attends to it, a value's no log-sum-exp, a query's itself alone."""
    query = normal(7, (2, 3, 4, dim))
    clean = filled(2, dim, (150, 140), room=20)

    def spoiled(**changes):
        arrays = {name: getattr(clean, name).at[at].set(jnp.nan) for name, at in changes.items()}
        return dataclasses.replace(clean, **arrays)

    rows, lse = nan_of(call, query, spoiled(key_scale=(0, 1, 147), value_scale=(1, 0, 139)))
    want = np.zeros((2, 3, 4), bool)
    want[0, :, 2:] = True
    np.testing.assert_array_equal(lse, want)
    want[1, 2, :2] = True
    np.testing.assert_array_equal(rows, want)
    for x in (jnp.inf, -jnp.inf, jnp.nan):
        rows, lse = nan_of(call, query.at[1, 2, 3, 0].set(x), clean)
        assert (rows.sum(), lse.sum()) == (1, 1)
        assert rows[1, 2, 3]
    # What stands beyond the length is not seen.
    beyond = (jnp.arange(clean.key_scale.shape[2])[None] >= clean.lengths[:, None])[:, None]
    nan = jnp.asarray(jnp.nan, clean.key_codes.dtype)
    dirty = dataclasses.replace(
        clean,
        key_scale=jnp.where(beyond, jnp.nan, clean.key_scale),
        value_scale=jnp.where(beyond, jnp.nan, clean.value_scale),
        key_codes=jnp.where(beyond[..., None], nan, clean.key_codes),
    )
    for got, want in zip(
        call(query, dirty, return_residual=True),
        call(query, clean, return_residual=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_what_is_not_finite_reaches_what_attends_to_it(implementation):
    check_not_finite(run(implementation))


@pytest.mark.slow
def test_decode_is_closer_to_exact_attention_than_kv4():
    """4 bits instead of e4m3's mantissa and exponent cost keys most."""
    shapes = ((3, 40, heads, 16) for heads in (4, 2, 2))
    query, key, value = (normal(20 + i, shape) for i, shape in enumerate(shapes))
    exact = jax.nn.dot_product_attention(query, key, value, is_causal=True)[:, 39:]
    errors = []
    for init in (fireq.init_cache, k8v4.init_cache):
        cache = append(init(3, 64, 2, 16, dtype=jnp.float32), key, value)
        out = decode(query[:, 39:], cache)
        errors.append(float(jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)))
    # Values are the same in both. The bound is a fourteenth of a token's largest value, of some 2
    # standard deviations, as if errors did not average.
    assert errors[1] < 0.8 * errors[0]
    assert errors[1] < 2 / 14


@pytest.mark.slow
def test_prefill_attends_as_kv4_does():
    shapes = ((3, 40, heads, 16) for heads in (4, 2, 2))
    query, key, value = (normal(20 + i, shape) for i, shape in enumerate(shapes))
    lengths = jnp.asarray([40, 13, 0], jnp.int32)
    options = {"key_value_seq_lengths": lengths, "return_residual": True}
    both = [
        prefill(query, key, value, init(3, 64, 2, 16, dtype=jnp.float32), **options)
        for init in (fireq.init_cache, k8v4.init_cache)
    ]
    assert_same_bits(both[0][0], both[1][0])
    assert both[1][1].lengths.tolist() == lengths.tolist()


@pytest.mark.slow
def test_vmap_over_stacked_layers():
    caches = [filled(2, 16, lengths, room=8) for lengths in ((20, 4), (20, 9))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    query = normal(9, (2, 2, 1, 4, 16))
    want = jnp.stack([decode(q, c) for q, c in zip(query, caches, strict=True)])
    np.testing.assert_allclose(jax.jit(jax.vmap(tj.decode))(query, stacked), want, atol=1e-6)
    assert (stacked.head_dim, stacked.num_kv_heads, stacked.batch_size) == (16, 2, 2)


LOWERED = {
    "Llama-3-8B": ((16, 1, 32, 128), {}),
    "head dim 96, window, soft cap": ((2, 2, 4, 96), {"window": (100, 0), "cap": 5.0}),
    "head dim 256": ((1, 1, 16, 256), {}),
    "head dim 8": ((3, 8, 16, 8), {}),
}


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name):
    (batch, tokens, heads, dim), given = LOWERED[name]
    cache = jax.eval_shape(lambda: k8v4.init_cache(batch, 4000, 2, dim))
    call = functools.partial(
        triton._decode,
        options=Options(True, given.get("window"), scale=0.1, logits_soft_cap=given.get("cap")),
        interpret=False,
    )
    query = jax.ShapeDtypeStruct((batch, tokens, heads, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert "turbojax_kv4_decode" in text
