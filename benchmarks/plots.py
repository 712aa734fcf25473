"""Pictures: what the plots of all suites share."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def wide_figure(width: float) -> "Figure":
    # Imported here: tables need no matplotlib. A bare `Figure` needs no display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")


@dataclasses.dataclass(frozen=True)
class Bar:
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


def draw_bars(figure: "Figure", groups: dict[str, dict[str, Bar]], width: float) -> Any:
    """Grouped bars of this width, each group as wide as the bars it has; the groups are 1 apart."""
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


Ratios = dict[str, dict[str, tuple[float, str]]]
"""Figures and the texts over them, by group and series."""


def of_ratios(
    bars: Ratios,
    title: str,
    label: str,
    *,
    width: float = 12,
    bar: float = 0.17,
    margin: float = 0.2,
    line: bool = True,
) -> "Figure":
    """Bars of ratios, or of other figures, and the texts over them; `line`: with one at 1."""
    groups = {
        place: {name: Bar(*height_and_text) for name, height_and_text in found.items()}
        for place, found in bars.items()
    }
    figure = wide_figure(width)
    axes = draw_bars(figure, groups, bar)
    if line:
        axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=margin)
    axes.set_title(title)
    axes.set_ylabel(label)
    return figure
