"""How an evaluation is shown: bars while it runs, tables at its end."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax.app import terminal
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


class Bars:
    """A bar for each method and measure, on standard error, so that standard output stays clean."""

    def __init__(self) -> None:
        self._progress = terminal.progress_bar()
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *exception: object) -> None:
        # Without a task, `stop` would print an empty line.
        if self._tasks:
            self._progress.stop()

    def advance(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done."""
        self._progress.start()  # what runs already goes on
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)


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
