"""`ProgressiveCache`: holds exactly what the oracle's plain lists hold, however it got there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbojax as tj

BATCH, HEADS, HEAD_DIM = 3, 4, 16
CONFIGS = {
    "4-bit": tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16),
    "3-bit": tj.TurboConfig(key_bits=3, value_bits=3, block_q=16, block_kv=16, buffer_size=16),
    "mixed": tj.TurboConfig(
        num_low_bit_key_heads=2, num_low_bit_value_heads=1, block_q=16, block_kv=16, buffer_size=32
    ),
    "4/3 and 2": tj.TurboConfig(
        num_low_bit_key_heads=1,
        low_bits=3,
        value_bits=2,
        block_q=16,
        block_kv=8,
        buffer_size=16,
        head_priority="variation",
    ),
    "all low": tj.TurboConfig(
        num_low_bit_key_heads=4, num_low_bit_value_heads=4, block_q=16, block_kv=16, buffer_size=16
    ),
}
MIXED = CONFIGS["mixed"]

append_jit = jax.jit(tj.append)
prefill_jit = jax.jit(tj.prefill, static_argnames=("is_causal", "return_residual"))
dequantize_jit = jax.jit(tj.dequantize, static_argnames="dtype")


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    return CONFIGS[request.param]


def tokens(count, seed=0, dtype=jnp.float32, batch=BATCH, spread=1.0):
    """Keys and values [B, count, K, H] whose heads differ clearly, with loud channels."""
    rng = np.random.default_rng(seed)
    shape = (batch, count, HEADS, HEAD_DIM)
    loud = np.where(rng.random((batch, 1, HEADS, HEAD_DIM)) < 0.15, 4.0, 1.0)
    heads = rng.permutation(np.array([0.4, 0.8, 1.6, 3.0]))[:, None]
    return tuple(
        jnp.asarray(rng.normal(size=shape) * loud * heads * spread, dtype) for _ in range(2)
    )


def new(config, max_length=100, dtype=jnp.float32, batch=BATCH, **scales):
    return tj.init_cache(batch, max_length, HEADS, HEAD_DIM, config=config, dtype=dtype, **scales)


def oracle_for(cache, key_scale=None, value_scale=None):
    c = cache.config
    return oracles.Cache(
        cache.lengths.shape[0],
        cache.max_length,
        HEADS,
        HEAD_DIM,
        block=c.block_kv,
        buffer_size=c.buffer_size,
        key_bits=c.key_bits,
        value_bits=c.value_bits,
        num_low_key=c.num_low_bit_key_heads,
        num_low_value=c.num_low_bit_value_heads,
        low_bits=c.low_bits,
        priority=c.head_priority,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def prefill(cache, key, value, lengths=None, jit=True):
    """Stores a prompt; the queries do not matter here."""
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    call = prefill_jit if jit else tj.prefill
    return call(key, key, value, cache, key_value_seq_lengths=lengths)[1]


def append(cache, key, value, lengths=None, jit=True):
    if lengths is not None:
        lengths = jnp.asarray(lengths, jnp.int32)
    return (append_jit if jit else tj.append)(cache, key, value, lengths=lengths)


def stored(side, b, h, block):
    """Unpacked codes [tokens, channels] of one block, and their width, read from the layout."""
    slot = int(side.head_slots[b, h])
    for codes, bits in zip(side.codes, side.bits, strict=True):
        if slot < codes.shape[1]:
            packed = np.asarray(codes[b, slot, block])
            unpacked = oracles.unpack(packed, bits, -1)
            return (unpacked.T if side.tokens_last else unpacked), bits
        slot -= codes.shape[1]
    raise AssertionError("a slot beyond the codes")


def assert_side(side, oracle):
    for b in range(oracle.spec.batch):
        if oracle.scale[b] is not None:
            np.testing.assert_array_equal(side.buffer_scale[b], oracle.scale[b])
        if oracle.slots[b] is not None and 0 < oracle.num_low < HEADS:
            np.testing.assert_array_equal(side.head_slots[b], oracle.slots[b])
        for t, codes in enumerate(oracle.buffer[b]):
            np.testing.assert_array_equal(side.buffer[b, :, t], codes)
        for j, heads in enumerate(oracle.blocks[b]):
            for h, block in enumerate(heads):
                codes, bits = stored(side, b, h, j)
                assert bits == block["bits"]
                np.testing.assert_array_equal(codes, block["q2"])
                np.testing.assert_array_equal(side.channel_scale[b, h, j], block["channel_scale"])
                np.testing.assert_array_equal(side.channel_zero[b, h, j], block["channel_zero"])
                np.testing.assert_array_equal(side.block_scale[b, h, j], block["scale"])


def assert_holds(cache, oracle, deeply=True):
    """The cache holds what the oracle holds, bit for bit."""
    cache.validate()
    np.testing.assert_array_equal(cache.lengths, oracle.lengths)
    np.testing.assert_array_equal(cache.buffer_lengths, oracle.buffer_lengths)
    np.testing.assert_array_equal(cache.overflowed, oracle.overflowed)
    for got, want in zip(
        dequantize_jit(cache, dtype=jnp.float32), oracle.dequantize(), strict=True
    ):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got), want)
    if deeply:
        cache = jax.tree.map(np.asarray, cache)
        assert_side(cache.key, oracle.key)
        assert_side(cache.value, oracle.value)


def assert_same_bits(a, b):
    """Two caches hold the same in every array."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


