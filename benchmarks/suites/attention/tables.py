"""Tables and plots of the attention suites: pure functions of their JSON."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.plots import Bar, draw_bars, of_ratios, wide_figure
from benchmarks.suite import shape_of
from benchmarks.suites.attention import decode
from benchmarks.tables import Column, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What decodes, in the order of the tables, and what the columns are called.
DECODE_METHODS = {
    "turbo-4bit": "4-bit",
    "turbo-2/4bit": "2/4-bit",
    "turbo-3bit": "3-bit",
    "turbo-2bit": "2-bit",
    "kivi-4bit": "KIVI 4-bit",
    "pallas": "jax Pallas",
    "xla": "XLA",
}
PREFILL_MODES = ("int8", "int8_fp8", "fp8", "float")
# What our kernels' names begin with; what XLA does around them has other names.
_OUR_KERNELS = ("turbojax_", "attention_kernel")
# Those that quantize what a prefill attends to or a gradient multiplies, and write a cache.
QUANTIZING = (
    "turbojax_quantize",
    "turbojax_maxima",
    "turbojax_compress",
    "turbojax_gradient_rows",
)


def is_cudnn(row: Row) -> bool:
    """Whether a row is the baseline, in bfloat16."""
    return row["method"].startswith("cudnn")


def mode_of(row: Row) -> str | None:
    """The mode of one of our prefills, or None: ``turbo-int8_fp8-sas2-128``."""
    parts = row["method"].split("-")
    return parts[1] if parts[0] == "turbo" and parts[1] in PREFILL_MODES else None


def softmax_of(row: Row) -> str:
    """The softmax of one of our prefills: ``exact``, ``sas`` or ``sas2``."""
    return row["method"].split("-")[2]


def alone(row: Row) -> float | None:
    """Microseconds of our kernels alone, or all of cuDNN's; None if neither ran.

    Not in it: quantizing the operands of prompts and writing their cache, and what XLA does before
    and after kernels, such as filling a new cache with zeros.
    """
    if is_cudnn(row):
        return row["us"]
    ours = [k for k in row["kernels"] if k["name"].startswith(_OUR_KERNELS)]
    if row["operation"] in ("prefill", "training"):
        ours = [k for k in ours if not k["name"].startswith(QUANTIZING)]
    found = [k["us"] for k in ours]
    return sum(found) if found else None


def prefill_variants(rows: Iterable[Row], *, short: bool = False) -> list[Row]:
    """Our fastest row of each mode, implementation and kind of softmax, or of each 8-bit mode."""
    best: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["us"]):
        mode = mode_of(row)
        if mode is None or (short and mode == "float"):
            continue
        kind = () if short else (row["implementation"], softmax_of(row)[:3])
        best.setdefault((mode, *kind), row)
    return sorted(best.values(), key=lambda row: PREFILL_MODES.index(mode_of(row) or ""))


def variant_label(row: Row) -> str:
    """``fp8, jax_triton, exact, 128``."""
    return ", ".join((mode_of(row) or "", row["implementation"], *row["method"].split("-")[2:]))


SUMMARY_DECODE_METHODS = ("turbo-4bit", "turbo-2/4bit", "kivi-4bit")


def _clock(rows: Iterable[Row]) -> str:
    clocks = sorted({row["clock"] for row in rows})
    names = {"cupti": "time of the kernels on the device", "wall": "wall time"}
    return " and ".join(names[clock] for clock in clocks)


def decode_table(result: Result, methods: Iterable[str] = DECODE_METHODS, model: str = "") -> str:
    """Decode by shape, of one model if given: microseconds, and how many times as fast as cuDNN."""
    rows = [row for row in tables.finished(result, "decode") if model in ("", row["model"])]
    present = {row["method"] for row in rows}
    titles = {method: DECODE_METHODS[method] for method in methods if method in present}
    text = tables.pivot(
        "batch x tokens", _places(rows, titles), {_BASE: "cuDNN bf16"} | titles, _time_and_speed
    )
    note = f"Microseconds for one query token per sequence ({_clock(rows)}); in brackets the "
    return f"{text}\n\n{note}speed over that of cuDNN on bfloat16."


# What a table has the fastest cuDNN row under.
_BASE = "cudnn"


def _places(rows: Iterable[Row], methods: Iterable[str]) -> dict[str, dict[str, Row]]:
    """By shape the fastest cuDNN row, and the fastest row of each of these methods."""
    methods = list(methods)
    return {
        label: {
            name: row for name in (_BASE, *methods) if (row := _fastest_of(group, name)) is not None
        }
        for label, group in tables.shapes(rows).items()
    }


def _fastest_of(rows: Iterable[Row], name: str) -> Row | None:
    return tables.fastest(rows, is_cudnn) if name == _BASE else _of_method(rows, name)


def _time_and_speed(row: Row) -> str:
    ratio = None if is_cudnn(row) else row.get("speedup_over_cudnn")
    return tables.with_ratio(_microseconds(row), ratio)


def prefill_table(result: Result, model: str = "", *, short: bool = False) -> str:
    """Prefill by shape: TFLOP/s of the whole call and of attention alone, against cuDNN.

    If `short`, of the fastest variant of each 8-bit mode, in place of one for each implementation
    and kind of softmax.
    """
    rows = [row for row in tables.finished(result, "prefill") if model in ("", row["model"])]
    lines = []
    for label, group in tables.shapes(rows).items():
        baseline = tables.fastest(group, is_cudnn)
        if baseline is not None:
            lines.append(_prefill_line(label, "cuDNN bf16", baseline, baseline))
        for row in prefill_variants(group, short=short):
            lines.append(_prefill_line(label, variant_label(row), row, baseline))
    header = ["batch x tokens", "mode, kernel, softmax, block", "TFLOP/s", "over cuDNN"]
    header += ["attention alone, TFLOP/s", "over cuDNN"]
    kinds = "each 8-bit mode" if short else "each mode, kernel and kind of softmax"
    note = (
        f"The fastest variant of {kinds} ({_clock(rows)}). TFLOP/s of the whole call, which first "
        "brings Q, K and V into the mode's number format, and of the attention kernel that follows."
    )
    return tables.table(header, lines) + "\n\n" + note


def _prefill_line(label: str, variant: str, row: Row, baseline: Row | None) -> list[str]:
    line = [label, variant]
    for us in (row["us"], alone(row)):
        line.append("-" if us is None else tables.number(row["work"] / us / 1e6))
        line.append("-" if us is None or baseline is None else f"{baseline['us'] / us:.2f}x")
    return line


def _microseconds(row: Row | None) -> str:
    return "-" if row is None else tables.number(row["us"])


def _of_method(rows: Iterable[Row], method: str) -> Row | None:
    return tables.fastest(rows, lambda row: row["method"] == method)


def _name(row: Row) -> str:
    return f"`{row['name'].removeprefix(row['operation'] + '/')}`"


def _errors(row: Row) -> str:
    return f"{row['relative_l1']:.4f}, {row['rmse']:.2g}"


_COSINE: Column = ("cosine", tables.shown_as("cosine", "{:.5f}"))
_ERRORS: Column = ("relative L1, RMSE", _errors)
_OVER: Column = ("over cuDNN", tables.shown_as("speedup_over_cudnn", "{:.2f}x"))


def compress_table(result: Result) -> str:
    """Compress by shape and cache: the whole call, and our kernels alone."""
    copy = result["ceilings"]["copy"]
    lines = []
    for row in tables.finished(result, "compress"):
        line = [
            tables.shape_label(row),
            f"{row['method'].removeprefix('turbo-')}, {row['implementation']}",
        ]
        for us in (row["us"], alone(row)):
            rate = None if us is None else row["work"] / us / 1e3
            line.append("-" if us is None else tables.number(us))
            line.append("-" if rate is None else f"{rate:,.0f}")
            line.append("-" if rate is None or copy is None else f"{100 * rate / copy:.0f} %")
        lines.append([*line, f"{row['relative_l1']:.4f}"])
    header = ["batch x tokens", "cache", "us", "GB/s", "of copy"]
    header += ["kernels alone, us", "GB/s", "of copy", "relative L1 of K, V"]
    return tables.table(header, lines)


def _longest(row: Row) -> str:
    main = row["kernels"][0]["us"] if row["kernels"] else None
    if main is None or row["operation"] != "prefill":
        return tables.number(main)
    return f"{tables.number(main)} ({tables.number(row['work'] / main / 1e6)} TFLOP/s)"


def _rate(row: Row) -> str:
    return tables.number(row.get("gigabytes_per_second", row.get("tflops_per_second")))


def _reason(row: Row) -> str:
    return f"{row['status']}: {row['reason']}".replace("|", "\\|")


def details_table(result: Result, operation: str) -> str:
    columns = (
        tables.US,
        ("longest kernel", _longest),
        ("wall us", tables.significant("wall_us")),
        ("TFLOP/s" if operation == "prefill" else "GB/s", _rate),
        ("of ceiling", tables.shown_as("percent_of_ceiling", "{:.0f} %")),
        *(_OVER, _COSINE, _ERRORS),
    )
    rows = tables.shown(result, operation)
    text = tables.rows_table(rows, (("row", _name),), columns, failed=_reason)
    return tables.with_cut(text, result, operation)


def hopper_table(result: Result) -> str:
    """What Hopper's kernels do: calls, kernels alone, and errors beside them."""
    lines = []
    measured = [
        row
        for operation in ("decode", "prefill", "training")
        for row in tables.finished(result, operation)
    ]
    base = {row["name"]: _shapes_cudnn(measured, row) for row in measured}
    for row in measured:
        line = [f"`{row['name']}`"]
        kernels = alone(row)
        for us in (row["us"], kernels):
            line.append(tables.number(us))
            line.append("-" if us is None else f"{base[row['name']] / us:.2f}x")
        share = row["percent_of_ceiling"]
        if kernels is None or share is None:
            line += ["-", "-"]
        else:
            rate, unit = (row["work"] / kernels / 1e3, "GB/s")
            if "tflops_per_second" in row:
                rate, unit = rate / 1e3, "TFLOP/s"
            line += [f"{tables.number(rate)} {unit}", f"{share * row['us'] / kernels:.0f} %"]
        quantizing = [k["us"] for k in row["kernels"] if k["name"].startswith(QUANTIZING)]
        line.append(f"{100 * sum(quantizing) / row['us']:.1f} %" if quantizing else "-")
        lines.append([*line, _COSINE[1](row), _errors(row)])
    header = ["row", "call, us", "over cuDNN", "kernels alone, us", "over cuDNN", "rate"]
    return tables.table([*header, "of ceiling", "quantizing", "cosine", "relative L1, RMSE"], lines)


