"""`Kv4Cache` and `K8v4Cache` against numpy oracles: codes, scales, ragged sequences, transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from tests.attention.test_kv4_decode import filled, normal
from tests.attention.test_kv4_decode import prefill as prefill_jit
from tests.caches.cache_helpers import assert_same_bits
from turbojax import k8v4, models
from turbojax.caches.token_scaled import cache as kv4

BATCH, HEADS, HEAD_DIM = 3, 2, 16

append = jax.jit(kv4.append)
store_prompt = jax.jit(kv4.store_prompt)


def oracle_quantize(x):
    """Codes [..., H] as integers and scales [...], by the definition."""
    x = np.asarray(x).astype(np.float32)
    maximum = np.abs(x).max(-1)
    with np.errstate(all="ignore"):
        scale = (maximum * np.float32(1 / 7)).astype(ml_dtypes.bfloat16)
        scale = np.where(scale < np.finfo(np.float32).tiny, 1, scale.astype(np.float64))
        scale = np.where(np.isfinite(maximum), scale, np.nan)
        # In float64 a quotient of a 24-bit and an 8-bit number is no tie unless it is one.
        codes = np.clip(np.rint(x.astype(np.float64) / scale[..., None]), -8, 7)
    return np.nan_to_num(codes, nan=0).astype(np.int64), scale


def oracle_pack(codes):
    low, high = np.split(codes & 15, 2, axis=-1)
    return (low + 16 * high).astype(np.uint8)


def random_tokens(count, seed, dtype=jnp.float32, batch=BATCH):
    rng = np.random.default_rng(seed)
    shape = (batch, count, HEADS, HEAD_DIM)
    return tuple(jnp.asarray(rng.normal(size=shape) * 3, dtype) for _ in range(2))


def new(max_length=60, dtype=jnp.float32, batch=BATCH):
    return kv4.init_cache(batch, max_length, HEADS, HEAD_DIM, dtype=dtype)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


def assert_holds(cache, history):
    """The cache holds these (key, value) pairs of ``[tokens, K, H]``, one per sequence."""
    cache.validate()
    np.testing.assert_array_equal(cache.lengths, [len(key) for key, _ in history])
    for b, sides in enumerate(history):
        for x, codes, scale in zip(
            sides,
            (cache.key_codes, cache.value_codes),
            (cache.key_scale, cache.value_scale),
            strict=True,
        ):
            want, want_scale = oracle_quantize(x)
            held = slice(0, len(x))
            np.testing.assert_array_equal(
                np.asarray(codes)[b, :, held], oracle_pack(want).swapaxes(0, 1)
            )
            np.testing.assert_array_equal(
                np.asarray(scale)[b, :, held].astype(np.float64), want_scale.T
            )


# One vector --------------------------------------------------------------------------------------


def awkward(dim):
    """Vectors that are hard to round: ties and neighbours, zeros, extremes, not finite."""
    rng = np.random.default_rng(dim)
    x = rng.normal(size=(40, dim)) * 2.0 ** rng.integers(-30, 30, size=(40, 1))
    ties = rng.integers(-13, 14, size=(40, dim)) * 0.5
    ties[:, 0] = 7
    ties *= 2.0 ** rng.integers(-100, 100, size=(40, 1))
    near = np.nextafter(ties.astype(np.float32), np.float32(np.inf))
    extremes = np.zeros((9, dim))
    extremes[1:, 0] = [-0.0, 3.4e38, -3.4e38, 1e-38, 1e-37, np.nan, np.inf, -np.inf]
    return np.concatenate([x, ties, near, extremes]).astype(np.float32)


@pytest.mark.optimized
def test_codes_and_scales_to_the_bit():
    """Also jitted and mapped; a code times its scale is within half a scale of its value."""
    x = awkward(80)
    want, want_scale = oracle_quantize(x)
    run = kv4.quantize_vectors
    for call in (run, jax.jit(run), jax.vmap(run)):
        codes, scale = call(jnp.asarray(x))
        assert (codes.dtype, scale.dtype) == (jnp.uint8, jnp.bfloat16)
        np.testing.assert_array_equal(codes, oracle_pack(want))
        np.testing.assert_array_equal(np.asarray(scale).astype(np.float64), want_scale)
    np.testing.assert_array_equal(kv4.unpack_codes(codes), want)
    finite = np.isfinite(want_scale)
    error = np.abs(x.astype(np.float64) - want * want_scale[:, None])[finite]
    assert (error <= 0.5 * want_scale[finite][:, None]).all()
    assert np.abs(want).max() == 7


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_is_rounded_as_its_float32_values(dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(200, 64)), dtype)
    codes, scale = kv4.quantize_vectors(x)
    want, want_scale = oracle_quantize(x)
    np.testing.assert_array_equal(codes, oracle_pack(want))
    np.testing.assert_array_equal(np.asarray(scale).astype(np.float64), want_scale)


def test_a_byte_holds_two_channels_half_a_head_apart():
    x = jnp.asarray([[7.0, -1.0, 0.0, 2.0, -7.0, 3.0, -2.0, 0.0]])
    codes, scale = kv4.quantize_vectors(x)
    np.testing.assert_array_equal(codes, [[0x97, 0x3F, 0xE0, 0x02]])
    assert float(scale[0]) == 1


# Writing -----------------------------------------------------------------------------------------


def ragged():
    """A cache after a ragged prompt and tokens one by one, and what it was given."""
    key, value = random_tokens(9, 2)
    count, more = [9, 4, 0], random_tokens(3, 3)
    cache = store_prompt(new(), key, value, lengths(*count))
    history = [[x[b, :n] for x in (key, value)] for b, n in enumerate(count)]
    for t in range(3):
        taken = [1, int(t < 2), 0]
        cache = append(cache, *(x[:, t : t + 1] for x in more), lengths=lengths(*taken))
        for b, n in enumerate(taken):
            history[b] = [
                np.concatenate([old, x[b, t : t + n]])
                for old, x in zip(history[b], more, strict=True)
            ]
    return cache, history


@pytest.mark.slow
def test_ragged_prompt_and_tokens():
    cache, history = ragged()
    assert_holds(cache, history)
    assert cache.overflowed.tolist() == [False] * 3
    for got, want in zip(kv4.dequantize(cache), zip(*history, strict=True), strict=True):
        assert got.shape == (BATCH, 60, HEADS, HEAD_DIM)
        for b, x in enumerate(want):
            codes, scale = oracle_quantize(x)
            np.testing.assert_array_equal(got[b, : len(x)], codes * scale[..., None])
            np.testing.assert_array_equal(got[b, len(x) :], 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("jitted", [False, True])
def test_how_tokens_are_split_into_calls_does_not_matter(jitted):
    key, value = random_tokens(11, 4)
    call = append if jitted else kv4.append
    at_once = call(new(), key, value)
    pieces = new()
    for start, stop in ((0, 1), (1, 6), (6, 11)):
        pieces = call(pieces, key[:, start:stop], value[:, start:stop])
    assert_same_bits(pieces, at_once)
    prompt = kv4.store_prompt(new(), key, value, lengths(11, 11, 11))
    assert_same_bits(prompt, at_once)


def test_prefill_stores_what_append_stores():
    key, value = random_tokens(20, 5)
    count = lengths(20, 7, 0)
    _, cache = tj.prefill(key, key, value, new(), key_value_seq_lengths=count)
    assert_same_bits(cache, append(new(), key, value, lengths=count))


def test_what_is_not_finite_spoils_its_own_token_and_head_alone():
    key, value = random_tokens(5, 6)
    key, value = key.at[0, 1, 1, 3].set(jnp.nan), value.at[2, 4, 0, 15].set(-jnp.inf)
    cache = append(new(), key, value)
    bad = [np.argwhere(np.isnan(np.asarray(x, np.float32))).tolist() for x in kv4_scales(cache)]
    assert bad == [[[0, 1, 1]], [[2, 0, 4]]]
    cache.validate()
    shown = np.asarray(kv4.dequantize(cache)[0])
    np.testing.assert_array_equal(np.isnan(shown[0, 1, 1]), True)
    assert np.isnan(shown).sum() == HEAD_DIM


def kv4_scales(cache):
    return cache.key_scale, cache.value_scale


def test_overflow_is_an_error_and_under_jit_a_status():
    key, value = random_tokens(5, 7)
    cache = append(new(8), key, value, lengths=lengths(5, 2, 5))
    with pytest.raises(ValueError, match=r"lengths \[10, 7, 6\].*max_length=8"):
        kv4.append(cache, key, value, lengths=lengths(5, 5, 1))
    after = append(cache, key, value, lengths=lengths(5, 5, 1))
    assert after.overflowed.tolist() == [True, False, False]
    history = [
        [np.concatenate([x[b, :old], x[b, :fresh]]) for x in (key, value)]
        for b, (old, fresh) in enumerate([(5, 3), (2, 5), (5, 1)])
    ]
    assert_holds(after, history)
    # The allocation is larger than what the cache may hold, and stays untouched there.
    assert after.key_codes.shape[2] == kv4.ALLOCATION
    np.testing.assert_array_equal(after.key_codes[:, :, 8:], 0)


def test_lengths_out_of_range_under_jit():
    """Negative counts as nothing; tokens that were not given are reported, never invented."""
    key, value = random_tokens(5, 8)
    got = append(new(), key, value, lengths=lengths(-4, 9, 2))
    assert got.lengths.tolist() == [0, 5, 2]
    assert got.overflowed.tolist() == [False, True, False]


def test_a_prompt_needs_empty_sequences_and_room():
    key, value = random_tokens(5, 9)
    cache = append(new(), key, value, lengths=lengths(5, 0, 0))
    with pytest.raises(ValueError, match=r"\[5, 0, 0\] must be 0: prefill starts"):
        kv4.store_prompt(cache, key, value, lengths(1, 1, 0))
    after = store_prompt(cache, value, key, lengths(1, 1, 0))
    assert after.overflowed.tolist() == [True, False, False]
    assert_holds(
        after, [[x[0] for x in (key, value)], [value[1, :1], key[1, :1]], [key[2, :0]] * 2]
    )
    with pytest.raises(ValueError, match=r"\[5, 0, 0\] must be at most max_length=4"):
        kv4.store_prompt(new(4), key, value, lengths(5, 0, 0))
    after = store_prompt(new(4), key, value, lengths(5, 4, 0))
    assert after.overflowed.tolist() == [True, False, False]
    assert after.lengths.tolist() == [4, 4, 0]
    assert_holds(after, [[x[b, :n] for x in (key, value)] for b, n in enumerate((4, 4, 0))])


# Transforms --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vmap_over_stacked_layers_and_scan():
    caches = [append(new(), *random_tokens(3 + i, i)) for i in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    key, value = (
        jnp.stack(x) for x in zip(*(random_tokens(2, 9 + i) for i in range(2)), strict=True)
    )
    want = [append(c, k, v) for c, k, v in zip(caches, key, value, strict=True)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *want)
    assert_same_bits(jax.vmap(kv4.append)(stacked, key, value), want)

    def layer(carry, x):
        return carry, kv4.append(*x)

    assert_same_bits(jax.lax.scan(layer, None, (stacked, key, value))[1], want)
    assert stacked.nbytes == 2 * caches[0].nbytes
    assert stacked.compression_ratio == caches[0].compression_ratio
    assert (stacked.batch_size, stacked.num_kv_heads, stacked.head_dim) == (BATCH, HEADS, HEAD_DIM)


def test_scan_over_tokens():
    key, value = random_tokens(6, 12)

    def step(cache, x):
        return kv4.append(cache, *(y[:, None] for y in x)), None

    steps = tuple(jnp.swapaxes(x, 0, 1) for x in (key, value))
    assert_same_bits(jax.lax.scan(step, new(), steps)[0], append(new(), key, value))


def test_a_donated_cache_is_reused():
    """Of the large arrays, every one's memory."""
    cache, tokens = new(), random_tokens(1, 13)
    compiled = jax.jit(kv4.append, donate_argnums=0).lower(cache, *tokens).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes - 64
    want = append(cache, *tokens)
    assert_same_bits(compiled(cache, *tokens), want)
    assert cache.key_codes.is_deleted()


