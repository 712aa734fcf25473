"""Markdown tables of the attention and generation results: pure functions of their JSON."""

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Result = dict[str, Any]

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
SUMMARY_DECODE_METHODS = ("turbo-4bit", "turbo-2/4bit", "kivi-4bit")
PREFILL_MODES = ("int8", "int8_fp8", "fp8", "float")
# The reason of rows that a run had no time for: tables count them.
OUT_OF_TIME = "the time given to this run was over"
# What our kernels' names begin with; what XLA does around them has other names.
_OUR_KERNELS = ("turbojax_", "attention_kernel")
# Those that quantize what a prefill attends to, and write its cache.
_QUANTIZING = ("turbojax_quantize", "turbojax_maxima", "turbojax_compress")


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
    """``llama3-8b 16 x 32k``."""
    tokens = row["tokens"]
    size = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    causal = " causal" if row["is_causal"] else ""
    return f"{row['model']} {row['batch']} x {size}{causal}"


def fastest(rows: Iterable[Row], matches: Callable[[Row], bool]) -> Row | None:
    """The fastest row that matches, or None."""
    return min(filter(matches, rows), key=lambda row: row["us"], default=None)


def is_cudnn(row: Row) -> bool:
    """Whether a row is the baseline: cuDNN in bfloat16."""
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

    Not in it: quantizing the operands of a prefill and writing its cache, and what XLA does before
    and after kernels, such as filling a new cache with zeros.
    """
    if is_cudnn(row):
        return row["us"]
    ours = [k for k in row["kernels"] if k["name"].startswith(_OUR_KERNELS)]
    if row["operation"] == "prefill":
        ours = [k for k in ours if not k["name"].startswith(_QUANTIZING)]
    found = [k["us"] for k in ours]
    return sum(found) if found else None


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


def _speedup(row: Row) -> str:
    ratio = row.get("speedup_over_cudnn")
    return "" if ratio is None else f" ({ratio:.2f}x)"


def source(name: str, result: Result, link: str = "") -> str:
    """Where figures come from: device, versions, date and file."""
    driver = f", driver {result['driver']}" if "driver" in result else ""
    file = f"[{name}]({link}{name})" if link else f"`benchmarks/results/{name}`"
    return f"{result['device']}{driver}, jax {result['jax']}, {result['date']} ({file})."


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
    rows = [row for row in finished(result, "decode") if model in ("", row["model"])]
    present = {row["method"] for row in rows}
    columns = [method for method in methods if method in present]
    lines = []
    for label, group in shapes(rows).items():
        line = [label, _microseconds(fastest(group, is_cudnn))]
        for method in columns:
            row = fastest(group, lambda row, method=method: row["method"] == method)
            line.append("-" if row is None else _microseconds(row) + _speedup(row))
        lines.append(line)
    header = ["batch x tokens", "cuDNN bf16"] + [DECODE_METHODS[method] for method in columns]
    note = f"Microseconds for one query token per sequence ({_clock(rows)}); in brackets the "
    return table(header, lines) + f"\n\n{note}speed over that of cuDNN on bfloat16."


def prefill_table(result: Result, model: str = "", *, short: bool = False) -> str:
    """Prefill by shape: TFLOP/s of the whole call and of attention alone, against cuDNN.

    Args:
      result: of the attention suite.
      model: only this model's shapes, if given.
      short: only the fastest variant of each 8-bit mode, in place of one for each implementation
        and kind of softmax.
    """
    rows = [row for row in finished(result, "prefill") if model in ("", row["model"])]
    lines = []
    for label, group in shapes(rows).items():
        baseline = fastest(group, is_cudnn)
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
    return table(header, lines) + "\n\n" + note


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


def _prefill_line(label: str, variant: str, row: Row, baseline: Row | None) -> list[str]:
    line = [label, variant]
    for us in (row["us"], alone(row)):
        line.append("-" if us is None else number(row["work"] / us / 1e6))
        line.append("-" if us is None or baseline is None else f"{baseline['us'] / us:.2f}x")
    return line


def _microseconds(row: Row | None) -> str:
    return "-" if row is None else number(row["us"])


def compress_table(result: Result) -> str:
    """Compress by shape and cache: the whole call, and our kernels alone."""
    copy = result["ceilings"]["copy"]
    lines = []
    for row in finished(result, "compress"):
        line = [
            shape_label(row),
            f"{row['method'].removeprefix('turbo-')}, {row['implementation']}",
        ]
        for us in (row["us"], alone(row)):
            rate = None if us is None else row["work"] / us / 1e3
            line.append("-" if us is None else number(us))
            line.append("-" if rate is None else f"{rate:,.0f}")
            line.append("-" if rate is None or copy is None else f"{100 * rate / copy:.0f} %")
        lines.append([*line, f"{row['relative_l1']:.4f}"])
    header = ["batch x tokens", "cache", "us", "GB/s", "of copy"]
    header += ["kernels alone, us", "GB/s", "of copy", "relative L1 of K, V"]
    return table(header, lines)


def _percent(row: Row) -> str:
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} %"


def details_table(result: Result, operation: str) -> str:
    """Every row of an operation, those that did not run with the reason.

    Rows that the run had no time for are counted under the table.
    """
    lines = []
    for row in result["rows"]:
        if row["operation"] != operation or row.get("reason") == OUT_OF_TIME:
            continue
        name = f"`{row['name'].removeprefix(operation + '/')}`"
        if row["status"] != "ok":
            reason = f"{row['status']}: {row['reason']}".replace("|", "\\|")
            lines.append([name, reason, *[""] * 7])
            continue
        main = row["kernels"][0]["us"] if row["kernels"] else None
        longest = number(main)
        if main is not None and operation == "prefill":
            longest += f" ({number(row['work'] / main / 1e6)} TFLOP/s)"
        rate = row.get("gigabytes_per_second", row.get("tflops_per_second"))
        ratio = row.get("speedup_over_cudnn")
        lines.append(
            [
                name,
                number(row["us"]),
                longest,
                number(row["wall_us"]),
                number(rate),
                _percent(row),
                "-" if ratio is None else f"{ratio:.2f}x",
                f"{row['cosine']:.5f}",
                f"{row['relative_l1']:.4f}, {row['rmse']:.2g}",
            ]
        )
    rate = "TFLOP/s" if operation == "prefill" else "GB/s"
    header = ["row", "us", "longest kernel", "wall us", rate, "of ceiling", "over cuDNN", "cosine"]
    missing = cut(result, operation)
    return table([*header, "relative L1, RMSE"], lines) + (f"\n\n{missing}" if missing else "")


def hopper_table(result: Result) -> str:
    """Decode and prefill by Hopper's kernels: calls, kernels alone, and errors beside them."""
    lines = []
    measured = [row for operation in ("decode", "prefill") for row in finished(result, operation)]
    base = {row["name"]: _shapes_cudnn(measured, row) for row in measured}
    for row in measured:
        line = [f"`{row['name']}`"]
        kernels = alone(row)
        for us in (row["us"], kernels):
            line.append(number(us))
            line.append("-" if us is None else f"{base[row['name']] / us:.2f}x")
        share = row["percent_of_ceiling"]
        if kernels is None or share is None:
            line += ["-", "-"]
        else:
            rate, unit = (row["work"] / kernels / 1e3, "GB/s")
            if "tflops_per_second" in row:
                rate, unit = rate / 1e3, "TFLOP/s"
            line += [f"{number(rate)} {unit}", f"{share * row['us'] / kernels:.0f} %"]
        quantizing = [k["us"] for k in row["kernels"] if k["name"].startswith(_QUANTIZING)]
        line.append(f"{100 * sum(quantizing) / row['us']:.1f} %" if quantizing else "-")
        errors = f"{row['relative_l1']:.4f}, {row['rmse']:.2g}"
        lines.append([*line, f"{row['cosine']:.5f}", errors])
    header = ["row", "call, us", "over cuDNN", "kernels alone, us", "over cuDNN", "rate"]
    return table([*header, "of ceiling", "quantizing", "cosine", "relative L1, RMSE"], lines)


