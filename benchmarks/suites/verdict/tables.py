"""Tables of the verdict: pure functions of its JSON, which name where we are worse as well."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.plots import wide_figure
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECODE, PROMPT, TEXT = "verdict-decode", "verdict-prompt", "verdict-text"
"""The operations, as they begin the rows' names."""

BF16, FULL, FP8, KIVI = "exact", "cudnn-full", "fp8_e4m3", "kivi4"
"""Dense bfloat16; the same without lengths, so that all tokens are read; pages in e4m3; KIVI."""

METHODS = {
    BF16: "bf16, dense",
    FULL: "bf16, dense, cuDNN on all tokens",
    "paged": "bf16 pages",
    FP8: "fp8 pages, e4m3",
    "turbo4": "turbo4 pages",
    "paged_k8v4": "k8v4 pages",
    "k8v4": "k8v4",
    "kv4": "kv4",
    "4bit": "4bit",
    KIVI: "KIVI, 4 bits, plain JAX",
    "fp8_e4m3-triton": "fp8 pages, our kernel in Triton",
    "turbo4-triton": "turbo4 pages, our kernel in Triton",
}
"""Rows of a shape by their names, what others are compared with first. All but `FULL` are caches
that models take, some of them read by a kernel that is asked for."""

CACHES = tuple(name for name in METHODS if name != FULL and "-" not in name)
COMPRESSED = ("turbo4", "paged_k8v4", "k8v4", "kv4", "4bit")
"""Ours with fewer bits than fp8."""

TRITON = "-triton"
"""The end of a name whose cache is read by Triton's kernel, whatever else there is."""

# What rows are compared with, by the names of their families: the faster of two rows of one.
_FAMILIES = {
    BF16: "bf16",
    FULL: "bf16",
    "paged": "bf16-pages",
    FP8: "fp8-pages",
    f"{FP8}{TRITON}": "fp8-pages",
}
BASELINES = dict.fromkeys((DECODE, PROMPT), ("bf16", "bf16-pages", "fp8-pages"))
"""Families that rows of an operation are compared with."""


def family(method: str) -> str:
    return _FAMILIES.get(method, method)


PLOT = (
    "verdict.png",
    "Speed and error of one layer's decoding, and what caches cost on text, against their bits",
)
# What the baselines are called in a sentence, by the names of their families.
_BASELINE_NAMES = {"bf16": "dense bf16", "bf16-pages": "bf16 pages", "fp8-pages": "fp8 pages"}
# How many long shapes the first table has columns for.
_COLUMNS = 3


def places(result: Result, operation: str = DECODE) -> dict[str, dict[str, Row]]:
    """The rows that were measured by shape, in the order of the file, and by method."""
    rows = tables.finished(result, operation)
    return tables.nested(rows, tables.batch_and_tokens, lambda row: row["method"])


def texts(result: Result) -> dict[str, Row]:
    """The rows of held-out text by method, of the model that was measured last."""
    rows = tables.finished(result, TEXT)
    return {row["method"]: row for row in rows if row["model"] == rows[-1]["model"]}


def summary_table(result: Result) -> str:
    """One line a cache: bits, speed at long contexts, error, and what it costs a model."""
    every = dict(list(places(result).items())[:_COLUMNS])
    read = texts(result)
    lines = []
    for method, title in METHODS.items():
        rows = {place: found[method] for place, found in every.items() if method in found}
        if not rows and method not in read:
            continue
        first = next(iter(rows.values()), None)
        line = [title, "-" if first is None else f"{first['bits_per_number']:.4g}"]
        line += [_speed_cell(rows.get(place)) for place in every]
        line.append("-" if first is None else f"{100 * first['relative_l1']:.1f} %")
        lines.append(line + _text_cells(read.get(method)))
    header = ["keys and values in", "bits a number"]
    header += [f"{place}, us" for place in every]
    header += ["error of a layer", "bits per byte", "cost", "same greedy byte", "KL, bits"]
    return tables.table(header, lines)


def _speed_cell(row: Row | None) -> str:
    """Microseconds, and the speed over fp8 pages."""
    if row is None:
        return "-"
    ratio = None if row["method"] == FP8 else row["speedup_over"].get("fp8-pages")
    return tables.with_ratio(tables.number(row["us"]), ratio)


def _text_cells(row: Row | None) -> list[str]:
    if row is None:
        return ["-"] * 4
    text = row["text"]
    if text["cost"] is None:
        return ["NaN", "NaN", f"{text['same_greedy_choice']:.1%}", "NaN"]
    return [
        f"{text['bits_per_byte']:.4f}",
        interval(text["cost"], text["cost_interval"]),
        f"{text['same_greedy_choice']:.1%}",
        f"{text['divergence']:.5f}",
    ]


