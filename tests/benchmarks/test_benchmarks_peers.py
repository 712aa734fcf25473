"""The suite of peers: which rows it has, what its processes answer, and its table."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.suites.peers import suite as peers
from benchmarks.suites.peers import torch_rows

ROWS = peers.SUITE.rows()


def test_every_row_is_told_how_to_run_and_what_it_is_called():
    for group, case in ROWS:
        assert case.method in peers.METHODS, group.name(case)
        if isinstance(case, peers.TorchCase):
            assert case.method in torch_rows.PEERS
    assert set(torch_rows.PEERS) == {c.method for _, c in ROWS if isinstance(c, peers.TorchCase)}


def test_every_place_has_one_baseline_and_ours_by_no_name():
    for group in {id(group): group for group, _ in ROWS}.values():
        assert len({"exact", "bf16"} & {case.family for case in group.cases}) == 1
        assert group.cases[0].family in ("exact", "bf16")
        ours = [case for case in group.cases if case.family == "turbojax"]
        assert ours
        assert {case.implementation for case in ours} == {None}


def test_answers_are_read_until_a_line_that_was_cut_short():
    said = '{"name": "a", "us": 1.5}\n{"name": "b", "status": "failed"}\n{"name": "c", "u'
    assert peers.answers(said) == {"a": {"us": 1.5}, "b": {"status": "failed"}}
    assert peers.answers("") == {}


def test_a_call_takes_the_sum_of_its_kernels_in_the_median():
    def event(name, start, us, device="CUDA"):
        place = SimpleNamespace(start=start, elapsed_us=lambda: us)
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, time_range=place, device_type=kind)

    found = torch_rows.kernels(
        [
            event("merge", 30, 2.0),
            event("split", 10, 7.0),
            event("Memset (Device)", 20, 50.0),
            event("aten::add", 5, 90.0, device="CPU"),
        ]
    )
    assert found == [("split", 7.0), ("merge", 2.0)]
    us, spread = torch_rows.per_call([7.0, 2.0, 8.0, 2.0, 60.0, 2.0], 3)
    assert us == 10.0
    assert spread > 0
    assert torch_rows.per_call([1.0, 2.0, 3.0], 2) == (3.0, 0.0)


@pytest.mark.slow
def test_a_process_of_torch_answers_every_row_without_a_gpu():
    rows = [row for row in peers.SUITE.rows("latent|/m1/") if isinstance(row[1], peers.TorchCase)]
    found = []
    peers.run(rows, {}, found.append)
    assert [row["name"] for row in found] == [group.name(case) for group, case in rows]
    assert {row["status"] for row in found} == {"not run"}
    assert all("GPU" in row["reason"] or "torch" in row["reason"] for row in found)


def test_the_table_has_the_fastest_first_and_says_why_a_row_did_not_run():
    [(group, _), *_] = peers.SUITE.rows("^decode/llama3-8b/b16-s32768/cudnn-full")
    rows = []
    for case in group.cases:
        row = {"name": group.name(case), **group.describe(case)}
        figures = {"cudnn-full": 480.0, "turbo4": 160.0, "flashinfer-fp8": 320.0}
        if case.method in figures:
            us = figures[case.method]
            row |= {"status": "ok", "us": us, "wall_us": us + 5, "version": "flashinfer-python 1"}
        else:
            row |= {"status": "not run", "reason": "it's not installed"}
        rows.append(row)
    result = {"rows": json.loads(json.dumps(peers.SUITE.with_ratios(rows)))}
    lines = [line for line in peers.table(result).splitlines() if "16 x 32k" in line]
    assert lines[0] == "| llama3-8b 16 x 32k | turbojax | turbo4 pages | 160 | 165 | 3.00x |"
    assert lines[1].startswith(
        "| llama3-8b 16 x 32k | FlashInfer, tensor cores | e4m3 pages | 320 | 325"
    )
    assert lines[2].endswith("| cuDNN through jax | bfloat16 | 480 | 485 | 1.00x |")
    assert "not run: it's not installed" in lines[3]
    assert len(lines) == len(group.cases)
