"""How an evaluation is shown: tables; loss against bytes, errors by layer, recall in pictures."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax import _extras, _writing
from turbojax.evaluation import compare_tasks

Result = Mapping[str, Any]
"""What `turbojax.evaluation.evaluate` returns, or its JSON."""

RECALL_KINDS = {
    "copy": "copying 64 tokens",
    "key_value": "values by key",
    "needle": "a sentence in a text",
    "chat": "told in an earlier turn",
}
"""What recall asks for, by the names in the results."""


def render(result: Result) -> RenderableType:
    """The tables of all measures there are, and what they were made with."""
    parts: list[RenderableType] = []
    for measure, table in (
        ("text", _text_table),
        ("layers", _layers_table),
        ("recall", _recall_tables),
        ("tasks", _tasks_tables),
    ):
        if any(True for _ in rows_of(result, measure)):
            parts.append(table(result))
    refused = [
        f"{name}, {measure}: {row['refused']}"
        for name, measures in result["methods"].items()
        for measure, row in measures.items()
        if "refused" in row
    ]
    if refused:
        parts.append(Text("\n".join(refused)))
    if short := [name for name, text in result["texts"].items() if not text["windows"]]:
        context = result["settings"]["context"]
        parts.append(Text(f"Left out, shorter than {context:,} tokens: {', '.join(short)}"))
    where = f"jax {result['jax']} on {result['device']}"
    note = "± and brackets: 95 % intervals, by the bootstrap."
    return Group(*parts, Text(f"{note} {where}", style="dim"))


def rows_of(result: Result, measure: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The methods that have a measure, with what it is; not those that cannot be measured."""
    for name, row in result["methods"].items():
        if measure in row and "refused" not in row[measure]:
            yield name, row[measure]


def unit_of(result: Result) -> str:
    """What bits are counted per: ``"byte"`` or ``"token"``."""
    rows = (row for _, row in rows_of(result, "text"))
    return "byte" if any("bits_per_byte" in row for row in rows) else "token"


def half_width(interval: Sequence[float] | None) -> float | None:
    """Half of an interval's width; None where there is none."""
    return None if interval is None else (interval[1] - interval[0]) / 2


def _number(value: float | None, form: str) -> str:
    return "nan" if value is None or math.isnan(value) else format(value, form)


def _with_error(value: float | None, interval: Sequence[float] | None, form: str) -> str:
    half = half_width(interval)
    error = "" if half is None else f" ± {half:{form.removeprefix('+')}}"
    return _number(value, form) + error