def _shapes_cudnn(rows: Iterable[Row], like: Row) -> float:
    """Microseconds of the fastest cuDNN row of a shape; NaN without one."""
    same = ("operation", "model", "batch", "tokens", "is_causal")
    matching = [row for row in rows if all(row[name] == like[name] for name in same)]
    best = fastest(matching, is_cudnn)
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
        lines.append([label, reason if rate is None else f"{number(rate, 4)} {unit}"])
    return table(["through XLA, 8192 x 8192 x 8192", "rate"], lines)


def throughput_table(result: Result) -> str:
    """Generation: the best throughput of each cache, and what stopped larger batches."""
    by_cache: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_cache.setdefault(row["cache"], []).append(row)
    best = {cache: _best(rows) for cache, rows in by_cache.items()}
    base = best.get("exact")
    lines = []
    for cache, row in best.items():
        stops = {r["batch"]: _stop(r) for r in by_cache[cache] if r["status"] != "ok"}
        stopped = ", ".join(f"{batch}: {stops[batch]}" for batch in sorted(stops))
        if row is None:
            lines.append([cache, "-", "-", "-", "-", stopped])
            continue
        ratio = "-"
        if base is not None:
            ratio = f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}x"
        size = row.get("cache_bytes")
        megabytes = "-" if size is None else f"{size / row['batch'] / 1e6:.1f}"
        rate = number(row["tokens_per_second"], 4)
        lines.append([cache, str(row["batch"]), rate, ratio, megabytes, stopped or "-"])
    header = ["cache", "best batch", "tokens per second", "over exact", "MB per sequence"]
    return table([*header, "did not run"], lines)


def _stop(row: Row) -> str:
    """Why a batch was not measured; the text of an allocator's error says no more than its kind."""
    return row["note"] if row["status"] == "skipped" else row["status"]


def _best(rows: list[Row]) -> Row | None:
    ran = (row for row in rows if row["status"] == "ok")
    return max(ran, key=lambda row: row["tokens_per_second"], default=None)


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return f"{row['name']}: {row['status']}: {row['reason']}"
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
