"""Hostile and damaged files of every kind, within 10 seconds and 2 GiB each.

A file is opened, and then its content is what was written (or, where a format has no checksum, a
model of the same shapes), or it is refused: with a ValueError, NotImplementedError, OSError or
ImportError, in one line that names the file or the key. Nothing else comes out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 20
# How many cases of each of `hostile_kinds.KINDS`.
SLOW = {
    "configs": 1000,
    "quantized": 250,
    "tokenizers": 1000,
    "checkpoints": 500,
    "caches": 400,
    "sessions": 1500,
    "descriptions": 400,
    "weights": 300,
    "logs": 300,
    "training": 300,
    "results": 300,
    "requests": 300,
}
# Those that need few compiled programs.
QUICK = ("configs", "quantized", "tokenizers", "weights", "logs", "results", "requests")
# Of these kinds nothing may come back from a damaged file: they hold checksums.
CHECKED = ("caches", "sessions")


def fuzz(counts, seed):
    """What `hostile_worker` counts, in a process of its own."""
    settings = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "RUST_BACKTRACE": "0",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.tools.hostile_worker", str(seed)),
            *(f"{kind}={count}" for kind, count in counts.items()),
        ],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check(kind, counted, capsys):
    with capsys.disabled():
        seconds, slowest = counted["slowest"]
        # To the errors' stream: pytest-xdist shows nothing else of its processes.
        print(
            f"\nhostile {kind}: {counted['cases']:,} cases, {counted['refused']:,} refused, "
            f"{counted['loaded']:,} loaded, {len(counted['wrong'])} other; slowest {seconds:.1f} s "
            f"({slowest})",
            file=sys.stderr,
        )
    assert not counted["wrong"]
    assert counted["refused"] + counted["loaded"] == counted["cases"]
    assert counted["refused"]
    if kind in CHECKED:
        assert not counted["loaded"]


@pytest.mark.slow
def test_a_few_hostile_files_of_several_kinds(capsys):
    for kind, counted in fuzz(dict.fromkeys(QUICK, 10), SEED + 1).items():
        check(kind, counted, capsys)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", SLOW)
def test_hostile_files_are_refused_in_one_line(kind, capsys):
    counted = fuzz({kind: SLOW[kind]}, SEED)[kind]
    assert counted["cases"] >= SLOW[kind]
    check(kind, counted, capsys)
