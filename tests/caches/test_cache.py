"""The contract of writing a `ProgressiveCache`: what the oracle's plain lists hold, to the bit.

However it got there, and whichever implementation wrote it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbojax as tj
from tests import oracles
from tests.caches.cache_helpers import (
    BATCH,
    CONFIGS,
    HEAD_DIM,
    HEADS,
    MIXED,
    append,
    assert_holds,
    assert_same_bits,
    changed,
    dequantize_jit,
    new,
    oracle_for,
    prefill,
    stored,
    tokens,
)
from tests.contracts.implementations import kernel_is_slow
from turbojax.caches import exact as exact_attention
from turbojax.caches.exact import cache as exact
from turbojax.caches.token_scaled import cache as kv4

# Each configuration once, the mixed one on both; a kernel takes no blocks of 8 tokens.
CASES = [
    pytest.param(implementation, CONFIGS[name], id=f"{implementation}-{name}")
    for implementation, name in [
        ("xla", "mixed"),
        ("triton", "mixed"),
        ("xla", "4/3 and 2"),
        ("triton", "3-bit"),
        ("xla", "all low"),
        ("triton", "4-bit"),
    ]
]


# What is stored ----------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("lengths", [(16, 33, 1), (0, 15, 40)], ids=str)
@pytest.mark.parametrize(("implementation", "config"), CASES)
def test_a_prompt_stores_what_the_oracle_stores(implementation, config, lengths):
    """Whole blocks compressed, the rest buffered, for any lengths in one batch."""
    key, value = tokens(40, seed=1)
    cache = prefill(new(config), key, value, lengths, implementation)
    oracle = oracle_for(cache)
    oracle.prefill(key, value, lengths)
    assert_holds(cache, oracle)


@pytest.mark.parametrize("name", ["3 first", "flush all"])
def test_other_buffers_hold_what_the_oracle_holds(name):
    """Several first tokens, behind which blocks begin; and buffers that give up all they have."""
    cache = prefill(new(CONFIGS[name]), *tokens(40, seed=1), (40, 24, 3))
    oracle = oracle_for(cache)
    oracle.prefill(*tokens(40, seed=1), (40, 24, 3))
    assert_holds(cache, oracle)
    more, lengths = tokens(40, seed=2), (30, 7, 40)
    cache = append(cache, *more, lengths)
    oracle.append(*more, lengths)
    assert_holds(cache, oracle)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("implementation", "config"), CASES[:3])
def test_append_stores_what_the_oracle_stores(implementation, config):
    """After a ragged prompt: buffered, clamped, compressed when full, at each one's own step."""
    cache = prefill(new(config), *tokens(40, seed=2), (37, 5, 0))
    oracle = oracle_for(cache)
    oracle.prefill(*tokens(40, seed=2), (37, 5, 0))
    for step, lengths in enumerate([(20, 3, 20), (1, 20, 0), (0, 19, 20), (20, 20, 13)]):
        key, value = tokens(20, seed=10 + step, spread=2.0)
        cache = append(cache, key, value, lengths, implementation)
        oracle.append(key, value, lengths)
        assert_holds(cache, oracle, deeply=step == 3)


@pytest.mark.slow
@pytest.mark.optimized
def test_eager_prefill_stores_the_same_bits():
    """What is stored without its attention, of which no kernel takes short blocks."""
    key, value = tokens(40, seed=5)
    lengths = np.array([40, 3, 0], np.int32)
    start = jax.tree.map(jnp.asarray, new(MIXED))
    options = {"key_value_seq_lengths": lengths, "implementation": "xla"}
    _, eager = tj.prefill(key, key, value, start, **options)
    assert_same_bits(prefill(new(MIXED), key, value, lengths), eager)


@pytest.mark.slow
@pytest.mark.optimized
def test_eager_append_stores_the_same_bits():
    before, more = prefill(new(MIXED), *tokens(40, seed=5), (40, 3, 0)), tokens(1, seed=6)
    eager = tj.append(jax.tree.map(jnp.asarray, before), *more, implementation="xla")
    assert_same_bits(append(before, *more), eager)


