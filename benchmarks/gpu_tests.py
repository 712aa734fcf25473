"""A record of the GPU tests: `pytest -p benchmarks.gpu_tests -m ...`, as `make test-gpu` does.

At the end of one of the runs in `RECORDS` it writes `benchmarks/results/NAME_DATE.json`, red runs
included; `--gpu-record=FOLDER` names another folder (with `=`: pytest takes a path that stands by
itself for its root). A run of some tests (`-k`, paths) is no record of all. In a checkout without
git, TURBOJAX_COMMIT says which commit it is. Where there are several GPUs, xdist's workers take
them in turn, one each, unless CUDA_VISIBLE_DEVICES is set; tests of several GPUs see all.
"""

import collections
import dataclasses
import importlib.metadata
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import driver, gpus

RESULTS = Path(__file__).parent / "results"
_SLOWEST = 10
# Of a run's expression of markers, the name of its record.
RECORDS = {
    "gpu and not gpus and not slow": "gpu_tests",
    "gpu and not gpus": "gpu_tests_all",
    "gpus": "gpu_tests_several",
}


def commit() -> str | None:
    """The commit that is checked out, with a mark if files differ from it; None if unknown."""
    given = os.environ.get("TURBOJAX_COMMIT")
    if given:
        return given
    folder = Path(__file__).parent
    try:
        head, status = (
            subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}, changed" if status else head


def machine() -> dict[str, Any]:
    """Date, device, driver, versions, commit, and jax's backend."""
    # Imported late: plugins are loaded before the tests' settings of jax.
    import jax

    from turbojax._environment import environment

    return {
        **environment(),
        "driver": driver(),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "commit": commit(),
        "backend": jax.default_backend(),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a record so that a reader sees the old one or the new one."""
    from benchmarks import stored  # not before the tests have chosen their platform

    stored.save(path, result)


@dataclasses.dataclass
class Outcomes:
    """What became of every test, by its name.

    Attributes:
      seconds: of set-up, call and tear-down together.
      passed: names.
      failed: names of those that failed, or whose set-up or tear-down did.
      skipped: how many were skipped for which reason.
      files: names of those that were skipped as a whole, of which every worker may tell.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    passed: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    files: set[str] = dataclasses.field(default_factory=set)

    def add(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed:
            self.failed.add(name)
            self.passed.discard(name)
        elif report.skipped:
            self.skipped[_reason(report)] += 1
        elif report.when == "call" and name not in self.failed:
            self.passed.add(name)

    def add_file(self, report: pytest.CollectReport) -> None:
        """Takes the report of a file's collection: one that is skipped as a whole counts once."""
        if report.skipped and report.nodeid not in self.files:
            self.files.add(report.nodeid)
            self.skipped[_reason(report)] += 1

    def to_json(self) -> dict[str, Any]:
        """Counts, the slowest tests, and what failed or was skipped."""
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])[:_SLOWEST]
        return {
            "passed": len(self.passed),
            "failed": len(self.failed),
            "skipped": self.skipped.total(),
            "skipped_because": dict(self.skipped.most_common()),
            "slowest": [{"test": name, "seconds": round(s, 1)} for name, s in slowest],
            "failures": sorted(self.failed),
        }


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr
    text = str(reason[2] if isinstance(reason, tuple) else reason)
    return text.removeprefix("Skipped: ")


class Recorder:
    """Listens in the process that reports, which under xdist hears of every worker's tests."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.outcomes = Outcomes()
        self.start = time.monotonic()
        self.message = ""
        self.expected = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expected = max(self.expected, len(session.items))

    @pytest.hookimpl(optionalhook=True)  # of xdist, whose workers collect
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.expected = max(self.expected, len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.outcomes.add_file(report)

    # Before conftest.py's check may turn an empty run red: that has nothing to record.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        ended = ended and len(self.outcomes.seconds) >= self.expected
        if not ended or not self.outcomes.passed:
            self.message = "no record: the tests did not run to their end"
            return
        found = machine()
        if found.pop("backend") != "gpu":
            self.message = f"no record: {found['device']} is no GPU"
            return
        result = {
            **found,
            **self.outcomes.to_json(),
            "seconds": round(time.monotonic() - self.start, 1),
            "workers": getattr(session.config.option, "numprocesses", None) or 1,
        }
        path = self.folder / f"{self.name}_{found['date']}.json"
        write(path, result)
        self.message = f"recorded in {path}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self.message)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", type=Path, default=RESULTS, metavar="FOLDER")


def record_of(config: pytest.Config) -> str | None:
    """The name of the record of this run; None if it is none of `RECORDS`, or some of one."""
    names = ("keyword", "deselect", "collectonly", "maxfail", "lf")
    some = any(getattr(config.option, name, None) for name in names)
    paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return None if some or paths else RECORDS.get(config.option.markexpr)


def take_gpu(worker: str) -> None:
    """Gives a worker, as xdist names it (gw3), one GPU: before jax asks for the first time."""
    count = len(gpus())
    if count > 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker.removeprefix("gw")) % count))


def pytest_configure(config: pytest.Config) -> None:
    """Shares the GPUs out; records what is worth it."""
    if hasattr(config, "workerinput"):
        if config.option.markexpr != "gpus":
            take_gpu(config.workerinput["workerid"])
    elif name := record_of(config):
        recorder = Recorder(config.option.gpu_record, name)
        config.pluginmanager.register(recorder, "turbojax-gpu-record")