def _table(title: str, *columns: str) -> Table:
    # Names fold where the terminal is narrow: options make them long.
    table = Table(title=title, pad_edge=False)
    table.add_column("method", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _text_table(result: Result) -> Table:
    unit, settings = unit_of(result), result["settings"]
    files = len(next(row for _, row in rows_of(result, "text"))["by_file"])
    title = (
        f"{files} texts in windows of {settings['context']} tokens, {settings['prompt']} of them "
        "prefilled, the others decoded"
    )
    # Perplexity is not usual for bytes.
    of_tokens = ["perplexity"] if unit == "token" else []
    table = _table(
        title,
        f"bits/{unit}",
        *of_tokens,
        "cost",
        "KL, bits",
        "same\nchoice",
        "bytes of\na cache",
        "smaller than\nbfloat16",
    )
    for name, row in rows_of(result, "text"):
        table.add_row(
            name,
            _with_error(row[f"bits_per_{unit}"], row["interval"], ".4f"),
            *(_number(row[name], ".3f") for name in of_tokens),
            _with_error(row["cost"], row["cost_interval"], "+.4f"),
            _number(row["divergence"], ".5f"),
            _number(row["same_greedy_choice"], ".1%"),
            f"{row['cache_bytes']:,}",
            f"{row['exact_cache_bytes'] / row['cache_bytes']:.2f}x",
        )
    return table


def _layers_table(result: Result) -> Table:
    table = _table(
        "Errors of each layer's attention output, on the exact model's queries, keys and values",
        "cosine",
        "relative\nL1",
        "worst\nlayer",
        "its relative\nL1",
        "prompt's",
        "decoding's",
    )
    for name, row in rows_of(result, "layers"):
        errors = [math.nan if x is None else x for x in row["relative_l1"]]
        worst = int(np.argmax(errors))  # a NaN, if there is one
        table.add_row(
            name,
            _number(mean(row["cosine"]), ".5f"),
            _number(mean(errors), ".4f"),
            str(worst),
            _number(errors[worst], ".4f"),
            _number(mean(row["prefill"]["relative_l1"]), ".4f"),
            _number(mean(row["decode"]["relative_l1"]), ".4f"),
        )
    return table


def mean(values: Sequence[float | None]) -> float:
    """The mean; NaN where a value is None or NaN."""
    return sum(math.nan if x is None else x for x in values) / len(values)


def _tasks_tables(result: Result) -> RenderableType:
    """A table for each group and task; tasks of groups are in the JSON alone."""
    rows = dict(rows_of(result, "tasks"))
    first = next(iter(rows.values()))
    within = {name for below in first["subtasks"].values() for name in below}
    against = {}
    if "exact" in rows:
        against = {name: compare_tasks(row, rows["exact"]) for name, row in rows.items()}
    parts: list[RenderableType] = []
    for part in ("groups", "tasks"):
        for task, found in first[part].items():
            if task in within:
                continue
            items = f", {found['items']:,} items" if part == "tasks" else ""
            table = _table(f"{task}{items}: means ± standard errors")
            differences = bool(against) and part == "tasks"
            for metric in found["metrics"]:
                table.add_column(metric, justify="right")
                if differences:
                    table.add_column("to exact", justify="right")
            if differences:
                table.add_column("same\nanswers", justify="right")
            for name, row in rows.items():
                cells = []
                for metric in found["metrics"]:
                    value = row[part][task]["metrics"][metric]
                    cells.append(_value(value["value"], value["stderr"]))
                    if differences:
                        other = against[name][task]["metrics"].get(metric)
                        cells.append("" if other is None else _difference(other))
                if differences:
                    same = against[name][task]["same_answers"]
                    cells.append("" if same is None else f"{same:.1%}")
                table.add_row(name, *cells)
            parts.append(table)
    for name, row in rows.items():
        if row["truncated"]:
            parts.append(Text(f"{name}: {row['truncated']:,} prompts were cut, see --max-length"))
        if row["nan"]:
            parts.append(Text(f"{name}: {row['nan']:,} answers are none, logits held NaN"))
    return Group(*parts)


def _value(value: Any, error: float | None) -> str:
    """A metric, which may be text where there is no number."""
    if not isinstance(value, int | float):
        return str(value)
    return _number(value, ".4f") + ("" if error is None else f" ± {error:.4f}")


def _difference(found: Mapping[str, Any]) -> str:
    bounds = found["interval"]
    ends = "" if bounds is None else f" [{bounds[0]:+.4f}, {bounds[1]:+.4f}]"
    return f"{found['difference']:+.4f}{ends}"


def _recall_tables(result: Result) -> RenderableType:
    """A table for each kind of item, and what was not asked."""
    rows = dict(rows_of(result, "recall"))
    parts: list[RenderableType] = []
    for kind, what in RECALL_KINDS.items():
        asked = {name: row[kind] for name, row in rows.items() if kind in row}
        if not asked:
            continue
        cells = next(iter(asked.values()))["cells"]
        lengths = sorted({cell["length"] for cell in cells})
        table = _table(
            f"{what}: share of answers that are right to the end, by tokens of the context",
            *(f"{length:,}" for length in lengths),
            "all",
            "likelihood\nof an answer",
            "bits per\ntoken",
        )
        for name, found in asked.items():
            shares = [
                mean([cell["whole"] for cell in found["cells"] if cell["length"] == length])
                for length in lengths
            ]
            figures = _number(found["likelihood"], ".1%"), _number(found["bits"], ".3f")
            table.add_row(name, *(f"{x:.1%}" for x in (*shares, found["whole"])), *figures)
        parts.append(table)
    left = next(iter(rows.values()))["left_out"]
    reasons = [": ".join([*_cell_name(x), x["why"]]) for x in left]
    if reasons:
        parts.append(Text(f"not asked: {'; '.join(reasons)}"))
    return Group(*parts)


def _cell_name(left: Mapping[str, Any]) -> list[str]:
    """What of recall was left out, in words; nothing if it is all."""
    words = [RECALL_KINDS[left["kind"]]] if "kind" in left else []
    words += [f"{left['length']:,} tokens"] if "length" in left else []
    return [" of ".join(words)] if words else []


_DPI = 120
_PANELS = 4
"""Heat maps beside each other."""


def save_plots(result: Result, folder: Path) -> list[str]:
    """Draws what was measured; the folder is made if need be.

    `result` is what `turbojax.evaluation.evaluate` returns, or its JSON. Returns the names of the
    files: those of ``"cost.png"``, ``"layers.png"``, ``"recall.png"`` and ``"recall_bits.png"`` for
    which there is a measure.
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