def interval(mean: float | None, ends: Any) -> str:
    """``+0.0035 (+0.0021 to +0.0052)``; NaN of logits that were."""
    if mean is None:
        return "NaN"
    if ends is None:
        return f"{mean:+.4f}"
    low, high = ends
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def summary(name: str, result: Result) -> str:
    notes = (
        "Microseconds of one layer for one query token of each sequence, and in brackets the speed "
        "over fp8 pages; relative L1 error against float32 attention to the tokens themselves, "
        "normal numbers with keys that have outlier channels. "
    )
    parts = [tables.picture(*PLOT) + summary_table(result), verdict(result)]
    rates = tables.ceilings_sentence(result, tables.COPY_AND_PRODUCT)
    source = f"{notes}{_text_note(result)}{rates}{tables.source(name, result)}"
    return "\n\n".join([*filter(None, parts), source])


def _text_note(result: Result) -> str:
    row = next(iter(texts(result).values()), None)
    if row is None:
        return ""
    return (
        f"Bits per byte of the {row['model']} model, float32, windows of {row['context']:,} bytes "
        "of held-out modules, the second half decoded byte by byte through the cache; the cost is "
        "beside an exact cache, with the interval in which 95 % of resampled files lie. "
    )


def verdict(result: Result) -> str:
    """One sentence: how turbo4 pages compare with fp8 pages where contexts are long."""
    ratios = {}
    for place, rows in list(places(result).items())[:_COLUMNS]:
        if "turbo4" in rows and (over := rows["turbo4"]["speedup_over"].get("fp8-pages")):
            ratios[place] = over
    if not ratios:
        return ""
    said = ", ".join(f"{ratio:.2f} at {place}" for place, ratio in ratios.items())
    words = "faster" if min(ratios.values()) > 1 else "not faster everywhere"
    return f"turbo4 pages against fp8 pages: {said} times as fast, so {words} on this GPU."


# Where we are worse -------------------------------------------------------------------------------


def worse(result: Result) -> list[list[str]]:
    """Everything in which one of our caches of fewer bits loses: cache, where, to what, by how."""
    lines = []
    for operation, words in ((DECODE, "decoding"), (PROMPT, "a prompt")):
        for place, rows in places(result, operation).items():
            for method in COMPRESSED:
                for name, ratio in _speeds_over(rows, method).items():
                    if ratio < 1:
                        row = [METHODS[method], f"{words}, {place}", name]
                        lines.append([*row, f"{ratio:.2f}x the speed"])
    return lines + _worse_texts(result)


def _speeds_over(rows: Mapping[str, Row], method: str) -> dict[str, float]:
    """A row's speed over that of its baselines and of KIVI, by what sentences call them."""
    if method not in rows:
        return {}
    over = rows[method]["speedup_over"].items()
    found = {_BASELINE_NAMES[name]: ratio for name, ratio in over if name in _BASELINE_NAMES}
    if KIVI in rows:
        found[METHODS[KIVI]] = rows[KIVI]["us"] / rows[method]["us"]
    return found


def _worse_texts(result: Result) -> list[list[str]]:
    """Caches that cost a model more than KIVI, or than one of no more bits."""
    first = next(iter(places(result).values()), {})
    bits = {method: row["bits_per_number"] for method, row in first.items()}
    read = {method: row for method, row in texts(result).items() if method in bits}
    lines = []
    for method in (name for name in COMPRESSED if name in read):
        ours = read[method]["text"]
        for other in (name for name in CACHES if name in read and name != method):
            theirs = read[other]["text"]
            compared = other == KIVI or bits[other] <= bits[method]
            if not compared or theirs["cost"] is None:
                continue
            if ours["cost"] is None:
                lines.append([METHODS[method], "held-out text", METHODS[other], "NaN"])
            elif theirs["cost"] < ours["cost"]:
                more = f"{ours['cost'] - theirs['cost']:+.4f} bits per byte"
                names = [f"{METHODS[x]}, {bits[x]:.4g} bits" for x in (method, other)]
                lines.append([names[0], "held-out text", names[1], more + _files(ours, theirs)])
    return lines


def _files(ours: Row, theirs: Row) -> str:
    """In how many of the files one costs more."""
    by_file = theirs["cost_by_file"]
    more = sum(cost > by_file[name] for name, cost in ours["cost_by_file"].items())
    return f", {more} of {len(by_file)} files"


def worse_section(name: str, result: Result) -> str:
    """What `worse` found, or that it found nothing."""
    lines = worse(result)
    if not lines:
        return f"No row of this run is worse than its baselines. {tables.source(name, result)}"
    text = tables.table(["cache", "where", "worse than", "by"], lines)
    return f"{text}\n\n{tables.source(name, result)}"


# Every row ----------------------------------------------------------------------------------------


def _longest(row: Row) -> str:
    return tables.number(max((kernel["us"] for kernel in row["kernels"]), default=None))


def _rate(row: Row) -> str:
    if row["operation"] == PROMPT:
        return f"{tables.number(row['tflops_per_second'])} TFLOP/s"
    return f"{tables.number(row['gigabytes_per_second'])} GB/s"