# What is stored ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, (0, 15, 70), (16, 33, 1)], ids=str)
def test_prefill_stores_what_the_oracle_stores(config, lengths):
    """Whole blocks compressed, the rest buffered, for any lengths in one batch."""
    key, value = tokens(70, seed=1)
    cache = prefill(new(config), key, value, lengths)
    oracle = oracle_for(cache)
    oracle.prefill(key, value, lengths)
    assert_holds(cache, oracle)


def test_append_stores_what_the_oracle_stores(config):
    """After a ragged prompt: buffered, clamped, compressed when full, at each one's own step."""
    cache = prefill(new(config), *tokens(37, seed=2), (37, 5, 0))
    oracle = oracle_for(cache)
    oracle.prefill(*tokens(37, seed=2), (37, 5, 0))
    for step, lengths in enumerate([(20, 3, 20), (1, 20, 0), (0, 19, 20), (20, 20, 13)]):
        key, value = tokens(20, seed=10 + step, spread=2.0)
        cache = append(cache, key, value, lengths)
        oracle.append(key, value, lengths)
        assert_holds(cache, oracle, deeply=step == 3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision(dtype):
    """Stored numbers do not depend on the dtype's own arithmetic; what is read has that dtype."""
    key, value = tokens(40, seed=3, dtype=dtype)
    cache = prefill(new(MIXED, dtype=dtype), key, value)
    oracle = oracle_for(cache)
    oracle.prefill(key, value)
    more = tokens(20, seed=4, dtype=dtype)
    cache = append(cache, *more)
    oracle.append(*more)
    assert_holds(cache, oracle)
    for got, want in zip(tj.dequantize(cache), oracle.dequantize(), strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, jnp.asarray(want).astype(dtype))


def test_eager_stores_the_same_bits():
    key, value = tokens(40, seed=5)
    jitted = append(prefill(new(MIXED), key, value, (40, 3, 0)), *tokens(20, seed=6), (20, 3, 0))
    eager = append(
        prefill(new(MIXED), key, value, (40, 3, 0), jit=False),
        *tokens(20, seed=6),
        (20, 3, 0),
        jit=False,
    )
    assert_same_bits(jitted, eager)


def test_without_prefill_twice_the_first_token_sets_the_scale():
    """Later tokens, however loud, are clamped to it; none changes it."""
    key, value = tokens(20, seed=7)
    loud = key.at[:, 1:].multiply(100.0)
    cache = append(new(MIXED), loud, value)
    oracle = oracle_for(cache)
    oracle.append(loud, value)
    assert_holds(cache, oracle)
    first = np.abs(np.asarray(key[:, 0])).max(-1)
    got = np.asarray(tj.dequantize(cache)[0])
    assert (np.abs(got) <= 2 * first[:, None, :, None] * (1 + 1e-6)).all()


def test_given_scales_are_used(config):
    """Fixed beforehand, prompt or not, and broadcast."""
    key_scale = np.float32([[0.02, 0.03, 0.05, 0.01]])
    value_scale = np.float32(0.04)
    cache = new(config, key_scale=jnp.asarray(key_scale), value_scale=jnp.asarray(value_scale))
    oracle = oracle_for(cache, key_scale, value_scale)
    key, value = tokens(20, seed=8)
    cache = append(prefill(cache, key, value, (20, 9, 0)), key, value)
    oracle.prefill(key, value, (20, 9, 0))
    oracle.append(key, value)
    assert_holds(cache, oracle)


def test_stored_tokens_never_change_until_compressed():
    """A buffered token reads the same until its block is full, a compressed one for ever."""
    key, value = tokens(90, seed=9)
    cache = new(CONFIGS["4-bit"])
    before = None
    for t in range(0, 90, 5):
        cache = append(cache, key[:, t : t + 5], value[:, t : t + 5])
        now = [np.asarray(x) for x in tj.dequantize(cache)]
        if before is not None:
            compressed = (t // 16) * 16
            rest = t if (t + 5) // 16 == t // 16 else compressed
            for a, b in zip(before, now, strict=True):
                np.testing.assert_array_equal(a[:, :rest], b[:, :rest])
        before = now


def test_errors_are_those_of_the_quantizers():
    """4 bits: each value is off by at most s / 2 + s * s_int / 2 unless clipped; few are."""
    key, value = tokens(96, seed=10)
    cache = prefill(new(CONFIGS["4-bit"]), key, value)
    for x, got, side in zip(
        (key, value), tj.dequantize(cache), (cache.key, cache.value), strict=True
    ):
        error = np.abs(np.asarray(got, np.float64)[:, :96] - np.asarray(x, np.float64))
        s = np.asarray(side.block_scale, np.float64)[..., :6, None]
        bound = s * (0.5 + np.asarray(side.channel_scale, np.float64)[..., :6, :] / 2) * (1 + 1e-5)
        bound = np.repeat(np.moveaxis(bound, 1, 2), 16, axis=1)
        assert (error <= bound).mean() > 0.97


@pytest.mark.parametrize("method", ["gap_std", "entropy", "min_max", "variation"])
def test_heads_of_low_priority_get_fewer_bits(method):
    """By every measure, keys and values ranked separately, each sequence on its own."""
    config = dataclasses.replace(MIXED, head_priority=method)
    key, value = tokens(48, seed=11)
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
    cache = prefill(new(MIXED), *tokens(32, seed=12))
    later = append(
        cache, *(x * jnp.asarray([[[[9.0], [1.0], [0.1], [4.0]]]]) for x in tokens(40, seed=13))
    )
    np.testing.assert_array_equal(cache.key.head_slots, later.key.head_slots)
    np.testing.assert_array_equal(cache.value.head_slots, later.value.head_slots)


def test_all_zero_tokens():
    """Zeros come back as zeros, and leave the cache able to take more."""
    zeros = jnp.zeros((BATCH, 40, HEADS, HEAD_DIM))
    for cache in (prefill(new(MIXED), zeros, zeros), append(new(MIXED), zeros, zeros)):
        cache.validate()
        for x in tj.dequantize(cache):
            np.testing.assert_array_equal(x, jnp.zeros_like(x))


# The order of calls does not matter --------------------------------------------------------------

WIDEST, CALLS = 24, 5


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
    start = new(MIXED, max_length=160)
    if with_prompt:
        start = prefill(start, *tokens(37, seed=19), (37, 5, 0))
    taken = np.zeros(BATCH, int)
    cache = start
    for lengths in split:
        parts = [
            jnp.stack([jnp.roll(x[b], -int(n), axis=0)[:WIDEST] for b, n in enumerate(taken)])
            for x in (key, value)
        ]
        cache = append(cache, *parts, lengths)
        taken = taken + lengths
    assert_same_bits(cache, append(start, key, value, taken))
    oracle = oracle_for(start)
    if with_prompt:
        oracle.prefill(*tokens(37, seed=19), (37, 5, 0))
    oracle.append(key, value, taken)
    assert_holds(cache, oracle, deeply=False)


def test_one_by_one_equals_at_once(config):
    """The commonest split, over several flushes."""
    key, value = tokens(50, seed=30)
    start = prefill(new(config), *tokens(20, seed=31))
    cache = start
    for t in range(50):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
    assert_same_bits(cache, append(start, key, value))


def test_calls_of_different_shapes():
    """Static lengths 1, 2, 7 and 40 instead of a padded call."""
    key, value = tokens(50, seed=32)
    cache, t = new(MIXED), 0
    for n in (1, 2, 7, 40):
        cache = append(cache, key[:, t : t + n], value[:, t : t + n])
        t += n
    assert_same_bits(cache, append(new(MIXED), key, value))


@pytest.mark.parametrize("garbage", [77.0, np.nan, np.inf], ids=str)
def test_padding_never_changes_a_bit(garbage):
    """Tokens past the lengths may hold anything, in prompts and in appends."""
    lengths = np.array([37, 5, 0])
    key, value = tokens(40, seed=33)
    padding = (np.arange(40)[None] >= lengths[:, None])[:, :, None, None]

    def store(fill):
        k, v = (jnp.where(jnp.asarray(padding), fill, x) for x in (key, value))
        return append(prefill(new(MIXED), k, v, lengths), k, v, lengths)

    assert_same_bits(store(0.0), store(garbage))


def test_the_batch_never_changes_a_bit():
    """A sequence alone and in company."""
    key, value = tokens(40, seed=34)
    together = append(prefill(new(MIXED), key, value, (37, 5, 0)), key, value, (40, 3, 39))
    for b in range(BATCH):

        def of(x, b=b):
            return x[b : b + 1]

        alone = prefill(new(MIXED, batch=1), of(key), of(value), [(37, 5, 0)[b]])
        alone = append(alone, of(key), of(value), [(40, 3, 39)[b]])
        assert_same_bits(alone, jax.tree.map(of, together))


def test_nothing_appended_changes_nothing():
    cache = prefill(new(MIXED), *tokens(20, seed=35))
    assert_same_bits(cache, append(cache, *tokens(20, seed=36), (0, 0, 0)))


# Non-finite tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("position", [3, 18, 38], ids=["first block", "second", "buffer"])
def test_non_finite_prompt_tokens_are_not_hidden(bad, position):
    """They read as NaN, as does all that shares their scale: their block, or the buffer."""
    key, value = tokens(40, seed=40)
    clean = prefill(new(CONFIGS["4-bit"]), key, value)
    cache = prefill(new(CONFIGS["4-bit"]), key.at[1, position, 2, 5].set(bad), value)
    want, got = (np.asarray(tj.dequantize(c)[0]) for c in (clean, cache))
    assert np.isnan(got[1, position, 2]).all()
    for b in (0, 2):
        np.testing.assert_array_equal(got[b], want[b])
    others = [h for h in range(HEADS) if h != 2]
    np.testing.assert_array_equal(got[1][:, others], want[1][:, others])
    block = position // 16
    blocks = [j for j in range(2) if j != block]
    for j in blocks:
        part = slice(16 * j, 16 * j + 16)
        np.testing.assert_array_equal(got[1, part, 2], want[1, part, 2])
    np.testing.assert_array_equal(tj.dequantize(cache)[1], tj.dequantize(clean)[1])
    cache.validate()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_non_finite_appended_tokens_are_not_hidden(bad):
    """They turn their head's universal scale to NaN; what was compressed before stays."""
    key, value = tokens(60, seed=41)
    spoiled = value.at[0, 25, 1, 7].set(bad)
    cache = append(new(CONFIGS["4-bit"]), key, spoiled)
    oracle = oracle_for(cache)
    oracle.append(key, spoiled)
    got, want = np.asarray(tj.dequantize(cache)[1]), oracle.dequantize()[1]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[0, 16:60, 1]).all()
    np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(want))
    cache.validate()