@pytest.mark.quick(1)
def test_without_prefill_twice_the_first_token_sets_the_scale(implementation):
    """Later tokens, however loud, are clamped to it; none changes it."""
    key, value = tokens(20, seed=7)
    loud = changed(key, (slice(None), slice(1, None)), 100 * key[:, 1:])
    cache = append(new(MIXED), loud, value, None, implementation)
    oracle = oracle_for(cache)
    oracle.append(loud, value)
    assert_holds(cache, oracle)
    first = np.abs(np.asarray(key[:, 0])).max(-1)
    got = np.asarray(dequantize_jit(cache)[0])
    assert (np.abs(got) <= 2 * first[:, None, :, None] * (1 + 2**-15)).all()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("implementation", "config"),
    [("xla", MIXED), ("triton", MIXED), ("xla", CONFIGS["4/3 and 2"])],
    ids=str,
)
def test_given_scales_are_used(implementation, config):
    """Fixed beforehand, prompt or not, and broadcast."""
    key_scale = np.float32([[0.02, 0.03, 0.05, 0.01]])
    value_scale = np.float32(0.04)
    cache = new(config, key_scale=jnp.asarray(key_scale), value_scale=jnp.asarray(value_scale))
    oracle = oracle_for(cache, key_scale, value_scale)
    key, value = tokens(40, seed=8)
    more = tokens(20, seed=9)
    cache = prefill(cache, key, value, (20, 9, 0), implementation)
    cache = append(cache, *more, None, implementation)
    oracle.prefill(key, value, (20, 9, 0))
    oracle.append(*more)
    assert_holds(cache, oracle)


