"""Measures rows into a file that can be gone on with; several at once: most of it compiles.

In processes, not in threads: Mosaic's lowering keeps global state, which two threads would mix, and
calls that jax records as CUDA graphs must not meet a compilation in their process.
"""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.evidence.rows import Spec
from benchmarks.evidence.subject import Subject
from benchmarks.suite import failure
from benchmarks.tables import OUT_OF_TIME, Result, Row
from turbojax.evaluation import Records
from turbojax.evaluation.records import describe_machine

OnRow = Callable[[str, Row | None, str, float], None]
"""Called with a row's key, its figures or None, why there are none, and the seconds it took."""

Prepare = Callable[[], tuple[Subject, Sequence[Spec]]]
"""Makes the subject and its rows anew in another process, so that it can be pickled."""


class _Outcome(NamedTuple):
    """A row or why there is none, and the seconds it took."""

    row: Row | None
    reason: str
    seconds: float


def measure(
    subject: Subject,
    specs: Sequence[Spec],
    *,
    out: Path | None,
    on_row: OnRow,
    deadline: float = float("inf"),
    workers: int = 1,
    prepare: Prepare | None = None,
) -> Result:
    """Measures the rows that are not there yet.

    A row that fails says why under ``"failures"``, and the next run tries it again.
    """
    if workers > 1 and prepare is None:
        raise ValueError(f"{workers=} must be 1 without `prepare`")
    machine, dates = describe_machine()
    records = Records(out, {**machine, **subject.identity()}, dates)
    failures = dict[str, str]()

    def keep(key: str, outcome: _Outcome) -> None:
        if outcome.row is None:
            failures[key] = outcome.reason
        else:
            done = {**outcome.row, "seconds": round(outcome.seconds, 1)}
            records.row(("rows", key), lambda: done)
        if outcome.reason != OUT_OF_TIME:
            on_row(key, *outcome)

    left = [key for key in _by_key(specs) if not records.has(("rows", key))]
    if workers == 1 or not left:
        for key in left:
            keep(key, _measured(subject, _by_key(specs)[key], deadline))
    else:
        assert prepare is not None
        _side_by_side(left, deadline, workers, prepare, keep)
    return {**records.document, "failures": failures}


def _by_key(specs: Sequence[Spec]) -> dict[str, Spec]:
    found = dict[str, Spec]()
    for spec in specs:
        found.setdefault(spec.key, spec)
    return found


def _measured(subject: Subject, spec: Spec, deadline: float) -> _Outcome:
    begun = time.monotonic()
    if begun > deadline:
        return _Outcome(None, OUT_OF_TIME, 0.0)
    row, reason = None, ""
    try:
        row = spec.measure(subject)
    except Exception as error:  # out of memory, a kernel's refusal: facts to be recorded
        reason = failure(error)["reason"]
    return _Outcome(row, reason, time.monotonic() - begun)


# In processes -------------------------------------------------------------------------------------

_here: tuple[Subject, Mapping[str, Spec]]


def _side_by_side(
    keys: Sequence[str],
    deadline: float,
    workers: int,
    prepare: Prepare,
    keep: Callable[[str, _Outcome], None],
) -> None:
    """Measures in processes, and keeps each row as it comes."""
    # A fork of a process that has used the device cannot use it.
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(keys))
    with concurrent.futures.ProcessPoolExecutor(count, context, _begin, (prepare,)) as pool:
        running = {pool.submit(_one, key, deadline): key for key in keys}
        try:
            for future in concurrent.futures.as_completed(running):
                try:
                    outcome = future.result()
                except concurrent.futures.BrokenExecutor as error:  # a process was killed
                    outcome = _Outcome(None, failure(error)["reason"], 0.0)
                keep(running[future], outcome)
        except BaseException:  # Ctrl-C too: what is done is in the file
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(prepare: Prepare) -> None:
    global _here
    subject, specs = prepare()
    _here = subject, _by_key(specs)


def _one(key: str, deadline: float) -> _Outcome:
    """A row, in a process that has begun. The clock is that of all processes."""
    subject, specs = _here
    return _measured(subject, specs[key], deadline)
