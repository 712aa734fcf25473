"""Tokenizers: against what is recorded of the packages that checkpoints' files are made for."""

import json
import sys

import numpy as np
import pytest

from tests.models import tokenizer_helpers
from tests.models.tokenizer_helpers import KINDS, TEXTS, byte_level, save
from tests.recordings import parity_recordings as recordings
from turbojax.models import embedded_path
from turbojax.models.generation.stopping import check_stops
from turbojax.models.text.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    NumberTokenizer,
    load_tokenizer,
)

BEGIN_AND_END = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """A folder that transformers reads, too."""
    return tokenizer_helpers.folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_text_are_those_of_transformers(tmp_path, kind, special):
    tokenizer = JsonTokenizer(tokenizer_helpers.folder(kind, tmp_path))
    recorded = recordings.read("text")["tokens"][kind]
    rows = recorded["special" if special else "plain"]
    for text, expected in zip(TEXTS, rows, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=special)
        assert tokens == expected
        assert (tokens[0] == tokenizer.bos_token_id) == special
        assert tokenizer.decode(tokens) == text
    assert tokenizer.vocab_size == recorded["vocab_size"]
    assert tokenizer.bos_token_id == recorded["bos_token_id"]
    assert tokenizer.eos_token_ids == (recorded["eos_token_id"],)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_adds_up_to_the_whole_text(folder, text):
    tokenizer = JsonTokenizer(folder)
    tokens = tokenizer.encode(text)
    for cut in range(len(tokens) + 1):
        prompt, new = tokens[:cut], tokens[cut:]
        before = tokenizer.decode(prompt)
        decode = tokenizer.stream(prompt)
        pieces = [decode(token) for token in new] + [decode(None)]
        # A prompt that ends within a character: that one is decoded with it, so it is not compared.
        if before.endswith("\N{REPLACEMENT CHARACTER}"):
            continue
        assert before + "".join(pieces) == text, cut
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_stream_shows_characters_as_soon_as_they_are_whole(folder):
    tokenizer = JsonTokenizer(folder)
    # Neither is in the corpus: their bytes are tokens of their own.
    tokens = tokenizer.encode("a🦊ß", add_special_tokens=False)
    assert len(tokens) > 4
    decode = tokenizer.stream([tokenizer.bos_token_id])
    pieces = [decode(token) for token in tokens]
    assert [piece for piece in pieces if piece] == ["a", "🦊", "ß"]
    assert (pieces[-1], decode(None)) == ("ß", "")


def test_an_unfinished_character_shows_at_the_end(folder):
    tokenizer = JsonTokenizer(folder)
    tokens = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    decode = tokenizer.stream()
    assert "".join(decode(token) for token in tokens) == "a"
    assert set(decode(None)) == {"\N{REPLACEMENT CHARACTER}"}


def test_special_tokens_between_words_do_not_eat_spaces(folder):
    tokenizer = JsonTokenizer(folder)
    dog = tokenizer.encode("the dog", add_special_tokens=False)
    end = tokenizer.eos_token_ids[0]
    tokens = [dog[0], *[end] * 9, *dog[1:]]
    decode = tokenizer.stream([tokenizer.bos_token_id])
    pieces = [decode(token) for token in tokens]
    assert "".join(pieces) == tokenizer.decode(tokens) == "the dog"
    assert pieces[1:10] == [""] * 9


def test_tokens_of_a_padded_table_have_no_text(folder):
    tokenizer = JsonTokenizer(folder)
    tokens = tokenizer.encode("the dog")
    assert tokenizer.decode([*tokens, tokenizer.vocab_size + 3]) == "the dog"
    assert tokenizer.decode(np.array(tokens)) == "the dog"


def test_text_is_neither_cut_nor_filled_up(tmp_path):
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=50)
    save(made, tmp_path)
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]
    assert len(tokenizer.encode("a")) == 2


def test_bytes_that_are_no_unicode(folder):
    with pytest.raises(ValueError, match="the text is not Unicode: .*surrogates not allowed"):
        JsonTokenizer(folder).encode(b"a\xff".decode("utf-8", "surrogateescape"))
    plain = ByteTokenizer()
    assert plain.encode(b"a\xff".decode("utf-8", "surrogateescape")) == [0, 97, 255]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        plain.encode("\ud800")


def test_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [0, 0xC3, 0xA9]
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.decode(np.array([0x61, 0xC3, 0xA9, 0xC3])) == "aé\ufffd"
    decode = tokenizer.stream([1])
    assert [decode(b) for b in (*"aé".encode(), 0xC3, None)] == ["a", "", "é", "", "\ufffd"]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, 0, ())


def test_numbers():
    tokenizer = NumberTokenizer(60)
    assert tokenizer.encode(" 1 17\n4") == [1, 17, 4]
    assert tokenizer.decode([1, 17]) == "1 17 "
    decode = tokenizer.stream([1])
    assert [decode(token) for token in (3, 4, None)] == ["3 ", "4 ", ""]
    with pytest.raises(ValueError, match="no tokenizer.json, so the text must be token numbers"):
        tokenizer.encode("some words")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, []),
        ({"tokenizer_config.json": BEGIN_AND_END}, ["</s>"]),
        ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, ["</s>"]),
        ({"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 2}}, [3]),
        ({"generation_config.json": {"eos_token_id": [3, 2]}}, [2, 3]),
        ({"generation_config.json": {}, "tokenizer_config.json": BEGIN_AND_END}, ["</s>"]),
        ({"config.json": {"eos_token_id": 3}, "tokenizer_config.json": BEGIN_AND_END}, ["</s>", 3]),
    ],
)
def test_what_ends_a_text(tmp_path, files, ends):
    made = byte_level()
    numbers = [made.token_to_id(x) if isinstance(x, str) else x for x in ends]
    tokenizer = JsonTokenizer(save(made, tmp_path, files))
    assert tokenizer.eos_token_ids == tuple(numbers)