def several_table(result: Result) -> str:
    """Several tokens at once, by shape: microseconds, and how many times those of one token."""
    lines = []
    for label, group in tables.shapes(tables.finished(result, decode.SEVERAL.name)).items():
        base = tables.fastest(group, is_cudnn)
        us = {row["method"]: row["us"] for row in group}
        for cache in decode.CACHES:
            found = [us.get(decode.method(cache, tokens)) for tokens in decode.TOKENS]
            if not any(found):
                continue
            line = [f"{label}, {cache.replace('bit', '-bit')}", _microseconds(base)]
            for time in found:
                ratio = f" ({time / found[0]:.2f}x)" if time and found[0] else ""
                line.append(f"{tables.number(time)}{ratio}")
            lines.append(line)
    header = ["batch x tokens, cache", "cuDNN bf16, one token"]
    header += [f"{tokens} token{'s' if tokens > 1 else ''}" for tokens in decode.TOKENS]
    note = "Microseconds, and in brackets over those of one token."
    return tables.table(header, lines) + "\n\n" + note


def training_table(result: Result) -> str:
    """Forward and backward in one call, by shape: cuDNN's time, and ours over it."""
    rows = tables.finished(result, "training")
    titles = {}
    for row in rows:
        if not is_cudnn(row):
            mode, _, gradient = row["method"].removeprefix("turbo-").partition("-exact-gradient-")
            titles[row["method"]] = f'`{mode}`, `gradient="{gradient}"`'
    return tables.pivot(
        "batch x tokens",
        _places(rows, titles),
        {_BASE: "cuDNN bf16, us"} | titles,
        lambda row: _microseconds(row) if is_cudnn(row) else _OVER[1](row),
    )


