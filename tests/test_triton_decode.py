"""The Triton kernel of `decode`, interpreted, against the float64 oracle and the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_helpers import assert_same_bits
from kernel_helpers import lower_for_cuda
from test_decode import BASE, HEADS, OPTIONS, assert_close, configured, decode, oracle_of, stored
from test_decode import tokens as random_tokens

import turbojax as tj
from benchmarks.shapes import MODELS
from turbojax._device import interpret_kernels
from turbojax.ops.turbo_attention import triton
from turbojax.ops.turbo_attention.masking import Visibility

MODES = ("int8", "int8_fp8", "fp8", "float")
SOFTMAXES = {"exact": "exact", "sas-e": tj.SAS(), "sas-2": tj.SAS(base="2")}


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


run = functools.partial(decode, implementation="triton", return_residual=True)
reference = functools.partial(decode, implementation="xla", return_residual=True)


def assert_matches_oracle(query, cache, **options):
    want = oracle_of(query, cache, **options)
    out, lse = run(query, cache, **options)
    assert (out.dtype, out.shape) == (query.dtype, query.shape)
    assert lse.dtype == jnp.float32
    own = 0 if query.dtype == jnp.float32 else float(jnp.finfo(query.dtype).eps)
    assert_close(out, want.out, want.out_tolerance + own * np.abs(want.out) + own * 1e-3)
    assert_close(lse, want.residual, want.residual_tolerance)
    assert np.median(want.out_tolerance) < 1e-4 * np.abs(want.out).max()


PAIRS = [(m, s) for i, m in enumerate(MODES) for s in list(SOFTMAXES)[i % 2 :][:2]]


@pytest.mark.parametrize(("mode", "softmax"), PAIRS)
def test_equals_the_oracle(mode, softmax):
    """Mixed 2- and 4-bit heads, ragged lengths, blocks and buffer; one query or several."""
    count = {"exact": 1, "sas-e": 3, "sas-2": 1}[softmax]
    config = dataclasses.replace(BASE, mode=mode, softmax=SOFTMAXES[softmax])
    assert_matches_oracle(random_tokens(count, 6, HEADS), configured(config))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    assert_matches_oracle(random_tokens(3, 7, HEADS), stored(), **OPTIONS[name])


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale):
    assert_matches_oracle(random_tokens(1, 7, HEADS), stored(), scale=scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision(dtype):
    assert_matches_oracle(random_tokens(2, 8, HEADS, dtype), stored(dtype))


def filled(heads, head_dim, config, lengths, appended=3, seed=0, dtype=jnp.float32):
    """A cache after a ragged prompt and some appended tokens."""
    rng = np.random.default_rng(seed)
    batch, size = len(lengths), max(lengths)

    def draw(count):
        return jnp.asarray(rng.normal(size=(batch, count, heads, head_dim)), dtype)

    cache = tj.init_cache(batch, size + appended, heads, head_dim, config=config, dtype=dtype)
    key, value = draw(size), draw(size)
    length = jnp.asarray(lengths, jnp.int32)
    _, cache = tj.prefill(
        key, key, value, cache, key_value_seq_lengths=length, implementation="xla"
    )
    if not appended:
        return cache
    return tj.append(cache, draw(appended), draw(appended), implementation="xla")


def assert_matches_reference(query, cache, **options):
    """Nearly everywhere to a few units in the last place; a flipped code costs 1/119 of a weight.

    A comparison with the definition at shapes where the oracle would take long.
    """
    for got, want in zip(
        run(query, cache, **options), reference(query, cache, **options), strict=True
    ):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got[~finite], want[~finite])
        error = np.abs(got[finite] - want[finite])
        assert np.quantile(error, 0.99) <= 4e-6
        assert error.max() <= 2e-2


WIDTHS = {
    "4 bits": {},
    "3 bits": {"key_bits": 3, "value_bits": 3},
    "2 bits": {"key_bits": 2, "value_bits": 2},
    "3 and 2": {"key_bits": 3, "num_low_bit_key_heads": 1, "value_bits": 2},
    "4 and 3": {"num_low_bit_value_heads": 1, "low_bits": 3},
}


BLOCKS = [(name, (16, 64, 128)[i % 3]) for i, name in enumerate(WIDTHS)] + [("4 bits", 128)]


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_widths_and_blocks(name, block):
    config = tj.TurboConfig(block_q=16, block_kv=block, buffer_size=128, **WIDTHS[name])
    cache = filled(2, 64, config, (300, 131))
    assert_matches_reference(normal(1, (2, 1, 4, 64)), cache)


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_real_models(name):
    heads = MODELS[name]
    if heads.query // heads.kv > 64:
        pytest.skip("71 heads share one KV head: the next test")
    cache = filled(heads.kv, heads.dim, tj.TurboConfig(), (150,))
    assert_matches_reference(normal(2, (1, 1, heads.query, heads.dim)), cache)


def test_too_many_queries_are_refused_in_words():
    cache = filled(1, 64, tj.TurboConfig(), (70,))
    with pytest.raises(NotImplementedError, match="71 heads per KV head must be at most 64"):
        tj.decode(normal(3, (1, 1, 71, 64)), cache, implementation="triton")


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_edges(tokens):
    """An empty sequence, one token, exactly one block, fewer tokens than queries, padding."""
    cache = filled(2, 64, tj.TurboConfig(), (0, 1, 64, 65), appended=0)
    query = normal(4, (4, tokens, 4, 64))
    assert_matches_reference(query, cache)
    lengths = jnp.array([0, 1, 1, tokens])
    assert_matches_reference(query, cache, query_seq_lengths=lengths)


@pytest.mark.parametrize(("mode", "softmax"), PAIRS[::2])
def test_nan_reaches_exactly_what_it_reaches_in_the_reference(mode, softmax):
    cache = filled(2, 64, tj.TurboConfig(), (150, 140), appended=0)
    key, value = cache.key, cache.value
    config = dataclasses.replace(cache.config, mode=mode, softmax=SOFTMAXES[softmax])
    cache = dataclasses.replace(
        cache,
        key=dataclasses.replace(key, block_scale=key.block_scale.at[0, 0, 1].set(jnp.nan)),
        value=dataclasses.replace(value, buffer_scale=value.buffer_scale.at[1, 1].set(jnp.nan)),
        config=config,
    )
    query = normal(5, (2, 2, 6, 64)).at[1, 0, 0, 0].set(jnp.nan)
    for options in ({}, {"local_window_size": (30, 0)}):
        got, want = run(query, cache, **options), reference(query, cache, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert not np.isnan(got[0]).all()


def test_splits_do_not_matter(monkeypatch):
    """Blocks over one program or many: the same splits of the softmax, so nearly the same bits."""
    cache, query = filled(2, 64, tj.TurboConfig(), (700, 333)), normal(6, (2, 1, 4, 64))
    results = []
    for programs in (1, 8, 1000):
        monkeypatch.setattr(triton, "_ENOUGH_PROGRAMS", programs)
        triton._decode.clear_cache()
        results.append(tj.decode(query, cache, implementation="triton"))
    triton._decode.clear_cache()
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-6)


def test_transforms():
    """Twice the same bits; vmap over layers and scan."""
    caches = [filled(2, 64, tj.TurboConfig(), (100, 9), seed=i) for i in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    query = normal(7, (2, 2, 1, 4, 64))
    one = functools.partial(tj.decode, implementation="triton")
    want = [one(q, c) for q, c in zip(query, caches, strict=True)]
    np.testing.assert_array_equal(want[0], one(query[0], caches[0]))
    np.testing.assert_allclose(jax.vmap(one)(query, stacked), jnp.stack(want), atol=1e-6)
    _, scanned = jax.lax.scan(lambda c, x: (c, one(*x)), None, (query, stacked))
    np.testing.assert_allclose(scanned, jnp.stack(want), atol=1e-6)


@pytest.mark.parametrize("mode", ["int8", "int8_fp8"])
def test_prefill_shares_its_codes_with_the_cache(mode):
    """One pass over keys and values: the same cache bits and the same outputs as plain JAX."""
    config = tj.TurboConfig(mode=mode, num_low_bit_key_heads=1)
    key, value = (normal(i, (3, 150, 2, 64)) for i in (8, 9))
    query, lengths = normal(10, (3, 150, 4, 64)), jnp.array([150, 64, 0])
    results = []
    for name in ("triton", "xla"):
        cache = tj.init_cache(3, 200, 2, 64, config=config, dtype=jnp.float32)
        results.append(
            tj.prefill(
                query,
                key,
                value,
                cache,
                key_value_seq_lengths=lengths,
                implementation=name,
                return_residual=True,
            )
        )
    ((out, lse), cache), ((want, want_lse), want_cache) = results
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    assert_same_bits(cache, want_cache)


LOWERED = [
    (mode, name, (64, 96, 128, 256)[(i + j) % 4])
    for i, mode in enumerate(MODES)
    for j, name in enumerate(WIDTHS)
]


@pytest.mark.parametrize(("mode", "name", "dim"), LOWERED)
def test_lowers_for_cuda(mode, name, dim):
    config = tj.TurboConfig(mode=mode, softmax="exact" if dim == 64 else tj.SAS(), **WIDTHS[name])
    cache = jax.eval_shape(lambda: tj.init_cache(2, 4096, 2, dim, config=config))
    call = functools.partial(
        triton._decode,
        scale=0.1,
        visibility=Visibility(True, (100, 0) if dim == 96 else None),
        logits_soft_cap=5.0 if dim == 96 else None,
        interpret=False,
    )
    query = jax.ShapeDtypeStruct((2, 1 if dim == 128 else 3, 8, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert "turbojax_decode" in text
