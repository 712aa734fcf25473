"""What several devices of one host are worth: the same call on one of them and on all.

Wall time: of many calls in one program where a call is short, else of calls one behind the other.
Rows of one device come first in each group; `speedup` is over them, in the same run.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import parallel_costs, plots, tables
from benchmarks.suite import Asked, Measure, Rows, Suite, each, joined
from benchmarks.suites.parallel import ops
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "parallel"
PLOT = ("parallel.png", "The same work on one GPU and on several: times the speed of one")


@dataclasses.dataclass(frozen=True)
class Group:
    """One piece of work, on one device and on more.

    Attributes:
      label: in the rows' names.
      way: how it is split, in words.
      work: measures it on so many devices.
      asked: times the speed of one device on two.
      facts: sizes, for the row.
      devices: numbers of devices, 1 first; all that there are, if not given.
    """

    label: str
    way: str
    work: Callable[[int], Row]
    asked: float | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: tuple[int, ...] | None = None

    @property
    def cases(self) -> tuple[int, ...]:
        if self.devices is not None:
            return self.devices
        there = len(jax.devices())
        return tuple(n for n in (1, 2, 4, 8) if n <= max(there, 2))

    def name(self, devices: int) -> str:
        """``parallel/decode-batch/2``."""
        return joined(OPERATION, self.label, str(devices))

    def describe(self, devices: int) -> Row:
        return {
            "operation": OPERATION,
            "label": self.label,
            "way": self.way,
            "devices": devices,
            "asked": self.asked,
            **self.facts,
        }


def begin(rows: Rows, asked: Asked) -> Measure:
    del rows, asked

    def measure(group: Group, devices: int) -> Row:
        gc.collect()  # what the last row made
        there = len(jax.devices())
        if devices > there:
            raise NotImplementedError(f"{devices} devices are asked for, there are {there}")
        return {"status": "ok", **group.work(devices)}

    return measure


def groups() -> list[Group]:
    return [
        _prefill(131072),
        _pooled(65536),
        *_sequence(loops=200),
        *_decode(batch=32, tokens=2**15, loops=100),
        *_collectives(),
        *_step("llama-3-8b", batch=16, tokens=8192),
        *_replicas("llama-3-8b"),
    ]


def quick_groups() -> list[Group]:
    """Tiny ones, for a CPU that pretends to be several devices."""
    return [
        *_decode(batch=8, tokens=128, loops=2),
        *_sequence(loops=2, lengths=(256,)),
        _prefill(1024),
        _pooled(1024),
        *_step("tiny", batch=8, tokens=64),
        *_replicas("tiny"),
        *_collectives((2**10,), loops=2),
    ]


def _decode(batch: int, tokens: int, loops: int) -> list[Group]:
    facts = {"batch": batch, "tokens": tokens}
    return [
        Group(
            f"decode-{split}/{name}",
            f"{split}, plain `jit`",
            functools.partial(ops.decode, name, split, batch, tokens, loops),
            asked=1.9 if name == "4bit" else None,
            facts={**facts, "cache": name},
        )
        # Under plain `jit` a pool of pages is one: its sequences cannot be split.
        for name, splits in (("4bit", ("batch", "heads")), ("turbo4", ("heads",)))
        for split in splits
    ]


def _sequence(loops: int, lengths: tuple[int, ...] = (2**19, 2**20, 2**17)) -> list[Group]:
    asked = {2**19: 1.55, 2**20: 1.75}
    return [
        Group(
            f"decode-sequence/{name}/{tokens // 1024}k",
            "tokens of one sequence",
            functools.partial(ops.decode_sequence, name, tokens, loops),
            asked=asked.get(tokens) if name == "4bit" else None,
            facts={"batch": 1, "tokens": tokens, "cache": name},
        )
        for name in ("4bit", "turbo4")
        for tokens in lengths
    ]


def _prefill(tokens: int) -> Group:
    return Group(
        f"prefill/{tokens // 1024}k",
        "tokens, zig-zag ring",
        functools.partial(ops.prefill, tokens),
        asked=1.85,
        facts={"batch": 1, "tokens": tokens},
    )


def _pooled(tokens: int) -> Group:
    return Group(
        f"pooled-training/{tokens // 1024}k",
        "tokens, zig-zag ring, forward and backward",
        functools.partial(ops.pooled_training, tokens),
        asked=1.7,
        facts={"batch": 1, "tokens": tokens},
    )


def _step(model: str, batch: int, tokens: int) -> list[Group]:
    sizes = {"model": model, "batch": batch, "tokens": tokens}
    asked = {"bf16": {"paged": 1.7, "turbo4": 1.5}, "int4": {}}
    return [
        Group(
            f"step/{weights}/{cache}",
            "heads and hidden sizes (tensor parallel)",
            functools.partial(ops.step, model, weights, cache, batch, tokens),
            asked=asked[weights].get(cache),
            facts={**sizes, "weights": weights, "cache": cache},
        )
        for weights, caches in (("bf16", ("paged", "turbo4")), ("int4", ("turbo4",)))
        for cache in caches
    ]


def _replicas(model: str) -> list[Group]:
    return [
        Group(
            f"engine/{how}",
            words,
            functools.partial(ops.engine, model, how),
            asked=1.9 if how == "replicas" else None,
            facts={"model": model},
        )
        for how, words in (("replicas", "replicas"), ("tensor", "heads and hidden sizes"))
    ]


def _collectives(sizes: tuple[int, ...] = (2**14, 2**22, 2**29), loops: int = 100) -> list[Group]:
    return [
        Group(
            f"collective/{kind}/{size}",
            "nothing but the exchange",
            functools.partial(ops.collective, kind, size, loops if size < 2**25 else 10),
            facts={"bytes": size, "kind": kind},
            devices=(2,),
        )
        for kind in ops.COLLECTIVES
        for size in sizes
    ]


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with what they are over one device, and whether that is what was asked."""
    one = {row["label"]: row for row in rows if row["devices"] == 1 and row["status"] == "ok"}
    return [_with_ratio(row, one.get(row["label"])) for row in rows]


