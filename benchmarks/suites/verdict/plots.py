"""The plot of the verdict: speed and cost against bits."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.plots import wide_figure
from benchmarks.suites.verdict.methods import FULL, METHODS
from benchmarks.suites.verdict.tables import PLOT, places, texts
from benchmarks.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP"


def speed_and_cost(result: Result) -> "Figure":
    """Left: speed over dense bfloat16 by shape; right: cost in bits per byte, with intervals."""
    figure = wide_figure(12)
    left, right = figure.subplots(1, 2)
    colors = {name: f"C{i}" for i, name in enumerate(n for n in METHODS if n != FULL)}
    _speeds(left, result, colors)
    _costs(right, result, colors)
    figure.suptitle(f"Caches side by side on {result['device']}")
    figure.legend(*_legend(left, colors), loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _speeds(axes: Any, result: Result, colors: Mapping[str, str]) -> None:
    for marker, (place, rows) in zip(_MARKERS, places(result).items(), strict=False):
        for method, row in rows.items():
            ratio = row["speedup_over"].get("bf16")
            if method in colors and ratio is not None:
                at = (row["bits_per_number"], ratio)
                axes.plot(*at, marker, color=colors[method], alpha=0.8)
        axes.plot([], [], marker, color="grey", label=place)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.set(xlabel="bits a number", ylabel="decoding: times as fast as dense bf16")
    axes.grid(alpha=0.3)


def _costs(axes: Any, result: Result, colors: Mapping[str, str]) -> None:
    bits = {
        method: row["bits_per_number"]
        for rows in places(result).values()
        for method, row in rows.items()
    }
    for method, row in texts(result).items():
        if method in bits:
            text = row["text"]
            low, high = text["cost_interval"]
            ends = [[text["cost"] - low], [high - text["cost"]]]
            style = {"color": colors[method], "marker": "o", "capsize": 3}
            axes.errorbar(bits[method], text["cost"], yerr=ends, **style)
    axes.axhline(0, color="black", linewidth=1, zorder=0.5)
    axes.set(xlabel="bits a number", ylabel="cost, bits per byte of held-out text")
    axes.grid(alpha=0.3)


def _legend(axes: Any, colors: Mapping[str, str]) -> tuple[list[Any], list[str]]:
    """Shapes by marker, caches by color."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    for method, color in colors.items():
        handles.append(Line2D([], [], color=color, marker="s", linestyle=""))
        labels.append(METHODS[method])
    return handles, labels


PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_and_cost}
"""By the name of its file."""
