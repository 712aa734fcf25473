"""Measures rows into a file that can be gone on with; several at once: most of it compiles."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.evidence.rows import Spec
from benchmarks.evidence.subject import Subject
from benchmarks.suite import failure
from benchmarks.tables import OUT_OF_TIME, Result, Row
from turbojax.evaluation import Records, identity

OnRow = Callable[[str, Row | None, str, float], None]
"""Called with a row's key, its figures or None, why there are none, and the seconds it took."""


def measure(
    subject: Subject,
    specs: Sequence[Spec],
    *,
    out: Path | None,
    on_row: OnRow,
    deadline: float = float("inf"),
    workers: int = 1,
) -> Result:
    """Measures the rows that are not there yet.

    A row that fails says why under ``"failures"``, and the next run tries it again.

    Args:
      subject: what they are measured on.
      specs: the rows; of several with one key the first is measured.
      out: the file, written after every row; None to keep nothing.
      on_row: told of each row as it is done.
      deadline: of `time.monotonic`; no row is begun after it.
      workers: rows that are measured at once. What else the device does changes no figure but the
        seconds.

    Returns:
      What the file holds, and the failures of this run.

    Raises:
      ValueError: if the file holds results of something else, and what differs.
      OSError: if it cannot be read or written.
    """
    machine, dates = identity.of_machine()
    records = Records(out, {**machine, **subject.identity()}, dates)
    lock, failures = threading.Lock(), dict[str, str]()
    wanted = {spec.key: spec for spec in reversed(specs)}
    order = list(dict.fromkeys(spec.key for spec in specs))

    def one(key: str) -> None:
        begun = time.monotonic()
        if begun > deadline:
            with lock:
                failures[key] = OUT_OF_TIME
            return
        row, reason = None, ""
        try:
            row = wanted[key].measure(subject)
        except Exception as error:  # out of memory, a kernel's refusal: facts to be recorded
            reason = failure(error)["reason"]
        seconds = time.monotonic() - begun
        with lock:
            if row is None:
                failures[key] = reason
            else:
                done = {**row, "seconds": round(seconds, 1)}
                records.row(("rows", key), lambda: done)
            on_row(key, row, reason, seconds)

    left = [key for key in order if not records.has(("rows", key))]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(one, key) for key in left]
        try:
            for future in running:
                future.result()
        except BaseException:  # Ctrl-C too: what is done is in the file
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {**records.document, "failures": failures}
