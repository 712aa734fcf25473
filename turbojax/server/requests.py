"""``/v1/completions``: texts or tokens that go on; ``/v1/chat/completions``: conversations."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from turbojax import _json
from turbojax.models.text.chat import chat_tokens
from turbojax.server.fields import (
    ApiError,
    Fields,
    blamed_on,
    is_token,
    read_options,
    read_top_logprobs,
)
from turbojax.server.responses import Form, Job
from turbojax.server.service import Service
from turbojax.server.texts import Piece

_NEW_TOKENS = 16
"""New tokens where a request does not say: OpenAI's default."""

_PROMPTS = (
    "a text, a list of texts, a list of tokens within 0..{} or a list of such lists, none empty"
)


@dataclasses.dataclass(frozen=True)
class CompletionForm(Form):
    """How completions are written; `echoes` has for each prompt what stands before its text."""

    echoes: tuple[str, ...]
    prefix = "cmpl"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        found = self.delta(prompt, piece)
        return {**found, "text": self.echoes[prompt] + piece.text}

    def first(self, prompt: int) -> dict[str, Any] | None:
        """See `Form`: the prompt, where it is wanted."""
        echo = self.echoes[prompt]
        return {"text": echo, "logprobs": None} if echo else None

    def delta(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        said = None
        if self.logprobs:
            said = self.token_texts.for_completion(piece.said, len(self.echoes[prompt]))
        return {"text": piece.text, "logprobs": said}

    def last(self) -> dict[str, Any]:
        """See `Form`."""
        return {"text": "", "logprobs": None}


def read_completion(service: Service, body: bytes) -> Job:
    """Reads a request from its JSON; ApiError if a field is wrong."""
    fields = Fields.of_body(body)
    service.check_model(fields)
    prompts = _prompts(fields, service)
    echo = fields.boolean("echo")
    logprobs = read_top_logprobs(fields, "logprobs")
    asked = fields.integer("max_tokens", 0)
    if asked == 0:
        raise fields.error("max_tokens", "at least 1: prompts alone are not scored")
    if echo and logprobs is not None:
        raise fields.error("echo", "false with logprobs: those of prompts are not computed")
    fields.only("suffix", ("",), "text is added at its end only")
    options = read_options(fields, service.tokenizer)
    most = max(service.most_choices // len(prompts), 1)
    n = fields.integer("n", 1, most) or 1
    samples = fields.integer("best_of", n, most) or n
    if samples > n and options.stream:
        raise fields.error("best_of", f"{n}, as n is, with stream=true")
    fields.refuse_others()
    if logprobs is not None:
        service.token_texts.prepare()
    # Samples are chosen by their log-probabilities.
    needed = 0 if logprobs is None and samples > n else logprobs
    count = _NEW_TOKENS if asked is None else asked
    requests = []
    for _, tokens in prompts:
        most = service.new_tokens(tokens, count, "prompt")
        requests.append(options.request(list(tokens), most, needed))
    echoes = tuple(text if echo else "" for text, _ in prompts)
    form = CompletionForm(service.token_texts, logprobs is not None, echoes)
    return Job(tuple(requests), options, n, samples, form)


def _prompts(fields: Fields, service: Service) -> list[tuple[str, Sequence[int]]]:
    """Each prompt as text and as tokens."""
    value, tokenizer = fields.raw("prompt"), service.tokenizer
    found = _as_list(value, tokenizer.vocab_size)
    if not found:
        raise fields.error("prompt", _PROMPTS.format(tokenizer.vocab_size - 1))
    if len(found) > service.most_choices:
        raise ApiError(
            f"prompt has {len(found)} texts, must have at most {service.most_choices}",
            param="prompt",
        )
    with blamed_on("prompt"):
        return [
            (x, tokenizer.encode(x)) if isinstance(x, str) else (tokenizer.decode(x), x)
            for x in found
        ]


def _as_list(value: object, vocab_size: int) -> list[Any]:
    """A list of texts and of lists of tokens; [] for anything else."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return []

    def are_tokens(x: object) -> bool:
        return isinstance(x, list) and bool(x) and all(is_token(t, vocab_size) for t in x)

    if are_tokens(value):
        return [value]
    same = all(isinstance(x, str) for x in value) or all(are_tokens(x) for x in value)
    return value if same else []


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NO_TOOLS = "functions are not called here: describe in a message what the answer must look like"
_ONLY_TEXT = "conversations are text"
_NO_IMAGES = "images are for turbojax.models.generate, the engine's prompts have none"
# Fields of OpenAI's API that must ask for what is done here anyway; else they are refused.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((False, True), _NO_TOOLS),
    "modalities": ((["text"],), _ONLY_TEXT),
    "audio": ((), _ONLY_TEXT),
    "prediction": ((), "answers are not predicted by clients"),
    "web_search_options": ((), "nothing is looked up"),
    "moderation": ((), "nothing is moderated"),
    "reasoning_effort": ((), "what a template knows of it goes into chat_template_kwargs"),
    "verbosity": ((), "what a template knows of it goes into chat_template_kwargs"),
}


@dataclasses.dataclass(frozen=True)
class ChatForm(Form):
    """How messages are written."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message, "logprobs": self._said(piece)}

    def first(self, prompt: int) -> dict[str, Any] | None:
        """See `Form`."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"delta": delta, "logprobs": None}

    def delta(self, prompt: int, piece: Piece) -> dict[str, Any]:
        """See `Form`."""
        return {"delta": {"content": piece.text}, "logprobs": self._said(piece)}

    def last(self) -> dict[str, Any]:
        """See `Form`."""
        return {"delta": {}, "logprobs": None}

    def _said(self, piece: Piece) -> dict[str, Any] | None:
        return self.token_texts.for_chat(piece.said) if self.logprobs else None


def read_chat(service: Service, body: bytes) -> Job:
    """Reads a request from its JSON; ApiError if a field is wrong."""
    fields = Fields.of_body(body)
    service.check_model(fields)
    for name, (allowed, why) in _FIXED.items():
        fields.only(name, allowed, why)
    tokens = _tokens(fields, service)
    logprobs = _logprobs(fields)
    options = read_options(fields, service.tokenizer)
    n = fields.integer("n", 1, service.most_choices) or 1
    asked = _max_tokens(fields)
    fields.refuse_others()
    if logprobs is not None:
        service.token_texts.prepare()
    count = service.new_tokens(tokens, asked, "messages")
    request = options.request(tokens, count, logprobs)
    form = ChatForm(service.token_texts, logprobs is not None)
    return Job((request,), options, n, n, form)


def _max_tokens(fields: Fields) -> int | None:
    """The new name of the field and the old one, which must not say different things."""
    new, old = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    if new is not None and old is not None and new != old:
        raise fields.error("max_tokens", f"max_completion_tokens={new}, or left out")
    return old if new is None else new


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = read_top_logprobs(fields, "top_logprobs")
    if top is not None and not wanted:
        raise fields.error("top_logprobs", "given with logprobs=true only")
    return (top or 0) if wanted else None


def _tokens(fields: Fields, service: Service) -> list[int]:
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "a list of messages, at least one")
    said = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    begin = fields.boolean("add_generation_prompt", True)
    variables = fields.raw("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise fields.error("chat_template_kwargs", "an object")
    with blamed_on("messages"):
        return chat_tokens(
            service.tokenizer, said, add_generation_prompt=begin, variables=variables
        )


def _message(message: object, name: str) -> dict[str, Any]:
    """A message as templates know it: its content is one text."""
    if not isinstance(message, dict):
        raise ApiError(f"{name}={_json.shown(message)} must be an object", param=name)
    role = message.get("role")
    if role not in _ROLES:
        where = f"{name}.role"
        raise ApiError(
            f"{where}={_json.shown(role)} must be one of {', '.join(_ROLES)}", param=where
        )
    # OpenAI's later name for system messages, which templates do not know.
    role = "system" if role == "developer" else role
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "role": role}
    return {**message, "role": role, "content": _content(content, f"{name}.content")}


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            f"{name}={_json.shown(content)} must be a text or a list of parts", param=name
        )
    texts = list[str]()
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text, str):
            where = f"{name}[{i}]"
            raise ApiError(
                f"{where}={_json.shown(part)} must be of type text: {_ONLY_TEXT}; {_NO_IMAGES}",
                param=where,
            )
        texts.append(text)
    return "".join(texts)