def _with_ratio(row: Row, one: Row | None) -> Row:
    if row["status"] != "ok" or one is None or row is one:
        return row
    row = {**row, "speedup": one["us"] / row["us"]}
    if row["asked"] is None or row["devices"] != 2:
        return row
    return {**row, "reached": row["speedup"] >= row["asked"]}


# What the docs show -------------------------------------------------------------------------------


def _way(row: Row) -> str:
    return f"{row['way']} ({row['note']})" if "note" in row else row["way"]


def _time(row: Row) -> str:
    us = row["us"]
    if us < 1e3:
        return f"{us:.1f} us"
    return f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _asked(row: Row) -> str:
    asked = "-" if row["asked"] is None else f"{row['asked']}x"
    return f"{asked} (missed)" if row.get("reached") is False else asked


def _exchanges(row: Row) -> str:
    counts = [f"{count} {kind}" for kind, count in row.get("exchanges", {}).items()]
    return ", ".join(counts) or "none"


def parallel_table(result: Result) -> str:
    """Every row on several devices: the time, that of one device, and what was asked."""
    rows = result["rows"]
    one = {row["label"]: row for row in rows if row["devices"] == 1 and row["status"] == "ok"}
    names = (
        ("work", lambda row: row["label"]),
        ("split over", _way),
        ("GPUs", tables.shown_as("devices", "{}")),
    )
    figures = (
        ("time", _time),
        ("on one", lambda row: _time(one[row["label"]]) if row["label"] in one else "-"),
        ("speed", tables.shown_as("speedup", "{:.2f}x")),
        *(("asked", _asked), ("exchanges", _exchanges)),
    )
    several = [row for row in rows if row["devices"] > 1 and "kind" not in row]
    return tables.rows_table(several, names, figures)


def collectives_table(result: Result) -> str:
    names = (
        ("collective", lambda row: row["kind"]),
        ("bytes of each GPU", tables.shown_as("bytes", "{:,}")),
    )
    figures = (("time", _time), ("GB/s", tables.shown_as("gigabytes_per_second", "{:.1f}")))
    return tables.rows_table([row for row in result["rows"] if "kind" in row], names, figures)


def bars(result: Result) -> plots.Ratios:
    found: plots.Ratios = {}
    for row in result["rows"]:
        if row["status"] == "ok" and "speedup" in row:
            bar = (row["speedup"], f"{row['speedup']:.2f}")
            found.setdefault(row["label"], {})[f"{row['devices']} GPUs"] = bar
    return found


def plot(result: Result) -> "Figure":
    title = f"The same work on several GPUs: {result['device']}"
    return plots.of_ratios(bars(result), title, "times one GPU", bar=0.3, line=False)


SUITE = Suite(
    name=OPERATION,
    groups=groups,
    quick_groups=quick_groups,
    run=each(begin),
    with_ratios=with_ratios,
    formats=(),
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={
        OPERATION: tables.section(
            lambda result: f"{parallel_table(result)}\n\n{collectives_table(result)}", plot=PLOT
        ),
        "parallel_costs": parallel_costs.table,
    },
    plots={PLOT[0]: plot, parallel_costs.PLOT[0]: parallel_costs.plot},
)
