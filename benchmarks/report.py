"""Tables and plots of docs/benchmarks.md, and README.md's tables, from the newest results.

`python -m benchmarks report` rewrites them; with `--check` it fails if that would change anything.
A plot carries the digest of the result it was drawn from, since pixels differ between versions of
matplotlib.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import (
    fireq_tables,
    flax_tables,
    model_tables,
    paged_tables,
    pooled_tables,
    quality_tables,
    readme,
    tables,
)
from benchmarks.tables import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = readme.ROOT / "docs" / "benchmarks.md"
_DIGEST = "Source"
# What results are called; the date follows.
_ATTENTION = ("attention",)
_GENERATION = ("generate", "throughput")
_POOLED, _TRAINING = ("pooled",), ("pooled_training",)
_FIREQ, _FIREQ_MODEL = ("fireq",), ("fireq_model",)
_PAGED, _ENGINE = ("paged",), ("engine",)
_FLAX, _FAMILIES, _LOADING = ("flax",), ("families",), ("loading",)


def digest(result: Result) -> str:
    """A short fingerprint of a result."""
    text = json.dumps(result, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def page_tables(results: Path) -> dict[str, Callable[[], str]]:
    """The tables of docs/benchmarks.md whose results are there."""
    found: dict[str, Callable[[], str]] = {}
    if attention := newest(results, _ATTENTION):
        found |= _attention_tables(*attention)
    if hopper := newest(results, ("hopper",)):
        found["hopper"] = functools.partial(_hopper_section, *hopper)
    if generate := newest(results, _GENERATION):
        found["throughput"] = functools.partial(_throughput_section, *generate)
    if pooled := newest(results, _POOLED):
        for label, operation in _POOLED_TABLES.items():
            found[label] = functools.partial(pooled_tables.page_section, *pooled, operation)
    if training := newest(results, _TRAINING):
        found["pooled training"] = functools.partial(pooled_tables.training_section, *training)
    for prefixes, labels in _FIREQ_TABLES.items():
        if fireq := newest(results, prefixes):
            for label, operation in labels.items():
                found[label] = functools.partial(fireq_tables.page_section, *fireq, operation)
    for prefixes, labels in _PAGED_TABLES.items():
        if paged := newest(results, prefixes):
            for label, operation in labels.items():
                found[label] = functools.partial(paged_tables.page_section, *paged, operation)
    if flax := newest(results, _FLAX):
        for label, operation in _FLAX_TABLES.items():
            found[label] = functools.partial(flax_tables.page_section, *flax, operation)
    if families := newest(results, _FAMILIES):
        found["families"] = functools.partial(model_tables.families_section, *families)
    if loading := newest(results, _LOADING):
        found["loading"] = functools.partial(model_tables.loading_section, *loading)
    return found


_POOLED_TABLES = {
    "pooled forward": pooled_tables.FORWARD,
    "pooled gradient": pooled_tables.GRADIENT,
    "pooled selection": pooled_tables.SELECT,
}
_FIREQ_TABLES = {
    _FIREQ: {
        "fireq matmul": fireq_tables.MATMUL,
        "fireq feed-forward": fireq_tables.FFN,
        "fireq quantize": fireq_tables.QUANTIZE,
        "fireq decode": fireq_tables.DECODE,
    },
    _FIREQ_MODEL: {"fireq model": fireq_tables.MODEL},
}
_PAGED_TABLES = {
    _PAGED: {
        "paged decode": paged_tables.DECODE,
        "paged page size": paged_tables.PAGES,
        "paged chunk": paged_tables.CHUNK,
        "paged append": paged_tables.APPEND,
    },
    _ENGINE: {"engine": paged_tables.ENGINE},
}
_FLAX_TABLES = {"flax decode": flax_tables.DECODE, "flax training": flax_tables.TRAINING}


def _attention_tables(name: str, result: Result) -> dict[str, Callable[[], str]]:
    footer = tables.source(name, result)

    def section(table: Callable[[Result], str], picture: str = "") -> Callable[[], str]:
        return lambda: f"{picture}{table(result)}\n\n{footer}"

    def rows(operation: str) -> Callable[[], str]:
        return lambda: tables.details_table(result, operation)

    return {
        "ceilings": section(tables.ceilings_table),
        "decode": section(tables.decode_table, _picture("decode_speed.png")),
        "decode rows": rows("decode"),
        "prefill": section(tables.prefill_table, _picture("prefill_speed.png")),
        "prefill rows": rows("prefill"),
        "compress": section(tables.compress_table),
        "compress rows": rows("compress"),
    }


def _hopper_section(name: str, result: Result) -> str:
    rates = tables.ceilings_table(result)
    return f"{tables.hopper_table(result)}\n\n{rates}\n\n{tables.source(name, result)}"


def _throughput_section(name: str, result: Result) -> str:
    table = tables.throughput_table(result)
    notes = [note[0].upper() + note[1:] for note in result.get("notes", ())]
    if settings := result.get("settings"):
        shape = f"prompts of {settings['prompt']} tokens and {settings['new']} new ones"
        notes.insert(0, f"A model of the shape {settings['model']}, {shape}")
    text = "".join(f"{note}. " for note in notes)
    source = tables.source(name, result)
    return f"{_picture('throughput.png')}{table}\n\n{text}{source}"


def _picture(name: str) -> str:
    return f"![{_ALT[name]}]({name})\n\n"


def newest(results: Path, prefixes: tuple[str, ...]) -> tuple[str, Result] | None:
    """Name and content of the newest result of one of these names, after which the date comes."""
    paths = [path for prefix in prefixes for path in readme.dated(results, prefix)]
    if not paths:
        return None
    path = max(paths, key=lambda path: path.stem.rpartition("_")[2])
    return path.name, json.loads(path.read_text(encoding="utf-8"))


_ALT = {
    "decode_speed.png": "Decode: speed over cuDNN on bfloat16 by shape and cache",
    "prefill_speed.png": "Prefill: TFLOP/s by shape, mode and softmax",
    "throughput.png": "Generation: tokens per second against the batch size",
}


def _figure(width: float) -> "Figure":
    # Imported here: tables need no matplotlib. A bare `Figure` needs no display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 5), layout="constrained")


@dataclasses.dataclass(frozen=True)
class _Bar:
    """One bar.

    Attributes:
      height: of the filled part.
      text: over the bar.
      reach: of the pale part behind it, if there is one.
    """

    height: float
    text: str
    reach: float | None = None


_COLORS = (*(f"C{i}" for i in range(10)), "black", "gold", "navy", "darkgreen")


def _bars(figure: "Figure", groups: dict[str, dict[str, _Bar]], width: float) -> Any:
    """Grouped bars, each group as wide as the bars it has.

    Args:
      figure: to draw into.
      groups: the bars of each group by the names of their series.
      width: of a bar; the groups are 1 apart.
    """
    axes = figure.subplots()
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    for i, name in enumerate(names):
        at, bars = [], []
        for x, group in enumerate(groups.values()):
            if name in group:
                place = [other for other in names if other in group].index(name)
                at.append(x + (place + 0.5 - len(group) / 2) * width)
                bars.append(group[name])
        color = _COLORS[i % len(_COLORS)]
        axes.bar(at, [bar.height for bar in bars], 0.92 * width, color=color, label=name)
        tops = [max(bar.height, bar.reach or 0) for bar in bars]
        axes.bar(at, tops, 0.92 * width, color=color, alpha=0.35)
        for x, top, bar in zip(at, tops, bars, strict=True):
            axes.annotate(
                bar.text,
                (x, top),
                (0, 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )
    axes.set_xticks(range(len(groups)), groups, rotation=30 if len(groups) > 4 else 0)
    if len(groups) > 4:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    if names:
        figure.legend(loc="outside lower center", ncols=min(6, len(names)), fontsize=8)
    return axes


def decode_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per cache."""
    ours = ("turbo-4bit", "turbo-2/4bit", "turbo-3bit", "turbo-2bit", "kivi-4bit")
    groups: dict[str, dict[str, _Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "decode")).items():
        groups[label] = {}
        for method in ours:
            row = tables.fastest(rows, lambda row, method=method: row["method"] == method)
            if row is not None and (ratio := row.get("speedup_over_cudnn")) is not None:
                groups[label][tables.DECODE_METHODS[method]] = _Bar(ratio, f"{ratio:.2f}")
    figure = _figure(12)
    axes = _bars(figure, groups, 0.19)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=0.12)
    axes.set_title(f"Decode, one token per sequence, on {result['device']}")
    axes.set_ylabel("times as fast as cuDNN bf16")
    return figure


