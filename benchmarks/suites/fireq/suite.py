"""FireQ: INT4 weights times e4m3 activations, KV4, and models of them, against XLA and cuDNN.

Three suites: ``fireq`` are single operations of linear layers, and ``kv4`` is decoding from KV4 and
K8V4, both in device time; ``fireq_model`` is the prefill of a whole model in wall time.
"""

import functools
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Suite, Table, over_baselines
from benchmarks.suites.fireq import cases
from benchmarks.suites.fireq.cases import DECODE, FFN, KERNELS, MATMUL, QUANTIZE
from benchmarks.suites.fireq.model import OPERATION as MODEL
from benchmarks.suites.fireq.model import prefill
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    return _METHODS.get(row["method"], row["method"])


def _kernel(row: Row) -> str:
    others = {"cudnn": "cuDNN", "bf16": "XLA", "fp8": "XLA", "int8": "jax's"}
    return row["implementation"] or others.get(row["family"], "-")


def _error(row: Row) -> str:
    """Against the definition with the same operands; for what has none, against exact results."""
    if "relative_l1" in row:
        return f"{row['relative_l1']:.4f}"
    exact = row.get("against_exact")
    return "-" if exact is None else f"{exact['relative_l1']:.4f} (exact)"


_NAMES = (("shape", label), ("what", method), ("kernel", _kernel))
_OPERATIONS = tables.significant("tflops_per_second")


def _over(operation: str) -> list[tables.Column]:
    return tables.over({name: _BASELINE_NAMES[name] for name in BASELINES[operation]})


def operation_table(result: Result, operation: str) -> str:
    columns = (
        *(tables.US, *_over(operation), tables.GIGABYTES),
        ("TFLOP/s", lambda row: _OPERATIONS(row) if row["operations"] else "-"),
        *(tables.CEILING, ("relative L1", _error)),
    )
    rows = [row for row in _rows(result, operation) if row.get("reason") != tables.OUT_OF_TIME]
    text = tables.rows_table(rows, _NAMES, columns)
    return tables.with_cut(text, result, operation)


def model_table(result: Result) -> str:
    names = (
        ("prompts x tokens", label),
        ("what", method),
        ("at a time", tables.shown_as("prefill_batch_size", "{}")),
    )
    columns = (
        ("tokens per second", tables.shown_as("tokens_per_second", "{:,.0f}")),
        *(*_over(MODEL), ("TFLOP/s", _OPERATIONS), tables.CEILING),
        ("GB of weights", tables.shown_as("weight_bytes", "{:.1f}", 1e9)),
    )
    return tables.rows_table(_rows(result, MODEL), names, columns)


def _section(operation: str, plot: tuple[str, str] | None = None) -> Table:
    table = functools.partial(operation_table, operation=operation)
    return tables.section(table, plot=plot, rates=tables.COPY_AND_PRODUCTS)


PLOT = ("fireq_speed.png", "INT4 products: speed over bfloat16 against the number of tokens")
SUMMARY_PRODUCT = (4096, 14336)


def summary_table(result: Result) -> str:
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
    return tables.table([*header, "from bf16, us"], lines)


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


_SUMMARY = (
    "Time of the kernels on the device; in brackets the speed over XLA in bfloat16, and in "
    "e4m3. In the last column the bfloat16 activations are rounded to e4m3 too. "
    "int8 x bf16 is jax's own kernel, `hopper_mixed_type_matmul_mgpu`. "
)


def _groups() -> list[Group]:
    size, llama3, llama2 = 4096, 14336, 11008
    groups = []
    for inner in (llama3, llama2):
        for tokens in (16, 1, 64, 128, 256, 1024, 2048, 4096):
            both = tokens in (16, 1024)
            groups.append(cases.matmul(size, inner, tokens, with_bf16_scales=both))
    groups += [cases.matmul(llama3, size, tokens) for tokens in (16, 4096)]
    # Queries, keys and values of Llama 3 8B; an output projection; gate and up of its 70B.
    for inputs, outputs in ((size, 6144), (size, size), (8192, 28672)):
        groups += [cases.matmul(inputs, outputs, tokens) for tokens in (16, 1, 64)]
    groups.append(cases.feed_forward("llama3-8b", size, llama3, 16))
    groups.append(cases.feed_forward("llama2-7b", size, llama2, 16))
    for with_norm in (False, True):
        for tokens in (16, 16384):
            groups.append(cases.quantize(tokens, size, with_norm=with_norm))
    return groups


_EVERY = ("xla", *KERNELS)
_PLACES = ((16, 32768), (1, 32768), (64, 4096), (1, 8192), (1, 4096))
_COMMON: dict[str, Any] = {"run": calls.run, "with_ratios": over_baselines(BASELINES)}
FIREQ = Suite(
    name="fireq",
    groups=_groups,
    quick_groups=lambda: [
        cases.matmul(192, 72, 5, implementations=_EVERY, with_bf16_scales=True),
        cases.feed_forward("tiny", 64, 96, 3, implementations=_EVERY),
        cases.quantize(3, 64, with_norm=False),
        cases.quantize(3, 64, with_norm=True),
    ],
    formats=("bf16", "fp8"),
    tables={
        "fireq summary": tables.section(summary_table, note=_SUMMARY),
        "fireq matmul": _section(MATMUL, PLOT),
        "fireq feed-forward": _section(FFN),
        "fireq quantize": _section(QUANTIZE),
    },
    plots={PLOT[0]: speed_plot},
    **_COMMON,
)
KV4 = Suite(
    name="kv4",
    groups=lambda: [cases.decode_kv4(Shape("llama3-8b", *place)) for place in _PLACES],
    quick_groups=lambda: [
        cases.decode_kv4(Shape("tiny", 2, 192), implementations=("xla", "triton"))
    ],
    formats=(),
    tables={"fireq decode": _section(DECODE)},
    **_COMMON,
)
FIREQ_MODEL = Suite(
    name="fireq_model",
    groups=lambda: [prefill("llama-3-8b", 16, tokens) for tokens in (1024, 2048, 4096)],
    quick_groups=lambda: [prefill("tiny", 2, 24)],
    formats=("bf16", "fp8"),
    tables={"fireq model": tables.section(model_table, rates=tables.COPY_AND_PRODUCTS)},
    **_COMMON,
)
