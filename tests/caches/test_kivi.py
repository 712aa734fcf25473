"""KIVI and GEAR against an oracle in float64 numpy that keeps plain lists of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from turbojax.caches.comparison import Kivi, kivi
from turbojax.caches.comparison.codes import rounded, stored_dtype
from turbojax.quantizers import unpack

BATCH, HEADS, CHANNELS, GROUP, RESIDUAL, ROOM = 3, 2, 32, 16, 32, 100
LENGTHS = (90, 37, 0)
CONFIG, GEAR = Kivi(4, GROUP, RESIDUAL), Kivi(4, GROUP, RESIDUAL, rank=4)
append, store_prompt = jax.jit(kivi.append), jax.jit(kivi.store_prompt)
dequantize = jax.jit(kivi.dequantize)


def _empty(config=CONFIG, dtype=jnp.float32, batch=BATCH, max_length=ROOM):
    return kivi.init_cache(batch, max_length, HEADS, CHANNELS, config=config, dtype=dtype)


def _tokens(count, seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, BATCH, count, HEADS, CHANNELS)) + 0.25
    x[0] *= np.where(rng.random(CHANNELS) < 0.1, 8.0, 1.0)
    return tuple(jnp.asarray(x, dtype))


def _oracle_group(x, bits, dtype):
    """Of groups ``[n, ...]``: what is stored, how far it may be off, how far float32 may be off."""
    low, high = x.min(0), x.max(0)
    stored = [np.asarray(v, dtype).astype(np.float64) for v in (low, (high - low) / (2**bits - 1))]
    minimum, scale = stored
    steps = (x - minimum) / np.where(scale == 0, 1, scale)
    codes = np.clip(np.rint(steps), 0, 2**bits - 1)
    # Half a step, and what rounding minimum and scale moves the two ends by.
    eps = float(ml_dtypes.finfo(dtype).eps)
    bound = scale / 2 + eps * (np.abs(low) + (high - low))
    # Float32 arithmetic: a few units of the group's largest number.
    slack = 4 * np.finfo(np.float32).eps * (np.abs(low) + (high - low))
    return tuple(np.broadcast_to(a, x.shape) for a in (minimum + codes * scale, bound, slack))


def _oracle(x, length, bits, side, dtype):
    """`_oracle_group` of all of the first `length` tokens of ``x [T, K, H]``."""
    x = np.asarray(x).astype(np.float64)[:length]
    results = x.copy(), np.zeros_like(x), np.zeros_like(x)
    if side == "key":  # whole residuals, each in groups of tokens
        for t in range(0, length // RESIDUAL * RESIDUAL, GROUP):
            part = _oracle_group(x[t : t + GROUP], bits, dtype)
            for target, got in zip(results, part, strict=True):
                target[t : t + GROUP] = got
    else:  # all but the newest ones, one by one
        quantized = max(length - RESIDUAL, 0)
        for c in range(0, CHANNELS, GROUP):
            part = np.moveaxis(x[:quantized, :, c : c + GROUP], -1, 0)
            for target, got in zip(results, _oracle_group(part, bits, dtype), strict=True):
                target[:quantized, :, c : c + GROUP] = np.moveaxis(got, 0, -1)
    return results


@pytest.mark.quick(1)
@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.float32), (2, jnp.bfloat16), (3, jnp.float16)])
def test_holds_what_the_oracle_holds(bits, dtype):
    key, value = _tokens(max(LENGTHS), 0, dtype)
    config = dataclasses.replace(CONFIG, bits=bits)
    cache = append(_empty(config, dtype), key, value, lengths=jnp.array(LENGTHS))
    assert cache.lengths.tolist() == list(LENGTHS)
    got = dequantize(cache)
    for side, x, out in zip(("key", "value"), (key, value), got, strict=True):
        assert out.dtype == dtype
        assert out.shape == (BATCH, ROOM, HEADS, CHANNELS)
        for row, length in enumerate(LENGTHS):
            want, bound, slack = _oracle(x[row], length, bits, side, stored_dtype(dtype))
            mine = np.asarray(out[row]).astype(np.float64)
            assert not mine[length:].any()
            # The same codes, up to float32 ties, and the output rounded to the dtype.
            unit = float(ml_dtypes.finfo(dtype).eps)
            close = np.abs(mine[:length] - want) <= slack + unit * np.abs(want)
            assert close.size == 0 or close.mean() > 0.999
            error = np.abs(mine[:length] - np.asarray(x[row]).astype(np.float64)[:length])
            assert np.all(error <= bound + slack + unit * np.abs(want))


def test_what_is_exact_follows_the_paper():
    """By hand, token by token: keys leave 4 at a time, values one by one, the 4 newest wait."""
    config = Kivi(2, group_size=4, residual_length=4)
    key, value = (x[:1, :10] for x in _tokens(10, 7))
    cache = _empty(config, batch=1, max_length=12)
    exact_keys, exact_values = [], []
    for t in range(10):
        cache = append(cache, key[:, t : t + 1], value[:, t : t + 1])
        same = [
            [np.array_equal(x[0, i], y[0, i]) for i in range(t + 1)]
            for x, y in zip(dequantize(cache), (key, value), strict=True)
        ]
        exact_keys.append(sum(same[0]))
        exact_values.append(sum(same[1]))
        assert all(same[0][t + 1 - exact_keys[-1] :])  # the newest ones
        assert all(same[1][t + 1 - exact_values[-1] :])
    assert exact_keys == [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert exact_values == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("config", [GEAR, CONFIG], ids=["gear", "kivi"])
def test_pieces_equal_one_call(config):
    """Of GEAR, what is appended; a prompt's factors are another matter."""
    key, value = _tokens(90, 1)
    lengths = np.array(LENGTHS)
    at_once = append(_empty(config), key, value, lengths=jnp.asarray(lengths))
    pieces = _empty(config)
    for start, stop in ((0, 40), (40, 41), (41, 90)):
        new = np.clip(lengths - start, 0, stop - start)
        pieces = append(pieces, key[:, start:stop], value[:, start:stop], lengths=jnp.asarray(new))
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)
    if not config.rank:
        prompt = store_prompt(_empty(config), key, value, lengths=jnp.asarray(lengths))
        for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(prompt), strict=True):
            np.testing.assert_array_equal(a, b)


