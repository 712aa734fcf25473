"""What a suite is: what it measures, how it runs, what it compares with, and what the docs show.

A suite is a file of `benchmarks/suites`, or a folder where that would be too long, with

1. groups of rows that share their inputs, what matters most first since the clock may stop a run,
   and tiny ones for ``--quick``: whether everything runs, and nothing about speed;
2. `each`, with what a group's rows share and what measures one of them;
3. `with_ratios`, which says of each row how it compares with what one would run instead;
4. columns of tables for the docs, by the names of the tables' markers, and plots, by the names of
   their files: pure functions of the results' JSON;
5. a `Suite` of all this, and a line in `benchmarks/catalogue.py`.
"""

import dataclasses
import functools
import gc
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from benchmarks.tables import OUT_OF_TIME, Result, Row, one_line
from benchmarks.timing import Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ceilings = Mapping[str, float | None]
"""See `timing.ceilings`."""
Table = Callable[[str, Result], str]
"""Of a result's file name and its content."""
Rows = list[tuple[Any, Any]]
"""Groups and cases."""


class Group(Protocol):
    """Rows that share their inputs."""

    @property
    def cases(self) -> Iterable[Any]:
        """Its rows, what others are compared with first."""

    def name(self, case: Any) -> str:
        """A row's name: the operation, the shape, what runs, and by which implementation."""

    def describe(self, case: Any) -> Row:
        """What else is known of a row before it runs."""


def joined(*parts: str | None) -> str:
    return "/".join(part for part in parts if part)


