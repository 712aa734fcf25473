"""Tables of the attention suites: pure functions of their JSON."""

from collections.abc import Callable, Iterable, Mapping

from benchmarks import tables
from benchmarks.suites.attention import plots, several
from benchmarks.suites.attention.rows import (
    DECODE_METHODS,
    QUANTIZING,
    alone,
    is_cudnn,
    prefill_variants,
    variant_label,
)
from benchmarks.tables import Result, Row

SUMMARY_DECODE_METHODS = ("turbo-4bit", "turbo-2/4bit", "kivi-4bit")


def _speedup(row: Row) -> str:
    ratio = row.get("speedup_over_cudnn")
    return "" if ratio is None else f" ({ratio:.2f}x)"


def _clock(rows: Iterable[Row]) -> str:
    clocks = sorted({row["clock"] for row in rows})
    names = {"cupti": "time of the kernels on the device", "wall": "wall time"}
    return " and ".join(names[clock] for clock in clocks)


def decode_table(result: Result, methods: Iterable[str] = DECODE_METHODS, model: str = "") -> str:
    """Decode by shape: microseconds, and how many times faster than cuDNN.

    Args:
      result: of the attention suite.
      methods: the columns; those without a row are left out.
      model: only this model's shapes, if given.
    """
    rows = [row for row in tables.finished(result, "decode") if model in ("", row["model"])]
    present = {row["method"] for row in rows}
    columns = [method for method in methods if method in present]
    lines = []
    for label, group in tables.shapes(rows).items():
        line = [label, _microseconds(tables.fastest(group, is_cudnn))]
        for method in columns:
            row = tables.fastest(group, lambda row, method=method: row["method"] == method)
            line.append("-" if row is None else _microseconds(row) + _speedup(row))
        lines.append(line)
    header = ["batch x tokens", "cuDNN bf16"] + [DECODE_METHODS[method] for method in columns]
    note = f"Microseconds for one query token per sequence ({_clock(rows)}); in brackets the "
    return tables.table(header, lines) + f"\n\n{note}speed over that of cuDNN on bfloat16."


def prefill_table(result: Result, model: str = "", *, short: bool = False) -> str:
    """Prefill by shape: TFLOP/s of the whole call and of attention alone, against cuDNN.

    Args:
      result: of the attention suite.
      model: only this model's shapes, if given.
      short: only the fastest variant of each 8-bit mode, in place of one for each implementation
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


def _percent(row: Row) -> str:
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} %"


def details_table(result: Result, operation: str) -> str:
    """Every row of an operation, those that did not run with the reason.

    Rows that the run had no time for are counted under the table.
    """
    lines = []
    for row in tables.shown(result, operation):
        name = f"`{row['name'].removeprefix(operation + '/')}`"
        if row["status"] != "ok":
            reason = f"{row['status']}: {row['reason']}".replace("|", "\\|")
            lines.append([name, reason, *[""] * 7])
            continue
        main = row["kernels"][0]["us"] if row["kernels"] else None
        longest = tables.number(main)
        if main is not None and operation == "prefill":
            longest += f" ({tables.number(row['work'] / main / 1e6)} TFLOP/s)"
        rate = row.get("gigabytes_per_second", row.get("tflops_per_second"))
        ratio = row.get("speedup_over_cudnn")
        lines.append(
            [
                name,
                tables.number(row["us"]),
                longest,
                tables.number(row["wall_us"]),
                tables.number(rate),
                _percent(row),
                "-" if ratio is None else f"{ratio:.2f}x",
                f"{row['cosine']:.5f}",
                f"{row['relative_l1']:.4f}, {row['rmse']:.2g}",
            ]
        )
    rate = "TFLOP/s" if operation == "prefill" else "GB/s"
    header = ["row", "us", "longest kernel", "wall us", rate, "of ceiling", "over cuDNN", "cosine"]
    text = tables.table([*header, "relative L1, RMSE"], lines)
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
        errors = f"{row['relative_l1']:.4f}, {row['rmse']:.2g}"
        lines.append([*line, f"{row['cosine']:.5f}", errors])
    header = ["row", "call, us", "over cuDNN", "kernels alone, us", "over cuDNN", "rate"]
    return tables.table([*header, "of ceiling", "quantizing", "cosine", "relative L1, RMSE"], lines)


def several_table(result: Result) -> str:
    """Several tokens at once, by shape: microseconds, and how many times those of one token."""
    lines = []
    for label, group in tables.shapes(tables.finished(result, several.OPERATION)).items():
        base = tables.fastest(group, is_cudnn)
        us = {row["method"]: row["us"] for row in group}
        for cache in several.CACHES:
            found = [us.get(several.method(cache, tokens)) for tokens in several.TOKENS]
            if not any(found):
                continue
            line = [f"{label}, {cache.replace('bit', '-bit')}", _microseconds(base)]
            for time in found:
                ratio = f" ({time / found[0]:.2f}x)" if time and found[0] else ""
                line.append(f"{tables.number(time)}{ratio}")
            lines.append(line)
    header = ["batch x tokens, cache", "cuDNN bf16, one token"]
    header += [f"{tokens} token{'s' if tokens > 1 else ''}" for tokens in several.TOKENS]
    note = "Microseconds, and in brackets over those of one token."
    return tables.table(header, lines) + "\n\n" + note


def training_table(result: Result) -> str:
    """Forward and backward in one call, by shape: cuDNN's time, and ours over it."""
    rows = tables.finished(result, "training")
    columns = list(dict.fromkeys(row["method"] for row in rows if not is_cudnn(row)))
    lines = []
    for label, group in tables.shapes(rows).items():
        base = tables.fastest(group, is_cudnn)
        line = [label, _microseconds(base)]
        for method in columns:
            row = tables.fastest(group, lambda row, method=method: row["method"] == method)
            line.append("-" if row is None else f"{row['speedup_over_cudnn']:.2f}x")
        lines.append(line)
    header = ["batch x tokens", "cuDNN bf16, us"]
    for method in columns:
        mode, _, gradient = method.removeprefix("turbo-").partition("-exact-gradient-")
        header.append(f'`{mode}`, `gradient="{gradient}"`')
    return tables.table(header, lines)