def test_special_tokens_and_the_chat_template(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": None, "chat_template": "in config"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": {"eos_token": "</s>"}}
    tokenizer = JsonTokenizer(save(byte_level(), tmp_path / "a", files))
    # Without added tokens beside it, the map counts, also where the settings say null.
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "in config"
    files["chat_template.jinja"] = "in a file"
    assert JsonTokenizer(save(byte_level(), tmp_path / "a", files)).chat_template == "in a file"
    several = [{"name": "tool_use", "template": "1"}, {"name": "default", "template": "2"}]
    files = {"tokenizer_config.json": {"chat_template": several}}
    named = JsonTokenizer(save(byte_level(), tmp_path / "b", files)).chat_template
    assert named == {"tool_use": "1", "default": "2"}
    assert JsonTokenizer(save(byte_level(), tmp_path / "c")).chat_template is None


def test_which_tokenizer_a_folder_has(tmp_path):
    made = save(byte_level(), tmp_path / "json", {"config.json": {"vocab_size": 320}})
    assert load_tokenizer(made).vocab_size == 320
    assert isinstance(load_tokenizer(made, 400), JsonTokenizer)  # a padded table
    with pytest.raises(ValueError, match="know tokens up to 319, .* model's vocab_size=319"):
        load_tokenizer(made, 319)
    (made / "config.json").write_text(json.dumps({"vocab_size": 256}))
    with pytest.raises(ValueError, match=r"tokenizer.json .* know .* model's vocab_size=256"):
        load_tokenizer(made)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"vocab_size": 60, "eos_token_id": 7}))
    numbers = load_tokenizer(plain)
    assert isinstance(numbers, NumberTokenizer)
    assert (numbers.vocab_size, numbers.eos_token_ids) == (60, (7,))
    assert isinstance(load_tokenizer(plain, 256), ByteTokenizer)
    for name in ("embedded", embedded_path()):
        shipped = load_tokenizer(name)
        assert isinstance(shipped, ByteTokenizer)
        assert shipped.eos_token_ids == (0,)
    with pytest.raises(ValueError, match="vocab_size=300 of the embedded model must be 256"):
        load_tokenizer("embedded", 300)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be 'embedded' or a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="must hold config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="must hold tokenizer.json, or a vocab_size"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"...")
    with pytest.raises(ValueError, match=r"no tokenizer.json: AutoTokenizer.*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json is not a readable tokenizer: "),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is not readable JSON"),
        (
            {"tokenizer_config.json": "[]"},
            "tokenizer_config.json must hold a JSON object, not list",
        ),
        ({"tokenizer_config.json": {"chat_template": 3}}, "chat_template must be a text"),
        ({"tokenizer_config.json": {"chat_template": ["a"]}}, "chat_template must be a text"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": []}]}},
            "config.json: chat_template",
        ),
        ({"generation_config.json": {"eos_token_id": "a"}}, "eos_token_id='a' must be one token"),
        ({"generation_config.json": {"eos_token_id": [-1]}}, r"eos_token_id=\[-1\] must be one"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        JsonTokenizer(save(byte_level(), tmp_path, files))


def test_a_chat_template_that_is_no_unicode(tmp_path):
    save(byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is no UTF-8"):
        JsonTokenizer(tmp_path)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_prompt_may_end_inside_a_character(folder, split):
    # Its bytes are tokens of their own.
    text = "the \U0001f98a dog and the dog, the dog"
    for tokenizer in (JsonTokenizer(folder), ByteTokenizer()):
        tokens = tokenizer.encode(text)
        fox = next(
            i
            for i in range(len(tokens))
            if tokenizer.decode(tokens[: i + 1]).endswith("\U0001f98a")
        )
        decode = tokenizer.stream(tokens[: fox - 3 + split])
        pieces = [decode(token) for token in tokens[fox - 3 + split :]]
        assert "".join(pieces) + decode(None) == text[4:]


def test_a_character_that_stays_incomplete_is_not_shown_again(folder):
    for tokenizer in (JsonTokenizer(folder), ByteTokenizer()):
        cut = tokenizer.encode("a\U0001f98a", add_special_tokens=False)[:-1]
        decode = tokenizer.stream(cut)
        end = tokenizer.encode("!", add_special_tokens=False)
        assert "".join(map(decode, end[-1:])) + decode(None) == "!"


def test_special_tokens_have_texts_that_are_not_shown(folder):
    tokenizer = JsonTokenizer(folder)
    token = tokenizer.special_token("<|im_end|>")
    assert token == tokenizer.encode("<|im_end|>", add_special_tokens=False)[-1]
    assert tokenizer.decode([token]) == ""
    assert [tokenizer.special_token(text) for text in ("the", " ", "im_end")] == [None] * 3
    assert check_stops([7], ["<|im_end|>", "the"], tokenizer) == (
        {7, token},
        ("<|im_end|>", "the"),
    )


def test_without_the_package(tmp_path, monkeypatch):
    save(byte_level(), tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ImportError, match=r"needs the package tokenizers: pip install 'tokenizers>="
    ):
        JsonTokenizer(tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*tokenizer.json"):
        JsonTokenizer(tmp_path)
