"""KV4 and K8V4 compiled on a GPU: the cache's bits, and decoding against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.test_kv4_decode import (
    INIT,
    KINDS,
    OPTIONS,
    SHAPES,
    assert_matches,
    check_beyond_the_length,
    check_nan,
    decode,
    filled,
    normal,
    options_of,
    prefill,
)
from tests.caches import test_kv4_cache
from tests.caches.test_kv4_cache import awkward, oracle_pack, oracle_quantize
from tests.gpu.gpu_helpers import KERNELS, assert_equal, assert_near, both, on_hopper
from turbojax._device import needs_hopper
from turbojax.attention.options import Options
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import mosaic_gpu

pytestmark = pytest.mark.gpu
DEFAULT = "turbojax_kv4_decode" if needs_hopper() else "turbojax_paged_hopper"


def matches(kernel, query, cache, **options):
    """Compiled, not as on a CPU interpreted."""
    call = functools.partial(decode, implementation=kernel)
    assert_matches(kernel, query, cache, call, **options)


@pytest.mark.parametrize("dim", [8, 80, 128])
def test_codes_and_scales_to_the_bit(dim):
    x = awkward(dim)
    want, want_scale = oracle_quantize(x)
    for call in (kv4.quantize_vectors, jax.jit(kv4.quantize_vectors)):
        codes, scale = call(jnp.asarray(x))
        np.testing.assert_array_equal(codes, oracle_pack(want))
        np.testing.assert_array_equal(np.asarray(scale).astype(np.float64), want_scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_codes_and_scales_of_k8v4_to_the_bit(dtype):
    test_kv4_cache.test_k8v4_codes_and_scales_to_the_bit(dtype)


@KINDS
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_equals_the_oracle(kind, name):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    query = normal(3, (len(lengths), count, heads, dim))
    matches("triton", query, filled(kind, kv_heads, dim, lengths))


@KINDS
@pytest.mark.parametrize("name", OPTIONS)
def test_options(kind, name):
    query, cache, options = options_of(kind, name)
    matches("triton", query, cache, **options)


# What the kernel for Hopper takes, by head dims of the above.
HOPPER = {
    "one query": ((200, 64, 1), 2, 64, 4, 1),
    "several": ((1100, 3, 0), 1, 128, 2, 5),
    "head dim 256": ((70, 2), 2, 256, 2, 3),
    "parts": ((5000, 2048, 2049), 16, 64, 16, 1),
}


@on_hopper
@KINDS
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_equals_the_oracle(kind, name):
    lengths, kv_heads, dim, heads, count = HOPPER[name]
    query = normal(3, (len(lengths), count, heads, dim))
    matches("mosaic_gpu", query, filled(kind, kv_heads, dim, lengths))


@on_hopper
def test_no_launch_of_hopper_changes_a_bit():
    """Parts of one program, or blocks of many, joined by the merge: the same order."""
    cache, query = filled("kv4", 2, 128, (5000, 1, 0, 2048)), normal(3, (4, 1, 8, 128))
    launch, ones = mosaic_gpu.default_launch(query, cache), jnp.ones(4, jnp.int32)
    assert launch.is_split
    want, *others = (
        mosaic_gpu.decode(query, cache, ones, options=Options(True, scale=0.1), launch=x)
        for x in (launch, launch._replace(is_split=False), launch._replace(stages=1))
    )
    for other in others:
        assert_equal(other, want)


# Lengths, KV heads, head dim, query heads and tokens: full sizes, against plain JAX.
LARGE = {
    "Llama-3-8B": ((4096, 4000, 1, 0), 8, 128, 32, 1),
    "head dim 64, window": ((3000, 128), 8, 64, 64, 2),
    "head dim 96": ((1500,), 4, 96, 12, 1),
    "head dim 256": ((700, 65), 2, 256, 16, 3),
}


CASES = [pytest.param(name, "triton") for name in LARGE]
CASES += [
    pytest.param(name, "mosaic_gpu", marks=on_hopper)
    for name, (_, _, dim, _, _) in LARGE.items()
    if dim in (64, 128, 256)
]


@KINDS
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_large_caches(kind, name, kernel):
    """Twice the same bits, and plain JAX's numbers but for weights rounded within 2**-8."""
    lengths, kv_heads, dim, heads, count = LARGE[name]
    cache = filled(kind, kv_heads, dim, lengths, jnp.bfloat16)
    query = normal(4, (len(lengths), count, heads, dim), jnp.bfloat16)
    options = {"local_window_size": (1000, 0)} if "window" in name else {}
    got, want = both(decode, query, cache, kernel=kernel, **options)
    assert_near(got[0], want[0], jnp.bfloat16, 2.0**-9)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


@KINDS
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_reaches_what_attends_to_it(kind, kernel):
    check_nan(kind, functools.partial(decode, implementation=kernel), dim=64)


@KINDS
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_stands_beyond_the_length_is_not_seen(kind, kernel):
    check_beyond_the_length(kind, functools.partial(decode, implementation=kernel), dim=64)


@pytest.mark.parametrize(
    ("kind", "dim", "name"),
    [("kv4", 64, DEFAULT), ("k8v4", 64, DEFAULT), ("kv4", 80, "turbojax_kv4_decode")],
)
def test_the_gpu_chooses_the_kernel(kind, dim, name):
    text = decode.lower(normal(5, (1, 1, 4, dim)), filled(kind, 2, dim, (90,))).as_text()
    assert name in text


@on_hopper
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize(("dim", "tokens"), [(128, 1), (80, 3), (264, 40)])
def test_append_on_hopper_stores_the_bits_of_plain_jax(kind, dim, tokens):
    """Hard vectors, ragged; lengths and what has no room too."""
    hard = np.tile(awkward(dim), (3, 1))[: 6 * tokens].reshape(3, tokens, 2, dim)
    x = jnp.asarray(hard), normal(6, hard.shape)
    cache = INIT[kind](3, tokens + 5, 2, dim, dtype=jnp.float32)
    append = jax.jit(kv4.append, static_argnames="implementation", donate_argnums=0)
    results = []
    for implementation in ("mosaic_gpu", "xla"):
        made = jax.tree.map(jnp.copy, cache)
        for counts in ((tokens, 1, 0), (tokens, tokens + 1, -1)):
            lengths = jnp.asarray(counts, jnp.int32)
            made = append(made, *x, lengths=lengths, implementation=implementation)
        results.append(jax.tree.leaves(made))
    for got, want in zip(*results, strict=True):
        # Bits of NaN may differ.
        got, want = (np.asarray(y).astype(np.float64) for y in (got, want))
        np.testing.assert_array_equal(got, want)
    assert made.lengths.tolist() == [min(2 * tokens, tokens + 5), tokens + 1, 0]


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
