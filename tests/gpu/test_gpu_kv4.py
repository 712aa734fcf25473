"""KV4 compiled on a GPU: the cache's bits, and the decode kernel against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.test_kv4_decode import (
    OFFSET,
    OPTIONS,
    SHAPES,
    WEIGHT_UNIT,
    assert_matches_oracle,
    check_beyond_the_length,
    check_nan,
    decode,
    filled,
    normal,
    options_of,
    prefill,
)
from tests.caches.test_kv4_cache import awkward, oracle_pack, oracle_quantize
from tests.gpu.gpu_helpers import assert_near, both
from turbojax._device import needs_hopper
from turbojax.attention.options import Options
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import mosaic_gpu

pytestmark = pytest.mark.gpu
# Of implementations, those that run here.
on_hopper = pytest.mark.skipif(needs_hopper() is not None, reason=str(needs_hopper()))
KERNELS = ["triton", pytest.param("mosaic_gpu", marks=on_hopper)]
DEFAULT = "turbojax_kv4_decode" if needs_hopper() else "turbojax_paged_hopper"

run = functools.partial(decode, implementation="triton")
run_on_hopper = functools.partial(decode, implementation="mosaic_gpu")
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


# What the kernel for Hopper takes, by head dims of the above.
HOPPER = {
    "one query": ((200, 64, 1), 2, 64, 4, 1),
    "several": ((1100, 3, 0), 1, 128, 2, 5),
    "head dim 256": ((70, 2), 2, 256, 2, 3),
    "parts": ((5000, 2048, 2049), 16, 64, 16, 1),
}


@on_hopper
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_equals_the_oracle(name):
    lengths, kv_heads, dim, heads, count = HOPPER[name]
    query = normal(3, (len(lengths), count, heads, dim))
    cache = filled(kv_heads, dim, lengths)
    given = WEIGHT_UNIT["mosaic_gpu"], run_on_hopper, OFFSET["mosaic_gpu"]
    assert_matches_oracle(query, cache, *given)


@on_hopper
def test_no_launch_of_hopper_changes_a_bit():
    """Parts of one program, or blocks of many, joined by the merge: the same order."""
    cache, query = filled(2, 128, (5000, 1, 0, 2048)), normal(3, (4, 1, 8, 128))
    launch, ones = mosaic_gpu.default_launch(query, cache), jnp.ones(4, jnp.int32)
    assert launch.is_split
    want, *others = (
        mosaic_gpu.decode(query, cache, ones, options=Options(True, scale=0.1), launch=x)
        for x in (launch, launch._replace(is_split=False), launch._replace(stages=1))
    )
    for other in others:
        for a, b in zip(other, want, strict=True):
            np.testing.assert_array_equal(a, b)


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
    check_nan(functools.partial(decode, implementation=kernel), dim=64)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_stands_beyond_the_length_is_not_seen(kernel):
    check_beyond_the_length(functools.partial(decode, implementation=kernel), dim=64)


def test_the_gpu_chooses_the_kernel():
    text = decode.lower(normal(5, (1, 1, 4, 64)), filled(2, 64, (90,))).as_text()
    assert DEFAULT in text
    text = decode.lower(normal(5, (1, 1, 4, 80)), filled(2, 80, (90,))).as_text()
    assert "turbojax_kv4_decode" in text


INIT = {"kv4": kv4.init_cache, "k8v4": kv4.init_k8v4_cache}


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
