"""What the tables share: cells, comparisons, sentences. Pure functions of a result."""

import dataclasses
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import tables
from benchmarks.evidence.rows import Spec
from benchmarks.evidence.subject import Subject
from benchmarks.plots import wide_figure
from benchmarks.tables import Result, Row
from turbojax.evaluation import Interval, bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILES_TO_DRAW = 5
"""With as many files they are drawn, with fewer windows, as `turbojax.evaluation` does."""

Entries = Mapping[str, str]
"""Keys of rows by their labels, in the order of the table."""


class Section(NamedTuple):
    """What a table shows: parts, of which empty ones are left out; words; the rows' keys."""

    parts: Sequence[str]
    about: str
    keys: Sequence[str]


@dataclasses.dataclass(frozen=True)
class EvidenceTable:
    """A table of the evidence, and the rows that it needs.

    Attributes:
      letter: what ``--tables`` calls it.
      word: of its markers in the docs, and of its plot's file, after what results are called.
      title: what its plot shows.
      specs: its rows, what matters most first.
      section: what it shows of any result that has some of its rows.
      draw: draws its plot, of the same.
    """

    letter: str
    word: str
    title: str
    specs: Callable[[Subject], list[Spec]]
    section: Callable[[Result], Section]
    draw: Callable[[Result], "Figure"]

    def render(self, name: str, result: Result) -> str:
        """Markdown: the plot, whose file is called as the result is, then tables and notes."""
        called = re.sub(r"(_\d{4}-\d\d-\d\d)?\.json$", "", name)
        shown = self.section(result)
        last = f"{shown.about} {note(name, result, shown.keys)}".strip()
        parts = [part for part in (*shown.parts, last) if part]
        return tables.picture(f"{called}_{self.word}.png", self.title) + "\n\n".join(parts)


def found(result: Result, key: str) -> Row | None:
    row: Row | None = result.get("rows", {}).get(key)
    return row


def measured(result: Result, entries: Entries) -> dict[str, Row]:
    rows = {label: found(result, key) for label, key in entries.items()}
    return {label: row for label, row in rows.items() if row is not None}


def signed(value: float | None) -> str:
    """``+0.0035``, or a dash."""
    return "-" if value is None else f"{value:+.4f}"


def with_interval(row: Row) -> str:
    """``+0.0035 [+0.0030, +0.0041]``, or NaN where the row has windows without a figure."""
    if row["cost"] is None:
        return f"NaN in {row['nan_windows']} windows"
    if row["cost_interval"] is None:
        return f"{row['cost']:+.4f}"
    low, high = row["cost_interval"]
    return f"{row['cost']:+.4f} [{low:+.4f}, {high:+.4f}]"


def smaller(row: Row) -> float:
    """Bytes of a bfloat16 cache over those of the row's."""
    ratio: float = row["exact_cache_bytes"] / row["cache_bytes"]
    return ratio


def bits_per_number(row: Row) -> float:
    """Bits that a number of the keys and values takes, scales, norms and exact tokens included."""
    return 16 / smaller(row)


def error_cell(row: Row | None) -> str:
    """The mean of the layers' relative L1 errors, and the largest."""
    errors = [None] if row is None else row["relative_l1"]
    if any(x is None for x in errors):
        return "-"
    return f"{np.mean(errors):.3f} ({max(errors):.3f})"


def text_cells(result: Result, row: Row) -> list[str]:
    """Bits, cost, divergence and agreement; see `text_header`."""
    bits = row[f"bits_per_{result['texts']['unit']}"]
    return [
        "-" if bits is None else f"{bits:.4f}",
        with_interval(row),
        "-" if row["divergence"] is None else f"{row['divergence']:.5f}",
        f"{row['same_greedy_choice']:.1%}",
    ]


def text_header(result: Result) -> list[str]:
    """The header of `text_cells`."""
    unit = f"bits per {result['texts']['unit']}"
    return [unit, "cost [95 %]", "KL, bits", "same greedy choice"]


def byte_cells(row: Row) -> list[str]:
    """What a cache takes; see `BYTES_HEADER`."""
    return [f"{bits_per_number(row):.2f}", tables.times(smaller(row))]


BYTES_HEADER = ["bits a number", "smaller than bfloat16"]


def exact_bits(result: Result) -> float | None:
    """Bits per byte or token through the exact cache with float weights; None if nothing has it."""
    row = next((x for key, x in result["rows"].items() if key.startswith("cache/")), None)
    found: float | None = None if row is None else row[f"exact_bits_per_{result['texts']['unit']}"]
    return found


