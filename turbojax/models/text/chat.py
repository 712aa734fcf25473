"""Conversations as text: the chat template that comes with a checkpoint."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from turbojax import _extras, _json
from turbojax.models.text.special_text import Segment, SpecialTexts
from turbojax.models.text.tokenizer import ChatTemplate, JsonTokenizer, Tokenizer
from turbojax.models.vision.config import VisionConfig
from turbojax.models.vision.prompts import encode_with_images, image_prompt

Message = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``, and whatever else a template looks at."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> str:
    """The text of a conversation, written by a template of the checkpoint.

    Special tokens are part of the text: encode it with ``add_special_tokens=False``. Special tokens
    that messages mention cannot be told from the template's then, unlike in `chat_tokens`.

    Args:
      tokenizer: of the checkpoint.
      messages: the conversation so far.
      add_generation_prompt: whether to begin the assistant's next message.
      tools: functions that the assistant may call, as JSON schemas, for templates that know them.
      variables: further names that the template looks at, such as ``{"enable_thinking": False}``.
      chat_template: the name of one of the checkpoint's templates, or a Jinja template to use
        instead. By default, of several the one named ``"tool_use"`` where tools are given (also an
        empty list of them), and otherwise ``"default"``.

    Raises:
      ImportError: if the package `jinja2` is not installed.
      TypeError: if a message is not a mapping with a role.
      ValueError: if there is no message, no template or none of this name, none of several is the
        default, or the template refuses these messages.
    """
    return render_template(
        _choose(tokenizer.chat_template, chat_template, tools),
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables={**tokenizer.special_tokens, **(variables or {})},
    )


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    allow_special: bool = False,
    images: VisionConfig | None = None,
) -> list[int]:
    """The tokens of a conversation.

    Only what the template writes can be a special token. Text in messages and tools that looks like
    one, such as ``"<|im_end|>"`` in what a user says, stays text: nobody can end a turn, or begin
    another one, by writing it.

    Args:
      tokenizer: of the checkpoint.
      messages: see `render_chat`.
      add_generation_prompt: see `render_chat`.
      tools: see `render_chat`.
      variables: see `render_chat`; special tokens in them are special tokens.
      chat_template: see `render_chat`.
      allow_special: whether text that looks like a special token is one everywhere, as in
        transformers.
      images: `VisionModel.config`, for messages with images, ``{"type": "image"}`` among the parts
        of a content: each becomes the tokens that `image_prompt` makes of what the template writes.

    Raises:
      ImportError, TypeError: see `render_chat`.
      ValueError: see `render_chat`; or if messages hold text that looks like a special token and
        cannot be kept apart, because the template changes it or the tokenizer has no other tokens
        for it; or as `image_prompt`.
    """

    def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return render_chat(
            tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
            chat_template=chat_template,
        )

    text = render(messages, tools)
    # Other tokenizers have no special tokens that a text could look like.
    if not allow_special and isinstance(tokenizer, JsonTokenizer):
        special = tokenizer.special_texts
        segments = _segments(special, text, messages, tools, render)
        if images is not None:
            return encode_with_images(tokenizer, segments, images)
        if segments != special.split(text):
            return tokenizer.encode_segments(segments)
    if images is not None:
        return image_prompt(tokenizer, text, images, add_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _segments(
    special: SpecialTexts,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    render: Callable[[Any, Any], str],
) -> list[Segment]:
    """The rendered text in pieces; its special tokens are those that no message wrote.

    First every character of a message that begins some special token is hidden, which also finds
    special tokens that the template puts together. If the template looks at such characters, as in
    ``"</think>" in content``, only those are hidden that begin a whole one.
    """
    for all_first in (True, False):
        hidden = [special.hide(x, all_first=all_first) for x in (messages, tools)]
        if hidden == [messages, tools]:
            return special.split(text)
        try:
            segments = special.split_hidden(text, render(*hidden))
        except ValueError:  # the template refuses the hidden messages, but not the original ones
            segments = None
        if segments is not None:
            return segments
    raise ValueError(
        "a message is written like a special token, and the chat template changes such words, so "
        "that they cannot be told from its own: change the message, or say allow_special=True"
    )


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders a chat template, which is a Jinja template that can do nothing but write text.

    Templates find `messages`, `tools`, `documents` (none), `add_generation_prompt`, the
    variables, ``raise_exception(message)``, ``strftime_now(format)``, the filter `tojson` without
    HTML's escapes, ``break`` and ``continue``, and ``{% generation %}``, which marks an assistant's
    words and writes them as they are. Blocks leave no empty lines behind.

    Args:
      template: its text.
      messages: see `render_chat`.
      add_generation_prompt: see `render_chat`.
      tools: see `render_chat`.
      variables: names and values, the texts of special tokens among them.

    Raises:
      ImportError, TypeError, ValueError: see `render_chat`.
    """
    if not messages:
        raise ValueError("a conversation must have at least one message")
    for message in messages:
        given: Any = message
        if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
            raise TypeError(f"{message=} must be a mapping with a role, which is a text")
    names = {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    if taken := sorted(names.keys() & (variables or {}).keys()):
        raise ValueError(f"variables must not hold {taken[0]!r}, which is an argument")
    compiled = _compile(template)
    try:
        return compiled.render({**names, **(variables or {})})
    except Exception as error:  # its expressions may do anything with these messages
        reason = _json.line(str(error))
        raise ValueError(f"the chat template refuses these messages: {reason}") from error


def _choose(
    given: ChatTemplate | None, asked: str | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """The template to render with: by name, the text that was asked for, or the default."""
    named = given if isinstance(given, Mapping) else {}
    if asked is not None:
        if asked not in named and "{" not in asked:
            names = ", ".join(map(_json.shown, sorted(named))) or "no names here"
            raise ValueError(
                f"chat_template={asked!r} must be a template, or the name of one: {names}"
            )
        return named.get(asked, asked)
    if given is None:
        raise ValueError("the tokenizer has no chat template: give a text, not a conversation")
    if isinstance(given, str):
        return given
    if tools is not None and "tool_use" in given:
        return given["tool_use"]
    if "default" not in given:
        names = ", ".join(map(_json.shown, sorted(given)))
        raise ValueError(
            f"the tokenizer's chat templates are {names}, none is the default: name one as "
            "chat_template"
        )
    return given["default"]


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    environment = _environment()
    import jinja2

    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        reason = _json.line(str(error))
        raise ValueError(f"the chat template is not readable: {reason}") from error
    except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:
        # Python's own compiler has limits, too.
        raise ValueError(f"the chat template is not readable: {type(error).__name__}") from error


def _environment() -> Any:
    """Where templates run: they come with weights from anywhere, so they may only write text."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
    except ImportError as error:
        raise ImportError(
            f"chat templates need the package jinja2: {_extras.install('text')}"
        ) from error

    from turbojax.models.text.templates import BoundedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``: marks what a model is trained to write."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is written for a model: jinja2's own filter adds HTML's escapes."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
