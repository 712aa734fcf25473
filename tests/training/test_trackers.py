"""Rows of a run sent to TensorBoard and W&B, of which modules with the same calls stand here."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

from tests.training.finetune_helpers import command
from turbojax import _extras, finetune

FIRST = {"step": 0, "resumed": False}
ROWS = [
    {"step": 0, "held_out_bits_per_byte": 8.0},
    {"step": 2, "bits_per_byte": 7.0, "grad_norm": 1.5},
    {"step": 2, "held_out_bits_per_byte": 7.5},
    {"step": 4, "bits_per_byte": 6.0, "grad_norm": 1.0},
]
SCALARS = [(n, v, row["step"]) for row in ROWS for n, v in row.items() if n != "step"]


@dataclasses.dataclass
class Event:
    """TensorBoard's: a summary, here a pair of a name and a value, or the start of a session."""

    step: int
    wall_time: float
    summary: tuple[str, object] | None = None
    session_log: object = None


class SessionLog:
    START = 1

    def __init__(self, status):
        assert status == SessionLog.START


class Writer:
    """tensorboardX's writer of one file: what a reader of its folder's files would see."""

    folders: ClassVar[dict[str, list]] = {}

    def __init__(self, file_prefix, filename_suffix):
        folder = Path(file_prefix).parent
        # As the writer does; what begins in the same second must have another suffix.
        (folder / f"events{filename_suffix}").touch(exist_ok=False)
        self.kept = Writer.folders.setdefault(str(folder), [])
        self.pending = []

    def write_event(self, event):
        if event.session_log is not None:
            self.kept[:] = [kept for kept in self.kept if kept[2] < event.step]
        elif event.summary[0] == "config":
            Writer.last_text = event.summary[1]
        else:
            self.pending.append((*event.summary, event.step))

    def flush(self):
        self.kept += self.pending
        self.pending = []

    def close(self):
        self.flush()
        Writer.closed = True


class Run:
    """A run of W&B that its server keeps, which drops rows of steps that are past."""

    server: ClassVar[dict[str, list]] = {}
    exit_codes: ClassVar[list[int]] = []

    def __init__(self, id, resume, name, dir, config):
        assert resume == "allow"
        self.rows = Run.server.setdefault(id, [])
        self.step = self.rows[-1][0] + 1 if self.rows else 0
        self.config = config

    def log(self, data, step):
        assert not self.rows or step >= self.rows[-1][0], "W&B drops this row and warns"
        self.rows.append((step, data))

    def finish(self, exit_code):
        Run.exit_codes.append(exit_code)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    Writer.folders, Writer.closed, Run.server, Run.exit_codes = {}, False, {}, []
    pair = {"scalar": lambda *x: x, "text": lambda *x: x}
    for name, parts in (
        ("tensorboardX", {}),
        ("tensorboardX.event_file_writer", {"EventsWriter": Writer}),
        ("tensorboardX.proto.event_pb2", {"Event": Event, "SessionLog": SessionLog}),
        ("tensorboardX.summary", pair),
        ("wandb", {"init": Run}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, module)


def send(name, folder, rows, config=None):
    with finetune.tracker(name, folder, config or {}) as report:
        for row in rows:
            report(row)


def interrupted(name, folder, rows):
    """What a kill would leave is there before the tracker is closed."""
    with pytest.raises(KeyboardInterrupt):
        send(name, folder, Interrupting(rows))


class Interrupting(list):
    def __iter__(self):
        yield from super().__iter__()
        Writer.before_closing = {name: list(kept) for name, kept in Writer.folders.items()}
        raise KeyboardInterrupt


class TestTensorBoard:
    def test_scalars_under_the_names_of_the_log(self, tmp_path):
        send("tensorboard", tmp_path, [FIRST, *ROWS], {"steps": 4})
        assert Writer.folders == {str(tmp_path / "tensorboard"): SCALARS}
        assert Writer.last_text == '{\n  "steps": 4\n}'
        assert Writer.closed

    @pytest.mark.parametrize("step", [0, 2])
    def test_no_step_twice(self, tmp_path, step):
        """A run is killed after step 4 and goes on from an earlier checkpoint."""
        interrupted("tensorboard", tmp_path, [FIRST, *ROWS])
        assert Writer.before_closing == {str(tmp_path / "tensorboard"): SCALARS}
        again = [row for row in ROWS if row["step"] > step or step == 0]
        send("tensorboard", tmp_path, [{"step": step, "resumed": step > 0}, *again])
        assert Writer.folders[str(tmp_path / "tensorboard")] == SCALARS


class TestWandb:
    def test_rows_and_the_same_run_again(self, tmp_path):
        interrupted("wandb", tmp_path, [FIRST, *ROWS])
        last = {"step": 6, "bits_per_byte": 5.0}
        send("wandb", tmp_path, [{"step": 2, "resumed": True}, ROWS[3], last])
        ((run, rows),) = Run.server.items()
        assert run == (tmp_path / "wandb-id").read_text().strip()
        assert [step for step, _ in rows] == [0, 2, 2, 4, 6]
        assert rows[1] == (2, {"bits_per_byte": 7.0, "grad_norm": 1.5})
        assert Run.exit_codes == [1, 0]

    def test_another_folder_is_another_run(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            send("wandb", tmp_path / name, [FIRST])
        assert len(Run.server) == 2


def test_several_reports():
    found = []
    finetune.reports(found.append, lambda row: found.append(dict(row, second=True)))(FIRST)
    assert found == [FIRST, {**FIRST, "second": True}]


class TestRefusals:
    @pytest.mark.parametrize("name", finetune.TRACKERS)
    def test_a_package_that_is_missing(self, tmp_path, name, monkeypatch):
        monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
        result = command("train", "--out", str(tmp_path / "out"), "--log-to", name)
        assert result.exit_code == 2
        assert f"of the extra '{name}': {_extras.install(name)}" in result.stderr
        assert not (tmp_path / "out").exists()

    def test_names(self, tmp_path):
        with pytest.raises(ValueError, match="tracker 'x' must be one of tensorboard, wandb"):
            send("x", tmp_path, [])
        with pytest.raises(ValueError, match="tracker 'wandb' must be named once"):
            finetune.check_trackers(("wandb", "wandb"))


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_command(tmp_path):
    """The rows are those of the log."""
    (tmp_path / "words.txt").write_bytes(b"to be or not to be " * 300)
    options = "--context 128 --batch 2 --steps 2 --log-every 1 --evaluate-every 1 --accumulate 2"
    out, data = tmp_path / "out", str(tmp_path / "words.txt")
    base = ["train", "--data", data, "--out", str(out), "--model", "embedded", *options.split()]
    result = command(*base, "--log-to", "tensorboard", "--log-to", "wandb")
    assert result.exit_code == 0, result.stderr
    log = finetune.read_log(out)
    (scalars,) = Writer.folders.values()
    rates = [(value, step) for name, value, step in scalars if name == "learning_rate"]
    assert rates == [(row["learning_rate"], row["step"]) for row in log["records"]]
    scores = [(value, step) for name, value, step in scalars if name == "held_out_bits_per_byte"]
    assert scores == [(x["held_out_bits_per_byte"], x["step"]) for x in log["evaluations"]]
    (rows,) = Run.server.values()
    assert [step for step, _ in rows] == [0, 1, 1, 2, 2]
    assert Run.exit_codes == [0]
