"""Quantized checkpoints in several files, and the models that cannot be quantized."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from turbojax import models, smoothing
from turbojax.models.checkpoint.huggingface import load, load_decoder, weight_files
from turbojax.models.quantize import quantize_from
from turbojax.models.quantized import check_config
from turbojax.quantizers.int4_layout import code_rows, scale_rows
from turbojax.rotary import LinearScaling, YarnScaling

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=64,
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def quantized() -> models.QuantizedDecoder:
    return models.random_quantized_decoder(CONFIG, dtype=jnp.float32)


def same(one, other) -> bool:
    leaves = [jax.tree.leaves(x) for x in (one, other)]
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(*leaves, strict=True)
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_one_file_or_many(quantized, tmp_path, limit):
    models.save_quantized(quantized, tmp_path, max_shard_bytes=limit)
    assert (len(weight_files(tmp_path)) > 5) == (limit == 4000)
    told = []
    for loader in (load, load_decoder):
        loaded = loader(tmp_path, progress=lambda *x: told.append(x))
        assert same(loaded, quantized)
    # Nothing is converted here: bytes in the files are those of the model.
    assert told[-1] == (quantized.nbytes, quantized.nbytes)
    short = load(tmp_path, max_length=32)
    assert short.config == dataclasses.replace(CONFIG, max_length=32)


def test_version_1(quantized, tmp_path):
    """Its INT4 weights lie in rows; they are read into tiles."""
    models.save_quantized(quantized, tmp_path)
    config = models.read_config(tmp_path)
    assert config["quantization_config"]["version"] == 2
    config["quantization_config"]["version"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    old = {}
    for name, array in load_file(file).items():
        if name.endswith(".codes"):
            array = code_rows(array)
        elif name.endswith(".scales"):
            array = np.ascontiguousarray(scale_rows(array).T)
        old[name] = array
    assert old["layers.0.qkv.codes"].shape == (128, 64)
    save_file(old, file)
    assert same(load(tmp_path), quantized)


def test_errors_name_the_file(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path, max_shard_bytes=4000)
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    file = tmp_path / places["layers.1.o.codes"]
    tensors = load_file(file)
    save_file(tensors | {"layers.1.o.codes": tensors["layers.1.o.codes"][:-1]}, file)
    with pytest.raises(ValueError, match=f"{file.name}: layers.1.o.codes has shape"):
        load(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.name} is not a readable safetensors file"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {file.name}, which {INDEX} names"):
        load(tmp_path)
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16"):
            load(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be at least 1"):
        models.save_quantized(quantized, tmp_path, max_shard_bytes=0)


UNSUPPORTED = {
    "local_rope_theta": 77.0,
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "attention_soft_cap": 50.0,
    "final_soft_cap": 30.0,
    "embedding_scale": 7.0,
    "norm_offset": 1.0,
    "post_norms": True,
    "attention_scale": 0.1,
    "rotary_dim": 8,
    "local_windows": (None, 7),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("field", ["activation", "local_windows"])
def test_what_a_quantized_model_does_not_compute_is_refused(field):
    config = dataclasses.replace(CONFIG, **{field: UNSUPPORTED[field]})
    model = models.random_decoder(config, dtype=jnp.float32)
    plain = smoothing.Smoothing(rpn=False, crs=False)
    for call in (
        lambda: models.quantize_model(model, smoothing=plain),
        lambda: quantize_from(model, (None, None), plain),
    ):
        with pytest.raises(NotImplementedError, match=f"do not support {field}=") as caught:
            call()
        assert repr(UNSUPPORTED[field]) in str(caught.value)


def test_all_fields_are_named():
    config = dataclasses.replace(CONFIG, **UNSUPPORTED)
    with pytest.raises(NotImplementedError) as caught:
        check_config(config)
    assert all(f"{field}={value!r}" in str(caught.value) for field, value in UNSUPPORTED.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "attention_scale": 0.25,
            "rotary_dim": 16,
            "local_windows": (64,),
            "rope_scaling": LinearScaling(2.0),
            "family": "mistral",
        },
        {"rope_scaling": YarnScaling(4.0, 16), "tie_embeddings": True},
    ],
)
def test_what_a_quantized_model_computes_is_the_model(changes):
    """No other error than rounding: as large as that of the same model without the changes."""
    assert rounding_error(**changes) < 2 * rounding_error() < 1


@functools.cache
def rounding_error(**changes) -> float:
    """Relative, of the logits."""
    config = dataclasses.replace(CONFIG, num_layers=1, **changes)
    model = models.random_decoder(config, dtype=jnp.float32)
    decoder = models.quantize_model(model, smoothing=smoothing.Smoothing(rpn=False, crs=False))
    tokens = jnp.asarray(np.random.default_rng(1).integers(64, size=(2, 24)))
    exact, rounded = (
        np.asarray(models.start(x, tokens, max_length=64, cache="exact").logits, np.float64)
        for x in (model, decoder)
    )
    return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def test_a_window_that_a_longer_model_has(quantized, tmp_path):
    """As long as the longest text, a window hides nothing; in a longer model it would."""
    windows = dataclasses.replace(CONFIG, family="mistral", local_windows=(64, 64))
    models.save_quantized(dataclasses.replace(quantized, config=windows), tmp_path)
    assert load(tmp_path).config.local_windows == (64, 64)
    assert load(tmp_path, max_length=48).config.max_length == 48
    with pytest.raises(NotImplementedError, match=r"do not support local_windows=\(64, 64\)"):
        load(tmp_path, max_length=65)


def test_a_config_that_was_edited_is_refused(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(NotImplementedError, match="do not support mlp_bias=True"):
        load(tmp_path)


def test_numbers_too_large_are_refused(quantized, tmp_path):
    table = quantized.embedding.at[3, 4].set(70000.0)
    large = dataclasses.replace(quantized, embedding=table)
    models.save_quantized(large, tmp_path)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    for call in (
        lambda: models.save_quantized(large, tmp_path, dtype="float16"),
        lambda: load(tmp_path, dtype="float16"),
    ):
        with pytest.raises(ValueError, match="dtype=float16 cannot hold embedding"):
            call()
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"bos_token_id": np.int64(3)}, TypeError),
        ({"vocab_size": 5}, ValueError),
        ({"quantization_config": None}, ValueError),
    ],
)
def test_further_keys_that_cannot_be_written(quantized, tmp_path, extra, error):
    models.save_quantized(quantized, tmp_path, extra_config={"bos_token_id": 3})
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    with pytest.raises(error, match=f"extra_config: {next(iter(extra))}="):
        models.save_quantized(quantized, tmp_path, extra_config=extra)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before


def test_a_checkpoint_that_is_replaced_is_refused(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    with pytest.raises(ValueError, match="changed while it was read"):
        load(tmp_path, progress=lambda *_: models.save_quantized(quantized, tmp_path))
