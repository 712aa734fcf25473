"""NVIDIA's compute-sanitizer over one case of every kernel.

`python -m benchmarks.device.sanitize --seconds 330` runs each case of `sanitizer_cases` in a
process of its own, under memcheck and then under racecheck, several at a time, and writes
`benchmarks/results/sanitizer_DATE.json` after each: errors (memcheck) or hazards (racecheck), what
was printed first, and how long it took; "not finished" where the time was over. Two controls, an
access out of bounds and a race, must be found. `--dry` lowers every case, which needs no GPU, and
`--case NAME` runs one as it is, without the sanitizer.

Every array is an allocation of its own there, or memcheck would not see where it ends; programs
are not tuned and nothing is captured in graphs, for what XLA tries out is not ours to check. What
is compiled for one tool is kept for the other.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from benchmarks.device.registers import lowering_for

TOOLS = ("memcheck", "racecheck")
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    " --xla_gpu_enable_triton_gemm=false",
    "CUDA_MODULE_LOADING": "LAZY",
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
RAN = "ran: "
_LIMIT = 150.0
_MOST_KINDS = 8
# XLA asks for what there may not be, which is no error of a kernel.
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}


# What the sanitizer says --------------------------------------------------------------------------


@dataclasses.dataclass
class Findings:
    """What one run under the sanitizer printed.

    Attributes:
      found: errors of memcheck, hazards of racecheck; None if there is no summary.
      errors: of the hazards those that racecheck calls errors, not warnings; None for memcheck.
      kinds: first lines of its reports and how often, the most frequent ones.
    """

    found: int | None
    errors: int | None
    kinds: dict[str, int]


def parse(text: str) -> Findings:
    found: int | None = None
    errors: int | None = None
    if summary := re.search(r"ERROR SUMMARY: (\d+) error", text):
        found = int(summary[1])
    if summary := re.search(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text
    ):
        found, errors = int(summary[1]), int(summary[2])
    kinds: collections.Counter[str] = collections.Counter()
    lines = re.findall(r"^=========( .*)$", text, re.MULTILINE)
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        # What belongs to a report is indented further than its first line; it says which kernel.
        if line.startswith("  ") or re.match(r" (COMPUTE-SANITIZER|.*SUMMARY:|$)", line):
            continue
        place = following.strip() if following.strip().startswith("at ") else ""
        kinds[_without_places(f"{line} {place}".strip())] += 1
    return Findings(found, errors, dict(kinds.most_common(_MOST_KINDS)))


def _without_places(line: str) -> str:
    """A report's first line, without what differs from thread to thread."""
    return re.sub(r"\+?0x[0-9a-f]+|\(\d+,\d+,\d+\)", "*", line)[:200]


# One case -----------------------------------------------------------------------------------------


def cases() -> dict[str, Any]:
    from benchmarks.device.sanitizer_cases import CASES, CONTROLS

    return {**CASES, **{name: case for name, (_, case) in CONTROLS.items()}}


def lower(name: str) -> tuple[Any, tuple[Any, ...]]:
    """The lowered program of a case, and its arguments."""
    import jax

    case = cases()[name]
    call, arguments = case.build()
    traced = jax.jit(call).trace(*arguments)
    program = str(traced.jaxpr)
    missing = [kernel for kernel in case.kernels if not re.search(rf"\b{kernel}\b", program)]
    if missing:
        raise LookupError(f"{name} has no {missing}")
    return traced.lower(lowering_platforms=("cuda",)), arguments


as_on_an_h100 = functools.partial(lowering_for, "9.0")
"""While functions are lowered for an H100 that is not there."""


def dry(pattern: str) -> None:
    """Lowers the cases for an H100 that is not there."""
    for name, case in cases().items():
        if re.search(pattern, name) and case.needs is None:
            with as_on_an_h100():
                lower(name)
            print("lowers:", name, flush=True)


def run_case(name: str) -> None:
    """Runs a case once, and says which device ran it."""
    import jax

    lowered, arguments = lower(name)
    jax.block_until_ready(lowered.compile()(*arguments))
    print(f"{RAN}{jax.devices()[0].device_kind}", flush=True)


# All of them --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    tool: str


def tasks(pattern: str, tools: tuple[str, ...]) -> list[Task]:
    from benchmarks.device.sanitizer_cases import CASES, CONTROLS

    found = [Task(name, tool) for name, (tool, _) in CONTROLS.items() if tool in tools]
    found += [Task(name, tool) for tool in tools for name in CASES]
    return [task for task in found if re.search(pattern, task.name)]


