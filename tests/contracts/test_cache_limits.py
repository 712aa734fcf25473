"""`ProgressiveCache` at its limits: bad tokens, full caches, bytes, and what `validate` catches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
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
