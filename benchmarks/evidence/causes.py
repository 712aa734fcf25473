"""Where the cost of 4 bits comes from: the same codes, with other products, buffers and blocks."""

from benchmarks import tables
from benchmarks.evidence import writing
from benchmarks.evidence.choices import Methods
from benchmarks.evidence.writing import found
from benchmarks.tables import Result

_AGAINST = {"KIVI 4": "cache/kivi4", "GEAR-L 4": "cache/gear4"}


def section(result: Result, variants: Methods) -> str:
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
                writing.spread(row),
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
