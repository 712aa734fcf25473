"""Named chat templates, special tokens and added tokens; `test_parity_live_chat.py` has more."""

import pytest

from tests.models.tokenizer_helpers import byte_level, save
from turbojax.models.text.chat import render_chat
from turbojax.models.text.tokenizer import JsonTokenizer

CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %} plain"
TOOLS = "{{ tools | length }} tools {% for m in messages %}{{ m.content }}{% endfor %}"
RAG = "rag {{ messages[0].content }}"
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMED = {"default": PLAIN, "tool_use": TOOLS, "rag": RAG}


def in_config(folder, templates):
    entries = [{"name": name, "template": template} for name, template in templates.items()]
    return save(
        byte_level(), folder, {"tokenizer_config.json": {**CLASS, "chat_template": entries}}
    )


def in_files(folder, templates):
    # What a config says beside files does not count.
    config = {**CLASS, "chat_template": [{"name": "default", "template": "old"}]}
    save(byte_level(), folder, {"tokenizer_config.json": config})
    for name, template in templates.items():
        path = folder / "additional_chat_templates" / f"{name}.jinja"
        path = folder / "chat_template.jinja" if name == "default" else path
        path.parent.mkdir(exist_ok=True)
        path.write_text(template, encoding="utf-8")
    return folder


@pytest.mark.parametrize("write", [in_config, in_files])
@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        (None, None, "hello plain"),
        (None, [TOOL, TOOL], "2 tools hello"),
        (None, [], "0 tools hello"),
        ("default", [TOOL], "hello plain"),
        ("rag", [TOOL], "rag hello"),
        ("own {{ messages[0].content }}", None, "own hello"),
    ],
)
def test_which_template_is_taken(tmp_path, write, name, tools, expected):
    tokenizer = JsonTokenizer(write(tmp_path, NAMED))
    assert render_chat(tokenizer, USER, tools=tools, chat_template=name) == expected


@pytest.mark.parametrize("write", [in_config, in_files])
def test_tool_use_alone_is_no_default(tmp_path, write):
    tokenizer = JsonTokenizer(write(tmp_path, {"tool_use": TOOLS}))
    assert render_chat(tokenizer, USER, tools=[TOOL]) == "1 tools hello"
    with pytest.raises(ValueError, match="'tool_use', none is the default: .*chat_template"):
        render_chat(tokenizer, USER)


def test_a_name_that_there_is_not(tmp_path):
    in_config(tmp_path / "a", NAMED)
    save(byte_level(), tmp_path / "b", {"tokenizer_config.json": {**CLASS, "chat_template": PLAIN}})
    for folder, names in (("a", "'default', 'rag', 'tool_use'"), ("b", "no names")):
        # transformers would take the name itself for a template, and write just that.
        with pytest.raises(ValueError, match=f"chat_template='tool-use' must be .*{names}"):
            render_chat(JsonTokenizer(tmp_path / folder), USER, chat_template="tool-use")


def test_all_special_tokens_reach_the_template(tmp_path):
    template = "{{ bos_token }}|{{ sep_token }}|{{ mask_token }}|{{ image_token }}|{{ boi_token }}"
    config = {**CLASS, "bos_token": "<s>", "sep_token": "<|im_start|>", "image_token": "</s>"}
    config |= {"mask_token": {"content": "<|im_end|>"}, "chat_template": template}
    config["extra_special_tokens"] = {"boi_token": "<s>"}
    save(byte_level(), tmp_path, {"tokenizer_config.json": config})
    expected = "<s>|<|im_start|>|<|im_end|>|</s>|<s>"
    assert render_chat(JsonTokenizer(tmp_path), USER) == expected


def test_a_token_that_only_the_config_adds_is_a_token(tmp_path):
    size = byte_level().get_vocab_size()
    decoder = {
        str(size): {"content": "<plain>", "special": False},
        str(size + 1): {"content": "<special>", "special": True, "lstrip": True},
    }
    config = {**CLASS, "bos_token": "<s>", "added_tokens_decoder": decoder}
    save(byte_level(), tmp_path, {"tokenizer_config.json": config})
    tokenizer = JsonTokenizer(tmp_path)
    tokens = tokenizer.encode("a<plain>  <special>b", add_special_tokens=False)
    assert tokens[1:3] == [size, size + 1]
    assert len(tokens) == 4
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.special_token("<special>") == size + 1
    assert tokenizer.special_token("<plain>") is None


@pytest.mark.parametrize(
    "entry", ["<a>", {"lstrip": True}, {"content": 3}, {"content": "<a>", "special": "yes"}]
)
def test_an_added_token_that_is_none(tmp_path, entry):
    config = {"added_tokens_decoder": {"320": entry}}
    save(byte_level(), tmp_path, {"tokenizer_config.json": config})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: added_tokens_decoder.*320"):
        JsonTokenizer(tmp_path)