def test_gradients_are_refused():
    key, value = random_tokens(1, 14)

    def loss(key):
        return jnp.sum(kv4.append(new(), key, value).key_scale.astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="append has no gradient"):
        jax.grad(loss)(key)


# Size and checks ---------------------------------------------------------------------------------


def test_size():
    """A token takes half a byte a channel and two bytes of scale, on each side and head."""
    cache = kv4.init_cache(2, 256, 3, 128)
    assert cache.nbytes == 2 * 2 * 256 * 3 * (64 + 2) + 2 * (4 + 1)
    assert cache.compression_ratio == 2 * 2 * 256 * 3 * 256 / cache.nbytes
    assert jax.eval_shape(lambda: kv4.init_cache(1, 2**20, 8, 128)).nbytes > 2**30
    assert kv4.init_cache(1, 129, 1, 8).key_codes.shape == (1, 1, 256, 4)


BROKEN = {
    "length": ({"lengths": lengths(61, 0, 0)}, r"lengths=\[61, 0, 0\] must be within 0..60"),
    "negative": ({"lengths": lengths(0, -1, 0)}, r"must be within 0..60"),
    "scale": ({"lengths": lengths(12, 7, 0)}, r"key_scale must be positive or NaN"),
    "dtype": ({"key_scale": jnp.zeros((3, 2, 128))}, r"cache.key_scale is float32.*bfloat16"),
    "shape": ({"value_codes": jnp.zeros((3, 2, 128, 4), jnp.uint8)}, r"value_codes is .*8\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_validate_names_what_is_broken(name):
    changes, message = BROKEN[name]
    cache, _ = ragged()
    cache.validate()
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(cache, **changes).validate()


def test_validate_under_jit_sees_shapes():
    cache, _ = ragged()
    jax.jit(lambda c: c.validate())(cache)
    with pytest.raises(ValueError, match="cache.lengths is int32"):
        jax.jit(lambda c: dataclasses.replace(c, lengths=c.lengths[:2]).validate())(cache)


KEY = jnp.zeros((BATCH, 2, HEADS, HEAD_DIM))
add = functools.partial(kv4.append, key=KEY, value=KEY)
WRONG = {
    "head dim": (ValueError, lambda: kv4.init_cache(1, 8, 1, 12), "head_dim=12 must be a multiple"),
    "size": (ValueError, lambda: kv4.init_cache(1, 0, 1, 8), "max_length=0 must be at least 1"),
    "fraction": (TypeError, lambda: kv4.init_cache(1, 8.0, 1, 8), "max_length=8.0.*integer"),
    "dtype": (TypeError, lambda: kv4.init_cache(1, 8, 1, 8, dtype=jnp.int8), "int8.*bfloat16"),
    "cache": (TypeError, lambda: add(KEY), "must be a Kv4Cache"),
    "key's dtype": (TypeError, lambda: add(new(dtype=jnp.bfloat16)), "float32.*bfloat16"),
    "key's heads": (
        ValueError,
        lambda: kv4.append(new(), KEY[:, :, :1], KEY[:, :, :1]),
        r"\(3, 2, 1, 16\).*\[3, T, 2, 16\]",
    ),
    "value": (ValueError, lambda: kv4.append(new(), KEY, KEY[:, :1]), r"value.shape.*must equal"),
    "lengths": (ValueError, lambda: add(new(), lengths=lengths(3, 0, 0)), "between 0 and 2"),
    "lengths' shape": (
        ValueError,
        lambda: add(new(), lengths=lengths(1)),
        r"\(1,\) must be \(3,\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong(name):
    error, call, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


append_k8v4 = jax.jit(k8v4.append)
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


# Storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_k8v4_codes_and_scales_to_the_bit(dtype):
    """Ties, extremes of float32, zeros, what is not finite; jitted too; values as in KV4."""
    # Larger ones have a scale whose reciprocal may be flushed to 0.
    x = jnp.asarray(np.clip(awkward(16), -1e36, 1e36), dtype).reshape(1, -1, 1, 16)
    count = x.shape[1]
    for call in (k8v4.append, append_k8v4):
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
    cache = append_k8v4(k8v4.init_cache(1, len(size), 2, 64, dtype=jnp.float32), x, x)
    key, _ = k8v4.dequantize(cache)
    assert np.isfinite(key).all()
    step = np.maximum(
        np.abs(x) * 2.0**-4, np.asarray(jnp.max(jnp.abs(x), -1))[..., None] * 2.0**-17
    )
    assert (np.abs(np.asarray(key) - np.asarray(x)) <= step * (1 + 2.0**-7)).all()


def test_k8v4_what_is_not_finite_spoils_its_own_token_and_head_alone():
    key, value = normal(5, (2, 4, 2, 16)), normal(6, (2, 4, 2, 16))
    key, value = key.at[0, 1, 1, 3].set(jnp.inf), value.at[1, 3, 0, 15].set(jnp.nan)
    cache = append_k8v4(k8v4.init_cache(2, 8, 2, 16, dtype=jnp.float32), key, value)
    shown = [np.isnan(np.asarray(x)) for x in k8v4.dequantize(cache)]
    assert [x.sum() for x in shown] == [16, 16]
    assert shown[0][0, 1, 1].all()
    assert shown[1][1, 3, 0].all()


@pytest.mark.slow
def test_k8v4_in_any_split():
    key, value = normal(7, (3, 11, 2, 16)), normal(8, (3, 11, 2, 16))
    new = k8v4.init_cache(3, 60, 2, 16, dtype=jnp.float32)
    at_once, pieces = append_k8v4(new, key, value), new
    for start, stop in ((0, 1), (1, 6), (6, 11)):
        pieces = append_k8v4(pieces, key[:, start:stop], value[:, start:stop])
    assert_same_bits(pieces, at_once)
    _, prompt = prefill_jit(key, key, value, new)
    assert_same_bits(prompt, at_once)
    after = append_k8v4(prompt, *[jnp.zeros((3, 50, 2, 16))] * 2)
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
    cache = filled("k8v4", 2, 16, (20, 4), jnp.bfloat16, room=8)
    models.save_cache(tmp_path / "cache", cache)
    again, _ = models.load_cache(tmp_path / "cache")
    assert isinstance(again, k8v4.K8v4Cache)
    for got, want in zip(k8v4.dequantize(again), k8v4.dequantize(cache), strict=True):
        np.testing.assert_array_equal(got, want)
    assert (tmp_path / "cache").stat().st_size < 24 * 2 * (16 + 2 + 8 + 2) + 4096
