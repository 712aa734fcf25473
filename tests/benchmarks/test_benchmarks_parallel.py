"""The suite of several devices: its rows, ratios and parallel."""

from pathlib import Path

import pytest

from benchmarks import stored
from benchmarks.suite import Asked
from benchmarks.suites.parallel import ops
from benchmarks.suites.parallel import suite as parallel
from turbojax.models.generation import session

RESULT = {
    "device": "one GPU",
    "jax": "0",
    "date": "today",
    "rows": [
        {"label": "a", "way": "b", "devices": 1, "asked": 1.5, "us": 10.0, "status": "ok"},
        {"label": "a", "way": "b", "devices": 2, "asked": 1.5, "us": 8.0, "status": "ok"},
        {"label": "c", "way": "b", "devices": 2, "asked": None, "status": "failed", "reason": "no"},
        {"label": "d", "way": "b", "devices": 2, "asked": None, "us": 5.0, "status": "ok"}
        | {"kind": "all-gather", "bytes": 4096, "gigabytes_per_second": 1.5},
    ],
}


def test_ratios_and_what_was_asked():
    one, two, failed, bare = parallel.with_ratios(RESULT["rows"])
    assert "speedup" not in one
    assert (two["speedup"], two["reached"]) == (1.25, False)
    assert "speedup" not in failed | bare
    table = parallel.parallel_table({**RESULT, "rows": [one, two, failed, bare]})
    assert "| a | b | 2 | 8.0 us | 10.0 us | 1.25x | 1.5x (missed) | none |" in table
    assert "failed: no" in table
    assert "all-gather | 4,096 | 5.0 us | 1.5 |" in parallel.collectives_table(RESULT)


def test_more_devices_than_there_are_is_refused():
    group = parallel.SUITE.rows()[0][0]
    with pytest.raises(NotImplementedError, match="4096 devices are asked for"):
        parallel.begin([], Asked({}, None, 0.0))(group, 4096)


def test_the_committed_result_has_every_row_that_was_asked_for():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found = stored.newest(results, ("parallel",))
    assert found is not None
    rows = {row["label"] for row in found[1]["rows"]}
    asked = {group.label for group, _ in parallel.SUITE.rows() if group.asked is not None}
    assert asked <= rows


@pytest.mark.slow
def test_steps_are_launched_as_generate_does(monkeypatch):
    counts = []
    program = ops.next_tokens

    class Seen:
        def lower(self, *arguments, **static):
            counts.append(static["count"])
            return program.lower(*arguments, **static)

    monkeypatch.setattr(ops, "next_tokens", Seen())
    row = ops.step("tiny", "bf16", "turbo4", 2, 64, devices=1)
    assert counts == [session._TOGETHER] == [row["tokens_together"]]
    assert row["us"] == min(row["us_of_runs"]) > 0
    assert not row["exchanges"]
