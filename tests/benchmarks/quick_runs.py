"""A quick run of a suite on this device, as the command makes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.catalogue import SUITES

WITHOUT_HOPPER = "^(?!.*mosaic)"


def quick_run(folder: Path, suite: str, pattern: str = "") -> dict[str, Any]:
    """The result of the rows that a pattern finds, each measured twice."""
    out = folder / f"{suite}.json"
    options = ["--quick", "--repetitions", "2", "--filter", pattern, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SUITES[suite].environment.items():
            patch.setenv(name, value)
        command.main(["run", "--suite", suite, *options])
    result: dict[str, Any] = json.loads(out.read_text())
    return result
