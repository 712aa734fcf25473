"""What the docs show of serving: ratios between rows, what was asked, the table and the plot."""

from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.suites.paged.tables import KV_DTYPES as DTYPE_NAMES
from benchmarks.suites.serving.cases import OPERATION
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STOPPED = "stopped"
"""Status of a row that the clock ended."""
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


def serving_table(result: Result) -> str:
    """Every row: what ran, how fast, and what was asked of it."""
    lines = [_line(row) for row in result["rows"]]
    header = ["requests", "weights", "pages", "by", "new tokens per second", "with prompts"]
    header += ["compared, and what was asked", "first token", "ms per token", "tokens per step"]
    header += ["steps", "ms between them", "host ms per step", "GiB of pages, of all", "seconds"]
    return tables.table(header, lines)


def _line(row: Row) -> list[str]:
    by = _RUNS[row["runs"]] + (", n-grams" if row["speculates"] else "")
    name = [workload(row), _WEIGHTS[row["weights"]], DTYPE_NAMES[row["kv_dtype"]], by]
    if row["status"] not in ("ok", STOPPED):
        return [*name, tables.failure_cell(row), *[""] * 10]
    done = f" ({row['finished']} of {row['requests']})" if row["status"] == STOPPED else ""
    first = row.get("first_token_seconds")
    return [
        *name,
        f"{row['generated_per_second']:,.0f}",
        f"{row['tokens_per_second']:,.0f}",
        "; ".join(comparisons(row)) or "-",
        "-" if first is None else f"{first:.2f} s",
        tables.number(row.get("token_ms")),
        tables.number(row.get("tokens_per_step")),
        f"{row['steps']:,}",
        "-" if row.get("idle_ms") is None else f"{row['idle_ms']:.3f}",
        tables.number(row.get("host_ms"), 2),
        f"{_gibibytes(row['pool_bytes'])}, {_gibibytes(row.get('memory_bytes'))}",
        f"{row['seconds']:.1f}{done}",
    ]


def _gibibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f}"


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


def page_section(name: str, result: Result) -> str:
    """The table of docs/benchmarks and where its figures come from."""
    return f"{tables.picture(*PLOT)}{serving_table(result)}\n\n{tables.source(name, result)}"


def bars(result: Result) -> dict[str, dict[str, plots.Bar]]:
    """New tokens per second of each workload, by what ran it."""
    found: dict[str, dict[str, plots.Bar]] = {}
    for row in result["rows"]:
        if row["status"] == "ok":
            rate = row["generated_per_second"]
            series = _RUNS[row["runs"]].replace("`", "")
            series += ", n-grams" if row["speculates"] else ""
            series += ", bf16 pages" if row["kv_dtype"] == "auto" else ""
            bar = plots.Bar(rate, f"{rate:,.0f}")
            found.setdefault(f"{row['label']}: {workload(row)}", {})[series] = bar
    return found


def plot(result: Result) -> "Figure":
    """New tokens per second of every row."""
    figure = plots.wide_figure(12)
    axes = plots.draw_bars(figure, bars(result), 0.2)
    axes.margins(y=0.2)
    axes.set_title(f"Requests through the engine on {result['device']}")
    axes.set_ylabel("new tokens per second")
    return figure


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] not in ("ok", STOPPED):
        return tables.not_measured(row)
    parts = [
        f"{row['generated_per_second']:,.0f} new tokens/s",
        f"{row['tokens_per_second']:,.0f} with prompts",
        f"{row['seconds']:.1f} s (made and compiled in {row['compile_seconds']:.0f}, "
        f"all of it {row['all_seconds']:.0f}, expected {row['expected_seconds']:.0f})",
        f"{row['steps']:,} steps",
    ]
    if row.get("first_step_seconds"):
        parts.append(f"{row['first_step_seconds']:.1f} s in steps that compiled")
    if row.get("host_ms") is not None:
        parts.append(f"host {row['host_ms']:.2f} ms/step, idle {row['idle_ms']:.3f}")
    if row.get("token_ms") is not None:
        parts.append(f"{row['token_ms']:.2f} ms/token")
    if row.get("first_token_seconds") is not None:
        parts.append(f"first token {row['first_token_seconds']:.2f} s")
    stopped = f" ({row['reason']})" if row["status"] == STOPPED else ""
    return f"{row['name']}: {', '.join([*parts, *comparisons(row)])}{stopped}"
