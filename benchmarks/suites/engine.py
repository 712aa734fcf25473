"""Requests through `turbojax.models.Engine` with a pool of a fixed size, in wall time.

One engine at a time for each kind of pages, all with the same random weights and the same requests.
All programs are compiled before the clock starts.
"""

import dataclasses
import gc
import time
from typing import TYPE_CHECKING

import jax
import numpy as np

from benchmarks import plots, tables
from benchmarks.suite import Asked, Latest, Measure, Rows, Suite, each, joined
from benchmarks.suites.paged.suite import KV_DTYPES as DTYPE_NAMES
from benchmarks.suites.serving import cases
from benchmarks.suites.serving.cases import STOPPED
from benchmarks.suites.serving.engines import status_of
from benchmarks.suites.serving.suite import seconds
from benchmarks.tables import Result, Row
from turbojax import models
from turbojax.models.engine import Engine, Finished, Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "engine"
KV_DTYPES = ("auto", "fp8_e4m3", "turbo4")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its engine."""

    model: str
    pool_bytes: int
    slots: int
    page_size: int
    max_length: int
    step_tokens: int

    def num_pages(self, kv_dtype: str) -> int:
        sizes = cases.Setting(
            self.slots, self.max_length, pool_bytes=self.pool_bytes, page_size=self.page_size
        )
        return sizes.pages(models.SHAPES[self.model], kv_dtype)


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests of random tokens and random lengths, the same for every kind of pages."""

    label: str
    setting: Setting
    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]

    cases = KV_DTYPES

    def name(self, kv_dtype: str) -> str:
        """``engine/llama-3-8b/short/turbo4``."""
        return joined(OPERATION, self.setting.model, self.label, kv_dtype)

    def describe(self, kv_dtype: str) -> Row:
        return {
            "operation": OPERATION,
            "label": self.label,
            "method": kv_dtype,
            "kv_dtype": kv_dtype,
            **dataclasses.asdict(self.setting),
            "requests": self.requests,
            "prompt": list(self.prompt),
            "new": list(self.new),
        }

    def make(self) -> list[Request]:
        rng = np.random.default_rng(0)
        vocabulary = models.SHAPES[self.setting.model].vocab_size
        sizes = [
            rng.integers(*bounds, self.requests, endpoint=True)
            for bounds in (self.prompt, self.new)
        ]
        return [
            Request(rng.integers(vocabulary, size=prompt).tolist(), max_new_tokens=int(new))
            for prompt, new in zip(*sizes, strict=True)
        ]


def begin(rows: Rows, asked: Asked) -> Measure:
    """See `suite.each`; everything runs once.

    Rows of one group share the time that is left, so that a slow one leaves some to the others: no
    step is begun after that, and what was reached is the row.
    """
    left = list(rows)
    weights = Latest(lambda name: jax.block_until_ready(models.random_decoder(models.SHAPES[name])))

    def measured(group: Group, kv_dtype: str) -> Row:
        gc.collect()  # what the last row made
        del left[: left.index((group, kv_dtype))]
        now = time.monotonic()
        until = now + (asked.deadline - now) / sum(other is group for other, _ in left)
        return measure(weights.of(group.setting.model), group, kv_dtype, until)

    return measured


def measure(model: models.Decoder, group: Group, kv_dtype: str, deadline: float) -> Row:
    """All requests through a new engine, or as many steps as there is time for."""
    setting = group.setting
    begun = time.perf_counter()
    engine = Engine(
        model,
        num_pages=setting.num_pages(kv_dtype),
        page_size=setting.page_size,
        kv_dtype=kv_dtype,
        max_sequences=setting.slots,
        max_length=setting.max_length,
        step_tokens=setting.step_tokens,
    )
    requests = group.make()
    _warm_up(engine)
    compiled = time.perf_counter() - begun
    before = engine.statistics()
    asked = {engine.add(request): request for request in requests}
    done, most_tokens, most_sequences = {}, 0, 0
    begun = time.perf_counter()
    while not engine.idle and time.monotonic() < deadline:
        events = engine.step()
        done.update({e.request_id: e.result for e in events if isinstance(e, Finished)})
        now = engine.statistics()
        most_tokens = max(most_tokens, now.tokens_held)
        most_sequences = max(most_sequences, now.running)
    seconds = time.perf_counter() - begun
    for number, result in done.items():
        if len(result.tokens) != asked[number].max_new_tokens:
            raise ArithmeticError(f"request {number} ended: {result.finish_reason}")
    after = engine.statistics()
    if after.steps == before.steps:
        return {"status": "not run", "reason": tables.OUT_OF_TIME}
    new, prompts = after.new_tokens - before.new_tokens, after.prompt_tokens - before.prompt_tokens
    first = [r.first_token_seconds for r in done.values() if r.first_token_seconds is not None]
    return {
        **status_of(len(done), group.requests),
        "seconds": seconds,
        "compile_seconds": compiled,
        "finished": len(done),
        "new_tokens": new,
        "prompt_tokens": prompts,
        "generated_per_second": new / seconds,
        "tokens_per_second": (new + prompts) / seconds,
        "first_token_seconds": float(np.median(first)) if first else None,
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions,
        "most_tokens": most_tokens,
        "most_sequences": most_sequences,
        "token_capacity": after.token_capacity,
        "token_bytes": after.token_bytes,
        "held_bytes": after.pool_bytes,
        "weight_bytes": model.nbytes,
    }


