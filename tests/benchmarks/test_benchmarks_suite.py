"""What all suites share: which rows there are, what becomes of them, and what they are over."""

import gc
import weakref

import pytest

from benchmarks import catalogue, tables
from benchmarks.shapes import Shape
from benchmarks.suite import Latest, attempt, over_baselines, over_cudnn
from benchmarks.suites.attention import cases as attention_cases
from benchmarks.suites.attention.decode import COMPRESS
from tests.benchmarks.quick_runs import WITHOUT_HOPPER, quick_run

TINY = Shape("tiny", 2, 192)


@pytest.mark.parametrize("suite", catalogue.SUITES.values(), ids=list(catalogue.SUITES))
class TestEverySuite:
    def test_rows_are_named_once(self, suite):
        for quick in (False, True):
            names = [group.name(case) for group, case in suite.rows(quick=quick)]
            assert names
            assert len(set(names)) == len(names)

    def test_a_pattern_picks_rows_in_their_order(self, suite):
        every = [group.name(case) for group, case in suite.rows()]
        last = every[-1]
        found = [group.name(case) for group, case in suite.rows(f"^({every[0]}|{last})$")]
        assert found == list(dict.fromkeys([every[0], last]))
        assert suite.rows("no such row") == []

    @pytest.mark.fuzz
    def test_no_row_is_begun_late(self, suite):
        found = []
        suite.run(suite.rows(quick=True), {}, found.append, deadline=-1.0)
        assert {row["status"] for row in found} == {"not run"}
        assert {row["reason"] for row in found} == {tables.OUT_OF_TIME}
        line = f"{found[0]['name']}: not run: {tables.OUT_OF_TIME}"
        assert suite.one_line(found[0]) == line
        assert suite.with_ratios(found) == found


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:No artists with labels")  # of what cannot run here
@pytest.mark.parametrize("name", [name for name in catalogue.SUITES if name != "parallel"])
def test_a_quick_run(name, tmp_path):
    """Rows check their outputs themselves; and all that a suite shows can be shown of them.

    What the suite of several devices shows needs several.
    """
    suite = catalogue.SUITES[name]
    result = quick_run(tmp_path, name, WITHOUT_HOPPER)
    assert "ok" in {row["status"] for row in result["rows"]}
    assert [row for row in result["rows"] if row["status"] == "failed"] == []
    for table in suite.tables.values():
        assert table(f"{name}.json", result)
    for plot in suite.plots.values():
        plot(result)


def test_a_table_and_a_plot_have_one_owner():
    names = [name for shown in catalogue.SHOWN for name in (*shown.tables, *shown.plots)]
    assert len(set(names)) == len(names)


def test_a_row_that_fails_is_recorded_and_the_run_goes_on():
    def no_memory(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long trace")

    group = attention_cases.Group(COMPRESS, TINY)
    cases = [
        attention_cases.Case("broken", None, no_memory),
        attention_cases.Case("turbo-4bit", "mosaic_gpu", COMPRESS.cases(TINY, "short")[0].build),
    ]
    rows = []
    attention_cases.run([(group, case) for case in cases], {"copy": None}, rows.append)
    assert [row["status"] for row in rows] == ["failed", "not run"]
    assert rows[0]["reason"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert rows[1]["reason"]
    late = []
    attention_cases.run([(group, cases[0])], {}, late.append, deadline=-1.0)
    assert (late[0]["status"], "time" in late[0]["reason"]) == ("not run", True)


def test_what_becomes_of_a_row():
    def broken():
        raise ValueError("no\nreason")

    def refused():
        raise NotImplementedError

    found = []
    for measure in (lambda: {"status": "ok", "us": 1.0}, broken, refused):
        attempt({"name": "x"}, measure, found.append, float("inf"))
    assert found == [
        {"name": "x", "status": "ok", "us": 1.0},
        {"name": "x", "status": "failed", "reason": "ValueError: no"},
        {"name": "x", "status": "not run", "reason": "NotImplementedError"},
    ]


@pytest.mark.fuzz
def test_the_last_inputs_are_freed_before_others_are_made():
    class Inputs:
        pass

    made = []

    def make(key):
        gc.collect()
        assert all(reference() is None for reference in made)
        if key == "none":
            raise MemoryError
        inputs = Inputs()
        made.append(weakref.ref(inputs))
        return inputs

    latest = Latest(make)
    assert latest.of("a") is latest.of("a")
    with pytest.raises(MemoryError):
        latest.of("none")
    latest.of("b")
    assert len(made) == 2


def test_ratios_are_over_the_fastest_row_of_a_shape():
    def row(family, us, label="m1", status="ok"):
        return {"operation": "x", "label": label, "family": family, "us": us, "status": status}

    rows = [row("base", 8.0), row("base", 6.0), row("ours", 2.0), row("other", 3.0)]
    rows += [row("ours", 2.0, label="m2"), row("ours", 1.0, status="failed")]
    found = over_baselines({"x": ("base", "missing")})(rows)
    assert [r.get("speedup_over") for r in found] == [
        {"base": 0.75},
        {"base": 1.0},
        {"base": 3.0},
        {"base": 2.0},
        {},
        None,
    ]


def test_ratios_over_cudnn_are_of_one_shape():
    def row(method, us, tokens=8):
        facts = {"operation": "x", "model": "m", "batch": 1, "tokens": tokens, "is_causal": False}
        return {**facts, "method": method, "us": us, "status": "ok"}

    rows = [row("cudnn-full", 6.0), row("cudnn", 8.0), row("ours", 2.0), row("ours", 2.0, 9)]
    found = over_cudnn(rows)
    assert [r.get("speedup_over_cudnn") for r in found] == [1.0, 0.75, 3.0, None]
