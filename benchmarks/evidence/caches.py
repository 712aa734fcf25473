"""Tables of what caches cost: methods by bits, block sizes, heads, rotated codes, INT4 weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from benchmarks import tables
from benchmarks.evidence import writing
from benchmarks.evidence.attends import PolarRounding, Rounded
from benchmarks.evidence.choices import PAPER, Choices, Methods, of_result
from benchmarks.evidence.rows import NEWEST, Spec, cached, cached_int4, layers, within
from benchmarks.evidence.subject import Subject
from benchmarks.evidence.writing import Entries, EvidenceTable, Section, found, measured
from benchmarks.plots import wide_figure
from benchmarks.tables import Result
from turbojax.numerics.config import PriorityMethod

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK = ("4bit", f"4bit:{PAPER}", "kivi4")


def _keys(methods: Methods, kind: str = "cache") -> dict[str, str]:
    return {label: f"{kind}/{name}" for label, name in methods.items()}


# (a) Methods by bits ------------------------------------------------------------------------------


def _methods_specs(subject: Subject) -> list[Spec]:
    chosen = Choices.of(pinned=subject.pinned)
    names = [*chosen.ours.values(), *chosen.baselines.values()]
    of_causes = [name for name in chosen.causes.values() if name not in names]
    texts = [cached(name, quick=name in QUICK) for name in (*names, *of_causes)]
    every = [*texts, *(layers(name, quick=name == "4bit") for name in names)]
    # Low-rank factors take several times as long as all else.
    return sorted(every, key=lambda spec: "gear" in spec.key)


def methods_section(result: Result) -> Section:
    """Table 2 in form: every method, the largest cache first, and ours against the baselines."""
    chosen = of_result(result)
    entries = _keys(chosen.ours) | _keys(chosen.baselines)
    of_causes = [f"cache/{x}" for x in chosen.causes.values()]
    lines = [[*x, "-"] for x in writing.exact_lines(result, "exact", "16.00", "1.00x")]
    for label, row in sorted(
        measured(result, entries).items(), key=lambda item: -writing.bits_per_number(item[1])
    ):
        errors = found(result, entries[label].replace("cache/", "layers/"))
        shown = f"**{label}**" if label in chosen.ours else label
        cells = [*writing.byte_cells(row), *writing.text_cells(result, row)]
        lines.append([shown, *cells, writing.error_cell(errors)])
    header = ["method", *writing.BYTES_HEADER, *writing.text_header(result)]
    every = tables.table([*header, "output error (worst layer)"], lines)
    pairs = [(one, entries[one], other, entries[other]) for one, other in chosen.pairs]
    versus = writing.comparison(result, pairs)
    return Section(
        [
            every,
            "Ours in bold. Against the baselines, window by window:",
            versus,
            _causes_section(result, chosen.causes),
            _newest(result, entries, chosen.newest),
        ],
        "",
        list(dict.fromkeys([*entries.values(), *of_causes])),
    )


def _newest(result: Result, entries: Entries, labels: Sequence[str]) -> str:
    """Errors by how many tokens came since a decode buffer of 64 was compressed."""
    rows = {label: found(result, entries[label].replace("cache/", "layers/")) for label in labels}
    lines = [
        [label, *("-" if x is None else f"{x:.4f}" for x in row["by_newest"])]
        for label, row in rows.items()
        if row is not None
    ]
    if not lines:
        return ""
    about = "Output error of decoded tokens, by how many of them came after a multiple of 64:"
    return f"{about}\n\n{tables.table(['method', *NEWEST], lines)}"


def methods_plot(result: Result) -> "Figure":
    chosen = of_result(result)
    every = {"this library": _keys(chosen.ours), "for comparison": _keys(chosen.baselines)}
    families = {
        family: {
            x: key for x, key in keys.items() if not any(word in x for word in chosen.not_drawn)
        }
        for family, keys in every.items()
    }
    above = ("turbo4", "turbo 3 bits", "2/4 bits")
    return writing.against_bytes(result, families, "Caches: cost against bytes", above)


# (c) Block sizes ----------------------------------------------------------------------------------


def _blocks_specs(subject: Subject) -> list[Spec]:
    by_size = Choices.of(pinned=subject.pinned).blocks
    return [cached(name, quick=size == "(64, 64)") for size, name in by_size.items()]


def blocks_section(result: Result) -> Section:
    chosen = of_result(result)
    blocks = _keys(chosen.blocks)
    above = writing.exact_lines(result, "exact", "16.00", "1.00x")
    table = writing.cached_table(result, "(B_r, B_c)", blocks, above)
    return Section([table], chosen.about_blocks, list(blocks.values()))


def blocks_plot(result: Result) -> "Figure":
    return writing.costs(result, _keys(of_result(result).blocks), "Block sizes (B_r, B_c)")


# (d) Heads of 2 bits ------------------------------------------------------------------------------

PRIORITIES = get_args(PriorityMethod)


def head_method(count: int, heads: int, priority: str) -> str:
    """The method with so many of a layer's heads at 2 bits, chosen by this priority."""
    if count in (0, heads):
        return "2bit" if count else "4bit"
    if priority == "gap_std" and 2 * count == heads:
        return "2/4bit"
    return f"4bit:low_heads={count},head_priority={priority}"


