"""Chat templates and conversations that this package and transformers render."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.models.tokenizer_helpers import byte_level, save

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A conversation, rendered by one of `TEMPLATES`.

    `options` are arguments of `render_chat` and of transformers' `apply_chat_template`;
    `variables` are what templates may read besides. `shows` must be in the text, so that one that
    is left out by both is seen.
    """

    template: str
    messages: list[dict[str, Any]]
    shows: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"é": ["<", 1]}}}
CALL = {"function": {"name": "f", "arguments": {"x": "a&b", "n": None}}}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
# What another text is recorded of: run `make_recordings.py` after a change.
CASES = {
    **{
        f"{template}, {conversation}{', prompt' if prompt else ''}": Case(
            template, messages, messages[-1]["content"].strip(), {"add_generation_prompt": prompt}
        )
        for template in TEMPLATES
        for conversation, messages in CONVERSATIONS.items()
        for prompt in (True, False)
        # It takes no system message.
        if (template, conversation) != ("turns", "system")
    },
    "a tool and its call": Case(
        "headers",
        [USER, {"role": "assistant", "tool_calls": [CALL]}, USER],
        '"parameters": {"x": "a&b", "n": null}',
        {"tools": [TOOL], "add_generation_prompt": True},
        {"date_string": "today"},
    ),
    "a content in parts": Case(
        "instructions",
        [USER, {"role": "assistant", "content": PARTS}, USER, {"role": "tool"}],
        " one+two</s>",
    ),
    "a variable": Case(
        "marked",
        CONVERSATIONS["turns"],
        " at once",
        variables={"enable_thinking": False},
    ),
}
# Templates whose rendering of a question is encoded.
ENCODED = ("headers", "chatml")


def folder(path: Path) -> Path:
    """Writes a tokenizer without a template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    return save(byte_level(), path, {"tokenizer_config.json": config})
