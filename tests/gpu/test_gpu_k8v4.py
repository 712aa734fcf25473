"""K8V4 compiled on a GPU: the cache's bits, and the decode kernel against the float64 oracle."""

import functools

import jax.numpy as jnp
import pytest

from tests.attention.test_kv4_decode import OPTIONS, SHAPES, decode, normal
from tests.caches.test_k8v4 import assert_matches, check_bits, check_not_finite, filled
from tests.gpu.gpu_helpers import assert_near, both
from tests.gpu.test_gpu_kv4 import CASES, DEFAULT, HOPPER, KERNELS, LARGE, on_hopper

pytestmark = pytest.mark.gpu

run = functools.partial(decode, implementation="triton")
matches = functools.partial(assert_matches, "triton", call=run)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_codes_and_scales_to_the_bit(dtype):
    check_bits(dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_kernel_equals_the_oracle(name):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    matches(normal(3, (len(lengths), count, heads, dim)), filled(kv_heads, dim, lengths))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    options = dict(OPTIONS[name])
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.asarray(options["query_seq_lengths"], jnp.int32)
    matches(normal(4, (3, 3, 4, 32)), filled(2, 32, (150, 7, 0), room=50), **options)


@on_hopper
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_equals_the_oracle(name):
    lengths, kv_heads, dim, heads, count = HOPPER[name]
    query = normal(3, (len(lengths), count, heads, dim))
    call = functools.partial(decode, implementation="mosaic_gpu")
    assert_matches("mosaic_gpu", query, filled(kv_heads, dim, lengths), call=call)


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_large_caches(name, kernel):
    """Twice the same bits, and plain JAX's numbers but for weights rounded within 2**-8."""
    lengths, kv_heads, dim, heads, count = LARGE[name]
    cache = filled(kv_heads, dim, lengths, jnp.bfloat16)
    query = normal(4, (len(lengths), count, heads, dim), jnp.bfloat16)
    options = {"local_window_size": (1000, 0)} if "window" in name else {}
    got, want = both(decode, query, cache, kernel=kernel, **options)
    assert_near(got[0], want[0], jnp.bfloat16, 2.0**-9)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_reaches_what_attends_to_it(kernel):
    check_not_finite(functools.partial(decode, implementation=kernel), dim=64)


def test_the_gpu_chooses_the_kernel():
    text = decode.lower(normal(5, (1, 1, 4, 64)), filled(2, 64, (90,))).as_text()
    assert DEFAULT in text