class Run(Protocol):
    """Measures rows one after the other; a row that fails says so and the run goes on."""

    def __call__(
        self,
        rows: Rows,
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
      groups: makes its groups, what matters most first.
      quick_groups: makes tiny ones.
      run: measures rows.
      with_ratios: adds what rows are over others, of all rows that there are.
      formats: number formats whose ceilings rows are compared with; None: no ceiling is measured,
        since the device belongs to other processes.
      environment: variables that are set before jax asks for a device, if they are not.
      tables: see `Shown`.
      plots: see `Shown`.
      one_line: a row for a terminal.
    """

    name: str
    groups: Callable[[], Iterable[Group]]
    quick_groups: Callable[[], Iterable[Group]]
    run: Run
    with_ratios: Callable[[list[Row]], list[Row]]
    formats: Sequence[str] | None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, Table] = dataclasses.field(default_factory=dict)
    plots: Mapping[str, Callable[[Result], "Figure"]] = dataclasses.field(default_factory=dict)
    one_line: Callable[[Row], str] = one_line

    @property
    def shown(self) -> Shown:
        return Shown((self.name,), self.tables, self.plots)

    def rows(self, pattern: str = "", *, quick: bool = False) -> Rows:
        """The rows whose names the regular expression `pattern` finds, in order."""
        groups = self.quick_groups() if quick else self.groups()
        every = [(group, case) for group in groups for case in group.cases]
        return [(group, case) for group, case in every if re.search(pattern, group.name(case))]


# Running ------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a run is told beside its rows, see `Run`."""

    ceilings: Ceilings
    repetitions: int | None
    deadline: float


Measure = Callable[[Any, Any], Row]
"""Of a group and a case, a row's figures and its `status`."""


def each(
    begin: Callable[[Rows, Asked], Measure],
    parts: Callable[[Rows], Iterable[Rows]] = lambda rows: [rows],
) -> Run:
    """Measures row by row.

    Args:
      begin: makes what the rows of a part share, and gives what measures one of them.
      parts: of the rows; what one part shares is freed before the next begins.
    """

    def run(
        rows: Rows,
        ceilings: Ceilings,
        on_row: Callable[[Row], None],
        *,
        repetitions: int | None = None,
        deadline: float = float("inf"),
    ) -> None:
        measure: Any = None
        for part in parts(rows):
            measure = None
            if time.monotonic() <= deadline:
                measure = begin(part, Asked(ceilings, repetitions, deadline))
            for group, case in part:
                one = functools.partial(_measure, measure, group, case)
                attempt(describe(group, case), one, on_row, deadline)

    return run


def _measure(measure: Measure, group: Group, case: Any) -> Row:
    return measure(group, case)


def parted(key: Callable[[Any], Any]) -> Callable[[Rows], Iterable[Rows]]:
    """Rows in parts by what their groups have in common."""

    def parts(rows: Rows) -> Iterable[Rows]:
        found: dict[Any, Rows] = {}
        for row in rows:
            found.setdefault(key(row[0]), []).append(row)
        return list(found.values())

    return parts


def describe(group: Group, case: Any) -> Row:
    """What is known of a row before it runs."""
    return {"name": group.name(case), **group.describe(case)}


def attempt(
    row: Row, measure: Callable[[], Row], on_row: Callable[[Row], None], deadline: float
) -> None:
    """Measures the rest of a row if there is time, and hands over what came of it."""
    if time.monotonic() > deadline:
        on_row({**row, "status": "not run", "reason": OUT_OF_TIME})
        return
    try:
        row = row | measure()
    except Exception as error:  # out of memory, a compiler's refusal: facts to be recorded
        row = row | failure(error)
    on_row(row)


def failure(error: Exception) -> dict[str, str]:
    """What a row says about the error that ended it."""
    lines = str(error).strip().splitlines()
    reason = lines[0][:400] if lines else type(error).__name__
    if isinstance(error, NotImplementedError):
        return {"status": "not run", "reason": reason}
    return {"status": "failed", "reason": f"{type(error).__name__}: {reason}"}


class Latest:
    """What was made last, of its key, which is freed before anything else is made."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._key: Any = None
        self._made: Any = None

    def of(self, key: Any) -> Any:
        if self._key is None or key != self._key:
            self._key = self._made = None
            gc.collect()
            self._made = self._make(key)
            self._key = key
        return self._made


# Facts of rows ------------------------------------------------------------------------------------


def timing_facts(taken: Timing) -> Row:
    """A time and its longest kernels."""
    return {
        "us": taken.microseconds,
        "spread": taken.spread,
        "clock": taken.clock,
        "repetitions": taken.repetitions,
        "wall_us": taken.wall_microseconds,
        "kernels": kernel_facts(taken.kernels),
    }


def kernel_facts(kernels: Iterable[tuple[str, float]]) -> list[Row]:
    return [{"name": name[:80], "us": us} for name, us in list(kernels)[:8]]


def temporary_bytes(compiled: Any) -> Row:
    """Memory that a program takes beside its operands."""
    size = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    return {"temporary_bytes": size}


# Rows beside each other ---------------------------------------------------------------------------


def faster(old: Row, new: Row) -> Row:
    """The better of a row's two results; `us_of_runs` has the times of all of them.

    What else a device does, and the clock that its power leaves it, only take time.
    """
    if old["status"] != "ok" or new["status"] != "ok":
        return old if old["status"] == "ok" else new
    times = [us for row in (old, new) for us in row.get("us_of_runs", [row["us"]])]
    return {**min(old, new, key=lambda row: float(row["us"])), "us_of_runs": times}


def over_cudnn(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over_cudnn`: against the fastest cuDNN row of the same shape."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["status"] == "ok" and row["method"].startswith("cudnn"):
            best[shape_of(row)] = min(row["us"], best.get(shape_of(row), float("inf")))
    return [
        {**row, "speedup_over_cudnn": best[shape_of(row)] / row["us"]}
        if row["status"] == "ok" and shape_of(row) in best
        else row
        for row in rows
    ]


def shape_of(row: Row) -> tuple[Any, ...]:
    names = ("operation", "model", "batch", "tokens", "is_causal", "window")
    return tuple(row.get(name) for name in names)


def over_baselines(
    baselines: Mapping[str, Sequence[str]],
    series: str = "family",
    place: Sequence[str] = ("operation", "label"),
    figure: str = "us",
) -> Callable[[list[Row]], list[Row]]:
    """What adds `speedup_over`: against the fastest row of each baseline of a row's place.

    Args:
      baselines: those that rows of an operation are compared with.
      series: what baselines are names of, in rows.
      place: what rows have in common that are compared.
      figure: the time.
    """

    def add(rows: list[Row]) -> list[Row]:
        best: dict[tuple[Any, ...], float] = {}
        for row in rows:
            if row["status"] == "ok":
                key = (*(row[name] for name in place), row[series])
                best[key] = min(row[figure], best.get(key, float("inf")))
        return [ratios(row, best) if row["status"] == "ok" else row for row in rows]

    def ratios(row: Row, best: Mapping[tuple[Any, ...], float]) -> Row:
        here = tuple(row[name] for name in place)
        names = [name for name in baselines[row["operation"]] if (*here, name) in best]
        return {**row, "speedup_over": {name: best[*here, name] / row[figure] for name in names}}

    return add


def with_figure(
    name: str, base: str, place: Sequence[str], of: Callable[[Row, Row], float]
) -> Callable[[list[Row]], list[Row]]:
    """What adds a figure to the rows that were measured, beside the row of a method there."""

    def add(rows: list[Row]) -> list[Row]:
        done = [row for row in rows if row["status"] == "ok"]
        bases = {tuple(r[x] for x in place): r for r in done if r["method"] == base}
        return [
            {**row, name: of(row, bases[here])}
            if row["status"] == "ok" and (here := tuple(row[x] for x in place)) in bases
            else row
            for row in rows
        ]

    return add
