"""Files that name a cache for every layer of a model: what `turbojax calibrate` writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax import _json, _writing

_VERSION = 1
_KEYS = ("version", "layers", "about")


def is_name(name: str) -> bool:
    """Whether this names a file of layers rather than a cache: it ends with ``.json``."""
    return name.endswith(".json")


def read_layers(path: Path) -> tuple[str, ...]:
    """The names in a file, a cache for each layer; whether such caches exist is not checked.

    Raises OSError if there is no such file, ValueError (naming it) if it is of another version or
    holds something else.
    """
    found = _json.read_object(path)
    version, names = found.get("version"), found.get("layers")
    if isinstance(version, bool) or version != _VERSION:
        raise ValueError(f"{path}: version={_json.shown(version)} must be {_VERSION}")
    if unknown := [key for key in found if key not in _KEYS]:
        names_of_keys = ", ".join(_KEYS)
        raise ValueError(f"{path}: {_json.shown(unknown[0])} must be one of {names_of_keys}")
    if not isinstance(names, list) or not names or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"{path}: layers={_json.shown(names)} must be a list of names, one for each layer"
        )
    return tuple(names)


def write_layers(path: Path, names: Sequence[str], about: Mapping[str, Any] | None = None) -> None:
    """Writes such a file, whole or not at all.

    Args:
      path: the file; it is replaced.
      names: of a cache for each layer, see `turbojax.evaluation.method`.
      about: where the choice comes from, in plain JSON values; nothing reads it.

    Raises:
      OSError: if it cannot be written.
    """
    content = {"version": _VERSION, "layers": list(names)}
    if about is not None:
        content["about"] = dict(about)
    _writing.write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
