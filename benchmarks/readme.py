"""Writes the tables of README.md from the committed results.

`python -m benchmarks.readme` rewrites what stands between the markers; with `--check` it only
says whether that would change anything.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import (
    fireq_tables,
    flax_tables,
    model_tables,
    paged_tables,
    pooled_tables,
    tables,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def dated(results: Path, prefix: str) -> list[Path]:
    """The results of this name, each with its date, in that order."""
    every = results.glob(f"{prefix}_*.json")
    return sorted(path for path in every if path.stem.rpartition("_")[0] == prefix)


def latest(prefix: str) -> tuple[str, dict[str, Any]]:
    """Name and content of the newest result of this name, after which the date comes."""
    path = dated(RESULTS, prefix)[-1]
    return path.name, json.loads(path.read_text(encoding="utf-8"))


def demo_table() -> str:
    """What `make demo` printed."""
    name, report = latest("demo")
    settings = report["settings"]
    first = report["results"][0]
    lines = [
        "| cache | bits per byte | same greedy byte | cache bytes | smaller than bf16 |",
        "|---|---|---|---|---|",
    ]
    for row in report["results"]:
        difference = row["bits_per_byte"] - first["bits_per_byte"]
        cost = "" if row is first else f" ({difference:+.4f})"
        lines.append(
            f"| {row['name']} | {row['bits_per_byte']:.4f}{cost} | {row['agreement']:.1%} "
            f"| {row['nbytes']:,} | {row['compression_ratio']:.2f}x |"
        )
    lines += [
        "",
        f"`{Path(settings['file']).name}`: {settings['prompt_bytes']} bytes prefilled, "
        f"{settings['new_bytes']} decoded; {report['device']}, jax {report['jax']}, "
        f"{report['date']} ([{name}](benchmarks/results/{name})).",
    ]
    return "\n".join(lines)


def quality_table() -> str:
    """What caches cost over all held-out files."""
    name, report = latest("cache_quality")
    caches = report["caches"]
    base = caches["exact"]
    lines = [
        "| cache | bits per byte | cost | same greedy byte | smaller than exact |",
        "|---|---|---|---|---|",
    ]
    for label, row in caches.items():
        cost = row["bits_per_byte"] - base["bits_per_byte"]
        ratio = base["cache_bytes_per_sequence"] / row["cache_bytes_per_sequence"]
        lines.append(
            f"| {label} | {row['bits_per_byte']:.4f} | {cost:+.4f} "
            f"| {row['same_greedy_choice']:.1%} | {ratio:.2f}x |"
        )
    lines += [
        "",
        f"{report['decoded_bytes']:,} bytes of {report['windows']} windows, positions "
        f"{report['prefilled']} to {report['context'] + 1}, decoded one by one; "
        f"{report['device']}, jax {report['jax']}, {report['date']} "
        f"([{name}](benchmarks/results/{name})).",
    ]
    return "\n".join(lines)


def decode_table() -> str:
    """Decode of one model against cuDNN, on Hopper."""
    name, report = latest("hopper")
    table = tables.decode_table(report, tables.README_DECODE_METHODS, README_MODEL)
    return f"{table} {tables.source(name, report, 'benchmarks/results/')}"


def prefill_table() -> str:
    """Prefill of one model against cuDNN, on Hopper."""
    name, report = latest("hopper")
    table = tables.prefill_table(report, README_MODEL, short=True)
    return f"{table} {tables.source(name, report, 'benchmarks/results/')}"


def pooled_table() -> str:
    """Pooled attention against cuDNN's dense attention."""
    return pooled_tables.readme_table(*latest("pooled"))


def fireq_table() -> str:
    """INT4 products against XLA's in bfloat16 and e4m3."""
    return fireq_tables.readme_table(*latest("fireq"))


def paged_table() -> str:
    """Attention over pages against cuDNN on dense bfloat16."""
    return paged_tables.readme_table(*latest("paged"))


def flax_table() -> str:
    """An attention layer in nnx: Flax's own module against ours."""
    return flax_tables.readme_table(*latest("flax"))


def families_table() -> str:
    """Decode steps of whole models of several families."""
    return model_tables.families_readme_table(*latest("families"))


README_MODEL = "llama3-8b"
TABLES: dict[str, Callable[[], str]] = {
    "demo": demo_table,
    "quality": quality_table,
    "decode": decode_table,
    "prefill": prefill_table,
    "pooled": pooled_table,
    "fireq": fireq_table,
    "paged": paged_table,
    "flax": flax_table,
    "families": families_table,
}
# Tables of results that need a GPU and may not be there yet.
_RESULT_OF = {
    "decode": "hopper",
    "prefill": "hopper",
    "pooled": "pooled",
    "fireq": "fireq",
    "paged": "paged",
    "flax": "flax",
    "families": "families",
}


def active() -> dict[str, Callable[[], str]]:
    """The tables whose results are there."""
    return {
        name: table
        for name, table in TABLES.items()
        if name not in _RESULT_OF or dated(RESULTS, _RESULT_OF[name])
    }


def fill(
    text: str, chosen: Mapping[str, Callable[[], str]] | None = None, file: str = "README.md"
) -> str:
    """The text with every marked region replaced by its table.

    Args:
      text: holds the markers of all tables.
      chosen: tables by name; those of README.md if not given.
      file: the text's name, for the message.

    Raises:
      ValueError: if a marker is missing.
    """
    for name, table in (active() if chosen is None else chosen).items():
        begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
        if begin not in text or end not in text:
            raise ValueError(f"{file} must hold {begin!r} and {end!r}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{table()}\n{end}{rest.split(end, 1)[1]}"
    return text


def main() -> None:
    """Rewrites README.md, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if README.md is out of date")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = fill(old)
    if check and new != old:
        sys.exit("README.md is out of date: run python -m benchmarks.readme")
    if not check:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
