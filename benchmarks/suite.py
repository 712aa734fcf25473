"""What a suite is: what it measures, how it runs, what it compares with, and what the docs show.

A suite is a file of `benchmarks/suites`, or a folder where that would be too long, with

1. groups of rows that share their inputs, what matters most first, and tiny ones for ``--quick``;
2. `run`, which measures rows one after the other (`attempt` records what becomes of each);
3. `with_ratios`, which says of each row how it compares with what one would run instead;
4. `one_line`, a row for a terminal;
5. tables of the docs, by the names of their markers, and plots, by the names of their files: pure
   functions of the results' JSON;
6. a `Suite` of all this, and a line in `benchmarks/catalogue.py`.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.tables import OUT_OF_TIME, Result, Row
from benchmarks.timing import Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ceilings = dict[str, float | None]
"""See `timing.ceilings`."""
Table = Callable[[str, Result], str]
"""Of a result's file name and its content."""


class Group(Protocol):
    """Rows that share their inputs."""

    @property
    def cases(self) -> Iterable[Any]:
        """Its rows, what others are compared with first."""

    def name(self, case: Any) -> str:
        """A row's name: the operation, the shape, what runs, and by which implementation."""


class Run(Protocol):
    """Measures rows one after the other; a row that fails says so and the run goes on."""

    def __call__(
        self,
        rows: list[tuple[Any, Any]],
        ceilings: Ceilings,
        on_row: Callable[[Row], None],
        *,
        repetitions: int | None = None,
        deadline: float = float("inf"),
    ) -> None:
        """Measures.

        Args:
          rows: groups and cases, as `Suite.rows`.
          ceilings: see `timing.ceilings`.
          on_row: called with each finished row.
          repetitions: of each call; chosen from its duration if not given.
          deadline: of `time.monotonic`; no row is started after it.
        """


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the docs show of the newest result of some name.

    Attributes:
      results: what it is called, the date left out; the newest of all these counts.
      tables: by the names of their markers.
      plots: by the names of their files.
    """

    results: tuple[str, ...]
    tables: Mapping[str, Table]
    plots: Mapping[str, Callable[[Result], "Figure"]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Something that `python -m benchmarks run --suite NAME` measures.

    Attributes:
      name: of the suite, and of its results.
      groups: makes its groups, what matters most first: a run may be stopped by the clock.
      quick_groups: makes tiny ones: whether everything runs, and nothing about speed.
      run: measures rows.
      with_ratios: adds what rows are over others, of all rows that there are.
      one_line: a row for a terminal.
      formats: number formats whose ceilings rows are compared with; None: no ceiling is measured,
        since the device belongs to other processes.
      environment: variables that are set before jax asks for a device, if they are not.
      tables: see `Shown`.
      plots: see `Shown`.
    """

    name: str
    groups: Callable[[], Iterable[Group]]
    quick_groups: Callable[[], Iterable[Group]]
    run: Run
    with_ratios: Callable[[list[Row]], list[Row]]
    one_line: Callable[[Row], str]
    formats: Sequence[str] | None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    plots: Mapping[str, Callable[[Result], "Figure"]] = dataclasses.field(default_factory=dict)

    @property
    def shown(self) -> Shown:
        """What the docs show of it."""
        return Shown((self.name,), self.tables, self.plots)

    def rows(self, pattern: str = "", *, quick: bool = False) -> list[tuple[Any, Any]]:
        """The rows whose names the regular expression `pattern` finds, in order."""
        groups = self.quick_groups() if quick else self.groups()
        every = [(group, case) for group in groups for case in group.cases]
        return [(group, case) for group, case in every if re.search(pattern, group.name(case))]


def attempt(
    row: Row, measure: Callable[[], Row], on_row: Callable[[Row], None], deadline: float
) -> None:
    """Measures a row if there is time, and hands over what came of it.

    Args:
      row: what is known of it before it runs.
      measure: the rest, with its `status`.
      on_row: see `Run`.
      deadline: see `Run`.
    """
    if time.monotonic() > deadline:
        on_row({**row, "status": "not run", "reason": OUT_OF_TIME})
        return
    try:
        row = row | measure()
    except Exception as error:  # out of memory, a compiler's refusal: facts to be recorded
        row = row | failure(error)
    on_row(row)


def faster(old: Row, new: Row) -> Row:
    """The better of a row's two results; `us_of_runs` has the times of all of them.

    What else a device does, and the clock that its power leaves it, only take time.
    """
    if old["status"] != "ok" or new["status"] != "ok":
        return old if old["status"] == "ok" else new
    times = [us for row in (old, new) for us in row.get("us_of_runs", [row["us"]])]
    return {**min(old, new, key=lambda row: float(row["us"])), "us_of_runs": times}


def failure(error: Exception) -> dict[str, str]:
    """What a row says about the error that ended it."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:400] if lines else type(error).__name__
    if isinstance(error, NotImplementedError):
        return {"status": "not run", "reason": reason}
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


class Latest:
    """What was made last, which is freed before anything else is made.

    Args:
      make: makes it of a key.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._key: Any = None
        self._made: Any = None

    def of(self, key: Any) -> Any:
        """What is made of this key."""
        if self._key is None or key != self._key:
            self._key = self._made = None
            self._made = self._make(key)
            self._key = key
        return self._made


def timing_facts(taken: Timing) -> Row:
    """A time and its longest kernels, for a row."""
    return {
        "us": taken.microseconds,
        "spread": taken.spread,
        "clock": taken.clock,
        "repetitions": taken.repetitions,
        "wall_us": taken.wall_microseconds,
        "kernels": kernel_facts(taken.kernels),
    }


def kernel_facts(kernels: Iterable[tuple[str, float]]) -> list[Row]:
    """The longest kernels, for a row."""
    return [{"name": name[:80], "us": us} for name, us in list(kernels)[:8]]


def over_cudnn(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over_cudnn`: against the fastest cuDNN row of the same shape."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["status"] == "ok" and row["method"].startswith("cudnn"):
            best[_shape_of(row)] = min(row["us"], best.get(_shape_of(row), float("inf")))
    return [
        {**row, "speedup_over_cudnn": best[_shape_of(row)] / row["us"]}
        if row["status"] == "ok" and _shape_of(row) in best
        else row
        for row in rows
    ]


def _shape_of(row: Row) -> tuple[Any, ...]:
    names = ("operation", "model", "batch", "tokens", "is_causal", "window")
    return tuple(row.get(name) for name in names)


def over_baselines(
    baselines: Mapping[str, Sequence[str]],
) -> Callable[[list[Row]], list[Row]]:
    """What adds `speedup_over`: against the fastest row of each baseline of a row's shape.

    Args:
      baselines: families of rows that those of an operation are compared with.
    """

    def add(rows: list[Row]) -> list[Row]:
        best: dict[tuple[str, str, str], float] = {}
        for row in rows:
            if row["status"] == "ok":
                place = (row["operation"], row["label"], row["family"])
                best[place] = min(row["us"], best.get(place, float("inf")))
        return [ratios(row, best) if row["status"] == "ok" else row for row in rows]

    def ratios(row: Row, best: Mapping[tuple[str, str, str], float]) -> Row:
        here = {
            name: (row["operation"], row["label"], name) for name in baselines[row["operation"]]
        }
        over = {name: best[place] / row["us"] for name, place in here.items() if place in best}
        return {**row, "speedup_over": over}

    return add
