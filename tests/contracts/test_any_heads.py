"""``"2/4bit"`` of any number of KV heads: what holds it; priorities of heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbojax as tj
from tests import oracles
from tests.attention.decode_helpers import assert_matches_oracle, queries, under
from tests.caches.cache_helpers import (
    append,
    assert_holds,
    assert_same_bits,
    on_host,
    oracle_for,
    prefill,
)
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import caches as kv
from turbojax import quantizers
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_mosaic
from turbojax.caches.progressive import decode_triton as triton
from turbojax.caches.progressive.update import store_prompt

HEAD_DIM, BLOCK, MAX_LENGTH = 16, 16, 96
# Blocks and a buffer; a block and a buffer that a token more than fills; one token alone.
PROMPT, ADDED = (40, 30, 0), (20, 3, 1)

heads_of_one_case = pytest.mark.parametrize("heads", [3, 1, 5, 7])


# The name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", range(1, 12))
def test_it_is_half_of_keys_and_values_together(heads):
    """3 bits on average, whatever their number; keys have the larger half of the 4-bit heads."""
    config = kv.cache_by_name("2/4bit", heads)
    cache = jax.eval_shape(lambda: tj.init_cache(1, 64, heads, 128, config=config))
    low = []
    for side in (cache.key, cache.value):
        assert sum(x.shape[1] for x in side.codes) == heads
        low.append(sum(x.shape[1] for x, b in zip(side.codes, side.bits, strict=True) if b == 2))
    assert low == [heads // 2, -(-heads // 2)]
    codes = sum(x.size for side in (cache.key, cache.value) for x in side.codes)
    assert 8 * codes == 3 * 2 * heads * 64 * 128
    assert config == tj.TurboConfig(num_low_bit_key_heads=low[0], num_low_bit_value_heads=low[1])


@pytest.mark.parametrize(
    ("heads", "devices", "low"),
    [(6, 2, (1, 2)), (2, 2, (0, 1)), (8, 2, (2, 2)), (12, 4, (1, 2)), (5, 1, (2, 3))],
)
def test_over_devices_it_is_half_of_each_ones_heads(heads, devices, low):
    config = kv.cache_by_name("2/4bit", heads, devices)
    assert (config.num_low_bit_key_heads, config.num_low_bit_value_heads) == low
    assert config.heads_per_group == (heads // devices if devices > 1 else None)
    assert kv.cache_by_name("4bit", heads, devices) == tj.TurboConfig()
    assert kv.cache_by_name("kivi4", heads, devices) == kv.cache_by_name("kivi4", heads)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("2/4bit", 6, 4), ValueError, "6 KV heads must be a multiple of 4 devices"),
        (("2/4bit", 0), ValueError, "num_kv_heads=0 must be at least 1"),
        (("4bit", 4, 0), ValueError, "devices=0 must be at least 1"),
        (("2/4bit", 1.5), TypeError, "num_kv_heads=1.5 must be an integer"),
    ],
)
def test_bad_numbers_of_heads(arguments, error, words):
    with pytest.raises(error, match=words):
        kv.cache_by_name(*arguments)


# Caches ------------------------------------------------------------------------------------------


def config_of(heads, devices=1):
    config = kv.cache_by_name("2/4bit", heads, devices)
    return dataclasses.replace(config, block_q=BLOCK, block_kv=BLOCK, buffer_size=BLOCK)


@functools.cache
def empty(heads):
    new = functools.partial(tj.init_cache, len(PROMPT), MAX_LENGTH, heads, HEAD_DIM)
    return on_host(jax.jit(functools.partial(new, config=config_of(heads), dtype=jnp.float32))())


def tokens(heads, count, seed):
    """Heads whose ranges differ, so that their order is no matter of rounding."""
    rng = np.random.default_rng(seed)
    loud = np.where(rng.random((len(PROMPT), 1, heads, HEAD_DIM)) < 0.15, 4.0, 1.0)
    size = rng.permutation(1.5 ** np.arange(heads))[:, None]
    shape = (len(PROMPT), count, heads, HEAD_DIM)
    return tuple((rng.normal(size=shape) * loud * size).astype(np.float32) for _ in range(2))


@functools.cache
def filled(heads, implementation="xla"):
    """Of a prompt and of tokens that are appended."""
    cache = prefill(empty(heads), *tokens(heads, max(PROMPT), 1), PROMPT, implementation)
    return append(cache, *tokens(heads, max(ADDED), 2), ADDED, implementation)


@pytest.mark.quick(1, slow=0)
@heads_of_one_case
def test_what_is_stored_is_the_oracles(heads):
    """Bit for bit: which heads have how many bits, their codes, scales and buffers."""
    oracle = oracle_for(empty(heads))
    oracle.prefill(*tokens(heads, max(PROMPT), 1), PROMPT)
    oracle.append(*tokens(heads, max(ADDED), 2), ADDED)
    assert_holds(filled(heads), oracle)
    if heads > 1:  # and heads of both widths are not where they began
        assert not np.array_equal(filled(heads).key.head_slots[0], np.arange(heads))


@pytest.mark.fuzz
@heads_of_one_case
def test_triton_stores_the_same_bits(heads):
    assert_same_bits(filled(heads, "triton"), filled(heads))


DECODED = [("xla", 3), ("triton", 3), ("xla", 1), ("xla", 5), ("xla", 7)]
DECODED += [("triton", heads) for heads in (1, 5, 7)]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("implementation", "heads"), DECODED)
def test_attention_to_it_is_the_oracles(implementation, heads):
    """In float64 over what is stored, two queries a KV head; one sequence is of one token."""
    query = queries(1, 3, len(PROMPT), 2 * heads, HEAD_DIM)
    cache = under(filled(heads), "int8", "exact")
    assert_matches_oracle(query, cache, implementation)


@pytest.mark.quick(slow=1)
@heads_of_one_case
@pytest.mark.parametrize("method", ["entropy", "min_max", "variation"])
def test_every_priority_ranks_them(heads, method):
    config = dataclasses.replace(config_of(heads), head_priority=method)
    new = tj.init_cache(len(PROMPT), MAX_LENGTH, heads, HEAD_DIM, config=config, dtype=jnp.float32)
    oracle = oracle_for(new)
    given = tokens(heads, max(PROMPT), 1)
    oracle.prefill(*given, PROMPT)
    assert_holds(prefill(on_host(new), *given, PROMPT), oracle)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("heads", [3, 1])
def test_groups_of_devices_hold_what_each_device_would(heads):
    """Two devices' heads in one cache: in each group the same codes as in a cache of its own."""
    given = tokens(2 * heads, max(PROMPT), 4)
    own = config_of(2 * heads, 2)
    assert own.groups_of(2 * heads) == 2
    store = jax.jit(functools.partial(store_prompt, implementation="xla"))
    new = functools.partial(tj.init_cache, len(PROMPT), MAX_LENGTH, dtype=jnp.float32, config=own)
    lengths = np.int32(PROMPT)
    whole = store(new(2 * heads, HEAD_DIM), *given, lengths)
    whole.validate()
    both = tj.dequantize(whole)
    for first in (0, heads):
        part = slice(first, first + heads)
        half = store(new(heads, HEAD_DIM), *(x[:, :, part] for x in given), lengths)
        for mine, of_all in zip(tj.dequantize(half), both, strict=True):
            np.testing.assert_array_equal(mine, of_all[:, :, part])