def _shapes_cudnn(rows: Iterable[Row], like: Row) -> float:
    """Microseconds of the fastest cuDNN row of a shape; NaN without one."""
    best = tables.fastest((row for row in rows if shape_of(row) == shape_of(like)), is_cudnn)
    return float("nan") if best is None else best["us"]


def ceilings_table(result: Result) -> str:
    names = {
        "copy": ("reading and writing 1 GiB", "GB/s"),
        "bf16": ("matrix product, bfloat16", "TFLOP/s"),
        "int8": ("matrix product, int8", "TFLOP/s"),
        "fp8": ("matrix product, e4m3", "TFLOP/s"),
    }
    lines = []
    for key, (label, unit) in names.items():
        rate = result["ceilings"][key]
        reason = result["ceilings_not_measured"].get(key, "not measured").replace("|", "\\|")
        lines.append([label, reason if rate is None else f"{tables.number(rate, 4)} {unit}"])
    return tables.table(["through XLA, 8192 x 8192 x 8192", "rate"], lines)


def default_table(result: Result) -> str:
    rows = tables.finished(result, "prefill")
    models = list(dict.fromkeys(row["model"] for row in rows))
    rows.sort(key=lambda row: (models.index(row["model"]), row["tokens"]))
    shape = ("shape", lambda row: _name(row).replace("/turbo-default", ""))
    ours = [row for row in rows if not is_cudnn(row)]
    return tables.rows_table(ours, [shape], [tables.US, _OVER, tables.L1])


