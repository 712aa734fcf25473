"""The suite of latent attention: what it counts, that it runs and compares, and its table."""

import json

import pytest

from benchmarks import __main__ as command
from benchmarks.measuring import calls
from benchmarks.suites import latent


def test_rows_come_with_what_they_are_compared_with():
    names = [group.name(case) for group, case in latent.SUITE.rows()]
    assert names[0] == "latent/deepseek-v2-lite/b64-s8192/bf16"
    assert "latent/deepseek-v3/b1-s131072/turbo4/mosaic_gpu" in names
    assert len(names) == 6 * 4


@pytest.mark.slow
def test_what_is_counted():
    s = latent.TINY
    for case, token in zip(
        latent.decoding(s, implementations=("xla",)).cases, (160, 160, 100, 68), strict=True
    ):
        needs = case.build(calls.Arrays()).needs
        rest = 2 * s.batch * s.heads * (2 * s.latent + s.rope)
        assert needs.nbytes == s.batch * s.length * token + rest
        assert needs.operations == 2 * s.batch * s.heads * s.length * (s.latent * 2 + s.rope)


@pytest.mark.slow
def test_a_quick_run_measures_and_compares(tmp_path):
    out = tmp_path / "latent.json"
    options = ["--quick", "--repetitions", "2", "--filter", "^(?!.*mosaic)"]
    command.main(["run", "--suite", "latent", *options, "--out", str(out)])
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    ours = rows["latent/tiny/b2-s100/turbo4/xla"]
    assert set(ours["speedup_over"]) == {"bf16"}
    assert ours["relative_l1"] < 0.02
    text = latent.page_section("latent.json", result)
    assert "| tiny (4 heads) | 2 x 100 | turbo4, xla |" in text
