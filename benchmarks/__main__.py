"""`python -m benchmarks run` measures, `report` writes the docs."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import readme, report, side_by_side, stored, timing
from benchmarks.catalogue import SUITES
from benchmarks.machine import describe
from benchmarks.suite import Suite, faster


def run(arguments: argparse.Namespace) -> None:
    """Measures the rows asked for and writes the file after each."""
    if arguments.processes > 1:
        side_by_side.run(arguments)
        return
    deadline = time.monotonic() + arguments.seconds
    suite = SUITES[arguments.suite]
    for name, value in suite.environment.items():
        os.environ.setdefault(name, value)  # read when jax first asks for a device
    machine = describe()
    # Figures of a smoke test are not results.
    folder = Path(tempfile.gettempdir()) if arguments.quick else readme.RESULTS
    out = arguments.out or folder / f"{suite.name}_{machine['date']}.json"
    goes_on = arguments.resume or arguments.again
    result = stored.previous(out, machine) if goes_on else None
    if result is None:
        result = {**machine, "suite": suite.name, "quick": arguments.quick}
        result |= {**_ceilings(arguments, suite, machine), "rows": []}
    found = {row["name"]: row for row in result["rows"]}
    rows = suite.rows(arguments.filter, quick=arguments.quick)
    rows = side_by_side.share(rows, *arguments.share)
    if not arguments.again:
        done = {name for name, row in found.items() if row["status"] == "ok"}
        rows = [(group, case) for group, case in rows if group.name(case) not in done]
    if not rows and arguments.share == (0, 1):
        sys.exit(f"no row is left to run with --filter {arguments.filter!r}")

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(suite.name, total=len(rows))

        def on_row(row: dict[str, Any]) -> None:
            name = row["name"]
            found[name] = faster(found[name], row) if name in found else row
            result["rows"] = suite.with_ratios(list(found.values()))
            stored.write(out, result)
            [row] = [row for row in result["rows"] if row["name"] == name]
            progress.console.print(suite.one_line(row), highlight=False, soft_wrap=True)
            progress.advance(task)

        suite.run(
            rows,
            result["ceilings"],
            on_row,
            repetitions=arguments.repetitions,
            deadline=deadline,
        )
    print(out)


def _ceilings(
    arguments: argparse.Namespace, suite: Suite, machine: dict[str, Any]
) -> dict[str, Any]:
    """Those of the device, measured unless another share has stored them."""
    if suite.formats is None:
        return {"ceilings": {}, "ceilings_not_measured": {}}
    with timing.alone():
        path = arguments.ceilings
        found = None if path is None else stored.previous(path, machine)
        if found is None:
            rates, reasons = timing.ceilings(quick=arguments.quick, formats=suite.formats)
            found = {**machine, "ceilings": rates, "ceilings_not_measured": reasons}
            if path is not None:
                stored.write(path, found)
    return {name: found[name] for name in ("ceilings", "ceilings_not_measured")}


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
        "--again",
        action="store_true",
        help="measure the rows that --out already holds, too, and keep the faster result of each",
    )
    measure.add_argument(
        "--processes",
        type=side_by_side.count,
        default=1,
        metavar="N",
        help="that compile at the same time, and measure one after the other",
    )
    # Of such a process: its share, and where the first of them stores the ceilings.
    measure.add_argument("--share", type=side_by_side.part, default=(0, 1), help=argparse.SUPPRESS)
    measure.add_argument("--ceilings", type=Path, help=argparse.SUPPRESS)
    write_docs = commands.add_parser("report", help="tables and plots of the newest results")
    write_docs.set_defaults(command=report.run)
    write_docs.add_argument(
        "--check", action="store_true", help="only say whether the docs are up to date"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    parsed = _parser().parse_args(arguments)
    parsed.command(parsed)


if __name__ == "__main__":
    main()
