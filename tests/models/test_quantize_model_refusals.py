"""What `quantize_model`, its models and their checkpoints refuse, and in which words."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from turbojax import models, smoothing
from turbojax.models.quantize import layer_weights, quantize_layer


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    config = models.TransformerConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=84,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=24,
        max_length=256,
    )
    return models.Transformer(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def calibration() -> np.ndarray:
    return np.random.default_rng(9).integers(64, size=(3, 40))


@pytest.fixture(scope="module")
def quantized(model, calibration) -> models.QuantizedDecoder:
    return models.quantize_model(model, calibration)


@pytest.mark.slow
def test_bad_calls_say_what_is_wrong(model, quantized, calibration, tmp_path):
    with pytest.raises(ValueError, match="tokens=None: RPN and CRS need text"):
        models.quantize_model(model)
    with pytest.raises(ValueError, match=r"tokens in 0..64 must be within 0..63"):
        models.quantize_model(model, np.array([[0, 64]]))
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.quantize_model(model, np.ones((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"tokens.shape=\(4,\) must be \[n, T\]"):
        models.quantize_model(model, np.ones(4, np.int32))
    with pytest.raises(ValueError, match=r"tokens.shape=\(1, 1\) must be \[n, T \+ 1\]"):
        models.token_bits(quantized, np.ones((1, 1), np.int32))
    with pytest.raises(ValueError, match="cache='4bit' must be one of exact, kv4"):
        models.token_bits(quantized, np.ones((1, 4), np.int32), cache="4bit")
    with pytest.raises(ValueError, match=r"tokens in 0..64 must be within 0..63"):
        models.token_bits(quantized, np.array([[0, 64]]))
    with pytest.raises(TypeError, match="tokens.dtype=float32 must be an integer"):
        models.token_bits(quantized, np.ones((1, 4), np.float32))
    for call in (
        lambda: models.quantize_model(model, calibration, batch_size=0),
        lambda: models.token_bits(quantized, calibration, batch_size=0),
    ):
        with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
            call()
    weights = layer_weights(models.unstack(model).layers[0], model.config)
    biased = dataclasses.replace(weights.q, bias=jnp.ones(len(weights.q.weight)))
    with pytest.raises(ValueError, match="all of q, k, v must have a bias, or none of them"):
        quantize_layer(dataclasses.replace(weights, q=biased))


@pytest.mark.slow
def test_models_of_another_kind_are_refused(model, quantized, calibration, tmp_path):
    for call, message in [
        (
            lambda: models.quantize_model(quantized, calibration),
            "QuantizedDecoder, must be a Transformer",
        ),
        (
            lambda: models.save(quantized, tmp_path),
            "QuantizedDecoder, must be a Transformer; save_quant",
        ),
        (lambda: models.save_quantized(model, tmp_path), "Transformer, must be a QuantizedDecoder"),
        (lambda: models.token_bits(model, calibration), "Transformer, must be a Decoder"),
    ]:
        with pytest.raises(TypeError, match=f"model is a {message}"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_only_uniform_layers_are_saved(quantized, tmp_path):
    first, second = quantized.layers
    bare = dataclasses.replace(second, key_channel_scale=None)
    swapped = dataclasses.replace(second, o=second.mlp.down)
    for layers, message in [
        ((first, bare), r"layers\[1\] must have"),
        ((first, swapped), r"layers\[1\] must have"),
        ((first,), "1 layers must be config.num_layers=2"),
    ]:
        with pytest.raises(ValueError, match=message):
            models.save_quantized(dataclasses.replace(quantized, layers=layers), tmp_path)
    with pytest.raises(ValueError, match="dtype=int8 must be one of float32"):
        models.save_quantized(quantized, tmp_path, dtype=jnp.int8)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_small_heads_are_refused_before_calibration(model, calibration):
    config = dataclasses.replace(model.config, head_dim=12, num_layers=1)
    small, told = models.random_decoder(config, dtype=jnp.float32), []
    with pytest.raises(ValueError, match=r"num_pairs=8 must be at most the 6 pairs .*--no-crs"):
        models.quantize_model(small, calibration, progress=lambda *event: told.append(event))
    assert told == []
    with pytest.raises(
        ValueError, match="cache='kv4' cannot hold .*: head_dim=12 must be a multiple of 8"
    ):
        models.token_bits(small, calibration, cache="kv4")
    decoder = models.quantize_model(small, calibration, smoothing=smoothing.Smoothing(num_pairs=6))
    assert models.token_bits(decoder, calibration).shape == (3, 39)


def test_bad_checkpoints_say_what_is_wrong(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    config = models.read_config(tmp_path)
    block = config["quantization_config"]

    def rewrite(**changes):
        content = config | {"quantization_config": block | changes}
        (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(ValueError, match="is a quantized model: the weights must be floating"):
        models.load_transformer(tmp_path)
    for changes, error, message in [
        ({"quant_method": "other"}, NotImplementedError, "quant_method='other' is not supported"),
        ({"version": 3}, NotImplementedError, "version=3 must be 2 or 1"),
        ({"scale_dtype": "int8"}, ValueError, "scale_dtype='int8' must be"),
        ({"group_size": 16}, ValueError, "group_size=16 must be 128 or 64 or 32"),
        ({"zeros": 1}, ValueError, "zeros=1 must be True or False"),
        ({"activations": "int8"}, ValueError, "activations='int8' must be e4m3 or bf16"),
        ({"input_order": ["norm"]}, ValueError, "input_order=.* must be a list of qkv, o,"),
        ({"embedding": "int8"}, ValueError, "embedding='int8' must be"),
        ({"lm_head": "int8"}, ValueError, "lm_head='int8' must be"),
        ({"key_channel_scale": False}, ValueError, "unexpected tensors: layers.0.key_channel_scal"),
        ({"scale_dtype": "bf16"}, ValueError, "scales has dtype uint8, must be bfloat16"),
    ]:
        rewrite(**changes)
        with pytest.raises(error, match=message):
            models.load(tmp_path)
    for changes, message in [
        ({"quantization_config": "turbojax-fireq"}, "quantization_config='turbojax-fireq' must be"),
        ({"torch_dtype": "auto"}, "torch_dtype='auto' must be one of float32, bfloat16, float16"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path)
    rewrite()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm": tensors["norm"][:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm has shape \(47,\), must be \(48,\)"):
        models.load(tmp_path)
    del tensors["layers.1.o.codes"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks layers.1.o.codes"):
        models.load(tmp_path)
