"""The rows: which parts are rounded, which repairs are tried; and their table."""

import functools
from collections.abc import Iterable

import numpy as np

from benchmarks import tables
from benchmarks.attribution.attending import Variant
from benchmarks.suite import Shown, Table
from benchmarks.tables import Result

_NOTHING = {"key": "exact", "value": "exact", "products": False}
_KEYS = {"value": "exact", "products": False}
_FREE = {"products": False}


def _sides(key: str, value: str) -> dict[str, str | bool]:
    return {"key": key, "value": value, "products": False}


_PARTS = (
    Variant("nothing", **_NOTHING),
    Variant("all of `4bit` in decoding"),
    Variant("keys' codes", exact_buffer=True, **_KEYS),
    Variant("values' codes", key="exact", exact_buffer=True, **_FREE),
    Variant("stage 1 of the keys", key="stage 1", **_KEYS),
    Variant("stage 1 of the values", **_sides("exact", "stage 1")),
    Variant("queries' and probabilities' rounding", **(_NOTHING | {"products": True})),
    Variant("a prompt in e4m3", prompt="fp8", **_NOTHING),
    Variant("a prompt in int8 and e4m3", prompt="int8_fp8", **_NOTHING),
)
_LAYERS = tuple(
    Variant(f"keys' codes of layers {i} to {i + 5}", layers=tuple(range(i, i + 6)), **_KEYS)
    for i in range(0, 30, 6)
)
_REPAIRS = (
    Variant("first token exact", sinks=1),
    Variant("first 4 tokens exact", sinks=4),
    Variant("newest block in int8", newest=64),
    Variant("first token exact, newest block in int8", sinks=1, newest=64),
    Variant("keys without their mean", key_shift="mean"),
    Variant("keys without the first one", key_shift="first"),
    Variant("keys' channels of one size", key_scale="channel"),
    Variant("keys' pairs of one size", key_scale="pair"),
    Variant("keys' pairs of one size, first token exact", key_scale="pair", sinks=1),
    Variant("keys' pairs balanced, first token exact", key_scale="balanced", sinks=1),
    Variant("second scale in sixteenths, first token exact", fine=16, sinks=1),
    Variant(
        "second scale in sixteenths, pairs of one size, first token exact, newest block in int8",
        fine=16,
        key_scale="pair",
        sinks=1,
        newest=64,
    ),
    Variant(
        "float scales of channels, int8 buffer, first token exact",
        key="channels, int8 buffer",
        value="channels, int8 buffer",
        sinks=1,
    ),
    Variant("as KIVI: float scales, newest block exact", newest=64, **_sides("channels", "tokens")),
    Variant("as KIVI, first 4 tokens exact", newest=64, sinks=4, **_sides("channels", "tokens")),
    Variant("2-bit keys, first token exact", key_bits=2, sinks=1),
    Variant("2-bit values, first token exact", value_bits=2, sinks=1),
)
_OTHERS = (
    Variant("turbo4", **_sides("turbo4", "turbo4")),
    Variant("turbo4, keys alone", **_sides("turbo4", "exact")),
    Variant("turbo4, values alone", **_sides("exact", "turbo4")),
    Variant("turbo4, first 4 tokens exact", sinks=4, **_sides("turbo4", "turbo4")),
    Variant("turbo4, keys without their mean", key_shift="mean", **_sides("turbo4", "turbo4")),
    Variant("turbo4, keys' pairs balanced", key_scale="balanced", **_sides("turbo4", "turbo4")),
    Variant(
        "turbo4, mean, balanced, first 4 tokens exact",
        key_shift="mean",
        key_scale="balanced",
        sinks=4,
        **_sides("turbo4", "turbo4"),
    ),
    Variant("int8 keys by token, turbo4 values", **_sides("int8 tokens", "turbo4")),
    Variant("e4m3", **_sides("e4m3", "e4m3")),
    Variant("e4m3, keys alone", **_sides("e4m3", "exact")),
    Variant("e4m3, keys without their mean", key_shift="mean", **_sides("e4m3", "e4m3")),
    Variant("e4m3, first 4 tokens exact", sinks=4, **_sides("e4m3", "e4m3")),
    Variant("int8 by token", **_sides("int8 tokens", "int8 tokens")),
    Variant("int8 keys, 4-bit values by token", **_sides("int8 tokens", "tokens")),
    Variant("e4m3 keys, 4-bit values by token", **_sides("e4m3 tokens", "tokens")),
)
_SIZES = {"all channels": "", "32 channels": " of 32", "16 channels": " of 16"}
_VALUES = (
    Variant("4-bit values as `kv4`", **_sides("int8 tokens", "kv4")),
    *(
        Variant(f"a minimum and a scale for {name}", **_sides("int8 tokens", f"minimum{size}"))
        for name, size in _SIZES.items()
    ),
)
_BOTH = {"sinks": 1, "newest": 64}
_FURTHER = (
    Variant("first 4 tokens in place of one", sinks=4, newest=64),
    Variant("second scale in sixteenths", fine=16, **_BOTH),
    Variant("products not rounded", products=False, **_BOTH),
    Variant("buffer exact", exact_buffer=True, **_BOTH),
    Variant(
        "float scales of keys' channels, 4 tokens", "channels, int8 buffer", sinks=4, newest=64
    ),
)
GROUPS = {
    **{"parts": _PARTS, "layers": _LAYERS, "repairs": _REPAIRS, "further": _FURTHER},
    **{"formats": _OTHERS, "values": _VALUES},
}
"""Rows by the table they are in."""