def _codes_alone(cache, side):
    """float64 ``[B, S, K, H]`` of the codes, without what is added to them."""
    names = (f"{side}_{x}" for x in ("codes", "minimum", "scale"))
    codes, minimum, scale = (getattr(cache, name) for name in names)
    codes = np.asarray(unpack(codes, cache.config.bits), np.float64)
    shared = [np.asarray(x, np.float64) for x in (minimum, scale)]
    axis = 1 if side == "key" else 3
    minimum, scale = (np.repeat(x, GROUP, axis) for x in shared)
    return minimum + codes * scale


@pytest.mark.slow
def test_factors_are_those_of_a_singular_value_decomposition():
    """One pair for 64 tokens of the prompt, one for the 32 after them; none is nearer."""
    key, value = _tokens(100, 3)
    cache = store_prompt(_empty(GEAR), key[:, :80], value[:, :80], lengths=jnp.array([80, 37, 0]))
    assert cache.prompt_blocks.tolist() == [2, 1, 0]
    cache = append(cache, key[:, 80:], value[:, 80:], lengths=jnp.array([20, 0, 0]))
    assert cache.lengths.tolist() == [100, 37, 0]
    for side, x, out in zip(("key", "value"), (key, value), dequantize(cache), strict=True):
        assert getattr(cache, f"{side}_left").dtype == jnp.float16
        alone = _codes_alone(cache, side)
        x, out = np.asarray(x, np.float64), np.asarray(out, np.float64)
        np.testing.assert_array_equal(out[0, 96:], x[0, 96:])  # waits
        for row, first, last in ((0, 0, 64), (0, 64, 96), (1, 0, 32)):
            tokens = np.s_[row, first:last]
            for head in range(HEADS):
                error = (x[tokens] - alone[tokens])[:, head]
                left = (x[tokens] - out[tokens])[:, head]
                singular = np.linalg.svd(error, compute_uv=False)
                best = np.sqrt(np.sum(singular[4:] ** 2))
                # Both factors are rounded to 11 bits: a 2,000th of what they make up.
                rounding = np.linalg.norm(singular[:4]) * 2.0**-10
                assert best * (1 - 1e-4) <= np.linalg.norm(left) <= best + rounding
                assert best < 0.85 * np.linalg.norm(error)


