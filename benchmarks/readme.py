"""The figures of README.md, from the committed results: what stands between its markers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.stored import dated, newest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_LINK = "benchmarks/results/"
# Of a record of the GPU tests, what runs them.
_GPU_TIERS = {
    "gpu_tests": "test-gpu",
    "gpu_tests_several": "test-gpus",
    "gpu_tests_all": "test-gpu-all",
}


def figures_table() -> str:
    """Three figures that say what turbojax is good for."""
    return summary.figures_table(RESULTS, _LINK)


def gpu_tests_line() -> str:
    """The last run of each tier of the GPU tests, or that there is none."""
    parts = []
    for kind, target in _GPU_TIERS.items():
        found = newest(RESULTS, (kind,))
        if found is not None:
            parts.append(_gpu_tests_part(target, *found))
    return "; ".join(parts) + "." if parts else "No run of the GPU tests is recorded yet."


def _gpu_tests_part(target: str, name: str, record: Mapping[str, Any]) -> str:
    commit, _, changed = (record["commit"] or "unknown").partition(", ")
    counts = ", ".join(f"{record[what]:,} {what}" for what in ("passed", "failed", "skipped"))
    if "of" in record:  # calls that did not reach all tests
        counts = counts.replace(" passed", f" of {record['of']:,} passed", 1)
    calls = f" and before, in {len(record['calls'])} calls" if "calls" in record else ""
    return (
        f"`make {target}`: {counts}, in {record['seconds'] / 60:.1f} minutes "
        f"with {record['workers']} processes ({record['device']}, driver {record['driver']}, "
        f"jax {record['jax']}, {record['date']}, "
        f"commit {commit[:10]}{' with changes' if changed else ''}{calls}: "
        f"[{name}]({_LINK}{name}))"
    )


TABLES: dict[str, Callable[[], str]] = {"figures": figures_table, "gpu tests": gpu_tests_line}
# What a table needs; others can say that there is nothing yet.
_RESULTS_OF = {"figures": summary.NEEDED}


def active() -> dict[str, Callable[[], str]]:
    return {
        name: table
        for name, table in TABLES.items()
        if all(dated(RESULTS, needed) for needed in _RESULTS_OF.get(name, ()))
    }


def fill(
    text: str, chosen: Mapping[str, Callable[[], str]] | None = None, file: str = "README.md"
) -> str:
    """The text with every marked region replaced by its table."""
    for name, table in (active() if chosen is None else chosen).items():
        begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
        if begin not in text or end not in text:
            raise ValueError(f"{file} must hold {begin!r} and {end!r}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"
    return text