def attribution_table(group: str, name: str, result: Result) -> str:
    """The rows of a group: what they cost, with intervals, on each text."""
    rows = result["rows"]
    lines = [_cells(v.name, rows[v.name]) for v in GROUPS[group] if v.name in rows]
    header = ["rounded", *_header(rows)]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


def caches_table(name: str, result: Result) -> str:
    """The same of whole caches, that of the least loss first, and how much smaller they are."""
    rows = result["caches"]
    lines = [
        [*_cells(f"`{cache}`", rows[cache]), f"{rows[cache]['compression']:.2f}x"]
        for cache in sorted(rows, key=lambda x: rows[x]["cost"])
    ]
    header = ["cache", *_header(rows), "smaller"]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


def recall_table(name: str, result: Result) -> str:
    """Bits per token of right answers at the longest context, and how many are written whole."""
    rows = result["recall"]
    kinds = [kind for kind in _ASKED if kind in next(iter(rows.values()))]
    longest = max(cell["length"] for cell in next(iter(rows.values()))[kinds[0]]["cells"])
    lines = [
        [f"`{cache}`", *(_recalled(row[kind], longest) for kind in kinds)]
        for cache, row in rows.items()
    ]
    header = [f"{longest:,} tokens", *(_ASKED[kind] for kind in kinds)]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


_ASKED = {
    "copy": "copy",
    "key_value": "value of a key",
    "needle": "sentence in a text",
    "chat": "sentence in a chat",
}


def _recalled(row: Result, length: int) -> str:
    cells = [cell for cell in row["cells"] if cell["length"] == length]
    bits, whole = (np.mean([cell[x] for cell in cells]) for x in ("bits", "whole"))
    return f"{bits:.2f} ({whole:.0%})"


def _header(rows: Result) -> list[str]:
    texts = next(iter(rows.values()))["cost_by_text"]
    return ["bits per token [95 %]", *texts, "KL", "same choice"]


def _cells(label: str, row: Result) -> list[str]:
    ends = row["interval"]
    interval = f" [{ends[0]:+.4f}, {ends[1]:+.4f}]" if ends else ""
    return [
        label,
        f"{row['cost']:+.4f}{interval}",
        *(f"{x:+.4f}" for x in row["cost_by_text"].values()),
        f"{row['divergence']:.4f}",
        f"{row['same_choice']:.1%}",
    ]


_LATER = ("further", "values")


def _tables(groups: Iterable[str]) -> dict[str, Table]:
    return {f"attribution {x}": functools.partial(attribution_table, x) for x in groups}


SHOWN = (
    Shown(("attribution",), _tables(x for x in GROUPS if x not in _LATER)),
    Shown(("attribution_more",), _tables(_LATER)),
    Shown(("real_caches",), {"real caches": caches_table}),
    Shown(("real_caches_other",), {"real caches other": caches_table}),
    Shown(("real_recall",), {"real recall": recall_table}),
)
