"""The training corpus: Python source files of this interpreter, under licences that allow it.

Candidates are the `*.py` files of the standard library and of every installed distribution whose
metadata declares a permissive licence. Dropped are copies, generated tables, files of vendored or
differently licensed code, and whatever resembles a held-out module. What is left becomes one
stream of bytes, every document preceded by byte 0.
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = 0
MAX_FILE_BYTES = 1_000_000
MIN_FILE_BYTES = 64
MAX_LINE_CHARS = 1000
MAX_DIGIT_SHARE = 0.2
MIN_LETTER_SHARE = 0.35
LONG_LINE_CHARS = 30
MAX_SHARED_LINES = 0.2

# SPDX identifiers and the usual spellings, lower case. Copyleft licences, weak ones too, and
# everything unknown are left out.
_PERMISSIVE = re.compile(
    r"0bsd|apache-?2?(\.0)?|blueoak-1\.0\.0|bsd(-[23]-clause)?|bsl-1\.0|cc0-1\.0|cnri-python|hpnd|isc"
    r"|mit(-0|-cmu)?|ncsa|ofl-1\.1|psf(-2\.0)?|python-2\.0|unicode-3\.0|unlicense|zlib|zpl-2\.1"
)
# Whole sentences and trove classifiers, matched after normalization.
_PERMISSIVE_PHRASES = re.compile(
    r"(the )?(mit( license)?|(new |modified |revised |simplified )?bsd( license)?"
    r"|(2|3)[- ]clause bsd( license)?|bsd[- ](2|3)[- ]clause( license)?"
    r"|apache( software)?( license)?,?( \(?version)?( 2(\.0)?)?\)?( license)?"
    r"|isc( license( \(iscl\))?)?|python software foundation( license)?|psf( license)?"
    r"|mit no attribution license \(mit-0\)"
    r"|historical permission notice and disclaimer \(hpnd\)|zlib/libpng license"
    r"|(the )?unlicense \(unlicense\))"
)
_COPYLEFT = re.compile(r"gpl|gnu |affero|copyleft|mozilla|mpl|eupl|proprietary|nvidia|sspl|cddl")
_COPYLEFT_NOTICE = re.compile(
    rb"GNU (Lesser |Library |Affero )?General Public|\bA?L?GPL(v?[23])?\b|Mozilla Public License"
    rb"|All rights reserved\. NVIDIA|NVIDIA CORPORATION",
    re.IGNORECASE,
)
_VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|third_?party|externals?|extern)/")


@dataclasses.dataclass(frozen=True)
class Document:
    """One source file.

    Attributes:
      package: `name version` of the distribution, or `python 3.x.y` for the standard library.
      licence: the licence declared for the package.
      name: path relative to the package's root, with forward slashes.
      data: the content, UTF-8.
    """

    package: str
    licence: str
    name: str
    data: bytes


def permissive_licence(metadata: Any) -> str | None:
    """The declared licence of a distribution, if it is permissive.

    The first of these that is declared decides: `License-Expression`, the `License ::`
    classifiers, a `License` field of one line.

    Args:
      metadata: the distribution's metadata, an `email.message.Message`.

    Returns:
      The licence as declared, or None if none is declared, or any part is not permissive.
    """
    expression = metadata.get("License-Expression")
    if expression:
        terms = re.split(r"\s+(?:AND|OR)\s+|[()]", expression, flags=re.IGNORECASE)
        return _if_permissive(expression, [term for term in terms if term.strip()])
    classifiers = [
        line.split("::")[-1].strip()
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::") and line.strip() != "License :: OSI Approved"
    ]
    if classifiers:
        return _if_permissive(", ".join(classifiers), classifiers)
    field = (metadata.get("License") or "").strip()
    if field and "\n" not in field and len(field) < 80:
        terms = [field] if _is_permissive(field) else re.split(r"\s+(?i:and|or)\s+|[,/]", field)
        return _if_permissive(field, terms)
    return None


def _if_permissive(declared: str, terms: Iterable[str]) -> str | None:
    return declared if all(_is_permissive(term) for term in terms) else None


def _is_permissive(term: str) -> bool:
    term = " ".join(term.lower().replace('"', "").split())
    if _COPYLEFT.search(term):
        return False
    return any(p.fullmatch(term) for p in (_PERMISSIVE, _PERMISSIVE_PHRASES))


def standard_library() -> Iterator[Document]:
    """The `*.py` files of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    package = f"python {platform.python_version()}"
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not re.search(r"(^|/)(site-packages|dist-packages)/", name):
            yield Document(package, "PSF-2.0", name, path.read_bytes())


