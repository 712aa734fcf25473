"""Tables and the plot of FireQ's suites: pure functions of their JSON."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The operations of the suites, as they begin the rows' names.
MATMUL, FFN, QUANTIZE = "matmul", "feed-forward", "quantize"
DECODE, MODEL = "kv4-decode", "model-prefill"
BASELINES = {
    MATMUL: ("bf16", "fp8", "int8"),
    FFN: ("bf16",),
    QUANTIZE: ("xla",),
    DECODE: ("cudnn", "turbo"),
    MODEL: ("bf16",),
}
"""What rows of an operation are compared with, by family."""
_BASELINE_NAMES = {
    "bf16": "over bf16",
    "fp8": "over e4m3",
    "int8": "over int8 (jax)",
    "xla": "over XLA",
    "cudnn": "over cuDNN",
    "turbo": "over turbo-4bit",
}
_METHODS = {
    "bf16": "bf16",
    "bf16-apart": "bf16, gate and up apart",
    "fp8": "e4m3",
    "jax-int8": "int8 x bf16",
    "int4": "INT4",
    "int4-activations": "INT4, rounding x too",
    "int4-bf16-scales": "INT4, bf16 scales",
    "w4a16": "INT4 x bf16",
    "e4m3": "to e4m3",
    "kv4": "KV4",
    "k8v4": "K8V4",
    "int4-kv4": "INT4, e4m3, KV4",
}


def _rows(result: Result, operation: str) -> list[Row]:
    """By shape in the order of the file, products by their number of tokens too."""
    rows = [row for row in result["rows"] if row["operation"] == operation]
    places = [_place(row) for row in rows]
    return sorted(rows, key=lambda row: (places.index(_place(row)), row["tokens"]))


def _place(row: Row) -> str:
    """Rows of one place differ in their tokens only."""
    return row["label"].rpartition("/")[0] or row["label"]


def label(row: Row) -> str:
    """``4096 to 14336, 16 tokens``."""
    operation, tokens = row["operation"], row["tokens"]
    if operation == MATMUL:
        return f"{row['inputs']} to {row['outputs']}, {_tokens(tokens)}"
    if operation == FFN:
        return f"{row['model']} ({row['inputs']}, {row['outputs']}), {_tokens(tokens)}"
    if operation == QUANTIZE:
        norm = "RMSNorm and rounding" if row["norm"] else "rounding"
        return f"{norm}, {tokens:,} x {row['inputs']}"
    return f"{row['model']}, {tables.batch_and_tokens(row)}"


def _tokens(count: int) -> str:
    return f"{count:,} token{'' if count == 1 else 's'}"


def method(row: Row) -> str:
    """A row's method in words."""
    return _METHODS.get(row["method"], row["method"])


def _kernel(row: Row) -> str:
    others = {"cudnn": "cuDNN", "bf16": "XLA", "fp8": "XLA", "int8": "jax's"}
    return row["implementation"] or others.get(row["family"], "-")


def _ratios(row: Row) -> list[str]:
    return tables.ratios(row, BASELINES[row["operation"]])


def _error(row: Row) -> str:
    """Against the definition with the same operands; for what has none, against exact results."""
    if "relative_l1" in row:
        return f"{row['relative_l1']:.4f}"
    exact = row.get("against_exact")
    return "-" if exact is None else f"{exact['relative_l1']:.4f} (exact)"


def operation_table(result: Result, operation: str) -> str:
    """Every row of an operation; those that did not run with the reason."""
    lines = []
    for row in _rows(result, operation):
        if row.get("reason") == tables.OUT_OF_TIME:
            continue
        name = [label(row), method(row), _kernel(row)]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * (len(BASELINES[operation]) + 4)])
            continue
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *_ratios(row),
                tables.number(row["gigabytes_per_second"]),
                tables.number(row["tflops_per_second"]) if row["operations"] else "-",
                tables.share_of_ceiling(row),
                _error(row),
            ]
        )
    header = ["shape", "what", "kernel", "us", *map(_BASELINE_NAMES.get, BASELINES[operation])]
    header += ["GB/s", "TFLOP/s", "of ceiling", "relative L1"]
    return tables.with_cut(tables.table(header, lines), result, operation)


def model_table(result: Result) -> str:
    """Prefill of whole models in tokens per second."""
    lines = []
    for row in _rows(result, MODEL):
        name = [label(row), method(row), str(row["prefill_batch_size"])]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * 4])
            continue
        lines.append(
            [
                *name,
                f"{row['tokens_per_second']:,.0f}",
                *_ratios(row),
                tables.number(row["tflops_per_second"]),
                tables.share_of_ceiling(row),
                f"{row['weight_bytes'] / 1e9:.1f}",
            ]
        )
    header = ["prompts x tokens", "what", "at a time", "tokens per second", "over bf16"]
    return tables.table([*header, "TFLOP/s", "of ceiling", "GB of weights"], lines)


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    table = model_table(result) if operation == MODEL else operation_table(result, operation)
    picture = tables.picture(*PLOT) if operation == MATMUL else ""
    text = tables.ceilings_sentence(result, {"copy": ". ", "bf16": ", ", "fp8": ". "})
    return f"{picture}{table}\n\n{text}{tables.source(name, result)}"


