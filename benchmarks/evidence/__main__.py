"""Measures the tables of the evidence: one command for all, which can be run again to go on."""

import argparse
import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from benchmarks import stored
from benchmarks.evidence.catalogue import BY_WEIGHT, TABLES, prepared
from benchmarks.evidence.measuring import measure
from benchmarks.evidence.subject import EMBEDDED
from benchmarks.tables import Row

_NO_TUNING = "--xla_gpu_autotune_level"

LETTERS = tuple(table.letter for table in TABLES)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.evidence", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file; rows that it has are kept")
    parser.add_argument(
        "--tables",
        help=f"letters, with commas between, in the order to measure in; {','.join(LETTERS)} by "
        f"default, of other models than the embedded one {','.join(BY_WEIGHT)}",
    )
    parser.add_argument(
        "--model", default=EMBEDDED, help="embedded, smollm2, a GGUF file, or a folder"
    )
    parser.add_argument("--dtype", help="float32 or bfloat16; by default that of the device")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row later")
    parser.add_argument(
        "--workers", type=int, help="processes that measure at once: by default 6 on a GPU, else 1"
    )
    parser.add_argument("--quick", action="store_true", help="a small sample of a cut model")
    parser.add_argument("--list", action="store_true", help="only print the rows' keys")
    given = parser.parse_args(arguments)
    every = LETTERS if given.model == EMBEDDED else BY_WEIGHT
    given.tables = tuple(dict.fromkeys(given.tables.split(","))) if given.tables else every
    if unknown := [x for x in given.tables if x not in LETTERS]:
        parser.error(f"--tables {','.join(unknown)} must be of {','.join(LETTERS)}")
    if given.workers is None:
        given.workers = 1 if jax.default_backend() == "cpu" else 6
    if given.workers < 1:
        parser.error(f"--workers {given.workers} must be at least 1")
    return given


def one_line(key: str, row: Row | None, reason: str, seconds: float) -> str:
    if row is None:
        return f"{key}: {reason}"
    parts = [f"{seconds:.1f} s"]
    if row.get("cost") is not None:
        parts.insert(0, f"{row['cost']:+.5f}")
    if "cache_bytes" in row:
        parts.insert(1, f"{row['exact_cache_bytes'] / row['cache_bytes']:.2f}x smaller")
    if "density" in row:
        parts.insert(1, f"density {row['density']:.3f}")
    return f"{key}: {', '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    # Both are read when jax first asks for the device. Processes share its memory; and each would
    # choose other ways to multiply matrices, which quantized weights and their rows would show.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ.get("XLA_FLAGS", "")
    if _NO_TUNING not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_NO_TUNING}=0".strip()
    given = parse(arguments)
    deadline = time.monotonic() + given.seconds
    prepare = functools.partial(prepared, given.model, given.dtype, given.tables, quick=given.quick)
    subject, specs = prepare()
    if given.list:
        print("\n".join(dict.fromkeys(spec.key for spec in specs)))
        return
    console = Console(stderr=True)
    done, total = 0, len({spec.key for spec in specs})

    def on_row(key: str, row: Row | None, reason: str, seconds: float) -> None:
        nonlocal done
        done += 1
        line = f"{done}/{total} {one_line(key, row, reason, seconds)}"
        console.print(line, highlight=False, markup=False)

    try:
        result = measure(
            subject,
            specs,
            out=given.out,
            on_row=on_row,
            deadline=deadline,
            workers=given.workers,
            prepare=prepare,
        )
    except KeyboardInterrupt:
        kept = "" if given.out is None else f"; {given.out} has what was done, and is gone on with"
        sys.exit(f"interrupted{kept}")
    stored.save(given.out, result)


if __name__ == "__main__":
    main()
