"""`ProgressiveCache` at its limits: bad tokens, full caches, bytes, padding, `validate`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.caches.cache_helpers import (
    BATCH,
    CONFIGS,
    HEAD_DIM,
    HEADS,
    MIXED,
    append,
    append_jit,
    assert_holds,
    assert_same_bits,
    changed,
    dequantize_jit,
    new,
    oracle_for,
    prefill,
    tokens,
    used,
)


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    return CONFIGS[request.param]


# Non-finite tokens -------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("position", [3, 18, 38], ids=["first block", "second", "buffer"])
def test_non_finite_prompt_tokens_are_not_hidden(implementation, bad, position):
    """They read as NaN, as does all that shares their scale: their block, or the buffer."""
    key, value = tokens(40, seed=40)
    clean = prefill(new(CONFIGS["4-bit"]), key, value, None, implementation)
    key = changed(key, (1, position, 2, 5), bad)
    cache = prefill(new(CONFIGS["4-bit"]), key, value, None, implementation)
    want, got = (np.asarray(dequantize_jit(c)[0]) for c in (clean, cache))
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
    np.testing.assert_array_equal(dequantize_jit(cache)[1], dequantize_jit(clean)[1])
    cache.validate()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_non_finite_appended_tokens_are_not_hidden(implementation, bad):
    """They turn their head's universal scale to NaN; what was compressed before stays."""
    key, value = tokens(60, seed=41)
    spoiled = changed(value, (0, 25, 1, 7), bad)
    cache = append(new(CONFIGS["4-bit"]), key, spoiled, None, implementation)
    oracle = oracle_for(cache)
    oracle.append(key, spoiled)
    got, want = np.asarray(dequantize_jit(cache)[1]), oracle.dequantize()[1]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isnan(got[0, 16:60, 1]).all()
    np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(want))
    cache.validate()


def test_a_non_finite_first_token_is_not_hidden(implementation):
    key, value = tokens(5, seed=42)
    cache = append(new(MIXED), changed(key, (0, 0, 0, 0), np.nan), value, None, implementation)
    got = np.asarray(dequantize_jit(cache)[0])
    assert np.isnan(got[0, :5, 0]).all()
    assert np.isfinite(got[0, :, 1:]).all()
    assert np.isfinite(got[1:]).all()


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_non_finite_tokens_in_any_split(bad):
    """The same bits one by one, in pieces and at once, and the oracle's: NaN from its block on."""
    key, value = tokens(40, seed=43)
    key = key.copy()
    # The second right behind a full buffer: that one's block keeps its scale.
    key[0, 13, 2, 1] = key[1, 32, 0, 0] = key[2, 0, 3, 3] = bad
    at_once = append(new(MIXED), key, value)
    for pieces in ([1] * 40, [1, 19, 20]):
        cache, t = new(MIXED), 0
        for n in pieces:
            cache = append(cache, key[:, t : t + n], value[:, t : t + n])
            t += n
        assert_same_bits(cache, at_once)
    oracle = oracle_for(at_once)
    oracle.append(key, value)
    assert_holds(at_once, oracle, deeply=False)


# Full caches -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cache_can_be_filled_to_the_last_token():
    """By appends and by a prompt, though the length is no multiple of a block."""
    key, value = tokens(41, seed=50)
    appended = append(new(MIXED, 41), key, value)
    oracle = oracle_for(appended)
    oracle.append(key, value)
    assert_holds(appended, oracle, deeply=False)
    prompted = prefill(new(MIXED, 41), key, value)
    oracle = oracle_for(prompted)
    oracle.prefill(key, value)
    assert_holds(prompted, oracle, deeply=False)


@pytest.mark.slow
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


@pytest.mark.slow
def test_too_many_tokens_inside_jit():
    """What fits is kept, the rest dropped and reported; nothing stored is overwritten, ever."""
    cache = new(MIXED, max_length=40)
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


@pytest.mark.fuzz
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
    ("low", "least", "with_buffer"), [(0, 3.7, 3.55), (4, 4.8, 4.57)], ids=["4-bit", "half 2-bit"]
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
    # As docs/numerics.md says.
    assert round(cache.compression_ratio, 2) == with_buffer
    print(
        f"{cache.compression_ratio_without_buffer:.3f}, "
        f"with the buffer {cache.compression_ratio:.3f}"
    )


@pytest.mark.quick(1, slow=0)
def test_nbytes_counts_what_is_held(config):
    """The sum over every array, before and after use, and what bits and shapes predict."""
    cache = new(config, max_length=100)
    held = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert cache.nbytes == held
    assert append(cache, *tokens(30)).nbytes == held
    c = config
    blocks = 100 // c.block_kv  # what fills none stays in the buffer
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
    shapes = jax.eval_shape(lambda: tj.init_cache(BATCH, 100, HEADS, HEAD_DIM, config=MIXED))
    assert shapes.nbytes == new(MIXED, dtype=shapes.dtype).nbytes


# validate ----------------------------------------------------------------------------------------


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
    "less than a flush leaves": (
        "at least 16 where there are blocks",
        lambda c: dataclasses.replace(
            c,
            config=dataclasses.replace(c.config, buffer_size=2 * c.config.block_kv),
            lengths=c.lengths // 16 * 16,
            buffer_lengths=jnp.zeros_like(c.buffer_lengths),
        ),
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
        lambda c: with_side(
            c, head_slots=changed(c.key.head_slots, (0, 0), c.key.head_slots[0, 1])
        ),
    ),
    "slots out of range": ("head_slots", lambda c: with_side(c, head_slots=c.key.head_slots + 1)),
    "buffer codes": (
        "buffer",
        lambda c: with_side(c, buffer=changed(c.key.buffer, (0, 0, 0, 0), -128)),
    ),
    "universal scale": (
        "buffer_scale",
        lambda c: with_side(c, buffer_scale=changed(c.key.buffer_scale, (1, 1), -1.0)),
    ),
    "block scale": (
        "block_scale",
        lambda c: with_side(c, block_scale=changed(c.key.block_scale, (0, 0, 0), 0.0)),
    ),
    "channel scale": (
        "channel_scale",
        lambda c: with_side(c, channel_scale=changed(c.key.channel_scale, (0, 0, 0, 0), 0)),
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


CONFIG = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
LENGTHS = jnp.array([37, 20, 0])
prefill_jit = jax.jit(tj.prefill, static_argnames="return_residual")
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
        return prefill_jit(q, k, v, empty, key_value_seq_lengths=LENGTHS, return_residual=True)

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
    together, _ = prefill_jit(query, key, value, empty, key_value_seq_lengths=LENGTHS)
    one = tj.init_cache(1, 64, 2, 16, config=CONFIG, dtype=jnp.float32)
    alone, _ = prefill_jit(query[1:2, :20], key[1:2, :20], value[1:2, :20], one)
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
    _, prefilled = prefill_jit(key, key, value, empty)
    appended = append_jit(empty, key, value)
    np.testing.assert_array_equal(prefilled.key.buffer_scale, appended.key.buffer_scale)
    np.testing.assert_array_equal(prefilled.value.buffer, appended.value.buffer)
    key, value = tokens(16, seed=9)
    _, whole = prefill_jit(key, key, value, empty)
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
