"""`benchmarks.throughput`: its rows, its search for the largest batch, and what fails."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.throughput_worker import _flushes
from turbojax import TurboConfig

SMALL = ["--model", "tiny", "--prompt", "70", "--new", "10", "--prefill-batch-size", "2"]
SETTINGS = {"prompt": 70, "new": 10, "prefill": True, "find_largest": True}


@pytest.mark.fuzz
def test_a_tiny_model_end_to_end(tmp_path):
    out = tmp_path / "new" / "result.json"
    command = [sys.executable, "-m", "benchmarks.throughput", *SMALL, "--out", str(out)]
    command += ["--caches", "exact,4bit", "--batches", "2,3", "--measure-steps", "4"]
    command += ["--fill", "synthetic", "--prompt", "200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    result = json.loads(out.read_text())
    assert result["device"]
    assert result["settings"]["fill"] == "synthetic"
    assert any("4 steps around the middle" in note for note in result["notes"])
    rows = result["rows"]
    assert [(row["cache"], row["batch"]) for row in rows] == [
        ("exact", 2),
        ("exact", 3),
        ("4bit", 2),
        ("4bit", 3),
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["prefill_ms_per_sequence"] > 0
        assert 0 < row["tokens_per_second_with_prefill"] < row["tokens_per_second"]
        assert (row["measured_steps"], row["first_length"]) == (4, 203)
    assert rows[2]["cache_bytes"] < rows[0]["cache_bytes"]
    assert result["summary"]["exact"]["ratio_to_exact"] == 1
    assert result["summary"]["4bit"]["largest_batch"] == 3


@pytest.mark.fuzz
def test_real_prompts_and_a_row_that_fails():
    settings = {**vars(throughput.parse([*SMALL, "--no-prefill"])), "out": None}
    with tempfile.NamedTemporaryFile("w") as log:
        worker = throughput.Worker(settings, 300, log)
        row = worker.measure("exact", 3, prefill=False)
        assert row["status"] == "ok", row
        assert (row["measured_steps"], row["prefill_ms_per_sequence"]) == (10, None)
        failed = worker.measure("5bit", 3, prefill=False)
        assert failed["status"] == "error"
        assert "'5bit' must be one of" in failed["note"]
        worker.close()
        worker = throughput.Worker({**settings, "model": "no such model"}, 300, log)
        row = worker.measure("exact", 1, prefill=False)
        assert row["status"] == "error"
        assert "ended or was stopped after" in row["note"]
        assert "KeyError: 'no such model'" in Path(log.name).read_text()


class FakeWorker:
    """Fits batches up to a size."""

    machine = {"memory_limit": 1_100, "memory_used_by_weights": 100}  # noqa: RUF012

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.prefills = 0

    def measure(self, cache: str, batch: int, prefill: bool) -> dict:
        self.prefills += prefill
        row = throughput._empty_row(SETTINGS, cache, batch, "out of memory", "")
        if batch > self.largest:
            return row
        return row | {
            "status": "ok",
            "step_ms": 2.0,
            "tokens_per_second": batch / 2e-3,
            "cache_bytes": 3 * batch,
            "temporary_bytes": batch,
            "prefill_ms_per_sequence": 1.0 if prefill else None,
        }


def sweep(worker, batches, seconds=100.0, **changes):
    settings = {**SETTINGS, **changes}
    return list(throughput.sweep(worker, settings, "exact", batches, time.monotonic() + seconds))


def test_after_the_first_batch_that_does_not_fit_the_largest_is_looked_for():
    worker = FakeWorker(largest=240)
    rows = sweep(worker, [64, 128, 512, 1024])
    # The estimate, 1000 bytes / 4 a sequence, is 248 in multiples of 8; then 4 % less.
    assert [(row["batch"], row["status"]) for row in rows] == [
        (64, "ok"),
        (128, "ok"),
        (512, "out of memory"),
        (248, "out of memory"),
        (232, "ok"),
    ]
    assert "largest that fits" in rows[-1]["note"]
    assert worker.prefills == 1
    # 232 prompts of 1 ms and 10 steps of 2 ms.
    assert rows[-1]["tokens_per_second_with_prefill"] == pytest.approx(2320 / 0.252)
    summary = throughput.summary(rows)["exact"]
    assert (summary["batch"], summary["largest_batch"]) == (232, 232)


def test_without_a_search_or_time_there_are_no_more_rows():
    assert [r["batch"] for r in sweep(FakeWorker(100), [64, 128, 256], find_largest=False)] == [
        64,
        128,
    ]
    (row,) = sweep(FakeWorker(100), [64, 128], seconds=-1)
    assert row["status"] == "skipped"


def test_nothing_is_estimated_without_memory_statistics():
    rows = sweep(FakeWorker(100), [64], find_largest=False)
    assert throughput.largest_batch(rows, {"memory_limit": None}) is None
    assert throughput.largest_batch([], FakeWorker.machine) is None


def test_compressed_buffers_are_counted():
    config = TurboConfig()
    # 200 tokens prefilled: two blocks, 72 in the buffer, of which 128 are too many.
    assert _flushes(config, 200, 10) == 0
    assert _flushes(config, 200, 54) == 1
    assert _flushes(config, 200, 53) == 0
    assert _flushes(config, 200, 54 + 63) == 1
    assert _flushes(config, 200, 54 + 64) == 2
    # A block goes as soon as the buffer is full, here with the steps that are not measured.
    assert _flushes(config, 126, 3) == 0
    paper = TurboConfig.paper()
    assert [_flushes(paper, 70, steps) for steps in (55, 56)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new", "0"], "--new must be at least 1"),
        (["--measure-steps", "200"], "between 1 and --new=125"),
        (["--batches", "8,x"], "--batches 8,x must be positive"),
    ],
)
def test_bad_command_lines(arguments, message, capsys):
    with pytest.raises(SystemExit):
        throughput.parse(arguments)
    assert message in capsys.readouterr().err
