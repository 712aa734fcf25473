"""Serving at the speed of the kernels: the engine, its kernels by hand, speculation, HTTP.

Wall time. Every row says how long it should take (`expected_seconds`), and is stopped if it runs
for a few times that, so that a slow one leaves time to the others.
"""

import gc
import time
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.suite import Asked, Measure, Rows, Shown, Suite, each
from benchmarks.suites.paged.suite import KV_DTYPES as DTYPE_NAMES
from benchmarks.suites.serving import cases, engines
from benchmarks.suites.serving.cases import OPERATION, STOPPED, Case, Group
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PATIENCE = 2.5
"""Times what is expected of a row: seconds after compiling in which steps of it are begun."""


def begin(rows: Rows, asked: Asked) -> Measure:
    """See `suite.each`; everything runs once."""
    del rows
    stock = engines.Stock()

    def measured(group: Group, case: Case) -> Row:
        gc.collect()  # what the last row made
        row: Row = {"status": "failed"}
        try:
            row = measure(stock, group, case, asked.deadline)
        finally:
            if row["status"] != "ok":
                stock.drop()
        return row

    return measured


def measure(stock: engines.Stock, group: Group, case: Case, deadline: float) -> Row:
    begun = time.monotonic()
    if case.runs == "bare":
        stock.drop()  # its pools are as large as an engine's
        row = engines.measure_bare(stock.model(group, case), group, case)
    elif case.runs == "steps":
        row = engines.measure_steps(stock.model(group, case), group, case)
    elif case.runs == "http":
        try:
            made = stock.engine(group, case)
            row = engines.measure_http(made, group, _limit(case, deadline))
        finally:
            stock.drop()
    else:
        made = stock.engine(group, case)
        row = engines.measure(made, group, case, _limit(case, deadline))
    model = stock.model(group, case)
    found = {"weight_bytes": model.nbytes, **engines.memory()}
    return {**row, **found, "all_seconds": time.monotonic() - begun}


def _limit(case: Case, deadline: float) -> float:
    # From now: an engine that took long to compile is not to be lost.
    return min(deadline, time.monotonic() + _PATIENCE * case.expected)


LESS = ("over_by_hand", "idle_ms")
"""Figures of which less is better: what was asked is the most that they may be."""
PLOT = ("serving.png", "Requests through the engine: new tokens per second")

