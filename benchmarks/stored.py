"""Finds committed results: files called by what was measured and the date."""

import json
from pathlib import Path

from benchmarks.tables import Result


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