def prefill_plot(result: Result) -> "Figure":
    """TFLOP/s by shape, one bar per mode and kind of softmax; pale: attention alone."""
    groups: dict[str, dict[str, _Bar]] = {}
    for label, rows in tables.shapes(tables.finished(result, "prefill")).items():
        groups[label] = {}
        if (row := tables.fastest(rows, tables.is_cudnn)) is not None:
            groups[label]["cuDNN bf16"] = _rate_bar(row)
        for row in tables.prefill_variants(rows):
            softmax = "exact" if tables.softmax_of(row) == "exact" else "SAS"
            name = f"{tables.mode_of(row)} {softmax}, {row['implementation']}"
            groups[label][name] = _rate_bar(row)
    figure = _figure(12)
    axes = _bars(figure, groups, 0.075)
    axes.margins(y=0.2)
    axes.set_title(f"Prefill on {result['device']}; pale and in brackets: attention alone")
    axes.set_ylabel("TFLOP/s, quantization included")
    return figure


def _rate_bar(row: dict[str, Any]) -> _Bar:
    rate, alone = row["tflops_per_second"], tables.alone(row)
    reach = None if alone is None else row["work"] / alone / 1e6
    text = f"{rate:.0f}" if reach is None or reach == rate else f"{rate:.0f} ({reach:.0f})"
    return _Bar(rate, text, reach)


