"""Pictures of an evaluation: loss against bytes, errors by layer, recall by length and depth."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax import _extras, _writing
from turbojax.app.evaluate.display import RECALL_KINDS, Result, rows_of, unit_of

_DPI = 120
_PANELS = 4
"""Heat maps beside each other."""


def save_plots(result: Result, folder: Path) -> list[str]:
    """Draws what was measured; the folder is made if need be.

    `result` is what `turbojax.evaluation.evaluate` returns, or its JSON. Returns the names of the
    files: those of ``"cost.png"``, ``"layers.png"``, ``"recall.png"`` and ``"recall_bits.png"`` for
    which there is a measure. Raises OSError, or ImportError without matplotlib.
    """
    _extras.need_matplotlib("--plot")
    # Imported here: it takes a second, and a bare `Figure` needs no display.
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    drawings: Mapping[str, tuple[str, Callable[[Figure, Result], None]]] = {
        "cost": ("text", _draw_cost),
        "layers": ("layers", _draw_layers),
        "recall": ("recall", _draw_recall),
        "recall_bits": ("recall", functools.partial(_draw_recall, is_bits=True)),
    }
    for what, (measure, draw) in drawings.items():
        if not any(True for _ in rows_of(result, measure)):
            continue
        figure = Figure(layout="constrained")
        draw(figure, result)
        name = f"{what}.png"
        with _writing.replacing(folder / name) as draft:
            figure.savefig(draft, dpi=_DPI, format="png")
        drawn.append(name)
    return drawn


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the ``(bytes, loss)`` points that no other point beats, by rising bytes.

    A point beats another if it is at most as large in both and smaller in one; all beat NaN.
    """
    kept = list[int]()
    best = float("inf")
    order = sorted((x, y, i) for i, (x, y) in enumerate(points) if x == x and y == y)
    for _, loss, i in order:
        if loss < best:
            kept.append(i)
            best = loss
    return kept


def _draw_cost(figure: Any, result: Result) -> None:
    """What each method costs, against the bytes of its cache."""
    figure.set_size_inches(8, 5)
    axes = figure.subplots()
    unit, settings = unit_of(result), result["settings"]
    names, points = [], []
    for name, row in rows_of(result, "text"):
        if row["cost"] is None:
            continue
        size, cost, ends = row["cache_bytes"] / 2**10, row["cost"], row["cost_interval"]
        # A bootstrapped mean may lie outside of its interval by rounding.
        bars = None if ends is None else [[max(cost - ends[0], 0.0)], [max(ends[1] - cost, 0.0)]]
        axes.errorbar(size, cost, yerr=bars, fmt="o", capsize=3)
        axes.annotate(name, (size, cost), xytext=(5, 5), textcoords="offset points", fontsize=8)
        names.append(name)
        points.append((size, cost))
    front = [points[i] for i in pareto(points)]
    if len(front) > 1:
        axes.step(*zip(*front, strict=True), where="post", color="#888888", lw=1, zorder=0)
    axes.axhline(0, color="#bbbbbb", lw=0.8, zorder=0)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"KiB of one sequence's caches of {settings['context']} tokens, all layers")
    axes.set_ylabel(f"bits per {unit} more than exact, 95 % intervals")
    axes.set_title("Loss against memory: what is below and left of the line would be better")
    axes.grid(alpha=0.3)


def _draw_layers(figure: Any, result: Result) -> None:
    """Each layer's error, a line for each method."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    for name, row in rows_of(result, "layers"):
        errors = [float("nan") if x is None or x <= 0 else x for x in row["relative_l1"]]
        if any(x == x for x in errors):
            axes.plot(range(len(errors)), errors, marker="o", ms=4, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative L1 error of the attention output")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)


def _draw_recall(figure: Any, result: Result, *, is_bits: bool = False) -> None:
    """A panel for each kind of item and method: shares of right answers, or bits of the answers."""
    panels = [
        (name, kind, row[kind]["cells"])
        for kind in RECALL_KINDS
        for name, row in rows_of(result, "recall")
        if kind in row
    ]
    columns = min(_PANELS, max(len(panels), 1))
    rows = max(-(-len(panels) // columns), 1)
    figure.set_size_inches(2.9 * columns + 0.9, 2.7 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    found = [cell["bits"] for _, _, cells in panels for cell in cells if cell["bits"] is not None]
    most = max(found, default=1.0) if is_bits else 1.0
    image = None
    for axes, (name, kind, cells) in zip(grid, panels, strict=False):
        image = _draw_cells(axes, cells, "bits" if is_bits else "whole", most)
        axes.set_title(f"{RECALL_KINDS[kind]}\n{name}", fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if image is not None:
        label = "bits per token of the answer" if is_bits else "share that is right"
        figure.colorbar(image, ax=list(grid), label=label)


def _draw_cells(axes: Any, cells: Sequence[Mapping[str, Any]], figure: str, most: float) -> Any:
    """One heat map: depths below each other, lengths beside each other; light is good."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    known = {
        (cell["length"], cell["depth"]): math.nan if cell[figure] is None else cell[figure]
        for cell in cells
    }
    values = [[known.get((length, depth), math.nan) for length in lengths] for depth in depths]
    is_share = figure == "whole"
    colours = "viridis" if is_share else "viridis_r"
    image = axes.imshow(values, vmin=0, vmax=most or 1.0, cmap=colours, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("tokens of the context", fontsize=8)
    axes.set_ylabel("depth of the answer", fontsize=8)
    axes.tick_params(labelsize=7)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not math.isnan(value):
                is_light = value >= 0.6 * most if is_share else value <= 0.4 * most
                text = f"{value:.0%}" if is_share else f"{value:.2f}"
                colour = "black" if is_light else "white"
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color=colour)
    return image
