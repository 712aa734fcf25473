"""Where the rows of a run go beside its log: TensorBoard, Weights & Biases.

A tracker is a `Report`, as `fine_tune(report=)` takes it, that is closed at the end. It begins with
the first row, which says at which step the run goes on: by then the folder is the run's own.
"""

import contextlib
import importlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from turbojax import _extras, _writing
from turbojax.finetune.run import Report

_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
TRACKERS = tuple(_MODULES)
"""Names that `tracker` takes; each is the name of the extra that it needs, too."""

TENSORBOARD_NAME = "tensorboard"
WANDB_ID_NAME = "wandb-id"


class Tracker(Protocol):
    """A `Report` that has an end."""

    def __call__(self, row: dict[str, Any]) -> None:
        """Takes a row; the first has ``"step"`` and ``"resumed"``, others numbers of a step."""

    def close(self, *, is_whole: bool) -> None:
        """Writes what is pending; `is_whole` says whether the run came to its end."""


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises unless all of these can be used.

    Raises:
      ValueError: if a name is not one of `TRACKERS`, or there twice.
      ImportError: if a package is missing; the message names the extra and how to install it.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracker {name!r} must be one of {', '.join(TRACKERS)}")
        if names.count(name) > 1:
            raise ValueError(f"tracker {name!r} must be named once")
        _module(name)


@contextlib.contextmanager
def tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Report]:
    """A report that sends rows to a tracker, under the names and steps that the log has.

    A run that goes on does not log steps twice: TensorBoard is told the step from which earlier
    rows are void, and of a W&B run that goes on, the rows of steps that it has
    already are left out. (One that is offline does not know its steps.)

    Args:
      name: ``"tensorboard"`` writes event files to the folder's `TENSORBOARD_NAME`; ``"wandb"``
        goes on with the W&B run whose id is in the folder's `WANDB_ID_NAME`, or begins one.
        Project, entity and mode are those of its environment variables, such as WANDB_PROJECT.
      folder: the run's.
      config: facts to show beside the run, such as its settings; JSON values.

    Yields:
      For `fine_tune(report=)`; several are combined with `reports`.

    Raises:
      ValueError: if there is no such tracker.
      ImportError: if its package is missing; the message names the extra and how to install it.
    """
    check_trackers((name,))
    found: Tracker = (
        _TensorBoard(folder, config) if name == "tensorboard" else _Wandb(folder, config)
    )
    is_whole = False
    try:
        yield found
        is_whole = True
    finally:
        found.close(is_whole=is_whole)


def reports(*each: Report) -> Report:
    """A report that gives every row to each of these, in their order."""

    def report(row: dict[str, Any]) -> None:
        for one in each:
            one(row)

    return report


class _TensorBoard:
    """Event files. Rows are in the file when a call returns: a checkpoint never is ahead of them.

    `tensorboardX.SummaryWriter` hands events to a thread, for which its `flush` does not wait: a
    process that is killed loses the last ones. So they are written here.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder / TENSORBOARD_NAME, config
        self._events = _module("tensorboard", "proto.event_pb2")
        self._summary = _module("tensorboard", "summary")
        self._writer: Any = None

    def __call__(self, row: dict[str, Any]) -> None:
        step = row["step"]
        if "resumed" in row:
            self._begin(step)
        for name, value in _numbers(row).items():
            self._write(step, summary=self._summary.scalar(name, value))
        self._writer.flush()

    def _begin(self, step: int) -> None:
        """Opens another file; what earlier ones have of steps that come again is void."""
        self._folder.mkdir(exist_ok=True)
        # Files have the second in which they begin for a name, and replace each other.
        files = len(list(self._folder.iterdir()))
        module = _module("tensorboard", "event_file_writer")
        self._writer = module.EventsWriter(str(self._folder / "events"), f".{files}")
        if files:
            begins = self._events.SessionLog(status=self._events.SessionLog.START)
            # At step 0 the held-out text is scored, at others it was.
            self._write(step + 1 if step else 0, session_log=begins)
        if step == 0:
            text = json.dumps(dict(self._config), indent=2)
            self._write(step, summary=self._summary.text("config", text))

    def _write(self, step: int, **content: Any) -> None:
        event = self._events.Event(step=step, wall_time=time.time(), **content)
        self._writer.write_event(event)

    def close(self, *, is_whole: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class _Wandb:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._run: Any = None
        self._first = 0

    def __call__(self, row: dict[str, Any]) -> None:
        if "resumed" in row:
            self._run = _module("wandb").init(
                id=self._id(),
                resume="allow",
                name=self._folder.name,
                dir=str(self._folder),
                config=dict(self._config),
            )
            self._first = self._run.step  # after the last one that the W&B run has
        elif row["step"] >= self._first:
            self._run.log(_numbers(row), step=row["step"])

    def close(self, *, is_whole: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if is_whole else 1)

    def _id(self) -> str:
        path = self._folder / WANDB_ID_NAME
        if not path.exists():
            _writing.write_text(path, uuid.uuid4().hex + "\n")
        return path.read_text(encoding="ascii").strip()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in ("step", "resumed")}


def _module(name: str, part: str = "") -> ModuleType:
    """A tracker's package, or a module of it; MissingError without it."""
    try:
        package = importlib.import_module(_MODULES[name])
        return importlib.import_module(f"{_MODULES[name]}.{part}") if part else package
    except ModuleNotFoundError as error:
        raise _extras.MissingError(
            f"{name} needs the package {_MODULES[name]} of the extra {name!r}: "
            f"{_extras.install(name)}"
        ) from error
