"""Plots of the tables: what they share."""

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.evidence.writing import Entries, measured, smaller
from benchmarks.plots import wide_figure
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LINEAR = 0.002
"""Bits up to which a logarithmic axis is linear."""
_FAR = 20
"""Times the median that a cost may be where an axis is linear."""


def bars_of(row: Row) -> list[list[float]]:
    """Distances from a row's cost to the ends of its interval, as `errorbar` takes them."""
    if row["cost_interval"] is None:
        return [[0.0], [0.0]]
    low, high = row["cost_interval"]
    return [[row["cost"] - low], [high - row["cost"]]]


def costs(result: Result, entries: Entries, title: str) -> "Figure":
    """A line per row: what it costs, with its interval."""
    figure = wide_figure(9)
    axes = figure.subplots()
    rows = {k: row for k, row in measured(result, entries).items() if row["cost"] is not None}
    for i, row in enumerate(rows.values()):
        axes.errorbar(row["cost"], i, xerr=bars_of(row), fmt="o", color="C0", capsize=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1, zorder=0.5)
    axes.set(title=title, xlabel=cost_label(result))
    sizes = [abs(row["cost"]) for row in rows.values()]
    if sizes and max(sizes) > _FAR * float(np.median(sizes)):
        axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.grid(axis="x", alpha=0.3)
    return figure


def cost_label(result: Result) -> str:
    """What an axis of costs counts."""
    return f"bits per {result['texts']['unit']} above exact attention"


def against_bytes(
    result: Result, families: Mapping[str, Entries], title: str, above: Container[str] = ()
) -> "Figure":
    """Cost against bytes: down and left is better, a color for each family.

    Args:
      result: the result.
      families: rows by label, by the family that they belong to.
      title: of the plot.
      above: labels that have room above their points alone.
    """
    figure = wide_figure(9)
    axes = figure.subplots()
    for i, (family, entries) in enumerate(families.items()):
        first = True
        for label, row in measured(result, entries).items():
            if row["cost"] is None:
                continue
            axes.errorbar(
                1 / smaller(row),
                row["cost"],
                yerr=bars_of(row),
                fmt="os^Dv"[i % 5],
                color=f"C{i}",
                capsize=3,
                label=family if first else None,
            )
            spot = (1 / smaller(row), row["cost"])
            # Two families may have nearly the same bytes: their names are on different sides.
            shift, side = ((-6, 3), "right") if i % 2 == 0 else ((6, -9), "left")
            if label in above:
                shift, side = (0, 9), "center"
            axes.annotate(label, spot, shift, textcoords="offset points", fontsize=7, ha=side)
            first = False
    axes.margins(x=0.15)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.axhline(0, color="black", linewidth=1, zorder=0.5)
    axes.set(title=title, xlabel="bytes, relative to a bfloat16 cache", ylabel=cost_label(result))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure


def curves(
    axes: Any,
    points: Mapping[str, Sequence[tuple[float, Row]]],
    *,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Costs against a number, a line per name; rows without a figure are left out."""
    for i, (name, pairs) in enumerate(points.items()):
        there = [(x, row) for x, row in pairs if row["cost"] is not None]
        if not there:
            continue
        x, rows = zip(*there, strict=True)
        ends = [[bars_of(row)[side][0] for row in rows] for side in (0, 1)]
        style = (styles or {}).get(name, "o-")
        cost = [row["cost"] for row in rows]
        axes.errorbar(x, cost, yerr=ends, fmt=style, color=f"C{i}", capsize=3, label=name)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
