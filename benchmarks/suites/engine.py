"""Requests through `turbojax.models.Engine` with a pool of a fixed size, in wall time.

One engine at a time for each kind of pages, all with the same random weights and the same requests.
All programs are compiled before the clock starts.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from benchmarks import plots, tables
from benchmarks.suite import Ceilings, Suite, attempt
from benchmarks.suites.paged.tables import KV_DTYPES as DTYPE_NAMES
from benchmarks.tables import Result, Row
from turbojax import models, paged
from turbojax.models.engine import Engine, Finished, Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATION = "engine"
STOPPED = "stopped"
"""Status of a row that the clock ended."""
KV_DTYPES = ("auto", "fp8_e4m3", "turbo4")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its engine.

    Attributes:
      model: a name of `models.SHAPES`.
      pool_bytes: of the pages of all layers.
      slots: sequences at a time.
      page_size: tokens of a page.
      max_length: of prompt and result.
      step_tokens: of a step at most.
    """

    model: str
    pool_bytes: int
    slots: int
    page_size: int
    max_length: int
    step_tokens: int

    def num_pages(self, kv_dtype: str) -> int:
        """Pages of each layer's pool."""
        config = models.SHAPES[self.model]
        page = jax.eval_shape(
            lambda: paged.init_cache(
                1, self.page_size, config.num_kv_heads, config.head_dim, kv_dtype=kv_dtype
            )
        )
        return self.pool_bytes // (config.num_layers * page.page_bytes)


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests of random tokens and random lengths, the same for every kind of pages.

    Attributes:
      label: as in the rows' names.
      setting: what they run through.
      requests: how many.
      prompt: tokens of a prompt, from and to.
      new: tokens of a result, from and to.
    """

    label: str
    setting: Setting
    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]

    @property
    def cases(self) -> tuple[str, ...]:
        """Kinds of pages, what others are compared with first."""
        return KV_DTYPES

    def name(self, kv_dtype: str) -> str:
        """``engine/llama-3-8b/short/turbo4``."""
        return f"{OPERATION}/{self.setting.model}/{self.label}/{kv_dtype}"

    def make(self) -> list[Request]:
        """The requests."""
        rng = np.random.default_rng(0)
        vocabulary = models.SHAPES[self.setting.model].vocab_size
        sizes = [rng.integers(*bounds, self.requests, endpoint=True) for bounds in self._bounds]
        return [
            Request(rng.integers(vocabulary, size=prompt).tolist(), max_new_tokens=int(new))
            for prompt, new in zip(*sizes, strict=True)
        ]

    @property
    def _bounds(self) -> tuple[tuple[int, int], ...]:
        return self.prompt, self.new


def _groups() -> list[Group]:
    """Short results first: a run may be stopped by the clock. All of them run one program."""
    setting = Setting("llama-3-8b", 2**32, 64, 64, 3584, 2048)
    prompt = (1500, 2500)
    return [
        Group("short", setting, 96, prompt, (128, 256)),
        Group("long", setting, 48, prompt, (512, 1024)),
    ]


def _quick_groups() -> list[Group]:
    """A tiny model, whose pool is so small that requests of bfloat16 must leave it."""
    setting = Setting("tiny", 2**15, 4, 16, 128, 64)
    return [Group("short", setting, 5, (20, 40), (40, 60))]


def run(
    rows: list[tuple[Group, str]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`; everything runs once.

    Rows of one group share the time that is left, so that a slow one leaves some to the others: no
    step is begun after that, and what was reached is the row.
    """
    del ceilings, repetitions
    weights: dict[str, models.Decoder] = {}
    for i, (group, kv_dtype) in enumerate(rows):
        now = time.monotonic()
        left = sum(other is group for other, _ in rows[i:])
        until = now + (deadline - now) / left
        one = functools.partial(_measure_with, weights, group, kv_dtype, until)
        attempt(describe(group, kv_dtype), one, on_row, deadline)
        gc.collect()


def _measure_with(
    made: dict[str, models.Decoder], group: Group, kv_dtype: str, deadline: float
) -> Row:
    return measure(_weights(made, group.setting.model), group, kv_dtype, deadline)


