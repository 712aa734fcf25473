"""Loading a checkpoint of a real size: seconds, and how much memory it takes at most.

A checkpoint of random weights is written to a temporary folder (`TMPDIR` says where). Each row
loads it in a process of its own, so that peaks are its own. Files "in the page cache" were read
just before: the time is the loader's and not the disk's; "on disk" they are dropped from it first.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.suite import Ceilings, Latest, Suite, attempt
from benchmarks.suites.loading import tables
from benchmarks.suites.loading.weights import begin_of, weights
from benchmarks.tables import Row
from turbojax import models
from turbojax.models.families.tensors import checkpoint_tensors

# Set before jax starts: this process must leave the device's memory to others.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

METHODS = ("read", "load_decoder", "load", "naive")
_BYTES = 2
_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
      method: of `METHODS`.
      files: ``"memory"``, in the page cache, or ``"disk"``.
    """

    method: str
    files: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A checkpoint in bfloat16: a model of `models.SHAPES`, in several files."""

    model: str
    shards: int

    def name(self, case: Case) -> str:
        """``loading/llama-3-8b/memory/load_decoder``."""
        return f"{tables.OPERATION}/{self.model}/{case.files}/{case.method}"

    @property
    def cases(self) -> list[Case]:
        """The disk last: it takes as long as the disk does."""
        memory = [Case(method, "memory") for method in METHODS]
        return [*memory, Case("read", "disk"), Case("load_decoder", "disk")]

    @property
    def model_bytes(self) -> int:
        """Of all tensors."""
        return models.SHAPES[self.model].num_parameters * _BYTES


def _groups() -> list[Group]:
    return [Group("llama-3-8b", 4)]


def _quick_groups() -> list[Group]:
    """A tiny model: whether everything runs, and nothing about speed."""
    return [Group("tiny", 2)]


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
    with tempfile.TemporaryDirectory(prefix="turbojax-loading-") as name:
        written = Latest(functools.partial(_written, folder=Path(name)))
        for group, case in rows:
            one = functools.partial(_measure, group, case, written)
            attempt(describe(group, case), one, on_row, deadline)


def _written(group: Group, folder: Path) -> Path:
    """The folder of the group's checkpoint, which is written there."""
    write(group, folder)
    return folder


def _measure(group: Group, case: Case, written: Latest) -> Row:
    return measure(group, case, written.of(group))


def describe(group: Group, case: Case) -> Row:
    """What is known of a row before it runs."""
    specs = checkpoint_tensors(models.SHAPES[group.model])
    return {
        "name": group.name(case),
        "operation": tables.OPERATION,
        "label": f"{group.model}/{case.files}",
        "method": case.method,
        "files": case.files,
        "model": group.model,
        "shards": group.shards,
        "model_bytes": group.model_bytes,
        "largest_tensor_bytes": max(int(np.prod(spec.shape)) for spec in specs) * _BYTES,
    }


def write(group: Group, folder: Path) -> None:
    """Writes the checkpoint: `config.json`, the shards and their index."""
    begun = time.monotonic()
    config = models.SHAPES[group.model]
    numbers = weights()
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(group.shards)]
    done = 0
    for spec in checkpoint_tensors(config):
        shards[min(done * group.shards // group.model_bytes, group.shards - 1)].append(
            (spec.name, spec.shape)
        )
        done += int(np.prod(spec.shape)) * _BYTES
    places = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{group.shards:05d}.safetensors"
        _write_shard(folder / file, tensors, numbers)
        places |= {name: file for name, _ in tensors}
    index = {"metadata": {"total_size": done}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    hf = {**config.to_hf(), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    seconds = time.monotonic() - begun
    print(f"wrote {done / 1e9:.1f} GB in {seconds:.0f} s", file=sys.stderr, flush=True)


def _write_shard(
    path: Path, tensors: list[tuple[str, tuple[int, ...]]], numbers: np.ndarray
) -> None:
    header, place = {}, 0
    for name, shape in tensors:
        end = place + int(np.prod(shape)) * _BYTES
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors:
            left, begin = int(np.prod(shape)), begin_of(name)
            while left:
                part = numbers[begin : begin + left]
                file.write(part.data)
                left, begin = left - part.size, 0


def measure(group: Group, case: Case, folder: Path) -> Row:
    """Loads in a process of its own.

    Raises:
      RuntimeError: with its last words, if it fails.
    """
    files = sorted(folder.glob("*.safetensors"))
    _to_disk(files) if case.files == "disk" else _to_memory(files)
    # The other process allocates memory as it does by default.
    environment = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT}
    command = [sys.executable, "-m", "benchmarks.suites.loading.worker"]
    done = subprocess.run(
        [*command, case.method, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[3],
        timeout=_SECONDS,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = found["seconds"]
    rate = group.model_bytes / seconds / 1e9
    return {"status": "ok", "us": 1e6 * seconds, "gigabytes_per_second": rate, **found}


def _to_memory(files: list[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 26):
                pass


def _to_disk(files: list[Path]) -> None:
    """Drops the files from the page cache.

    Raises:
      NotImplementedError: if this system cannot.
    """
    if not hasattr(os, "posix_fadvise"):
        raise NotImplementedError("dropping files from the page cache needs posix_fadvise")
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `speedup_over`: reading the files alone, and the naive way."""
    seconds = {(row["label"], row["method"]): row.get("seconds") for row in rows}
    found = []
    for row in rows:
        if row["status"] == "ok":
            bases = {name: seconds.get((row["label"], name)) for name in ("naive", "read")}
            over = {name: base / row["seconds"] for name, base in bases.items() if base}
            row = {**row, "speedup_over": over}
        found.append(row)
    return found


SUITE = Suite(
    name="loading",
    groups=_groups,
    quick_groups=_quick_groups,
    run=run,
    with_ratios=with_ratios,
    one_line=tables.one_line,
    formats=None,  # the device belongs to the processes that load
    environment=_ENVIRONMENT,
    tables=tables.TABLES,
    plots=tables.PLOTS,
)