_NAMES = (
    ("batch x tokens", tables.batch_and_tokens),
    ("keys and values in", lambda row: METHODS[row["method"]]),
)
_FIGURES = (
    *(tables.US, ("longest kernel, us", _longest)),
    *tables.over({name: f"over {title}" for name, title in _BASELINE_NAMES.items()}),
    ("MB", tables.shown_as("bytes", "{:,.1f}", 1e6)),
    *(("rate", _rate), tables.CEILING, tables.L1),
)


def rows_table(result: Result, operation: str) -> str:
    return tables.operation_table(result, operation, _NAMES, _FIGURES)


def layers_table(result: Result) -> str:
    """The error of attention on a model's own keys and values, in prompts and after them."""
    lines = []
    for method, row in texts(result).items():
        prompt, after = (row["layers"][part] for part in ("prefill", "decode"))
        relative, cosine, within = after["relative_l1"], after["cosine"], prompt["relative_l1"]
        if None in (*relative, *cosine, *within):
            lines.append([METHODS[method], *["NaN"] * 5])
            continue
        line = [METHODS[method], f"{sum(cosine) / len(cosine):.5f}", f"{min(cosine):.5f}"]
        line += [_percent(sum(relative) / len(relative)), _percent(max(relative))]
        lines.append([*line, _percent(sum(within) / len(within))])
    header = ["keys and values in", "cosine, mean", "worst layer", "relative L1, mean"]
    return tables.table([*header, "worst layer", "in prompts, mean"], lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


# The plot -----------------------------------------------------------------------------------------

_MARKERS = "osD^vP"


def side_by_side(result: Result) -> "Figure":
    """Against bits: speed over dense bfloat16 by shape, a layer's error, and the cost on text."""
    figure = wide_figure(15)
    speed, error, cost = figure.subplots(1, 3)
    _speeds(speed, result)
    _errors(error, result)
    _costs(cost, result)
    for axes in (speed, error, cost):
        axes.set_xlabel("bits a number")
        axes.grid(alpha=0.3)
    figure.suptitle(f"Caches side by side on {result['device']} (hollow: our kernels in Triton)")
    figure.legend(*_legend(speed), loc="outside lower center", ncols=7, fontsize=8)
    return figure


def _speeds(axes: Any, result: Result) -> None:
    for marker, (place, rows) in zip(_MARKERS, places(result).items(), strict=False):
        for method, row in rows.items():
            ratio = row["speedup_over"].get("bf16")
            if method != FULL and ratio is not None:
                style = {"color": _color(method), "alpha": 0.8}
                style["fillstyle"] = "none" if method.endswith(TRITON) else "full"
                axes.plot(row["bits_per_number"], ratio, marker, **style)
        axes.plot([], [], marker, color="grey", label=place)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.set_ylabel("decoding: times as fast as dense bf16")


def _errors(axes: Any, result: Result) -> None:
    place, rows = next(iter(places(result).items()), ("", {}))
    for method, row in rows.items():
        if method in CACHES:
            at = (row["bits_per_number"], 100 * row["relative_l1"])
            axes.plot(*at, "o", color=_color(method))
    axes.set_ylabel(f"error of a layer, relative L1 in %, {place}")


def _costs(axes: Any, result: Result) -> None:
    bits = {
        method: row["bits_per_number"]
        for rows in places(result).values()
        for method, row in rows.items()
    }
    for method, row in texts(result).items():
        text = row["text"]
        if method in bits and text["cost"] is not None:
            low, high = text["cost_interval"] or (text["cost"],) * 2
            ends = [[text["cost"] - low], [high - text["cost"]]]
            style = {"color": _color(method), "marker": "o", "capsize": 3}
            axes.errorbar(bits[method], text["cost"], yerr=ends, **style)
    axes.axhline(0, color="black", linewidth=1, zorder=0.5)
    axes.set_ylabel("cost, bits per byte of held-out text")


def _color(method: str) -> str:
    return f"C{CACHES.index(method.removesuffix(TRITON))}"


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    for method in CACHES:
        handles.append(Line2D([], [], color=_color(method), marker="s", linestyle=""))
        labels.append(METHODS[method])
    return handles, labels


def _section(table: Callable[[Result], str]) -> Callable[[str, Result], str]:
    return tables.section(table, rates=tables.COPY_AND_PRODUCT)


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "verdict": summary,
    "verdict worse": worse_section,
    "verdict decode": _section(lambda result: rows_table(result, DECODE)),
    "verdict prompts": _section(lambda result: rows_table(result, PROMPT)),
    "verdict layers": _section(layers_table),
}


def one_line(row: Row) -> str:
    """A row for a terminal; of text what the cache costs."""
    line = tables.one_line(row)
    if "text" not in row:
        return line
    bits, cost, *_ = _text_cells(row)
    return f"{line}, {bits} bits per byte, {cost}"
