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
README_DECODE_METHODS = ("turbo-4bit", "turbo-2/4bit", "kivi-4bit")
PREFILL_MODES = ("int8", "int8_fp8", "fp8", "float")


def finished(result: Result, operation: str) -> list[Row]:
    """The rows of an operation that were measured."""
    rows = result["rows"]
    return [row for row in rows if row["operation"] == operation and row["status"] == "ok"]


def shapes(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by shape, in the order of the file."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
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


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits."""
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
    note = f"Microseconds for one query token per sequence ({_clock(rows)}); in brackets how many "
    return _table(header, lines) + f"\n\n{note}times faster than cuDNN on bfloat16."


def prefill_table(result: Result, model: str = "") -> str:
    """Prefill by shape: TFLOP/s of the fastest variant of each mode, against cuDNN.

    Args:
      result: of the attention suite.
      model: only this model's shapes, if given.
    """
    rows = [row for row in finished(result, "prefill") if model in ("", row["model"])]
    present = {mode_of(row) for row in rows}
    columns = [mode for mode in PREFILL_MODES if mode in present]
    lines = []
    for label, group in shapes(rows).items():
        baseline = fastest(group, is_cudnn)
        line = [label, "-" if baseline is None else _number(baseline["tflops_per_second"])]
        for mode in columns:
            row = fastest(group, lambda row, mode=mode: mode_of(row) == mode)
            line.append("-" if row is None else _prefill_cell(row))
        lines.append(line)
    header = ["batch x tokens", "cuDNN bf16"] + [f"`{mode}`" for mode in columns]
    note = (
        f"TFLOP/s of the whole call, quantization included ({_clock(rows)}), of the fastest "
        "variant of each mode; in brackets its speed over cuDNN's, and which it is."
    )
    return _table(header, lines) + "\n\n" + note


def _prefill_cell(row: Row) -> str:
    softmax = row["method"].split("-")[2]
    which = f"{row['implementation']}, {softmax}"
    return f"{_number(row['tflops_per_second'])}{_speedup(row)} {which}"


def _microseconds(row: Row | None) -> str:
    return "-" if row is None else _number(row["us"])


def compress_table(result: Result) -> str:
    """Compress by shape and cache."""
    lines = [
        [
            shape_label(row),
            f"{row['method'].removeprefix('turbo-')}, {row['implementation']}",
            _number(row["us"]),
            _number(row["gigabytes_per_second"]),
            _percent(row),
            f"{row['relative_l1']:.4f}",
        ]
        for row in finished(result, "compress")
    ]
    header = ["batch x tokens", "cache", "us", "GB/s", "of copy bandwidth", "relative L1 of K, V"]
    return _table(header, lines)


def _percent(row: Row) -> str:
    percent = row["percent_of_ceiling"]
    return "-" if percent is None else f"{percent:.0f} %"


def details_table(result: Result, operation: str) -> str:
    """Every row of an operation, those that did not run with the reason."""
    lines = []
    for row in result["rows"]:
        if row["operation"] != operation:
            continue
        name = f"`{row['name'].removeprefix(operation + '/')}`"
        if row["status"] != "ok":
            reason = f"{row['status']}: {row['reason']}".replace("|", "\\|")
            lines.append([name, reason, *[""] * 7])
            continue
        main = row["kernels"][0]["us"] if row["kernels"] else None
        alone = _number(main)
        if main is not None and operation == "prefill":
            alone += f" ({_number(row['work'] / main / 1e6)} TFLOP/s)"
        rate = row.get("gigabytes_per_second", row.get("tflops_per_second"))
        ratio = row.get("speedup_over_cudnn")
        lines.append(
            [
                name,
                _number(row["us"]),
                alone,
                _number(row["wall_us"]),
                _number(rate),
                _percent(row),
                "-" if ratio is None else f"{ratio:.2f}x",
                f"{row['cosine']:.5f}",
                f"{row['relative_l1']:.4f}, {row['rmse']:.2g}",
            ]
        )
    rate = "TFLOP/s" if operation == "prefill" else "GB/s"
    header = ["row", "us", "longest kernel", "wall us", rate, "of ceiling", "over cuDNN", "cosine"]
    return _table([*header, "relative L1, RMSE"], lines)


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
        lines.append([label, reason if rate is None else f"{_number(rate, 4)} {unit}"])
    return _table(["through XLA, 8192 x 8192 x 8192", "rate"], lines)


def throughput_table(result: Result) -> str:
    """Generation: the best throughput of each cache over the batches that fit."""
    by_cache: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_cache.setdefault(row["cache"], []).append(row)
    best = {
        cache: max(
            (row for row in rows if row["status"] == "ok"),
            key=lambda row: row["tokens_per_second"],
            default=None,
        )
        for cache, rows in by_cache.items()
    }
    base = best.get("exact")
    lines = []
    for cache, row in best.items():
        if row is None:
            lines.append([cache, "-", by_cache[cache][0]["status"], "-"])
            continue
        ratio = "-"
        if base is not None:
            ratio = f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}x"
        lines.append([cache, str(row["batch"]), _number(row["tokens_per_second"], 4), ratio])
    return _table(["cache", "best batch", "tokens per second", "over exact"], lines)


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
