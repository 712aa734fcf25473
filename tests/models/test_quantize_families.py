"""Quantized models of every family: the tiny checkpoints that are compared with `transformers`.

A quantized layer takes any object with a `QuantizedLinear`'s calls in its place. Here it gets exact
ones, so that what it computes, and what smoothing left of it, can be held to the float decoder.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import hf_helpers as hf
from tests.models import tiny
from turbojax import models, smoothing
from turbojax.flax.norms import rms_norm
from turbojax.matmul.int4.weight import dequantize
from turbojax.models.decoder import for_length
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_weights
from turbojax.models.quantized_layer import QuantizedLayer, QuantizedMlp
from turbojax.quantizers import quantize_tokens

# Those whose layers have most of what Llama's have not, and the others.
FIRST = ("qwen3-window", "phi3-longrope", "gemma2", "gemma3", "olmo2", "cohere2")
# Experts are in `test_moe_models.py`.
OTHERS = tuple(name for name in hf.VARIANTS if name not in (*FIRST, *hf.WITH_EXPERTS))
NAMES = [*FIRST, *(pytest.param(name, marks=pytest.mark.fuzz) for name in OTHERS)]
# Few pairs: both RPN and CRS have some.
SMOOTHING = smoothing.Smoothing(num_pairs=3)
LENGTH = 40


@pytest.fixture(scope="session")
def quantized(decoder):
    return functools.cache(
        lambda name: models.quantize_model(decoder(name), calibration(), smoothing=SMOOTHING)
    )


def calibration() -> np.ndarray:
    return hf.tokens(2, 24, seed=5)


def logits(decoder, text=None) -> np.ndarray:
    return tiny.logits(decoder, hf.tokens(2, LENGTH, seed=3) if text is None else text)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactLinear:
    """In the place of a `QuantizedLinear`: float32, of tokens that are rounded or not."""

    weight: jax.Array
    bias: jax.Array | None
    rounds: bool = dataclasses.field(metadata={"static": True})

    def __call__(self, x, *, activation=None, residual=None):
        if self.rounds:
            tokens = quantize_tokens(x)
            x = tokens.codes.astype(jnp.float32) * tokens.scale.astype(jnp.float32)[..., None]
        y = jnp.einsum("...i,oi->...o", x, self.weight, precision="highest")
        if self.bias is not None:
            y = y + self.bias.reshape((1,) * (y.ndim - 1) + (-1,))
        if activation is not None:
            gate, up = jnp.split(y, 2, axis=-1)
            act = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[activation]
            y = act(gate) * up
        return y if residual is None else y + residual

    def after_norm(self, hidden, norm, eps, activation=None):
        return self(rms_norm(hidden, norm, eps), activation=activation)


def exact_layer(weights: smoothing.LayerWeights) -> QuantizedLayer:
    """A layer as it is before it is rounded."""

    def linear(*names):
        parts = [getattr(weights, name) for name in names]
        scales = [1.0 if x.output_scale is None else x.output_scale for x in parts]
        weight = jnp.concatenate([x.weight * s for x, s in zip(parts, scales, strict=True)])
        biases = [x.bias for x in parts if x.bias is not None]
        return ExactLinear(weight, jnp.concatenate(biases) if biases else None, False)

    norms = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
    posts = ("attention_post_norm", "mlp_post_norm", "key_channel_scale")
    return QuantizedLayer(
        qkv=linear("q", "k", "v"),
        o=linear("o"),
        mlp=QuantizedMlp(linear("gate", "up"), linear("down")),
        **{name: getattr(weights, name) for name in (*norms, *posts)},
    )


def smoothed(decoder, options: smoothing.Smoothing) -> models.QuantizedDecoder:
    """What `quantize_model` rounds, without the rounding."""
    seen = calibrate(decoder, calibration())
    layers = [
        exact_layer(smoothing.smooth_layer(layer_weights(params, decoder.config), x, options))
        for params, x in zip(decoder.layers, seen, strict=True)
    ]
    norm = decoder.norm + decoder.config.norm_offset
    return models.QuantizedDecoder(
        decoder.embedding, tuple(layers), norm, decoder.lm_head, decoder.config, decoder.dtype
    )


def dequantized(decoder: models.QuantizedDecoder, *, rounds: bool) -> models.QuantizedDecoder:
    """The same with float32 weights of the values that codes stand for."""

    def linear(x):
        return ExactLinear(dequantize(x.weight), x.bias, rounds)

    def layer(x):
        mlp = QuantizedMlp(linear(x.mlp.gate_up), linear(x.mlp.down))
        return dataclasses.replace(x, qkv=linear(x.qkv), o=linear(x.o), mlp=mlp)

    return dataclasses.replace(decoder, layers=tuple(map(layer, decoder.layers)))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", NAMES)
def test_smoothing_and_the_layers_are_exact(decoder, name):
    """All of CAS, PTS, RPN and CRS, and none: the float decoder's logits, but for float32."""
    exact = logits(decoder(name))
    nothing = smoothing.Smoothing(cas=False, pts=False, rpn=False, crs=False)
    plain, smooth = (smoothed(decoder(name), options) for options in (nothing, SMOOTHING))
    for x in (plain, smooth):
        assert tiny.relative(logits(x), exact) < 1e-4
    first, second = plain.layers[-1], smooth.layers[-1]
    scale = np.asarray(second.key_channel_scale)
    # Both of a pair, and six channels of each head.
    assert ((scale != 1).sum(1) == 6).all()
    changed = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), first.qkv, second.qkv)
    assert changed.weight > 0.01
    if first.k_norm is not None:
        # RPN is in the norms, and differs between heads.
        assert (np.ptp(np.asarray(second.k_norm), axis=0) > 0).any()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_quantized_decoder_computes_what_its_weights_say(quantized, name):
    """A float model of the dequantized weights whose linear layers round their tokens."""
    decoder = quantized(name)
    got, want = logits(decoder), logits(dequantized(decoder, rounds=True))
    unrounded = logits(dequantized(decoder, rounds=False))
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    # Now and then a sum in another order rounds an activation to its neighbour. A token before
    # which none did is exact to float32.
    assert np.quantile(error, 0.1) < 1e-4
    assert tiny.relative(got, want) < 0.5 * tiny.relative(unrounded, want)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_read_back_bit_for_bit(quantized, name, tmp_path):
    decoder = quantized(name)
    models.save_quantized(decoder, tmp_path)
    loaded = models.load(tmp_path)
    assert tiny.same(loaded, decoder)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [*FIRST[1:], pytest.param(FIRST[0], marks=pytest.mark.slow)])
def test_texts_continue_through_caches_as_in_one_pass(quantized, name):
    """Each layer's window, rotary embedding and caps reach its cache, at every step."""
    decoder = quantized(name)
    prompts = hf.tokens(2, 20, seed=8)
    texts = models.generate(decoder, prompts, max_new_tokens=6, cache="exact")
    whole = jnp.asarray(np.concatenate([prompts, np.asarray(texts)], axis=1), jnp.int32)
    # As long as the generated ones may get: LongRoPE takes its short factors.
    decoder = for_length(decoder, whole.shape[1])
    found = np.asarray(jnp.argmax(jnp.asarray(logits(decoder, whole)), axis=-1))
    np.testing.assert_array_equal(texts, found[:, 19:-1])
