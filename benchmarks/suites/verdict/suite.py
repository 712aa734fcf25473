"""Are 4-bit rotated caches slower than fp8? Bytes, speed, error and bits per byte in one run.

Attention of one layer with Llama 3 8B's heads through every cache: one token after long and short
contexts, and whole prompts; and a byte-level model that reads held-out text through the same
caches (the embedded one, or that in the folder which VERDICT_MODEL names).
"""

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Ceilings, Suite, attempt, over_baselines
from benchmarks.suites.verdict import cases, plots, tables
from benchmarks.suites.verdict.methods import BASELINES, BF16, DECODE, FP8, FULL, TEXT, TRITON
from benchmarks.suites.verdict.texts import Texts
from benchmarks.tables import Row

_MODEL = "llama3-8b"
_LONG = ((16, 32768), (1, 131072), (64, 4096))
_SHORT = ((1, 1024), (1, 8192))
_PROMPTS = ((1, 8192), (1, 32768))


def _groups() -> list[Group | Texts]:
    """What matters most first: a run may be stopped by the clock."""
    long, short = ([Shape(_MODEL, *place) for place in places] for places in (_LONG, _SHORT))
    prompts = [Shape(_MODEL, *place, is_causal=True) for place in _PROMPTS]
    groups: list[Group | Texts] = [cases.decoding(shape) for shape in long]
    groups.append(Texts())
    groups += [cases.decoding(shape) for shape in short]
    return groups + [cases.prompts(shape) for shape in prompts]


def _quick_groups() -> list[Group | Texts]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    return [
        cases.decoding(Shape("tiny", 2, 192), (BF16, FULL, FP8, "turbo4", f"turbo4{TRITON}")),
        cases.prompts(Shape("tiny", 1, 192, is_causal=True), ("4bit",)),
        Texts(context=95, windows=1, files=2, model="tiny", methods=("turbo4",)),
    ]


def run(
    rows: list[tuple[Any, Any]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`: group by group, whose caches are freed before the next."""
    for group in {id(group): group for group, _ in rows}.values():
        here = [(one, case) for one, case in rows if one is group]
        if isinstance(group, Texts):
            for _, case in here:
                measure = functools.partial(_alone, group, case)
                attempt(group.describe(case), measure, on_row, deadline)
            continue
        if group.operation == DECODE:
            _compile_filling(group, [case.method for _, case in here])
        calls.run(here, ceilings, on_row, repetitions=repetitions, deadline=deadline)


def _alone(group: Texts, case: str) -> Row:
    with timing.alone():
        return group.measure(case)


def _compile_filling(group: Group, methods: list[str]) -> None:
    """What fills the caches, side by side. What fails here fails again in its row, and says so."""
    shape = Shape(group.facts["model"], group.facts["batch"], group.facts["tokens"])

    names = {cases.cache_of(method) for method in methods if method != FULL}

    def compile_it(name: str) -> None:
        with contextlib.suppress(Exception):
            cases.filling(shape, name)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compile_it, sorted(names)))


def with_ratios(rows: list[Row]) -> list[Row]:
    """Speeds over those of bfloat16 and of fp8 pages, of all rows that have a time."""
    timed = iter(_over([row for row in rows if row["operation"] != TEXT]))
    return [row if row["operation"] == TEXT else next(timed) for row in rows]


_over = over_baselines(BASELINES)

SUITE = Suite(
    name="verdict",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=with_ratios,
    one_line=tables.one_line,
    formats=("bf16",),
    tables=tables.TABLES,
    plots=plots.PLOTS,
)
