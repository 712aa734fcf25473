"""Plots of the pages under docs/benchmarks: pure functions of the results' JSON."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks import fireq_tables, flax_tables, model_tables, paged_tables, pooled_tables, tables
from benchmarks.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _figure(width: float) -> "Figure":
    # Imported here: tables need no matplotlib. A bare `Figure` needs no display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")


@dataclasses.dataclass(frozen=True)
class _Bar:
    """One bar.

    Attributes:
      height: of the filled part.
      text: over the bar.
      reach: of the pale part behind it, if there is one.
    """

    height: float
    text: str
    reach: float | None = None


_COLORS = (*(f"C{i}" for i in range(10)), "black", "gold", "navy", "darkgreen")


def _bars(figure: "Figure", groups: dict[str, dict[str, _Bar]], width: float) -> Any:
    """Grouped bars, each group as wide as the bars it has.

    Args:
      figure: to draw into.
      groups: the bars of each group by the names of their series.
      width: of a bar; the groups are 1 apart.
    """
    axes = figure.subplots()
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    for i, name in enumerate(names):
        at, bars = [], []
        for x, group in enumerate(groups.values()):
            if name in group:
                place = [other for other in names if other in group].index(name)
                at.append(x + (place + 0.5 - len(group) / 2) * width)
                bars.append(group[name])
        color = _COLORS[i % len(_COLORS)]
        axes.bar(at, [bar.height for bar in bars], 0.92 * width, color=color, label=name)
        tops = [max(bar.height, bar.reach or 0) for bar in bars]
        axes.bar(at, tops, 0.92 * width, color=color, alpha=0.35)
        for x, top, bar in zip(at, tops, bars, strict=True):
            axes.annotate(
                bar.text,
                (x, top),
                (0, 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )
    axes.set_xticks(range(len(groups)), groups, rotation=30 if len(groups) > 4 else 0)
    if len(groups) > 4:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    if names:
        figure.legend(loc="outside lower center", ncols=min(6, len(names)), fontsize=8)
    return axes


def decode_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per cache."""
    ours = ("turbo-4bit", "turbo-2/4bit", "turbo-3bit", "turbo-2bit", "kivi-4bit")
    groups: dict[str, dict[str, _Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "decode")).items():
        groups[label] = {}
        for method in ours:
            row = tables.fastest(rows, lambda row, method=method: row["method"] == method)
            if row is not None and (ratio := row.get("speedup_over_cudnn")) is not None:
                groups[label][tables.DECODE_METHODS[method]] = _Bar(ratio, f"{ratio:.2f}")
    figure = _figure(12)
    axes = _bars(figure, groups, 0.19)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=0.12)
    axes.set_title(f"Decode, one token per sequence, on {result['device']}")
    axes.set_ylabel("times as fast as cuDNN bf16")
    return figure


def prefill_plot(result: Result) -> "Figure":
    """TFLOP/s by shape, one bar per mode and kind of softmax; pale: attention alone."""
    groups: dict[str, dict[str, _Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "prefill")).items():
        groups[label] = {}
        if (row := tables.fastest(rows, tables.is_cudnn)) is not None:
            groups[label]["cuDNN bf16"] = _rate_bar(row)
        for row in tables.prefill_variants(rows):
            softmax = "exact" if tables.softmax_of(row) == "exact" else "SAS"
            name = f"{tables.mode_of(row)} {softmax}, {row['implementation']}"
            groups[label][name] = _rate_bar(row)
    figure = _figure(12)
    axes = _bars(figure, groups, 0.075)
    axes.margins(y=0.2)
    axes.set_title(f"Prefill on {result['device']}; pale and in brackets: attention alone")
    axes.set_ylabel("TFLOP/s, quantization included")
    return figure


def _rate_bar(row: dict[str, Any]) -> _Bar:
    rate, alone = row["tflops_per_second"], tables.alone(row)
    reach = None if alone is None else row["work"] / alone / 1e6
    text = f"{rate:.0f}" if reach is None or reach == rate else f"{rate:.0f} ({reach:.0f})"
    return _Bar(rate, text, reach)


