"""Tables and the plot of the paged suite: pure functions of its JSON."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The operations of the suite, as they begin the rows' names.
DECODE, PAGES, CHUNK = "paged-decode", "paged-page-size", "paged-chunk"
APPEND = "paged-append"
PAGE_64 = "page-64"
_OTHERS = ("cudnn", "bf16-pages", "fp8-pages")
BASELINES = {
    DECODE: _OTHERS,
    CHUNK: _OTHERS,
    PAGES: (PAGE_64,),
    APPEND: ("dense",),
}
"""What rows of an operation are compared with, by family."""
_BASELINE_NAMES = {
    "cudnn": "over cuDNN",
    "bf16-pages": "over bf16 pages",
    "fp8-pages": "over fp8 pages",
    PAGE_64: "over 64",
    "dense": "over dense",
}
KV_DTYPES = {
    "auto": "bf16",
    "fp8_e4m3": "fp8, e4m3",
    "fp8_e5m2": "fp8, e5m2",
    "int8": "int8",
    "turbo4": "turbo4",
    "k8v4": "k8v4",
    "int8_v4": "int8_v4",
    "turbo_k4v2": "turbo, 4 and 2 bits",
    "turbo_k3v2": "turbo, 3 and 2 bits",
}
"""Ways to store pages, as tables call them."""
_METHODS = {
    "cudnn": "dense bf16",
    "cudnn-full": "dense bf16, all tokens",
    "cudnn-paged": "bf16, cuDNN's pages",
    "dense": "dense bf16, a slice",
    "jax": "bf16, jax's kernel",
    "jax-128": "bf16, jax's kernel, blocks of 128",
}


def label(row: Row) -> str:
    """``16 x 32k``, with what makes it different from one query and sequences of one length."""
    tokens = row["tokens"]
    size = tables.short(tokens)
    if row["operation"] == APPEND:
        return f"{row['queries']:,} of {row['batch']} x {size}"
    text = f"{row['batch']} x {size}"
    if row["operation"] == CHUNK:
        text += f", {row['queries']} queries"
    if row["ragged"]:
        first = tokens // row["batch"]
        text = f"{row['batch']} x {tables.short(first)} to {size}"
    return text


def method(row: Row) -> str:
    """A row's method in words."""
    if row["operation"] == PAGES:
        return f"{KV_DTYPES[row['kv_dtype']]}, {row['method'].removeprefix('page-')} tokens"
    return KV_DTYPES.get(row["method"]) or _METHODS.get(row["method"], row["method"])


def _kernel(row: Row) -> str:
    if row["operation"] == APPEND and row["family"] != "dense":
        return "default"
    others = {"cudnn": "cuDNN", "cudnn-paged": "cuDNN", "jax": "Pallas"}
    return row["implementation"] or others.get(row["family"], "XLA")


def operation_table(result: Result, operation: str) -> str:
    """Every row of an operation; those that did not run with the reason."""
    lines = []
    for row in tables.shown(result, operation):
        name = [label(row), method(row), _kernel(row)]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * (len(BASELINES[operation]) + 4)])
            continue
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *tables.ratios(row, BASELINES[operation]),
                f"{row['bytes'] / 1e6:,.1f}",
                tables.number(row["gigabytes_per_second"]),
                tables.share_of_ceiling(row),
                f"{row['relative_l2']:.4f}",
            ]
        )
    header = ["batch x tokens", "keys and values", "kernel", "us"]
    header += [_BASELINE_NAMES[name] for name in BASELINES[operation]]
    header += ["MB", "GB/s", "of ceiling", "relative L2"]
    return tables.with_cut(tables.table(header, lines), result, operation)


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    picture = tables.picture(*PLOT) if operation == DECODE else ""
    text = tables.ceilings_sentence(result, tables.COPY_AND_PRODUCT)
    return f"{picture}{operation_table(result, operation)}\n\n{text}{tables.source(name, result)}"


def formats_section(name: str, result: Result) -> str:
    """Decoding, then writing, through each format."""
    parts = [operation_table(result, operation) for operation in (DECODE, APPEND)]
    text = tables.ceilings_sentence(result, tables.COPY_AND_PRODUCT)
    return "\n\n".join([*parts, f"{text}{tables.source(name, result)}"])


PLOT = ("paged_speed.png", "Attention over pages: speed over cuDNN by shape and kind of pages")


def _fastest(rows: list[Row], family: str) -> Row | None:
    return tables.fastest(rows, lambda row: row["family"] == family)


def by_place(result: Result) -> dict[str, list[Row]]:
    """The decode rows that were measured, by shape."""
    places: dict[str, list[Row]] = {}
    for row in tables.finished(result, DECODE):
        places.setdefault(label(row), []).append(row)
    return places


def summary(name: str, result: Result) -> str:
    """Decode by shape: the fastest of cuDNN and of each kind of pages."""
    lines = []
    for place, rows in by_place(result).items():
        line = [place]
        for family in ("cudnn", "bf16-pages", "fp8-pages", "turbo4"):
            row = _fastest(rows, family)
            if row is None:
                line.append("-")
                continue
            ratio = row["speedup_over"].get("cudnn")
            shown = family != "cudnn" and ratio is not None
            line.append(tables.number(row["us"]) + (f" ({ratio:.2f}x)" if shown else ""))
        lines.append(line)
    header = ["batch x tokens", "cuDNN, dense bf16", "bf16 pages", "fp8 pages", "turbo4 pages"]
    note = (
        "Microseconds for one query token per sequence, time of the kernels on the device; in "
        "brackets the speed over that of cuDNN."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def speed_bars(result: Result) -> dict[str, dict[str, float]]:
    """Speed over cuDNN by shape, of the fastest of our kernels for each kind of pages."""
    groups: dict[str, dict[str, float]] = {}
    for place, rows in by_place(result).items():
        bars = {}
        for kv_dtype, name in KV_DTYPES.items():
            row = tables.fastest(rows, lambda row, kv_dtype=kv_dtype: row["method"] == kv_dtype)
            if row is not None and (ratio := row["speedup_over"].get("cudnn")) is not None:
                bars[name] = ratio
        jax = _fastest(rows, "jax")
        if jax is not None and "cudnn" in jax["speedup_over"]:
            bars[_METHODS["jax"]] = jax["speedup_over"]["cudnn"]
        if bars:
            groups[place] = bars
    return groups


def speed_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per kind of pages."""
    bars = {
        place: {name: (ratio, f"{ratio:.2f}") for name, ratio in found.items()}
        for place, found in speed_bars(result).items()
    }
    title = f"Attention over pages, one token per sequence, on {result['device']}"
    return plots.of_ratios(bars, title, "times as fast as cuDNN on dense bf16", margin=0.12)


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    parts = [f"{row['us']:.1f} us ({row['clock']})", *tables.ratio_parts(row)]
    if row["percent_of_ceiling"] is not None:
        parts.append(f"{row['percent_of_ceiling']:.0f} % of ceiling ({row['bound']})")
    parts.append(f"L2 {row['relative_l2']:.4f}")
    return f"{row['name']}: {', '.join(parts)}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "paged summary": summary,
    "paged decode": functools.partial(page_section, operation=DECODE),
    "paged page size": functools.partial(page_section, operation=PAGES),
    "paged chunk": functools.partial(page_section, operation=CHUNK),
    "paged append": functools.partial(page_section, operation=APPEND),
}
FORMATS: Mapping[str, Callable[[str, Result], str]] = {"paged formats": formats_section}
"""What the docs show of the suite `paged_formats`, and above of `paged`."""
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_plot}
