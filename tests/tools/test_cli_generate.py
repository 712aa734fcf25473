"""The `turbojax generate` command: what it prints, and what it says when it cannot."""

import functools
import json
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.tokenizer_helpers import byte_level, save
from tests.tools.command_line import refuses, run, works
from turbojax import models
from turbojax.app.generate import command as cli_generate
from turbojax.app.generate import run as text
from turbojax.app.text_model import than_bfloat16
from turbojax.models.text.tokenizer import load_tokenizer

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
    config = models.TransformerConfig(vocab_size=vocab_size, **CONFIG)
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), folder)
    return str(folder)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> str:
    return _save(tmp_path_factory.mktemp("bytes"), 256)


@pytest.fixture(scope="module")
def number_model(tmp_path_factory) -> str:
    return _save(tmp_path_factory.mktemp("numbers"), 60)


_run = functools.partial(run, "generate")


def _json(*arguments: str) -> dict:
    result = works(_run(*arguments, "--json", "--cache", "exact"))
    return json.loads(result.stdout)


@pytest.mark.slow
def test_text_and_a_last_line(byte_model):
    result = works(_run("abc", "--model", byte_model, "--cache", "exact", "--max-new-tokens", "6"))
    prompt = jnp.array([[0, *b"abc"]])
    model = models.load(byte_model, dtype=jnp.float32)
    expected = bytes(models.generate(model, prompt, max_new_tokens=6)[0].tolist())
    body, summary, end = result.stdout.rsplit("\n", 2)
    assert body == expected.decode("utf-8", "replace")
    assert "tokens/s, batch 1; exact cache" in summary
    assert end == ""


@pytest.mark.slow
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


@pytest.mark.slow
def test_tokens_are_numbers_without_a_tokenizer(number_model):
    report = _json("1 17 4", "--model", number_model, "--max-new-tokens", "3")
    assert report["prompt_tokens"] == 3
    assert len(report["text"].split()) == 3
    result = _run("some words", "--model", number_model)
    refuses(result, "no tokenizer.json, so the text must be token numbers")


TEMPLATE = """\
{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    """A folder with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    _save(folder, 320)
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    save(byte_level(), folder, {"tokenizer_config.json": config})
    return str(folder)


def _greedy(folder: str, tokens: list[int], count: int) -> list[int]:
    model = models.load(folder, dtype=jnp.float32)
    return models.generate(model, jnp.array([tokens]), max_new_tokens=count)[0].tolist()


@pytest.mark.slow
def test_a_folder_with_a_tokenizer(chat_model, monkeypatch):
    tokenizer = load_tokenizer(chat_model)
    tokens = tokenizer.encode("The dog")
    report = _json("The dog", "--model", chat_model, "--max-new-tokens", "9")
    assert report["prompt_tokens"] == len(tokens)
    new = _greedy(chat_model, tokens, 9)
    assert tokenizer.eos_token_ids[0] not in new
    whole = tokenizer.decode([*tokens, *new])
    assert report["text"] == whole.removeprefix("The dog")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = _run("AB", "--model", chat_model)
    refuses(result, "needs the package tokenizers: pip install 'tokenizers>=")


def test_a_tokenizer_that_knows_more_than_the_model(tmp_path):
    folder = _save(tmp_path, 319)
    save(byte_level(), tmp_path)
    result = _run("AB", "--model", folder)
    refuses(result, "know tokens up to 319, which must be below the model's vocab_size=319")


@pytest.mark.quick(1)
@pytest.mark.parametrize("system", [[], ["--system", "Be brief."]])
def test_chat_writes_the_prompt_by_the_template(chat_model, system):
    said = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    if system:
        said = "<|im_start|>system\nBe brief.<|im_end|>\n" + said
    tokenizer = load_tokenizer(chat_model)
    tokens = tokenizer.encode("<s>" + said, add_special_tokens=False)
    options = ["--model", chat_model, "--max-new-tokens", "5"]
    report = _json("Who?", "--chat", *system, *options)
    assert report["prompt_tokens"] == len(tokens)
    new = _greedy(chat_model, tokens, 5)
    assert report["text"] == tokenizer.decode([*tokens, *new]).removeprefix(
        tokenizer.decode(tokens)
    )