def _heads_specs(subject: Subject) -> list[Spec]:
    heads = subject.decoder.config.num_kv_heads
    names = [head_method(n, heads, p) for p in PRIORITIES for n in range(heads + 1)]
    # Half of them is where the choice matters most.
    half = [x for x in names if f"low_heads={heads // 2}," in x]
    ordered = dict.fromkeys([*half, *names])
    return [cached(name, quick=name in QUICK) for name in ordered]


def _heads_keys(result: Result) -> dict[str, dict[int, str]]:
    heads = result["model"]["kv_heads"]
    return {
        p: {n: f"cache/{head_method(n, heads, p)}" for n in range(heads + 1)} for p in PRIORITIES
    }


def heads_section(result: Result) -> Section:
    """Figure 7b in form: costs by number of 2-bit heads and by what chooses them."""
    keys = _heads_keys(result)
    counts = list(next(iter(keys.values())))
    lines, worse, compared = [], [], 0
    for priority, by_count in keys.items():
        rows = [found(result, key) for key in by_count.values()]
        cells = ["-" if row is None else writing.with_interval(row) for row in rows]
        lines.append([f"`{priority}`", *cells])
        for n in counts[1:-1]:
            apart = writing.difference(result, keys["gap_std"][n], by_count[n])
            compared += priority != "gap_std" and apart is not None
            if apart is not None and apart.low > 0:
                worse.append(f"`{priority}` with {n} ({apart.mean:+.4f})")
    header = ["2-bit heads of a layer's keys, and of its values", *map(str, counts)]
    against = (
        f"`gap_std`, the default, is worse than {', '.join(worse)}."
        if worse
        else f"`gap_std`, the default, is not told to be worse in any of {compared} comparisons."
    )
    every = list(dict.fromkeys(key for by_count in keys.values() for key in by_count.values()))
    return Section([tables.table(header, lines)], against, every)


def heads_plot(result: Result) -> "Figure":
    figure = wide_figure(8)
    axes = figure.subplots()
    points = {
        priority: [
            (n, row) for n, key in by_count.items() if (row := found(result, key)) is not None
        ]
        for priority, by_count in _heads_keys(result).items()
    }
    writing.curves(axes, points)
    axes.set_xticks(range(result["model"]["kv_heads"] + 1))
    axes.set(title="Which heads have 2 bits", ylabel=writing.cost_label(result))
    axes.set_xlabel("heads of 2 bits, of keys and of values each; the others have 4")
    return figure


# (h) Rotated codes, and edges ---------------------------------------------------------------------

_ROTATIONS = {"rotated": True, "not rotated": False}
_ROTATED = {
    f"{bits} bits, {words}": PolarRounding(bits, rotation)
    for bits in (4, 3, 2)
    for words, rotation in _ROTATIONS.items()
}
_PAGES = {"turbo4": "turbo4", "turbo 3 bits": "turbo_k3v3", "turbo 2 bits": "turbo_k2v2"}
_EDGES = {
    f"{name}, edges uncompressed": f"{name}:uncompressed_layers=1"
    for name in ("4bit", "2bit", "turbo4", "turbo_k2v2", "k8v4")
}
_ALONE = {"k8v4": "k8v4", "4bit": "4bit", "2bit": "2bit"}


def _rounding_name(rounding: PolarRounding) -> str:
    return f"polar-{rounding.bits}-{'rotated' if rounding.rotates else 'plain'}"


def _polar_specs(subject: Subject) -> list[Spec]:
    simulated = [
        within(_rounding_name(x), Rounded(x), quick=x.bits == 2) for x in _ROTATED.values()
    ]
    names = [*_PAGES.values(), *_ALONE.values(), *_EDGES.values()]
    return [*simulated, *(cached(name, quick=name in QUICK) for name in names)]


def _polar_entries() -> tuple[dict[str, str], dict[str, str]]:
    simulated = {label: f"whole/{_rounding_name(x)}" for label, x in _ROTATED.items()}
    return simulated, _keys(_PAGES) | _keys(_ALONE) | _keys(_EDGES)


def _what_rotating_does(result: Result, simulated: Entries) -> str:
    """One sentence: costs with the rotation less those without, window by window; or nothing."""
    said = []
    for bits in (4, 3, 2):
        keys = [simulated[f"{bits} bits, {words}"] for words in _ROTATIONS]
        apart = writing.difference(result, *keys)
        if apart is not None:
            said.append(f"{bits} bits {writing.interval(apart)}")
    return f"Rotated less not rotated: {'; '.join(said)}." if said else ""