def test_stored_tokens_never_change_until_compressed():
    """A buffered token reads the same until its block is full, a compressed one for ever."""
    key, value = tokens(90, seed=9)
    cache = new(CONFIGS["4-bit"])
    before = None
    for t in range(0, 90, 5):
        cache = append(cache, key[:, t : t + 5], value[:, t : t + 5])
        now = [np.asarray(x) for x in dequantize_jit(cache)]
        if before is not None:
            compressed = (t // 16) * 16
            rest = t if (t + 5) // 16 == t // 16 else compressed
            for a, b in zip(before, now, strict=True):
                np.testing.assert_array_equal(a[:, :rest], b[:, :rest])
        before = now


def test_errors_are_those_of_the_quantizers():
    """4 bits: each value is off by at most s / 2 + s * s_int / 2 unless clipped; few are."""
    key, value = tokens(40, seed=10)
    cache = prefill(new(CONFIGS["4-bit"]), key, value)
    for x, got, side in zip(
        (key, value), dequantize_jit(cache), (cache.key, cache.value), strict=True
    ):
        error = np.abs(np.asarray(got, np.float64)[:, :32] - np.asarray(x, np.float64)[:, :32])
        s = np.asarray(side.block_scale, np.float64)[..., :2, None]
        bound = s * (0.5 + np.asarray(side.channel_scale, np.float64)[..., :2, :] / 2) * (1 + 1e-5)
        bound = np.repeat(np.moveaxis(bound, 1, 2), 16, axis=1)
        assert (error <= bound).mean() > 0.95


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("method", ["entropy", "gap_std", "min_max", "variation"])
def test_heads_of_low_priority_get_fewer_bits(method):
    """By every measure, keys and values ranked separately, each sequence on its own."""
    config = dataclasses.replace(MIXED, head_priority=method)
    key, value = tokens(40, seed=11)
    cache = prefill(new(config), key, value)
    for x, side, low in ((key, cache.key, 2), (value, cache.value, 1)):
        slots = oracles.rank_heads(oracles.head_priority(x, method))
        np.testing.assert_array_equal(side.head_slots, slots)
        for b in range(BATCH):
            for h in range(HEADS):
                _, bits = stored(side, b, h, 0)
                assert bits == (2 if slots[b, h] >= HEADS - low else 4)


def test_head_order_stays():
    """Once ranked, heads keep their bits, whatever comes later."""
    cache = prefill(new(MIXED), *tokens(40, seed=12))
    later = append(
        cache, *(x * np.float32([[[[9.0], [1.0], [0.1], [4.0]]]]) for x in tokens(20, seed=13))
    )
    np.testing.assert_array_equal(cache.key.head_slots, later.key.head_slots)
    np.testing.assert_array_equal(cache.value.head_slots, later.value.head_slots)


@kernel_is_slow
def test_all_zero_tokens(implementation):
    """Zeros come back as zeros, and leave the cache able to take more."""
    zeros = np.zeros((BATCH, 40, HEADS, HEAD_DIM), np.float32)
    for store in (prefill, append):
        cache = store(new(MIXED), zeros, zeros, None, implementation)
        cache.validate()
        for x in dequantize_jit(cache):
            np.testing.assert_array_equal(x, np.zeros(x.shape))


# The order of calls does not matter --------------------------------------------------------------

# With the prompt they fill the cache.
WIDEST, CALLS = 20, 3


@pytest.mark.slow
@pytest.mark.optimized
@settings(max_examples=12)
@given(
    st.lists(
        st.lists(st.integers(0, WIDEST), min_size=BATCH, max_size=BATCH), min_size=1, max_size=CALLS
    ),
    st.booleans(),
    st.integers(0, 9),
)
def test_any_split_stores_the_same_bits(split, with_prompt, seed):
    """Ragged appends in any split equal one append of everything, in every array."""
    key, value = tokens(WIDEST * CALLS, seed=20 + seed)
    start = new(MIXED)
    if with_prompt:
        start = prefill(start, *tokens(40, seed=19), (37, 5, 0))
    taken = np.zeros(BATCH, int)
    cache = start
    for lengths in split:
        parts = [
            np.stack([np.roll(x[b], -int(n), axis=0)[:WIDEST] for b, n in enumerate(taken)])
            for x in (key, value)
        ]
        cache = append(cache, *parts, lengths)
        taken = taken + lengths
    assert_same_bits(cache, append(start, key, value, taken))
    oracle = oracle_for(start)
    if with_prompt:
        oracle.prefill(*tokens(40, seed=19), (37, 5, 0))
    oracle.append(key, value, taken)
    assert_holds(cache, oracle, deeply=False)


@pytest.mark.optimized
@pytest.mark.parametrize("garbage", [77.0, np.nan, np.inf], ids=str)
@kernel_is_slow
def test_padding_never_changes_a_bit(implementation, garbage):
    """Tokens past the lengths may hold anything, in prompts and in appends."""
    lengths = np.array([37, 5, 0])
    key, value = tokens(40, seed=33)
    padding = (np.arange(40)[None] >= lengths[:, None])[:, :, None, None]

    def store(fill):
        k, v = (np.where(padding, np.float32(fill), x) for x in (key, value))
        cache = prefill(new(MIXED), k, v, lengths, implementation)
        return append(cache, k, v, lengths, implementation)

    assert_same_bits(store(0.0), store(garbage))


@pytest.mark.optimized
def test_the_batch_never_changes_a_bit():
    """A sequence alone and in company. The oracle above holds a kernel to the same bits."""
    key, value = tokens(40, seed=34)
    together = prefill(new(MIXED), key, value, (37, 5, 0))
    together = append(together, key, value, (40, 3, 39))
    for b in range(BATCH):

        def of(x, b=b):
            return x[b : b + 1]

        alone = new(MIXED, batch=1)
        alone = prefill(alone, of(key), of(value), [(37, 5, 0)[b]])
        alone = append(alone, of(key), of(value), [(40, 3, 39)[b]])
        assert_same_bits(alone, jax.tree.map(of, together))


@pytest.mark.quick(1, slow=0)
def test_nothing_appended_changes_nothing(implementation):
    cache = prefill(new(MIXED), *tokens(40, seed=35))
    again = append(cache, *tokens(20, seed=36), (0, 0, 0), implementation)
    assert_same_bits(cache, again)


def _tensors(batch: int, length: int, heads: int, seed: int = 0) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(batch, length, heads, 16))
    return jnp.asarray(x, jnp.float32)