def exact_lines(result: Result, *label: str) -> list[list[str]]:
    """The line that the costs of rows through caches are above, or none; see `text_header`."""
    bits = exact_bits(result)
    return [] if bits is None else [[*label, f"{bits:.4f}", "-", "-", "-"]]


def cached_table(
    result: Result, title: str, entries: Entries, above: Sequence[Sequence[str]] = ()
) -> str:
    """Rows through caches: what they take, and what they cost; below the lines `above`."""
    lines = [
        [label, *byte_cells(row), *text_cells(result, row)]
        for label, row in measured(result, entries).items()
    ]
    return tables.table([title, *BYTES_HEADER, *text_header(result)], [*map(list, above), *lines])


def whole_line(result: Result, label: str, row: Row, *more: str) -> list[str]:
    """Cells of a row without a cache; see `whole_header`."""
    return [label, *more, *text_cells(result, row), error_cell(row)]


def whole_header(result: Result) -> list[str]:
    """The header of `whole_line` after what is said of the row itself."""
    return [*text_header(result), "output error (worst layer)"]


def difference(result: Result, key: str, other: str) -> Interval | None:
    """What one row's bits are above another's, window by window; None if there are none."""
    rows = [found(result, x) for x in (key, other)]
    costs = [row["cost_by_window"] for row in rows if row is not None]
    if len(costs) < 2 or any(x is None for cost in costs for x in cost):
        return None
    one, two = (np.asarray(cost, np.float64) for cost in costs)
    owners = result["texts"]["long_owners" if key.startswith("long/") else "owners"]
    by_file = len(set(owners)) >= _FILES_TO_DRAW
    return bootstrap(one - two, owners if by_file else None)


def interval(apart: Interval) -> str:
    """``+0.0010 [+0.0002, +0.0018]``."""
    ends = "" if apart.ends is None else f" [{apart.low:+.4f}, {apart.high:+.4f}]"
    return f"{apart.mean:+.4f}{ends}"


def word(apart: Interval, share: float) -> str:
    """What an interval of a difference of bits says."""
    low, high = apart.ends or (apart.mean, apart.mean)
    if high < 0:
        return "better" if share <= 0 else "better, with more bytes"
    if low > 0:
        return "**worse**" if share >= 0 else "**worse**, with fewer bytes"
    return "not told apart"


def comparison(result: Result, pairs: Sequence[tuple[str, str, str, str]]) -> str:
    """A table of ours against baselines, and what of ours is worse."""
    lines, worse, heavy = [], 0, []
    for label, key, base, other in pairs:
        apart = difference(result, key, other)
        ours, theirs = found(result, key), found(result, other)
        if ours is None or theirs is None:
            continue
        share = ours["cache_bytes"] / theirs["cache_bytes"] - 1
        if apart is None:
            said, bits = _of_nan(ours, theirs), "NaN"
        else:
            said, bits = word(apart, share), interval(apart)
        lines.append([label, base, f"{share:+.1%}", bits, said, _times_kl(ours, theirs)])
        worse += "worse" in said
        if "worse" in said and share >= 0:
            heavy.append(f"{label} than {base}")
    if not lines:
        return "No pair of them was measured."
    header = ["ours", "against", "bytes", "bits [95 %]", "ours is", "KL of theirs"]
    return f"{tables.table(header, lines)}\n\n{_verdict(len(lines), worse, heavy)}"


def _verdict(pairs: int, worse: int, heavy: Sequence[str]) -> str:
    """One sentence: how many of ours are worse, and which in spite of their bytes."""
    if not worse:
        return f"None of ours is told to be worse in these {pairs} pairs."
    begin = f"Ours is worse in {worse} of {pairs} pairs"
    if not heavy:
        return f"{begin}, in all of them with fewer bytes."
    return f"{begin}, in {len(heavy)} of them with no fewer bytes: {'; '.join(heavy)}."


def _times_kl(ours: Row, theirs: Row) -> str:
    one, two = ours["divergence"], theirs["divergence"]
    return tables.times(one / two) if one is not None and two else "-"


def _of_nan(ours: Row, theirs: Row) -> str:
    """What can be said of two rows at least one of which has windows without a figure."""
    if ours["cost"] is None:
        return "**worse**" if theirs["cost"] is not None else "not told apart"
    return "better"