def test_a_text_ends_where_its_tokenizer_says(chat_model, tmp_path):
    new = _greedy(chat_model, load_tokenizer(chat_model).encode("A dog"), 8)
    shutil.copytree(chat_model, tmp_path / "other")
    file = tmp_path / "other" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [new[4], 1]}))
    options = ["--max-new-tokens", "8", "--model"]
    report = _json("A dog", *options, str(file.parent))
    count = new.index(new[4]) + 1
    assert (report["new_tokens"], report["finish_reason"]) == (count, "stop")
    whole = _json("A dog", *options, chat_model)
    assert (whole["new_tokens"], whole["finish_reason"]) == (8, "length")
    assert whole["text"].startswith(report["text"])
    assert len(report["text"]) < len(whole["text"])


@pytest.mark.slow
def test_drawing_options_reach_the_draws(number_model):
    options = ["--model", number_model, "--max-new-tokens", "12", "--batch-size", "2"]

    def drawn(*more) -> str:
        return _json("1 17 4", *options, *more)["text"]

    def wanted(**sampling) -> str:
        model = models.load(number_model, dtype=jnp.float32)
        new = models.generate(
            model,
            jnp.array([[1, 17, 4]]),
            max_new_tokens=12,
            sampling=models.Sampling(**sampling),
        )
        return "".join(f"{token} " for token in new[0].tolist())

    warm = ["--temperature", "0.7", "--seed", "3"]
    assert drawn(*warm) == wanted(temperature=0.7, seed=3)
    for flag, value in (("top_k", 4), ("top_p", 0.5), ("min_p", 0.3)):
        given = drawn(*warm, "--" + flag.replace("_", "-"), str(value))
        assert given == wanted(temperature=0.7, seed=3, **{flag: value}) != drawn(*warm)


def test_stop_texts_end_the_text(number_model):
    options = ["--model", number_model, "--max-new-tokens", "12"]
    whole = _json("1 17 4", *options)["text"]
    words = whole.split()
    stop = f" {words[5]} {words[6]}"
    report = _json("1 17 4", *options, "--stop", "never", "--stop", stop)
    assert report["text"] == whole[: whole.index(stop)]
    assert (report["new_tokens"], report["finish_reason"]) == (7, "stop")
    assert len(whole[: whole.index(stop)].split()) == 5


def test_escapes_of_stop_texts():
    assert text.unescape(r"a\n\t\r\\n\d") == "a\n\t\r\\n\\d"
    assert text.unescape("\n") == "\n"


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_streaming_prints_the_same(byte_model, monkeypatch, stream):
    shown = []
    monkeypatch.setattr(cli_generate, "_show", shown.append)
    options = ["--model", byte_model, "--max-new-tokens", "9", "--dtype", "float32"]
    assert _run("abc", *options, stream, "--cache", "exact").exit_code == 0
    alone = _json("abc", *options)["text"]
    assert "".join(shown) == alone
    assert (len(shown) > 1) == (stream == "--stream")


def test_a_pipe_gets_the_text_at_the_end_and_a_terminal_as_it_comes(byte_model, monkeypatch):
    options = ["--model", byte_model, "--max-new-tokens", "9", "--cache", "exact"]
    for terminal in (False, True):
        shown = []
        monkeypatch.setattr(cli_generate, "_show", shown.append)
        monkeypatch.setattr(cli_generate, "_is_terminal", lambda terminal=terminal: terminal)
        assert _run("abc", *options).exit_code == 0
        assert (len(shown) > 1) == terminal