def polar_section(result: Result) -> Section:
    """The codec of turbo4 by bits, with its rotation and without; uncompressed edges."""
    simulated, through = _polar_entries()
    lines = [
        writing.whole_line(result, label, row) for label, row in measured(result, simulated).items()
    ]
    first = tables.table(["codes", *writing.whole_header(result)], lines)
    second = writing.cached_table(result, "cache", through)
    about = (
        "The first table simulates the codec in float32, every token encoded by itself and "
        "attended to exactly: without the rotation there is no cache. The second one is through "
        "caches; edges are the first and the last layer."
    )
    every = [*simulated.values(), *through.values()]
    return Section([first, _what_rotating_does(result, simulated), second], about, every)


def polar_plot(result: Result) -> "Figure":
    simulated, through = _polar_entries()
    return writing.costs(result, simulated | through, "Rotated codes; uncompressed edges")


# (j) INT4 weights ---------------------------------------------------------------------------------


def _int4_specs(subject: Subject) -> list[Spec]:
    names = ["bfloat16", *Choices.of(pinned=subject.pinned).int4.values()]
    return [cached_int4(name, quick=name == "kv4") for name in names]


def int4_section(result: Result) -> Section:
    unit = result["texts"]["unit"]
    chosen = of_result(result).int4
    entries: Entries = {"bfloat16": "int4/bfloat16"} | _keys(chosen, "int4")
    rows = measured(result, entries)
    plain = writing.exact_bits(result)
    lines = []
    for row in list(rows.values())[:1]:
        exact = row[f"exact_bits_per_{unit}"]
        cost = None if plain is None else exact - plain
        lines.append(["exact", "1.00x", f"{exact:.4f}", "-", writing.signed(cost), "-"])
        if plain is not None:
            lines.insert(0, ["float weights, exact", "1.00x", f"{plain:.4f}", "-", "-", "-"])
    for label, row in rows.items():
        bits = row[f"bits_per_{unit}"]
        beyond = None if plain is None or bits is None else bits - plain
        lines.append(
            [
                label,
                tables.times(writing.smaller(row)),
                "-" if bits is None else f"{bits:.4f}",
                writing.with_interval(row),
                writing.signed(beyond),
                f"{row['same_greedy_choice']:.1%}",
            ]
        )
    header = ["cache", "smaller than bfloat16", f"bits per {unit}", "cost of the cache [95 %]"]
    header += ["cost of weights and cache", "same greedy choice"]
    about = "INT4 weights and e4m3 activations, smoothed; each cache beside an exact one with them."
    *ours, kivi = chosen
    pairs = [(one, entries[one], kivi, entries[kivi]) for one in ours]
    return Section(
        [tables.table(header, lines), writing.comparison(result, pairs)],
        about,
        list(entries.values()),
    )


def int4_plot(result: Result) -> "Figure":
    chosen = of_result(result).int4
    both = {f"float, {label}": key for label, key in _keys(chosen).items()}
    both |= {f"INT4, {label}": key for label, key in _keys(chosen, "int4").items()}
    return writing.costs(result, both, "Caches with float and with INT4 weights")


METHODS = EvidenceTable(
    "a",
    "methods",
    "What each cache costs against its bytes",
    _methods_specs,
    methods_section,
    methods_plot,
)
BLOCKS = EvidenceTable(
    "c", "blocks", "What each block size costs", _blocks_specs, blocks_section, blocks_plot
)
HEADS = EvidenceTable(
    "d",
    "heads",
    "Cost against the number of 2-bit heads, by what chooses them",
    _heads_specs,
    heads_section,
    heads_plot,
)
POLAR = EvidenceTable(
    "h",
    "polar",
    "What codes with and without a rotation cost, and caches with uncompressed edges",
    _polar_specs,
    polar_section,
    polar_plot,
)
INT4 = EvidenceTable(
    "j", "int4", "What caches cost a model with INT4 weights", _int4_specs, int4_section, int4_plot
)


_AGAINST = {"KIVI 4": "cache/kivi4", "GEAR-L 4": "cache/gear4"}


def _causes_section(result: Result, variants: Methods) -> str:
    """A table of some methods, each beside two baselines of 4 bits; nothing if none was measured.

    Of the same keys and values a cache has the same codes in every mode.
    """
    lines = []
    for label, name in variants.items():
        key = f"cache/{name}"
        row = found(result, key)
        if row is None:
            continue
        apart = [writing.difference(result, key, other) for other in _AGAINST.values()]
        cells = ["-" if x is None else writing.interval(x) for x in apart]
        kl = row["divergence"]
        lines.append(
            [
                label,
                tables.times(writing.smaller(row)),
                writing.with_interval(row),
                *cells,
                "-" if kl is None else f"{kl:.5f}",
            ]
        )
    if not lines:
        return ""
    header = ["4 bits with", "smaller than bfloat16", "cost [95 %]"]
    header += [f"minus that of {name}" for name in _AGAINST]
    about = "Where the cost of 4 bits comes from, window by window:"
    return f"{about}\n\n{tables.table([*header, 'KL, bits'], lines)}"
