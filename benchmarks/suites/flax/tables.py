"""Tables and the plot of attention layers in nnx: pure functions of their JSON."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The operations of the suite, as they begin the rows' names.
DECODE, TRAINING = "flax-decode", "flax-training"
BASELINES = ("nnx", "nnx-cudnn")
"""What rows are compared with."""
METHODS = {
    "nnx": "`nnx.MultiHeadAttention`",
    "nnx-cudnn": "the same through cuDNN",
    "exact": "`TurboAttention`, exact cache",
    "turbo4": "`TurboAttention`, turbo4 pages",
    "4bit": "`TurboAttention`, 4-bit cache",
    "turbo": "with `TurboAttentionFn()`",
    "turbo-int8": "with `TurboAttentionFn`, the paper's int8",
    "turbo-fp8": "with `TurboAttentionFn`, fp8",
    "pooled": "with `PooledAttentionFn`, top-k",
}
"""Modules and functions, as tables call them."""
_SHORT = {
    "nnx-cudnn": "Flax's, cuDNN",
    "exact": "exact cache",
    "turbo4": "turbo4 pages",
    "4bit": "4-bit cache",
    "turbo": "turbo",
    "turbo-int8": "turbo, int8",
    "turbo-fp8": "turbo, fp8",
    "pooled": "pooled, top-k",
}
PLOT = ("flax_speed.png", "Attention layers in nnx: speed over Flax's own module")


def layer(row: Row) -> str:
    """``32 heads on 8 of 128, 16 x 8k``."""
    heads = f"{row['heads']} heads on {row['kv_heads']} of {row['head_dim']}"
    return f"{heads}, {tables.batch_and_tokens(row)}"


def _share(row: Row) -> str:
    # What is counted is dense attention's work, of which pooled attention leaves most out.
    return "-" if row["method"] == "pooled" else tables.share_of_ceiling(row)


def decode_table(result: Result) -> str:
    """Every layer, module and cache."""
    lines = []
    for row, name in _shown(result, DECODE, 8):
        lines.append(
            [
                *name,
                tables.number(row["us"]),
                *tables.ratios(row, BASELINES),
                tables.number(row["wall_us"]),
                f"{row['cache_bytes'] / 1e6:,.0f}",
                tables.times(row.get("smaller_than_nnx")),
                _share(row),
                f"{row['relative_l2']:.4f}",
            ]
            if row["status"] == "ok"
            else name
        )
    header = ["layer, batch x tokens", "module", "us", "over nnx", "over cuDNN", "wall, us"]
    header += ["cache, MB", "smaller", "of ceiling", "relative L2"]
    return tables.with_cut(tables.table(header, lines), result, DECODE)


def training_table(result: Result) -> str:
    """Every function."""
    lines = []
    for row, name in _shown(result, TRAINING, 8):
        memory = row.get("temporary_bytes")
        lines.append(
            [
                *name,
                f"{row['us'] / 1e3:.2f}",
                *tables.ratios(row, BASELINES),
                f"{row['wall_us'] / 1e3:.2f}",
                "-" if memory is None else f"{memory / 1e9:.2f}",
                _share(row),
                f"{row['relative_l2']:.4f}",
                f"{row['gradient_relative_l2']:.4f}",
            ]
            if row["status"] == "ok"
            else name
        )
    header = ["layer, batch x tokens", "attention", "ms", "over nnx", "over cuDNN", "wall, ms"]
    header += ["temporaries, GB", "of ceiling", "output, relative L2", "gradient"]
    return tables.with_cut(tables.table(header, lines), result, TRAINING)


def _shown(result: Result, operation: str, columns: int) -> list[tuple[Row, list[str]]]:
    """The rows of an operation with their names, and what a row that did not run shows."""
    found = []
    for row in tables.shown(result, operation):
        name = [layer(row), METHODS[row["method"]]]
        if row["status"] != "ok":
            name += [tables.failure_cell(row), *[""] * (columns - 1)]
        found.append((row, name))
    return found


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    table = decode_table(result) if operation == DECODE else training_table(result)
    picture = tables.picture(*PLOT) if operation == DECODE else ""
    text = tables.ceilings_sentence(result, tables.COPY_AND_PRODUCT)
    return f"{picture}{table}\n\n{text}{tables.source(name, result)}"


def _by_layer(result: Result, operation: str) -> dict[str, dict[str, Row]]:
    """The rows that were measured, by layer and method."""
    layers: dict[str, dict[str, Row]] = {}
    for row in tables.finished(result, operation):
        layers.setdefault(layer(row), {})[row["method"]] = row
    return layers


def summary(name: str, result: Result) -> str:
    """Decoding by layer: microseconds, the speed over Flax's module, and its cache's size."""
    shown = ("nnx", "nnx-cudnn", "exact", "turbo4", "4bit")
    lines = []
    for place, rows in _by_layer(result, DECODE).items():
        line = [place]
        for method in shown:
            if method not in rows:
                line.append("-")
                continue
            row = rows[method]
            text = tables.number(row["us"])
            over = row["speedup_over"].get("nnx")
            if method != "nnx" and over is not None:
                text += f" ({over:.2f}x)"
            line.append(f"{text}, {row['cache_bytes'] / 1e6:,.0f} MB")
        lines.append(line)
    header = ["layer, batch x tokens", *(METHODS[method] for method in shown)]
    note = (
        "Microseconds of a decode step of one attention layer, projections included, and the size "
        "of its cache; in brackets the speed over Flax's own module. Time of the kernels on the "
        "device."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """By layer and module: the speed over Flax's own module, and milliseconds."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    for operation, what in ((DECODE, "decoding"), (TRAINING, "training")):
        for place, rows in _by_layer(result, operation).items():
            for method, row in rows.items():
                over = row["speedup_over"].get("nnx")
                if method == "nnx" or over is None:
                    continue
                bar = (over, f"{over:.2f}: {tables.number(row['us'] / 1e3)} ms")
                groups.setdefault(f"{what}\n{place}", {})[_SHORT[method]] = bar
    return groups


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    parts = [f"{row['us']:.1f} us ({row['clock']}), wall {row['wall_us']:.1f}"]
    parts += tables.ratio_parts(row)
    if row["percent_of_ceiling"] is not None:
        parts.append(f"{row['percent_of_ceiling']:.0f} % of ceiling ({row['bound']})")
    parts.append(f"L2 {row['relative_l2']:.4f} from {row['against']}")
    return f"{row['name']}: {', '.join(parts)}"


def speed_plot(result: Result) -> "Figure":
    """Speed over Flax's own module by layer, one bar per module and cache."""
    title = f"One attention layer in nnx on {result['device']}"
    label = "times as fast as nnx.MultiHeadAttention"
    return plots.of_ratios(bars(result), title, label, bar=0.2, margin=0.35)


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "flax summary": summary,
    "flax decode": functools.partial(page_section, operation=DECODE),
    "flax training": functools.partial(page_section, operation=TRAINING),
}
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_plot}
