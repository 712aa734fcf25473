"""What several devices of one host are worth: the same call on one of them and on all.

Wall time: of many calls in one program where a call is short, else of calls one behind the other.
Rows of one device come first in each group; `speedup` is over them, in the same run.
"""

import functools
import gc
from collections.abc import Callable

import jax

from benchmarks import parallel_costs
from benchmarks.suite import Ceilings, Suite, attempt
from benchmarks.suites.parallel import cases, tables
from benchmarks.suites.parallel.cases import OPERATION, Group
from benchmarks.tables import Row


def run(
    rows: list[tuple[Group, int]],
    ceilings: Ceilings,
    on_row: Callable[[Row], None],
    *,
    repetitions: int | None = None,
    deadline: float = float("inf"),
) -> None:
    """See `benchmarks.suite.Run`."""
    del ceilings, repetitions
    for group, devices in rows:
        attempt(
            describe(group, devices), functools.partial(measure, group, devices), on_row, deadline
        )
        gc.collect()


def describe(group: Group, devices: int) -> Row:
    """What is known of a row before it runs."""
    return {
        "name": group.name(devices),
        "operation": OPERATION,
        "label": group.label,
        "way": group.way,
        "devices": devices,
        "asked": group.asked,
        **group.facts,
    }


def measure(group: Group, devices: int) -> Row:
    """One row.

    Raises:
      NotImplementedError: if there are not so many devices.
    """
    there = len(jax.devices())
    if devices > there:
        raise NotImplementedError(f"{devices} devices are asked for, there are {there}")
    return {"status": "ok", **group.measure(devices)}


SUITE = Suite(
    name=OPERATION,
    groups=cases.groups,
    quick_groups=cases.quick_groups,
    run=run,
    with_ratios=tables.with_ratios,
    one_line=tables.one_line,
    formats=(),
    environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"},
    tables={OPERATION: tables.page_section, "parallel_costs": parallel_costs.table},
    plots={tables.PLOT[0]: tables.plot, parallel_costs.PLOT[0]: parallel_costs.plot},
)