PLOT = ("fireq_speed.png", "INT4 products: speed over bfloat16 against the number of tokens")


SUMMARY_PRODUCT = (4096, 14336)


def summary(name: str, result: Result) -> str:
    """The feed-forward layers, and one product by tokens: bfloat16, e4m3, int8, INT4."""
    by_place: dict[str, list[Row]] = {}
    for row in [*_rows(result, MATMUL), *_rows(result, FFN)]:
        sizes = (row["inputs"], row["outputs"])
        if row["status"] == "ok" and (row["operation"] == FFN or sizes == SUMMARY_PRODUCT):
            by_place.setdefault(row["label"], []).append(row)
    lines = []
    for rows in by_place.values():
        columns = _COLUMNS[rows[0]["operation"]]
        best = [tables.fastest(rows, lambda r, m=m: r["method"] == m) for m in columns]
        lines.append([label(rows[0]), *map(_time_and_ratios, best)])
    header = ["product, or feed-forward layer", "bf16, us", "e4m3, us", "int8 x bf16, us"]
    header += ["INT4 x e4m3, us"]
    note = (
        "Time of the kernels on the device; in brackets the speed over XLA in bfloat16, and in "
        "e4m3. In the last column the bfloat16 activations are rounded to e4m3 too. "
        "int8 x bf16 is jax's own kernel, `hopper_mixed_type_matmul_mgpu`."
    )
    source = tables.source(name, result)
    return f"{tables.table([*header, 'from bf16, us'], lines)}\n\n{note} {source}"


# The columns' methods; none is "-".
_COLUMNS = {
    MATMUL: ("bf16", "fp8", "jax-int8", "int4", "int4-activations"),
    FFN: ("bf16", "-", "-", "-", "int4"),
}


def _time_and_ratios(row: Row | None) -> str:
    if row is None:
        return "-"
    time = tables.number(row["us"])
    if row["family"] != "int4":
        return time
    ratios = tables.ratios(row, BASELINES[row["operation"]][:2])
    return f"{time} ({', '.join(ratios)})"


# Method and kernel of the plot's lines, and how they are drawn.
_LINES = {
    ("fp8", None): "k--",
    ("int4", "mosaic_gpu"): "C0-",
    ("int4-activations", "mosaic_gpu"): "C0:",
    ("int4", "triton"): "C1-",
}


def speed_plot(result: Result) -> "Figure":
    """Speed over bfloat16 against the number of tokens, a panel for each weight."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    panels: dict[tuple[int, int], list[Row]] = {}
    for row in _rows(result, MATMUL):
        if "bf16" in row.get("speedup_over", {}):
            panels.setdefault((row["inputs"], row["outputs"]), []).append(row)
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    every = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axes, ((size, outputs), rows) in zip(every, panels.items(), strict=False):
        for (what, kernel), style in _LINES.items():
            line = [r for r in rows if (r["method"], r["implementation"]) == (what, kernel)]
            if line:
                x = [row["tokens"] for row in line]
                y = [row["speedup_over"]["bf16"] for row in line]
                name = f"{method(line[0])}, {_kernel(line[0])}"
                axes.plot(x, y, style, marker="o", ms=4, lw=1.2, label=name)
        ticks = sorted({row["tokens"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(f"{size} to {outputs}")
        axes.set_xlabel("tokens")
        axes.axhline(1, color="black", lw=0.5)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    every[0].set_ylabel("times as fast as XLA's bf16 product")
    figure.suptitle(f"INT4 x e4m3 products on {result['device']}")
    return figure


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    parts = [f"{row['us']:.1f} us ({row['clock']})"]
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts += tables.ratio_parts(row)
    if row["percent_of_ceiling"] is not None:
        parts.append(f"{row['percent_of_ceiling']:.0f} % of ceiling ({row['bound']})")
    if "relative_l1" in row:
        parts.append(f"L1 {row['relative_l1']:.4f}")
    return f"{row['name']}: {', '.join(parts)}"


FIREQ: Mapping[str, Callable[[str, Result], str]] = {
    "fireq summary": summary,
    "fireq matmul": functools.partial(page_section, operation=MATMUL),
    "fireq feed-forward": functools.partial(page_section, operation=FFN),
    "fireq quantize": functools.partial(page_section, operation=QUANTIZE),
}
"""What the docs show of the suite `fireq`, and below of `kv4` and `fireq_model`."""
KV4: Mapping[str, Callable[[str, Result], str]] = {
    "fireq decode": functools.partial(page_section, operation=DECODE)
}
FIREQ_MODEL: Mapping[str, Callable[[str, Result], str]] = {
    "fireq model": functools.partial(page_section, operation=MODEL)
}
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_plot}