# Lowering ----------------------------------------------------------------------------------------


def abstract(heads, tokens, of_each):
    config = dataclasses.replace(kv.cache_by_name("2/4bit", heads), mode="int8")
    cache = jax.eval_shape(lambda: tj.init_cache(2, 1024, heads, 128, config=config))
    shape = jax.ShapeDtypeStruct((2, tokens, of_each * heads, 128), jnp.bfloat16)
    return cache, shape, jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.quick(first=1, slow=0)
@heads_of_one_case
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_decoding_lowers(implementation, heads):
    cache, query, lengths = abstract(heads, 1, 4)
    options = Options(True, scale=0.1)
    if implementation == "triton":
        run = functools.partial(triton.decode, options=options)
    else:
        run = functools.partial(decode_mosaic.decode, options=options)
    name = {"triton": "turbojax_decode", "mosaic_gpu": "mosaic_gpu"}[implementation]
    assert name in lower_for_cuda(run, query, cache, lengths)


# Models ------------------------------------------------------------------------------------------


METHODS = ("gap_std", "entropy", "min_max", "variation")


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def heads(seed=0, batch=3, tokens=50, count=6, head_dim=16, dtype=jnp.float32):
    """Heads of different scales, with outlier channels in some."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, tokens, count, head_dim)) * rng.uniform(
        0.2, 3, (batch, 1, count, 1)
    )
    x = x * np.where(rng.random((batch, 1, count, head_dim)) < 0.1, 8.0, 1.0)
    return jnp.asarray(x, dtype)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
def test_equals_the_oracle(method, dtype):
    x = heads(dtype=dtype)
    got = tj.head_priority(x, method)
    assert got.dtype == jnp.float32
    assert got.shape == (3, 6)
    want = oracles.head_priority(x, method)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    compiled = jax.jit(tj.head_priority, static_argnames="method")(x, method=method)
    np.testing.assert_allclose(np.asarray(compiled), want, rtol=1e-5)


@pytest.mark.quick(2)
def test_the_default_is_the_papers(method):
    x = heads(seed=1)
    if method == "gap_std":
        np.testing.assert_array_equal(tj.head_priority(x), tj.head_priority(x, method))
        np.testing.assert_allclose(
            tj.head_priority(x),
            tj.head_priority(x, "min_max") * tj.head_priority(x, "variation"),
            rtol=1e-6,
        )
    else:
        assert not np.allclose(tj.head_priority(x), tj.head_priority(x, method))


@pytest.mark.quick(1, slow=0)
def test_a_mask_hides_tokens(method):
    """Hidden tokens, garbage or NaN, count as absent: the bits of the shorter prompt."""
    x = heads(seed=2)
    lengths = np.array([50, 17, 1])
    mask = np.arange(50)[None] < lengths[:, None]
    dirty = jnp.where(jnp.asarray(mask)[:, :, None, None], x, jnp.nan)
    got = np.asarray(tj.head_priority(dirty, method, where=jnp.asarray(mask)))
    np.testing.assert_allclose(got, oracles.head_priority(x, method, mask), rtol=1e-5, atol=1e-6)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(got[b], tj.head_priority(x[b : b + 1, :n], method)[0], rtol=1e-5)


def test_a_mask_need_not_be_a_prefix(method):
    x = heads(seed=3)
    mask = np.random.default_rng(3).random((3, 50)) < 0.4
    got = tj.head_priority(x, method, where=jnp.asarray(mask))
    np.testing.assert_allclose(np.asarray(got), oracles.head_priority(x, method, mask), rtol=1e-5)


@pytest.mark.quick(slow=1)
def test_sequences_do_not_mix(method):
    x = heads(seed=4)
    alone = jnp.concatenate([tj.head_priority(x[b : b + 1], method) for b in range(3)])
    np.testing.assert_allclose(tj.head_priority(x, method), alone, rtol=3e-7)


@pytest.mark.slow
def test_entropy_by_hand():
    """One value everywhere: 0 bits; two values in equal parts: 1 bit; four: 2 bits."""
    x = np.ones((1, 8, 3, 4), np.float32)
    x[0, ::2, 1] = -1
    x[0, :, 2] = np.array([1, -1, 0.5, -0.5], np.float32)
    np.testing.assert_allclose(tj.head_priority(jnp.asarray(x), "entropy"), [[0, 1, 2]], atol=1e-6)


def test_constant_heads_come_last():
    """A head without spread has priority 0 under every measure."""
    x = np.array(heads(seed=5))
    x[:, :, 2] = 0.0
    for method in METHODS:
        got = np.asarray(tj.head_priority(jnp.asarray(x), method))
        np.testing.assert_array_equal(got[:, 2], 0)
        np.testing.assert_array_equal(quantizers.rank_heads(jnp.asarray(got))[:, 2], 5)


def test_rank_by_hand():
    priority = jnp.asarray([[3.0, 9.0, 1.0, 5.0], [1.0, 1.0, 2.0, 1.0]])
    slots = quantizers.rank_heads(priority)
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, [[2, 0, 3, 1], [1, 2, 0, 3]])


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=2, max_size=2))
def test_rank_is_a_stable_permutation(priority):
    priority = np.array(priority, np.float32)
    slots = np.asarray(quantizers.rank_heads(jnp.asarray(priority)))
    np.testing.assert_array_equal(slots, oracles.rank_heads(priority))
    np.testing.assert_array_equal(np.sort(slots, -1), np.tile(np.arange(7), (2, 1)))


def test_rank_of_nan_is_still_a_permutation():
    """A head that holds NaN may rank anywhere, but no head is lost."""
    slots = quantizers.rank_heads(jnp.asarray([[1.0, np.nan, 3.0, np.nan]]))
    np.testing.assert_array_equal(np.sort(slots, -1), [[0, 1, 2, 3]])


def test_wrong_calls():
    x = heads()
    with pytest.raises(ValueError, match=r"'loudness'.*gap_std"):
        tj.head_priority(x, "loudness")
    with pytest.raises(ValueError, match=r"\(3, 50, 6\).*\[B, S, K, H\]"):
        tj.head_priority(x[..., 0])
    with pytest.raises(TypeError, match="int32"):
        tj.head_priority(x.astype(jnp.int32))
    with pytest.raises(TypeError, match=r"float32.*bool"):
        tj.head_priority(x, where=jnp.ones((3, 50), jnp.float32))
    with pytest.raises(ValueError, match=r"\(3, 49\).*\(3, 50\)"):
        tj.head_priority(x, where=jnp.ones((3, 49), bool))


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("method", ["gap_std", "entropy", "min_max", "variation"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_one_bad_value_anywhere_is_not_lost(method, bad):
    """NaN for its head alone, wherever it stands, and that head ranks first; masked, it is gone."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 64, 4, 64)).astype(np.float32)
    clean = np.asarray(tj.head_priority(jnp.asarray(x), method))
    where = np.ones((8, 64), bool)
    for b, (token, channel) in enumerate(rng.integers(64, size=(8, 2))):
        x[b, token, 2, channel] = bad
        where[b, token] = False
    got = np.asarray(tj.head_priority(jnp.asarray(x), method))
    assert np.isnan(got[:, 2]).all()
    np.testing.assert_array_equal(got[:, [0, 1, 3]], clean[:, [0, 1, 3]])
    assert (np.asarray(quantizers.rank_heads(jnp.asarray(got)))[:, 2] == 0).all()
    masked = tj.head_priority(jnp.asarray(x), method, jnp.asarray(where))
    assert np.isfinite(masked).all()
