"""What the rows of the attention suites share: calls, cases, groups, and what measures them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.measuring.samples import Error
from benchmarks.measuring.work import Work
from benchmarks.shapes import Shape
from benchmarks.suite import (
    Asked,
    Latest,
    Measure,
    Rows,
    each,
    joined,
    temporary_bytes,
    timing_facts,
)
from benchmarks.tables import Row
from turbojax import TurboConfig
from turbojax.caches.progressive.kind import PROGRESSIVE

Choice = Literal["short", "thorough", "hopper", "hopper-short", "default"]
"""Which rows of a shape: some or all, those of the suite of Hopper's kernels, or the default."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    work: Work
    error: Callable[[Any], Error]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to be measured."""

    method: str
    implementation: str | None
    build: Callable[[Any], Call]


class Operation(NamedTuple):
    """What is done: its name, its inputs of a shape, and its rows, what others are compared with
    first."""

    name: str
    inputs: Callable[[Shape], Any]
    cases: Callable[[Shape, Choice], list[Case]]


@dataclasses.dataclass(frozen=True)
class Group:
    operation: Operation
    shape: Shape
    choice: Choice = "short"

    @property
    def cases(self) -> list[Case]:
        return self.operation.cases(self.shape, self.choice)

    def name(self, case: Case) -> str:
        """``decode/llama3-8b/b16-s32768/turbo-4bit/triton``."""
        return joined(self.operation.name, self.shape.label, case.method, case.implementation)

    def describe(self, case: Case) -> Row:
        return {
            "operation": self.operation.name,
            "method": case.method,
            "implementation": case.implementation,
            **self.shape.facts,
        }


def turbo_configs(kv_heads: int) -> dict[str, TurboConfig]:
    """The caches of the suite by name."""
    return {name: PROGRESSIVE.by_name(name, kv_heads) for name in PROGRESSIVE.names}


def begin(rows: Rows, asked: Asked) -> Measure:
    del rows
    inputs = Latest(lambda group: group.operation.inputs(group.shape))
    return lambda group, case: _measure(case.build(inputs.of(group)), asked)


def _measure(call: Call, asked: Asked) -> Row:
    start = time.perf_counter()
    lowered = jax.jit(call.function).lower(*call.arguments)
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    # Compiles the check, too, before this process has the device to itself.
    call.error(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), lowered.out_info))
    rotation = timing.Rotation(compiled, timing.rotated(call.arguments))
    with timing.alone():
        error = call.error(compiled(*call.arguments))
        taken = timing.measure_call(rotation, repetitions=asked.repetitions)
    unit = "gigabytes_per_second" if call.work.is_bytes else "tflops_per_second"
    return {
        "status": "ok",
        **timing_facts(taken),
        "work": call.work.amount,
        unit: call.work.rate(taken.microseconds),
        "percent_of_ceiling": call.work.percent_of_ceiling(taken.microseconds, asked.ceilings),
        **error,
        "compile_seconds": compile_seconds,
        **temporary_bytes(compiled),
        **call.facts,
    }


run = each(begin)
