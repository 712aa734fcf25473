"""Plots of the attention suite: pure functions of its JSON."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.plots import Bar, draw_bars, wide_figure
from benchmarks.suites.attention.rows import (
    DECODE_METHODS,
    is_cudnn,
    mode_of,
    prefill_variants,
    softmax_of,
)
from benchmarks.suites.attention.rows import alone as alone_us
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = ("default_speed.png", "Attention without options: speed over cuDNN by head dim and tokens")
DECODE = ("decode_speed.png", "Decode: speed over cuDNN on bfloat16 by shape and cache")
PREFILL = ("prefill_speed.png", "Prefill: TFLOP/s by shape, mode and softmax")
"""File and description of each."""


def decode_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per cache."""
    ours = ("turbo-4bit", "turbo-2/4bit", "turbo-3bit", "turbo-2bit", "kivi-4bit")
    groups: dict[str, dict[str, Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "decode")).items():
        groups[label] = {}
        for method in ours:
            row = tables.fastest(rows, lambda row, method=method: row["method"] == method)
            if row is not None and (ratio := row.get("speedup_over_cudnn")) is not None:
                groups[label][DECODE_METHODS[method]] = Bar(ratio, f"{ratio:.2f}")
    figure = wide_figure(12)
    axes = draw_bars(figure, groups, 0.19)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=0.12)
    axes.set_title(f"Decode, one token per sequence, on {result['device']}")
    axes.set_ylabel("times as fast as cuDNN bf16")
    return figure


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
    """Speed over cuDNN by tokens, one line per kind of heads."""
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
    rate, alone = row["tflops_per_second"], alone_us(row)
    reach = None if alone is None else row["work"] / alone / 1e6
    text = f"{rate:.0f}" if reach is None or reach == rate else f"{rate:.0f} ({reach:.0f})"
    return Bar(rate, text, reach)


DEFAULT: Mapping[str, Callable[[Result], "Figure"]] = {GRID[0]: default_plot}
ATTENTION: Mapping[str, Callable[[Result], "Figure"]] = {
    DECODE[0]: decode_plot,
    PREFILL[0]: prefill_plot,
}