def _weights(made: dict[str, models.Decoder], name: str) -> models.Decoder:
    if name not in made:
        made[name] = jax.block_until_ready(models.random_decoder(models.SHAPES[name]))
    return made[name]


def describe(group: Group, kv_dtype: str) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(kv_dtype),
        "operation": OPERATION,
        "label": group.label,
        "method": kv_dtype,
        "kv_dtype": kv_dtype,
        **dataclasses.asdict(group.setting),
        "requests": group.requests,
        "prompt": list(group.prompt),
        "new": list(group.new),
    }


def measure(model: models.Decoder, group: Group, kv_dtype: str, deadline: float) -> Row:
    """All requests through a new engine, or as many steps as there is time for.

    Raises:
      ArithmeticError: if a result is not what was asked for.
    """
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
        **_status(len(done), group.requests),
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


def _status(done: int, requests: int) -> Row:
    if done == requests:
        return {"status": "ok"}
    return {
        "status": STOPPED,
        "reason": f"{done} of {requests} requests done: {tables.OUT_OF_TIME}",
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


def engine_table(result: Result) -> str:
    """Requests through the engine, by workload and kind of pages."""
    lines = []
    for row in result["rows"]:
        name = [_workload(row), DTYPE_NAMES[row["kv_dtype"]]]
        if row["status"] not in ("ok", STOPPED):
            lines.append([*name, tables.failure_cell(row), *[""] * 9])
            continue
        done = f" ({row['finished']} of {row['requests']})" if row["status"] == STOPPED else ""
        lines.append(
            [
                *name,
                f"{row['generated_per_second']:,.0f}",
                *tables.ratios(row, ("auto",)),
                f"{row['tokens_per_second']:,.0f}",
                f"{row['seconds']:.1f}{done}",
                f"{row['token_capacity']:,}",
                f"{row['capacity_over_auto']:.2f}x" if "capacity_over_auto" in row else "-",
                f"{row['most_tokens']:,}",
                str(row["most_sequences"]),
                str(row["preemptions"]),
                f"{row['steps']:,}",
            ]
        )
    header = ["requests", "pages", "new tokens per second", "over bf16", "with prompts", "seconds"]
    header += ["pool holds, tokens", "over bf16", "most held", "sequences", "preemptions", "steps"]
    return tables.table(header, lines)


def _workload(row: Row) -> str:
    prompt, new = ("{:,} to {:,}".format(*row[name]) for name in ("prompt", "new"))
    return f"{row['requests']} x {prompt}, {new} new"


def page_section(name: str, result: Result) -> str:
    """The table of docs/benchmarks and where its figures come from."""
    return f"{tables.picture(*PLOT)}{engine_table(result)}\n\n{tables.source(name, result)}"


PLOT = ("engine.png", "The engine with a pool of one size: new tokens per second and tokens held")


def engine_bars(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """Of each figure, by kind of pages: what it is relative to bfloat16, and in its own unit."""
    groups: dict[str, dict[str, tuple[float, str]]] = {}
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
    """What the engine does with a pool of one size, relative to bfloat16 pages."""
    title = f"One pool size on {result['device']}; over the bars the figures"
    return plots.of_ratios(engine_bars(result), title, "times bf16 pages", width=8, bar=0.25)


def one_line(row: Row) -> str:
    """A row for a terminal."""
    if row["status"] not in ("ok", STOPPED):
        return tables.not_measured(row)
    parts = [
        f"{row['generated_per_second']:,.0f} new tokens/s",
        f"{row['tokens_per_second']:,.0f} with prompts",
        f"{row['seconds']:.1f} s (compiled in {row['compile_seconds']:.0f})",
        f"pool holds {row['token_capacity']:,}, held {row['most_tokens']:,} "
        f"of {row['most_sequences']}",
        f"{row['preemptions']} preemptions",
        *tables.ratio_parts(row),
    ]
    stopped = f" ({row['reason']})" if row["status"] == STOPPED else ""
    return f"{row['name']}: {', '.join(parts)}{stopped}"


SUITE = Suite(
    name="engine",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=with_ratios,
    one_line=one_line,
    formats=(),
    tables={"engine": page_section},
    plots={PLOT[0]: plot},
)