def test_what_is_wrong_in_config_json_is_said_with_its_path(byte_model, tmp_path):
    folder = shutil.copytree(byte_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    refuses(_run("a", "--model", str(folder)), f"{folder / 'config.json'}: lacks hidden_size")


def test_files_that_are_no_unicode(byte_model, chat_model, tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"a\xff\xc3")
    options = ["--file", str(file), "--max-new-tokens", "2", "--model"]
    assert _json(*options, byte_model)["prompt_tokens"] == 4
    refuses(_run(*options, chat_model), "the text is not Unicode")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt or a --file"),
        (["a", "--file", "b"], "give a prompt or a --file"),
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["a", "--prompt-tokens", "3"], "--prompt-tokens is for --random-weights"),
        (["a", "--random-weights", "tiny"], "--random-weights takes no prompt"),
        (["--random-weights", "tiny", "--chat"], "no --model and no --chat"),
        (["a", "--system", "b"], "--system is for --chat"),
        (["a", "--chat"], "the tokenizer has no chat template"),
        (["a", "--json", "--stream"], "it takes no --stream"),
        (["a", "--min-p", "0.1"], "min_p=0.1 needs a temperature above 0"),
        (["a", "--temperature", "1", "--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["a", "--stop", ""], "must not hold an empty text"),
        (["--random-weights", "huge"], "'huge' must be one of llama"),
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
    result = refuses(_run(*arguments), message)
    assert result.stderr.startswith("turbojax generate: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(jnp.ones(1).device.platform == "gpu", reason="about a machine without a GPU")
@pytest.mark.parametrize(("cache", "name"), [("4bit", "triton"), ("exact", "cudnn")])
def test_an_implementation_that_cannot_run_says_why(cache, name):
    result = refuses(_run("--random-weights", "tiny", "--cache", cache, "--implementation", name))
    assert "cannot run here" in result.stderr or "has no implementation" in result.stderr


@pytest.mark.parametrize("prompt", ["5000000000", "3 60", "1" + "0" * 30, "-- -1"])
def test_numbers_outside_the_vocabulary(number_model, prompt):
    result = _run("--model", number_model, *prompt.split(" ", prompt.startswith("--")))
    refuses(result, "must be within 0..59")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--cache", "5bit"],
        ["--stop", ""],
        ["--max-new-tokens", "0"],
        ["--batch-size", "0"],
        ["--prefill-batch-size", "0"],
    ],
)
def test_cheap_mistakes_are_found_before_the_model_is_loaded(options):
    result = refuses(_run("a", "--model", "/no/such/folder", *options))
    assert "folder" not in result.stderr
    assert "must" in result.stderr


def test_a_special_token_as_stop_text(chat_model, monkeypatch):
    token = load_tokenizer(chat_model).special_token("<|im_end|>")
    drawn = np.array([[9], [token], [9], [9], [9]], np.int32)

    def choose(*_, **__):
        return drawn[0], jnp.asarray(drawn[0])

    def next_tokens(decoder, caches, fed, lengths, rows, *, count, **_):
        return caches, drawn[1 : 1 + count], fed, lengths + count

    monkeypatch.setattr(text.generation, "choose", choose)
    monkeypatch.setattr(text.generation, "next_tokens", next_tokens)
    options = ["--model", chat_model, "--max-new-tokens", "4", "--stop", "<|im_end|>"]
    report = _json("abc", *options)
    assert (report["new_tokens"], report["finish_reason"]) == (2, "stop")


def test_almost_as_large_is_as_large():
    for ratio in (0.998, 1, 1.004):
        assert than_bfloat16(ratio) == "as large as bfloat16"
    assert than_bfloat16(0.5) == "2.00x larger than bfloat16"
    assert than_bfloat16(1.25) == "1.25x smaller than bfloat16"


def test_a_text_without_tokens(number_model):
    refuses(_run("", "--model", number_model), "the text must hold at least one token")
