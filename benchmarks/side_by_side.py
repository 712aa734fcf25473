"""A suite in several processes, which compile at the same time and measure one after the other.

Not in threads: calls that jax records as CUDA graphs must not meet a compilation in their process.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import readme, stored
from benchmarks.catalogue import SUITES


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number")
    return int(text)


def part(text: str) -> tuple[int, int]:
    """``"i/n"`` as numbers."""
    number, _, whole = text.partition("/")
    if not (number.isdecimal() and whole.isdecimal() and int(number) < int(whole)):
        raise argparse.ArgumentTypeError(f"{text!r} must be I/N with 0 <= I < N")
    return int(number), int(whole)


def share(rows: list[tuple[Any, Any]], number: int, whole: int) -> list[tuple[Any, Any]]:
    """The rows of every `whole`-th group, from group `number` on."""
    groups = list(dict.fromkeys(id(group) for group, _ in rows))
    mine = set(groups[number::whole])
    return [(group, case) for group, case in rows if id(group) in mine]


def run(arguments: argparse.Namespace) -> None:
    """Runs the shares of a suite, and puts what they found into one file.

    Also if it is interrupted, or a share fails: then with what there is.
    """
    suite = SUITES[arguments.suite]
    rows = suite.rows(arguments.filter, quick=arguments.quick)
    if not rows:
        sys.exit(f"there is no row to run with --filter {arguments.filter!r}")
    processes = min(arguments.processes, len({id(group) for group, _ in rows}))
    folder = Path(tempfile.gettempdir()) if arguments.quick else readme.RESULTS
    out = arguments.out or folder / f"{suite.name}_{datetime.date.today().isoformat()}.json"
    with tempfile.TemporaryDirectory() as scratch:
        parts = [Path(scratch) / f"{number}.json" for number in range(processes)]
        if (arguments.resume or arguments.again) and out.exists():
            for path in parts:
                shutil.copy(out, path)
        children = [
            _start(arguments, f"{number}/{processes}", path) for number, path in enumerate(parts)
        ]
        try:
            codes = [child.wait() for child in children]
        finally:
            for child in children:
                child.terminate()  # after an interruption; one that has ended does not mind
                child.wait()
            merge([path for path in parts if path.exists()], out)
    if any(codes):
        sys.exit(f"shares of the suite ended with {codes}")


def _start(arguments: argparse.Namespace, which: str, out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks", "run", "--suite", arguments.suite]
    command += ["--filter", arguments.filter, "--seconds", str(arguments.seconds)]
    command += ["--quick"] if arguments.quick else []
    command += ["--resume"] if arguments.resume else []
    command += ["--again"] if arguments.again else []
    if arguments.repetitions is not None:
        command += ["--repetitions", str(arguments.repetitions)]
    command += ["--out", str(out), "--share", which]
    command += ["--ceilings", str(out.parent / "ceilings.json")]
    # The device's memory is shared; and lines of rows, not a bar of each share.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "TERM": "dumb"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def _runs(row: dict[str, Any]) -> int:
    return len(row.get("us_of_runs", [0])) if row["status"] == "ok" else 0


def merge(paths: list[Path], out: Path) -> None:
    """Puts shares of a suite into one file, in its order.

    Of a row's results the one of most runs counts, the last of these.
    """
    if not paths:
        sys.exit("no share has measured anything")
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    first = parts[0]
    for path, other in zip(paths, parts, strict=True):
        for name in (*stored.SAME, "suite", "quick"):
            if other[name] != first[name]:
                sys.exit(f"{path}: {name}={other[name]!r} must be {first[name]!r}")
    suite = SUITES[first["suite"]]
    found: dict[str, dict[str, Any]] = {}
    for row in (row for other in parts for row in other["rows"]):
        known = found.get(row["name"])
        if known is None or _runs(row) >= _runs(known):
            found[row["name"]] = row
    names = [group.name(case) for group, case in suite.rows(quick=first["quick"])]
    rows = suite.with_ratios([found[name] for name in names if name in found])
    stored.write(out, {**first, "rows": rows})
    print(out)
