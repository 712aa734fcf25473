"""The KIVI-style baseline against an oracle in float64 numpy that keeps plain lists of tokens."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from turbojax.baselines import kivi
from turbojax.ops import exact_attention
from turbojax.state import exact

BATCH, HEADS, CHANNELS, GROUP, RESIDUAL, ROOM = 3, 2, 32, 16, 32, 100
LENGTHS = (90, 37, 0)
append = jax.jit(kivi.append)


def _empty(bits=4, dtype=jnp.float32, batch=BATCH, max_length=ROOM):
    return kivi.init_cache(
        batch,
        max_length,
        HEADS,
        CHANNELS,
        bits=bits,
        group_size=GROUP,
        residual_length=RESIDUAL,
        dtype=dtype,
    )


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
    # Half a step, and what rounding minimum and scale to the dtype moves the two ends by.
    eps = float(ml_dtypes.finfo(dtype).eps)
    bound = scale / 2 + eps * (np.abs(low) + (high - low))
    # Float32 arithmetic: a few units of the group's largest number.
    slack = 4 * np.finfo(np.float32).eps * (np.abs(low) + (high - low))
    return tuple(np.broadcast_to(a, x.shape) for a in (minimum + codes * scale, bound, slack))


def _oracle(x, length, bits, kind, dtype):
    """`_oracle_group` of all of the first `length` tokens of ``x [T, K, H]``."""
    x = np.asarray(x).astype(np.float64)[:length]
    results = x.copy(), np.zeros_like(x), np.zeros_like(x)
    quantized = length - length % RESIDUAL
    if kind == "key":
        for t in range(0, quantized, GROUP):
            for target, got in zip(
                results, _oracle_group(x[t : t + GROUP], bits, dtype), strict=True
            ):
                target[t : t + GROUP] = got
    else:
        for c in range(0, CHANNELS, GROUP):
            part = np.moveaxis(x[:quantized, :, c : c + GROUP], -1, 0)
            for target, got in zip(results, _oracle_group(part, bits, dtype), strict=True):
                target[:quantized, :, c : c + GROUP] = np.moveaxis(got, 0, -1)
    return results


@pytest.mark.quick(1)
@pytest.mark.parametrize(("bits", "dtype"), [(4, jnp.float32), (2, jnp.bfloat16)])
def test_holds_what_the_oracle_holds(bits, dtype):
    key, value = _tokens(max(LENGTHS), 0, dtype)
    cache = append(_empty(bits, dtype), key, value, lengths=jnp.array(LENGTHS))
    assert cache.lengths.tolist() == list(LENGTHS)
    got = kivi.dequantize(cache)
    for kind, x, out in zip(("key", "value"), (key, value), got, strict=True):
        assert out.dtype == dtype
        assert out.shape == (BATCH, ROOM, HEADS, CHANNELS)
        for row, length in enumerate(LENGTHS):
            want, bound, slack = _oracle(x[row], length, bits, kind, dtype)
            mine = np.asarray(out[row]).astype(np.float64)
            assert not mine[length:].any()
            # The same codes, up to float32 ties, and the output rounded to the dtype.
            unit = float(ml_dtypes.finfo(dtype).eps)
            close = np.abs(mine[:length] - want) <= slack + unit * np.abs(want)
            assert close.size == 0 or close.mean() > 0.999
            error = np.abs(mine[:length] - np.asarray(x[row]).astype(np.float64)[:length])
            assert np.all(error <= bound + slack + unit * np.abs(want))


@pytest.mark.slow
def test_pieces_equal_one_call():
    key, value = _tokens(90, 1)
    lengths = np.array(LENGTHS)
    at_once = append(_empty(), key, value, lengths=jnp.asarray(lengths))
    pieces = _empty()
    for start, stop in ((0, 40), (40, 41), (41, 90)):
        new = np.clip(lengths - start, 0, stop - start)
        pieces = kivi.append(
            pieces, key[:, start:stop], value[:, start:stop], lengths=jnp.asarray(new)
        )
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_array_equal(a, b)


def test_decode_attends_to_the_dequantized_cache():
    key, value = _tokens(90, 2)
    query = _tokens(2, 3)[0]
    query = jnp.concatenate([query, query[..., ::-1]], axis=2)
    cache = append(_empty(), key, value, lengths=jnp.array(LENGTHS))
    out = np.asarray(jax.jit(kivi.decode)(query, cache))
    keys, values = (np.asarray(x, np.float64) for x in kivi.dequantize(cache))
    for row, length in enumerate(LENGTHS[:2]):
        for t in range(2):
            stop = length - 1 + t
            for head in range(2 * HEADS):
                kv = head // 2
                scores = keys[row, :stop, kv] @ np.asarray(query[row, t, head], np.float64)
                p = np.exp((scores - scores.max()) / np.sqrt(CHANNELS))
                want = p @ values[row, :stop, kv] / p.sum()
                np.testing.assert_allclose(out[row, t, head], want, atol=2e-5)


@pytest.mark.parametrize("bits", [4, 2])
def test_bytes_are_those_of_the_codes(bits):
    cache = jax.eval_shape(lambda: kivi.init_cache(2, 4096, 8, 128, bits=bits, dtype=jnp.bfloat16))
    values = 2 * 2 * 4096 * 8 * 128
    residual = 2 * 2 * 128 * 8 * 128 * 2
    bookkeeping = 2 * (4 + 1)
    # A minimum and a scale of 16 bits for every 64 values.
    assert cache.nbytes == values * (bits + 32 / 64) / 8 + residual + bookkeeping
    assert cache.compression_ratio == 2 * values / cache.nbytes


def test_constant_groups_are_exact_and_bad_values_stay_visible():
    key = jnp.full((BATCH, RESIDUAL, HEADS, CHANNELS), 0.3)
    cache = append(_empty(), key, key)
    for x in kivi.dequantize(cache):
        np.testing.assert_array_equal(x[:, :RESIDUAL], key)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        cache = append(_empty(), key.at[0, 3, 1, 5].set(bad), key.at[1, 7, 0, 9].set(bad))
        keys, values = kivi.dequantize(cache)
        assert not jnp.isfinite(keys[0, 3, 1, 5])
        assert not jnp.isfinite(values[1, 7, 0, 9])
        assert jnp.all(jnp.isfinite(keys[1]))
        assert jnp.all(jnp.isfinite(values[0]))


def test_overflow_is_an_error_and_under_jit_a_status():
    key, value = _tokens(60, 4)
    cache = kivi.append(_empty(), key, value)
    with pytest.raises(ValueError, match=r"lengths \[120, 120, 120\].*max_length=100"):
        kivi.append(cache, key, value)
    after = append(cache, key, value, lengths=jnp.array([60, 40, 0]))
    assert after.overflowed.tolist() == [True, False, False]
    assert after.lengths.tolist() == [100, 100, 60]


@pytest.mark.slow
def test_it_costs_no_more_than_its_codes_say():
    """On the same data, two bits lose more than four, and four less than a tenth of the norm."""
    key, value = _tokens(64, 5)
    plain = exact.append(
        exact.init_cache(BATCH, 64, HEADS, CHANNELS, dtype=jnp.float32), key, value
    )
    query = _tokens(1, 6)[0]
    want = jax.jit(exact_attention.decode)(query, plain)
    errors = {}
    for bits in (4, 2):
        cache = append(_empty(bits, max_length=64), key, value)
        difference = jax.jit(kivi.decode)(query, cache) - want
        errors[bits] = float(jnp.linalg.norm(difference) / jnp.linalg.norm(want))
    assert errors[4] < 0.1
    assert errors[4] < errors[2] < 1


def test_bad_calls_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"bits=3 must be one of \(2, 4\)"):
        kivi.init_cache(1, 64, 1, 64, bits=3)
    with pytest.raises(ValueError, match="head_dim=96 must be a multiple of group_size=64"):
        kivi.init_cache(1, 64, 1, 96)
    with pytest.raises(ValueError, match="residual_length=65 must be a multiple"):
        kivi.init_cache(1, 64, 1, 64, residual_length=65)
    with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
        kivi.init_cache(1, 0, 1, 64)
    with pytest.raises(TypeError, match="int8 must be bfloat16"):
        kivi.init_cache(1, 64, 1, 64, dtype=jnp.int8)
    cache = _empty()
    key = jnp.zeros((BATCH, 1, HEADS + 1, CHANNELS))
    with pytest.raises(ValueError, match=r"must be \[3, T, 2, 32\]"):
        kivi.append(cache, key, key)
    key = jnp.zeros((BATCH, 1, HEADS, CHANNELS), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"must equal cache.dtype=float32"):
        kivi.append(cache, key, key)