def test_a_non_finite_first_token_is_not_hidden():
    key, value = tokens(5, seed=42)
    cache = append(new(MIXED), key.at[0, 0, 0, 0].set(jnp.nan), value)
    got = np.asarray(tj.dequantize(cache)[0])
    assert np.isnan(got[0, :5, 0]).all()
    assert np.isfinite(got[0, :, 1:]).all()
    assert np.isfinite(got[1:]).all()


# Full caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [40, 41], ids=str)
@pytest.mark.parametrize("name", ["mixed", "4/3 and 2"])
def test_a_cache_can_be_filled_to_the_last_token(name, max_length):
    """By appends and by a prompt, whether or not the length is a multiple of a block."""
    key, value = tokens(max_length, seed=50)
    appended = append(new(CONFIGS[name], max_length), key, value)
    oracle = oracle_for(appended)
    oracle.append(key, value)
    assert_holds(appended, oracle, deeply=False)
    prompted = prefill(new(CONFIGS[name], max_length), key, value)
    oracle = oracle_for(prompted)
    oracle.prefill(key, value)
    assert_holds(prompted, oracle, deeply=False)


def test_too_many_tokens_outside_jit():
    """An error that names the lengths and the limit, and the cache still as it was."""
    cache = prefill(new(MIXED, max_length=40), *tokens(30, seed=51), (30, 10, 0))
    with pytest.raises(ValueError, match=r"46.*max_length=40"):
        tj.append(cache, *tokens(16, seed=52))
    fits = tj.append(cache, *tokens(16, seed=52), lengths=jnp.asarray([10, 16, 16], jnp.int32))
    np.testing.assert_array_equal(fits.lengths, [40, 26, 16])
    assert not np.asarray(fits.overflowed).any()
    with pytest.raises(ValueError, match=r"50.*max_length=40"):
        tj.prefill(tokens(50)[0], *tokens(50), new(MIXED, max_length=40))