# Plots --------------------------------------------------------------------------------------------

GRID = ("default_speed.png", "Attention without options: speed over cuDNN by head dim and tokens")
DECODE = ("decode_speed.png", "Decode: speed over cuDNN on bfloat16 by shape and cache")
PREFILL = ("prefill_speed.png", "Prefill: TFLOP/s by shape, mode and softmax")
"""File and description of each."""


def decode_plot(result: Result) -> "Figure":
    ours = ("turbo-4bit", "turbo-2/4bit", "turbo-3bit", "turbo-2bit", "kivi-4bit")
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for label, rows in tables.shapes(tables.finished(result, "decode")).items():
        groups[label] = {}
        for method in ours:
            row = _of_method(rows, method)
            if row is not None and (ratio := row.get("speedup_over_cudnn")) is not None:
                groups[label][DECODE_METHODS[method]] = (ratio, f"{ratio:.2f}")
    title = f"Decode, one token per sequence, on {result['device']}"
    return of_ratios(groups, title, "times as fast as cuDNN bf16", bar=0.19, margin=0.12)


def prefill_plot(result: Result) -> "Figure":
    """TFLOP/s by shape, one bar per mode and kind of softmax; pale: attention alone."""
    groups: dict[str, dict[str, Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "prefill")).items():
        groups[label] = {}
        if (row := tables.fastest(rows, is_cudnn)) is not None:
            groups[label]["cuDNN bf16"] = _rate_bar(row)
        for row in prefill_variants(rows):
            softmax = "exact" if softmax_of(row) == "exact" else "SAS"
            name = f"{mode_of(row)} {softmax}, {row['implementation']}"
            groups[label][name] = _rate_bar(row)
    figure = wide_figure(12)
    axes = draw_bars(figure, groups, 0.075)
    axes.margins(y=0.2)
    axes.set_title(f"Prefill on {result['device']}; pale and in brackets: attention alone")
    axes.set_ylabel("TFLOP/s, quantization included")
    return figure


def default_plot(result: Result) -> "Figure":
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in tables.finished(result, "prefill"):
        ratio = row.get("speedup_over_cudnn")
        if ratio is not None and not is_cudnn(row):
            heads = f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"
            lines.setdefault(heads, []).append((row["tokens"], ratio))
    figure = wide_figure(9)
    axes = figure.subplots()
    for i, (heads, points) in enumerate(sorted(lines.items())):
        tokens, ratios = zip(*sorted(points), strict=True)
        axes.plot(tokens, ratios, marker="osv^Dx"[i % 6], label=heads)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.axhline(0.95, color="black", linewidth=1, linestyle=":", zorder=0.5)
    axes.set_xscale("log", base=2)
    axes.set_title(f"Causal attention without options, on {result['device']}")
    axes.set_xlabel("tokens of a sequence; as many sequences as make 4,096 tokens, or one")
    axes.set_ylabel("times as fast as cuDNN bf16")
    axes.legend()
    return figure


def _rate_bar(row: Row) -> Bar:
    rate, us = row["tflops_per_second"], alone(row)
    reach = None if us is None else row["work"] / us / 1e6
    text = f"{rate:.0f}" if reach is None or reach == rate else f"{rate:.0f} ({reach:.0f})"
    return Bar(rate, text, reach)


# What the docs show -------------------------------------------------------------------------------

# The model whose rows the short tables show.
SUMMARY_MODEL = "llama3-8b"
Tables = Mapping[str, Callable[[str, Result], str]]


def _rows(operation: str) -> Callable[[str, Result], str]:
    return lambda name, result: details_table(result, operation)


def _summary(table: Callable[[Result], str]) -> Callable[[str, Result], str]:
    return lambda name, result: f"{table(result)} {tables.source(name, result)}"


ATTENTION: Tables = {
    "ceilings": tables.section(ceilings_table),
    "decode": tables.section(decode_table, plot=DECODE),
    "decode rows": _rows("decode"),
    "prefill": tables.section(prefill_table, plot=PREFILL),
    "prefill rows": _rows("prefill"),
    "compress": tables.section(compress_table),
    "compress rows": _rows("compress"),
}
HOPPER: Tables = {
    "hopper": tables.section(lambda result: f"{hopper_table(result)}\n\n{ceilings_table(result)}"),
    "training": tables.section(training_table),
    "several": tables.section(several_table),
    "decode summary": _summary(
        lambda result: decode_table(result, SUMMARY_DECODE_METHODS, SUMMARY_MODEL)
    ),
    "prefill summary": _summary(lambda result: prefill_table(result, SUMMARY_MODEL, short=True)),
}
DEFAULT: Tables = {"default": tables.section(default_table, plot=GRID)}
