"""How long the tests took, against their budgets and against last time: `make test-times`.

Every run of the tests leaves its times in `.cache/times/`, as pytest's JUnit file. The committed
table, `tests/times.tsv`, holds what they were on one machine when somebody last wrote it
(``python -m tests.clock --write "two cores of an Intel Xeon, 2026-11-29"``). Nothing fails here: a
machine may be slow. What has grown is named, so that it is not the next change that is refused.
"""

import argparse
import statistics
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / ".cache" / "times"
TABLE = ROOT / "tests" / "times.tsv"
BUDGETS = {
    "test": 8.5,
    "test-mesh": 1.1,
    "test-optimized": 1.1,
    "test-slow": 14.0,
    "test-slow-mesh": 2.0,
    "test-slow-optimized": 2.8,
}
"""Minutes of the runs that CI makes, on two cores and with nothing compiled before."""

SHOWN = 0.5  # seconds of a function below which the table has it in its file's other tests
OTHERS = "(others)"

Times = dict[tuple[str, str, str], tuple[int, float]]
"""Cases and seconds by run, file and function."""


def read_run(path: Path) -> tuple[float, Times]:
    """What a run took in seconds, and each of its test functions."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{path} must be a JUnit file of pytest's, which holds a testsuite")
    times: Times = defaultdict(lambda: (0, 0.0))
    for case in suite.iter("testcase"):
        parts = case.attrib["classname"].split(".")
        depth = next((i for i, x in enumerate(parts) if x.startswith("test_")), len(parts) - 1) + 1
        function = "::".join([*parts[depth:], case.attrib["name"].partition("[")[0]])
        key = path.stem, "/".join(parts[:depth]) + ".py", function
        count, seconds = times[key]
        times[key] = count + 1, seconds + float(case.attrib["time"])
    return float(suite.attrib["time"]), dict(times)


def write_table(path: Path, times: Times, machine: str) -> None:
    """Functions of half a second and more, and of each file the others together."""
    rows: Times = defaultdict(lambda: (0, 0.0))
    for (run, file, function), (count, seconds) in times.items():
        key = run, file, function if seconds >= SHOWN else OTHERS
        rows[key] = rows[key][0] + count, rows[key][1] + seconds
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], -row[1][1], row[0]))
    lines = ["\t".join([*key, str(count), f"{seconds:.1f}"]) for key, (count, seconds) in ordered]
    head = [f"# Seconds of the tests on {machine}", "run\tfile\tfunction\tcases\tseconds"]
    path.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


def read_table(path: Path) -> Times:
    """What `write_table` wrote."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[2:]]
    return {(run, file, name): (int(count), float(s)) for run, file, name, count, s in rows}


def grown(now: Times, before: Times) -> list[tuple[float, str]]:
    """Functions that took three seconds more, and half as long again, than this machine explains.

    The machine is as much slower than the table's as the median function is.
    """
    common = [key for key in now.keys() & before.keys() if before[key][1] >= SHOWN]
    pace = statistics.median([now[key][1] / before[key][1] for key in common] or [1.0])
    found = []
    for key, (_, seconds) in now.items():
        usual = pace * before.get(key, (0, 0.0))[1]
        if seconds > max(usual + 3.0 * pace, 1.5 * usual):
            run, file, function = key
            text = f"{file}::{function} ({run}): {seconds:.1f} s, where {usual:.1f} are usual"
            found.append((seconds - usual, text))
    return sorted(found, reverse=True)


def report(paths: Iterable[Path], before: Times) -> tuple[Times, list[str]]:
    """All times, and what to say of them."""
    times: Times = {}
    lines, total = [], 0.0
    for path in paths:
        seconds, of_run = read_run(path)
        times |= of_run
        total += seconds
        budget = BUDGETS.get(path.stem)
        line = f"{path.stem}: {sum(x for x, _ in of_run.values()):,} tests, {seconds / 60:.1f} min"
        if budget is not None:
            line += f" of {budget:g}" + (": OVER ITS BUDGET" if seconds > 60 * budget else "")
        lines.append(line)
    lines.append(f"all: {total / 60:.1f} min")
    lines += [f"  grew: {text}" for _, text in grown(times, before)[:20]]
    return times, lines


def main() -> None:
    parser = argparse.ArgumentParser(description="what the last runs of the tests took")
    parser.add_argument("--write", metavar="MACHINE", help="write the table, of this machine")
    machine = parser.parse_args().write
    paths = sorted(TIMES.glob("*.xml"))
    if not paths:
        parser.error(f"{TIMES} holds no times: run `make test` first")
    times, lines = report(paths, read_table(TABLE) if TABLE.exists() else {})
    print("\n".join(lines))
    if machine:
        write_table(TABLE, times, machine)


if __name__ == "__main__":
    main()
