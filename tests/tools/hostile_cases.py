"""Hostile files beside good ones: a checkpoint's or tokenizer's JSON files, changed in every place.

A case is a name and what happens to one file of a good folder. Values are written as JSON text, so
that a case can say what Python's own writer would not.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DEEP = 100_000
MANY = 1_000_000

# JSON texts that stand for one value.
EVIL = {
    **{text: text for text in ("null", "true", "false", "0", "-1", "1", "2", "3", "7", "0.5")},
    **{f"10^{n}": "1" + "0" * n for n in (5, 9, 18, 400)},
    **{f"-10^{n}": "-1" + "0" * n for n in (9, 400)},
    **{f"2^{n}": str(2**n) for n in (31, 32, 40, 63, 64)},
    "2^31-1": str(2**31 - 1),
    "1e-320": "1e-320",
    "1e300": "1e300",
    "1e400": "1e400",
    "-1e400": "-1e400",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "million digits": "9" * MANY,
    "empty text": '""',
    "text": '"a"',
    "a number as text": '"8"',
    "half a pair": '"\\ud800"',
    "lines and escapes": '"a\\nb\\u001b[2J"',
    "million letters": '"' + "s" * MANY + '"',
    "empty list": "[]",
    "list": "[0]",
    "list of null": "[null]",
    "list of texts": '["a", "b"]',
    "million entries": "[" + "0," * (MANY - 1) + "0]",
    "million layers": "[" + '"full_attention",' * (MANY - 1) + '"full_attention"]',
    "empty object": "{}",
    "object": '{"a": 1}',
    "content": '{"content": "a"}',
    "nested lists": "[" * 900 + "]" * 900,
    "nested objects": '{"a":' * 900 + "1" + "}" * 900,
    "deep lists": "[" * DEEP + "]" * DEEP,
}
_HOLE = "the place of a hostile value"


@dataclasses.dataclass(frozen=True)
class Case:
    """A change of a folder.

    Attributes:
      name: says what is changed how.
      file: the file that is changed.
      words: what an error may name, one of them.
      apply: changes the folder.
    """

    name: str
    file: str
    words: tuple[str, ...]
    apply: Callable[[Path], None]


def content(file: str, name: str, data: bytes | Callable[[], bytes], *words: str) -> Case:
    """The file holds these bytes; large ones are made when their turn comes."""

    def apply(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(data if isinstance(data, bytes) else data())

    return Case(f"{file}: {name}", file, (file, *words), apply)


def values(file: str, text: str, places: int = 4) -> Iterator[Case]:
    """Every value of a JSON file replaced by every evil one, left out, or given twice.

    Args:
      file: its name.
      text: what it holds.
      places: of an object's or list's entries, how many are changed.
    """
    whole = json.loads(text)
    for path in _paths(whole, places):
        key = str(next((step for step in reversed(path) if isinstance(step, str)), file))
        where = ".".join(map(str, path))
        holed = json.dumps(_replaced(whole, path, _HOLE))
        for name, value in EVIL.items():

            def data(holed: str = holed, value: str = value) -> bytes:
                return holed.replace(json.dumps(_HOLE), value).encode()

            yield content(file, f"{where} is {name}", data, key)
        yield content(file, f"without {where}", json.dumps(_without(whole, path)).encode(), key)
    if isinstance(whole, dict):
        for key in whole:
            twice = f'{{"{key}": 3, {json.dumps(whole)[1:]}'
            yield content(file, f"{key} twice", twice.encode(), key)
            yield content(
                file, f"{key} renamed", json.dumps({**whole, f"{key}x": 1}).encode(), f"{key}x"
            )


def texts(file: str, text: str) -> Iterator[Case]:
    """A file that holds no such JSON, and things that are no files."""
    yield from contents(file, text)
    for name, make in _NO_FILES.items():

        def apply(folder: Path, make: Callable[[Path], None] = make) -> None:
            (folder / file).unlink(missing_ok=True)
            make(folder / file)

        yield Case(f"{file}: {name}", file, (file,), apply)


def contents(file: str, text: str) -> Iterator[Case]:
    """A file that holds no such JSON."""
    data = text.encode()
    whole = {
        "empty": b"",
        "a space": b" ",
        "null": b"null",
        "a list": b"[]",
        "a text": b'"x"',
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "UTF-16": text.encode("utf-16"),
        "no UTF-8": b"\xff" + data,
        "no UTF-8 inside": data[:-2] + b'\xff"}',
        "NUL": data[:10] + b"\0" + data[10:],
        "something behind": data + b"}",
        "deep lists": b"[" * DEEP + b"]" * DEEP,
        "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "open lists": b"[" * DEEP,
        "only a number": b"9" * MANY,
    }
    for name, changed in whole.items():
        yield content(file, name, changed)


def damaged(
    file: str, data: bytes, count: int, rng: np.random.Generator, most: int
) -> Iterator[Case]:
    """Flipped bits, cut ends, and pieces that come twice, within the first `most` bytes."""
    for i in range(count):
        changed = bytearray(data)
        match i % 5:
            case 0 | 1 | 2:
                place = int(rng.integers(most))
                changed[place] ^= 1 << int(rng.integers(8))
                name = f"bit of byte {place} flipped"
            case 3:
                place = int(rng.integers(most))
                del changed[place:]
                name = f"cut at {place}"
            case _:
                start, end, to = sorted(int(x) for x in rng.integers(most, size=3))
                piece = changed[start:end]
                changed[to:to] = piece
                name = f"bytes {start} to {end} again at {to}"
        yield content(file, name, bytes(changed))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


_NO_FILES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": _sparse,
}


def _paths(value: Any, places: int, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values lie: the first few of every object and list but the outermost."""
    if path:
        yield path
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for key, inner in entries if not path else entries[:places]:
        yield from _paths(inner, places, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = value.copy()
    changed[path[0]] = _replaced(value[path[0]], path[1:], new)
    return changed


def _without(value: Any, path: tuple[Any, ...]) -> Any:
    changed = value.copy()
    if len(path) == 1:
        del changed[path[0]]
    else:
        changed[path[0]] = _without(value[path[0]], path[1:])
    return changed