@pytest.mark.parametrize("config_name", ["mixed", "4-bit"])
def test_too_many_tokens_inside_jit(config_name):
    """What fits is kept, the rest dropped and reported; nothing stored is overwritten, ever."""
    cache = new(CONFIGS[config_name], max_length=40)
    oracle = oracle_for(cache)
    cache = prefill(cache, *tokens(30, seed=53), (30, 10, 0))
    oracle.prefill(*tokens(30, seed=53), (30, 10, 0))
    for seed in (54, 55, 56):
        more = tokens(16, seed=seed)
        cache = append(cache, *more)
        oracle.append(*more)
        assert_holds(cache, oracle)
    np.testing.assert_array_equal(cache.lengths, [40, 40, 40])
    np.testing.assert_array_equal(cache.overflowed, [True, True, True])


def test_overflow_is_per_sequence():
    cache = prefill(new(MIXED, max_length=40), *tokens(30, seed=57), (30, 10, 0))
    cache = append(cache, *tokens(16, seed=58))
    np.testing.assert_array_equal(cache.overflowed, [True, False, False])
    np.testing.assert_array_equal(cache.lengths, [40, 26, 16])


def test_prefill_into_a_used_cache():
    """An error outside jit; inside, used sequences stay as they are and say so."""
    key, value = tokens(30, seed=59)
    cache = prefill(new(MIXED, max_length=60), key, value, (30, 10, 0))
    with pytest.raises(ValueError, match=r"\[30, 10, 0\]"):
        tj.prefill(key, key, value, cache)
    again = prefill(cache, *tokens(30, seed=60))
    oracle = oracle_for(cache)
    oracle.prefill(key, value, (30, 10, 0))
    oracle.prefill(*tokens(30, seed=60))
    np.testing.assert_array_equal(again.overflowed, [True, True, False])
    assert_holds(again, oracle)


