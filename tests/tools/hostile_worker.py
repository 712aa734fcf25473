"""Opens hostile files one after the other, within limits of time and memory, and counts.

``python hostile_worker.py SEED KIND=COUNT...`` in a process of its own: a limit on memory holds for
the whole process, and a file may bring it down. Prints a JSON object; what is wrong ends up there.
"""

import contextlib
import faulthandler
import json
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SECONDS = 10
BYTES = 2 * 2**30
REFUSALS = (ValueError, NotImplementedError, OSError, ImportError)
LONGEST_MESSAGE = 1000


class TooLongError(BaseException):
    """Not an Exception: nothing that catches those shall catch it."""


def limit_memory() -> None:
    """Lets the process have `BYTES` more data than it has now."""
    status = Path("/proc/self/status").read_text()
    used = next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + BYTES, resource.RLIM_INFINITY))


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    # A library that does not come back takes the process with it.
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def complaint(error: BaseException, words: Sequence[str]) -> str | None:
    """What is wrong with an error that a hostile file caused, if anything."""
    text = str(error)
    if not isinstance(error, REFUSALS) or isinstance(error, RecursionError):
        return f"{type(error).__name__}: {text[:300]}"
    if not text.isprintable() or len(text) > LONGEST_MESSAGE:
        return f"no single line: {text[:300]!r}, {len(text)} characters"
    if not any(word in text for word in words):
        return f"names none of {words}: {text[:300]}"
    return None


def run(good: Path, cases: Sequence[Any], use: Callable[[Path], object]) -> dict[str, Any]:
    """Applies every case to a copy of a good folder, and uses it.

    Args:
      good: the folder.
      cases: see `hostile_cases.Case`.
      use: opens the files; what it returns is dropped.
    """
    result: dict[str, Any] = {"cases": len(cases), "refused": 0, "loaded": 0, "wrong": {}}
    slowest = (0.0, "")
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="hostile") as temporary:
            folder = Path(temporary) / "folder"
            shutil.copytree(good, folder)
            case.apply(folder)
            print(case.name, file=sys.stderr)
            start = time.perf_counter()
            try:
                with limited_time():
                    use(folder)
                result["loaded"] += 1
            except BaseException as error:
                wrong = complaint(error, case.words)
                if wrong is None:
                    result["refused"] += 1
                else:
                    result["wrong"][case.name] = wrong
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
            slowest = max(slowest, (time.perf_counter() - start, case.name))
    return {**result, "slowest": slowest}


def main() -> None:
    """Runs some of `hostile_kinds.KINDS`."""
    from tests.tools import hostile_kinds

    warnings.simplefilter("error")
    results = {}
    for argument in sys.argv[2:]:
        kind, _, count = argument.partition("=")
        with tempfile.TemporaryDirectory(prefix="good") as temporary:
            make = hostile_kinds.KINDS[kind]
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
            good, cases, use = make(Path(temporary) / "good", int(count), int(sys.argv[1]))
            use(good)  # compiles, and must work
            limit_memory()
            results[kind] = run(good, cases, use)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
