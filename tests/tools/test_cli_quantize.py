"""The `turbojax quantize` command, and `turbojax generate` with what it writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import hf_helpers as hf
from tests.models import image_helpers
from tests.tools.command_line import refuses, run, works
from turbojax import models
from turbojax.app import text_model
from turbojax.app.quantize import run as quantizing
from turbojax.models.text.tokenizer import ByteTokenizer

QUICK = ("--calibration-tokens", "128", "--evaluation-tokens", "128", "--window", "64")


def _quantize(folder: str, out, *arguments: str):
    return run("quantize", "--model", folder, "--out", str(out), *QUICK, *arguments)


@pytest.fixture(scope="module")
def quantized(tiny_folder, tmp_path_factory) -> tuple[str, dict]:
    out = tmp_path_factory.mktemp("quantized")
    result = works(_quantize(tiny_folder, out, "--json"))
    return str(out), json.loads(result.stdout)


@pytest.mark.fuzz
def test_json_says_what_was_done_and_what_it_costs(tiny_folder, quantized):
    out, report = quantized
    decoder = models.load(out)
    assert isinstance(decoder, models.QuantizedDecoder)
    assert report["bits_per_weight"] == decoder.bits_per_weight
    assert report["calibration_tokens"] == report["evaluated_tokens"] == 128
    assert report["unit"] == "byte"
    assert report["settings"]["smoothing"]["crs"] is True
    assert report["settings"]["smoothing"]["cas_inputs"] == "all"
    assert report["device"]
    sizes = [report["bytes_before"], report["bytes_after"]]
    files = [models.checkpoint_folder(f) / models.WEIGHTS_NAME for f in (tiny_folder, out)]
    assert sizes == [file.stat().st_size for file in files]
    # Random weights know nothing: about 8 bits of a byte, whatever the weights.
    bits = [x for row in report["bits"].values() for x in row.values()]
    assert len(set(bits)) == 6
    assert all(6 < x < 10 for x in bits)


@pytest.mark.slow
def test_bits_are_those_of_the_models(tiny_folder, quantized):
    out, report = quantized
    stream = [
        t
        for content in quantizing.evaluation_text()
        for t in ByteTokenizer().encode(text_model.read_text(content))
    ]
    windows = quantizing.windows(stream, 65, 2)
    for name, folder in (("before", tiny_folder), ("after", out)):
        decoder = text_model.find_text_model(folder, jnp.dtype(jnp.float32)).load().decoder
        for cache in ("exact", "kv4", "k8v4"):
            bits = models.token_bits(decoder, windows, cache=cache, batch_size=1).mean()
            assert report["bits"][name][cache] == pytest.approx(float(bits), rel=1e-5)


@pytest.mark.slow
def test_the_table_and_the_bars(tiny_folder, tmp_path):
    result = _quantize(tiny_folder, tmp_path, "--scale-dtype", "bf16", "--no-crs", "--no-rpn")
    works(result)
    for words in (
        "before",
        "after",
        "megabytes",
        "bits/byte, kv4",
        "bits/byte, k8v4",
        f"wrote {tmp_path}",
    ):
        assert words in result.stdout
    # Neither RPN nor CRS: nothing to calibrate.
    assert "calibration" not in result.stderr
    for words in ("layers", "2/2", "evaluation", "768/768"):
        assert words in result.stderr
    decoder = models.load(tmp_path)
    assert decoder.layers[0].qkv.weight.scale_dtype == "bf16"
    assert decoder.layers[0].key_channel_scale is None


@pytest.mark.slow
def test_what_is_asked_for_is_quantized(tiny_folder, tmp_path):
    options = ("--quantize-embedding", "--quantize-head", "--evaluation-tokens", "0")
    result = works(_quantize(tiny_folder, tmp_path, *options, "--cas-inputs", "constant", "--json"))
    report = json.loads(result.stdout)
    assert report["bits"] == {}
    assert report["settings"]["smoothing"]["cas_inputs"] == "constant"
    assert "calibration" in result.stderr
    decoder = models.load(tmp_path)
    assert models.read_config(tmp_path)["quantization_config"]["embedding"] == "int4"
    assert decoder.bits_per_weight == report["bits_per_weight"]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("cache", ["exact", "kv4"])
def test_the_quantized_model_generates(quantized, cache):
    out, _ = quantized
    result = run(
        "generate", "abc", "--model", out, "--cache", cache, "--max-new-tokens", "5", "--json"
    )
    works(result)
    report = json.loads(result.stdout)
    decoder = models.load(out, dtype=jnp.float32)
    expected = models.generate(decoder, jnp.array([[0, *b"abc"]]), max_new_tokens=5, cache=cache)
    assert report["text"] == bytes(expected[0].tolist()).decode("utf-8", "replace")
    assert report["cache"] == cache


@pytest.mark.slow
def test_tokens_that_are_numbers(tmp_path):
    config = models.TransformerConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=128,
    )
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), tmp_path / "model")
    numbers = tmp_path / "numbers"
    numbers.write_text(" ".join(str(i * 7 % 60) for i in range(200)))
    missing = _quantize(str(tmp_path / "model"), tmp_path / "out")
    refuses(missing, "give token numbers in a calibration file")
    files = ("--calibration-file", str(numbers), "--evaluation-file", str(numbers))
    result = works(_quantize(str(tmp_path / "model"), tmp_path / "out", *files))
    assert "bits/token, exact" in result.stdout
    numbers.write_text("1 2 x")
    result = _quantize(str(tmp_path / "model"), tmp_path / "out", *files)
    refuses(result, f"calibration text '{numbers}': there is no tokenizer.json")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["gemma3", "qwen2", "phi3"])
def test_other_families(name, tmp_path):
    """Read and measured layer by layer; what is written generates."""
    hf.write(name, tmp_path / "model")
    numbers, out = tmp_path / "numbers", tmp_path / "out"
    numbers.write_text(" ".join(map(str, hf.tokens(1, 200)[0])))
    files = ("--calibration-file", str(numbers), "--evaluation-file", str(numbers))
    result = works(_quantize(str(tmp_path / "model"), out, *files, "--json"))
    bits = json.loads(result.stdout)["bits"]
    assert bits["before"].keys() == bits["after"].keys() >= {"exact", "kv4"}
    assert all(3 < x < 14 for row in bits.values() for x in row.values())
    works(run("generate", "3 5 7", "--model", str(out), "--max-new-tokens", "3", "--cache", "kv4"))


@pytest.mark.slow
def test_a_vision_tower_is_kept(tiny_folder, tmp_path):
    """Bit for bit, beside the INT4 text model."""
    source, out, numbers = tmp_path / "model", tmp_path / "out", tmp_path / "numbers"
    image_helpers.write(source)
    numbers.write_text(" ".join(str(i * i % 60) for i in range(200)))
    files = ("--calibration-file", str(numbers), "--evaluation-tokens", "0")
    result = works(_quantize(str(source), out, *files))
    found, want = models.load_vision(out), models.load_vision(source)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert isinstance(models.load(out), models.QuantizedDecoder)
    result = _quantize(tiny_folder, out, "--evaluation-tokens", "0")
    refuses(result, "holds 'vision' of another model")


@pytest.mark.slow
def test_companions_of_a_model_are_copied(tiny_folder, tmp_path):
    source, out = tmp_path / "model", tmp_path / "out"
    models.save(models.load(tiny_folder), source, extra_config={"eos_token_id": 7})
    (source / "tokenizer_config.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    works(_quantize(str(source), out, "--evaluation-tokens", "0"))
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert models.read_config(out)["eos_token_id"] == 7
    assert models.read_config(out)["torch_dtype"] == "bfloat16"
    # Those of an older model do not stay.
    (out / "notes").write_text("mine")
    works(_quantize(tiny_folder, out, "--evaluation-tokens", "0"))
    assert not (out / "tokenizer_config.json").exists()
    assert not list((out / "additional_chat_templates").glob("*"))
    assert (out / "notes").read_text() == "mine"


def test_windows_are_spread_over_a_stream():
    stream = list(range(103))
    cut = quantizing.windows(stream, 10, 4)
    np.testing.assert_array_equal(cut[:, 0], [0, 30, 60, 90])
    np.testing.assert_array_equal(cut[0], range(10))
    assert quantizing.windows(stream, 10, 99).shape == (10, 10)


def test_calibration_never_sees_held_out_text():
    held_out = {content[:4096] for content in quantizing.evaluation_text()}
    calibration = quantizing.calibration_text(200_000)
    assert sum(map(len, calibration)) >= 200_000
    assert held_out
    assert not held_out & {content[:4096] for content in calibration}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "'/no/such/folder' must be 'embedded' or a folder"),
        (["--scale-dtype", "int8"], "scale dtype 'int8' must be e4m3 or bf16"),
        (["--cas-inputs", "some"], "cas_inputs='some' must be"),
        (["--calibration-tokens", "0"], "calibration_tokens=0 must be at least 1"),
        (["--evaluation-tokens", "-1"], "evaluation_tokens=-1 must not be negative"),
        (["--window", "0"], "window=0 must be at least 1"),
        (["--calibration-file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (
            ["--calibration-file", "/dev/null", "--no-rpn", "--no-crs"],
            "calibration files are for RPN and CRS, and both are left out",
        ),
        (
            ["--evaluation-file", "/dev/null", "--evaluation-tokens", "0"],
            "evaluation files are given, so evaluation_tokens must not be 0",
        ),
        (
            ["--calibration-file", "/dev/null"],
            "the calibration text (/dev/null) has 1 tokens, must have at least 64",
        ),
        (
            ["--evaluation-file", "/dev/null"],
            "the evaluation text (/dev/null) has 1 tokens, must have at least 65",
        ),
    ],
)
def test_errors_are_one_clear_line(tiny_folder, tmp_path, arguments, message):
    refuses(_quantize(tiny_folder, tmp_path, *arguments), message)


@pytest.mark.slow
def test_a_quantized_model_is_refused_where_floats_are_needed(quantized, tmp_path):
    out, _ = quantized
    refuses(_quantize(out, tmp_path), "is quantized already")
    for command in (("levels", "--model", out), ("demo", "--model", out)):
        refuses(run(*command), "is a quantized model: the weights must be floating point")


def test_a_model_is_not_overwritten(tiny_folder, tmp_path):
    other, file = tmp_path / "other", tmp_path / "file"
    models.save(models.load(tiny_folder), other)
    file.write_text("")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / models.WEIGHTS_NAME).write_text("")
    for out, message in [
        (tiny_folder, "is the model's own folder"),
        (other, "holds another model: must be a new folder"),
        (tmp_path / "weights", "holds another model: must be a new folder"),
        (file, f"must be a folder, '{file}' is a file"),
        (file / "below", f"must be a folder, '{file}' is a file"),
    ]:
        result = refuses(_quantize(tiny_folder, out), message)
        assert "calibration" not in result.stderr
    for folder in (tiny_folder, other):
        assert isinstance(models.load(folder), models.Transformer)


@pytest.mark.slow
def test_a_quantized_folder_is_overwritten(tiny_folder, tmp_path):
    for options in ((), ("--no-crs",)):
        works(_quantize(tiny_folder, tmp_path, "--evaluation-tokens", "0", *options))
    assert models.load(tmp_path).layers[0].key_channel_scale is None


def test_no_text_is_found(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(quantizing.sysconfig, "get_path", lambda name: str(tmp_path))
    for options, kind in (((), "calibration"), (("--no-rpn", "--no-crs"), "evaluation")):
        result = _quantize(tiny_folder, tmp_path / "out", *options)
        refuses(result, f"no {kind} text found in the standard library")


def test_a_checkpoint_that_names_no_dtype_is_refused_at_once(tiny_folder, tmp_path):
    models.save(models.load(tiny_folder), tmp_path / "model", extra_config={"torch_dtype": "auto"})
    result = _quantize(str(tmp_path / "model"), tmp_path / "out")
    refuses(result, "torch_dtype='auto' must be one of float32, bfloat16, float16")
    assert "calibration" not in result.stderr


@pytest.mark.slow
def test_a_sharded_checkpoint(tiny_folder, tmp_path):
    """Gives the model that one file gives, and its size on disk is that of all shards."""
    model, kept = models.load(tiny_folder), tmp_path / "model"
    models.save(model, kept, max_shard_bytes=20_000)
    shards = models.weight_files(kept)
    assert len(shards) > 1
    reports = []
    for folder, out in ((tiny_folder, "whole"), (kept, "parts")):
        result = works(_quantize(str(folder), tmp_path / out, "--json"))
        reports.append(json.loads(result.stdout))
    assert reports[1]["bytes_before"] == sum(file.stat().st_size for file in shards)
    whole, parts = (tmp_path / out / models.WEIGHTS_NAME for out in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


def test_an_index_that_names_no_tensor(tiny_folder, tmp_path):
    models.save(models.load(tiny_folder), tmp_path / "model")
    weights = tmp_path / "model" / models.WEIGHTS_NAME
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    weights.with_name("model.safetensors.index.json").write_text("{}")
    result = _quantize(str(tmp_path / "model"), tmp_path / "out")
    refuses(result, "model.safetensors.index.json must hold a weight_map")


@pytest.mark.slow
def test_bits_that_are_no_numbers_are_null(tiny_folder, tmp_path, monkeypatch):
    nan = np.full((2, 64), np.nan, np.float32)
    monkeypatch.setattr(models, "token_bits", lambda *_, **__: nan)
    result = works(_quantize(tiny_folder, tmp_path, "--json"))
    assert json.loads(result.stdout)["bits"]["after"] == {"exact": None, "kv4": None, "k8v4": None}


@pytest.mark.fuzz
def test_caches_that_cannot_hold_the_heads_are_left_out(tmp_path):
    config = models.TransformerConfig(
        vocab_size=256,
        hidden_size=24,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=12,
        max_length=128,
    )
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), tmp_path / "model")
    result = works(_quantize(str(tmp_path / "model"), tmp_path / "out", "--no-crs", "--json"))
    bits = json.loads(result.stdout)["bits"]
    assert [list(row) for row in bits.values()] == [["exact"], ["exact"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--weights", "int4"], "--weights is for --random-weights"),
        (["--random-weights", "tiny", "--weights", "int3"], "'int3' must be one of float, int4"),
    ],
)
def test_generate_says_what_weights_are_for(arguments, message):
    refuses(run("generate", *arguments), message)
