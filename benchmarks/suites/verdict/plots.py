"""The plot of the verdict: speed, error and cost against bits."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.plots import wide_figure
from benchmarks.suites.verdict.methods import CACHES, FULL, METHODS, TRITON
from benchmarks.suites.verdict.tables import PLOT, places, texts
from benchmarks.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vP"


def side_by_side(result: Result) -> "Figure":
    """Against bits: speed over dense bfloat16 by shape, a layer's error, and the cost on text."""
    figure = wide_figure(15)
    speed, error, cost = figure.subplots(1, 3)
    _speeds(speed, result)
    _errors(error, result)
    _costs(cost, result)
    for axes in (speed, error, cost):
        axes.set_xlabel("bits a number")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Caches side by side on {result['device']} (hollow: our kernels in Triton)")
    figure.legend(*_legend(speed), loc="outside lower center", ncols=7, fontsize=8)
    return figure


def _speeds(axes: Any, result: Result) -> None:
    for marker, (place, rows) in zip(_MARKERS, places(result).items(), strict=False):
        for method, row in rows.items():
            ratio = row["speedup_over"].get("bf16")
            if method != FULL and ratio is not None:
                style = {"color": _color(method), "alpha": 0.8}
                style["fillstyle"] = "none" if method.endswith(TRITON) else "full"
                axes.plot(row["bits_per_number"], ratio, marker, **style)
        axes.plot([], [], marker, color="grey", label=place)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.set_ylabel("decoding: times as fast as dense bf16")


def _errors(axes: Any, result: Result) -> None:
    place, rows = next(iter(places(result).items()), ("", {}))
    for method, row in rows.items():
        if method in CACHES:
            at = (row["bits_per_number"], 100 * row["relative_l1"])
            axes.plot(*at, "o", color=_color(method))
    axes.set_ylabel(f"error of a layer, relative L1 in %, {place}")


def _costs(axes: Any, result: Result) -> None:
    bits = {
        method: row["bits_per_number"]
        for rows in places(result).values()
        for method, row in rows.items()
    }
    for method, row in texts(result).items():
        text = row["text"]
        if method in bits and text["cost"] is not None:
            low, high = text["cost_interval"] or (text["cost"],) * 2
            ends = [[text["cost"] - low], [high - text["cost"]]]
            style = {"color": _color(method), "marker": "o", "capsize": 3}
            axes.errorbar(bits[method], text["cost"], yerr=ends, **style)
    axes.axhline(0, color="black", linewidth=1, zorder=0.5)
    axes.set_ylabel("cost, bits per byte of held-out text")


def _color(method: str) -> str:
    return f"C{CACHES.index(method.removesuffix(TRITON))}"


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Shapes by marker, caches by color."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    for method in CACHES:
        handles.append(Line2D([], [], color=_color(method), marker="s", linestyle=""))
        labels.append(METHODS[method])
    return handles, labels


PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: side_by_side}
"""By the name of its file."""
