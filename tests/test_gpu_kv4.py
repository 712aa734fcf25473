"""KV4 compiled on a GPU: the cache's bits, and the decode kernel against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_helpers import assert_near, both
from test_kv4_cache import awkward, oracle_pack, oracle_quantize
from test_kv4_decode import (
    OPTIONS,
    SHAPES,
    assert_matches_oracle,
    check_beyond_the_length,
    check_nan,
    decode,
    filled,
    normal,
    options_of,
    prefill,
)

from turbojax.state import kv4

pytestmark = pytest.mark.gpu

run = functools.partial(decode, implementation="triton")
# Weights are rounded to bfloat16, to the nearest.
matches = functools.partial(assert_matches_oracle, weight_unit=2.0**-8, call=run)


@pytest.mark.parametrize("dim", [8, 80, 128])
def test_codes_and_scales_to_the_bit(dim):
    x = awkward(dim)
    want, want_scale = oracle_quantize(x)
    for call in (kv4.quantize_vectors, jax.jit(kv4.quantize_vectors)):
        codes, scale = call(jnp.asarray(x))
        np.testing.assert_array_equal(codes, oracle_pack(want))
        np.testing.assert_array_equal(np.asarray(scale).astype(np.float64), want_scale)


@pytest.mark.parametrize("name", SHAPES)
def test_kernel_equals_the_oracle(name):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    matches(query, filled(kv_heads, dim, lengths))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    query, cache, options = options_of(name)
    matches(query, cache, **options)


# Lengths, KV heads, head dim, query heads and tokens: full sizes, against plain JAX.
LARGE = {
    "Llama-3-8B": ((4096, 4000, 1, 0), 8, 128, 32, 1),
    "head dim 64, window": ((3000, 128), 8, 64, 64, 2),
    "head dim 96": ((1500,), 4, 96, 12, 1),
    "head dim 256": ((700, 65), 2, 256, 16, 3),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_caches(name):
    """Twice the same bits, and plain JAX's numbers but for weights rounded within 2**-8."""
    lengths, kv_heads, dim, heads, count = LARGE[name]
    cache = filled(kv_heads, dim, lengths, jnp.bfloat16)
    query = normal(4, (len(lengths), count, heads, dim), jnp.bfloat16)
    options = {"local_window_size": (1000, 0)} if "window" in name else {}
    got, want = both(decode, query, cache, **options)
    assert_near(got[0], want[0], jnp.bfloat16, 2.0**-9)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


def test_what_is_not_finite_reaches_what_attends_to_it():
    check_nan(run)


def test_what_stands_beyond_the_length_is_not_seen():
    check_beyond_the_length(run)


def test_the_gpu_chooses_the_kernel():
    text = decode.lower(normal(5, (1, 1, 4, 64)), filled(2, 64, (90,))).as_text()
    assert "turbojax_kv4_decode" in text


def test_prefill_and_append_store_the_bits_of_a_cpu():
    shape = (2, 300, 4, 64)
    key, value = normal(6, shape, jnp.bfloat16), normal(7, shape, jnp.bfloat16)
    lengths = jnp.asarray([300, 77], jnp.int32)
    _, cache = prefill(
        key, key, value, kv4.init_cache(2, 400, 4, 64), key_value_seq_lengths=lengths
    )
    cache = jax.jit(kv4.append)(cache, key[:, :2], value[:, :2])
    for x, codes, scale in (
        (key, cache.key_codes, cache.key_scale),
        (value, cache.value_codes, cache.value_scale),
    ):
        for b, n in enumerate((300, 77)):
            tokens = np.concatenate([x[b, :n], x[b, :2]])
            want, want_scale = oracle_quantize(tokens)
            packed = oracle_pack(want).swapaxes(0, 1)
            np.testing.assert_array_equal(np.asarray(codes)[b, :, : n + 2], packed)
            got = np.asarray(scale)[b, :, : n + 2].astype(np.float64)
            np.testing.assert_array_equal(got, want_scale.T)
