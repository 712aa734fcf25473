"""The clock of the tests: what it reads of a run, keeps, and calls grown."""

import pytest

from tests import clock

CASES = """<testsuites><testsuite name="pytest" tests="4" time="120.5">
<testcase classname="tests.models.test_a" name="test_x[1-b[2]]" time="1.5" />
<testcase classname="tests.models.test_a" name="test_x[2]" time="0.5" />
<testcase classname="tests.models.test_a.TestIt" name="test_x" time="0.25" />
<testcase classname="tests.tools.test_b" name="test_y" time="0.125"><failure /></testcase>
</testsuite></testsuites>"""
TIMES = {
    ("test", "tests/models/test_a.py", "test_x"): (2, 2.0),
    ("test", "tests/models/test_a.py", "TestIt::test_x"): (1, 0.25),
    ("test", "tests/tools/test_b.py", "test_y"): (1, 0.125),
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test.xml").write_text(CASES)
    return tmp_path / "test.xml"


def test_a_run_is_read(run):
    assert clock.read_run(run) == (120.5, TIMES)
    run.write_text("<testsuites/>")
    with pytest.raises(ValueError, match="must be a JUnit file"):
        clock.read_run(run)


def test_the_table_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "times.tsv"
    clock.write_table(path, TIMES, "a machine")
    assert path.read_text().startswith("# Seconds of the tests on a machine\n")
    small = ("test", "tests/models/test_a.py", clock.OTHERS)
    other = ("test", "tests/tools/test_b.py", clock.OTHERS)
    kept = {k: v for k, v in TIMES.items() if v[1] >= clock.SHOWN}
    assert clock.read_table(path) == kept | {small: (1, 0.2), other: (1, 0.1)}


def test_what_grew_is_named_and_a_slow_machine_is_not():
    def of(**seconds):
        return {("test", "tests/test_a.py", name): (1, x) for name, x in seconds.items()}

    before = of(a=1.0, b=2.0, c=4.0, d=10.0)
    assert clock.grown(of(a=3.0, b=6.0, c=12.0, d=30.0), before) == []
    found = clock.grown(of(a=1.0, b=2.0, c=9.0, d=10.0, new=3.9), before)
    assert [text.split(": ")[0] for _, text in found] == [
        "tests/test_a.py::c (test)",
        "tests/test_a.py::new (test)",
    ]
    assert clock.grown(of(a=2.0), of(a=0.1)) == []  # nothing to tell the machine's pace by
    assert found[1][1].endswith("3.9 s, where 0.0 are usual")


def test_a_run_beyond_its_budget_is_told(run, monkeypatch):
    times, lines = clock.report([run], {})
    assert times == TIMES
    assert lines == [f"test: 4 tests, 2.0 min of {clock.BUDGETS['test']:g}", "all: 2.0 min"]
    monkeypatch.setitem(clock.BUDGETS, "test", 2.0)
    _, lines = clock.report([run], {})
    assert lines[0] == "test: 4 tests, 2.0 min of 2: OVER ITS BUDGET"
