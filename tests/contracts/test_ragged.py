"""Padding never matters, positions do: query lengths, windows of any size, open scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.caches.cache_helpers import (
    CONFIGS,
    append_jit,
    assert_holds,
    dequantize_jit,
    new,
    oracle_for,
    tokens,
)

CONFIG = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
LENGTHS = jnp.array([37, 20, 0])
prefill = jax.jit(tj.prefill, static_argnames="return_residual")
attend = jax.jit(tj.turbo_attention, static_argnames=("is_causal", "local_window_size"))
decode = jax.jit(tj.decode, static_argnames=("local_window_size", "return_residual"))


def normal(seed, length=40, heads=4):
    return np.random.default_rng(seed).normal(size=(3, length, heads, 16)).astype(np.float32)


@pytest.mark.optimized
@pytest.mark.parametrize("garbage", [1e4, np.nan])
def test_queries_in_the_padding_change_no_bit(garbage):
    """They share a block, and so a scale, with real queries."""
    query, key, value = normal(0), normal(1, heads=2), normal(2, heads=2)
    padding = (np.arange(40)[None] >= np.asarray(LENGTHS)[:, None])[:, :, None, None]
    spoiled = [np.where(padding, np.float32(garbage), x) for x in (query, key, value)]
    empty = tj.init_cache(3, 64, 2, 16, config=CONFIG, dtype=jnp.float32)

    def run(q, k, v):
        return prefill(q, k, v, empty, key_value_seq_lengths=LENGTHS, return_residual=True)

    clean, dirty = run(query, key, value), run(*spoiled)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
    out, residual = (np.asarray(x) for x in dirty[0])
    np.testing.assert_array_equal(np.where(padding, out, 0), 0)
    assert (residual[padding[..., 0] & np.ones((1, 1, 4), bool)] == -np.inf).all()


@pytest.mark.slow
def test_a_padded_prompt_gives_what_it_gives_alone():
    query, key, value = normal(0), normal(1, heads=2), normal(2, heads=2)
    empty = tj.init_cache(3, 64, 2, 16, config=CONFIG, dtype=jnp.float32)
    together, _ = prefill(query, key, value, empty, key_value_seq_lengths=LENGTHS)
    one = tj.init_cache(1, 64, 2, 16, config=CONFIG, dtype=jnp.float32)
    alone, _ = prefill(query[1:2, :20], key[1:2, :20], value[1:2, :20], one)
    np.testing.assert_allclose(together[1, :20], alone[0], atol=1e-6)


@pytest.mark.slow
def test_after_a_ragged_append_queries_stand_where_their_tokens_do():
    key, value, query = normal(1, heads=2), normal(2, heads=2), normal(0, length=4)
    cache = tj.init_cache(3, 64, 2, 16, config=CONFIG, dtype=jnp.float32)
    cache = append_jit(cache, key[:, :20], value[:, :20])
    counts = jnp.array([4, 1, 0])
    ragged = append_jit(cache, key[:, 20:24], value[:, 20:24], lengths=counts)
    out, residual = decode(query, ragged, query_seq_lengths=counts, return_residual=True)
    # Nothing was flushed since, so that one by one sees the same codes.
    step = cache
    for t in range(4):
        live = (t < counts).astype(jnp.int32)
        step = append_jit(step, key[:, 20 + t : 21 + t], value[:, 20 + t : 21 + t], lengths=live)
        want = decode(query[:, t : t + 1], step, query_seq_lengths=live)
        np.testing.assert_allclose(out[:, t : t + 1], want, atol=2e-6)
    assert (out[1, 1:] == 0).all()
    assert (residual[2] == -jnp.inf).all()


def test_query_lengths_out_of_range_under_jit_act_as_the_nearest_bound():
    key, value, query = normal(1, heads=2), normal(2, heads=2), normal(0, length=4)
    cache = tj.init_cache(3, 64, 2, 16, config=CONFIG, dtype=jnp.float32)
    cache = append_jit(cache, key[:, :20], value[:, :20])
    beyond = decode(query, cache, query_seq_lengths=jnp.array([9, -1, 2]))
    within = decode(query, cache, query_seq_lengths=jnp.array([4, 0, 2]))
    np.testing.assert_array_equal(beyond, within)
    np.testing.assert_array_equal(
        attend(query, key, value, query_seq_lengths=jnp.array([9, -1, 2])),
        attend(query, key, value, query_seq_lengths=jnp.array([4, 0, 2])),
    )


@pytest.mark.slow
def test_a_window_wider_than_any_sequence_is_none():
    window = (2**40, 0)
    query, key, value = normal(0), normal(1, heads=2), normal(2, heads=2)
    with_window = attend(query, key, value, is_causal=True, local_window_size=window)
    without = attend(query, key, value, is_causal=True)
    np.testing.assert_array_equal(with_window, without)
    cache = append_jit(tj.init_cache(3, 64, 2, 16, config=CONFIG, dtype=jnp.float32), key, value)
    np.testing.assert_array_equal(
        decode(query[:, :1], cache, local_window_size=window), decode(query[:, :1], cache)
    )


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "zeros"), [("mixed", 15), ("mixed", 40)])
def test_a_head_that_begins_with_zeros_keeps_its_scale_open(name, zeros):
    """Its scale comes from the first token that says something, in any split."""
    key, value = tokens(60, seed=5)
    key[:, :zeros, 1] = 0
    value[1, :zeros] = 0
    at_once = append_jit(new(CONFIGS[name]), key, value)
    oracle = oracle_for(at_once)
    oracle.append(key, value)
    assert_holds(at_once, oracle)
    at_once.validate()
    split = append_jit(
        append_jit(new(CONFIGS[name]), key[:, :23], value[:, :23]), key[:, 23:], value[:, 23:]
    )
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(a, b)
    restored = np.asarray(dequantize_jit(at_once)[0][:, :60, 1])
    assert np.abs(restored[:, zeros:]).max() > 0


@pytest.mark.slow
def test_only_zeros_are_a_valid_cache():
    key = np.zeros((3, 40, 4, 16), np.float32)
    cache = append_jit(new(CONFIGS["mixed"]), key, key)
    cache.validate()
    assert (np.asarray(dequantize_jit(cache)[0]) == 0).all()
    assert (np.asarray(decode(key[:, :1], cache)) == 0).all()


@pytest.mark.slow
def test_a_prompt_shorter_than_a_block_leaves_headroom():
    """One prefilled token fixes the scale as one appended token does."""
    key, value = tokens(1, seed=9)
    empty = new(CONFIGS["4-bit"])
    _, prefilled = prefill(key, key, value, empty)
    appended = append_jit(empty, key, value)
    np.testing.assert_array_equal(prefilled.key.buffer_scale, appended.key.buffer_scale)
    np.testing.assert_array_equal(prefilled.value.buffer, appended.value.buffer)
    key, value = tokens(16, seed=9)
    _, whole = prefill(key, key, value, empty)
    top = np.abs(np.asarray(key)).max((1, 3))
    np.testing.assert_array_equal(whole.key.buffer_scale, oracles.scale_of(top))


@pytest.mark.quick(2)
@pytest.mark.parametrize("call", ["append", "prefill", "dequantize", "decode"])
def test_gradients_are_refused(call):
    key, value = tokens(5)
    cache = new(CONFIGS["4-bit"])

    def loss(x):
        if call == "prefill":
            return tj.prefill(x, x, value, cache)[0].sum()
        stored = tj.append(cache, jax.lax.stop_gradient(x), value)
        if call == "append":
            stored = tj.append(cache, x, value)
        if call == "dequantize":
            scaled = jax.tree.map(lambda a: a * x.sum() if a.dtype == x.dtype else a, stored)
            return tj.dequantize(scaled)[0].sum()
        return tj.decode(x[:, :1], stored).sum()

    with pytest.raises(NotImplementedError, match=r"has no gradient"):
        jax.grad(loss)(key)


def test_stacked_layers_have_the_same_ratio():
    layer = tj.init_cache(2, 256, 4, 64, config=CONFIG)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), layer)
    assert stacked.nbytes == 3 * layer.nbytes
    assert stacked.compression_ratio == pytest.approx(layer.compression_ratio)
    assert (stacked.num_kv_heads, stacked.head_dim, stacked.batch_size) == (4, 64, 2)
