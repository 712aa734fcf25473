"""Markdown tables: what all suites share. Pure functions of the results' JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

# The reason of rows that a run had no time for: tables count them.
OUT_OF_TIME = "the time given to this run was over"


def finished(result: Result, operation: str) -> list[Row]:
    rows = result["rows"]
    return [row for row in rows if row["operation"] == operation and row["status"] == "ok"]


def shapes(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by shape: models in the order of the file, then by batch and tokens."""
    rows = list(rows)
    models = [row["model"] for row in rows]

    def order(row: Row) -> tuple[int, ...]:
        return models.index(row["model"]), row["batch"], row["tokens"], row["is_causal"]

    grouped: dict[str, list[Row]] = {}
    for row in sorted(rows, key=order):
        grouped.setdefault(shape_label(row), []).append(row)
    return grouped


def shape_label(row: Row) -> str:
    """``llama3-8b 16 x 32k``; with ``causal`` and ``window 1024`` if it is so."""
    causal = " causal" if row["is_causal"] else ""
    window = f" window {row['window']}" if row.get("window") is not None else ""
    return f"{row['model']} {batch_and_tokens(row)}{causal}{window}"


def batch_and_tokens(row: Row) -> str:
    """``16 x 32k``."""
    return f"{row['batch']} x {short(row['tokens'])}"


def short(count: int) -> str:
    """``32k`` for whole thousands of 1,024; others as they are."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def fastest(rows: Iterable[Row], matches: Callable[[Row], bool]) -> Row | None:
    return min(filter(matches, rows), key=lambda row: row["us"], default=None)


def cut(result: Result, operation: str) -> str:
    """One sentence on the rows that a run had no time for, or nothing."""
    rows = [row for row in result["rows"] if row["operation"] == operation]
    count = sum(row.get("reason") == OUT_OF_TIME for row in rows)
    return f"{count} of {len(rows)} rows were not run: {OUT_OF_TIME}." if count else ""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """A figure with this many significant digits."""
    if value is None:
        return "-"
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def source(name: str, result: Result, link: str = "") -> str:
    """Where figures come from: device, versions, date and file."""
    driver = f", driver {result['driver']}" if "driver" in result else ""
    file = f"[{name}]({link}{name})" if link else f"`benchmarks/results/{name}`"
    return f"{result['device']}{driver}, jax {result['jax']}, {result['date']} ({file})."


def picture(name: str, description: str) -> str:
    """A plot above a table: its file, and what it shows in words."""
    return f"![{description}]({name})\n\n"


def failure_cell(row: Row) -> str:
    """Why a row did not run, short enough for a cell."""
    return f"{row['status']}: {row['reason'][:120]}".replace("|", "\\|")


def shown(result: Result, operation: str) -> list[Row]:
    """The rows of an operation but those that a run had no time for: `with_cut` counts them."""
    rows = [row for row in result["rows"] if row["operation"] == operation]
    return [row for row in rows if row.get("reason") != OUT_OF_TIME]


def with_cut(text: str, result: Result, operation: str) -> str:
    """A table with what `cut` says under it."""
    missing = cut(result, operation)
    return text + (f"\n\n{missing}" if missing else "")


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def with_ratio(text: str, ratio: float | None) -> str:
    """``150 (3.24x)``, or the text alone."""
    return text if ratio is None else f"{text} ({times(ratio)})"


def ratios(row: Row, baselines: Iterable[str]) -> list[str]:
    """The speed over each of these, where there is one."""
    found = row.get("speedup_over", {})
    return [times(found.get(name)) for name in baselines]


# What a ceiling is of, where a cell has no room for more.
_UNITS = {"copy": "bytes", "bf16": "bf16", "fp8": "e4m3"}


def share_of_ceiling(row: Row) -> str:
    """``87 % (bytes)``."""
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} % ({_UNITS[row['bound']]})"


def ceilings_sentence(result: Result, ending: Mapping[str, str]) -> str:
    names = {
        "copy": "Reading and writing 1 GiB: {:,.0f} GB/s",
        "bf16": "A product of 8192 x 8192 x 8192 through XLA: {:,.0f} TFLOP/s in bfloat16",
        "fp8": "{:,.0f} in e4m3",
    }
    rates = result["ceilings"]
    return "".join(
        names[unit].format(rates[unit]) + end for unit, end in ending.items() if rates.get(unit)
    )


# For `ceilings_sentence`.
COPY = {"copy": ". "}
COPY_AND_PRODUCT = {"copy": ". ", "bf16": ". "}
COPY_AND_PRODUCTS = {"copy": ". ", "bf16": ", ", "fp8": ". "}


# Tables and lines as data -------------------------------------------------------------------------

Cell = Callable[[Row], str]
Column = tuple[str, Cell]
"""A column's title, and its cell of a row."""