def test_a_prompt_too_long_inside_jit():
    cache = prefill(new(MIXED, max_length=40), *tokens(50, seed=61), (50, 40, 12))
    np.testing.assert_array_equal(cache.overflowed, [True, False, False])
    np.testing.assert_array_equal(cache.lengths, [40, 40, 12])
    cache.validate()


# Bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "least", "with_buffer"), [(0, 3.7, 3.6), (4, 4.8, 4.6)], ids=["4-bit", "half 2-bit"]
)
def test_compression_ratio(low, least, with_buffer):
    """4096 tokens, head dim 128: at least 3.7 at 4 bits and 4.8 at half 2 bits, buffer apart."""
    config = tj.TurboConfig(num_low_bit_key_heads=low, num_low_bit_value_heads=low)
    cache = tj.init_cache(1, 4096, 8, 128, config=config)
    bfloat16 = 2 * 2 * 4096 * 8 * 128
    buffers = cache.key.buffer.nbytes + cache.value.buffer.nbytes
    assert cache.compression_ratio == pytest.approx(bfloat16 / cache.nbytes)
    assert cache.compression_ratio_without_buffer == pytest.approx(
        bfloat16 / (cache.nbytes - buffers)
    )
    assert cache.compression_ratio_without_buffer >= least
    assert cache.compression_ratio >= with_buffer
    print(
        f"{cache.compression_ratio_without_buffer:.3f}, "
        f"with the buffer {cache.compression_ratio:.3f}"
    )


