"""The `turbojax generate` command: what it prints, and what it says when it cannot."""

import json
import sys
import types

import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

from turbojax import models, text
from turbojax.cli import app

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 128,
}


def _save(folder, vocab_size: int) -> str:
    config = models.LlamaConfig(vocab_size=vocab_size, **CONFIG)
    models.save(models.Llama(config, rngs=nnx.Rngs(0)), folder)
    return str(folder)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> str:
    return _save(tmp_path_factory.mktemp("bytes"), 256)


@pytest.fixture(scope="module")
def number_model(tmp_path_factory) -> str:
    return _save(tmp_path_factory.mktemp("numbers"), 60)


def _run(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments], env={"COLUMNS": "120"})


def _json(*arguments: str) -> dict:
    result = _run(*arguments, "--json", "--cache", "exact")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_text_and_a_last_line(byte_model):
    result = _run("abc", "--model", byte_model, "--cache", "exact", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.stderr
    prompt = jnp.array([[0, *b"abc"]])
    model = models.load(byte_model, dtype=jnp.float32)
    expected = bytes(models.generate(model, prompt, max_new_tokens=6)[0].tolist())
    body, summary, end = result.stdout.rsplit("\n", 2)
    assert body == expected.decode("utf-8", "replace")
    assert "tokens/s, batch 1; exact cache" in summary
    assert end == ""


def test_json_of_a_batch(byte_model, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"abc")
    alone = _json("abc", "--model", byte_model, "--max-new-tokens", "4")
    options = ["--batch-size", "3", "--prefill-batch-size", "2", "--dtype", "float32"]
    report = _json("--file", str(file), "--model", byte_model, "--max-new-tokens", "4", *options)
    assert report["text"] == alone["text"]
    assert (report["batch_size"], report["prompt_tokens"], report["new_tokens"]) == (3, 4, 4)
    assert report["cache_bytes"] == 3 * alone["cache_bytes"]
    assert report["tokens_per_second"] > 0
    assert report["device"]


def test_one_token_is_too_few_to_time(byte_model):
    assert _json("a", "--model", byte_model, "--max-new-tokens", "1")["tokens_per_second"] is None
    result = _run("a", "--model", byte_model, "--max-new-tokens", "1", "--cache", "exact")
    assert "too few tokens to time" in result.stdout


def test_random_weights():
    report = _json("--random-weights", "tiny", "--prompt-tokens", "9", "--max-new-tokens", "5")
    assert report["prompt_tokens"] == 9
    tokens = [int(word) for word in report["text"].split()]
    assert len(tokens) == 5
    assert all(0 <= token < models.SHAPES["tiny"].vocab_size for token in tokens)


def test_tokens_are_numbers_without_a_tokenizer(number_model):
    report = _json("1 17 4", "--model", number_model, "--max-new-tokens", "3")
    assert report["prompt_tokens"] == 3
    assert len(report["text"].split()) == 3
    result = _run("some words", "--model", number_model)
    assert result.exit_code == 2
    assert "no tokenizer.json, so the text must be token numbers" in result.stderr


class FakeTokenizer:
    """A token is a letter, and 0 the first byte of a two-byte one; a first space is lost."""

    @staticmethod
    def from_file(path):
        if "broken" in path:
            raise Exception("expected value")  # what the package raises
        return FakeTokenizer()

    def encode(self, string):
        return types.SimpleNamespace(ids=[ord(c) - 32 for c in string])

    def decode(self, tokens):
        raw = b"".join(
            b"\xc3" if t == 0 else b"\xa9" if t == 1 else bytes([t + 30]) for t in tokens
        )
        return raw.decode("utf-8", "replace").removeprefix(" ")


@pytest.fixture
def tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=FakeTokenizer))


def test_a_tokenizer_shows_whole_characters_and_keeps_spaces(tokenizers, tmp_path):
    codec = text.TokenizerCodec(tmp_path / "tokenizer.json")
    decode = codec.decoder([40, 41])
    # A space, a letter, the two halves of one letter, a letter, and a half that stays alone.
    pieces = [decode(token) for token in (2, 40, 0, 1, 41, 0, None)]
    assert pieces == [" ", "F", "", "é", "G", "", "\N{REPLACEMENT CHARACTER}"]
    assert codec.encode(b"AB") == [33, 34]
    with pytest.raises(ValueError, match="at least one token"):
        codec.encode(b"")
    with pytest.raises(ValueError, match="broken is not a readable tokenizer: expected value"):
        text.TokenizerCodec(tmp_path / "broken")


def test_a_folder_with_a_tokenizer(tokenizers, monkeypatch, tmp_path):
    folder = _save(tmp_path, 96)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert _json("AB", "--model", folder, "--max-new-tokens", "2")["prompt_tokens"] == 2
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = _run("AB", "--model", folder)
    assert result.exit_code == 2
    assert "needs the package tokenizers: pip install 'turbojax[text]'" in result.stderr


def test_bytes_show_whole_characters():
    decode = text.ByteCodec().decoder([])
    assert [decode(b) for b in (*"aé".encode(), 0xC3, None)] == ["a", "", "é", "", "\ufffd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt or a --file"),
        (["a", "--file", "b"], "give a prompt or a --file"),
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["a", "--prompt-tokens", "3"], "--prompt-tokens is for --random-weights"),
        (["a", "--random-weights", "tiny"], "--random-weights takes no prompt"),
        (["--random-weights", "huge"], "'huge' must be one of llama-3-8b, tiny"),
        (["--random-weights", "tiny", "--prompt-tokens", "0"], "prompt_tokens=0 must be at least"),
        (["--random-weights", "tiny", "--prompt-tokens", "600"], "must be at most the model's 512"),
        (["--random-weights", "tiny", "--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--random-weights", "tiny", "--max-new-tokens", "0"], "max_new_tokens=0 must be at"),
        (["--random-weights", "tiny", "--dtype", "int8"], "'int8' must be one of float32"),
        (["--random-weights", "tiny", "--cache", "5bit"], "'5bit' must be one of exact"),
        (["--random-weights", "tiny", "--implementation", "fast"], "implementation='fast' must be"),
        (["a", "--model", "/no/such/folder"], "'/no/such/folder' must be 'embedded' or a folder"),
    ],
)
def test_errors_are_one_clear_line(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(jnp.ones(1).device.platform == "gpu", reason="about a machine without a GPU")
@pytest.mark.parametrize(("cache", "name"), [("4bit", "triton"), ("exact", "cudnn")])
def test_an_implementation_that_cannot_run_says_why(cache, name):
    result = _run("--random-weights", "tiny", "--cache", cache, "--implementation", name)
    assert result.exit_code == 2
    assert "cannot run here" in result.stderr or "has no implementation" in result.stderr
