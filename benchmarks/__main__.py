"""`python -m benchmarks run` measures, `report` writes the docs."""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import readme, report, timing
from benchmarks.catalogue import SUITES
from benchmarks.machine import describe
from turbojax import _writing

# What two runs must have in common to be stored in one file.
_SAME = ("device", "python", "jax", "turbojax")


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result so that a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _writing.write_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def _previous(path: Path, machine: dict[str, Any]) -> dict[str, Any] | None:
    """The result to continue, or to take figures from, or None.

    Raises:
      SystemExit: if it comes from another machine or other versions.
    """
    if not path.exists():
        return None
    old = json.loads(path.read_text(encoding="utf-8"))
    differ = [name for name in _SAME if old.get(name) != machine[name]]
    if differ:
        sys.exit(
            f"{path} was measured with "
            + ", ".join(f"{name} {old.get(name)} (here {machine[name]})" for name in differ)
            + ": it cannot be continued"
        )
    return old


def run(arguments: argparse.Namespace) -> None:
    """Measures the rows asked for and writes the file after each."""
    deadline = time.monotonic() + arguments.seconds
    suite = SUITES[arguments.suite]
    for name, value in suite.environment.items():
        os.environ.setdefault(name, value)  # read when jax first asks for a device
    machine = describe()
    # Figures of a smoke test are not results.
    folder = Path(tempfile.gettempdir()) if arguments.quick else readme.RESULTS
    out = arguments.out or folder / f"{suite.name}_{machine['date']}.json"
    result = _previous(out, machine) if arguments.resume else None
    if result is None:
        rates, reasons = {}, {}
        if arguments.ceilings is not None:
            given = _previous(arguments.ceilings, machine)
            if given is None or given["quick"] != arguments.quick:
                sys.exit(f"--ceilings {arguments.ceilings} must be a result, of such a run")
            rates, reasons = given["ceilings"], given["ceilings_not_measured"]
        elif suite.formats is not None:
            rates, reasons = timing.ceilings(quick=arguments.quick, formats=suite.formats)
        result = {**machine, "suite": suite.name, "quick": arguments.quick}
        result |= {"ceilings": rates, "ceilings_not_measured": reasons, "rows": []}
    done = {row["name"] for row in result["rows"] if row["status"] == "ok"}
    rows = suite.rows(arguments.filter, quick=arguments.quick)
    rows = _share(rows, *arguments.share)
    rows = [(group, case) for group, case in rows if group.name(case) not in done]
    if not rows:
        sys.exit(f"no row is left to run with --filter {arguments.filter!r}")
    renewed = {group.name(case) for group, case in rows}
    result["rows"] = [row for row in result["rows"] if row["name"] not in renewed]

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(suite.name, total=len(rows))

        def on_row(row: dict[str, Any]) -> None:
            result["rows"] = suite.with_ratios([*result["rows"], row])
            write(out, result)
            progress.console.print(
                suite.one_line(result["rows"][-1]), highlight=False, soft_wrap=True
            )
            progress.advance(task)

        suite.run(
            rows,
            result["ceilings"],
            on_row,
            repetitions=arguments.repetitions,
            deadline=deadline,
        )
    print(out)


def _part(share: str) -> tuple[int, int]:
    """``"i/n"`` as numbers.

    Raises:
      ArgumentTypeError: if it is none of ``0/n`` to ``(n - 1)/n``.
    """
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{share!r} must be I/N with 0 <= I < N")
    return int(number), int(count)


def _share(rows: list[tuple[Any, Any]], number: int, count: int) -> list[tuple[Any, Any]]:
    """The rows of every `count`-th group, from group `number` on."""
    groups = list(dict.fromkeys(id(group) for group, _ in rows))
    mine = set(groups[number::count])
    return [(group, case) for group, case in rows if id(group) in mine]


def merge(arguments: argparse.Namespace) -> None:
    """Puts shares of a suite into one file, in its order; of a row's results the last counts."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.files]
    first = parts[0]
    for path, part in zip(arguments.files, parts, strict=True):
        for name in (*_SAME, "suite", "quick"):
            if part[name] != first[name]:
                sys.exit(f"{path}: {name}={part[name]!r} must be {first[name]!r}")
    suite = SUITES[first["suite"]]
    found: dict[str, dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        if row["status"] == "ok" or row["name"] not in found:
            found[row["name"]] = row
    names = [group.name(case) for group, case in suite.rows(quick=first["quick"])]
    rows = suite.with_ratios([found[name] for name in names if name in found])
    write(arguments.out, {**first, "rows": rows})
    print(arguments.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("run", help="measure a suite on this device")
    measure.set_defaults(command=run)
    measure.add_argument("--suite", choices=list(SUITES), default="attention")
    measure.add_argument("--out", type=Path, help="JSON to write; default: in benchmarks/results")
    measure.add_argument("--filter", default="", help="regular expression on the rows' names")
    measure.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    measure.add_argument("--repetitions", type=int, help="of each call; default: by its duration")
    measure.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no row after this time"
    )
    measure.add_argument(
        "--resume", action="store_true", help="keep the rows that --out already holds"
    )
    measure.add_argument(
        "--ceilings", type=Path, help="a result of this machine, whose ceilings are taken"
    )
    measure.add_argument(
        "--share",
        type=_part,
        default=(0, 1),
        metavar="I/N",
        help="rows of every N-th group from the I-th on: processes side by side compile at the "
        "same time, and measure one at a time",
    )
    put_together = commands.add_parser("merge", help="shares of a suite in one file")
    put_together.set_defaults(command=merge)
    put_together.add_argument("files", type=Path, nargs="+")
    put_together.add_argument("--out", type=Path, required=True)
    write_docs = commands.add_parser("report", help="tables and plots of the newest results")
    write_docs.set_defaults(command=report.run)
    write_docs.add_argument(
        "--check", action="store_true", help="only say whether the docs are up to date"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and runs the command."""
    parsed = _parser().parse_args(arguments)
    parsed.command(parsed)


if __name__ == "__main__":
    main()
