"""Decode, prefill and compress against what one would run instead; what is in which suite."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import tables, timing
from benchmarks.shapes import Shape
from benchmarks.suite import Ceilings, Latest, Suite, attempt, over_cudnn, timing_facts
from benchmarks.suites.attention import compress, decode, plots, prefill, several, training
from benchmarks.suites.attention import tables as own_tables
from benchmarks.suites.attention.cases import Call, Case, Choice
from benchmarks.tables import Row

# Heads of 64 to 256 channels, grouped and not.
GRID_MODELS = ("llama3-8b", "llama3.2-1b", "mha-16", "mha-16-narrow", "phi3-mini", "gemma2-9b")


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases of one shape, which share their inputs.

    Attributes:
      module: `decode`, `several`, `prefill`, `training` or `compress`.
      shape: the shape.
      choice: which rows.
    """

    module: ModuleType
    shape: Shape
    choice: Choice = "short"

    @property
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
    for batch, tokens in ((1, 131072), (64, 4096), (1, 8192), (256, 2048), (1, 2**20)):
        yield Group(decode, Shape(llama, batch, tokens), "hopper")
    for batch, tokens in ((16, 32768), (64, 4096)):
        yield Group(several, Shape(llama, batch, tokens))
    for is_causal in (False, True):
        yield Group(prefill, Shape(llama, 1, 32768, is_causal), "hopper-short")
    for is_causal in (True, False):
        yield Group(training, Shape(llama, 2, 8192, is_causal), "hopper")
    # Short prompts, narrow heads, windows.
    yield Group(prefill, Shape(llama, 8, 2048, is_causal=True), "hopper-short")
    yield Group(prefill, Shape("mha-16-narrow", 1, 32768, is_causal=True), "hopper-short")
    yield Group(prefill, Shape(llama, 2, 8192, is_causal=True, window=1024), "hopper-short")
    for shape in (
        Shape(llama, 8, 2048, is_causal=True),
        Shape("mha-16-narrow", 1, 32768, is_causal=True),
        Shape(llama, 2, 8192, is_causal=True, window=1024),
        Shape("gemma2-9b", 2, 4096, is_causal=True),
    ):
        yield Group(training, shape, "hopper-short")
    yield Group(prefill, Shape(narrow, 2, 8192), "hopper-short")
    for batch, tokens in ((1, 1024), (16, 4096), (1, 4096), (16, 1024), (4, 1024), (4, 4096)):
        yield Group(decode, Shape(llama, batch, tokens), "hopper-short")
    yield Group(prefill, Shape(narrow, 2, 8192, is_causal=True), "hopper-short")


def _default() -> Iterator[Group]:
    """Head dims and numbers of tokens, causal: a call without options beside cuDNN."""
    for tokens in (1024, 8192, 2048, 32768, 4096, 512, 131072, 128, 1):
        for model in GRID_MODELS:
            yield Group(prefill, Shape(model, max(1, 4096 // tokens), tokens, True), "default")


def _quick_default() -> Iterator[Group]:
    yield Group(prefill, Shape("tiny", 1, 128, is_causal=True), "default")


def _quick_groups() -> Iterator[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    yield Group(decode, Shape("tiny", 2, 192), "thorough")
    yield Group(prefill, Shape("tiny", 1, 128))
    yield Group(prefill, Shape("tiny", 1, 128, is_causal=True))
    yield Group(compress, Shape("tiny", 2, 192), "thorough")
    yield Group(several, Shape("tiny", 2, 192))


def run(
    rows: list[tuple[Group, Case]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`."""
    inputs = Latest(lambda group: group.module.Inputs(group.shape))
    for group, case in rows:
        measure = functools.partial(_measure, group, case, inputs, ceilings, repetitions)
        attempt(describe(group, case), measure, on_row, deadline)


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(case),
        "operation": group.module.OPERATION,
        "method": case.method,
        "implementation": case.implementation,
        **group.shape.facts,
    }


def _measure(
    group: Group, case: Case, inputs: Latest, ceilings: Ceilings, repetitions: int | None
) -> Row:
    call: Call = case.build(inputs.of(group))
    start = time.perf_counter()
    lowered = jax.jit(call.function).lower(*call.arguments)
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    # Compiles the check, too, before this process has the device to itself.
    call.error(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), lowered.out_info))
    rotation = timing.Rotation(compiled, timing.rotated(call.arguments))
    with timing.alone():
        error = call.error(compiled(*call.arguments))
        taken = timing.measure_call(rotation, repetitions=repetitions)
    unit = "gigabytes_per_second" if call.work.is_bytes else "tflops_per_second"
    return {
        "status": "ok",
        **timing_facts(taken),
        "work": call.work.amount,
        unit: call.work.rate(taken.microseconds),
        "percent_of_ceiling": call.work.percent_of_ceiling(taken.microseconds, ceilings),
        **error,
        "compile_seconds": compile_seconds,
        "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
        **call.facts,
    }


# The suites differ in their rows, and in what the docs show of them.
_COMMON: dict[str, Any] = {
    "quick_groups": _quick_groups,
    "run": run,
    "with_ratios": over_cudnn,
    "one_line": tables.one_line,
    "formats": ("bf16", "int8", "fp8"),
}
ATTENTION = Suite(
    name="attention",
    groups=_attention,
    tables=own_tables.ATTENTION,
    plots=plots.ATTENTION,
    **_COMMON,
)
HOPPER = Suite(name="hopper", groups=_hopper, tables=own_tables.HOPPER, **_COMMON)
DEFAULT = Suite(
    name="default",
    groups=_default,
    tables=own_tables.DEFAULT,
    plots=plots.DEFAULT,
    **(_COMMON | {"quick_groups": _quick_default}),
)
