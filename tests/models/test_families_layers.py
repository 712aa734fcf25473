"""What layers of OLMo 2, SmolLM3, Granite, Cohere 2 and GLM-4 need: oracles, caches, training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.models import tiny
from turbojax import models, smoothing
from turbojax.flax.norms import rms_norm
from turbojax.models import causal_attention
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_params, layer_weights
from turbojax.rotary import Rope, YarnScaling
from turbojax.smoothing.attention import of_channels, split_pairs

NAMES = ("cohere2-odd", "olmo2", "smollm3-window", "granite", "glm4")
MOST = [
    NAMES[0],
    pytest.param(NAMES[1], marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.fuzz) for name in NAMES[2:]),
]


@pytest.fixture(scope="session")
def quantized(decoder):
    options = smoothing.Smoothing(num_pairs=3)
    text = hf.tokens(2, 24, seed=5)
    return functools.cache(
        lambda name: models.quantize_model(decoder(name), text, smoothing=options)
    )


def logits(decoder, tokens) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    nothing = (None,) * decoder.config.num_layers
    return decoder.logits(decoder.hidden(tokens, positions, causal_attention, nothing)[0])


# Rotation and norms -----------------------------------------------------------------------------


@pytest.mark.parametrize(("rotated", "scaling"), [(None, None), (8, YarnScaling(4.0, 32))])
def test_neighbouring_channels_turn_together(rotated, scaling):
    """As multiplying complex numbers does, in float64."""
    rope = Rope(12, 100.0, rotated, scaling, interleaved=True)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 12))
    positions = rng.integers(0, 60, (2, 5))
    got = rope.rotate(jnp.asarray(x, jnp.float32), rope.angles(jnp.asarray(positions, jnp.int32)))
    size = rope.channels
    numbers = x[..., 0:size:2] + 1j * x[..., 1:size:2]
    angles = positions[:, :, None, None] * rope.frequencies()
    numbers = numbers * np.exp(1j * angles) * rope.amplitude
    want = x.copy()
    want[..., 0:size:2], want[..., 1:size:2] = numbers.real, numbers.imag
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    # Nothing else differs from the other order of channels.
    order = np.r_[0:size:2, 1:size:2, size:12]
    other = dataclasses.replace(rope, interleaved=False)
    same = other.rotate(
        jnp.asarray(x[..., order], jnp.float32), other.angles(jnp.asarray(positions, jnp.int32))
    )
    np.testing.assert_array_equal(np.asarray(got)[..., order], same)


def test_a_centered_norm_is_a_layer_norm():
    rng = np.random.default_rng(1)
    x, scale = 3 + rng.standard_normal((2, 7, 40)), rng.standard_normal(40)
    got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 0.1, centered=True)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * scale
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_interleaved_pairs():
    x = jnp.arange(12.0)
    first, second = split_pairs(x, 8, interleaved=True)
    np.testing.assert_array_equal(first, x[::2])
    np.testing.assert_array_equal(second, x[1::2])
    np.testing.assert_array_equal(of_channels(first, 8, interleaved=True), [*np.repeat(first, 2)])


# Layers -------------------------------------------------------------------------------------------


def test_which_layers_have_positions(decoder):
    config = decoder("smollm3-window").config
    assert config.nope_layers == (0, 2)
    assert [config.rope_of(i) for i in range(3)] == [None, config.rope, None]
    assert config.ropes == (config.rope,)
    none = dataclasses.replace(config, nope_layers=(0, 1, 2))
    assert none.ropes == ()
    config = decoder("cohere2-odd").config
    assert (config.nope_layers, config.local_windows) == ((0,), (None, 5, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_weights_of_a_layer_go_back(decoder, name):
    """Through what smoothing sees, and smoothed by all that can be folded."""
    model = decoder(name)
    config, tokens = model.config, jnp.asarray(hf.tokens(1, 16, seed=1), jnp.int32)
    options = smoothing.Smoothing(pts=False, crs=False)
    seen = calibrate(model, hf.tokens(2, 24, seed=5))
    layers = []
    for params, statistics in zip(model.layers, seen, strict=True):
        weights = layer_weights(params, config)
        again = layer_params(weights, config.norm_offset, joint_qk_norm=config.joint_qk_norm)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        smooth = smoothing.smooth_layer(weights, statistics, options)
        assert tiny.relative(smooth.gate.weight, weights.gate.weight) > 0.01 or not config.pre_norms
        layers.append(layer_params(smooth, joint_qk_norm=config.joint_qk_norm))
    smoothed = dataclasses.replace(model, layers=tuple(layers))
    assert tiny.relative(logits(smoothed, tokens), logits(model, tokens)) < 1e-4


@pytest.mark.slow
def test_inputs_that_no_norm_makes_are_not_folded(decoder):
    model = decoder("olmo2")
    weights = layer_weights(model.layers[0], model.config)
    scale = jnp.ones(64)
    with pytest.raises(ValueError, match="attention_norm=None: inputs of q, k and v can be scaled"):
        smoothing.fold_attention_input(weights, scale)
    with pytest.raises(ValueError, match="mlp_norm=None: inputs of gate and up can be scaled by"):
        smoothing.fold_mlp_input(weights, scale)
    parallel = layer_weights(decoder("cohere2").layers[0], decoder("cohere2").config)
    with pytest.raises(ValueError, match="mlp_norm must be None in a parallel layer"):
        dataclasses.replace(parallel, mlp_norm=parallel.attention_norm).validate()
    seen = calibrate(decoder("cohere2"), hf.tokens(1, 8))[0]
    seen = dataclasses.replace(seen, interleaved=False)
    with pytest.raises(ValueError, match="interleaved=False must be the layer's, True"):
        smoothing.smooth_layer(parallel, seen, smoothing.Smoothing(num_pairs=2))
    other = dataclasses.replace(seen, interleaved=True)
    with pytest.raises(ValueError, match=r"other.interleaved=True must equal self.interleaved"):
        seen.merge(other)


# Caches and the engine ----------------------------------------------------------------------------


# Training -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_gradients_reach_every_weight(folder, decoder, name):
    """Of the model for training, which computes what the other does."""
    model = models.load(folder(name))
    tokens = jnp.asarray(hf.tokens(2, 12, seed=4), jnp.int32)

    @nnx.jit
    def gradient(model):
        def loss(model):
            out = model(tokens)
            log_p = jax.nn.log_softmax(out[:, :-1])
            chosen = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)
            return -chosen.mean(), out

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (loss, out), grads = gradient(model)
    assert tiny.relative(out, logits(decoder(name), tokens)) < 1e-5
    assert np.isfinite(float(loss))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        found = np.asarray(grad)
        assert np.isfinite(found).all(), path
        # A bias of keys changes no score where nothing rotates them: a constant of each query.
        if "k_proj" not in str(path) or "bias" not in str(path):
            assert np.abs(found).max() > 0, path


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", MOST)
def test_adapters(quantized, name):
    """New ones change nothing; their gradients reach all layers."""
    model = quantized(name)
    tokens = jnp.asarray(hf.tokens(1, 12, seed=4), jnp.int32)
    plain = model.with_activations("bf16")
    adapters = models.init_adapters(plain, rank=2)

    @jax.jit
    def value(adapters):
        return logits(models.with_adapters(plain, adapters, gradient="exact"), tokens)

    assert tiny.relative(value(adapters), logits(plain, tokens)) < 1e-5
    grads = jax.jit(jax.grad(lambda x: (value(x) ** 2).mean()))(adapters)
    for layer in grads.layers:
        assert set(layer) == set(models.lora.LINEARS)
        for found in layer.values():
            assert np.isfinite(np.asarray(found.b)).all()
            assert np.abs(np.asarray(found.b)).max() > 0


# Configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nope_layers": (1, 0)}, r"nope_layers=\[1, 0\]|nope_layers=\(1, 0\) must be a tuple"),
        ({"nope_layers": (3,)}, "nope_layers=.* must be a tuple of numbers of 3 layers"),
        ({"joint_qk_norm": True}, "joint_qk_norm=True must be False with qk_norm=False"),
        ({"layer_norm": True, "qk_norm": True}, "layer_norm=True must be False with qk_norm=True"),
        ({"logit_scale": 0.0}, "logit_scale=0.0 must be positive"),
        ({"residual_scale": -1.0}, "residual_scale=-1.0 must be positive"),
    ],
)
def test_fields_that_do_not_fit(decoder, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(decoder("granite").config, **change)


def test_experts_have_ordinary_layers():
    config = models.TransformerConfig.from_hf(hf.config("mixtral"))
    for change in ({"parallel": True}, {"pre_norms": False}, {"residual_scale": 0.5}):
        with pytest.raises(ValueError, match="experts must be None with parallel="):
            dataclasses.replace(config, **change)
