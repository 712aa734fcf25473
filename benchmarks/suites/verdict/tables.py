"""Tables of the verdict: pure functions of its JSON, which name where we are worse as well."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import tables
from benchmarks.suites.verdict.methods import (
    CACHES,
    COMPRESSED,
    DECODE,
    FP8,
    KIVI,
    METHODS,
    PROMPT,
    TEXT,
)
from benchmarks.tables import Result, Row

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
    found: dict[str, dict[str, Row]] = {}
    for row in tables.finished(result, operation):
        found.setdefault(tables.batch_and_tokens(row), {})[row["method"]] = row
    return found


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
    ratio = row["speedup_over"].get("fp8-pages")
    shown = ratio is not None and row["method"] != FP8
    return tables.number(row["us"]) + (f" ({ratio:.2f}x)" if shown else "")


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
    """The table, what it says, and where its figures come from."""
    notes = (
        "Microseconds of one layer for one query token of each sequence, and in brackets the speed "
        "over fp8 pages; relative L1 error against float32 attention to the tokens themselves, "
        "normal numbers with keys that have outlier channels. "
    )
    parts = [tables.picture(*PLOT) + summary_table(result), verdict(result)]
    return "\n\n".join(
        [*filter(None, parts), f"{notes}{_text_note(result)}{_source(name, result)}"]
    )


def _text_note(result: Result) -> str:
    row = next(iter(texts(result).values()), None)
    if row is None:
        return ""
    return (
        f"Bits per byte of the {row['model']} model, float32, windows of {row['context']:,} bytes "
        "of held-out modules, the second half decoded byte by byte through the cache; the cost is "
        "beside an exact cache, with the interval in which 95 % of resampled files lie. "
    )


def _source(name: str, result: Result) -> str:
    rates = tables.ceilings_sentence(result, tables.COPY_AND_PRODUCT)
    return f"{rates}{tables.source(name, result)}"


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
                        lost = [METHODS[method], f"{words}, {place}", name]
                        lines.append([*lost, f"{ratio:.2f}x the speed"])
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


def rows_table(result: Result, operation: str) -> str:
    """Every row of an operation; those that did not run with the reason."""
    baselines = tuple(_BASELINE_NAMES)
    lines = []
    for row in tables.shown(result, operation):
        line = [tables.batch_and_tokens(row), METHODS[row["method"]]]
        if row["status"] != "ok":
            lines.append([*line, tables.failure_cell(row), *[""] * 8])
            continue
        longest = max((kernel["us"] for kernel in row["kernels"]), default=None)
        line += [tables.number(row["us"]), tables.number(longest)]
        line += [*tables.ratios(row, baselines), f"{row['bytes'] / 1e6:,.1f}"]
        lines.append([*line, *_rates(row), f"{row['relative_l1']:.4f}"])
    header = ["batch x tokens", "keys and values in", "us", "longest kernel, us"]
    header += [f"over {title}" for title in _BASELINE_NAMES.values()]
    header += ["MB", "rate", "of ceiling", "relative L1"]
    return tables.with_cut(tables.table(header, lines), result, operation)


def _rates(row: Row) -> Iterable[str]:
    if row["operation"] == PROMPT:
        rate = f"{tables.number(row['tflops_per_second'])} TFLOP/s"
    else:
        rate = f"{tables.number(row['gigabytes_per_second'])} GB/s"
    return rate, tables.share_of_ceiling(row)


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


def _section(table: Callable[[Result], str]) -> Callable[[str, Result], str]:
    return lambda name, result: f"{table(result)}\n\n{_source(name, result)}"


TABLES: Mapping[str, Callable[[str, Result], str]] = {
    "verdict": summary,
    "verdict worse": worse_section,
    "verdict decode": _section(lambda result: rows_table(result, DECODE)),
    "verdict prompts": _section(lambda result: rows_table(result, PROMPT)),
    "verdict layers": _section(layers_table),
}
"""What the docs show of the suite."""


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] != "ok":
        return tables.not_measured(row)
    if row["operation"] == TEXT:
        bits, cost, *_ = _text_cells(row)
        return f"{row['name']}: {bits} bits per byte, {cost}, {row['seconds']:.0f} s"
    parts = [f"{row['us']:.1f} us ({row['clock']})", *tables.ratio_parts(row)]
    return f"{row['name']}: {', '.join(parts)}, L1 {row['relative_l1']:.4f}"
