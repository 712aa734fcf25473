"""Calls that are compiled side by side, each with a check of its output, and timed one by one.

All functions of an operation are compiled before anything is timed.
"""

import concurrent.futures
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import timing
from benchmarks.measuring.samples import errors as relative_errors
from benchmarks.measuring.work import Needs
from benchmarks.suite import (
    Asked,
    Measure,
    Rows,
    each,
    joined,
    parted,
    temporary_bytes,
    timing_facts,
)
from benchmarks.tables import Row

# This many rows of an output are compared.
_COMPARED = 4
# Rounding gives 0.03 at most, a wrong output about 1.
_MOST = ("relative_l1", 0.05)
# Families of rows that are products of XLA alone, which it times while it compiles them.
_PRODUCTS_OF_XLA = ("bf16", "fp8")


class Arrays:
    """Inputs, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def get(self, make: Callable[..., Any], *sizes: Any) -> Any:
        """``make(*sizes)``, the same arrays every time."""
        if (make, sizes) not in self._made:
            self._made[make, sizes] = make(*sizes)
        return self._made[make, sizes]


Check = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
"""Takes an output and its reference; gives some rows, what they should be, whether all is
finite."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
      function: arrays and pytrees in and out.
      arguments: what it is called with.
      needs: what it must do.
      check: compiled beside the function; None where `errors` does it all.
      against: arguments of `check` after the output.
      errors: of an output, without `check`.
      most: which error of a checked output may be at most how large.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: Needs
    check: Check | None = None
    against: tuple[Any, ...] = ()
    errors: Callable[[Any], Row] | None = None
    most: tuple[str, float] = _MOST

    def lower(self) -> jax.stages.Lowered:
        return jax.jit(self.function).lower(*self.arguments)

    def lower_check(self, output: Any) -> jax.stages.Lowered | None:
        if self.check is None:
            return None
        return jax.jit(self.check).lower(output, *self.against)

    def measure(
        self, compiled: Callable[..., Any], check: Any, repetitions: int | None
    ) -> tuple[float, Row]:
        with timing.alone():
            facts = self._errors(compiled(*self.arguments), check)
            taken = timing.measure(compiled, self.arguments, repetitions=repetitions)
        return taken.microseconds, {**timing_facts(taken), **facts}

    def _errors(self, output: Any, check: Any) -> Row:
        if check is None:
            return {} if self.errors is None else self.errors(output)
        got, want, is_finite = check(output, *self.against)
        if not is_finite:
            raise ArithmeticError("the output is not finite")
        return close(got, want, self.most)


def close(got: jax.Array, want: jax.Array, most: tuple[str, float] = _MOST) -> Row:
    errors, (name, limit) = relative_errors(got, want), most
    if not errors[name] <= limit:
        raise ArithmeticError(f"the output is wrong: {errors}, {name} must be <= {limit}")
    return errors


def compared_rows(count: int) -> np.ndarray:
    """Which rows of this many are compared: the first, the last and some between."""
    return np.linspace(0, count - 1, _COMPARED).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
      method: what runs.
      implementation: of ours, or None.
      family: what others are compared with goes by this name.
      build: makes the call. Raises NotImplementedError if it cannot.
    """

    method: str
    implementation: str | None
    family: str
    build: Callable[[Arrays], Call]


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one shape."""

    operation: str
    label: str
    facts: dict[str, Any]
    cases: tuple[Case, ...]

    def name(self, case: Case) -> str:
        """``matmul/k4096-n14336/m16/int4/mosaic_gpu``."""
        return joined(self.operation, self.label, case.method, case.implementation)

    def describe(self, case: Case) -> Row:
        return {
            "operation": self.operation,
            "label": self.label,
            "method": case.method,
            "implementation": case.implementation,
            "family": case.family,
            **self.facts,
        }


class _Compiled:
    """A row's call, its function and its check, or the error that ended it."""

    def __init__(self, case: Case, arrays: Arrays) -> None:
        self.error: Exception | None = None
        try:
            with timing.beside():
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
        return microseconds, {**facts, **temporary_bytes(function)}


def compile_side_by_side(rows: Rows) -> list[_Compiled]:
    """Makes the inputs of all rows, and compiles all functions and checks.

    XLA times its products to choose among them: they are compiled one after the other, on a device
    that does nothing else. Everything else is compiled beside them.
    """
    start, arrays = time.monotonic(), Arrays()
    made = [_Compiled(case, arrays) for _, case in rows]
    inputs = time.monotonic() - start
    with (
        concurrent.futures.ThreadPoolExecutor() as others,
        concurrent.futures.ThreadPoolExecutor(max_workers=1) as products,
    ):
        for one, (_, case) in zip(made, rows, strict=True):
            is_timed = case.family in _PRODUCTS_OF_XLA
            submit = functools.partial(products.submit, _alone) if is_timed else others.submit
            one.lower(submit, others.submit)
    print(
        f"{len(made)} rows: made their inputs in {inputs:.0f} s, "
        f"compiled in {time.monotonic() - start - inputs:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return made


def _alone(compile_it: Callable[[], Any]) -> Any:
    """Compiles what is timed while it is compiled; other processes wait."""
    with timing.alone():
        return compile_it()


def begin(rows: Rows, asked: Asked) -> Measure:
    """Makes the inputs of rows and compiles them; see `suite.each`."""
    compiled = compile_side_by_side(rows)

    def measure(group: Group, case: Case) -> Row:
        del group, case
        one = compiled.pop(0)  # so that its arrays are freed when it is done
        microseconds, facts = one.measure(asked.repetitions)
        needs = one.call.needs.facts(microseconds, asked.ceilings)
        return {"status": "ok", "us": microseconds, **needs, **facts}

    return measure


# The arrays of one operation are freed before others are made.
run = each(begin, parted(lambda group: group.operation))
