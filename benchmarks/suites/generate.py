"""Generated tokens per second against the batch, until memory is full: figure 7a of TurboAttention.

Decode steps of a model of Llama 3 8B's shape with random weights, measured as those of `families`,
through each cache at growing batches of full sequences. A batch that does not fit is a row, too.
"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.plots import wide_figure
from benchmarks.suite import Suite, each, over_baselines, parted
from benchmarks.suites import families
from benchmarks.summary import best_batches
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODEL, _TOKENS = "llama-3-8b", 1024 + 128
_BATCHES = (16, 64, 128, 256, 384, 400, 424, 512, 640, 768, 1024)


@dataclasses.dataclass(frozen=True)
class Group(families.Group):
    """A batch, through each of these caches."""

    cases = ("exact", "4bit", "2/4bit")


# What the docs show -------------------------------------------------------------------------------
# Older results are of a program of its own: they say ``cache`` for ``method``, and bring notes.

PLOT = ("throughput.png", "Generation: tokens per second against the batch size")
# The best throughput over that of the uncompressed cache, as TurboAttention reports it for Phi-3
# Medium on an A100.
_PAPER = 2.37


def by_cache(result: Result) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault(row.get("cache") or row["method"], []).append(row)
    return found


def _is_full(row: Row) -> bool:
    return row["status"] == "out of memory" or "RESOURCE_EXHAUSTED" in row.get("reason", "")


def _stop(row: Row) -> str:
    """Why a batch was not measured; an allocator's error says no more than its kind."""
    if _is_full(row):
        return "out of memory"
    return row.get("reason") or row.get("note") or row["status"]


def throughput_table(result: Result) -> str:
    """Generation: the best throughput of each cache, and what stopped larger batches."""
    best, lines = best_batches(result), []
    for cache, rows in by_cache(result).items():
        stops = {row["batch"]: _stop(row) for row in rows if row["status"] != "ok"}
        stopped = ", ".join(f"{batch}: {stops[batch]}" for batch in sorted(stops)) or "-"
        if cache not in best:
            lines.append([cache, "-", "-", "-", "-", stopped])
            continue
        row, size = best[cache], best[cache].get("cache_bytes")
        ratio = row["tokens_per_second"] / best["exact"]["tokens_per_second"]
        megabytes = "-" if size is None else f"{size / row['batch'] / 1e6:.1f}"
        rate = tables.number(row["tokens_per_second"], 4)
        lines.append([cache, str(row["batch"]), rate, tables.times(ratio), megabytes, stopped])
    header = ["cache", "best batch", "tokens per second", "over exact", "MB per sequence"]
    return tables.table([*header, "did not run"], lines)


def _notes(result: Result) -> str:
    """A sentence of what was measured, and those that older results bring along."""
    if settings := result.get("settings"):
        shape = f"prompts of {settings['prompt']} tokens and {settings['new']} new ones"
        notes = [f"A model of the shape {settings['model']}, {shape}", *result["notes"]]
    else:
        notes = [f"A model of the shape {_MODEL}, full caches of {_TOKENS} tokens, random weights"]
    return "".join(f"{note[0].upper()}{note[1:]}. " for note in notes)


def batches_table(result: Result) -> str:
    """Tokens per second by batch and cache: figure 7a as a table, and its highest points."""
    found: dict[int, dict[str, Row]] = {}
    caches = by_cache(result)
    for cache, rows in caches.items():
        for row in rows:
            if row["status"] == "ok":
                found.setdefault(row["batch"], {})[cache] = row
    places = {str(batch): found[batch] for batch in sorted(found)}
    return tables.pivot(
        "batch", places, {x: x for x in caches}, lambda r: tables.number(r["tokens_per_second"], 4)
    )


def _claims(result: Result) -> str:
    """The paper's claim beside ours."""
    rates = {cache: row["tokens_per_second"] for cache, row in best_batches(result).items()}
    here = ", ".join(
        f"{rate / rates['exact']:.2f}x with `{cache}`"
        for cache, rate in rates.items()
        if cache != "exact"
    )
    note = "Tokens per second; where there are none, nothing was measured, or memory was full. "
    return f"{note}The best over that of the exact cache: {_PAPER}x in the paper, {here} here. "


def throughput_plot(result: Result) -> "Figure":
    """Tokens per second against the batch, one line per cache; a cross where memory ends."""
    figure = wide_figure(7)
    axes = figure.subplots()
    for cache, rows in by_cache(result).items():
        ran = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["batch"])
        if not ran:
            continue
        (line,) = axes.plot(*_points(ran), marker="o", label=cache)
        if ended := [row["batch"] for row in rows if _is_full(row)]:
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


def _points(rows: Iterable[Row]) -> list[list[float]]:
    return [[row[name] for row in rows] for name in ("batch", "tokens_per_second")]


SUITE = Suite(
    name="generate",
    groups=lambda: [Group(_MODEL, batch, _TOKENS) for batch in _BATCHES],
    quick_groups=lambda: [Group("tiny", batch, 192) for batch in (2, 3)],
    # A batch at a time: those that do not fit come last.
    run=each(families.begin, parted(lambda group: group.batch)),
    with_ratios=over_baselines(
        {families.OPERATION: ("exact",)}, "method", ("operation", "model", "label")
    ),
    formats=(),
    # Memory is what is measured here: leave little of it to others.
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"},
    tables={
        "throughput": tables.section(throughput_table, plot=PLOT, note=_notes),
        "batches": tables.section(batches_table, note=_claims),
    },
    plots={PLOT[0]: throughput_plot},
)
