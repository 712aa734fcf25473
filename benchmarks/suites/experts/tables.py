"""The table of grouped products: a pure function of their JSON."""

from collections.abc import Callable, Mapping

from benchmarks import tables
from benchmarks.suites.fireq.tables import one_line as one_line
from benchmarks.tables import Result

OPERATION = "experts"
BASELINES = ("bf16", "fp8")
"""What rows are compared with, by family."""
_METHODS = {"bf16": "bf16", "fp8": "e4m3", "int4": "INT4"}


def table(result: Result) -> str:
    """Every row; those that did not run with the reason."""
    lines = []
    for row in result["rows"]:
        if row.get("reason") == tables.OUT_OF_TIME:
            continue
        shape = f"{row['experts']} experts, {row['top_k']} a token, {row['inputs']} to "
        name = [f"{row['model']} ({shape}{row['outputs']})", f"{row['tokens']:,}"]
        name += [_METHODS[row["method"]], row["implementation"] or "XLA"]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * (len(BASELINES) + 3)])
            continue
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *tables.ratios(row, BASELINES),
                tables.number(row["gigabytes_per_second"]),
                tables.share_of_ceiling(row),
                f"{row['relative_l1']:.4f}",
            ]
        )
    header = ["product", "tokens", "what", "kernel", "us", "over bf16", "over e4m3"]
    header += ["GB/s", "of ceiling", "relative L1"]
    return tables.with_cut(tables.table(header, lines), result, OPERATION)


def page_section(name: str, result: Result) -> str:
    """The table and where its figures come from."""
    text = tables.ceilings_sentence(result, {"copy": ". ", "bf16": ", ", "fp8": ". "})
    return f"{table(result)}\n\n{text}{tables.source(name, result)}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {"experts": page_section}
"""What the docs show of the suite."""
