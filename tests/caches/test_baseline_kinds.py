"""Kinds for comparison: tokens rounded each by itself, whole models through them, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from turbojax import caches as kv
from turbojax import models, parallel
from turbojax.caches.comparison import Kivi, kivi, tokens
from turbojax.caches.comparison.codes import stored_dtype
from turbojax.caches.exact.cache import init_cache as init_exact
from turbojax.sharding.axes import Axes

BATCH, HEADS, CHANNELS, ROOM = 2, 2, 32, 24
CLASSES = {"int8": tokens.Int8Cache, "int4": tokens.Int4Cache, "e4m3": tokens.E4m3Cache}
append, dequantize = jax.jit(tokens.append), jax.jit(tokens.dequantize)


def _empty(name, dtype=jnp.float32):
    return tokens.init_cache(CLASSES[name], BATCH, ROOM, HEADS, CHANNELS, dtype=dtype)


def _numbers(count, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, BATCH, count, HEADS, CHANNELS)) + 0.25
    x[0] *= np.where(rng.random(CHANNELS) < 0.1, 8.0, 1.0)
    return tuple(jnp.asarray(x, dtype))


def _oracle(name, x, dtype):
    """float64 of what is stored of vectors ``[..., H]``, and a step that a tie may be off by."""
    stored = stored_dtype(dtype)
    x = np.asarray(x, np.float64)
    if name == "e4m3":
        return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), np.zeros(x.shape)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    if name == "int8":
        low, step, least, most = 0.0, np.abs(x).max(-1, keepdims=True) / 127, -127, 127
    else:
        low, step, least, most = low.astype(stored).astype(np.float64), (high - low) / 15, 0, 15
    step = step.astype(stored).astype(np.float64)
    codes = np.clip(np.rint((x - low) / step), least, most)
    return low + codes * step, np.broadcast_to(step, x.shape)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CLASSES)
def test_holds_what_the_oracle_holds(name, dtype):
    numbers = _numbers(20, dtype=dtype)
    cache = append(_empty(name, dtype), *numbers, lengths=jnp.array([20, 7]))
    assert cache.lengths.tolist() == [20, 7]
    unit = float(ml_dtypes.finfo(dtype).eps)
    for x, out in zip(numbers, dequantize(cache), strict=True):
        assert (out.shape, out.dtype) == ((BATCH, ROOM, HEADS, CHANNELS), dtype)
        out = np.asarray(out, np.float64)
        want, step = _oracle(name, x, dtype)
        for row, length in enumerate((20, 7)):
            assert not out[row, length:].any()
            off = np.abs(out[row, :length] - want[row, :length])
            # Rounded to the dtype; float32's own ties may be another code, of a few.
            near = off <= unit * (np.abs(want[row, :length]) + 1e-5)
            assert near.mean() > 0.999
            assert np.all(near | (off <= 1.01 * step[row, :length]))


def test_bytes_are_those_of_the_codes():
    values = 2 * BATCH * ROOM * HEADS
    for name, bits in (("int8", 8 * CHANNELS + 16), ("int4", 4 * CHANNELS + 32), ("e4m3", 8 * 32)):
        cache = _empty(name, jnp.bfloat16)
        assert cache.nbytes == values * bits // 8 + BATCH * 5
        assert cache.compression_ratio == 2 * values * CHANNELS / cache.nbytes


def test_bad_values_stay_visible():
    """NaN and infinity spoil their own vector's numbers, and in e4m3 themselves alone."""
    for name in CLASSES:
        for bad in (jnp.nan, jnp.inf, -jnp.inf):
            key, value = _numbers(20)
            cache = append(_empty(name), key.at[0, 3, 1, 5].set(bad), value)
            keys, values = (np.isfinite(np.asarray(x)) for x in dequantize(cache))
            spoilt = np.zeros(keys.shape, bool)
            spoilt[0, 3, 1, 5 if name == "e4m3" else slice(None)] = True
            np.testing.assert_array_equal(keys, ~spoilt)
            assert values.all()


@pytest.mark.parametrize(
    ("x", "held"), [(448.0, 448.0), (464.0, 448.0), (464.5, np.nan), (-1e4, np.nan), (2e-3, 2**-9)]
)
def test_e4m3_is_a_cast_at_scale_1(x, held):
    codes, shared = tokens.E4m3Cache.quantize(jnp.full((1, CHANNELS), x))
    assert shared == ()
    np.testing.assert_array_equal(tokens.E4m3Cache.numbers(codes, shared), np.full((1, 32), held))