def throughput_plot(result: Result) -> "Figure":
    """Tokens per second against the batch, one line per cache; a cross where memory ends."""
    figure = _figure(7)
    axes = figure.subplots()
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        curves.setdefault(row["cache"], []).append(row)
    for cache, rows in curves.items():
        ran = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["batch"])
        if not ran:
            continue
        batches = [row["batch"] for row in ran]
        rates = [row["tokens_per_second"] for row in ran]
        (line,) = axes.plot(batches, rates, marker="o", label=cache)
        ended = [row["batch"] for row in rows if row["status"] == "out of memory"]
        if ended:
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


def _plot_of_ratios(
    bars: dict[str, dict[str, tuple[float, str]]],
    title: str,
    label: str,
    *,
    width: float = 12,
    bar: float = 0.17,
    margin: float = 0.2,
) -> "Figure":
    """Bars of ratios with a line at 1.

    Args:
      bars: by group and series the ratio, and the text over it.
      title: of the plot.
      label: what is relative to what.
      width: of the plot, in inches.
      bar: width of a bar; the groups are 1 apart.
      margin: above the highest bar, for its text.
    """
    groups = {
        place: {name: _Bar(*height_and_text) for name, height_and_text in found.items()}
        for place, found in bars.items()
    }
    figure = _figure(width)
    axes = _bars(figure, groups, bar)
    axes.axhline(1, color="black", linewidth=1, zorder=0.5)
    axes.margins(y=margin)
    axes.set_title(title)
    axes.set_ylabel(label)
    return figure


def paged_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape, one bar per kind of pages."""
    bars = {
        place: {name: (ratio, f"{ratio:.2f}") for name, ratio in found.items()}
        for place, found in paged_tables.speed_bars(result).items()
    }
    title = f"Attention over pages, one token per sequence, on {result['device']}"
    return _plot_of_ratios(bars, title, "times as fast as cuDNN on dense bf16", margin=0.12)


def engine_plot(result: Result) -> "Figure":
    """What the engine does with a pool of one size, relative to bfloat16 pages."""
    title = f"One pool size on {result['device']}; over the bars the figures"
    bars = paged_tables.engine_bars(result)
    return _plot_of_ratios(bars, title, "times bf16 pages", width=8, bar=0.25)


def flax_plot(result: Result) -> "Figure":
    """Speed over Flax's own module by layer, one bar per module and cache."""
    title = f"One attention layer in nnx on {result['device']}"
    label = "times as fast as nnx.MultiHeadAttention"
    return _plot_of_ratios(flax_tables.bars(result), title, label, bar=0.2, margin=0.35)


