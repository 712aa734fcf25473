"""Where the cost of 4 bits comes from: the same codes, with other products, buffers and blocks."""

from benchmarks import tables
from benchmarks.evidence import writing
from benchmarks.evidence.writing import found
from benchmarks.tables import Result

_INT8, _EXACT = "4bit:mode=int8", "4bit:mode=float"

VARIANTS = {
    "the default: e4m3 products in prompts, buffer of 64": "4bit",
    "buffer of 128": "4bit:buffer_size=128",
    "int8 products": _INT8,
    "int8 products, buffer of 128": f"{_INT8},buffer_size=128",
    "int8 products, buffer of 256": f"{_INT8},buffer_size=256",
    "int8 products, blocks of 32, buffer of 128": f"{_INT8},block_kv=32,buffer_size=128",
    "exact products": _EXACT,
    "exact products, buffer of 128": f"{_EXACT},buffer_size=128",
    "exact products, buffer of 256": f"{_EXACT},buffer_size=256",
}
"""Methods. Of the same keys and values a cache has the same codes in every mode."""

KEYS = tuple(f"cache/{name}" for name in VARIANTS.values())

_AGAINST = {"KIVI 4": "cache/kivi4", "GEAR-L 4": "cache/gear4"}


def section(result: Result) -> str:
    """A table of `VARIANTS`, each beside two baselines of 4 bits; nothing if none was measured."""
    lines = []
    for label, key in zip(VARIANTS, KEYS, strict=True):
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
