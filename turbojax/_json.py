"""JSON that comes with weights from anywhere: read within limits, shown in errors on one line."""

import json
import re
import reprlib
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 32 * 2**20
"""Of a JSON file. Python needs some 30 times as much to hold it; indices of the largest models take
10 MB."""

_MOST_LEVELS = 100
# Two of these are one character.
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST_TEXT = 400
_LONGEST_NAME = 80

_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxlist = _short.maxtuple = _short.maxdict = 32
_short.maxstring = _short.maxother = _short.maxlong = 120


def shown(value: object) -> str:
    """A value for an error: on one line, and short, however long or deep it is."""
    text = _short.repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def shown_name(name: str) -> str:
    """A name from a file, on one line and short."""
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else shown(name)


def line(text: str) -> str:
    """Another library's message, on one line and not long."""
    text = " ".join(text.split())
    return text if text.isprintable() and len(text) <= _LONGEST_TEXT else shown(text)


def parse(text: str | bytes) -> Any:
    """What a JSON text says; bytes are UTF-8.

    Python's own limits hold: integers have 4,300 digits at most. NaN and Infinity are read, since
    Python's and transformers' writers write them; whoever uses a number checks it.

    Raises ValueError if it is no JSON, is nested more than 100 levels deep, gives a key of an
    object twice, with two values, or holds text that is no Unicode.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"nested more than {_MOST_LEVELS} levels deep") from error
    if text.count("[") + text.count("{") > _MOST_LEVELS and _is_deep(value):
        raise ValueError(f"nested more than {_MOST_LEVELS} levels deep")
    if _HALF_PAIR.search(text):
        _check_unicode(value)
    return value


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file; raises as `read_bytes` and `parse`."""
    try:
        content = parse(read_bytes(path, most))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """A file's bytes; ValueError if it is no regular file or larger than `most` bytes."""
    check_file(path, most)
    return path.read_bytes()


def check_file(path: Path, most: int = MOST_BYTES) -> None:
    """Raises ValueError unless this is a regular file of at most so many bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise ValueError(f"{path} must be a file")
    if status.st_size > most:
        raise ValueError(f"{path} has {status.st_size} bytes, must have {most} at most")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if differ(value, values[key]):
                raise ValueError(f"{shown_name(key)} is given twice, with two values")
    return values


def differ(one: object, other: object) -> bool:
    """Whether two values of JSON differ: 1, 1.0 and true do, NaN and NaN do not."""
    try:
        return json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True)
    except RecursionError:
        return True


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half a surrogate pair, which is no Unicode") from error


def _is_deep(value: Any) -> bool:
    level = [[value]]
    for _ in range(_MOST_LEVELS + 1):
        level = [
            list(inner.values()) if isinstance(inner, dict) else inner
            for outer in level
            for inner in outer
            if isinstance(inner, dict | list)
        ]
    return bool(level)
