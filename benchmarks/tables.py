"""Markdown tables: what all suites share. Pure functions of the results' JSON."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

# The reason of rows that a run had no time for: tables count them.
OUT_OF_TIME = "the time given to this run was over"


def finished(result: Result, operation: str) -> list[Row]:
    """The rows of an operation that were measured."""
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
    """The fastest row that matches, or None."""
    return min(filter(matches, rows), key=lambda row: row["us"], default=None)


def cut(result: Result, operation: str) -> str:
    """One sentence on the rows that a run had no time for, or nothing."""
    rows = [row for row in result["rows"] if row["operation"] == operation]
    count = sum(row.get("reason") == OUT_OF_TIME for row in rows)
    return f"{count} of {len(rows)} rows were not run: {OUT_OF_TIME}." if count else ""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
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


def one_line(row: Row) -> str:
    """A row for a terminal: its rate, and its speed over cuDNN."""
    if row["status"] != "ok":
        return not_measured(row)
    rate = (
        f"{row['tflops_per_second']:.0f} TFLOP/s"
        if "tflops_per_second" in row
        else f"{row['gigabytes_per_second']:.0f} GB/s"
    )
    percent = row["percent_of_ceiling"]
    share = "" if percent is None else f", {percent:.0f} % of ceiling"
    ratio = row.get("speedup_over_cudnn")
    speed = "" if ratio is None else f", {ratio:.2f}x cuDNN"
    return (
        f"{row['name']}: {row['us']:.1f} us ({row['clock']}), {rate}{share}{speed}, "
        f"L1 {row['relative_l1']:.4f}"
    )


def picture(name: str, description: str) -> str:
    """A plot above a table: its file, and what it shows in words."""
    return f"![{description}]({name})\n\n"


def not_measured(row: Row) -> str:
    """A row that did not run, for a terminal."""
    return f"{row['name']}: {row['status']}: {row['reason']}"


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
    """``3.43x``."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def ratios(row: Row, baselines: Sequence[str]) -> list[str]:
    """The speed over each of these, where there is one."""
    over = row.get("speedup_over", {})
    return [times(over.get(name)) for name in baselines]


def ratio_parts(row: Row) -> list[str]:
    """The speed over everything that a row is compared with, for a terminal."""
    return [f"{ratio:.2f}x {name}" for name, ratio in row.get("speedup_over", {}).items()]


# What a ceiling is of, where a cell has no room for more.
_UNITS = {"copy": "bytes", "bf16": "bf16", "fp8": "e4m3"}


def share_of_ceiling(row: Row) -> str:
    """``87 % (bytes)``."""
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} % ({_UNITS[row['bound']]})"


def ceilings_sentence(result: Result, ending: Mapping[str, str]) -> str:
    """What the device reached at best in the same run.

    Args:
      result: of a suite.
      ending: what follows each rate; rates that are not named here, or not measured, are left out.
    """
    names = {
        "copy": "Reading and writing 1 GiB: {:,.0f} GB/s",
        "bf16": "A product of 8192 x 8192 x 8192 through XLA: {:,.0f} TFLOP/s in bfloat16",
        "fp8": "{:,.0f} in e4m3",
    }
    rates = result["ceilings"]
    return "".join(
        names[unit].format(rates[unit]) + end for unit, end in ending.items() if rates.get(unit)
    )


COPY_AND_PRODUCT = {"copy": ". ", "bf16": ". "}
"""For `ceilings_sentence`."""
