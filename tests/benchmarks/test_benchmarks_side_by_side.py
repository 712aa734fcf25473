"""A suite measured by several processes: which rows each has, and what they make together."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks import side_by_side, timing
from benchmarks.suite import faster

FACTS = {"device": "a", "python": "3", "jax": "1", "turbojax": "2", "quick": True}


@pytest.mark.fuzz
def test_processes_make_a_whole(tmp_path):
    """Once, and again with more rows; one of three processes has nothing to do."""
    path = tmp_path / "whole.json"
    options = ["--quick", "--repetitions", "2", "--processes", "3", "--out", str(path)]
    command.main(["run", *options, "--filter", "prefill/tiny/[^/]*/xla"])
    first = json.loads(path.read_text())
    assert len(first["rows"]) == 2
    assert all(row["status"] == "ok" for row in first["rows"])
    command.main(["run", *options, "--resume", "--filter", "prefill/tiny/[^/]*/(xla|cudnn)"])
    second = json.loads(path.read_text())
    assert [row for row in second["rows"] if row["method"] == "xla"] == first["rows"]
    assert [row["name"] for row in second["rows"]] == [
        f"prefill/tiny/{shape}/{method}"
        for shape in ("b1-s128", "b1-s128-causal")
        for method in ("cudnn", "xla")
    ]
    assert second["ceilings"] == first["ceilings"]
    assert second["ceilings"]["copy"] > 0
    command.main(["run", *options, "--again", "--filter", "prefill/tiny/b1-s128/xla"])
    third = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    times = third.pop("prefill/tiny/b1-s128/xla")["us_of_runs"]
    assert times[0] == second["rows"][1]["us"]
    assert len(times) == 2
    assert all("us_of_runs" not in row for row in third.values())


def test_a_share_that_fails_is_an_error(tmp_path, monkeypatch):
    """The others' rows are kept."""

    class Child:
        def __init__(self, command, **_):
            self.number = int(command[command.index("--share") + 1][0])
            path = command[command.index("--out") + 1]
            if self.number == 0:
                rows = [{"name": "prefill/tiny/b1-s128/xla", "status": "failed", "reason": ""}]
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({**FACTS, "suite": "attention", "rows": rows}, file)

        def wait(self):
            return self.number

        def terminate(self):
            pass

    monkeypatch.setattr(side_by_side.subprocess, "Popen", Child)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit, match=r"ended with \[0, 1\]"):
        command.main(["run", "--quick", "--processes", "2", "--out", str(path)])
    assert len(json.loads(path.read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--share=2/2", "must be I/N with 0 <= I < N"),
        ("--share=-1/2", "must be I/N with 0 <= I < N"),
        ("--share=1", "must be I/N with 0 <= I < N"),
        ("--share=a/b", "must be I/N with 0 <= I < N"),
        ("--share=0/0", "must be I/N with 0 <= I < N"),
        ("--processes=0", "must be a positive number"),
        ("--processes=-1", "must be a positive number"),
        ("--processes=two", "must be a positive number"),
    ],
)
def test_numbers_that_are_none(option, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "--quick", option])
    assert message in capsys.readouterr().err


def test_shares_have_whole_groups():
    rows = [(group, case) for group in ("A", "B", "C", "D") for case in range(2)]
    groups = [[group for group, _ in side_by_side.share(rows, i, 2)] for i in range(2)]
    assert groups == [["A", "A", "C", "C"], ["B", "B", "D", "D"]]


def test_no_rows_need_no_processes():
    with pytest.raises(SystemExit, match="no row to run"):
        command.main(["run", "--quick", "--processes", "2", "--filter", "no such row"])


def test_what_was_measured_counts_more(tmp_path):
    """Than what was not, before or after it."""
    (first, second), paths = (
        ({"name": f"prefill/tiny/b1-s128/{name}", "method": name} for name in ("xla", "cudnn")),
        [],
    )
    for number, statuses in enumerate((("ok", "failed"), ("failed", "ok"))):
        rows = [
            {**row, "status": status, "us": 1.0, "operation": "prefill", "part": number}
            for row, status in zip((first, second), statuses, strict=True)
        ]
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({**FACTS, "suite": "attention", "rows": rows}))
    side_by_side.merge(paths, tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["method"]: (row["status"], row["part"]) for row in rows} == {
        "xla": ("ok", 0),
        "cudnn": ("ok", 1),
    }


def test_the_faster_result_counts_and_both_times_are_kept():
    slow, fast = ({"status": "ok", "us": us, "part": part} for us, part in ((3.0, 0), (2.0, 1)))
    failed = {"status": "failed", "reason": "none"}
    for one, other, times in ((slow, fast, [3.0, 2.0]), (fast, slow, [2.0, 3.0])):
        assert faster(one, other) == {**fast, "us_of_runs": times}
    thrice = faster(faster(slow, fast), slow)
    assert thrice == {**fast, "us_of_runs": [3.0, 2.0, 3.0]}
    assert faster(failed, fast)["us"] == faster(fast, failed)["us"] == 2.0
    assert faster(failed, {**failed, "reason": "new"})["reason"] == "new"


def test_the_result_of_most_runs_is_the_merged_one(tmp_path):
    """Each share holds the old results of the others."""
    row = {"name": "prefill/tiny/b1-s128/xla", "method": "xla", "status": "ok", "us": 3.0}
    row["operation"] = "prefill"
    for number in range(3):
        mine = [faster(row, {**row, "us": 2.0})] if number == 1 else [row]
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({**FACTS, "suite": "attention", "rows": mine}))
    side_by_side.merge([tmp_path / f"{i}.json" for i in range(3)], tmp_path / "out.json")
    [found] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (found["us"], found["us_of_runs"]) == (2.0, [3.0, 2.0])


def test_results_of_other_versions_are_not_merged(tmp_path):
    paths = []
    for version in ("1", "2"):
        paths.append(tmp_path / f"{version}.json")
        part = {**FACTS, "jax": version, "suite": "attention", "rows": []}
        paths[-1].write_text(json.dumps(part))
    with pytest.raises(SystemExit, match="jax='2' must be '1'"):
        side_by_side.merge(paths, tmp_path / "out.json")


def test_alone_inside_alone():
    """Or a process would wait for itself."""
    with timing.alone(), timing.alone():
        pass
    with timing.alone():
        pass


def test_several_prepare_at_once_but_not_while_one_measures(tmp_path, monkeypatch):
    """The lock's file is opened anew each time, so that one process stands for two."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(timing.tempfile, "gettempdir", lambda: str(tmp_path))

    def is_free(how):
        with next(iter(tmp_path.iterdir())).open("a") as lock:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with timing.beside():
        assert is_free(fcntl.LOCK_SH)
        assert not is_free(fcntl.LOCK_EX)
    with timing.alone():
        assert not is_free(fcntl.LOCK_SH)
        with timing.beside():  # as `alone` inside `alone`
            pass
    assert is_free(fcntl.LOCK_EX)
