"""The log of a run: kept through interruptions, and read though it may be anything."""

import json
from pathlib import Path
from typing import Any

from turbojax import _json, _writing
from turbojax._checks import is_finite_number
from turbojax._json import shown
from turbojax.finetune.settings import with_defaults

LOG_NAME = "log.json"
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


class Log:
    """The run's log, which survives interruptions.

    The file at `path` is continued if it exists; what `header` has under ``"identity"`` must equal
    the file's, else it is another run's: ValueError. With `is_kept` False the log is neither read
    nor written, as another process keeps it.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, is_kept: bool = True) -> None:
        self._path, self._is_kept = path, is_kept
        # As JSON gives it back, with lists for tuples.
        header = json.loads(json.dumps(header))
        old = read_content(path) if is_kept and path.exists() else {}
        held, wanted = (with_defaults(x["identity"]) for x in (old or header, header))
        if other := _differences(held, wanted):
            raise ValueError(
                f"{str(path.parent)!r} holds another run, with {'; '.join(other)}: "
                "choose another folder, or the same settings, model and data"
            )
        empty: dict[str, Any] = {"losses": [], "records": [], "evaluations": []}
        self.content = {**empty, **old, **header}

    @property
    def seconds(self) -> float:
        """Time in training steps so far, without compilation, evaluation and saving."""
        records = self.content["records"]
        return records[-1]["seconds"] if records else 0.0

    def rewind(self, step: int) -> None:
        """Forgets what lies after `step`, to be computed again; ValueError if there is less."""
        if self._is_kept and len(self.content["losses"]) < step:
            raise ValueError(
                f"{self._path} holds {len(self.content['losses'])} steps, must hold the {step} "
                "of the checkpoint beside it"
            )
        self.content["losses"] = self.content["losses"][:step]
        for name in ("records", "evaluations"):
            self.content[name] = [row for row in self.content[name] if row["step"] <= step]

    def write(self) -> None:
        """Writes the file, so that there is always a whole one."""
        if self._is_kept:
            _writing.write_text(self._path, json.dumps(self.content) + "\n")


def _differences(held: Any, wanted: Any, name: str = "") -> list[str]:
    """What differs between two descriptions of a run, by the names of the single values."""
    if isinstance(held, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys((*held, *wanted))
        found = [
            _differences(held.get(k), wanted.get(k), f"{name}.{k}" if name else k) for k in keys
        ]
        return [line for lines in found for line in lines]
    return [] if held == wanted else [f"{name}={shown(held)} instead of {shown(wanted)}"]
