"""Kills processes that write, at random moments, and checks that what they wrote is old or new.

A script: `python kill_writers.py FOLDER KILLS SEED` prints how often what was seen, as JSON. A
process that has loaded everything forks writers, which takes a millisecond; jax has not started
its threads there.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from turbojax import _writing
from turbojax.app.serve import results as serve_results
from turbojax.caches import stored_file as storage
from turbojax.models.checkpoint import folder as _folder


def tensors(kind):
    """Of one size, each filled with its checkpoint's number."""
    return [
        _folder.Tensor(
            f"t{i}", np.dtype(np.float32), (64, 64), lambda: np.full((64, 64), kind, "f")
        )
        for i in range(6)
    ]


def write_one_file(folder, kind):
    _folder.write(folder, {"kind": kind}, tensors(kind))


def write_one_or_many(folder, kind):
    limit = 1 << 30 if kind % 2 else 40_000
    companion = folder.parent / f"companion{kind % 2}"
    companion.write_text(str(kind % 2))
    _folder.write(folder, {"kind": kind}, tensors(kind), limit, {"more/tokens": companion})


def read_checkpoint(folder):
    def read(place):
        kind = _folder.read_config(place)["kind"]
        found = _folder.stored_tensors(place)
        assert len(found) == 6
        for stored in found.values():
            assert (stored.read() == kind).all(), f"{kind}: a mixture"
        return kind

    return _folder.steady(folder, read)


def write_stored(folder, kind):
    storage.write(folder / "session", {"kind": kind}, {"x": np.full((64, 64), kind, "f")})


def read_stored(folder):
    with storage.open_file(folder / "session") as file:
        assert (file.read("x") == file.description["kind"]).all()
        return file.description["kind"]


def write_log(folder, kind):
    _writing.write_text(folder / "log.json", json.dumps([kind] * 10_000))


def read_log(folder):
    first, *rest = json.loads((folder / "log.json").read_text())
    assert rest == [first] * 9_999
    return first


def write_result(folder, kind):
    """The next line of results of `turbojax serve`; the first drops those before."""
    path, text = folder / "results.jsonl", "x" * 5_000
    with serve_results.open_results(path, resume=kind > 0, overwrite=kind == 0) as results:
        results.begin()
        line = {"id": kind, "request": str(kind), "finish_reason": "length", "text": text}
        results.write(json.dumps(line))


def read_results(folder):
    path = folder / "results.jsonl"
    with serve_results.open_results(path, resume=True, overwrite=False) as results:
        assert results.held == {i: str(i) for i in range(len(results.held))}
        return len(results.held) - 1


WRITERS = {
    "checkpoint": (write_one_file, read_checkpoint),
    "checkpoint of one file or many": (write_one_or_many, read_checkpoint),
    "session": (write_stored, read_stored),
    "log": (write_log, read_log),
    "results of serve": (write_result, read_results),
}


def kill_one(folder, write, read, seconds):
    """The numbers of the last checkpoint that was whole, and of what is found after the kill."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for kind in range(1, 1_000_000):
                write(folder, kind)
                os.write(send, kind.to_bytes(4, "little"))
        finally:
            os._exit(1)
    os.close(send)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = 0
    with os.fdopen(receive, "rb") as pipe:
        written = pipe.read()
    if written:
        done = int.from_bytes(written[-4:], "little")
    return done, read(folder)


def main(folder, kills, seed):
    rng, counts = random.Random(seed), {}
    for name, (write, read) in WRITERS.items():
        seen = {"old": 0, "new": 0}
        place = folder / name
        place.mkdir(parents=True)
        for _ in range(kills):
            write(place, 0)
            done, found = kill_one(place, write, read, rng.uniform(0.0, 0.03))
            assert found in (done, done + 1), f"{name}: {found} after {done}"
            seen["old" if found == done else "new"] += 1
        counts[name] = seen
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
