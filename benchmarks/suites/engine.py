"""Requests through `turbojax.models.Engine` with a pool of a fixed size, in wall time.

One engine at a time for each kind of pages, all with the same random weights and the same requests.
Every kind of step that is needed is compiled and run before the clock starts.
"""

import dataclasses
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import paged_tables, tables
from benchmarks.suites import common
from turbojax import models, paged
from turbojax.models.engine import Engine, Finished, Request, swap

Row = dict[str, Any]
SUITES = ("engine",)
one_line = paged_tables.one_line
FORMATS = ()
"""No number format's ceiling is compared with."""
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
      prefill_chunk: tokens of a prompt in a step.
    """

    model: str
    pool_bytes: int
    slots: int
    page_size: int
    max_length: int
    prefill_chunk: int

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

    def name(self, kv_dtype: str) -> str:
        """``engine/llama-3-8b/short/turbo4``."""
        return f"{paged_tables.ENGINE}/{self.setting.model}/{self.label}/{kv_dtype}"

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
    setting = Setting("llama-3-8b", 2**32, 64, 64, 3584, 256)
    prompt = (1500, 2500)
    return [
        Group("short", setting, 96, prompt, (128, 256)),
        Group("long", setting, 48, prompt, (512, 1024)),
    ]


def _quick_groups() -> list[Group]:
    """A tiny model, whose pool is so small that requests of bfloat16 must leave it."""
    setting = Setting("tiny", 2**15, 4, 16, 128, 16)
    return [Group("short", setting, 5, (20, 40), (40, 60))]


def selected(pattern: str, *, quick: bool, suite: str = "engine") -> list[tuple[Group, str]]:
    """The rows whose names the regular expression `pattern` finds, in order."""
    del suite
    groups = _quick_groups() if quick else _groups()
    every = [(group, kv_dtype) for group in groups for kv_dtype in KV_DTYPES]
    return [
        (group, kv_dtype) for group, kv_dtype in every if re.search(pattern, group.name(kv_dtype))
    ]


def run(
    rows: list[tuple[Group, str]],
    ceilings: dict[str, float | None],
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """Measures rows one after the other; a row that fails says so and the run goes on.

    Rows of one group share the time that is left, so that a slow one leaves some to the others: no
    step is begun after that, and what was reached is the row.

    Args:
      rows: as `selected`.
      ceilings: not used.
      on_row: called with each finished row.
      repetitions: not used: everything runs once.
      deadline: of `time.monotonic`; no row is started after it.
    """
    del ceilings, repetitions
    weights: dict[str, models.Decoder] = {}
    for i, (group, kv_dtype) in enumerate(rows):
        row = describe(group, kv_dtype)
        if (now := time.monotonic()) > deadline:
            on_row({**row, "status": "not run", "reason": tables.OUT_OF_TIME})
            continue
        left = sum(other is group for other, _ in rows[i:])
        try:
            model = _weights(weights, group.setting.model)
            row |= measure(model, group, kv_dtype, now + (deadline - now) / left)
        except Exception as error:  # out of memory, a compiler's refusal: facts to be recorded
            row |= common.failure(error)
        gc.collect()
        on_row(row)


def _weights(made: dict[str, models.Decoder], name: str) -> models.Decoder:
    if name not in made:
        made[name] = jax.block_until_ready(models.random_decoder(models.SHAPES[name]))
    return made[name]


def describe(group: Group, kv_dtype: str) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(kv_dtype),
        "operation": paged_tables.ENGINE,
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
        prefill_chunk=setting.prefill_chunk,
    )
    requests = group.make()
    _compile(engine, setting, requests)
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
        "status": paged_tables.STOPPED,
        "reason": f"{done} of {requests} requests done: {tables.OUT_OF_TIME}",
    }


def _compile(engine: Engine, setting: Setting, requests: list[Request]) -> None:
    """Runs a short request for each way to sample, and moves a page to the host and back."""
    for sampling in {dataclasses.replace(request.sampling, seed=0) for request in requests}:
        prompt = [0] * (setting.prefill_chunk + 1)
        engine.add(Request(prompt, max_new_tokens=2, sampling=sampling))
        engine.run()
    content = swap.fetch(swap.read(engine._caches, (0,)))
    engine._caches = jax.block_until_ready(swap.write(engine._caches, (0,), content))


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
