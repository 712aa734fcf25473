"""The log of a run as it is read: it may have been cut off, or belong to something else."""

from pathlib import Path
from typing import Any

from turbojax import _json
from turbojax._checks import is_finite_number
from turbojax._json import shown

_LONGEST_LOG = 256 * 2**20
"""Bytes that a log may have: enough for ten million steps."""


def read_content(path: Path) -> dict[str, Any]:
    """The log of a run; OSError if there is none, ValueError naming the file if it is no log."""
    content = _json.read_object(path, most=_LONGEST_LOG)
    kinds = {"identity": dict, "losses": list, "records": list}
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path} must be the log of a run of turbojax train")
    _check_numbers(path, "losses", content["losses"])
    rows = {name: content.get(name, []) for name in ("records", "evaluations")}
    for name, found in rows.items():
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ValueError(f"{path}: {name} must be a list of objects")
        _check_numbers(path, f"{name}: step", [row.get("step") for row in found])
    _check_numbers(path, "records: seconds", [row.get("seconds") for row in rows["records"]])
    return content


def _check_numbers(path: Path, name: str, values: list[Any]) -> None:
    for value in values:
        if not is_finite_number(value):
            raise ValueError(f"{path}: {name} holds {shown(value)}, must hold finite numbers")
