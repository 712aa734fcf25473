"""Tables and the plot of pooled attention: pure functions of their JSON."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The operations of the suite, as they begin the rows' names.
FORWARD, GRADIENT, SELECT = "pooled", "pooled-gradient", "pooled-select"
SUMMARY_METHODS = ("mixture-0.156", "mixture-0.05")
SUMMARY_MODEL = "mha-16"
_SHAPE = ("model", "batch", "tokens", "is_causal")


def _shape_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SHAPE)


def label(row: Row) -> str:
    """``16 heads of 128, 1 x 16k causal``."""
    model, size = tables.shape_label(row).split(" ", 1)
    heads = f"{row['heads']} heads of {row['head_dim']}" if model.startswith("mha") else model
    return f"{heads}, {size}"


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Rows shape by shape, in the order of the tables."""
    return [row for group in tables.shapes(rows).values() for row in group]


def share_of_ideal(row: Row) -> float | None:
    """The speed over cuDNN, of the inverse of the density."""
    ratio = row.get("speedup_over_cudnn")
    return None if ratio is None else ratio * row["density"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _milliseconds(row: Row) -> str:
    return tables.number(row["us"] / 1e3)


def attention_table(result: Result, operation: str) -> str:
    """Every row of the forward pass, or of both passes; those that did not run with the reason."""
    lines = []
    for row in ordered(tables.shown(result, operation)):
        name = [label(row), row["method"], row["implementation"] or "cuDNN"]
        if row["status"] != "ok":
            lines.append(
                [*name, tables.failure_cell(row), *[""] * (8 if operation == FORWARD else 9)]
            )
            continue
        ours = row["implementation"] is not None
        ideal = share_of_ideal(row)
        lines.append(
            [
                *name,
                f"{row['density']:.4f}",
                _milliseconds(row),
                tables.times(row.get("speedup_over_cudnn")),
                tables.times(1 / row["density"]) if ours else "-",
                _share(None if ideal is None or not ours else 100 * ideal),
                tables.number(row["tflops_per_second"]),
                _share(row["percent_of_peak"]),
                *_errors(row),
            ]
        )
    header = ["shape", "levels", "kernel", "density", "ms", "over cuDNN", "ideal", "of ideal"]
    header += ["TFLOP/s", "of 989"]
    if operation == FORWARD:
        header += ["cosine", "relative L1, RMSE"]
    else:
        header += ["cosine of dQ, dK, dV", "relative L1", "RMSE"]
    return tables.with_cut(tables.table(header, lines), result, operation)


def _errors(row: Row) -> list[str]:
    if row["operation"] == FORWARD:
        return [f"{row['cosine']:.5f}", f"{row['relative_l1']:.4f}, {row['rmse']:.2g}"]
    errors = row["gradient_errors"].values()
    return [", ".join(f"{e[name]:{form}}" for e in errors) for name, form in _GRADIENT_ERRORS]


_GRADIENT_ERRORS = (("cosine", ".5f"), ("relative_l1", ".4f"), ("rmse", ".2g"))


def selection_table(result: Result) -> str:
    """What choosing levels takes, compared with the forward pass that uses them."""
    forward = _by_method(result, FORWARD)
    both = _by_method(result, GRADIENT)
    lines = []
    for row in ordered(tables.finished(result, SELECT)):
        line = [label(row), row["method"], f"{row['density']:.3f}", tables.number(row["us"])]
        key = (_shape_of(row), row["method"])
        steered, trained = forward.get(key), both.get(key)
        if steered is None:
            lines.append([*line, *["-"] * 5])
            continue
        dense = forward.get((_shape_of(row), "cudnn"))
        total = row["us"] + steered["us"]
        far = steered["out_against_dense"]
        lines.append(
            [
                *line,
                _milliseconds(steered),
                f"{100 * row['us'] / steered['us']:.1f} %",
                "-" if trained is None else f"{100 * row['us'] / trained['us']:.1f} %",
                tables.times(None if dense is None else dense["us"] / total),
                f"{far['cosine']:.4f}, {far['relative_l1']:.3f}",
            ]
        )
    header = ["shape", "policy", "density", "choosing, us", "forward, ms", "choosing / forward"]
    header += ["choosing / forward and backward", "both over cuDNN forward"]
    return tables.table([*header, "output against dense: cosine, relative L1"], lines)


def _by_method(result: Result, operation: str) -> dict[tuple[Any, str], Row]:
    """Rows by shape and levels, of the fastest implementation."""
    best: dict[tuple[Any, str], Row] = {}
    for row in tables.finished(result, operation):
        key = (_shape_of(row), row["method"])
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    return best


def video_section(name: str, result: Result) -> str:
    """Both passes without a mask, as docs/video.md shows them, and where the figures come from."""
    passes = [attention_table(result, operation) for operation in (FORWARD, GRADIENT)]
    return "\n\nWith the backward pass:\n\n".join(passes) + f"\n\n{tables.source(name, result)}"


def page_section(name: str, result: Result, operation: str) -> str:
    """A table of docs/benchmarks and where its figures come from."""
    table = selection_table(result) if operation == SELECT else attention_table(result, operation)
    picture = tables.picture(*PLOT) if operation == FORWARD else ""
    rate = result["ceilings"].get("bf16")
    matmul = "" if rate is None else f"A bfloat16 matrix product through XLA: {rate:.0f} TFLOP/s. "
    return f"{picture}{table}\n\n{matmul}{tables.source(name, result)}"


PLOT = ("pooled_speed.png", "Pooled attention: speed over cuDNN against the density")


def summary(name: str, result: Result) -> str:
    """A few rows: the fastest of ours, forward and with the backward pass, against cuDNN."""
    forward, both = (_by_method(result, operation) for operation in (FORWARD, GRADIENT))
    lines = []
    for row in ordered(row for row in forward.values() if row["method"] in SUMMARY_METHODS):
        if row["model"] != SUMMARY_MODEL:
            continue
        trained = both.get((_shape_of(row), row["method"]))
        cells = [_time_and_ratio(row), "-" if trained is None else _time_and_ratio(trained)]
        lines.append([label(row), f"{row['density']:.3f}", *cells])
    header = ["batch x tokens", "density", "forward, ms", "forward and backward, ms"]
    note = (
        "Time of the kernels on the device; in brackets the speed over that of cuDNN's dense "
        "attention in bfloat16. The ideal is the inverse of the density."
    )
    source = tables.source(name, result)
    return f"{tables.table(header, lines)}\n\n{note} {source}"


def _time_and_ratio(row: Row) -> str:
    return f"{_milliseconds(row)} ({tables.times(row.get('speedup_over_cudnn'))})"


_DENSITY_TICKS = (0.05, 0.1, 0.2, 0.5, 1)


def speed_plot(result: Result) -> "Figure":
    """Speed over cuDNN against the density, with the ideal line: the fastest of ours."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    densities = []
    for axes, operation, title in zip(
        panels, (FORWARD, GRADIENT), ("forward", "forward and backward"), strict=True
    ):
        by_shape: dict[str, list[Row]] = {}
        for row in ordered(_by_method(result, operation).values()):
            is_shown = row["implementation"] is not None and row["model"] == SUMMARY_MODEL
            if is_shown and "speedup_over_cudnn" in row:
                densities.append(row["density"])
                by_shape.setdefault(label(row), []).append(row)
        for i, (name, rows) in enumerate(by_shape.items()):
            rows = sorted(rows, key=lambda row: row["density"])
            x, y = [r["density"] for r in rows], [r["speedup_over_cudnn"] for r in rows]
            style = "--" if rows[0]["is_causal"] else "-"
            axes.plot(x, y, "o" + style, color=f"C{i // 2}", ms=4, lw=1, label=name)
        axes.set_title(title)
    least = min([*densities, 0.5])
    for axes in panels:
        axes.plot([least, 1], [1 / least, 1], color="black", lw=1, label="ideal, 1 / density")
        axes.axhline(1, color="black", lw=0.5, ls=":")
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xticks(_DENSITY_TICKS)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("density: share of dense attention's work")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("times as fast as cuDNN bf16, dense")
    figure.suptitle(f"Pooled attention on {result['device']}")
    return figure


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["operation"] != SELECT or row["status"] != "ok":
        text = tables.one_line(row)
        return text if "density" not in row else f"{text}, density {row['density']:.4f}"
    return f"{row['name']}: {row['us']:.1f} us ({row['clock']}), density {row['density']:.4f}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "pooled summary": summary,
    "pooled forward": functools.partial(page_section, operation=FORWARD),
    "pooled gradient": functools.partial(page_section, operation=GRADIENT),
    "pooled selection": functools.partial(page_section, operation=SELECT),
}
PLOTS: Mapping[str, Callable[[Result], "Figure"]] = {PLOT[0]: speed_plot}
