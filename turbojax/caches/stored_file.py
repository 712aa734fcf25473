"""Arrays and their description in one safetensors file, written whole and checked when read.

The file's metadata holds the format, its version, a JSON text with everything but the arrays'
content (among it each array's dtype, shape and SHA-256), and the SHA-256 of that text. Other
modules decide which arrays represent a cache; this one only handles files.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from turbojax import _json, _writing

FORMAT = "turbojax-cache"
VERSION = 1

_PARTS = ("description", "metadata", "arrays")

# Not every reader of safetensors knows 8-bit floats: they are stored as bytes.
_AS_BYTES = {name: jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2")}


def write(
    path: str | os.PathLike[str],
    description: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a file; a reader sees either the old one or the complete new one.

    A file that exists is replaced, with the same permissions. `description` says what the arrays
    are, in plain JSON values; `metadata` is the user's own dict of strings (TypeError otherwise).
    Raises FileNotFoundError if there is no such folder, OSError if the file cannot be written.
    """
    text = json.dumps(
        {
            "description": dict(description),
            "metadata": _checked_metadata(metadata),
            "arrays": {name: _summary(x) for name, x in sorted(arrays.items())},
        }
    )
    stored = {
        name: np.ascontiguousarray(x).view(np.uint8) if x.dtype.name in _AS_BYTES else x
        for name, x in arrays.items()
    }
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "content": text,
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
    }
    with _writing.replacing(path) as draft:
        save_file(stored, draft, metadata=header)


class StoredFile:
    """An open file, see `open_file`; `description` and `metadata` are what was written."""

    def __init__(self, path: Path, tensors: Any) -> None:
        self.path = path
        self._tensors = tensors
        header = tensors.metadata() or {}
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{path} is no stored cache: its format is {_json.shown(header.get('format'))}, "
                f"must be {FORMAT!r}"
            )
        if header.get("version") != str(VERSION):
            raise ValueError(
                f"{path} has version {_json.shown(header.get('version'))}, this turbojax reads "
                f"'{VERSION}'"
            )
        text = header.get("content", "")
        if hashlib.sha256(text.encode()).hexdigest() != header.get("fingerprint"):
            raise ValueError(f"{path} is damaged: its fingerprint does not match its metadata")
        content = _parsed(path, text)
        self.description: dict[str, Any] = content["description"]
        self.metadata: dict[str, str] = content["metadata"]
        self._summaries: dict[str, dict[str, Any]] = content["arrays"]
        self._read: set[str] = set()
        differing = sorted(self._summaries.keys() ^ set(tensors.keys()))
        if differing:
            raise ValueError(
                f"{path} is damaged: its metadata and its arrays differ in {_json.shown(differing)}"
            )

    def require(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Raises ValueError unless the file holds an array of this name, shape and dtype."""
        self._require_name(name)
        held = "{dtype}{shape}".format(**self._summaries[name])
        wanted = f"{np.dtype(dtype).name}{list(shape)}"
        if held != wanted:
            raise ValueError(f"{self.path}: {name} is {_json.line(held)}, must be {wanted}")

    def require_all_read(self) -> None:
        """Raises ValueError if there are arrays that were not read."""
        if unread := sorted(self._summaries.keys() - self._read):
            raise ValueError(f"{self.path} holds {_json.shown(unread)} beyond what it describes")

    def read(self, name: str) -> np.ndarray:
        """One array, in host memory; ValueError if it is missing or not what was written."""
        self._require_name(name)
        self._read.add(name)
        x: np.ndarray = self._tensors.get_tensor(name)
        dtype = self._summaries[name]["dtype"]
        if dtype in _AS_BYTES and x.dtype == np.uint8:
            x = x.view(_AS_BYTES[dtype])
        if _summary(x) != self._summaries[name]:
            raise ValueError(f"{self.path} is damaged: {name} does not match its fingerprint")
        return x

    def _require_name(self, name: str) -> None:
        if name not in self._summaries:
            raise ValueError(f"{self.path} lacks {name}")


@contextlib.contextmanager
def open_file(path: str | os.PathLike[str]) -> Iterator[StoredFile]:
    """Opens a file that `write` wrote; arrays are read one by one.

    Raises ValueError, naming the file, if it is cut off, of another kind or version, or damaged.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"{str(source)!r} must be the file of a stored cache")
    try:
        opened = safe_open(source, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{source} is cut off, or no safetensors file: {error}") from error
    with opened as tensors:
        try:
            yield StoredFile(source, tensors)
        except KeyError as error:  # of a missing part of the description
            raise ValueError(
                f"{source} is damaged: its description lacks {_json.line(str(error))}"
            ) from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    """The content of a file's metadata text; ValueError, naming the file, if parts are missing."""
    try:
        content = _json.parse(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: its metadata are no JSON: {error}") from error
    parts = [content.get(x) for x in _PARTS] if isinstance(content, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path} is damaged: its metadata must hold {', '.join(_PARTS)}")
    if not all(isinstance(x, dict) for x in content["arrays"].values()):
        raise ValueError(f"{path} is damaged: its arrays must be described by objects")
    return content


def _summary(x: np.ndarray) -> dict[str, Any]:
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    digest = hashlib.sha256(data.data).hexdigest()
    return {"dtype": x.dtype.name, "shape": list(x.shape), "sha256": digest}


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a {type(metadata).__name__}, must be a dict of strings")
    items: list[tuple[Any, Any]] = list(metadata.items())
    for key, value in items:
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata[{key!r}]={value!r}: both must be strings")
    return dict(items)
