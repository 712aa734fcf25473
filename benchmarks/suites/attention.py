"""Decode, prefill and compress against what one would run instead; what is in which suite."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax

from benchmarks import tables, timing
from benchmarks.shapes import Shape
from benchmarks.suites import compress, decode, prefill
from benchmarks.suites.common import Call, Case, Choice, failure

Row = dict[str, Any]
one_line = tables.one_line
FORMATS = ("bf16", "int8", "fp8")
"""Ceilings that these suites compare with."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases of one shape, which share their inputs.

    Attributes:
      module: `decode`, `prefill` or `compress`.
      shape: the shape.
      choice: which rows.
    """

    module: ModuleType
    shape: Shape
    choice: Choice = "short"

    def cases(self) -> list[Case]:
        """Its rows."""
        return self.module.cases(self.shape, self.choice)

    def name(self, case: Case) -> str:
        """A row's name."""
        return case.name(self.module.OPERATION, self.shape)


def _attention() -> Iterator[Group]:
    """Everything, what matters most first: a run may be stopped by the clock."""
    llama, paper = "llama3-8b", "phi3-medium"
    yield Group(decode, Shape(llama, 16, 32768), "thorough")
    yield Group(prefill, Shape(llama, 2, 8192), "thorough")
    yield Group(prefill, Shape(llama, 2, 8192, is_causal=True), "thorough")
    yield Group(compress, Shape(llama, 16, 32768), "thorough")
    for batch, tokens in ((1, 1024), (16, 1024), (1, 32768), (64, 1024), (16, 4096)):
        yield Group(decode, Shape(llama, batch, tokens))
    for batch, tokens in ((64, 4096), (1, 131072)):
        yield Group(decode, Shape(llama, batch, tokens))
    figure_6 = [(1, 1024), (4, 1024), (16, 1024), (64, 1024)]
    figure_6 += [(4, 4096), (4, 8192), (4, 16384), (4, 32768)]
    for batch, tokens in figure_6:
        yield Group(decode, Shape(paper, batch, tokens))
    yield Group(compress, Shape(llama, 2, 8192))
    yield Group(prefill, Shape(llama, 1, 32768))
    yield Group(prefill, Shape(llama, 1, 32768, is_causal=True))
    for batch, tokens in figure_6:
        yield Group(prefill, Shape(paper, batch, tokens, is_causal=True))


def _hopper() -> Iterator[Group]:
    """What Hopper's own kernels are for, in minutes: long prompts, long and short caches."""
    llama, narrow = "llama3-8b", "llama3.2-1b"
    yield Group(decode, Shape(llama, 16, 32768), "hopper")
    for is_causal in (False, True):
        yield Group(prefill, Shape(llama, 2, 8192, is_causal), "hopper")
    for batch, tokens in ((1, 131072), (64, 4096)):
        yield Group(decode, Shape(llama, batch, tokens), "hopper")
    for is_causal in (False, True):
        yield Group(prefill, Shape(llama, 1, 32768, is_causal), "hopper-short")
    yield Group(prefill, Shape(narrow, 2, 8192), "hopper-short")
    for batch, tokens in ((1, 1024), (16, 4096), (1, 4096), (16, 1024), (4, 1024), (4, 4096)):
        yield Group(decode, Shape(llama, batch, tokens), "hopper-short")
    yield Group(prefill, Shape(narrow, 2, 8192, is_causal=True), "hopper-short")


SUITES: dict[str, Callable[[], Iterator[Group]]] = {"attention": _attention, "hopper": _hopper}


def _quick_groups() -> Iterator[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    yield Group(decode, Shape("tiny", 2, 192), "thorough")
    yield Group(prefill, Shape("tiny", 1, 128))
    yield Group(prefill, Shape("tiny", 1, 128, is_causal=True))
    yield Group(compress, Shape("tiny", 2, 192), "thorough")


def selected(pattern: str, *, quick: bool, suite: str = "attention") -> list[tuple[Group, Case]]:
    """The rows of a suite whose names the regular expression `pattern` finds, in order."""
    groups = _quick_groups() if quick else SUITES[suite]()
    every = [(group, case) for group in groups for case in group.cases()]
    return [(group, case) for group, case in every if re.search(pattern, group.name(case))]


def run(
    rows: list[tuple[Group, Case]],
    ceilings: dict[str, float | None],
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """Measures rows one after the other; a row that fails says so and the run goes on.

    Args:
      rows: as `selected`.
      ceilings: see `timing.ceilings`.
      on_row: called with each finished row.
      repetitions: of each call; chosen from its duration if not given.
      deadline: of `time.monotonic`; no row is started after it.
    """
    current: Group | None = None
    inputs: Any = None
    for group, case in rows:
        row = describe(group, case)
        if time.monotonic() > deadline:
            on_row({**row, "status": "not run", "reason": tables.OUT_OF_TIME})
            continue
        try:
            if group != current:
                current = inputs = None  # free the last group's arrays before making others
                inputs = group.module.Inputs(group.shape)
                current = group
            row |= _measure(case.build(inputs), ceilings, repetitions)
        except Exception as error:  # out of memory, a compiler's refusal: facts to be recorded
            row |= failure(error)
        on_row(row)


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    shape = group.shape
    return {
        "name": group.name(case),
        "operation": group.module.OPERATION,
        "method": case.method,
        "implementation": case.implementation,
        "model": shape.model,
        "batch": shape.batch,
        "tokens": shape.tokens,
        "heads": shape.heads.query,
        "kv_heads": shape.heads.kv,
        "head_dim": shape.heads.dim,
        "is_causal": shape.is_causal,
    }


def _measure(
    call: Call, ceilings: dict[str, float | None], repetitions: int | None
) -> dict[str, Any]:
    start = time.perf_counter()
    compiled = jax.jit(call.function).lower(*call.arguments).compile()
    compile_seconds = time.perf_counter() - start
    error = call.error(compiled(*call.arguments))
    taken = timing.measure(compiled, call.arguments, repetitions=repetitions)
    unit = "gigabytes_per_second" if call.work.is_bytes else "tflops_per_second"
    return {
        "status": "ok",
        "us": taken.microseconds,
        "spread": taken.spread,
        "clock": taken.clock,
        "repetitions": taken.repetitions,
        "wall_us": taken.wall_microseconds,
        "kernels": [{"name": name[:80], "us": us} for name, us in taken.kernels[:8]],
        "work": call.work.amount,
        unit: call.work.rate(taken.microseconds),
        "percent_of_ceiling": call.work.percent_of_ceiling(taken.microseconds, ceilings),
        **error,
        "compile_seconds": compile_seconds,
        "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
        **call.facts,
    }


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over_cudnn`: against the fastest cuDNN row of the same shape."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["status"] == "ok" and row["method"].startswith("cudnn"):
            best[_shape_of(row)] = min(row["us"], best.get(_shape_of(row), float("inf")))
    return [
        {**row, "speedup_over_cudnn": best[_shape_of(row)] / row["us"]}
        if row["status"] == "ok" and _shape_of(row) in best
        else row
        for row in rows
    ]


def _shape_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("operation", "model", "batch", "tokens", "is_causal"))
