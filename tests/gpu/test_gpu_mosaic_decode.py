"""`decode` through Mosaic GPU, compiled on Hopper, against the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from tests.gpu.gpu_helpers import (
    SOFTMAXES,
    assert_near,
    assert_same_nan,
    decode,
    filled,
    normal,
    on_hopper,
)
from tests.gpu.gpu_helpers import both as both_kernels
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_mosaic

pytestmark = [pytest.mark.gpu, on_hopper]


def both(*args, **options):
    return both_kernels(decode, *args, kernel="mosaic_gpu", **options)


CACHES = {
    "4 bits": tj.TurboConfig(),
    "2 bits": tj.TurboConfig(key_bits=2, value_bits=2, block_kv=128, buffer_size=128),
    "mixed": tj.TurboConfig(num_low_bit_key_heads=2, num_low_bit_value_heads=1),
    "keys 2, values 4": tj.TurboConfig(key_bits=2),
    "3 bits": tj.TurboConfig(key_bits=3, value_bits=3),
    "short blocks": tj.TurboConfig(block_kv=32, buffer_size=32),
    "4 and 3 bits, long blocks": tj.TurboConfig(
        num_low_bit_key_heads=2,
        num_low_bit_value_heads=1,
        low_bits=3,
        block_kv=128,
        buffer_size=128,
    ),
}
LENGTHS = (1000, 64, 1, 0, 331)


@pytest.mark.quick(8)
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("name", CACHES)
def test_ragged_caches(name, softmax):
    config = dataclasses.replace(CACHES[name], softmax=SOFTMAXES[softmax])
    cache = filled(4, 128, config, LENGTHS)
    got, want = both(normal(9, (5, 1, 16, 128)), cache)
    assert_near(got[0], want[0], jnp.bfloat16, 1e-4)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


OPTIONS = {
    "speculative": {"tokens": 8},
    "window": {"tokens": 2, "local_window_size": (100, 0)},
    "soft cap": {"tokens": 1, "logits_soft_cap": 4.0},
    "negative scale": {"tokens": 1, "scale": -0.2},
    "padding queries": {"tokens": 4, "query_seq_lengths": (4, 1, 0, 2, 3)},
}


def config_for(options, **fields):
    """The kernel takes no windows of caches with first tokens."""
    if "local_window_size" in options:
        fields["first_tokens"] = 0
    return tj.TurboConfig(**fields)


@pytest.mark.quick(6)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_and_dtypes(case, dtype):
    options = dict(OPTIONS[case])
    if "query_seq_lengths" in options:
        options["query_seq_lengths"] = jnp.array(options["query_seq_lengths"])
    cache = filled(2, 64, config_for(options), LENGTHS, appended=5, dtype=dtype)
    query = normal(9, (5, options.pop("tokens"), 8, 64), dtype)
    got, want = both(query, cache, **options)
    assert_near(got[0], want[0], dtype, 3e-4)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


# Other head dims are refused in words, which the tests on the CPU hold.
@pytest.mark.quick(5)
@pytest.mark.parametrize("name", [n for n, x in MODELS.items() if x.dim % 32 == 0])
def test_real_models(name):
    heads = MODELS[name]
    cache = filled(heads.kv, heads.dim, tj.TurboConfig(), (500,))
    got, want = both(normal(9, (1, 1, heads.query, heads.dim)), cache)
    assert_near(got[0], want[0], jnp.bfloat16, 1e-4)


@pytest.mark.parametrize(
    "launch",
    [(1, 1, 1, 1), (1, 3, 2, 1), (5, 2, 3, 5), (40, 1, 2, 1), (16, 1, 2, 8)],
    ids=lambda x: "-".join(map(str, x)),
)
def test_no_launch_changes_more_than_rounding(launch):
    """More splits than blocks, more warps than blocks, fewer stages than blocks in flight."""
    cache = filled(2, 128, tj.TurboConfig(), LENGTHS)
    query = normal(9, (5, 1, 8, 128))
    options = {"options": Options(True, scale=0.1)}
    chosen = decode_mosaic.Launch(*launch)
    ones = jnp.ones(5, jnp.int32)
    got = decode_mosaic.decode(query, cache, ones, launch=chosen, **options)
    want = decode(query, cache, scale=0.1, implementation="xla", return_residual=True)
    assert_near(got[0], want[0], jnp.bfloat16, 1e-4)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


MANY = {
    "three tokens": (3, 8, 2, 128, {}),
    "eight tokens": (8, 8, 2, 128, {}),
    "64 rows": (16, 8, 2, 64, {"softmax": tj.SAS()}),
    "256 channels": (5, 8, 2, 256, {"key_bits": 2}),
    "one token of twelve heads": (1, 24, 2, 128, {"block_kv": 128, "buffer_size": 128}),
    "heads of two widths": (
        8,
        8,
        2,
        128,
        {"num_low_bit_key_heads": 1, "num_low_bit_value_heads": 1},
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", MANY)
def test_many_queries_of_a_head(case):
    tokens, heads, kv_heads, head_dim, config = MANY[case]
    query = normal(9, (5, tokens, heads, head_dim))
    for options in ({}, {"local_window_size": (100, 0)}):
        cache = filled(kv_heads, head_dim, config_for(options, **config), LENGTHS, appended=5)
        lengths = jnp.minimum(cache.lengths, tokens)
        got, want = both(query, cache, query_seq_lengths=lengths, **options)
        assert_near(got[0], want[0], jnp.bfloat16, 1e-4)
        assert_near(got[1], want[1], jnp.float32, 1e-5)


@pytest.mark.parametrize(
    "launch",
    [
        (1, 1, 1, 1, 16),
        (2, 1, 2, 1, 32),
        (4, 1, 2, 4, 32),
        (3, 3, 3, 1, 32, 2),
        (2, 1, 2, 2, 16, 2),
    ],
    ids=lambda x: "-".join(map(str, x)),
)
def test_no_launch_of_many_queries_changes_more_than_rounding(launch):
    cache = filled(2, 128, tj.TurboConfig(), LENGTHS, appended=5)
    query, lengths = normal(9, (5, 5, 8, 128)), jnp.minimum(cache.lengths, 5)
    options = {"options": Options(True, scale=0.1)}
    chosen = decode_mosaic.Launch(*launch)
    got = decode_mosaic.decode(query, cache, lengths, launch=chosen, **options)
    want = decode(
        query, cache, scale=0.1, query_seq_lengths=lengths, implementation="xla",
        return_residual=True,
    )  # fmt: skip
    assert_near(got[0], want[0], jnp.bfloat16, 1e-4)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


def test_128k_tokens_alone():
    cache = filled(2, 128, tj.TurboConfig(), (2**17 - 5,))
    got, want = both(normal(9, (1, 1, 8, 128)), cache)
    assert_near(got[0], want[0], jnp.bfloat16, 1e-3)


@pytest.mark.quick(4)
@pytest.mark.parametrize("tokens", [2, 8])
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_nan_reaches_what_it_reaches_in_the_definition(softmax, tokens):
    query = normal(9, (2, tokens, 4, 64)).at[1, 0, 0, 0].set(jnp.nan)
    for options in ({}, {"local_window_size": (100, 0)}):
        cache = filled(2, 64, config_for(options, softmax=SOFTMAXES[softmax]), (300, 300))
        key, value = cache.key, cache.value
        cache = dataclasses.replace(
            cache,
            key=dataclasses.replace(key, block_scale=key.block_scale.at[0, 0, 2].set(jnp.nan)),
            value=dataclasses.replace(value, buffer_scale=value.buffer_scale.at[1, 1].set(jnp.nan)),
        )
        got, want = both(query, cache, **options)
        assert_same_nan(got, want)


def test_under_vmap_and_scan():
    cache = filled(2, 64, tj.TurboConfig(), (300, 77))
    query = normal(9, (3, 2, 1, 4, 64))

    def step(carry, q):
        return carry, tj.decode(q, cache, implementation="mosaic_gpu")

    scanned = jax.jit(lambda q: jax.lax.scan(step, 0, q)[1])(query)
    mapped = jax.vmap(lambda q: tj.decode(q, cache, implementation="mosaic_gpu"))(query)
    for i, q in enumerate(query):
        want = tj.decode(q, cache, implementation="mosaic_gpu")
        np.testing.assert_array_equal(scanned[i], want)
        np.testing.assert_array_equal(mapped[i], want)