@pytest.mark.slow
def test_decode_equals_attention_over_the_ragged_history():
    key, value, query = _tensors(2, 9, 2), _tensors(2, 9, 2, 1), _tensors(2, 3, 4, 2)
    cache = exact.init_cache(2, 12, 2, 16, dtype=jnp.float32)
    cache = exact.append(cache, key, value, lengths=jnp.array([9, 5]))
    out = tj.decode(query, cache)
    # The last query stands at the last token.
    positions = np.array([9, 5])[:, None] - 3 + np.arange(3)
    mask = np.arange(9) <= positions[..., None]
    expected = oracles.plain_attention(query, key, value, mask=mask)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_compiled_in_half_precision(dtype):
    """Where jax's own function asks for float16 products that CPUs do not have."""
    key, value, query = (_tensors(1, 9, n, n).astype(dtype) for n in (2, 2, 4))
    expected = oracles.plain_attention(
        *(np.asarray(x, np.float64) for x in (query, key, value)), mask=np.tri(9, dtype=bool)[None]
    )
    cache = exact.append(exact.init_cache(1, 9, 2, 16, dtype=dtype), key, value)
    outs = (
        jax.jit(exact_attention.attention)(query, key, value),
        jax.jit(tj.decode)(query, cache),
    )
    for out in outs:
        assert out.dtype == dtype
        error = np.abs(np.asarray(out, np.float64) - expected).max()
        assert error < 4 * float(jnp.finfo(dtype).eps)


def test_appending_in_pieces_equals_appending_at_once():
    key, value = _tensors(2, 7, 2), _tensors(2, 7, 2, 1)
    empty = exact.init_cache(2, 8, 2, 16)
    at_once = exact.append(empty, key, value)
    pieces = empty
    for t in range(7):
        pieces = exact.append(pieces, key[:, t : t + 1], value[:, t : t + 1])
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_sequence_may_get_no_token():
    key, value = _tensors(2, 3, 2), _tensors(2, 3, 2, 1)
    cache = exact.append(exact.init_cache(2, 8, 2, 16), key, value, lengths=jnp.array([2, 0]))
    after = exact.append(cache, key, value, lengths=jnp.array([0, 3]))
    assert cache.lengths.tolist() == [2, 0]
    assert after.lengths.tolist() == [2, 3]
    np.testing.assert_array_equal(after.key[0, :2], key[0, :2].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after.value[1, :3], value[1].astype(jnp.bfloat16))


def test_overflow_is_an_error_and_under_jit_a_status():
    key = _tensors(2, 5, 2)
    cache = exact.append(exact.init_cache(2, 6, 2, 16), key, key)
    with pytest.raises(ValueError, match=r"lengths \[10, 10\].*max_length=6"):
        exact.append(cache, key, key)
    after = jax.jit(exact.append)(cache, key, key, lengths=jnp.array([5, 1]))
    assert after.overflowed.tolist() == [True, False]
    assert after.lengths.tolist() == [6, 6]
    np.testing.assert_array_equal(after.key[:, :5], cache.key[:, :5])
    np.testing.assert_array_equal(after.key[:, 5], key[:, 0].astype(jnp.bfloat16))


def test_bad_calls_say_what_is_wrong():
    cache = exact.init_cache(1, 6, 2, 16)
    with pytest.raises(ValueError, match="must be positive"):
        exact.init_cache(1, 0, 2, 16)
    with pytest.raises(TypeError, match="int8 must be bfloat16"):
        exact.init_cache(1, 4, 2, 16, dtype=jnp.int8)
    with pytest.raises(ValueError, match="must fit"):
        exact.append(cache, _tensors(1, 1, 3), _tensors(1, 1, 3))
    with pytest.raises(ValueError, match="3 query heads must be a multiple of 2"):
        tj.decode(_tensors(1, 1, 3), cache)
    for query in (_tensors(2, 1, 2), _tensors(1, 1, 2)[..., :8]):
        with pytest.raises(ValueError, match=r"must be \[1, T, N, 16\], as the cache was made for"):
            tj.decode(query, cache)
    other = kv4.init_cache(1, 6, 2, 16)
    with pytest.raises(TypeError, match="cache is a Kv4Cache, must be a ExactCache"):
        exact.append(other, _tensors(1, 1, 2), _tensors(1, 1, 2))
