"""`TurboAttention`: what it computes, without a cache and through an exact one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.flax.flax_helpers import (
    CHANNELS,
    HEADS,
    KV_HEADS,
    ROUNDING,
    SMALL,
    WIDTH,
    module,
    oracle,
    params,
    tokens,
)
from turbojax.caches import AttentionOptions, PooledAttention
from turbojax.flax import linen
from turbojax.flax.projections import linear
from turbojax.rotary import Rope

VARIANTS = {
    "plain": ({}, {}),
    "biases and norms": (
        {"qkv_bias": True, "output_bias": True, "qk_norm_eps": 1e-3},
        {"eps": 1e-3},
    ),
    "no positions": ({"rope": None}, {"rotary": 0}),
    "partial rope": (
        {"rope": Rope(CHANNELS, theta=100.0, rotary_dim=4)},
        {"theta": 100.0, "rotary": 4},
    ),
    "window": ({"options": AttentionOptions(local_window_size=5)}, {"window": 5}),
    "scale and cap": (
        {"options": AttentionOptions(scale=0.9, logits_soft_cap=0.7)},
        {"scale": 0.9, "cap": 0.7},
    ),
}


def nnx_linear():
    kinds = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    return linear(WIDTH, 7, use_bias=True, rngs=nnx.Rngs(1), **kinds)


def linen_linear():
    layer = linen._linear(7, None, True, dtype=jnp.float32, param_dtype=jnp.float32)
    variables = layer.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    return functools.partial(layer.apply, variables)


def close(out, expected):
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=ROUNDING)


# Linear layers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("make", [nnx_linear, linen_linear], ids=["nnx", "linen"])
def test_on_a_gpu_a_single_row_is_multiplied_beside_another(make):
    apply = make()
    for shape, rows in (((1, 1, WIDTH), 2), ((1, 3, WIDTH), 3), ((WIDTH,), None)):
        x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        text = jax.jit(apply).lower(x).as_text()
        assert (f"tensor<2x1x{WIDTH}xf32>" in text) == (rows == 2)
        want = apply(jnp.broadcast_to(x, (2, *shape)))[0]
        np.testing.assert_allclose(apply(x), want, rtol=0, atol=ROUNDING)
        grad = jax.grad(lambda x: jnp.sum(apply(x)))(x)
        assert grad.shape == shape
        assert np.isfinite(grad).all()


# The mathematics ----------------------------------------------------------------------------------


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_sequences(variant):
    options, expected = VARIANTS[variant]
    layer, x = module(cache="exact", **options), tokens(21)
    plain = oracle(params(layer), x, **expected)
    close(layer(x), plain)
    # What stands in the padding is of no account, be it NaN.
    lengths = np.array([21, 6])
    x[1, 6:] = np.nan
    close(layer(x, lengths=jnp.asarray(lengths)), np.where(np.isnan(x), 0, plain))
    if variant != "plain":
        assert np.abs(plain - oracle(params(layer), tokens(21))).max() > 0.05


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("variant", ["plain", "biases and norms", "window"])
def test_prompt_then_new_tokens(variant):
    """Through an exact cache: what the oracle says of the whole, one by one and many at once."""
    options, expected = VARIANTS[variant]
    layer, x = module(cache="exact", **options), tokens(21)
    lengths = np.array([9, 4])
    layer.init_cache(2, 32)
    prompt = x[:, :9].copy()
    prompt[1, 4:] = np.nan
    outs = [np.asarray(layer.prefill(prompt, lengths=jnp.asarray(lengths)))]
    new = [(9, 10), (10, 14), (14, 15)]
    # The second sequence goes on where its prompt ended.
    shifted = np.stack([x[0], np.concatenate([x[1, :4], x[1, 9:], x[1, 4:9]])])
    for first, last in new:
        outs.append(np.asarray(layer.decode(np.stack([x[0, first:last], x[1, first:last]]))))
    whole = oracle(params(layer), shifted, **expected)
    close(outs[0][0], whole[0, :9])
    close(outs[0][1, :4], whole[1, :4])
    assert not outs[0][1, 4:].any()
    for out, (first, last) in zip(outs[1:], new, strict=True):
        close(out[0], whole[0, first:last])
        close(out[1], whole[1, first - 5 : last - 5])
    assert layer.cache.lengths.tolist() == [15, 10]
    assert not layer.cache.overflowed.any()


@pytest.mark.slow
def test_positions():
    layer = module(cache="exact")
    x, positions = tokens(7), np.array([[0, 1, 2, 3, 4, 5, 6], [3, 5, 6, 10, 11, 12, 39]])
    out = layer(x, positions=jnp.asarray(positions))
    close(out, oracle(params(layer), x, positions=positions))
    np.testing.assert_array_equal(layer(x, positions=positions.tolist()), out)


@pytest.mark.slow
def test_from_an_empty_cache():
    layer, x = module(cache="exact"), tokens(3, batch=1)
    layer.init_cache(1, 8)
    close(layer.decode(x), oracle(params(layer), x))


def test_grouped_queries_need_not_be():
    layer = tj.flax.TurboAttention(WIDTH, 3, cache="exact", rngs=nnx.Rngs(0))
    assert layer.core.head_dim == WIDTH // 3
    assert layer.core.rope == Rope(WIDTH // 3)
    shapes = {path[0]: x.shape for path, x in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert shapes == {f"{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}


@pytest.mark.slow
def test_attention_is_chosen_apart_from_the_cache():
    x = tokens(20)
    exact = module(cache=SMALL, attention="exact")
    close(exact(x), oracle(params(exact), x))
    turbo = module(cache="exact", attention=SMALL)
    np.testing.assert_array_equal(turbo(x), module(cache=SMALL)(x))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("kind", "dtype"), [("dtype", jnp.bfloat16), ("param_dtype", jnp.float16)])
def test_half_precision(kind, dtype):
    """Parameters in float32, the rest in 16 bits; and all in 16 bits."""
    x = tokens(20)
    layer = module(cache="exact", **{kind: dtype})
    layer.init_cache(2, 24)
    out = layer.prefill(x)
    assert out.dtype == layer.cache.key.dtype == dtype
    step = layer.decode(x[:, :1])
    assert step.dtype == dtype
    # Rounded through four layers, of order 1.
    error = np.abs(np.asarray(out, np.float64) - oracle(params(layer), x)).max()
    assert error < 16 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda layer: layer(tokens(3)[0]), ValueError, r"must be \[B, T, 24\]"),
        (lambda layer: layer(tokens(3)[..., 1:]), ValueError, r"must be \[B, T, 24\]"),
        (lambda layer: layer(tokens(0)), ValueError, "no axis empty"),
        (lambda layer: layer(np.ones((1, 2, WIDTH), np.int32)), TypeError, "x.dtype=int32"),
        (
            lambda layer: layer(tokens(3), lengths=jnp.array([3, 4])),
            ValueError,
            r"lengths=\[3, 4\] must be between 0 and 3",
        ),
        (
            lambda layer: layer(tokens(3), positions=jnp.arange(3)),
            ValueError,
            "positions.shape=.* one per token",
        ),
        (
            lambda layer: layer(tokens(3), positions=jnp.ones((2, 3))),
            TypeError,
            "positions.dtype=float32 must be an integer type",
        ),
        (
            lambda _: module(rope=None)(tokens(3), positions=jnp.ones((2, 3), jnp.int32)),
            ValueError,
            "there is no rotary embedding",
        ),
        (lambda layer: layer.cache, ValueError, "there is no cache"),
        (lambda layer: layer.init_cache(0, 8), ValueError, "0"),
    ],
)
def test_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call(module(cache="exact"))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"cache": "5bit"}, ValueError, "cache='5bit' must be"),
        ({"attention": "turbo"}, TypeError, "attention='turbo' must be"),
        ({"implementation": "bogus"}, ValueError, "implementation='bogus' must be None or one of"),
        ({"implementation": "cudnn"}, ValueError, "implementation='cudnn' must be None or one of"),
        ({"cache": "exact", "implementation": "triton"}, ValueError, r"of \('xla', 'cudnn', 'mos"),
        ({"qk_norm_eps": -5.0}, ValueError, "qk_norm_eps=-5.0 must be at least 0"),
        ({"qk_norm_eps": "x"}, TypeError, "qk_norm_eps is a str"),
        ({"sharding": (None,)}, ValueError, "must be a pair"),
        ({"sharding": (None, "model", None)}, ValueError, "must be a pair"),
        ({"sharding": "ab"}, TypeError, "must be None or a pair"),
        ({"sharding": (None, 1)}, TypeError, "must hold names"),
        ({"options": 3}, TypeError, "options=3 must be AttentionOptions"),
        ({"rope": 10000.0}, TypeError, "rope=10000.0 must be a Rope"),
        ({"rope": Rope(16)}, ValueError, "head_dim=8 must equal rope.head_dim=16"),
        ({"num_kv_heads": 3}, ValueError, "multiple of 3 key/value heads"),
        ({"num_heads": 0}, ValueError, "num_heads=0 must be at least 1"),
        ({"head_dim": None, "num_heads": 5, "num_kv_heads": 1}, ValueError, "multiple of num_head"),
        (
            {
                "attention": PooledAttention(tj.levels.TopK()),
                "options": AttentionOptions(local_window_size=4),
            },
            NotImplementedError,
            "pooled attention has no window",
        ),
    ],
)
def test_construction(arguments, kind, message):
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": CHANNELS}
    with pytest.raises(kind, match=message):
        tj.flax.TurboAttention(WIDTH, **{**sizes, **arguments}, rngs=nnx.Rngs(0))