def test_nbytes_counts_what_is_held(config):
    """The sum over every array, before and after use, and what bits and shapes predict."""
    cache = new(config, max_length=96)
    held = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert cache.nbytes == held
    assert append(cache, *tokens(30)).nbytes == held
    c = config
    blocks = -(-96 // c.block_kv)
    bits = sum(
        (HEADS - low) * high + low * c.low_bits
        for high, low in (
            (c.key_bits, c.num_low_bit_key_heads),
            (c.value_bits, c.num_low_bit_value_heads),
        )
    )
    codes = BATCH * blocks * c.block_kv * HEAD_DIM * bits // 8
    scales = 2 * BATCH * HEADS * blocks * (2 * HEAD_DIM + 4)
    buffers = 2 * BATCH * HEADS * (c.buffer_size * HEAD_DIM + 4 + 4)
    assert held == codes + scales + buffers + BATCH * (4 + 4 + 1)


def test_nbytes_without_arrays():
    """Shapes suffice: the size of a cache can be planned without allocating it."""
    shapes = jax.eval_shape(lambda: new(MIXED))
    assert shapes.nbytes == new(MIXED).nbytes


# validate ----------------------------------------------------------------------------------------


def used():
    return append(prefill(new(MIXED), *tokens(40, seed=70), (40, 20, 5)), *tokens(20, seed=71))


def with_side(cache, **fields):
    return dataclasses.replace(cache, key=dataclasses.replace(cache.key, **fields))


CORRUPTIONS = {
    "lengths too long": ("lengths", lambda c: dataclasses.replace(c, lengths=c.lengths + 1000)),
    "lengths negative": ("lengths", lambda c: dataclasses.replace(c, lengths=c.lengths - 1000)),
    "lengths off by one": ("lengths", lambda c: dataclasses.replace(c, lengths=c.lengths + 1)),
    "buffer beyond its size": (
        "buffer_lengths",
        lambda c: dataclasses.replace(c, buffer_lengths=c.buffer_lengths + 32),
    ),
    "dtype of lengths": (
        "lengths",
        lambda c: dataclasses.replace(c, lengths=c.lengths.astype(jnp.int16)),
    ),
    "shape of overflowed": (
        "overflowed",
        lambda c: dataclasses.replace(c, overflowed=c.overflowed[:2]),
    ),
    "slots no permutation": (
        "head_slots",
        lambda c: with_side(c, head_slots=c.key.head_slots.at[0, 0].set(c.key.head_slots[0, 1])),
    ),
    "slots out of range": ("head_slots", lambda c: with_side(c, head_slots=c.key.head_slots + 1)),
    "buffer codes": (
        "buffer",
        lambda c: with_side(c, buffer=c.key.buffer.at[0, 0, 0, 0].set(-128)),
    ),
    "universal scale": (
        "buffer_scale",
        lambda c: with_side(c, buffer_scale=c.key.buffer_scale.at[1, 1].set(-1.0)),
    ),
    "block scale": (
        "block_scale",
        lambda c: with_side(c, block_scale=c.key.block_scale.at[0, 0, 0].set(0.0)),
    ),
    "channel scale": (
        "channel_scale",
        lambda c: with_side(c, channel_scale=c.key.channel_scale.at[0, 0, 0, 0].set(0)),
    ),
    "codes of another width": (
        "codes",
        lambda c: with_side(c, codes=(c.key.codes[0][..., :-1], *c.key.codes[1:])),
    ),
    "other bits": (
        "cache",
        lambda c: dataclasses.replace(c, config=dataclasses.replace(c.config, key_bits=2)),
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_validate_catches(name):
    """Each corruption is named by its field."""
    field, corrupt = CORRUPTIONS[name]
    cache = used()
    cache.validate()
    with pytest.raises(ValueError, match=field):
        corrupt(cache).validate()


def test_validate_under_jit():
    """Shapes can be checked while tracing."""

    @jax.jit
    def check(cache):
        cache.validate()
        return cache.lengths

    np.testing.assert_array_equal(check(used()), used().lengths)


# Transforms and storage --------------------------------------------------------------------------


def test_jax_tree_round_trip():
    cache = used()
    leaves, structure = jax.tree.flatten(cache)
    again = jax.tree.unflatten(structure, leaves)
    assert (again.config, again.max_length, again.dtype) == (
        cache.config,
        cache.max_length,
        cache.dtype,
    )
    assert_same_bits(cache, again)
    assert hash(structure) == hash(jax.tree.structure(used()))


def test_donated():
    """The old arrays are given up and reused, without a complaint, and the result is the same."""
    want = append(used(), *tokens(7, seed=72))
    cache = used()
    donating = jax.jit(tj.append, donate_argnums=0)
    got = donating(cache, *tokens(7, seed=72))
    assert_same_bits(got, want)
    assert all(x.is_deleted() for x in cache.key.codes)


def test_vmap():
    """Several caches at once, each with its own tokens."""
    caches = [used(), prefill(new(MIXED), *tokens(33, seed=73)), new(MIXED)]
    news = [tokens(20, seed=80 + i) for i in range(3)]
    stack = functools.partial(jax.tree.map, lambda *x: jnp.stack(x))
    got = jax.jit(jax.vmap(tj.append))(stack(*caches), *stack(*news))
    for i in range(3):
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), append(caches[i], *news[i]))


def test_scan():
    """One token per step, the cache carried along."""
    key, value = tokens(40, seed=74)

    def step(cache, kv):
        return tj.append(cache, *(x[:, None] for x in kv)), cache.lengths

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (key, value))
    got, lengths = jax.jit(lambda c: jax.lax.scan(step, c, xs))(used())
    assert_same_bits(got, append(used(), key, value))
    np.testing.assert_array_equal(lengths[:, 0], np.arange(60, 100))


def test_orbax_round_trip(tmp_path):
    """Saved and restored into an empty cache's shapes, bit for bit."""
    ocp = pytest.importorskip("orbax.checkpoint")
    cache = used()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "cache", cache)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "cache", jax.tree.map(ocp.utils.to_shape_dtype_struct, new(MIXED))
        )
    assert_same_bits(cache, restored)
    restored.validate()
    assert_same_bits(append(cache, *tokens(5)), append(restored, *tokens(5)))
