"""Source files as training text: which files, what is dropped, and how they become one stream.

The stream is bytes; byte 0 stands before every document and after the last one. Shared with the
top-level folder `training`, which adds the installed packages and their licences.
"""

import collections
import dataclasses
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

MAX_FILE_BYTES = 1_000_000
MIN_FILE_BYTES = 64
MAX_LINE_CHARS = 1000
MAX_DIGIT_SHARE = 0.2
MIN_LETTER_SHARE = 0.35
LONG_LINE_CHARS = 30
MAX_SHARED_LINES = 0.2

_COPYLEFT_NOTICE = re.compile(
    rb"GNU (Lesser |Library |Affero )?General Public|\bA?L?GPL(v?[23])?\b|Mozilla Public License"
    rb"|All rights reserved\. NVIDIA|NVIDIA CORPORATION",
    re.IGNORECASE,
)
_VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|third_?party|externals?|extern)/")


@dataclasses.dataclass(frozen=True)
class Document:
    """One source file, UTF-8.

    `package` is `name version` of the distribution, or `python 3.x.y` for the standard library;
    `name` is the path relative to the package's root, with forward slashes.
    """

    package: str
    licence: str
    name: str
    data: bytes


def standard_library() -> Iterator[Document]:
    """The `*.py` files of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    package = f"python {platform.python_version()}"
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not re.search(r"(^|/)(site-packages|dist-packages)/", name):
            yield Document(package, "PSF-2.0", name, path.read_bytes())


def long_lines(data: bytes) -> frozenset[bytes]:
    """The distinct lines of at least 30 characters, without surrounding white space."""
    lines = (line.strip() for line in data.splitlines())
    return frozenset(line for line in lines if len(line) >= LONG_LINE_CHARS)


class HeldOut:
    """Recognizes held-out modules, given by file name, and files that resemble them."""

    def __init__(self, modules: dict[str, bytes]) -> None:
        self._names = frozenset(modules)
        self._sizes: dict[str, int] = {}
        self._owners: dict[bytes, list[str]] = collections.defaultdict(list)
        for name, data in modules.items():
            lines = long_lines(data)
            self._sizes[name] = len(lines)
            for line in lines:
                self._owners[line].append(name)

    def resembles(self, document: Document) -> str | None:
        """The held-out module the document is named like, or copies from, or None."""
        basename = document.name.rsplit("/", 1)[-1]
        if basename in self._names:
            return basename
        shared: collections.Counter[str] = collections.Counter()
        for line in long_lines(document.data):
            shared.update(self._owners.get(line, ()))
        for name, count in shared.items():
            if count > MAX_SHARED_LINES * self._sizes[name]:
                return name
        return None


def reason_to_drop(document: Document) -> str | None:
    """Why a document is unfit for training whatever else is in the corpus, or None."""
    data = document.data
    if not MIN_FILE_BYTES <= len(data) <= MAX_FILE_BYTES:
        return "size"
    if _VENDORED.search(document.name):
        return "vendored"
    if _COPYLEFT_NOTICE.search(data[:4096]):
        return "licence notice"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\0" in text:
        return "not text"
    return "generated" if _is_table(text) else None


def _is_table(text: str) -> bool:
    """Whether the text is a generated table: endless lines, or mostly digits and punctuation."""
    if max(map(len, text.splitlines()), default=0) > MAX_LINE_CHARS:
        return True
    visible = "".join(text.split())
    digits = sum(map(visible.count, "0123456789"))
    # Counting letters by deletion is fast enough for hundreds of megabytes.
    letters = len(visible) - len(visible.translate(_NO_LETTERS))
    return digits > MAX_DIGIT_SHARE * len(visible) or letters < MIN_LETTER_SHARE * len(visible)


_NO_LETTERS = {ord(c): None for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def select(
    documents: Iterable[Document], held_out: HeldOut
) -> tuple[list[Document], dict[str, int], list[str]]:
    """Filters and deduplicates; of equal contents the first is kept.

    Returns the documents kept; how many were dropped for which reason; and the files dropped
    because they resemble a held-out module.
    """
    kept, seen, resembling = [], set(), []
    dropped: collections.Counter[str] = collections.Counter()
    for document in documents:
        reason = reason_to_drop(document)
        digest = hashlib.sha256(document.data).digest()
        if reason is None and digest in seen:
            reason = "copy"
        if reason is None and (module := held_out.resembles(document)):
            reason = "held out"
            resembling.append(f"{document.package}: {document.name} ({module})")
        if reason is not None:
            dropped[reason] += 1
            continue
        seen.add(digest)
        kept.append(document)
    return kept, dict(dropped), resembling


def join(contents: Iterable[bytes]) -> np.ndarray:
    """A uint8 stream: byte 0, a document free of it, byte 0, a document, ... and a final byte 0."""
    return np.frombuffer(b"".join(b"\0" + data for data in contents) + b"\0", np.uint8)


def read_held_out(names: Iterable[str]) -> dict[str, bytes]:
    """Contents of the named modules of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    return {name: (root / name).read_bytes() for name in names}


def read_texts(paths: Iterable[Path]) -> list[bytes]:
    """Contents of text files, in the order of their paths within each folder.

    Of folders all text files are read, at any depth, except hidden and empty ones. Neighbours in a
    folder stay neighbours: at a long context they are what a model can use. Raises
    FileNotFoundError if a path does not exist, ValueError if a named file is not UTF-8 text without
    byte 0.
    """
    contents = []
    for path in paths:
        if path.is_dir():
            inside = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file())
            visible = [file for file in inside if not any(p.startswith(".") for p in file.parts)]
            texts = ((path / file).read_bytes() for file in visible)
            contents += [data for data in texts if data and _is_text(data)]
            continue
        data = path.read_bytes()
        if not _is_text(data):
            raise ValueError(f"{path} must be UTF-8 text without byte 0, which separates documents")
        contents.append(data)
    return contents


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
