"""The record of the GPU tests: what counts as what, and when there is one."""

import json
import os
import re
import types
from pathlib import Path

import pytest

from benchmarks import gpu_tests

MACHINE = {"date": "2000-01-01", "device": "a GPU", "driver": "1", "commit": "abc"}


def report(name, when="call", outcome="passed", seconds=1.0, longrepr=None):
    return types.SimpleNamespace(
        nodeid=name,
        when=when,
        duration=seconds,
        longrepr=longrepr,
        **{word: word == outcome for word in ("passed", "failed", "skipped")},
    )


def recorder(folder, monkeypatch, backend="gpu"):
    monkeypatch.setattr(gpu_tests, "machine", lambda: {**MACHINE, "backend": backend})
    made = gpu_tests.Recorder(folder, "gpu_tests")
    for one in (
        report("a", "setup", seconds=0.5),
        report("a"),
        report("a", "teardown"),
        report("b", seconds=9.0),
        report("b", "teardown", "failed"),
        report("c", "setup", "failed"),
        report("d", "setup", "skipped", longrepr=("file", 3, "Skipped: too old")),
        report("e", "call", "skipped", longrepr=("file", 4, "Skipped: too old")),
    ):
        made.pytest_runtest_logreport(one)
    made.pytest_xdist_node_collection_finished(["a", "b", "c", "d", "e"])
    for one in (report("f", outcome="skipped", longrepr=("f", 1, "Skipped: no x")), report("g")):
        for _ in range(2):  # two workers
            made.pytest_collectreport(one)
    return made


def test_no_record_of_a_part(tmp_path, monkeypatch):
    """A worker that dies takes its tests with it, and the others may all have passed."""
    made = recorder(tmp_path, monkeypatch)
    made.pytest_xdist_node_collection_finished(["a", "b", "c", "d", "e", "not reached"])
    made.pytest_sessionfinish(session(), pytest.ExitCode.TESTS_FAILED)
    assert "not run to their end" in made.message
    assert not list(tmp_path.iterdir())


def session(jobs=16):
    option = types.SimpleNamespace(numprocesses=jobs)
    return types.SimpleNamespace(config=types.SimpleNamespace(option=option))


def test_a_record(tmp_path, monkeypatch):
    made = recorder(tmp_path / "results", monkeypatch)
    made.pytest_sessionfinish(session(), pytest.ExitCode.TESTS_FAILED)
    [path] = (tmp_path / "results").iterdir()
    assert path.name == "gpu_tests_2000-01-01.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found.pop("seconds") >= 0
    assert found == {
        **MACHINE,
        "passed": 1,
        "failed": 2,
        "skipped": 3,
        "skipped_because": {"too old": 2, "no x": 1},
        "slowest": [
            {"test": name, "seconds": s}
            for name, s in (("b", 10.0), ("a", 2.5), ("c", 1.0), ("d", 1.0), ("e", 1.0))
        ],
        "failures": ["b", "c"],
        "workers": 16,
    }


@pytest.mark.parametrize(
    ("backend", "status", "message"),
    [("cpu", 0, "a GPU is no GPU"), ("gpu", 2, "not run to their end"), ("gpu", 5, "not run to")],
)
def test_no_record(tmp_path, monkeypatch, backend, status, message):
    made = recorder(tmp_path, monkeypatch, backend)
    made.pytest_sessionfinish(session(), pytest.ExitCode(status))
    assert message in made.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "source", "name"),
    [
        ({}, "TESTPATHS", "gpu_tests"),
        ({"markexpr": "gpus"}, "TESTPATHS", "gpu_tests_several"),
        ({"keyword": "int4"}, "TESTPATHS", None),
        ({"markexpr": "not gpu"}, "TESTPATHS", None),
        ({"maxfail": 1}, "TESTPATHS", None),
        ({}, "ARGS", None),
    ],
)
def test_only_all_of_them_are_recorded(given, source, name):
    marks = "gpu and not gpus and not slow"
    option = types.SimpleNamespace(**({"markexpr": marks, "keyword": ""} | given))
    config = types.SimpleNamespace(
        option=option, args_source=getattr(pytest.Config.ArgsSource, source)
    )
    assert gpu_tests.record_of(config) == name


def test_what_make_runs_is_recorded():
    """The expressions of markers stand in the Makefile, too."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    runs = re.findall(r'^\t\$\(ON_GPU\) -m "(.+)" ', makefile, re.MULTILINE)
    assert sorted(runs) == sorted(gpu_tests.RECORDS)


def test_the_commit(monkeypatch):
    monkeypatch.setenv("TURBOJAX_COMMIT", "abc")
    assert gpu_tests.commit() == "abc"
    monkeypatch.delenv("TURBOJAX_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert gpu_tests.commit() is None


@pytest.mark.parametrize(
    ("count", "given", "want"),
    [(0, None, None), (1, None, None), (2, None, "1"), (3, None, "0"), (2, "7", "7")],
)
def test_workers_take_gpus_in_turn(monkeypatch, count, given, want):
    monkeypatch.setattr(gpu_tests, "gpus", lambda: ["a GPU"] * count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(given))  # and so it is put back
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    gpu_tests.take_gpu("gw3")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == want
