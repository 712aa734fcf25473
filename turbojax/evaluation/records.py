"""Results that are kept as they come, and what they depend on, so that an evaluation goes on."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from turbojax import _json, _writing
from turbojax._environment import environment
from turbojax._sums import checksums
from turbojax.evaluation.decoding import AnyDecoder

Json = Any
"""What JSON can hold."""

_SECONDS = "seconds"
_MEASURES = "measures"


class Records:
    """Rows of results under what they were made with, in one JSON file that is always whole.

    The file holds the identity's keys, then the rows, each at its path: ``("methods", "kv4",
    "text")`` is found under ``["methods"]["kv4"]["text"]``. Every row is on the disk before the
    next one is begun. ``"seconds"`` says how long each took; it is no part of the results.

    Args:
      path: the file; None to keep nothing. Rows that it holds already are kept and not made again.
      identity: what the results depend on. A file with another identity is an error.
      notes: further keys, which are not compared, such as the date.
      measures: what further results depend on, by name, kept under ``"measures"``. Those that the
        file has as well must be the same; others are added to it.

    Attributes:
      found: how many rows the file had.

    Raises:
      ValueError: if the file has another identity, naming what differs, or is no such file.
      OSError: if it cannot be read.
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, Json],
        notes: Mapping[str, Json] | None = None,
        measures: Mapping[str, Json] | None = None,
    ) -> None:
        self._path = path
        self._identity: dict[str, Json] = json.loads(_text(dict(identity)))
        self._notes: dict[str, Json] = json.loads(_text(dict(notes or {})))
        self._measures: dict[str, Json] = json.loads(_text(dict(measures or {})))
        self._rows: dict[str, Json] = {}
        self._seconds: dict[str, float] = {}
        if path is not None and path.exists() and path.stat().st_size:
            self._read(path)
        self.found = len(self._seconds)

    @property
    def document(self) -> dict[str, Json]:
        """All of it: plain JSON values, of which NaN are None."""
        whole = {**self._notes, **self._identity, **self._rows, _SECONDS: self._seconds}
        if self._measures:
            whole[_MEASURES] = self._measures
        copy: dict[str, Json] = json.loads(_text(whole))
        return copy

    def has(self, path: Sequence[str]) -> bool:
        """Whether a row is there."""
        return _key(path) in self._seconds

    def row(self, path: Sequence[str], make: Callable[[], Json]) -> Json:
        """A row: what the file has, or what `make` makes, which is then in the file.

        Args:
          path: where it lies; no other row's path begins with it.
          make: returns plain JSON values; numbers may be NaN, which become None.

        Raises:
          OSError: if the file cannot be written.
        """
        key, place = _key(path), self._rows
        for name in path[:-1]:
            place = place.setdefault(name, {})
        if key not in self._seconds or path[-1] not in place:
            begun = time.perf_counter()
            place[path[-1]] = json.loads(_text(make()))
            self._seconds[key] = round(time.perf_counter() - begun, 2)
            self.write()
        return place[path[-1]]

    def write(self) -> None:
        """Writes the file, if there is one; OSError if it cannot be written."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _writing.write_text(self._path, json.dumps(self.document, indent=2) + "\n")

    def _read(self, path: Path) -> None:
        try:
            found = _json.parse(path.read_bytes())
        except ValueError:  # no JSON, or no text
            found = None
        if not isinstance(found, dict) or not isinstance(found.get(_SECONDS), dict):
            raise ValueError(f"{path} holds something else than results of an evaluation")
        self._check(path, found)
        self._seconds = found[_SECONDS]
        self._measures = {**(found.get(_MEASURES) or {}), **self._measures}
        own = {*self._identity, *self._notes, _SECONDS, _MEASURES}
        self._rows = {key: value for key, value in found.items() if key not in own}

    def _check(self, path: Path, found: Mapping[str, Json]) -> None:
        """Raises ValueError if a file's identity is another."""
        differ = _differences(self._identity, {key: found.get(key) for key in self._identity})
        theirs = found.get(_MEASURES) or {}
        for name in (x for x in self._measures if x in theirs):
            differ += _differences(self._measures[name], theirs[name], f"{_MEASURES}.{name}")
        if differ:
            raise ValueError(
                f"{path} holds results of another evaluation: {'; '.join(differ[:4])}. Give "
                "another file, or what it was made with"
            )


def _differences(ours: Json, theirs: Json, name: str = "") -> list[str]:
    """What differs, in words, at any depth."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in [*ours, *(x for x in theirs if x not in ours)]:
            where = f"{name}.{key}" if name else key
            found += _differences(ours.get(key), theirs.get(key), where)
        return found
    if ours == theirs:
        return []
    return [f"{name} is {_json.shown(theirs)} there and {_json.shown(ours)} here"]


def _key(path: Sequence[str]) -> str:
    return " ".join(path)


def _text(value: Json) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Json) -> Json:
    """The value with None for numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def describe_model(decoder: AnyDecoder) -> dict[str, Any]:
    """Shape, dtype and a checksum of all weights, wherever they came from."""
    config = decoder.config
    leaves, _ = jax.tree_util.tree_flatten_with_path(decoder)
    arrays = {f"{i:05d}{jax.tree_util.keystr(path)}": x for i, (path, x) in enumerate(leaves)}
    digest = hashlib.sha256(np.asarray(checksums(arrays)).tobytes())
    # The numbers alone do not say how they are read.
    for name, x in arrays.items():
        digest.update(f"{name} {x.dtype} {x.shape}".encode())
    digest.update(repr(config).encode())
    return {
        "kind": type(decoder).__name__,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_length": config.max_length,
        "dtype": str(decoder.dtype),
        "weight_bytes": decoder.nbytes,
        "checksum": digest.hexdigest()[:16],
    }


def describe_texts(texts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """How many windows there are of every text, and a checksum of their tokens."""
    return {
        name: {
            "windows": len(rows),
            "checksum": hashlib.sha256(rows.astype("<i4").tobytes()).hexdigest()[:16],
        }
        for name, rows in texts.items()
    }


def describe_machine() -> tuple[dict[str, str], dict[str, str]]:
    """What bits depend on, and what only dates the results."""
    found = environment()
    dates = {key: found.pop(key) for key in ("date", "python")}
    return found, dates
