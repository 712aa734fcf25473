"""Table i: what pooled attention costs at which density, policy by policy."""

import dataclasses
from typing import TYPE_CHECKING

from benchmarks import tables
from benchmarks.evidence import writing
from benchmarks.evidence.attends import Pooled
from benchmarks.evidence.rows import Spec, within
from benchmarks.evidence.subject import Subject
from benchmarks.evidence.writing import EvidenceTable, Section, found
from benchmarks.plots import wide_figure
from benchmarks.tables import Result, Row
from turbojax.caches import PooledAttention, pooled_by_name
from turbojax.evaluation.methods import top_k_of_density
from turbojax.levels import LocalWindow, Policy, SimilarityCap, Strided, Threshold, TopK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAMILIES = {
    "topk": "top-k",
    "threshold": "threshold",
    "window": "window, means beyond",
    "window_alone": "window alone",
    "strided": "strided",
    "similar": "top-k, similar keys",
    "topk_window": "top-k and a window",
    "dense_first": "top-k, first layers dense",
}
"""Kinds of policies by what their rows' names begin with."""


def policies(context: int, block: int) -> dict[str, Pooled]:
    """What is measured, by name: a family, a slash, and what sets the row apart."""

    def pooled(policy: Policy) -> PooledAttention:
        return PooledAttention(policy, block, block)

    found: dict[str, Pooled] = {}
    for density in (0.0625, 0.125, 0.25, 0.5):
        found[f"topk/{density:g}"] = Pooled(pooled(top_k_of_density(density)))
    found["topk/fine-0.25"] = Pooled(pooled(TopK(0.25, 0.25, 0.25, 0.25)))
    ours = pooled_by_name("threshold", block_size=block)
    found["threshold/prompts"] = Pooled(ours)
    found["threshold/published"] = Pooled(pooled(Threshold()))
    for share in (32, 8):
        found[f"window/{share}th"] = Pooled(pooled(LocalWindow(context // share)))
    for share in (8, 4):
        found[f"window_alone/{share}th"] = Pooled(pooled(alone(context // share)))
    found["strided/8"] = Pooled(pooled(Strided(context // 16, 8)))
    found["similar/0.125"] = Pooled(pooled(SimilarityCap(top_k_of_density(0.125))))
    for density in (0.125, 0.25):
        both = dataclasses.replace(top_k_of_density(density), near=context // 32)
        found[f"topk_window/{density:g}"] = Pooled(pooled(both))
    # What is left is read as means, not skipped.
    means = TopK(0.14, 0.14, 0.14, 1.0, near=context // 64)
    found["topk_window/means"] = Pooled(PooledAttention(means, block, block, None, 8, 8))
    for layers in (1, 2):
        chosen = pooled(top_k_of_density(0.125))
        found[f"dense_first/{layers}"] = Pooled(chosen, dense_layers=layers)
    return found


def alone(window: int) -> LocalWindow:
    """A window beyond which nothing is seen but the first block."""
    return LocalWindow(window, (window, window, window))


_QUICK = ("topk/0.25", "topk_window/0.125", "dense_first/1")


def _specs(subject: Subject) -> list[Spec]:
    every = policies(subject.sizes.long_context, subject.sizes.block)
    return [within(x, attend, long=True, quick=x in _QUICK) for x, attend in every.items()]


def _rows(result: Result) -> dict[str, Row]:
    settings = result["settings"]
    names = policies(settings["long_context"], settings["block"])
    return {name: row for name in names if (row := found(result, f"long/{name}")) is not None}


def beaten(result: Result, rows: dict[str, Row]) -> dict[str, str]:
    """Rows that another one of no more density is told to beat, and the best of those."""

    def beats(other: str, name: str) -> bool:
        if rows[other]["density"] > rows[name]["density"]:
            return False
        apart = writing.difference(result, f"long/{other}", f"long/{name}")
        return apart is not None and "better" in writing.word(apart, 0)

    beaten_by = {}
    for name in rows:
        better = {other: rows[other]["cost"] for other in rows if beats(other, name)}
        if better:
            beaten_by[name] = min(better, key=lambda other: better[other])
    return beaten_by


def section(result: Result) -> Section:
    rows = dict(sorted(_rows(result).items(), key=lambda item: float(item[1]["density"])))
    beaten_by = beaten(result, rows)
    lines = [
        [
            f"`{label}`",
            f"{row['density']:.3f}",
            *writing.text_cells(result, row),
            f"`{beaten_by[label]}`" if label in beaten_by else "-",
        ]
        for label, row in rows.items()
    ]
    header = ["policy", "density", *writing.text_header(result), "beaten at no more density by"]
    context, block = result["settings"]["long_context"], result["settings"]["block"]
    about = (
        f"Windows of {context:,} {result['texts']['unit']}s, the second half of each counts; the "
        f"model was trained with dense attention. Blocks of {block} tokens. Density is the share "
        "of dense causal attention's work, the mean over layers, dense ones included. A policy is "
        "beaten where the interval of the difference, window by window, is on the other's side."
    )
    every = [f"long/{x}" for x in policies(context, block)]
    return Section([tables.table(header, lines)], about, every)


def plot(result: Result) -> "Figure":
    figure = wide_figure(9)
    axes = figure.subplots()
    points: dict[str, list[tuple[float, Row]]] = {x: [] for x in _FAMILIES.values()}
    for name, row in _rows(result).items():
        points[_FAMILIES[name.partition("/")[0]]].append((row["density"], row))
    writing.curves(axes, {k: sorted(v, key=lambda x: x[0]) for k, v in points.items() if v})
    axes.set_yscale("symlog", linthresh=0.002)
    axes.set(title="Pooled attention", xlabel="density", ylabel=writing.cost_label(result))
    return figure


POOLING = EvidenceTable(
    "i", "pooled", "Density of pooled attention against what it costs", _specs, section, plot
)
