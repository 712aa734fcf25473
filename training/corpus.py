"""The training corpus: Python source files of this interpreter, under licences that allow it.

Candidates are the `*.py` files of the standard library and of every installed distribution whose
metadata declares a permissive licence. Dropped are copies, generated tables, files of vendored or
differently licensed code, and whatever resembles a held-out module. What is left becomes one
stream of bytes, every document preceded by byte 0.

A machine without these packages gets the corpus as one compressed file, see `training.archive`.
"""

import dataclasses
import email
import hashlib
import importlib.metadata
import json
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from turbojax import _writing
from turbojax.finetune.documents import (
    Document,
    HeldOut,
    join,
    read_held_out,
    select,
    standard_library,
)

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
    return join(data for _, data in chosen)


def packages_of_wheels(folder: Path) -> Iterator[Document]:
    """The `*.py` files of the wheels in a folder whose licence is permissive.

    Nothing is installed: wheels are archives. In order of their names.

    Args:
      folder: of `*.whl` files, as `pip download --no-deps --only-binary=:all:` leaves them.
    """
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = sorted(wheel.namelist())
            [about] = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            metadata = email.message_from_bytes(wheel.read(about))
            licence = permissive_licence(metadata)
            package = f"{metadata['Name'].lower()} {metadata['Version']}"
            for name in names if licence is not None else ():
                if name.endswith(".py"):
                    yield Document(package, licence or "", name, wheel.read(name))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What is trained on.

    Attributes:
      documents: in order of their packages and names.
      repeats: package -> how often its documents occur, 1 for packages not named.
      manifest: what `corpus.json` says.
    """

    documents: tuple[Document, ...]
    repeats: dict[str, int]
    manifest: dict[str, Any]

    def stream(self) -> np.ndarray:
        """`pack` of the documents."""
        return pack(self.documents, repeats=self.repeats)


def collect(
    held_out_names: Iterable[str],
    *,
    library_repeats: int = 1,
    wheels: Path | None = None,
    leave_out: Collection[str] = (),
) -> Corpus:
    """Finds, filters and describes what there is to train on.

    Args:
      held_out_names: file names of the standard library modules to hold out.
      library_repeats: how often the standard library occurs in the stream.
      wheels: a folder with more packages, see `packages_of_wheels`. Of one that is installed too,
        whatever its version, the installed one is taken.
      leave_out: names of packages, in lower case, that are not wanted.
    """
    modules = read_held_out(held_out_names)
    library = list(standard_library())
    installed = list(installed_packages())
    there = {document.package.split()[0] for document in installed}
    more = () if wheels is None else packages_of_wheels(wheels)
    added = [document for document in more if document.package.split()[0] not in there]
    candidates = [d for d in (*installed, *added) if d.package.split()[0] not in leave_out]
    kept, dropped, resembling = select([*library, *candidates], HeldOut(modules))
    kept.sort(key=lambda document: (document.package, document.name))
    repeats = {library[0].package: library_repeats}
    stream = pack(kept, repeats=repeats)
    manifest = {
        "total_bytes": int(stream.size),
        "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        "held_out": sorted(modules),
        "repeats": repeats,
        "dropped_files": dropped,
        "resembling_held_out": resembling,
        "packages": _summarize(kept),
    }
    return Corpus(tuple(kept), repeats, manifest)


def write(folder: Path, corpus: Corpus) -> None:
    """Writes `corpus.npy` (the stream, uint8) and `corpus.json` (what is in it) to `folder`.

    Args:
      folder: created if it does not exist.
      corpus: what to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "corpus.npy", corpus.stream())
    _writing.write_text(folder / "corpus.json", json.dumps(corpus.manifest, indent=1) + "\n")


def _summarize(documents: Iterable[Document]) -> list[dict[str, Any]]:
    """Files and bytes per package, largest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for document in documents:
        key = (document.package, document.licence)
        row = rows.setdefault(key, {"package": key[0], "licence": key[1], "files": 0, "bytes": 0})
        row["files"] += 1
        row["bytes"] += len(document.data)
    return sorted(rows.values(), key=lambda row: -row["bytes"])
