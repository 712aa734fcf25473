"""`turbo_attention` and `decode` through Triton, compiled, against the definition at real sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from tests import oracles
from tests.attention.attention_helpers import attend
from tests.caches.cache_helpers import assert_same_bits
from tests.gpu.gpu_helpers import (
    MODES,
    RELATIVE,
    SOFTMAXES,
    assert_near,
    assert_same_nan,
    both,
    decode,
    filled,
    normal,
)
from turbojax._device import gpu_compute_capability
from turbojax.attention.options import Options

pytestmark = pytest.mark.gpu

ATTENTION = {
    "ragged causal": {"lengths": (700, 130, 0), "is_causal": True},
    "window": {"local_window_size": (100, 30)},
    "causal window, soft cap": {"local_window_size": 64, "is_causal": True, "logits_soft_cap": 8.0},
    "negative scale": {"scale": -0.1},
}


# All pairs of a mode and a case, whose softmaxes rotate: all pairs with these, too.
ATTENTION_GRID = [
    (case, list(SOFTMAXES)[(i + j) % len(SOFTMAXES)], mode)
    for i, case in enumerate(ATTENTION)
    for j, mode in enumerate(MODES)
]


@pytest.mark.quick(7)
@pytest.mark.parametrize(("case", "softmax", "mode"), ATTENTION_GRID)
def test_attention(mode, softmax, case):
    options = dict(ATTENTION[case])
    lengths = options.pop("lengths", None)
    if lengths is not None:
        options["key_value_seq_lengths"] = jnp.array(lengths)
    q, k, v = normal(1, (3, 700, 8, 128)), normal(2, (3, 700, 2, 128)), normal(3, (3, 700, 2, 128))
    config = tj.TurboConfig(mode=mode, softmax=SOFTMAXES[softmax])
    got, want = both(attend, q, k, v, config=config, **options)
    assert_near(got[0], want[0], q.dtype, RELATIVE[mode])
    assert_near(got[1], want[1], jnp.float32, RELATIVE[mode])


def modifiers_of(names, batch=3, tokens=700, heads=8):
    rng = np.random.default_rng(3)
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (batch, tokens))), jnp.int32)
    all_of_them = {
        "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "sinks": {"sinks": jnp.asarray(rng.normal(size=heads), jnp.float32)},
        "offsets": {"query_offset": jnp.array([300, 5, 0]), "key_offset": jnp.array([0, 0, 40])},
        "bias": {"bias": jnp.asarray(rng.normal(size=(1, heads, tokens, tokens)), jnp.bfloat16)},
        "row": {"bias": jnp.where(rng.random((batch, 1, 1, tokens)) < 0.2, -jnp.inf, 0.5)},
        "slopes": {"alibi_slopes": jnp.asarray(2.0 ** -np.arange(heads), jnp.float32)},
        "images": {"key_bounds": tj.bounds.image_blocks((ids % 2) * ids)},
        "bounds": {"key_bounds": tuple(jnp.asarray(rng.integers(-9, 800, (2, batch, tokens))))},
    }
    return {k: v for name in names for k, v in all_of_them[name].items()}


@pytest.mark.quick(7)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "names",
    [
        ("segments",),
        ("sinks",),
        ("offsets",),
        ("bias",),
        ("row",),
        ("slopes",),
        ("segments", "sinks", "offsets", "bias", "slopes"),
        ("images",),
        ("bounds", "segments", "sinks", "offsets", "bias", "slopes"),
    ],
    ids=" ".join,
)
def test_attention_with_modifiers(mode, names):
    q, k, v = normal(1, (3, 700, 8, 128)), normal(2, (3, 700, 2, 128)), normal(3, (3, 700, 2, 128))
    options = {"config": tj.TurboConfig(mode=mode), "output_dtype": jnp.float32}
    options["is_causal"] = "images" not in names
    options["key_value_seq_lengths"] = jnp.array([700, 130, 0])
    got, want = both(attend, q, k, v, **options, **modifiers_of(names))
    assert got[0].dtype == jnp.float32
    # Sums of rounded weights: of the outputs' size, not of float32's last place.
    assert_near(got[0], want[0], q.dtype, RELATIVE[mode])
    assert_near(got[1], want[1], jnp.float32, RELATIVE[mode])


def models_and_blocks():
    """Every model with some block, and every head dim with all of them."""
    blocks, names = (32, 64, 128), {}
    for name, heads in MODELS.items():
        names.setdefault(heads.dim, []).append(name)
    for same in names.values():
        for i in range(max(len(same), len(blocks))):
            yield same[i % len(same)], blocks[i % len(blocks)]


@pytest.mark.quick(7)
@pytest.mark.parametrize(("name", "block"), list(models_and_blocks()))
def test_attention_of_real_models(name, block):
    heads = MODELS[name]
    q = normal(4, (1, 300, heads.query, heads.dim))
    k, v = (normal(i, (1, 300, heads.kv, heads.dim)) for i in (5, 6))
    config = tj.TurboConfig.paper(block_q=block, block_kv=block, buffer_size=128, softmax="exact")
    got, want = both(attend, q, k, v, config=config, is_causal=True)
    assert_near(got[0], want[0], q.dtype, 1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("mode", MODES)
def test_attention_in_other_dtypes(mode, dtype):
    q, k, v = (normal(i, (2, 200, 4, 64), dtype) for i in range(3))
    got, want = both(attend, q, k, v, config=tj.TurboConfig.paper(mode=mode))
    assert_near(got[0], want[0], dtype, RELATIVE[mode])


def test_fp8_is_exact():
    """Mode fp8 against float64: e4m3 products sum without loss that shows, here and in XLA."""
    q, k, v = (normal(i, (2, 500, h, 128)) for i, h in enumerate((8, 2, 2)))
    options = {"mode": "fp8", "softmax": "exact", "block_q": 64, "block_kv": 64, "is_causal": True}
    arrays = [np.asarray(x.astype(jnp.float32)) for x in (q, k, v)]
    want = oracles.attention(*arrays, **options)
    config = tj.TurboConfig(mode="fp8", softmax="exact")
    got, xla = both(attend, q, k, v, config=config, is_causal=True)
    errors = {n: np.abs(x[1] - want.residual).max() for n, x in (("triton", got), ("xla", xla))}
    assert errors["triton"] < 1e-5, errors
    assert errors["xla"] < 1e-5, errors


def test_a_long_prompt():
    """128k tokens, a few queries at its end and everything else in between."""
    q, k, v = (
        normal(1, (1, 64, 4, 128)),
        normal(2, (1, 2**17, 1, 128)),
        normal(3, (1, 2**17, 1, 128)),
    )
    got, want = both(attend, q, k, v, config=tj.TurboConfig.paper(softmax="exact"))
    assert_near(got[0], want[0], q.dtype, 3e-3)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


# Decode ------------------------------------------------------------------------------------------


CACHES = {
    "4 bits": tj.TurboConfig.paper(),
    "3 bits": tj.TurboConfig.paper(key_bits=3, value_bits=3),
    "2 bits": tj.TurboConfig.paper(key_bits=2, value_bits=2, block_kv=128, buffer_size=128),
    "mixed": tj.TurboConfig.paper(
        num_low_bit_key_heads=2, num_low_bit_value_heads=1, buffer_size=128
    ),
    "blocks of 16": tj.TurboConfig.paper(block_kv=16, num_low_bit_value_heads=2, low_bits=3),
}
DECODE = {
    "one query": {"tokens": 1},
    "speculative": {"tokens": 4},
    "window": {"tokens": 2, "local_window_size": (100, 0)},
    "soft cap": {"tokens": 1, "logits_soft_cap": 4.0},
    "negative scale": {"tokens": 1, "scale": -0.2},
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("mode", MODES)
def test_decode(name, mode):
    options = dict(list(DECODE.values())[(len(name) + MODES.index(mode)) % len(DECODE)])
    softmax = list(SOFTMAXES.values())[MODES.index(mode) % 3]
    cache = filled(4, 128, CACHES[name], (1000, 64, 1, 0, 331))
    config = dataclasses.replace(cache.config, mode=mode, softmax=softmax)
    cache = dataclasses.replace(cache, config=config)
    query = normal(9, (5, options.pop("tokens"), 16, 128))
    got, want = both(decode, query, cache, **options)
    assert_near(got[0], want[0], query.dtype, 1e-3)
    assert_near(got[1], want[1], jnp.float32, 1e-5)


@pytest.mark.quick(5)
@pytest.mark.parametrize("case", DECODE)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_decode_options_and_dtypes(case, dtype):
    options = dict(DECODE[case])
    cache = filled(2, 64, tj.TurboConfig.paper(), (700, 129), dtype=dtype)
    query = normal(9, (2, options.pop("tokens"), 8, 64), dtype)
    got, want = both(decode, query, cache, **options)
    assert_near(got[0], want[0], dtype, 1e-4)


# More heads to one KV head are refused in words, which the tests on the CPU hold.
@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [n for n, x in MODELS.items() if x.query // x.kv <= 64])
def test_decode_of_real_models(name):
    heads = MODELS[name]
    cache = filled(heads.kv, heads.dim, tj.TurboConfig.paper(), (500,))
    query = normal(9, (1, 1, heads.query, heads.dim))
    got, want = both(decode, query, cache)
    assert_near(got[0], want[0], query.dtype, 1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", MODES)
def test_prefill_shares_its_codes_with_the_cache(mode):
    """Whatever `None` chooses stores the bits of plain JAX and attends like it."""
    config = tj.TurboConfig(mode=mode, num_low_bit_value_heads=1, softmax="exact")
    query, key, value = (normal(i, (2, 500, h, 96)) for i, h in enumerate((8, 2, 2)))
    call = jax.jit(tj.prefill, static_argnames=("implementation", "return_residual"))
    results = []
    for name in (None, "triton", "xla"):
        cache = tj.init_cache(2, 600, 2, 96, config=config)
        lengths = jnp.array([500, 130])
        results.append(
            call(
                query,
                key,
                value,
                cache,
                key_value_seq_lengths=lengths,
                implementation=name,
                return_residual=True,
            )
        )
    (want, want_cache) = results[-1]
    # On Hopper None is `mosaic_gpu`, whose weights round the other way now and then.
    chosen = RELATIVE[mode] if mode == "float" else 5e-3
    for (got, cache), allowed in zip(results[:-1], (chosen, RELATIVE[mode]), strict=True):
        assert_near(got[0], want[0], query.dtype, allowed)
        assert_same_bits(cache, want_cache)


def test_decode_of_128k_tokens_alone():
    cache = filled(2, 128, tj.TurboConfig.paper(), (2**17 - 5,))
    query = normal(9, (1, 1, 8, 128))
    got, want = both(decode, query, cache)
    assert_near(got[0], want[0], query.dtype, 1e-3)


def test_nan_reaches_what_it_reaches_in_the_definition():
    cache = filled(2, 64, tj.TurboConfig.paper(), (300, 300))
    cache = dataclasses.replace(
        cache,
        key=dataclasses.replace(
            cache.key, block_scale=cache.key.block_scale.at[0, 0, 2].set(jnp.nan)
        ),
        value=dataclasses.replace(
            cache.value, buffer_scale=cache.value.buffer_scale.at[1, 1].set(jnp.nan)
        ),
    )
    query = normal(9, (2, 2, 4, 64)).at[1, 0, 0, 0].set(jnp.nan)
    for mode, softmax in zip(MODES, ("exact", tj.SAS(), tj.SAS(), "exact"), strict=True):
        chosen = dataclasses.replace(
            cache, config=dataclasses.replace(cache.config, mode=mode, softmax=softmax)
        )
        for options in ({}, {"local_window_size": (100, 0)}):
            got, want = both(decode, query, chosen, **options)
            assert_same_nan(got, want)
    q, k, v = (normal(i, (2, 300, 2, 64)) for i in range(3))
    k, v = k.at[0, 70, 1, 3].set(jnp.nan), v.at[1, 3, 0, 0].set(jnp.inf)
    for mode in MODES:
        got, want = both(attend, q, k, v, config=tj.TurboConfig.paper(mode=mode), is_causal=True)
        assert_same_nan(got, want)


def test_none_takes_the_kernels_here():
    """Those for Hopper there, for Triton on other GPUs."""
    from turbojax.caches.progressive.api import DECODE as DECODE_REGISTRY
    from turbojax.caches.progressive.update import APPEND, STORE_PROMPT

    best = "mosaic_gpu" if gpu_compute_capability() == 9.0 else "triton"
    cache = tj.init_cache(1, 128, 2, 64, config=tj.TurboConfig.paper())
    new = normal(0, (1, 1, 2, 64))
    for registry in (APPEND, STORE_PROMPT):
        assert registry.select(None, cache=cache, key=new).name == best
    options = {"options": Options(True, scale=0.1)}
    assert DECODE_REGISTRY.select(None, query=new, cache=cache, **options).name == best
