"""Chat templates: what they write is what transformers writes with them, as recorded."""

import datetime
import sys

import pytest

from tests.models.chat_cases import (
    CASES,
    CONVERSATIONS,
    ENCODED,
    INSTRUCTIONS,
    TEMPLATES,
    TURNS,
    USER,
)
from tests.models.chat_cases import folder as write_folder
from tests.recordings import parity_recordings as recordings
from turbojax.models.text.chat import chat_tokens, render_chat, render_template
from turbojax.models.text.tokenizer import ByteTokenizer, JsonTokenizer

RECORDED = recordings.read("text")["chats"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_is_what_transformers_makes_of_it(folder, name):
    """Tools, contents in parts and variables among them."""
    case, tokenizer = CASES[name], JsonTokenizer(folder)
    tokenizer.chat_template = TEMPLATES[case.template]
    text = render_chat(tokenizer, case.messages, variables=case.variables, **case.options)
    assert text == RECORDED["texts"][name]
    assert case.shows in text


def test_variables_reach_the_template():
    """The recorded text says so, too."""
    assert "Today is today" in RECORDED["texts"]["a tool and its call"]


@pytest.mark.parametrize("name", ENCODED)
def test_tokens_are_those_of_transformers(folder, name):
    tokenizer = JsonTokenizer(folder)
    tokenizer.chat_template = TEMPLATES[name]
    tokens = chat_tokens(tokenizer, [USER])
    assert tokens == RECORDED["tokens"][name]
    # One beginning, where the template writes one: encoding adds none.
    assert tokens.count(tokenizer.bos_token_id) == (name == "headers")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TURNS, CONVERSATIONS["system"], "refuses these messages: System role not supported"),
        (TURNS, [USER, USER], "roles must alternate user/assistant"),
        (INSTRUCTIONS, [USER, USER], "After the optional system message, roles must"),
        ("{{ messages[5].content }}", [USER], "refuses these messages: "),
        ("{{ messages[0].content + 1 }}", [USER], "refuses these messages: "),
        ("{{ ''.__class__.__mro__ }}", [USER], "refuses these messages: .*unsafe"),
        ("{{ messages.append(1) }}", [USER], "refuses these messages: .*unsafe"),
        ("{% for %}", [USER], "the chat template is not readable: "),
        ("{% include 'x' %}", [USER], "refuses these messages: "),
        ("", [], "must have at least one message"),
    ],
)
def test_what_cannot_be_rendered(template, messages, message):
    with pytest.raises(ValueError, match=message):
        render_template(template, messages)


@pytest.mark.parametrize("message", ["hello", {"content": "a"}, {"role": 3}])
def test_what_is_no_message(message):
    with pytest.raises(TypeError, match="must be a mapping with a role"):
        render_template("", [message])


def test_bad_calls():
    with pytest.raises(ValueError, match="has no chat template"):
        render_chat(ByteTokenizer(), [USER])
    with pytest.raises(ValueError, match="must not hold 'messages', which is an argument"):
        render_template("", [USER], variables={"messages": []})


def test_the_date():
    written = render_template("{{ strftime_now('%Y-%m') }}", [USER])
    now = datetime.datetime.now()
    assert written in {f"{(now - datetime.timedelta(days=d)):%Y-%m}" for d in (0, 1)}


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"need the package jinja2: pip install 'tokenizers>="):
        render_template("{{ 'not compiled before' }}", [USER])