def _shapes_cudnn(rows: Iterable[Row], like: Row) -> float:
    """Microseconds of the fastest cuDNN row of a shape; NaN without one."""
    same = ("operation", "model", "batch", "tokens", "is_causal", "window")
    matching = [row for row in rows if all(row.get(name) == like.get(name) for name in same)]
    best = tables.fastest(matching, is_cudnn)
    return float("nan") if best is None else best["us"]


def ceilings_table(result: Result) -> str:
    """What the device reached at best in the same run."""
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


# The model whose rows the short tables show.
SUMMARY_MODEL = "llama3-8b"


def _section(table: Callable[[Result], str], picture: str = "") -> Callable[[str, Result], str]:
    """A table, and where its figures come from."""

    def section(name: str, result: Result) -> str:
        return f"{picture}{table(result)}\n\n{tables.source(name, result)}"

    return section


def _rows(operation: str) -> Callable[[str, Result], str]:
    return lambda name, result: details_table(result, operation)


def _hopper_section(name: str, result: Result) -> str:
    rates = ceilings_table(result)
    return f"{hopper_table(result)}\n\n{rates}\n\n{tables.source(name, result)}"


def _decode_summary(name: str, result: Result) -> str:
    table = decode_table(result, SUMMARY_DECODE_METHODS, SUMMARY_MODEL)
    return f"{table} {tables.source(name, result)}"


def _prefill_summary(name: str, result: Result) -> str:
    table = prefill_table(result, SUMMARY_MODEL, short=True)
    return f"{table} {tables.source(name, result)}"


ATTENTION: Mapping[str, Callable[[str, Result], str]] = {
    "ceilings": _section(ceilings_table),
    "decode": _section(decode_table, tables.picture(*plots.DECODE)),
    "decode rows": _rows("decode"),
    "prefill": _section(prefill_table, tables.picture(*plots.PREFILL)),
    "prefill rows": _rows("prefill"),
    "compress": _section(compress_table),
    "compress rows": _rows("compress"),
}
"""What the docs show of the suite `attention`, and below of `hopper`."""
HOPPER: Mapping[str, Callable[[str, Result], str]] = {
    "hopper": _hopper_section,
    "training": _section(training_table),
    "several": _section(several_table),
    "decode summary": _decode_summary,
    "prefill summary": _prefill_summary,
}


def default_table(result: Result) -> str:
    """A call without options, beside cuDNN's."""
    lines = []
    rows = tables.finished(result, "prefill")
    models = list(dict.fromkeys(row["model"] for row in rows))
    for row in sorted(rows, key=lambda row: (models.index(row["model"]), row["tokens"])):
        if not is_cudnn(row):
            ratio = row.get("speedup_over_cudnn")
            lines.append(
                [
                    f"`{row['name'].removeprefix('prefill/').removesuffix('/turbo-default')}`",
                    tables.number(row["us"]),
                    "-" if ratio is None else f"{ratio:.2f}x",
                    f"{row['relative_l1']:.4f}",
                ]
            )
    return tables.table(["shape", "us", "over cuDNN", "relative L1"], lines)


DEFAULT: Mapping[str, Callable[[str, Result], str]] = {
    "default": _section(default_table, tables.picture(*plots.GRID)),
}