def not_measured(result: Result, keys: Sequence[str]) -> str:
    """One sentence on rows that are missing, with the reasons there are, or nothing."""
    reasons: dict[str, list[str]] = {}
    for key in keys:
        if found(result, key) is None:
            reason = result.get("failures", {}).get(key, "not run")[:160]
            reasons.setdefault(reason, []).append(f"`{key}`")
    return "".join(
        f" Not measured: {', '.join(names)} ({reason})." for reason, names in reasons.items()
    ).replace("|", "\\|")


def note(name: str, result: Result, keys: Sequence[str]) -> str:
    """On how much text, on which model, and from which file."""
    rows = [row for key in keys if (row := found(result, key)) is not None]
    counts = sorted({row["decoded"] for row in rows if "decoded" in row})
    unit, model = result["texts"]["unit"], result["model"]
    text = " and ".join(f"{count:,}" for count in counts)
    scored = f"{text} {unit}s of held-out text, " if counts else ""
    about = (
        f"{scored}model {model['name']} with {model['parameters'] / 1e6:.1f}M parameters and "
        f"{model['kv_heads']} KV heads of {model['head_dim']} channels in {model['dtype']};"
    )
    about = about[0].upper() + about[1:]
    return f"{about} {tables.source(name, result)}{not_measured(result, keys)}"


# Plots --------------------------------------------------------------------------------------------

_LINEAR = 0.002
"""Bits up to which a logarithmic axis is linear."""
_FAR = 20
"""Times the median that a cost may be where an axis is linear."""


def bars_of(row: Row) -> list[list[float]]:
    """Distances from a row's cost to the ends of its interval, as `errorbar` takes them."""
    if row["cost_interval"] is None:
        return [[0.0], [0.0]]
    low, high = row["cost_interval"]
    return [[row["cost"] - low], [high - row["cost"]]]


def costs(result: Result, entries: Entries, title: str) -> "Figure":
    """A line per row: what it costs, with its interval."""
    figure = wide_figure(9)
    axes = figure.subplots()
    rows = {k: row for k, row in measured(result, entries).items() if row["cost"] is not None}
    for i, row in enumerate(rows.values()):
        axes.errorbar(row["cost"], i, xerr=bars_of(row), fmt="o", color="C0", capsize=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1, zorder=0.5)
    axes.set(title=title, xlabel=cost_label(result))
    sizes = [abs(row["cost"]) for row in rows.values()]
    if sizes and max(sizes) > _FAR * float(np.median(sizes)):
        axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.grid(axis="x", alpha=0.3)
    return figure


def cost_label(result: Result) -> str:
    return f"bits per {result['texts']['unit']} above exact attention"


def against_bytes(
    result: Result, families: Mapping[str, Entries], title: str, above: Container[str] = ()
) -> "Figure":
    """Cost against bytes: down and left is better, a color for each family."""
    figure = wide_figure(9)
    axes = figure.subplots()
    for i, (family, entries) in enumerate(families.items()):
        first = True
        for label, row in measured(result, entries).items():
            if row["cost"] is None:
                continue
            axes.errorbar(
                1 / smaller(row),
                row["cost"],
                yerr=bars_of(row),
                fmt="os^Dv"[i % 5],
                color=f"C{i}",
                capsize=3,
                label=family if first else None,
            )
            spot = (1 / smaller(row), row["cost"])
            # Two families may have nearly the same bytes: their names are on different sides.
            shift, side = ((-6, 3), "right") if i % 2 == 0 else ((6, -9), "left")
            if label in above:
                shift, side = (0, 9), "center"
            axes.annotate(label, spot, shift, textcoords="offset points", fontsize=7, ha=side)
            first = False
    axes.margins(x=0.15)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.axhline(0, color="black", linewidth=1, zorder=0.5)
    axes.set(title=title, xlabel="bytes, relative to a bfloat16 cache", ylabel=cost_label(result))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure


def curves(
    axes: Any,
    points: Mapping[str, Sequence[tuple[float, Row]]],
) -> None:
    """Costs against a number, a line per name; rows without a figure are left out."""
    for i, (name, pairs) in enumerate(points.items()):
        there = [(x, row) for x, row in pairs if row["cost"] is not None]
        if not there:
            continue
        x, rows = zip(*there, strict=True)
        ends = [[bars_of(row)[side][0] for row in rows] for side in (0, 1)]
        cost = [row["cost"] for row in rows]
        axes.errorbar(x, cost, yerr=ends, fmt="o-", color=f"C{i}", capsize=3, label=name)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
