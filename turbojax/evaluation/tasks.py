"""Tasks with answers, one a line of a file: questions to answer in words, or by choosing.

A line is an object of JSON. With ``"choices"`` it is a question whose answers are given, and
``"answer"`` is the number of the right one, from 0 on; otherwise ``"answer"`` is what a greedy
continuation of ``"prompt"`` must say. `Task` lists the keys.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turbojax import _json
from turbojax.models.generation.stopping import check_stop_strings

DEFAULT_NEW_TOKENS = 256
_OF_WORDS = ("pattern", "ignore", "stop", "max_new_tokens")
_KEYS = ("prompt", "answer", "choices", *_OF_WORDS, "chat", "system", "id", "group")


@dataclasses.dataclass(frozen=True)
class Task:
    r"""A question and its answer.

    Attributes:
      line: its line in the file, from 1.
      prompt: the text to continue; of a chat, what the user says.
      answers: texts that are right; of a choice none.
      choices: texts to choose from; of a task in words none.
      right: the number of the right one, from 0.
      pattern: a regular expression that finds the answer in a continuation and in `answers`: its
        first group, or all of it if it has none, where it first matches, as
        ``r"#### (-?[\d,.]+)"`` for GSM8K. Without, the whole continuation is the answer.
      ignore: a regular expression of what answers may differ in, such as ``"[,$]"``; space around
        them is ignored always.
      stop: texts that end a continuation and are no part of it.
      max_new_tokens: tokens of a continuation, at most.
      chat: whether the checkpoint's template writes the prompt.
      system: of a chat, the message before it, or None.
      name: what results call it: the line's ``"id"``, or its number.
      group: what it is counted with, such as a subject, or None.
    """

    line: int
    prompt: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    right: int = 0
    pattern: str | None = None
    ignore: str | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    chat: bool = False
    system: str | None = None
    name: str | int = 0
    group: str | None = None

    def answer_in(self, text: str) -> str | None:
        """The answer that a text holds; None if `pattern` finds none."""
        if self.pattern is not None:
            found = re.search(self.pattern, text)
            if found is None:
                return None
            text = (found[1] if found.re.groups else found[0]) or ""
        if self.ignore is not None:
            text = re.sub(self.ignore, "", text)
        return text.strip()

    def is_right(self, text: str) -> bool:
        """Whether a continuation holds one of the answers."""
        answer = self.answer_in(text)
        return answer is not None and answer in {self.answer_in(x) for x in self.answers}

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return dataclasses.asdict(self)


def read_tasks(path: Path, max_new_tokens: int = DEFAULT_NEW_TOKENS) -> tuple[Task, ...]:
    """Reads a file of tasks; empty lines are skipped.

    Args:
      path: the file, UTF-8.
      max_new_tokens: of lines that do not say.

    Raises:
      OSError: if it cannot be read.
      ValueError: naming file, line and key, if a line is no task; if there is none.
    """
    tasks = list[Task]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                tasks.append(parse_task(line, number, max_new_tokens))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not tasks:
        raise ValueError(f"{path} must hold at least one task")
    check_names(tasks)
    return tuple(tasks)


def check_names(tasks: Iterable[Task]) -> None:
    """Raises ValueError if two tasks have one name."""
    seen = dict[str | int, int]()
    for task in tasks:
        if task.name in seen:
            raise ValueError(
                f"line {task.line}: 'id' {_json.shown(task.name)} is that of line "
                f"{seen[task.name]}, must be another"
            )
        seen[task.name] = task.line


def parse_task(line: str | bytes, number: int, max_new_tokens: int = DEFAULT_NEW_TOKENS) -> Task:
    """Reads a line.

    Args:
      line: its text.
      number: of the line, from 1.
      max_new_tokens: if it does not say.

    Raises:
      ValueError: naming the key, if it is no task.
    """
    values = _object(line)
    for key in values:
        if key not in _KEYS:
            raise ValueError(f"unknown key {_json.shown(key)}, must be one of {', '.join(_KEYS)}")
    for key in ("prompt", "answer"):
        if key not in values:
            raise ValueError(f"lacks {key!r}")
    common: dict[str, Any] = {
        "line": number,
        "prompt": _text(values, "prompt"),
        "chat": _of_type(values, "chat", bool, False, "true or false"),
        "system": _text(values, "system") if "system" in values else None,
        "group": _text(values, "group") if "group" in values else None,
        "name": _name(values, number),
    }
    if common["system"] is not None and not common["chat"]:
        raise ValueError("'system' is for a line with 'chat': true")
    if "choices" in values:
        return Task(**common, **_choices(values))
    task = Task(**common, **_words(values, max_new_tokens))
    for answer in task.answers:
        if not task.answer_in(answer):
            raise ValueError(f"'answer' {_json.shown(answer)} must hold what 'pattern' finds")
    return task


def _object(line: str | bytes) -> Mapping[str, Any]:
    try:
        values = _json.parse(line)
    except ValueError as error:
        raise ValueError(f"is no JSON: {_json.line(str(error))}") from error
    if not isinstance(values, dict):
        raise ValueError(f"must be an object, not {_json.shown(values)}")
    return values


def _of_type(values: Mapping[str, Any], key: str, kind: type, default: Any, what: str) -> Any:
    value = values.get(key, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key!r} is {_json.shown(value)}, must be {what}")
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    return str(_of_type(values, key, str, None, "a text"))


def _texts(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text, or a list of some."""
    found = values.get(key, [])
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise ValueError(f"{key!r} is {_json.shown(found)}, must be a text or a list of texts")
    return tuple(found)


def _name(values: Mapping[str, Any], number: int) -> str | int:
    name = values.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"'id' is {_json.shown(name)}, must be a text or an integer")
    return name


def _choices(values: Mapping[str, Any]) -> dict[str, Any]:
    for key in _OF_WORDS:
        if key in values:
            raise ValueError(f"{key!r} is for answers in words, this line has 'choices'")
    choices = _texts(values, "choices")
    if isinstance(values["choices"], str) or len(choices) < 2 or not all(choices):
        raise ValueError(
            f"'choices' is {_json.shown(values['choices'])}, must be two or more texts, none empty"
        )
    right = values["answer"]
    if type(right) is not int or not 0 <= right < len(choices):
        raise ValueError(
            f"'answer' is {_json.shown(right)}, must be the number of a choice, 0 to "
            f"{len(choices) - 1}"
        )
    return {"choices": choices, "right": right}


def _words(values: Mapping[str, Any], max_new_tokens: int) -> dict[str, Any]:
    answers = _texts(values, "answer")
    if not answers or not all(x.strip() for x in answers):
        raise ValueError(
            f"'answer' is {_json.shown(values['answer'])}, must be a text or a list of texts, none "
            "empty"
        )
    patterns = {}
    for key in ("pattern", "ignore"):
        patterns[key] = _text(values, key) if key in values else None
        try:
            re.compile(patterns[key] or "")
        except re.error as error:
            raise ValueError(
                f"{key!r} {_json.shown(patterns[key])} is no regular expression: {error}"
            ) from error
    limit = _of_type(values, "max_new_tokens", int, max_new_tokens, "an integer")
    if limit < 1:
        raise ValueError(f"'max_new_tokens' is {limit}, must be at least 1")
    stop = _texts(values, "stop")
    try:
        check_stop_strings(stop)
    except ValueError as error:
        raise ValueError(f"'stop' is {_json.shown(list(stop))}, must hold no empty text") from error
    return {"answers": answers, "stop": stop, "max_new_tokens": limit, **patterns}
