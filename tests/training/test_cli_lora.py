"""`turbojax lora` and `--adapters`: from a quantized folder and text to adapters that generate."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from tests.training import test_lora
from turbojax import finetune, models
from turbojax.app.main import app

CONFIG = dataclasses.replace(test_lora.CONFIG, max_length=128)
BYTES = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = ("--context=32", "--batch=2", "--warmup-steps=1", "--rank=2", "--learning-rate=0.02")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("no_orbax_log"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int4")
    decoder = models.random_quantized_decoder(CONFIG, dtype=jnp.float32)
    models.save_quantized(decoder, folder, extra_config=BYTES)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = ["one", "two", "three", "four"]
    file = tmp_path_factory.mktemp("data") / "words.txt"
    file.write_text(" ".join(words[i] for i in rng.integers(4, size=600)))
    return file


def run(command, *options):
    return CliRunner().invoke(app, [command, *map(str, options)])


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("weights", ["int4", "float"])
def test_from_text_to_texts(model, text, tmp_path, weights):
    """It learns; another run with more steps goes on; adapters change what is generated."""
    out = tmp_path / "out"
    if weights == "float":
        model = tmp_path / "floats"
        models.save(models.Transformer(CONFIG, rngs=nnx.Rngs(0)), model, extra_config=BYTES)
    given = ("--model", model, "--data", text, "--out", out, *SIZES)
    result = run("lora", *given, "--steps=12", "--log-every=6", "--save-every=6")
    assert result.exit_code == 0, result.output
    assert f"wrote {out / 'adapters'}" in result.output.replace("\n", "")
    log = json.loads((out / "log.json").read_text())
    before, after = (log["evaluations"][i]["held_out_bits_per_token"] for i in (0, -1))
    assert after < before - 0.5
    assert [row["step"] for row in log["records"]] == [6, 12]
    again = run("lora", *given, "--steps=12", "--log-every=6", "--save-every=6")
    assert again.exit_code == 0
    assert json.loads((out / "log.json").read_text())["losses"] == log["losses"]
    other = run("lora", *given, "--steps=12", "--target=q")
    assert other.exit_code == 2
    assert "holds another run" in other.output
    texts = []
    for options in ((), ("--adapters", out / "adapters")):
        done = run(
            "generate",
            "one two",
            "--model",
            model,
            "--cache=exact",
            "--json",
            "--max-new-tokens=16",
            *options,
        )
        assert done.exit_code == 0, done.output
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] != texts[1]


def test_wrong_calls(model, text, tmp_path):
    decoder = models.load_decoder(model)
    models.save_adapters(models.init_adapters(decoder), tmp_path / "good")
    wrong = models.init_adapters(decoder, targets=("q",))
    models.save_adapters(jax.tree.map(lambda x: x[:, :8], wrong), tmp_path / "wrong")
    given = ("--data", text, "--out", tmp_path / "out", *SIZES)
    for command, options, words in (
        ("lora", ("--model=embedded", *given, "--gradient=exact"), "must be None of others"),
        ("lora", (f"--model={model}", *given, "--target=x"), "must be some of"),
        ("lora", (f"--model={model}", *given, "--context=999"), "must be more than context=999"),
        ("lora", (f"--model={model}", *given, "--gradient=bf16"), "must be one of"),
        ("generate", ("x", f"--adapters={tmp_path / 'good'}"), "layer 2 lacks"),
        ("generate", ("x", f"--model={model}", f"--adapters={tmp_path}"), "adapter_config.json"),
        ("generate", ("x", f"--model={model}", f"--adapters={tmp_path / 'wrong'}"), "layers[0].q"),
        ("generate", ("--random-weights=tiny", "--adapters=x"), "takes no --adapters"),
    ):
        result = run(command, *options)
        assert result.exit_code == 2, (command, options, result.output)
        assert words in " ".join(result.output.split()), result.output


def test_tokens_of_files(text, tmp_path):
    """Each text as its tokenizer begins it; what is held out is not trained on."""
    tokenizer = models.ByteTokenizer()
    content = text.read_bytes()
    corpus = finetune.tokens_of(tokenizer, [text])
    whole = np.concatenate([corpus.stream, corpus.held_out])
    np.testing.assert_array_equal(whole, [0, *content])
    assert corpus.held_out.size == whole.size // 20
    other = tmp_path / "other.txt"
    other.write_text("abc")
    corpus = finetune.tokens_of(tokenizer, [text], [other])
    assert corpus.stream.size == len(content) + 1
    np.testing.assert_array_equal(corpus.held_out, [0, *b"abc"])
    with pytest.raises(ValueError, match="must hold text"):
        finetune.tokens_of(tokenizer, [])