def shown_as(key: str, form: str, per: float = 1) -> Cell:
    """A figure of the rows in this format, over `per`; a dash where there is none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else form.format(value if per == 1 else value / per)

    return cell


def significant(key: str) -> Cell:
    """A figure with three significant digits."""
    return lambda row: number(row.get(key))


def over(baselines: Mapping[str, str]) -> list[Column]:
    """Speeds over baselines, by their names and with these titles."""
    return [
        (title, lambda row, name=name: times(row.get("speedup_over", {}).get(name)))
        for name, title in baselines.items()
    ]


US: Column = ("us", significant("us"))
GIGABYTES: Column = ("GB/s", significant("gigabytes_per_second"))
CEILING: Column = ("of ceiling", share_of_ceiling)
L1: Column = ("relative L1", shown_as("relative_l1", "{:.4f}"))
L2: Column = ("relative L2", shown_as("relative_l2", "{:.4f}"))


def rows_table(
    rows: Iterable[Row],
    names: Sequence[Column],
    figures: Sequence[Column],
    *,
    measured: Sequence[str] = ("ok",),
    failed: Cell = failure_cell,
) -> str:
    """A line for each row; of those whose status is not `measured`, why they did not run."""
    lines = []
    for row in rows:
        line = [cell(row) for _, cell in names]
        if row["status"] in measured:
            line += [cell(row) for _, cell in figures]
        else:
            line += [failed(row), *[""] * (len(figures) - 1)]
        lines.append(line)
    return table([title for title, _ in (*names, *figures)], lines)


def operation_table(
    result: Result, operation: str, names: Sequence[Column], figures: Sequence[Column]
) -> str:
    """`rows_table` of an operation, with how many rows there was no time for."""
    return with_cut(rows_table(shown(result, operation), names, figures), result, operation)


def pivot(
    corner: str, places: Mapping[str, Mapping[str, Row]], series: Mapping[str, str], cell: Cell
) -> str:
    """A line for each place, a column for each series by its title; a dash where there is none."""
    lines = [
        [place, *("-" if name not in rows else cell(rows[name]) for name in series)]
        for place, rows in places.items()
    ]
    return table([corner, *series.values()], lines)


def nested(rows: Iterable[Row], place: Cell, series: Cell) -> dict[str, dict[str, Row]]:
    """Rows by their place, in order, and by what sets them apart there."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(place(row), {})[series(row)] = row
    return found


Words = str | Callable[[Result], str]


def section(
    table: Callable[[Result], str],
    *,
    plot: tuple[str, str] | None = None,
    note: Words = "",
    rates: Mapping[str, str] | None = None,
) -> Callable[[str, Result], str]:
    """A table for a page of the docs, and where its figures come from.

    Args:
      table: of a result.
      plot: the file of a plot above it, and what that shows.
      note: sentences under it.
      rates: see `ceilings_sentence`.
    """

    def text(name: str, result: Result) -> str:
        above = "" if plot is None else picture(*plot)
        words = note if isinstance(note, str) else note(result)
        words += ceilings_sentence(result, rates) if rates else ""
        return f"{above}{table(result)}\n\n{words}{source(name, result)}"

    return text


# What a terminal shows of a row, in this order.
_FIGURES = {
    "us": "{:,.1f} us",
    "clock": "by {}",
    "seconds": "{:.2f} s",
    "compile_seconds": "compiled in {:.0f} s",
    "wall_us": "wall {:.1f}",
    "device_us": "kernels {:.1f}",
    "generated_per_second": "{:,.0f} new tokens/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflops_per_second": "{:.0f} TFLOP/s",
    "gigabytes_per_second": "{:.2f} GB/s",
    "percent_of_ceiling": "{:.0f} % of ceiling",
    "speedup_over_cudnn": "{:.2f}x cuDNN",
    "speedup": "{:.2f}x one",
    "density": "density {:.4f}",
    "cache_bytes": "cache {:,} bytes",
    "token_capacity": "pool holds {:,}",
    "preemptions": "{} preemptions",
    "steps": "{:,} steps",
    "host_ms": "host {:.2f} ms/step",
    "idle_ms": "idle {:.3f}",
    "token_ms": "{:.2f} ms/token",
    "first_token_seconds": "first token {:.2f} s",
    "peak_device_bytes": "{:,} bytes on the device",
    "peak_host_bytes": "{:,} bytes on the host",
    "relative_l1": "L1 {:.4f}",
    "relative_l2": "L2 {:.4f}",
    "difference": "off by {:.1e}",
}


def one_line(row: Row) -> str:
    """A row for a terminal: the figures that it has, and why it has no others."""
    parts = [form.format(row[x]) for x, form in _FIGURES.items() if row.get(x) is not None]
    if not parts or row["status"] in ("failed", "not run"):
        return f"{row['name']}: {row['status']}: {row['reason']}"
    parts += [f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup_over", {}).items()]
    parts += [f"{count} {kind}" for kind, count in row.get("exchanges", {}).items()]
    stopped = f" ({row['reason']})" if "reason" in row else ""
    return f"{row['name']}: {', '.join(parts)}{stopped}"
