"""Tables and the plot of decode steps of whole models: pure functions of their JSON."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "model-decode"
"""How the rows' names begin."""
CACHES = {
    "exact": "exact, bf16",
    "paged": "pages, bf16",
    "fp8_e4m3": "fp8 pages, e4m3",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit",
}
"""Kinds of caches, as tables call them."""
PLOT = (
    "families_speed.png",
    "Decode steps of whole models: speed over the faster uncompressed cache",
)


def attention(row: Row) -> str:
    """What a model's attention is like: ``16 heads on 8 of 256, windows of 4,096, cap 50``."""
    parts = [f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"]
    if row["windows"]:
        sizes = " and ".join(f"{size:,}" for size in row["windows"])
        some = "" if row["all_layers_have_windows"] else " in some layers"
        parts.append(f"windows of {sizes}{some}")
    if row["soft_cap"] is not None:
        parts.append(f"scores capped at {row['soft_cap']:g}")
    return ", ".join(parts)


def families_table(result: Result) -> str:
    """Every model and cache."""
    lines = []
    for row in tables.shown(result, OPERATION):
        name = [row["model"], tables.batch_and_tokens(row), CACHES[row["method"]]]
        if row["status"] != "ok":
            lines.append([*name, tables.failure_cell(row), *[""] * 8])
            continue
        ratio, device = row.get("smaller_than_exact"), row["device_us"]
        share = row["percent_of_ceiling"]
        lines.append(
            [
                *name,
                f"{row['us'] / 1e3:.2f}",
                *tables.ratios(row, ("exact", "paged")),
                "-" if device is None else f"{device / 1e3:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['cache_bytes'] / 1e9:.2f}",
                tables.times(ratio),
                "-" if share is None else f"{share:.0f} %",
                f"{row['relative_l2']:.3f}" if "relative_l2" in row else "-",
            ]
        )
    header = ["model", "batch x tokens", "cache", "ms a step", "over exact", "over pages"]
    header += [
        "kernels, ms",
        "tokens per second",
        "cache, GB",
        "smaller",
        "of bandwidth",
        "logits, relative L2",
    ]
    return tables.with_cut(tables.table(header, lines), result, OPERATION)


def _shapes_sentence(result: Result) -> str:
    rows = {row["model"]: row for row in result["rows"]}
    return "; ".join(f"{model}: {attention(row)}" for model, row in rows.items())


def families_section(name: str, result: Result) -> str:
    """The table of docs/benchmarks and where its figures come from."""
    notes = f"Attention: {_shapes_sentence(result)}. "
    notes += tables.ceilings_sentence(result, {"copy": ". "})
    picture = tables.picture(*PLOT)
    return f"{picture}{families_table(result)}\n\n{notes}{tables.source(name, result)}"


def families_summary(name: str, result: Result) -> str:
    """Milliseconds of a step by model, and how much smaller the caches are."""
    lines = []
    for model, rows in _by_model(result).items():
        first = next(iter(rows.values()))
        line = [f"{model}, {tables.batch_and_tokens(first)}"]
        for cache in CACHES:
            if cache not in rows:
                line.append("-")
                continue
            row, text = rows[cache], f"{rows[cache]['us'] / 1e3:.1f} ms"
            if cache == "exact":
                text += f", {row['cache_bytes'] / 1e9:.1f} GB"
            elif cache != "paged" and "smaller_than_exact" in row:
                text += f" ({_over_uncompressed(row):.2f}x), "
                text += f"{row['smaller_than_exact']:.1f}x smaller"
            line.append(text)
        lines.append(line)
    header = ["model, batch x tokens", *CACHES.values()]
    note = (
        "One decode step of the whole model, all layers and logits: wall time of many in a row, "
        "random weights, full caches. In brackets the speed over that of the faster uncompressed "
        "cache: the exact one, which is cuDNN's attention where a model has neither windows nor "
        "caps nor heads wider than 128 and otherwise XLA's, or pages, which are Triton's."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def _over_uncompressed(row: Row) -> float:
    """The speed over that of the faster cache without compression."""
    return min(row["speedup_over"].values())


def _by_model(result: Result) -> dict[str, dict[str, Row]]:
    """The decode steps that were measured, by model and cache."""
    models: dict[str, dict[str, Row]] = {}
    for row in tables.finished(result, OPERATION):
        models.setdefault(row["model"], {})[row["method"]] = row
    return models


def families_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By model and cache: the speed over the faster uncompressed cache, and milliseconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for model, rows in _by_model(result).items():
        for cache, row in rows.items():
            if "speedup_over" in row:
                bar = (_over_uncompressed(row), f"{row['us'] / 1e3:.1f} ms")
                groups.setdefault(f"{model}\n{tables.batch_and_tokens(row)}", {})[CACHES[cache]] = (
                    bar
                )
    return groups


def speed_plot(result: Result) -> "Figure":
    """Speed of decode steps over the faster uncompressed cache by model, one bar per cache."""
    title = f"One decode step of the whole model on {result['device']}"
    label = "times as fast as the faster uncompressed cache"
    return plots.of_ratios(families_bars(result), title, label, bar=0.2)


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    device = row["device_us"]
    parts = [f"{row['us'] / 1e3:.2f} ms a step of {row['repetitions']}", *tables.ratio_parts(row)]
    parts += [] if device is None else [f"kernels {device / 1e3:.2f} ms"]
    parts.append(f"cache {row['cache_bytes'] / 1e9:.2f} GB")
    if "relative_l2" in row:
        parts.append(f"L2 {row['relative_l2']:.4f}")
    return f"{row['name']}: {', '.join(parts)}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "families": families_section,
    "families summary": families_summary,
}
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_plot}
