"""Quantized checkpoints in several files, and the models that cannot be quantized."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models import tiny
from turbojax import fireq, models, smoothing
from turbojax.matmul.int4.layout import code_rows, scale_rows
from turbojax.models.checkpoint.huggingface import load, load_decoder, weight_files
from turbojax.models.lora import init_adapters, with_adapters, without_adapters
from turbojax.rotary import LinearScaling, YarnScaling

CONFIG = tiny.config(hidden_size=48, intermediate_size=64, num_layers=2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def quantized() -> models.QuantizedDecoder:
    return models.random_quantized_decoder(CONFIG, dtype=jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_one_file_or_many(quantized, tmp_path, limit):
    models.save_quantized(quantized, tmp_path, max_shard_bytes=limit)
    assert (len(weight_files(tmp_path)) > 5) == (limit == 4000)
    told = []
    for loader in (load, load_decoder):
        loaded = loader(tmp_path, progress=lambda *x: told.append(x))
        assert tiny.same(loaded, quantized)
    # Nothing is converted here: bytes in the files are those of the model.
    assert told[-1] == (quantized.nbytes, quantized.nbytes)
    short = load(tmp_path, max_length=32)
    assert short.config == dataclasses.replace(CONFIG, max_length=32)


@pytest.mark.slow
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
    assert tiny.same(load(tmp_path), quantized)


@pytest.mark.slow
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


@pytest.mark.fuzz
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
    """As long as the longest text, a window hides nothing; in a longer model it does."""
    windows = dataclasses.replace(CONFIG, family="mistral", local_windows=(64, 64))
    models.save_quantized(dataclasses.replace(quantized, config=windows), tmp_path)
    for length, window in ((48, None), (64, None), (65, 64)):
        config = load(tmp_path, max_length=length).config
        assert config.local_windows == (64, 64)
        assert config.attention_options(0).local_window_size == window


def test_a_config_that_was_edited_is_refused(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(ValueError, match=r"lacks layers.0.down.bias, layers.0.gate_up.bias"):
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


@pytest.mark.slow
def test_tables_that_would_not_be_read(quantized, tmp_path):
    """INT4 tables have the layers' kind of scales, in groups of 128, and no zeros."""
    codes = jnp.ones((64, 48), jnp.int8)

    def table(groups, dtype, size=None, zeros=None):
        return fireq.from_codes(codes, jnp.ones((64, groups), dtype), zeros, group_size=size)

    layers = models.random_quantized_decoder(CONFIG, scale_dtype="bf16", dtype=jnp.float32)
    models.save_quantized(dataclasses.replace(layers, lm_head=table(1, jnp.bfloat16)), tmp_path)
    assert load(tmp_path).lm_head.group_size == 128
    for wrong, found in (
        (table(2, jnp.bfloat16, 32), "in groups of 32 with scales in bf16, without zeros"),
        (table(1, jnp.float16), "in groups of 128 with scales in f16, without zeros"),
        (
            table(1, jnp.bfloat16, None, jnp.ones((64, 1), jnp.int8)),
            "in groups of 128 with scales in bf16, with zeros",
        ),
    ):
        for name in ("embedding", "lm_head"):
            words = (
                rf"{name} is \(64, 48\) {found}, must be \(64, 48\) in groups of 128 with .*bf16"
            )
            with pytest.raises(ValueError, match=words):
                models.save_quantized(dataclasses.replace(layers, **{name: wrong}), tmp_path)
    short = dataclasses.replace(layers, embedding=layers.embedding[:-1])
    with pytest.raises(ValueError, match=r"embedding.shape=\(63, 48\) must be \(64, 48\)"):
        models.save_quantized(short, tmp_path)
    e4m3 = dataclasses.replace(quantized, embedding=table(1, jnp.bfloat16))
    with pytest.raises(ValueError, match="scales in bf16, .* with scales in e4m3"):
        models.save_quantized(e4m3, tmp_path)


def test_adapters_are_not_part_of_it(quantized, tmp_path):
    adapted = with_adapters(quantized, init_adapters(quantized, rank=2))
    with pytest.raises(ValueError, match=r"layers\[0\] has adapters, must have none: see save_ad"):
        models.save_quantized(adapted, tmp_path)
    models.save_quantized(without_adapters(adapted), tmp_path)
    assert tiny.same(load(tmp_path), quantized)


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


@pytest.mark.slow
def test_a_checkpoint_that_is_replaced_is_refused(quantized, tmp_path):
    models.save_quantized(quantized, tmp_path)
    with pytest.raises(ValueError, match="changed while it was read"):
        load(tmp_path, progress=lambda *_: models.save_quantized(quantized, tmp_path))