@pytest.mark.slow
def test_channels_with_outliers_need_scales_of_their_own():
    """KIVI's observation: of keys with loud channels, codes per token lose more than per channel.

    In a token's group the loudest channel, 20 times as loud, sets a step of more than all that
    quiet ones are; a channel's own tokens are alike. Without such channels it makes no difference.
    """
    _, value = _numbers(16, 3)
    key = value * jnp.where(jnp.arange(CHANNELS) % 16 == 0, 20.0, 1.0)[None, None, None]
    config = Kivi(4, group_size=16, residual_length=16)
    by_channel = kivi.init_cache(BATCH, 16, HEADS, CHANNELS, config=config, dtype=jnp.float32)
    by_channel = jax.jit(kivi.append)(by_channel, key, value)
    by_token = append(_empty("int4"), key, value)

    def error(got, want):
        got, want = (np.asarray(x, np.float64)[:, :16] for x in (got, want))
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    quiet = np.s_[..., np.arange(CHANNELS) % 16 != 0]
    [channels, _], [at_once, plain] = kivi.dequantize(by_channel), dequantize(by_token)
    assert error(at_once[quiet], key[quiet]) > 5 * error(channels[quiet], key[quiet])
    assert error(plain, value) < 2 * error(channels[quiet], key[quiet])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _empty("int4", jnp.int8), TypeError, "int8 must be bfloat16, float16 or float32"),
        (
            lambda: tokens.init_cache(CLASSES["int4"], 1, 8, 1, 15),
            ValueError,
            "head_dim=15 cannot be packed: size=15",
        ),
        (
            lambda: tokens.init_cache(CLASSES["int8"], 1, 0, 1, 16),
            ValueError,
            "max_length=0 must be at least 1",
        ),
        (lambda: tokens.dequantize({}), TypeError, "cache is a dict, must be a TokenCache"),
        (
            lambda: tokens.append(_empty("e4m3"), *_numbers(25)),
            ValueError,
            r"lengths \[25, 25\], which must be at most max_length=24",
        ),
        (
            lambda: kv.init_layer_cache(1, 8, 1, 16, kind="int4", local_window_size=4),
            NotImplementedError,
            "local_window_size=4 must be None: a cache of kind 'int4' keeps all tokens",
        ),
    ],
)
def test_bad_calls_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_tokens_stay_on_one_device():
    """Over a mesh their sequences and heads are split, and nothing else is."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "sequence"))
    axes = Axes(batch="data", sequence="sequence", mesh=mesh)
    gear = kivi.init_cache(BATCH, ROOM, HEADS, CHANNELS, config=Kivi(rank=2))
    for cache in (gear, _empty("int4")):
        name = type(cache).__name__
        with pytest.raises(ValueError, match=rf"sequence=.* must be \(\) for a {name}"):
            cache.partition_specs(axes)
        specs = cache.partition_specs(Axes(batch="data", heads="sequence", mesh=mesh))
        assert specs.key_codes == jax.sharding.PartitionSpec("data", None, "sequence", None)
        with pytest.raises(NotImplementedError, match=f"tokens of a {name} cannot be split"):
            parallel.decode(jnp.zeros((BATCH, 1, HEADS, CHANNELS)), cache, "sequence")


def test_engines_refuse_them_by_name():
    model = models.random_decoder(models.SHAPES["tiny"])
    for name in ("kivi4", "gear4", "int4", "e4m3"):
        with pytest.raises(ValueError, match=f"kv_dtype='{name}' must be one of auto"):
            models.Engine(model, num_pages=8, kv_dtype=name)


@pytest.fixture(scope="module")
def model():
    return models.random_decoder(models.SHAPES["tiny"])


@pytest.mark.slow
def test_a_model_says_why_its_logits_are_nan(model):
    """Keys beyond 448: e4m3 at scale 1 cannot hold them, int8 can."""
    loud = dict(model.layers[0])
    kernel = loud["attention"]["k_proj"]["kernel"] * 1e5
    loud["attention"] = {**loud["attention"], "k_proj": {"kernel": kernel}}
    model = dataclasses.replace(model, layers=(loud, *model.layers[1:]))
    prompt = np.arange(12, dtype=np.int32)[None]
    models.generate(model, prompt, max_new_tokens=2, cache="int8")
    with pytest.raises(ValueError, match="hold NaN.*beyond 448 become NaN in e4m3"):
        models.generate(model, prompt, max_new_tokens=2, cache="e4m3")


@pytest.mark.slow
def test_an_exact_cache_is_what_they_are_compared_to():
    """What the exact cache gives, they give of tokens that still wait to be quantized."""
    query = _numbers(1, 5)[0]
    key, value = _numbers(20)
    waits = kv.init_layer_cache(BATCH, ROOM, HEADS, CHANNELS, kind=Kivi(), dtype=jnp.float32)
    plain = init_exact(BATCH, ROOM, HEADS, CHANNELS, dtype=jnp.float32)
    attend = jax.jit(kv.attend_new_tokens())
    outs = []
    for cache in (waits, plain):
        cache = kv.kind_of(cache).append(cache, key[:, :19], value[:, :19])
        outs.append(attend(query, key[:, 19:], value[:, 19:], cache)[0])
    np.testing.assert_array_equal(*outs)