def test_decode_attends_to_the_dequantized_cache():
    key, value = _tokens(90, 2)
    query = _tokens(2, 3)[0]
    query = jnp.concatenate([query, query[..., ::-1]], axis=2)
    cache = append(_empty(), key, value, lengths=jnp.array(LENGTHS))
    out = np.asarray(jax.jit(tj.decode)(query, cache))
    keys, values = (np.asarray(x, np.float64) for x in dequantize(cache))
    for row, length in enumerate(LENGTHS[:2]):
        for t in range(2):
            stop = length - 1 + t
            for head in range(2 * HEADS):
                kv = head // 2
                scores = keys[row, :stop, kv] @ np.asarray(query[row, t, head], np.float64)
                p = np.exp((scores - scores.max()) / np.sqrt(CHANNELS))
                want = p @ values[row, :stop, kv] / p.sum()
                np.testing.assert_allclose(out[row, t, head], want, atol=2e-5)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_bytes_are_those_of_the_codes(bits):
    def nbytes(**options):
        config = Kivi(bits, **options)
        cache = jax.eval_shape(lambda: kivi.init_cache(2, 4096, 8, 128, config=config))
        values = 2 * 2 * 4096 * 8 * 128
        assert cache.compression_ratio == 2 * values / cache.nbytes
        return cache.nbytes

    key, residual = 2 * 4096 * 8 * 128, 2 * 128 * 8 * 128
    value = key - residual  # the newest ones never have codes
    # A minimum and a scale of 16 bits for every 64 numbers; lengths, blocks of the prompt, a flag.
    rest = 2 * 2 * residual + 2 * (4 + 4 + 1)
    assert nbytes() == (key + value) * (bits + 32 / 64) / 8 + rest
    # Four numbers of 16 bits for each token, and 4 x 128 for each 128 tokens.
    assert nbytes(rank=4) == 2 * key * (bits + 32 / 64 + 64 / 128 + 64 / 128) / 8 + rest


