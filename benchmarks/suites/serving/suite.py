"""Serving at the speed of the kernels: the engine, its kernels by hand, speculation, HTTP.

Wall time. Every row says how long it should take (`expected_seconds`), and is stopped if it runs
for a few times that, so that a slow one leaves time to the others.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable

from benchmarks.suite import Ceilings, Suite, attempt
from benchmarks.suites.serving import bare, cases, engines, http, tables
from benchmarks.suites.serving.cases import OPERATION, Case, Group
from benchmarks.tables import Row

_PATIENCE = 2.5
"""Times what is expected of a row: seconds after compiling in which steps of it are begun."""


def run(
    rows: list[tuple[Group, Case]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`; everything runs once."""
    del ceilings, repetitions
    stock = engines.Stock()

    def finish(row: Row) -> None:
        if row["status"] != "ok":
            stock.drop()
        on_row(row)

    for group, case in cases.in_order(rows):
        one = functools.partial(measure, stock, group, case, deadline)
        attempt(describe(group, case), one, finish, deadline)
        gc.collect()


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    setting = group.setting_of(case)
    return {
        "name": group.name(case),
        "operation": OPERATION,
        "label": group.label,
        "method": case.name,
        "model": group.model,
        "runs": case.runs,
        "weights": case.weights,
        "kv_dtype": case.kv_dtype,
        "speculates": case.speculates,
        "requests": group.requests,
        "prompt": group.prompt,
        "new": group.new,
        "clients": group.clients,
        "setting": dataclasses.asdict(setting),
        "num_pages": setting.pages(group.config, case.kv_dtype),
        "expected_seconds": case.expected,
        "asked": dict(case.asked),
        "over": dict(case.over),
    }


def measure(stock: engines.Stock, group: Group, case: Case, deadline: float) -> Row:
    """One row."""
    begun = time.monotonic()
    if case.runs == "bare":
        stock.drop()  # its pools are as large as an engine's
        row = bare.measure(stock.model(group, case), group, case)
    elif case.runs == "steps":
        row = bare.measure_steps(stock.model(group, case), group, case)
    elif case.runs == "http":
        try:
            made = stock.engine(group, case)
            row = http.measure(made, group, _limit(case, deadline))
        finally:
            stock.drop()
    else:
        made = stock.engine(group, case)
        row = engines.measure(made, group, case, _limit(case, deadline))
    model = stock.model(group, case)
    found = {"weight_bytes": model.nbytes, **engines.memory()}
    return {**row, **found, "all_seconds": time.monotonic() - begun}


def _limit(case: Case, deadline: float) -> float:
    # From now: an engine that took long to compile is not to be lost.
    return min(deadline, time.monotonic() + _PATIENCE * case.expected)


SUITE = Suite(
    name=OPERATION,
    groups=cases.groups,
    quick_groups=cases.quick_groups,
    run=run,
    with_ratios=tables.with_ratios,
    one_line=tables.one_line,
    formats=(),
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={OPERATION: tables.page_section},
    plots={tables.PLOT[0]: tables.plot},
)