def families_plot(result: Result) -> "Figure":
    """Speed of decode steps over the faster uncompressed cache by model, one bar per cache."""
    title = f"One decode step of the whole model on {result['device']}"
    label = "times as fast as the faster uncompressed cache"
    return _plot_of_ratios(model_tables.families_bars(result), title, label, bar=0.2)


def loading_plot(result: Result) -> "Figure":
    """Most memory over the checkpoint's size, one bar per way to load it."""
    row = result["rows"][0]
    title = f"Loading {row['model']}, {row['model_bytes'] / 1e9:.1f} GB, on {result['device']}"
    bars = model_tables.loading_bars(result)
    return _plot_of_ratios(
        bars, title, "times the checkpoint's size", width=7, bar=0.25, margin=0.35
    )


_PLOTS = {
    "decode_speed.png": (_ATTENTION, decode_plot),
    "prefill_speed.png": (_ATTENTION, prefill_plot),
    "throughput.png": (_GENERATION, throughput_plot),
    pooled_tables.PLOT: (_POOLED, pooled_tables.speed_plot),
    pooled_tables.TRAINING_PLOT: (_TRAINING, pooled_tables.training_plot),
    fireq_tables.PLOT: (_FIREQ, fireq_tables.speed_plot),
    paged_tables.PLOTS[paged_tables.DECODE]: (_PAGED, paged_plot),
    paged_tables.PLOTS[paged_tables.ENGINE]: (_ENGINE, engine_plot),
    flax_tables.PLOT: (_FLAX, flax_plot),
    model_tables.PLOTS[model_tables.FAMILIES]: (_FAMILIES, families_plot),
    model_tables.PLOTS[model_tables.LOADING]: (_LOADING, loading_plot),
}


def plots(results: Path) -> dict[str, tuple[Callable[[Result], "Figure"], Result]]:
    """The plots whose results are there: name, what draws them, and of what."""
    found = {}
    for name, (prefixes, draw) in _PLOTS.items():
        if result := newest(results, prefixes):
            found[name] = (draw, result[1])
    return found


def _drawn_from(path: Path) -> str | None:
    """The digest that a plot carries."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(_DIGEST)


def stale(results: Path, page: Path) -> list[str]:
    """What of the page and its plots does not show the newest results."""
    text = page.read_text(encoding="utf-8")
    wrong = []
    if readme.fill(text, page_tables(results), page.name) != text:
        wrong.append(page.name)
    for name, (_, result) in plots(results).items():
        if _drawn_from(page.parent / name) != digest(result):
            wrong.append(name)
    return wrong


def write(results: Path, page: Path) -> None:
    """Writes the page's tables and its plots."""
    text = page.read_text(encoding="utf-8")
    page.write_text(readme.fill(text, page_tables(results), page.name), encoding="utf-8")
    for name, (draw, result) in plots(results).items():
        draw(result).savefig(page.parent / name, dpi=110, metadata={_DIGEST: digest(result)})


def run(arguments: argparse.Namespace) -> None:
    """The command `report`."""
    readme_path = readme.ROOT / "README.md"
    old = readme_path.read_text(encoding="utf-8")
    if arguments.check:
        wrong = stale(readme.RESULTS, PAGE)
        if readme.fill(old) != old:
            wrong.append(readme_path.name)
        if quality_tables.is_stale():
            wrong.append(quality_tables.PAGE.name)
        if wrong:
            sys.exit(f"out of date: {', '.join(wrong)}; run python -m benchmarks report")
        return
    write(readme.RESULTS, PAGE)
    readme_path.write_text(readme.fill(old), encoding="utf-8")
    quality_tables.write()