def _warm_up(engine: Engine) -> None:
    """Compiles everything and runs a short request."""
    engine.compile(only_greedy=True)
    engine.add(Request([0, 1], max_new_tokens=2))
    engine.run()


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with what they are over bfloat16 pages: in speed, where all requests are done."""
    by_name = {row["name"]: row for row in rows}
    return [_with_ratios(row, by_name) for row in rows]


def _with_ratios(row: Row, by_name: dict[str, Row]) -> Row:
    base = by_name.get(row["name"].rpartition("/")[0] + "/auto", {})
    if "token_capacity" not in row or "token_capacity" not in base:
        return row
    found = {"capacity_over_auto": row["token_capacity"] / base["token_capacity"]}
    if row["status"] == base["status"] == "ok":
        ratio = row["generated_per_second"] / base["generated_per_second"]
        found["speedup_over"] = {"auto": ratio}
    return {**row, **found}


# What the docs show -------------------------------------------------------------------------------


def _workload(row: Row) -> str:
    prompt, new = ("{:,} to {:,}".format(*row[name]) for name in ("prompt", "new"))
    return f"{row['requests']} x {prompt}, {new} new"


_NAMES = (("requests", _workload), ("pages", lambda row: DTYPE_NAMES[row["kv_dtype"]]))
_COLUMNS = (
    ("new tokens per second", tables.shown_as("generated_per_second", "{:,.0f}")),
    *tables.over({"auto": "over bf16"}),
    ("with prompts", tables.shown_as("tokens_per_second", "{:,.0f}")),
    ("seconds", seconds),
    ("pool holds, tokens", tables.shown_as("token_capacity", "{:,}")),
    ("over bf16", tables.shown_as("capacity_over_auto", "{:.2f}x")),
    ("most held", tables.shown_as("most_tokens", "{:,}")),
    ("sequences", tables.shown_as("most_sequences", "{}")),
    ("preemptions", tables.shown_as("preemptions", "{}")),
    ("steps", tables.shown_as("steps", "{:,}")),
)


def engine_table(result: Result) -> str:
    return tables.rows_table(result["rows"], _NAMES, _COLUMNS, measured=("ok", STOPPED))


PLOT = ("engine.png", "The engine with a pool of one size: new tokens per second and tokens held")


def engine_bars(result: Result) -> plots.Ratios:
    """Of each figure, by kind of pages: what it is relative to bfloat16, and in its own unit."""
    groups: plots.Ratios = {}
    for row in result["rows"]:
        if row["status"] == "ok" and "capacity_over_auto" in row:
            name = DTYPE_NAMES[row["kv_dtype"]]
            held = (row["capacity_over_auto"], f"{row['token_capacity']:,}")
            groups.setdefault("tokens the pool holds", {})[name] = held
            if "auto" in row.get("speedup_over", {}):
                rate = (row["speedup_over"]["auto"], f"{row['generated_per_second']:,.0f}")
                place = "new tokens per second,\n{:,} to {:,} a request".format(*row["new"])
                groups.setdefault(place, {})[name] = rate
    return groups


def plot(result: Result) -> "Figure":
    title = f"One pool size on {result['device']}; over the bars the figures"
    return plots.of_ratios(engine_bars(result), title, "times bf16 pages", width=8, bar=0.25)


# Of a tiny model the pool is so small that requests of bfloat16 must leave it.
_SETTING = Setting("llama-3-8b", 2**32, 64, 64, 3584, 2048)
_TINY = Setting("tiny", 2**15, 4, 16, 128, 64)
SUITE = Suite(
    name="engine",
    # All of them run one program.
    groups=lambda: [
        Group("short", _SETTING, 96, (1500, 2500), (128, 256)),
        Group("long", _SETTING, 48, (1500, 2500), (512, 1024)),
    ],
    quick_groups=lambda: [Group("short", _TINY, 5, (20, 40), (40, 60))],
    run=each(begin),
    with_ratios=with_ratios,
    formats=(),
    tables={"engine": tables.section(engine_table, plot=PLOT)},
    plots={PLOT[0]: plot},
)
