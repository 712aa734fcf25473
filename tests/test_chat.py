"""Chat templates: what they write is what transformers writes with them."""

import datetime
import sys

import pytest
from tokenizer_helpers import byte_level, save
from transformers import AutoTokenizer

from turbojax.models.chat import chat_tokens, render_chat, render_template
from turbojax.models.tokenizer import ByteTokenizer, JsonTokenizer

# In the manner of templates that come with checkpoints, whitespace control and all.
CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- set ns = namespace(first=loop.first) %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- "Tools: " }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\\n\\nToday is " + date_string + "\\n" + system_message + eos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}" }}
        {%- continue %}
    {%- endif %}
    {{- '<|header|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
TURNS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}
    {% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '
' + message['content'] | trim + '</turn>
' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model
' }}{% endif %}"""
INSTRUCTIONS = """\
{%- if messages[0]["role"] == "system" -%}
    {%- set system = messages[0]["content"] -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {%- if message.content is string %}{%- set words = message.content %}
        {%- else %}
            {%- set words = message.content | map(attribute="text") | join("+") %}
        {%- endif %}
        {{- " " + words + eos_token }}
    {%- else %}
        {%- break %}
    {%- endif %}
{%- endfor %}
"""
MARKED = """\
{% for message in messages %}
{% if message.role == "assistant" %}
{% generation %}
{% set inside = 1 %}
{{ message.content }}{{ eos_token }}
{% endgeneration %}
{{ inside is defined }}
{% else %}
<{{ message.role }}>{{ message.content }}{% if enable_thinking is false %} at once{% endif %}

{% endif %}
{% endfor %}
{{ messages | tojson }} {{ "é<b>" | tojson(ensure_ascii=true) }}
{{ documents is none }}{{ pad_token is defined }}
"""
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
    "marked": MARKED,
}
USER = {"role": "user", "content": " Who is <there> & 'why'? 你好 "}
CONVERSATIONS = {
    "question": [USER],
    "turns": [USER, {"role": "assistant", "content": "Me.\n"}, {"role": "user", "content": "Oh"}],
    "system": [{"role": "system", "content": "Talk."}, USER],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    return save(byte_level(), tmp_path_factory.mktemp("chat"), {"tokenizer_config.json": config})


def _both(folder, template: str, messages: list, **options) -> tuple[str, str]:
    tokenizer = JsonTokenizer(folder)
    tokenizer.chat_template = template
    reference = AutoTokenizer.from_pretrained(folder)
    variables = options.pop("variables", {})
    theirs = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options, **variables
    )
    return render_chat(tokenizer, messages, variables=variables, **options), theirs


# The one that takes no system message is below.
CASES = [(t, c) for t in TEMPLATES for c in CONVERSATIONS if (t, c) != ("turns", "system")]


@pytest.mark.parametrize(("name", "conversation"), CASES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_is_what_transformers_makes_of_it(
    folder, name, conversation, add_generation_prompt
):
    messages = CONVERSATIONS[conversation]
    ours, theirs = _both(
        folder, TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs
    assert messages[-1]["content"].strip() in ours


def test_tools_parts_and_variables(folder):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"é": ["<", 1]}}}
    call = {"function": {"name": "f", "arguments": {"x": "a&b", "n": None}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    options = {"tools": [tool], "add_generation_prompt": True}
    variables = {"date_string": "today"}
    ours, theirs = _both(folder, HEADERS, messages, variables=variables, **options)
    assert ours == theirs
    assert "Today is today" in ours
    assert '"parameters": {"x": "a&b", "n": null}' in ours
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [USER, {"role": "assistant", "content": parts}, USER, {"role": "tool"}]
    ours, theirs = _both(folder, INSTRUCTIONS, messages)
    assert ours == theirs
    assert " one+two</s>" in ours
    variables = {"enable_thinking": False}
    ours, theirs = _both(folder, MARKED, CONVERSATIONS["turns"], variables=variables)
    assert ours == theirs
    assert " at once" in ours


def test_tokens_are_those_of_transformers(folder):
    tokenizer = JsonTokenizer(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for template in (HEADERS, CHATML):
        tokenizer.chat_template = template
        ours = chat_tokens(tokenizer, [USER])
        theirs = reference.apply_chat_template(
            [USER], chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert ours == theirs
        # One beginning, where the template writes one: encoding adds none.
        assert ours.count(tokenizer.bos_token_id) == (template is HEADERS)


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
    with pytest.raises(ImportError, match=r"need the package jinja2: pip install 'turbojax.text"):
        render_template("{{ 'not compiled before' }}", [USER])