@pytest.mark.slow
def test_constant_groups_and_bad_values():
    key = jnp.full((BATCH, 2 * RESIDUAL, HEADS, CHANNELS), 0.3)
    cache = append(_empty(), key, key)
    for x in dequantize(cache):
        np.testing.assert_array_equal(x[:, :RESIDUAL], np.float32(np.float16(0.3)))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        for config in (CONFIG, GEAR):
            cache = append(_empty(config), key.at[0, 3, 1, 5].set(bad), key.at[1, 7, 0, 9].set(bad))
            keys, values = (np.asarray(x[:, : 2 * RESIDUAL]) for x in dequantize(cache))
            spoilt = np.zeros(keys.shape, bool)
            spoilt[0, :GROUP, 1, 5] = True  # its channel, in its group of tokens
            np.testing.assert_array_equal(np.isfinite(keys), ~spoilt)
            spoilt = np.zeros(keys.shape, bool)
            spoilt[1, 7, 0, :GROUP] = True  # its token, in its group of channels
            np.testing.assert_array_equal(np.isfinite(values), ~spoilt)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_is_shared_is_rounded_as_numpy_rounds(dtype):
    """Of float16 also below 6.1e-5, where scales of values below a thousandth are."""
    rng = np.random.default_rng(0)
    least = 1e-9 if dtype == jnp.float16 else 1e-30
    x = np.exp(rng.uniform(np.log(least), np.log(60000), 2000)) * rng.choice([-1, 1], 2000)
    x = np.concatenate([x, [0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14]]).astype(np.float32)
    got = jax.jit(lambda x: rounded(x, np.dtype(dtype)))(x)
    np.testing.assert_array_equal(got, x.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(got.astype(dtype).astype(jnp.float32), got)


def test_small_values_have_codes():
    """Of float32 numbers below a thousandth the scales are no normal float16 numbers."""
    key, value = (x * 1e-4 for x in _tokens(90, 8))
    got = dequantize(append(_empty(), key, value))
    for x, out in zip((key, value), got, strict=True):
        assert jnp.linalg.norm(out[:, :90] - x) < 0.1 * jnp.linalg.norm(x)


def test_overflow_is_an_error_and_under_jit_a_status():
    key, value = _tokens(60, 4)
    cache = append(_empty(), key, value)
    with pytest.raises(ValueError, match=r"lengths \[120, 120, 120\].*max_length=100"):
        kivi.append(cache, key, value)
    after = append(cache, key, value, lengths=jnp.array([60, 40, 0]))
    assert after.overflowed.tolist() == [True, False, False]
    assert after.lengths.tolist() == [100, 100, 60]
    with pytest.raises(ValueError, match="must be 0: prefill starts a sequence"):
        kivi.store_prompt(cache, key, value)
    after = store_prompt(cache, key, value, lengths=jnp.array([60, 0, 1]))
    assert after.overflowed.tolist() == [True, False, True]
    for name in ("lengths", "key_codes", "value_residual"):
        np.testing.assert_array_equal(getattr(after, name), getattr(cache, name))


def test_groups_of_channels_divide_the_head():
    sizes = {128: 64, 96: 48, 80: 40, 64: 64, 48: 48, 26: 26}
    assert {n: Kivi().channels_per_group(n) for n in sizes} == sizes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bits": 5}, ValueError, r"self.bits=5 must be one of \(2, 3, 4\)"),
        ({"bits": 4.0}, TypeError, "bits=4.0 must be an integer"),
        ({"rank": -1}, ValueError, "self.rank=-1 must not be negative"),
        ({"rank": True}, TypeError, "rank=True must be an integer"),
        ({"group_size": 0}, ValueError, "group_size=0 must be at least 1"),
        ({"group_size": 2**30}, ValueError, "self.group_size=1073741824 must be at most 1024"),
        ({"residual_length": 65}, ValueError, "self.residual_length=65 must be a multiple of"),
    ],
)
def test_bad_configs(arguments, error, message):
    with pytest.raises(error, match=message):
        Kivi(**arguments)


def test_bad_calls_say_what_is_wrong():
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        kivi.init_cache(1, 0, 1, 64)
    with pytest.raises(ValueError, match="head_dim=12 cannot be packed.*multiple of 8"):
        kivi.init_cache(1, 64, 1, 12, config=Kivi(bits=3))
    with pytest.raises(ValueError, match="config.rank=4 must be at most head_dim=2"):
        kivi.init_cache(1, 64, 1, 2, config=Kivi(rank=4))
    with pytest.raises(TypeError, match="int8 must be bfloat16"):
        kivi.init_cache(1, 64, 1, 64, dtype=jnp.int8)
    cache = _empty()
    key = jnp.zeros((BATCH, 1, HEADS + 1, CHANNELS))
    with pytest.raises(ValueError, match=r"must be \[3, T, 2, 32\]"):
        kivi.append(cache, key, key)
    key = jnp.zeros((BATCH, 1, HEADS, CHANNELS), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"must equal cache.dtype=float32"):
        kivi.append(cache, key, key)
    with pytest.raises(TypeError, match="cache is a dict, must be a KiviCache"):
        kivi.dequantize({})
