"""`K8v4Cache`: what is stored, where it differs from a `Kv4Cache`."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.attention.test_kv4_decode import decode, filled, normal, prefill
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.test_kv4_cache import awkward, oracle_pack, oracle_quantize
from turbojax import k8v4, models
from turbojax.kv.k8v4 import K8V4
from turbojax.state import kv4

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


# Storing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_codes_and_scales_to_the_bit(dtype):
    """Ties, extremes of float32, zeros, what is not finite; jitted too; values as in KV4."""
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
    with pytest.raises(TypeError, match="is a list, must be a Kv4Cache or a K8v4Cache"):
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


@pytest.mark.fuzz
def test_in_one_pass_is_what_decoding_attends_to():
    """Prompts aside, a model is scored at once as it would decode token by token."""
    query, key, value = (normal(30 + i, (2, 12, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    at_once, _ = K8V4.in_one_pass(query, key, value)
    cache = k8v4.init_cache(2, 12, 2, 16, dtype=jnp.float32)
    cache = append(cache, key, value)
    # All tokens' queries at once, each of which sees its own past.
    np.testing.assert_allclose(at_once, decode(query, cache), atol=2e-6)
