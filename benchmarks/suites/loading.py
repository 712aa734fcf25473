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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import plots, tables
from benchmarks.loading_worker import begin_of, weights
from benchmarks.suite import Asked, Latest, Measure, Rows, Suite, each, joined, over_baselines
from benchmarks.tables import Result, Row
from turbojax import models
from turbojax.models.families.tensors import checkpoint_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Set before jax starts: this process must leave the device's memory to others.
_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

OPERATION = "loading"
METHODS = {
    "read": "reading the files alone",
    "load_decoder": "`load_decoder`",
    "load": "`load`",
    "naive": "all shards, then `jnp.stack`",
}
"""Ways to load, as tables call them."""
PLOT = (
    "loading.png",
    "Loading a checkpoint: memory held at most, in units of the model's size",
)
_FILES = {"memory": "in the page cache", "disk": "on disk"}
_BYTES = 2
_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One row."""

    method: str
    files: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A checkpoint in bfloat16: a model of `models.SHAPES`, in several files."""

    model: str
    shards: int

    def name(self, case: Case) -> str:
        """``loading/llama-3-8b/memory/load_decoder``."""
        return joined(OPERATION, self.model, case.files, case.method)

    def describe(self, case: Case) -> Row:
        specs = checkpoint_tensors(models.SHAPES[self.model])
        return {
            "operation": OPERATION,
            "label": f"{self.model}/{case.files}",
            "method": case.method,
            "files": case.files,
            "model": self.model,
            "shards": self.shards,
            "model_bytes": self.model_bytes,
            "largest_tensor_bytes": max(int(np.prod(spec.shape)) for spec in specs) * _BYTES,
        }

    @property
    def cases(self) -> list[Case]:
        """The disk last: it takes as long as the disk does."""
        memory = [Case(method, "memory") for method in METHODS]
        return [*memory, Case("read", "disk"), Case("load_decoder", "disk")]

    @property
    def model_bytes(self) -> int:
        return models.SHAPES[self.model].num_parameters * _BYTES


def run(rows: Rows, *asked: Any, **options: Any) -> None:
    """See `benchmarks.suite.Run`; everything runs once."""
    with tempfile.TemporaryDirectory(prefix="turbojax-loading-") as name:
        folder = Path(name)

        def begin(rows: Rows, asked: Asked) -> Measure:
            del rows, asked
            written = Latest(functools.partial(write, folder=folder))
            return lambda group, case: measure(group, case, written.of(group))

        each(begin)(rows, *asked, **options)


def write(group: Group, folder: Path) -> Path:
    """Writes the checkpoint into the folder: `config.json`, the shards and their index."""
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
    return folder


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
    files = sorted(folder.glob("*.safetensors"))
    _to_disk(files) if case.files == "disk" else _to_memory(files)
    # The other process allocates memory as it does by default.
    environment = {k: v for k, v in os.environ.items() if k not in _ENVIRONMENT}
    command = [sys.executable, "-m", "benchmarks.loading_worker"]
    done = subprocess.run(
        [*command, case.method, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
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
    if not hasattr(os, "posix_fadvise"):
        raise NotImplementedError("dropping files from the page cache needs posix_fadvise")
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# What the docs show -------------------------------------------------------------------------------


def _times(key: str) -> tables.Cell:
    return lambda row: "-" if row.get(key) is None else f"{row[key] / row['model_bytes']:.3f}x"


_NAMES = (
    ("checkpoint", lambda row: row["model"]),
    ("files", lambda row: _FILES[row["files"]]),
    ("by", lambda row: METHODS[row["method"]]),
)
_PEAKS = {"peak_device_bytes": "most on the device", "peak_host_bytes": "most on the host"}
_COLUMNS = (
    ("seconds", tables.shown_as("seconds", "{:.2f}")),
    *tables.over({"naive": "over all shards"}),
    ("GB/s", tables.shown_as("gigabytes_per_second", "{:.2f}")),
    *((title, _times(key)) for key, title in _PEAKS.items()),
    ("largest tensor", _times("largest_tensor_bytes")),
)


def loading_table(result: Result) -> str:
    return tables.operation_table(result, OPERATION, _NAMES, _COLUMNS)


def _note(result: Result) -> str:
    row = result["rows"][0]
    return (
        f"A checkpoint of {row['model_bytes'] / 1e9:.1f} GB in {row['shards']} shards, bfloat16; "
        "memory in units of it. Each row runs in a process of its own. Host memory is what the "
        "process itself allocates, above what it had before, without the pages of mapped files. "
    )


def loading_bars(result: Result) -> plots.Ratios:
    """By what is counted and way to load: the peak over the model's size, and seconds."""
    groups: plots.Ratios = {}
    for row in tables.finished(result, OPERATION):
        if row["files"] != "memory" or row["method"] == "read":
            continue
        for key, place in _PEAKS.items():
            if row.get(key) is not None:
                over = row[key] / row["model_bytes"]
                bar = (over, f"{over:.2f}x, {row['seconds']:.1f} s")
                groups.setdefault(place, {})[METHODS[row["method"]].replace("`", "")] = bar
    return groups


def memory_plot(result: Result) -> "Figure":
    row = result["rows"][0]
    title = f"Loading {row['model']}, {row['model_bytes'] / 1e9:.1f} GB, on {result['device']}"
    bars = loading_bars(result)
    return plots.of_ratios(
        bars, title, "times the checkpoint's size", width=7, bar=0.25, margin=0.35
    )


SUITE = Suite(
    name="loading",
    groups=lambda: [Group("llama-3-8b", 4)],
    quick_groups=lambda: [Group("tiny", 2)],
    run=run,
    # Reading the files alone, and the naive way.
    with_ratios=over_baselines({OPERATION: ("naive", "read")}, "method", figure="seconds"),
    formats=None,  # the device belongs to the processes that load
    environment=_ENVIRONMENT,
    tables={OPERATION: tables.section(loading_table, plot=PLOT, note=_note)},
    plots={PLOT[0]: memory_plot},
)
