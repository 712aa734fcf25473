"""Named chat templates and special tokens, as transformers reads them from the same folder."""

import json

import pytest
from tokenizers import AddedToken

from tests.models.test_chat_named import CLASS, NAMED, TOOL, TOOLS, USER, in_config, in_files
from tests.models.tokenizer_helpers import TEXTS, byte_level, save
from turbojax.models.text.chat import chat_tokens, render_chat
from turbojax.models.text.tokenizer import JsonTokenizer, load_tokenizer

pytestmark = pytest.mark.slow


def reference(folder):
    """The tokenizer of transformers: imported here, because it may not be installed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("write", [in_config, in_files])
@pytest.mark.parametrize("tools", [None, [], [TOOL, TOOL]])
@pytest.mark.parametrize("name", [None, "default", "tool_use", "rag", "own {{ tools }}"])
def test_which_template_is_taken(tmp_path, write, tools, name):
    write(tmp_path, NAMED)
    ours, theirs = JsonTokenizer(tmp_path), reference(tmp_path)
    assert ours.chat_template == theirs.chat_template == NAMED
    # transformers writes what is given as a template into its own, too.
    if name == "tool_use" and tools is None:
        with pytest.raises(ValueError, match="refuses these messages"):
            render_chat(ours, USER, chat_template=name, tools=tools)
        return
    expected = theirs.apply_chat_template(USER, tools=tools, chat_template=name, tokenize=False)
    text = render_chat(ours, USER, tools=tools, chat_template=name, add_generation_prompt=False)
    assert text == expected
    assert (
        chat_tokens(ours, USER, tools=tools, chat_template=name) == theirs(expected).input_ids[1:]
    )


@pytest.mark.parametrize("write", [in_config, in_files])
def test_tool_use_alone_is_no_default(tmp_path, write):
    write(tmp_path, {"tool_use": TOOLS})
    ours, theirs = JsonTokenizer(tmp_path), reference(tmp_path)
    assert render_chat(ours, USER, tools=[TOOL]) == "1 tools hello"
    with pytest.raises(ValueError, match="with no default specified"):
        theirs.apply_chat_template(USER, tokenize=False)
    with pytest.raises(ValueError, match="'tool_use', none is the default: .*chat_template"):
        render_chat(ours, USER)


SPECIALS = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ sep_token }}|{{ pad_token }}|"
SPECIALS += "{{ cls_token }}|{{ mask_token }}|{{ image_token }}|{{ boi_token }}"


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("place", ["config", "map", "both", "map beside a decoder", "padding"])
def test_all_special_tokens_reach_the_template(tmp_path, place):
    tokens = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "sep_token": "<|im_start|>",
        "cls_token": "<s>",
        "mask_token": "<|im_end|>",
    }
    config = {**CLASS, **tokens, "image_token": "<s>", "chat_template": SPECIALS, "unk_token": None}
    config["extra_special_tokens"] = {"boi_token": "</s>"}
    files, made = {"tokenizer_config.json": config}, byte_level()
    if place != "config" and place != "padding":
        files["special_tokens_map.json"] = {"mask_token": {"content": "</s>"}, "unk_token": "<s>"}
    if place == "map":
        for name in tokens:
            del config[name]
        files["special_tokens_map.json"] |= {"sep_token": "</s>", "bos_token": "<s>"}
    if place == "map beside a decoder":
        config["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}}
    if place == "padding":
        made.enable_padding(pad_token="<|im_end|>")
    save(made, tmp_path, files)
    ours, theirs = JsonTokenizer(tmp_path), reference(tmp_path)
    expected = theirs.apply_chat_template(USER, tokenize=False)
    assert render_chat(ours, USER) == expected
    assert ours.special_tokens == theirs.special_tokens_map
    assert len(set(expected.split("|"))) >= 3


ADDED = {
    "<plain>": {"special": False},
    "<special>": {"special": True},
    "<left>": {"special": False, "lstrip": True},
    "<right>": {"special": True, "rstrip": True},
    "word": {"special": False, "single_word": True},
    "NORM": {"special": False, "normalized": True},
}
MIXED = "a <plain> b <special> c  <left>d <right>  e word words sword word. NORM norm"


@pytest.mark.parametrize("kind", ["byte_level", "lower"])
def test_tokens_that_only_the_config_adds(tmp_path, kind):
    from tokenizers import normalizers

    made = byte_level()
    if kind == "lower":
        made.normalizer = normalizers.Lowercase()
    size = made.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    decoder = {
        str(size + i): {"content": text, **flags, **own}
        for i, (text, own) in enumerate(ADDED.items())
    }
    # One that is in the file, and one that is not where it would be put.
    decoder["0"] = {"content": "<s>", **flags, "special": True}
    decoder[str(size + 50)] = {"content": "<far>", **flags, "special": True}
    config = {**CLASS, "bos_token": "<s>", "eos_token": "<special>"}
    config["added_tokens_decoder"] = decoder
    save(made, tmp_path, {"tokenizer_config.json": config})
    ours, theirs = JsonTokenizer(tmp_path), reference(tmp_path)
    for text in (*TEXTS, MIXED, MIXED.lower(), "<far><s>", *ADDED):
        tokens = ours.encode(text, add_special_tokens=False)
        assert tokens == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    assert ours.encode("<plain>", add_special_tokens=False) == [size]
    assert ours.vocab_size == len(theirs)
    assert ours.special_token("<special>") == theirs.convert_tokens_to_ids("<special>")
    assert ours.special_token("<plain>") is None
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(ValueError, match=r"know tokens up to \d+, .* model's vocab_size"):
        load_tokenizer(tmp_path)


def test_the_file_s_own_tokens_stay(tmp_path):
    made = byte_level()
    made.add_tokens([AddedToken("<own>", rstrip=True)])
    number = made.token_to_id("<own>")
    config = {**CLASS, "added_tokens_decoder": {str(number): {"content": "<own>", "rstrip": False}}}
    save(made, tmp_path, {"tokenizer_config.json": config})
    ours, theirs = JsonTokenizer(tmp_path), reference(tmp_path)
    text = "<own>  a <own>b"
    assert ours.encode(text) == theirs.encode(text)
