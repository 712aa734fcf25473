"""FireQ: INT4 weights times e4m3 activations, KV4, and models of them, against XLA and cuDNN.

Two suites: ``fireq`` are single operations in device time, ``fireq_model`` is the prefill of a
whole model in wall time. All functions of an operation are compiled side by side, each with a
check of its output, before anything is timed.
"""

import concurrent.futures
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from benchmarks import fireq_tables, tables
from benchmarks.shapes import Shape
from benchmarks.suites import common, fireq_cases, fireq_model
from benchmarks.suites.fireq_cases import Case, Group
from benchmarks.suites.fireq_inputs import Arrays

Row = dict[str, Any]
one_line = fireq_tables.one_line
FORMATS = ("bf16", "fp8")
"""Ceilings that this suite compares with."""


def _groups() -> list[Group]:
    """What matters most first: a run may be stopped by the clock."""
    size, llama3, llama2 = 4096, 14336, 11008
    groups = []
    for inner in (llama3, llama2):
        for tokens in (16, 1, 64, 256, 1024, 4096):
            both = tokens in (16, 1024)
            groups.append(fireq_cases.matmul(size, inner, tokens, with_bf16_scales=both))
    groups += [fireq_cases.matmul(llama3, size, tokens) for tokens in (16, 4096)]
    groups.append(fireq_cases.feed_forward("llama3-8b", size, llama3, 16))
    groups.append(fireq_cases.feed_forward("llama2-7b", size, llama2, 16))
    for with_norm in (False, True):
        for tokens in (16, 16384):
            groups.append(fireq_cases.quantize(tokens, size, with_norm=with_norm))
    groups += [fireq_cases.decode_kv4(Shape("llama3-8b", batch, 32768)) for batch in (16, 1)]
    return groups


def _model_groups() -> list[Group]:
    return [fireq_model.prefill("llama-3-8b", 16, tokens) for tokens in (1024, 2048, 4096)]


SUITES: dict[str, Callable[[], list[Group]]] = {"fireq": _groups, "fireq_model": _model_groups}


def _quick_groups(suite: str) -> list[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    if suite == "fireq_model":
        return [fireq_model.prefill("tiny", 2, 24)]
    every = ("xla", *fireq_cases.KERNELS)
    return [
        fireq_cases.matmul(192, 72, 5, implementations=every, with_bf16_scales=True),
        fireq_cases.feed_forward("tiny", 64, 96, 3, implementations=every),
        fireq_cases.quantize(3, 64, with_norm=False),
        fireq_cases.quantize(3, 64, with_norm=True),
        fireq_cases.decode_kv4(Shape("tiny", 2, 192), implementations=("xla", "triton")),
    ]


def selected(pattern: str, *, quick: bool, suite: str = "fireq") -> list[tuple[Group, Case]]:
    """The rows whose names the regular expression `pattern` finds, in order."""
    groups = _quick_groups(suite) if quick else SUITES[suite]()
    every = [(group, case) for group in groups for case in group.cases]
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
    for operation in dict.fromkeys(group.operation for group, _ in rows):
        here = [(group, case) for group, case in rows if group.operation == operation]
        late = time.monotonic() > deadline
        # The arrays of one operation are freed before others are made.
        compiled = [] if late else compile_side_by_side(here)
        for i, (group, case) in enumerate(here):
            row = describe(group, case)
            if late or time.monotonic() > deadline:
                on_row({**row, "status": "not run", "reason": tables.OUT_OF_TIME})
                continue
            try:
                row |= _measure(compiled[i], ceilings, repetitions)
            except Exception as error:  # out of memory, a compiler's refusal: facts to be recorded
                row |= common.failure(error)
            compiled[i] = None
            on_row(row)


class _Compiled:
    """A row's call, its function and its check, or the error that ended it."""

    def __init__(self, case: Case, arrays: Arrays) -> None:
        self.error: Exception | None = None
        try:
            self.call = case.build(arrays)
            jax.block_until_ready((self.call.arguments, self.call.against))
        except Exception as error:
            self.error = error

    def lower(self, submit: Callable[..., Any], submit_check: Callable[..., Any]) -> None:
        """Hands function and check to what compiles them."""
        if self.error is not None:
            return
        try:
            lowered = self.call.lower()
            output = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
            )
            check = self.call.lower_check(output)
        except Exception as error:
            self.error = error
            return
        self.function = submit(lowered.compile)
        self.check = None if check is None else submit_check(check.compile)

    def measure(self, repetitions: int | None) -> tuple[float, Row]:
        """Microseconds and facts; raises whatever went wrong."""
        if self.error is not None:
            raise self.error
        function = self.function.result()
        check = None if self.check is None else self.check.result()
        microseconds, facts = self.call.measure(function, check, repetitions)
        size = getattr(function.memory_analysis(), "temp_size_in_bytes", None)
        return microseconds, {**facts, "temporary_bytes": size}


def compile_side_by_side(rows: Iterable[tuple[Group, Case]]) -> list[Any]:
    """Makes the inputs of all rows, and compiles all functions and checks.

    XLA times its products to choose among them: they are compiled one after the other, on a device
    that does nothing else. Everything else is compiled beside them.
    """
    start, arrays = time.monotonic(), Arrays()
    rows = list(rows)
    made = [_Compiled(case, arrays) for _, case in rows]
    inputs = time.monotonic() - start
    with (
        concurrent.futures.ThreadPoolExecutor() as others,
        concurrent.futures.ThreadPoolExecutor(max_workers=1) as products,
    ):
        for one, (_, case) in zip(made, rows, strict=True):
            pool = products if case.family in FORMATS else others
            one.lower(pool.submit, others.submit)
    print(
        f"{len(made)} rows: made their inputs in {inputs:.0f} s, "
        f"compiled in {time.monotonic() - start - inputs:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return made


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(case),
        "operation": group.operation,
        "label": group.label,
        "method": case.method,
        "implementation": case.implementation,
        "family": case.family,
        **group.facts,
    }


def _measure(one: _Compiled, ceilings: dict[str, float | None], repetitions: int | None) -> Row:
    microseconds, facts = one.measure(repetitions)
    needs = one.call.needs.facts(microseconds, ceilings)
    return {"status": "ok", "us": microseconds, **needs, **facts}


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over`: against the fastest row of each baseline of their shape."""
    best: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["family"] in fireq_tables.BASELINES[row["operation"]]:
            place = best.setdefault((row["operation"], row["label"]), {})
            place[row["family"]] = min(row["us"], place.get(row["family"], float("inf")))
    return [_with_ratio(row, best.get((row["operation"], row["label"]), {})) for row in rows]


def _with_ratio(row: Row, best: dict[str, float]) -> Row:
    if row["status"] != "ok":
        return row
    names = fireq_tables.BASELINES[row["operation"]]
    ratios = {name: best[name] / row["us"] for name in names if name in best}
    return {**row, "speedup_over": ratios}
