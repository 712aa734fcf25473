"""Results as files, called by what was measured and the date."""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from benchmarks.tables import Result
from turbojax import _writing

# What two runs must have in common to be stored in one file.
SAME = ("device", "python", "jax", "turbojax")


def dated(results: Path, prefix: str) -> list[Path]:
    """The results of this name, each with its date, in that order."""
    every = results.glob(f"{prefix}_*.json")
    return sorted(path for path in every if path.stem.rpartition("_")[0] == prefix)


def newest(results: Path, prefixes: tuple[str, ...]) -> tuple[str, Result] | None:
    """Name and content of the newest result of one of these names, after which the date comes."""
    paths = [path for prefix in prefixes for path in dated(results, prefix)]
    if not paths:
        return None
    path = max(paths, key=lambda path: path.stem.rpartition("_")[2])
    return path.name, json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, result: Result, *, allow_nan: bool = False) -> None:
    """Writes a result so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _writing.write_text(path, json.dumps(result, indent=1, allow_nan=allow_nan) + "\n")


def save(out: Path | None, result: Result) -> None:
    """Writes what a command measured, or prints it."""
    if out is None:
        print(json.dumps(result, indent=1))
    else:
        write(out, result, allow_nan=True)


def parser(description: str, *, required: bool = True, quick: bool = False) -> ArgumentParser:
    made = ArgumentParser(description=description)
    help = "JSON file to write" if required else "JSON file to write; printed if not given"
    made.add_argument("--out", type=Path, required=required, help=help)
    if quick:
        made.add_argument("--quick", action="store_true", help="a small sample")
    return made


def previous(path: Path, machine: dict[str, Any]) -> Result | None:
    """The result to continue, or to take figures from, or None."""
    if not path.exists():
        return None
    old: Result = json.loads(path.read_text(encoding="utf-8"))
    differ = [name for name in SAME if old.get(name) != machine[name]]
    if differ:
        sys.exit(
            f"{path} was measured with "
            + ", ".join(f"{name} {old.get(name)} (here {machine[name]})" for name in differ)
            + ": it cannot be continued"
        )
    return old