def check(task: Task, limit: float, arguments: argparse.Namespace) -> dict[str, Any]:
    row = {"case": task.name, "kernels": list(cases()[task.name].kernels), "tool": task.tool}
    needs = cases()[task.name].needs
    if needs is not None and importlib.util.find_spec(needs) is None:
        return {**row, "status": "not run", "reason": f"{needs} is not installed"}
    if limit <= 0:
        return {**row, "status": "not finished", "reason": "there was no time to start it"}
    command = [
        *(arguments.sanitizer, "--tool", task.tool, "--target-processes", "application-only"),
        *("--print-limit", "100", *_OPTIONS.get(task.tool, ()), *arguments.option),
        *(sys.executable, "-m", "benchmarks.device.sanitize", "--case", task.name),
    ]
    environment = {**os.environ, **ENVIRONMENT, "JAX_COMPILATION_CACHE_DIR": arguments.cache}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        ended = _run(command, environment, limit, output)
        seconds = round(time.monotonic() - start, 1)
        output.seek(0)
        text = output.read()
    if arguments.logs is not None:
        log = arguments.logs / f"{task.tool}_{re.sub(r'[^a-z0-9]+', '_', task.name.lower())}.txt"
        log.write_text(text, encoding="utf-8")
    findings = parse(text)
    row |= {"seconds": seconds, "ran": RAN in text, **dataclasses.asdict(findings)}
    if not ended:
        return {**row, "status": "not finished", "reason": f"stopped after {seconds} s"}
    if findings.found is None:
        return {**row, "status": "failed", "reason": _last_lines(text)}
    if findings.found:
        return {**row, "status": "found"}
    if not row["ran"]:
        return {**row, "status": "failed", "reason": _last_lines(text)}
    return {**row, "status": "unclear" if findings.kinds else "clean"}


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip("= ")]
    return " | ".join(lines[-4:])[-600:]


def _run(command: list[str], environment: dict[str, str], limit: float, output: TextIO) -> bool:
    """Whether it ended in time; if not, it and what it started is stopped."""
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def _version(sanitizer: str) -> str:
    output = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"[Vv]ersion (\S+)", output.stdout)
    return found[1] if found else output.stdout.strip()


def run_all(arguments: argparse.Namespace) -> None:
    from benchmarks import gpu_tests

    start = time.monotonic()
    # jax is asked in a process of its own, which holds no memory of the GPU afterwards.
    asked = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import json; from benchmarks import gpu_tests; print(json.dumps(gpu_tests.machine()))",
        ],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        sys.exit(asked.stderr)
    machine = json.loads(asked.stdout.splitlines()[-1])
    if machine.pop("backend") != "gpu":
        sys.exit(f"needs a GPU, not {machine['device']}")
    out = arguments.out or gpu_tests.RESULTS / f"sanitizer_{machine['date']}.json"
    result: dict[str, Any] = {**machine, "sanitizer": _version(arguments.sanitizer), "rows": []}
    order = tasks(arguments.filter, tuple(arguments.tools.split(",")))

    def one(task: Task) -> dict[str, Any]:
        left = arguments.seconds - (time.monotonic() - start)
        return check(task, min(left, arguments.limit), arguments)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(one, task): task for task in order}
        for future in concurrent.futures.as_completed(running):
            row = future.result()
            rows = {order.index(Task(r["case"], r["tool"])): r for r in [*result["rows"], row]}
            result["rows"] = [rows[i] for i in sorted(rows)]
            result["seconds"] = round(time.monotonic() - start, 1)
            gpu_tests.write(out, result)
            print(row["tool"], row["case"], row["status"], row.get("found"), flush=True)
    print(out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device.sanitize", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--case", help="run this one here, without the sanitizer")
    parser.add_argument("--dry", action="store_true", help="lower the cases, run nothing")
    parser.add_argument("--filter", default="", help="regular expression on the cases' names")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=330.0, help="of all together")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds of one process")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--out", type=Path, help="JSON to write; default: in benchmarks/results")
    parser.add_argument("--logs", type=Path, help="folder for what each process printed")
    parser.add_argument("--cache", help="folder for compiled programs; default: a new one")
    parser.add_argument(
        "--option", action="append", default=[], help="of compute-sanitizer, such as --option=--x=y"
    )
    parser.add_argument(
        "--sanitizer", default=shutil.which("compute-sanitizer") or "compute-sanitizer"
    )
    return parser


def main(given: list[str] | None = None) -> None:
    arguments = _parser().parse_args(given)
    if arguments.case is not None:
        run_case(arguments.case)
    elif arguments.dry:
        dry(arguments.filter)
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments.cache = arguments.cache or folder
            if arguments.logs is not None:
                arguments.logs.mkdir(parents=True, exist_ok=True)
            run_all(arguments)


if __name__ == "__main__":
    main()