def installed_packages() -> Iterator[Document]:
    """The `*.py` files of every installed distribution under a permissive licence."""
    seen = set()
    for distribution in sorted(importlib.metadata.distributions(), key=_name_of):
        licence = permissive_licence(distribution.metadata)
        name = _name_of(distribution)
        if licence is None or name in seen:
            continue
        seen.add(name)
        package = f"{name} {distribution.version}"
        for file in sorted(distribution.files or (), key=str):
            path = Path(str(distribution.locate_file(file)))
            if file.suffix == ".py" and ".." not in file.parts and path.is_file():
                yield Document(package, licence, file.as_posix(), path.read_bytes())


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.metadata["Name"] or "").lower()


def long_lines(data: bytes) -> frozenset[bytes]:
    """The distinct lines of at least 30 characters, without surrounding white space."""
    lines = (line.strip() for line in data.splitlines())
    return frozenset(line for line in lines if len(line) >= LONG_LINE_CHARS)


class HeldOut:
    """Recognizes held-out modules and files that resemble them.

    Args:
      modules: file name -> content of the held-out modules.
    """

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
    """Filters and deduplicates.

    Args:
      documents: the candidates; of equal contents the first is kept.
      held_out: what must not be trained on.

    Returns:
      The documents kept; how many were dropped for which reason; and the files dropped because
      they resemble a held-out module.
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


def pack(documents: Iterable[Document], *, repeats: dict[str, int] | None = None) -> np.ndarray:
    """Joins documents into one stream, in an order that depends on their contents alone.

    Args:
      documents: what to join.
      repeats: package -> how often its documents occur, 1 for packages not named.

    Returns:
      `[bytes]` uint8: byte 0, a document, byte 0, a document, ... and a final byte 0.
    """
    chosen = []
    for document in documents:
        for copy in range((repeats or {}).get(document.package, 1)):
            key = hashlib.sha256(document.data + bytes([copy])).digest()
            chosen.append((key, document.data))
    chosen.sort(key=lambda item: item[0])
    joined = b"".join(b"\0" + data for _, data in chosen) + b"\0"
    return np.frombuffer(joined, np.uint8)


def read_held_out(names: Iterable[str]) -> dict[str, bytes]:
    """Contents of the named modules of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    return {name: (root / name).read_bytes() for name in names}


def build(folder: Path, held_out_names: Iterable[str], *, library_repeats: int = 1) -> None:
    """Writes `corpus.npy` (the stream, uint8) and `corpus.json` (what is in it) to `folder`.

    Args:
      folder: created if it does not exist.
      held_out_names: file names of the standard library modules to hold out.
      library_repeats: how often the standard library occurs in the stream.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modules = read_held_out(held_out_names)
    library = list(standard_library())
    kept, dropped, resembling = select([*library, *installed_packages()], HeldOut(modules))
    repeats = {library[0].package: library_repeats}
    stream = pack(kept, repeats=repeats)
    np.save(folder / "corpus.npy", stream)
    manifest = {
        "total_bytes": int(stream.size),
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        "held_out": sorted(modules),
        "repeats": repeats,
        "dropped_files": dropped,
        "resembling_held_out": resembling,
        "packages": _summarize(kept),
    }
    (folder / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _summarize(documents: Iterable[Document]) -> list[dict[str, Any]]:
    """Files and bytes per package, largest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        key = (document.package, document.licence)
        row = rows.setdefault(key, {"package": key[0], "licence": key[1], "files": 0, "bytes": 0})
        row["files"] += 1
        row["bytes"] += len(document.data)
    return sorted(rows.values(), key=lambda row: -row["bytes"])
