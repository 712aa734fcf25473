"""Tokenizers of GGUF files: kinds, splits, special tokens, chat templates."""

import json

import numpy as np
import pytest

from tests.models.gguf_helpers import byte_level_metadata, sentencepiece_metadata, skeleton
from turbojax.models.text import gguf_tokenizer
from turbojax.models.text.chat import chat_tokens, render_chat
from turbojax.models.text.tokenizer import JsonTokenizer, load_tokenizer

TEXTS = (
    "hello world 123 1234",
    "a\n\nb\t  c  ",
    "naïve 日本語 🎉",
    "hello<|im_end|><tool>hello",
    "",
)


def tokenizer(tmp_path, metadata, architecture="llama"):
    return load_tokenizer(skeleton(tmp_path / "m.gguf", architecture, metadata=metadata))


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer._SPLITS))
def test_byte_level(tmp_path, pre):
    found = tokenizer(tmp_path, byte_level_metadata(pre))
    for text in TEXTS[:3]:
        tokens = found.encode(text, add_special_tokens=False)
        assert found.decode(tokens) == text
    assert found.encode("hello", add_special_tokens=False) == [263]
    # Digits by themselves, or up to three together.
    digits = found.encode("123", add_special_tokens=False)
    apart = pre in ("smollm", "qwen2", "deepseek-r1-qwen", "tekken")
    assert len(digits) == (3 if apart else 1)
    begins = pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
    assert found.encode("hello") == [*([1] if begins else []), 263]


def test_special_tokens(tmp_path):
    found = tokenizer(tmp_path, byte_level_metadata())
    assert found.encode(TEXTS[3]) == [263, 2, 3, 263]
    assert found.decode([263, 2, 3, 263]) == "hello<tool>hello"
    assert (found.bos_token_id, found.eos_token_ids) == (1, (0, 2))
    assert found.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    both = tokenizer(tmp_path, byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode("hello") == [1, 263, 2]
    ends = tokenizer(tmp_path, byte_level_metadata(eot_token_id=3))
    assert ends.eos_token_ids == (0, 2, 3)


def test_chats(tmp_path):
    found = tokenizer(tmp_path, byte_level_metadata())
    said = [{"role": "user", "content": "hello<|im_end|>"}]
    text = render_chat(found, said)
    assert text.startswith("<|im_start|>user\nhello<|im_end|><|im_end|>\n<|im_start|>assistant")
    # What is said ends no turn.
    assert chat_tokens(found, said).count(2) == 1
    metadata = byte_level_metadata() | {"tokenizer.chat_template.tool_use": "tools"}
    named = tokenizer(tmp_path, metadata).chat_template
    assert named["tool_use"] == "tools"
    assert named["default"] == byte_level_metadata()["tokenizer.chat_template"]


def test_sentencepiece(tmp_path):
    found = tokenizer(tmp_path, sentencepiece_metadata())
    pieces = {text: i for i, text in enumerate(sentencepiece_metadata()["tokenizer.ggml.tokens"])}
    assert found.encode("hello w") == [1, pieces["▁hello"], pieces["▁w"]]
    # What has no piece is bytes; the space before a text is nobody's.
    assert found.encode("é")[-2:] == [pieces["<0xC3>"], pieces["<0xA9>"]]
    for text in TEXTS[:3]:
        assert found.decode(found.encode(text)) == text
    bare = tokenizer(tmp_path, sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert bare.encode("hello w") == [pieces["hello"], pieces["▁w"]]


def test_the_highest_score_goes_first(tmp_path):
    metadata = sentencepiece_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = list(metadata["tokenizer.ggml.scores"])
    scores[tokens.index("▁hello")] = 5.0  # cannot be made before its parts
    scores[tokens.index("he")] = -900.0
    metadata["tokenizer.ggml.scores"] = scores
    found = tokenizer(tmp_path, metadata)
    assert found.encode("hello")[1:] == [tokens.index("▁hello")]


def test_files_of_a_folder(tmp_path):
    """What a quantized model's folder gets reads like the GGUF file."""
    for i, metadata in enumerate((byte_level_metadata(), sentencepiece_metadata())):
        file = skeleton(tmp_path / f"{i}.gguf", "llama", metadata=metadata)
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, content in gguf_tokenizer.companions(file).items():
            json.loads(content)
            (folder / name).write_bytes(content)
        one, other = load_tokenizer(file), JsonTokenizer(folder)
        assert one.vocab_size == other.vocab_size
        assert one.special_tokens == other.special_tokens
        assert one.eos_token_ids == other.eos_token_ids
        assert one.chat_template == other.chat_template
        assert one.bos_token_id == other.bos_token_id
        for text in TEXTS:
            assert one.encode(text) == other.encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model='rwkv' is not supported: must be one of gpt2"),
        ({"model": None}, "tokenizer.ggml.model=None is not supported"),
        ({"pre": "mystery"}, "tokenizer.ggml.pre='mystery' is not supported: must be one of def"),
        ({"pre": None}, "tokenizer.ggml.pre=None is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be there"),
        ({"token_type": [1, 2]}, "token_type must be there, a number for each"),
        ({"merges": ["h  e"]}, "must be two texts with a space between them"),
        ({"merges": ["h missing"]}, "hold no tokenizer that can be read"),
        ({"bos_token_id": 100_000}, "bos_token_id=100000 must be one of"),
        ({"add_bos_token": "yes"}, "add_bos_token='yes' must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id must be there"),
    ],
)
def test_refused(tmp_path, changes, message):
    file = skeleton(tmp_path / "m.gguf", "llama", metadata=byte_level_metadata(**changes))
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        load_tokenizer(file)
    assert str(file) in str(caught.value)


def test_a_token_without_an_embedding(tmp_path):
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += [f"more{i}" for i in range(100)]
    metadata["tokenizer.ggml.token_type"] += [1] * 100
    file = skeleton(tmp_path / "m.gguf", "llama", metadata=metadata)
    with pytest.raises(ValueError, match=r"must be below the model's vocab_size=300"):
        load_tokenizer(file)
    # Tokens that pad the vocabulary are none.
    types = metadata["tokenizer.ggml.token_type"]
    types[-100:] = [5] * 100
    load_tokenizer(skeleton(tmp_path / "m.gguf", "llama", metadata=metadata))


def test_scores_must_be_there(tmp_path):
    metadata = sentencepiece_metadata(scores=None)
    file = skeleton(tmp_path / "m.gguf", "llama", metadata=metadata)
    with pytest.raises(ValueError, match="scores must be there"):
        load_tokenizer(file)
    assert np.isfinite(sentencepiece_metadata()["tokenizer.ggml.scores"]).all()