_RUNS = {
    "engine": "engine",
    "bare": "its kernels by hand",
    "steps": "`decode_step` by hand",
    "http": "over HTTP",
}
_WEIGHTS = {"bf16": "bf16", "int4": "INT4", "looping": "bf16, text repeats"}
_FIGURES = {
    "generated_per_second": "{:,.0f} new tokens per second",
    "share_of_bare": "{:.2f} of the kernels' speed",
    "over_by_hand": "{:.2f}x the time of `decode_step`",
    "times_bf16_weights": "{:.2f}x bf16 weights",
    "times_bf16": "{:.2f}x bf16 pages",
    "times_engine": "{:.2f}x without HTTP",
    "times_without": "{:.2f}x without speculation",
    "idle_ms": "{:.2f} ms between steps",
}


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with how they compare with others that are complete, and whether that is enough."""
    by_name = {row["name"]: row for row in rows if row["status"] == "ok"}
    return [_with_ratios(row, by_name) for row in rows]


def _with_ratios(row: Row, by_name: dict[str, Row]) -> Row:
    if row["status"] != "ok":
        return row
    found = {}
    for figure, place in row["over"].items():
        other = by_name.get(f"{OPERATION}/{row['model']}/{place}")
        if other is not None:
            found[figure] = _ratio(figure, row, other)
    row = {**row, **found}
    reached = {
        figure: (row[figure] <= asked if figure in LESS else row[figure] >= asked)
        for figure, asked in row["asked"].items()
        if row.get(figure) is not None
    }
    return {**row, "reached": reached}


def _ratio(figure: str, row: Row, other: Row) -> float:
    if figure == "share_of_bare":
        return float(other["seconds"] / row["seconds"])
    if figure == "over_by_hand":
        return float(row["token_ms"] / other["token_ms"])
    return float(row["generated_per_second"] / other["generated_per_second"])


# What the docs show -------------------------------------------------------------------------------


def workload(row: Row) -> str:
    """``256 x 1,024 + 256``, and how many at a time where not all."""
    at_a_time = f", {row['clients']} at a time" if row["clients"] else ""
    return f"{row['requests']} x {row['prompt']:,} + {row['new']:,}{at_a_time}"


def comparisons(row: Row) -> list[str]:
    """Each figure that compares a row with another, and whether it is what was asked."""
    found = []
    for figure, text in _FIGURES.items():
        asked = row["asked"].get(figure)
        if row.get(figure) is None or (asked is None and figure not in row["over"]):
            continue
        found.append(text.format(row[figure]) + _verdict(row, figure, asked))
    if row.get("acceptance") is not None:
        found.append(f"{row['acceptance']:.0%} of the proposed tokens accepted")
    return found


def _verdict(row: Row, figure: str, asked: float | None) -> str:
    if asked is None:
        return ""
    number = f"{asked:,.0f}" if asked >= 100 else f"{asked:g}"
    bound = "at most" if figure in LESS else "at least"
    verdict = "" if row.get("reached", {}).get(figure) else ": missed"
    return f" (asked: {bound} {number}{verdict})"


def _by(row: Row) -> str:
    return _RUNS[row["runs"]] + (", n-grams" if row["speculates"] else "")


def _gibibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f}"


def seconds(row: Row) -> str:
    done = f" ({row['finished']} of {row['requests']})" if row["status"] == STOPPED else ""
    return f"{row['seconds']:.1f}{done}"


def _pages(row: Row) -> str:
    return f"{_gibibytes(row['pool_bytes'])}, {_gibibytes(row.get('memory_bytes'))}"


_NAMES = (
    ("requests", workload),
    ("weights", lambda row: _WEIGHTS[row["weights"]]),
    ("pages", lambda row: DTYPE_NAMES[row["kv_dtype"]]),
    ("by", _by),
)
_COLUMNS = (
    ("new tokens per second", tables.shown_as("generated_per_second", "{:,.0f}")),
    ("with prompts", tables.shown_as("tokens_per_second", "{:,.0f}")),
    ("compared, and what was asked", lambda row: "; ".join(comparisons(row)) or "-"),
    ("first token", tables.shown_as("first_token_seconds", "{:.2f} s")),
    ("ms per token", tables.significant("token_ms")),
    ("tokens per step", tables.significant("tokens_per_step")),
    ("steps", tables.shown_as("steps", "{:,}")),
    ("ms between them", tables.shown_as("idle_ms", "{:.3f}")),
    ("host ms per step", lambda row: tables.number(row.get("host_ms"), 2)),
    ("GiB of pages, of all", _pages),
    ("seconds", seconds),
)


def serving_table(result: Result) -> str:
    return tables.rows_table(result["rows"], _NAMES, _COLUMNS, measured=("ok", STOPPED))


# An earlier suite: requests of random lengths through an engine with a pool of fixed size. Today's
# group ``pages`` measures the same of longer prompts.
_ENGINE_NAMES = (
    ("requests", lambda row: _asked(row)),
    ("pages", lambda row: DTYPE_NAMES[row["kv_dtype"]]),
)
_ENGINE_COLUMNS = (
    ("new tokens per second", tables.shown_as("generated_per_second", "{:,.0f}")),
    *tables.over({"auto": "over bf16"}),
    ("with prompts", tables.shown_as("tokens_per_second", "{:,.0f}")),
    ("seconds", tables.shown_as("seconds", "{:.1f}")),
    ("pool holds, tokens", tables.shown_as("token_capacity", "{:,}")),
    ("over bf16", tables.shown_as("capacity_over_auto", "{:.2f}x")),
    ("most held", tables.shown_as("most_tokens", "{:,}")),
    ("sequences", tables.shown_as("most_sequences", "{}")),
    ("preemptions", tables.shown_as("preemptions", "{}")),
    ("steps", tables.shown_as("steps", "{:,}")),
)


def _asked(row: Row) -> str:
    prompt, new = ("{:,} to {:,}".format(*row[name]) for name in ("prompt", "new"))
    return f"{row['requests']} x {prompt}, {new} new"


def engine_section(name: str, result: Result) -> str:
    text = tables.rows_table(result["rows"], _ENGINE_NAMES, _ENGINE_COLUMNS)
    by = "Measured by `benchmarks/suites/engine.py` of commit bb914283."
    picture = tables.picture(
        "engine.png", "The engine with a pool of one size: new tokens per second and tokens held"
    )
    return f"{picture}{text}\n\n{tables.source(name, result)} {by}"


ENGINE = Shown(("engine",), {"engine": engine_section})


def bars(result: Result) -> plots.Ratios:
    found: plots.Ratios = {}
    for row in result["rows"]:
        if row["status"] == "ok":
            rate = row["generated_per_second"]
            series = _by(row).replace("`", "")
            series += ", bf16 pages" if row["kv_dtype"] == "auto" else ""
            place = f"{row['label']}: {workload(row)}"
            found.setdefault(place, {})[series] = (rate, f"{rate:,.0f}")
    return found


def plot(result: Result) -> "Figure":
    title = f"Requests through the engine on {result['device']}"
    return plots.of_ratios(bars(result), title, "new tokens per second", bar=0.2, line=False)


def one_line(row: Row) -> str:
    line = tables.one_line(row)
    if row["status"] not in ("ok", STOPPED):
        return line
    seconds = f"all of it {row['all_seconds']:.0f}, expected {row['expected_seconds']:.0f}"
    return ", ".join([line, seconds, *comparisons(row)])


SUITE = Suite(
    name=OPERATION,
    groups=cases.groups,
    quick_groups=cases.quick_groups,
    run=each(begin, lambda rows: [cases.in_order(rows)]),
    with_ratios=with_ratios,
    one_line=one_line,
    formats=(),
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={OPERATION: tables.section(serving_table, plot=PLOT)},
    plots={PLOT[0]: plot},
)
