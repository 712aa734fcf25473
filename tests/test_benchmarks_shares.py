"""A suite measured in shares: which rows each has, and what they make together."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.catalogue import SUITES


@pytest.mark.slow
def test_shares_make_a_whole(tmp_path):
    """Groups go to one share each; put together they are what one run gives, with its ratios."""
    rows, parts = "prefill/.*/(xla|cudnn)", []
    for number in range(2):
        parts.append(tmp_path / f"{number}.json")
        share = ["--share", f"{number}/2", "--filter", rows, "--repetitions", "2"]
        if number == 1:
            share += ["--ceilings", str(parts[0])]
        command.main(["run", "--quick", "--out", str(parts[-1]), *share])
    names = [{row["name"] for row in json.loads(path.read_text())["rows"]} for path in parts]
    assert all(len({name.split("/")[2] for name in share}) == 1 for share in names)
    whole = tmp_path / "whole.json"
    command.main(["merge", *map(str, reversed(parts)), "--out", str(whole)])
    results = [json.loads(path.read_text()) for path in (*parts, whole)]
    assert results[0]["ceilings"] == results[1]["ceilings"] == results[2]["ceilings"]
    found = [row["name"] for row in results[2]["rows"]]
    assert set(found) == names[0] | names[1]
    every = [g.name(case) for g, case in SUITES["attention"].rows(quick=True)]
    assert found == [name for name in every if name in found]


@pytest.mark.parametrize("share", ["2/2", "-1/2", "1", "a/b", "0/0"])
def test_shares_that_are_none(share, capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "--quick", f"--share={share}"])
    assert "must be I/N with 0 <= I < N" in capsys.readouterr().err


def test_what_is_done_does_not_move_groups_between_shares():
    rows = [(group, case) for group in ("A", "B", "C", "D") for case in range(2)]
    groups = [[group for group, _ in command._share(rows, i, 2)] for i in range(2)]
    assert groups == [["A", "A", "C", "C"], ["B", "B", "D", "D"]]


def test_ceilings_of_no_result(tmp_path):
    with pytest.raises(SystemExit, match="must be a result"):
        command.main(["run", "--quick", "--ceilings", str(tmp_path / "none.json")])


def test_results_of_other_versions_are_not_merged(tmp_path):
    facts = dict.fromkeys(("device", "python", "jax", "turbojax", "quick"), "a")
    paths = []
    for jax_version in ("1", "2"):
        paths.append(tmp_path / f"{jax_version}.json")
        part = {**facts, "jax": jax_version, "suite": "attention", "rows": []}
        paths[-1].write_text(json.dumps(part))
    with pytest.raises(SystemExit, match="jax='2' must be '1'"):
        command.main(["merge", *map(str, paths), "--out", str(tmp_path / "out.json")])
