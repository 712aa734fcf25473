"""How the map of levels is shown: tables, and a picture."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax import _extras, _writing
from turbojax.app.levels.measure import SHOWN, MapReport, MapSettings, PolicyResult

_MOST_PANELS = 4
_COLOURS = {1: "#1d1147", 2: "#832681", 4: "#e75263", 8: "#fec287", 0: "#f1efe9"}
_MEANINGS = {1: "1: every key", 0: "skipped"} | {r: f"{r}: means of {r} keys" for r in (2, 4, 8)}


def render(report: MapReport) -> RenderableType:
    """The report as tables for a terminal: one of both would be wider than 80 columns."""
    settings = report.settings
    levels = Table(
        title=f"{settings.file.name}, {settings.tokens} tokens in blocks of {settings.block}, "
        f"layer {settings.layer}, {len(settings.heads or ())} heads"
    )
    costs = Table()
    for table, columns in (
        (levels, ["skipped" if level == 0 else f"level {level}" for level in SHOWN]),
        (costs, ["density", "ideal speed-up", "cosine", "relative L1"]),
    ):
        table.add_column("policy")
        for column in columns:
            table.add_column(column, justify="right")
    for result in report.results:
        levels.add_row(result.name, *(f"{result.shares[level]:.1%}" for level in SHOWN))
        costs.add_row(
            result.name,
            f"{result.density:.3f}",
            f"{1 / result.density:.2f}x",
            f"{result.cosine:.4f}",
            f"{result.relative_l1:.4f}",
        )
    where = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    note = "Levels: shares of the blocks on and below the diagonal. Error: against dense attention."
    return Group(
        levels, costs, Text(f"{note}\n{report.seconds:.0f} s in all, {where}", style="dim")
    )


def save_plot(report: MapReport, path: Path) -> None:
    """Draws the level maps: a row per policy, a column per head (the first four).

    The ending of `path` chooses the format. Raises OSError if the file cannot be written,
    ValueError for a format that matplotlib does not know, ImportError without matplotlib.
    """
    _extras.need_matplotlib()
    # Imported here, as in the demo: it takes a second, and a bare `Figure` needs no display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    settings = report.settings
    heads = (settings.heads or ())[:_MOST_PANELS]
    rows = len(report.results)
    figure = Figure(figsize=(2.35 * len(heads) + 1.9, 2.5 * rows + 1.05), layout="constrained")
    grid = figure.subplots(
        rows,
        len(heads) + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [1.0] * len(heads) + [0.22]},
    )
    for row, result in enumerate(report.results):
        for panel, head in enumerate(heads):
            _draw_map(grid[row][panel], result, panel, settings)
            title = f"density {result.densities[panel]:.2f}, error {result.errors[panel]:.1%}"
            title = f"head {head}\n{title}" if row == 0 else title
            grid[row][panel].set_title(title, fontsize=9)
            if row == rows - 1:
                grid[row][panel].set_xlabel("keys", fontsize=9)
        grid[row][0].set_ylabel(f"$\\bf{{{result.name}}}$\nqueries", fontsize=10)
        _draw_shares(grid[row][-1], result)
    legend = [Patch(facecolor=_COLOURS[r], edgecolor="#999999", label=_MEANINGS[r]) for r in SHOWN]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(
        f"{settings.file.name}, layer {settings.layer}: {settings.tokens} bytes "
        f"in blocks of {settings.block}",
        fontsize=12,
    )
    with _writing.replacing(path) as draft:
        figure.savefig(draft, dpi=130)


def _draw_map(axes: Any, result: PolicyResult, panel: int, settings: MapSettings) -> None:
    """One head's levels; what is above the diagonal stays white."""
    from matplotlib.colors import BoundaryNorm, ListedColormap

    levels = result.levels[panel]
    order = np.full(levels.shape, -1.0)
    for number, level in enumerate(SHOWN):
        order[levels == level] = number
    order = np.where(np.tril(np.ones(levels.shape, bool)), order, np.nan)
    # Blocks at the end may be cut short: the picture's edge is that of whole blocks.
    end = levels.shape[0] * settings.block
    axes.imshow(
        order,
        cmap=ListedColormap([_COLOURS[level] for level in SHOWN]),
        norm=BoundaryNorm(np.arange(len(SHOWN) + 1) - 0.5, len(SHOWN)),
        interpolation="nearest",
        extent=(0, end, end, 0),
    )
    ticks = [0, settings.tokens // 2, settings.tokens]
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    axes.tick_params(labelsize=7, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_shares(axes: Any, result: PolicyResult) -> None:
    """A bar: how many of all heads' visible blocks have each level."""
    bottom = 0.0
    for level in reversed(SHOWN):
        share = result.shares[level]
        axes.bar(
            0, share, bottom=bottom, width=1, color=_COLOURS[level], edgecolor="#999999", lw=0.4
        )
        if share >= 0.04:
            colour = "white" if level in (1, 2) else "black"
            middle = bottom + share / 2
            axes.text(0, middle, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
        bottom += share
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    axes.set_title(f"all heads\n{result.density:.2f}", fontsize=8)
