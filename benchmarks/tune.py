"""`python -m benchmarks tune`: times launch settings and writes the table that kernels read.

Every candidate of a problem is checked against the output of the default settings before it is
timed. Each measurement goes into the result file at once, so that a run can be resumed; the
fastest candidates go into `turbojax/ops/turbo_attention/tuning.json`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import tables, timing
from benchmarks.suites.common import compile_side_by_side

Row = dict[str, Any]
Measure = Callable[[Callable[..., Any], tuple[Any, ...]], timing.Timing]
# Relative L2 distance to the default's output: sums in another order, rounded to bfloat16.
_TOLERANCE = 5e-3
# What a candidate must gain over the default to replace it.
_WORTH = 0.01


@dataclasses.dataclass(frozen=True)
class Problem:
    """One kernel at one shape.

    Attributes:
      name: of the rows.
      kernel: its name in the table.
      traits: see `turbojax.ops.turbo_attention.tuning.launch`.
      sizes: the same.
      candidates: named tuples of settings; the first is the default.
      build: makes the arguments, and from each candidate the function of them to be timed.
    """

    name: str
    kernel: str
    traits: Mapping[str, Any]
    sizes: Mapping[str, int]
    candidates: tuple[Any, ...]
    build: Callable[[], tuple[tuple[Any, ...], Callable[[Any], Callable[..., Any]]]]


def key_of(problem: Problem, candidate: Any) -> str:
    """The name of a row."""
    return f"{problem.name} " + " ".join(f"{k}={v}" for k, v in candidate._asdict().items())


def run(
    problems: Iterable[Problem],
    done: Mapping[str, Row],
    on_row: Callable[[Row], None],
    *,
    measure: Measure = timing.measure,
    deadline: float = float("inf"),
) -> None:
    """Measures what is not done yet, problem by problem, the default of each first.

    Args:
      problems: to tune.
      done: rows by name.
      on_row: called with each new row.
      measure: the clock.
      deadline: of `time.monotonic`; nothing is started after it.
    """
    for problem in problems:
        left = [c for c in problem.candidates if done.get(key_of(problem, c), {}).get("us") is None]
        if not left:
            continue
        if time.monotonic() > deadline:
            for candidate in left:
                on_row(_described(problem, candidate) | {"reason": tables.OUT_OF_TIME})
            continue
        arguments, function_of = problem.build()
        default = problem.candidates[0]
        wanted = list(dict.fromkeys([default, *left]))
        want = None
        for candidate, compiling in zip(
            wanted, compile_all(function_of, wanted, arguments), strict=True
        ):
            is_default = candidate is default
            row = _described(problem, candidate)
            try:
                compiled = compiling.result()
                got = compiled(*arguments)
                want = got if want is None and is_default else want
                row["distance"] = distance(got, want)
                if not row["distance"] <= _TOLERANCE:
                    raise ArithmeticError(f"{row['distance']:.2g} from the default's output")
                if candidate in left and time.monotonic() <= deadline:
                    row["us"] = measure(compiled, arguments).microseconds
            except Exception as error:  # too much shared memory, a wrong result: kept as a fact
                row["reason"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if candidate in left:
                on_row(row)
            if want is None:  # without the default there is nothing to compare with
                break


def compile_all(
    function_of: Callable[[Any], Callable[..., Any]],
    candidates: Sequence[Any],
    arguments: tuple[Any, ...],
) -> list[concurrent.futures.Future[Any]]:
    """Compiles side by side, and waits: nothing compiles while something is timed."""

    def lower(candidate: Any) -> jax.stages.Lowered:
        return jax.jit(function_of(candidate)).lower(*arguments)

    return compile_side_by_side(functools.partial(lower, candidate) for candidate in candidates)


def _described(problem: Problem, candidate: Any) -> Row:
    return {"name": key_of(problem, candidate), "problem": problem.name, "us": None} | {
        "launch": candidate._asdict(),
        "is_default": candidate is problem.candidates[0],
    }


def distance(got: Any, want: Any) -> float:
    """Relative L2 distance of the first arrays of two outputs; NaN is far."""
    got, want = (jnp.ravel(jax.tree.leaves(x)[0]).astype(jnp.float32) for x in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def winners(
    problems: Sequence[Problem], rows: Iterable[Row], device: str, facts: Mapping[str, Any]
) -> list[Row]:
    """The table's entries of the problems that were measured completely.

    Args:
      problems: those that were run.
      rows: all there are.
      device: its kind.
      facts: versions and date.
    """
    by_name = {row["name"]: row for row in rows}
    entries = []
    for problem in problems:
        found = [by_name.get(key_of(problem, c)) for c in problem.candidates]
        if any(row is None or row.get("reason") == tables.OUT_OF_TIME for row in found):
            continue
        timed = [row for row in found if row is not None and row["us"] is not None]
        if not timed or not timed[0]["is_default"]:
            continue
        best = min(timed, key=lambda row: row["us"])
        if best["us"] > (1 - _WORTH) * timed[0]["us"]:
            best = timed[0]
        entries.append(
            {
                "kernel": problem.kernel,
                "device": device,
                "traits": json.loads(json.dumps(dict(problem.traits))),
                "sizes": dict(problem.sizes),
                "launch": best["launch"],
                "us": round(best["us"], 2),
                "default_us": round(timed[0]["us"], 2),
                **facts,
            }
        )
    return entries


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """The table with new entries in the place of those of the same kernel, device and shape."""
    names = ("kernel", "device", "traits", "sizes")
    table = {json.dumps([entry[n] for n in names]): entry for entry in [*old, *new]}
    return [table[key] for key in sorted(table)]


def write_table(path: Path, entries: Sequence[Row]) -> None:
    """One line an entry, so that a change can be read."""
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    path.write_text('{\n "entries": [\n' + lines + "\n ]\n}\n", encoding="utf-8")


def selected(pattern: str) -> list[Problem]:
    """The problems whose names the regular expression finds."""
    from benchmarks.suites import tuning

    return [problem for problem in tuning.problems() if re.search(pattern, problem.name)]


def command(
    arguments: argparse.Namespace, out: Path, result: Row, save: Callable[[], None]
) -> None:
    """The command `tune`, once the result file is there.

    Args:
      arguments: of the command line.
      out: the result file.
      result: its content, `rows` of earlier runs included.
      save: writes it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    deadline = time.monotonic() + arguments.seconds
    problems = selected(arguments.filter)
    rows = {row["name"]: row for row in result["rows"]}
    names = {key_of(p, c) for p in problems for c in p.candidates}
    left = [name for name in names if rows.get(name, {}).get("us") is None]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("tune", total=len(left))

        def on_row(row: Row) -> None:
            rows[row["name"]] = row
            result["rows"] = list(rows.values())
            save()
            time_or_reason = row.get("reason") or f"{row['us']:.1f} us"
            progress.console.print(f"{row['name']}: {time_or_reason}", highlight=False)
            progress.advance(task)

        run(problems, dict(rows), on_row, deadline=deadline)
    facts = {name: result[name] for name in ("jax", "date")}
    found = winners(problems, rows.values(), result["device"], facts)
    old = json.loads(arguments.table.read_text(encoding="utf-8"))["entries"]
    write_table(arguments.table, merged(old, found))
    print(f"{out}\n{arguments.table}: {len(found)} shapes")