def throughput_plot(result: Result) -> "Figure":
    """Tokens per second against the batch, one line per cache; a cross where memory ends."""
    figure = _figure(7)
    axes = figure.subplots()
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        curves.setdefault(row["cache"], []).append(row)
    for cache, rows in curves.items():
        ran = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["batch"])
        if not ran:
            continue
        batches = [row["batch"] for row in ran]
        rates = [row["tokens_per_second"] for row in ran]
        (line,) = axes.plot(batches, rates, marker="o", label=cache)
        ended = [row["batch"] for row in rows if row["status"] == "out of memory"]
        if ended:
            axes.plot(min(ended), 0, "x", color=line.get_color(), clip_on=False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Generation on {result['device']}")
    axes.set(xlabel="sequences in the batch (x: out of memory)", ylabel="tokens per second")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _plot_of_ratios(
    bars: dict[str, dict[str, tuple[float, str]]],
    title: str,
    label: str,
    *,
    width: float = 12,
    bar: float = 0.17,
    margin: float = 0.2,
) -> "Figure":
    """Bars of ratios with a line at 1.

    Args:
      bars: by group and series the ratio, and the text over it.
      title: of the plot.
      label: what is relative to what.
      width: of the plot, in inches.
      bar: width of a bar; the groups are 1 apart.
      margin: above the highest bar, for its text.
    """
    groups = {
        place: {name: _Bar(*height_and_text) for name, height_and_text in found.items()}
        for place, found in bars.items()
    }
    figure = _figure(width)
    axes = _bars(figure, groups, bar)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=margin)
    axes.set_title(title)
    axes.set_ylabel(label)
    return figure


def paged_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per kind of pages."""
    bars = {
        place: {name: (ratio, f"{ratio:.2f}") for name, ratio in found.items()}
        for place, found in paged_tables.speed_bars(result).items()
    }
    title = f"Attention over pages, one token per sequence, on {result['device']}"
    return _plot_of_ratios(bars, title, "times as fast as cuDNN on dense bf16", margin=0.12)


def engine_plot(result: Result) -> "Figure":
    """What the engine does with a pool of one size, relative to bfloat16 pages."""
    title = f"One pool size on {result['device']}; over the bars the figures"
    bars = paged_tables.engine_bars(result)
    return _plot_of_ratios(bars, title, "times bf16 pages", width=8, bar=0.25)


def flax_plot(result: Result) -> "Figure":
    """Speed over Flax's own module by layer, one bar per module and cache."""
    title = f"One attention layer in nnx on {result['device']}"
    label = "times as fast as nnx.MultiHeadAttention"
    return _plot_of_ratios(flax_tables.bars(result), title, label, bar=0.2, margin=0.35)


def families_plot(result: Result) -> "Figure":
    """Speed of decode steps over the faster uncompressed cache by model, one bar per cache."""
    title = f"One decode step of the whole model on {result['device']}"
    label = "times as fast as the faster uncompressed cache"
    return _plot_of_ratios(model_tables.families_bars(result), title, label, bar=0.2)


def loading_plot(result: Result) -> "Figure":
    """Most memory over the checkpoint's size, one bar per way to load it."""
    row = result["rows"][0]
    title = f"Loading {row['model']}, {row['model_bytes'] / 1e9:.1f} GB, on {result['device']}"
    bars = model_tables.loading_bars(result)
    return _plot_of_ratios(
        bars, title, "times the checkpoint's size", width=7, bar=0.25, margin=0.35
    )


# Drawn of which results (the names before the date; the newest of all counts), and by what.
PLOTS: dict[str, tuple[tuple[str, ...], Callable[[Result], "Figure"]]] = {
    "decode_speed.png": (("attention",), decode_plot),
    "prefill_speed.png": (("attention",), prefill_plot),
    "throughput.png": (("generate", "throughput"), throughput_plot),
    pooled_tables.PLOT: (("pooled",), pooled_tables.speed_plot),
    pooled_tables.TRAINING_PLOT: (("pooled_training",), pooled_tables.training_plot),
    fireq_tables.PLOT: (("fireq",), fireq_tables.speed_plot),
    paged_tables.PLOTS[paged_tables.DECODE]: (("paged",), paged_plot),
    paged_tables.PLOTS[paged_tables.ENGINE]: (("engine",), engine_plot),
    flax_tables.PLOT: (("flax",), flax_plot),
    model_tables.PLOTS[model_tables.FAMILIES]: (("families",), families_plot),
    model_tables.PLOTS[model_tables.LOADING]: (("loading",), loading_plot),
}
