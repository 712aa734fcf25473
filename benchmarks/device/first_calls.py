"""What the first calls cost: prompts of several lengths, a served request, and Ctrl-C meanwhile.

`python -m benchmarks.device.first_calls --out first_calls.json --before OTHER_TREE` runs on any
device; OTHER_TREE holds another version of `turbojax` and `pallas_kernels`, which is measured in
the same run. Each measurement is a process of its own, without programs of an earlier one:

- generate: random weights of a named shape, one call of `models.generate` for each prompt length,
  then all of them again. Programs are counted by jax's own events.
- serve: one request to the embedded model through `turbojax serve`, without kept programs and with
  those of the run before: seconds to its first token.
- interrupts: SIGINT to `turbojax generate` while it compiles: seconds to its end, and exit code.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import stored, tables
from benchmarks.suite import Shown
from benchmarks.suites.families import CACHES as CACHE_NAMES
from benchmarks.tables import Result
from turbojax._environment import environment

LENGTHS = tuple(range(520, 1000, 40))  # a chat that grows by 40 tokens a turn
NEW_TOKENS = 32

_GENERATE = """
import dataclasses, json, sys, time
import jax, numpy as np
from turbojax import models
from turbojax.models.shapes import SHAPES

compiled = [0]

def count(name, seconds, **_):
    compiled[0] += name == "/jax/core/compile/backend_compile_duration"

jax.monitoring.register_event_duration_secs_listener(count)
shape, layers, cache, new, *lengths = json.loads(sys.argv[1])
config = dataclasses.replace(SHAPES[shape], num_layers=layers, max_length=2048)
model = models.random_decoder(config)
jax.block_until_ready(jax.tree.leaves(model))
kind = models.cache_by_name(cache, model.config.num_kv_heads)
rows = []
for call in ("first", "again"):
    for length in lengths:
        tokens = np.random.default_rng(length).integers(0, 500, (1, length)).astype(np.int32)
        before, begun = compiled[0], time.perf_counter()
        np.asarray(models.generate(model, tokens, max_new_tokens=new, cache=kind))
        seconds = round(time.perf_counter() - begun, 4)
        programs = compiled[0] - before
        rows.append({"call": call, "prompt": length, "seconds": seconds, "programs": programs})
print(json.dumps(rows))
"""


def generate(tree: Path, shape: str, layers: int, cache: str) -> dict[str, Any]:
    """Calls of `models.generate` of the version in a tree."""
    arguments = json.dumps([shape, layers, cache, NEW_TOKENS, *LENGTHS])
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, arguments],
        cwd=tree,  # which Python looks through first
        env={**os.environ, "PYTHONPATH": _path(tree)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    rows = json.loads(done.stdout.splitlines()[-1])
    first = [row for row in rows if row["call"] == "first"]
    again = [row for row in rows if row["call"] == "again"]
    return {
        "programs": sum(row["programs"] for row in first),
        "programs_again": sum(row["programs"] for row in again),
        "seconds": round(sum(row["seconds"] for row in first), 3),
        "seconds_again": round(sum(row["seconds"] for row in again), 3),
        "calls": rows,
    }


def serve(programs: Path) -> float:
    """Seconds to the first token of one request."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = folder / "requests.jsonl"
        requests.write_text(
            json.dumps({"prompt": "import re\n\n\ndef ", "max_new_tokens": 8}) + "\n"
        )
        out = folder / "results.jsonl"
        subprocess.run(
            [sys.executable, "-m", "turbojax", "serve", str(requests), "--out", str(out)],
            env={**os.environ, "PYTHONPATH": _path(Path.cwd()), "XDG_CACHE_HOME": str(programs)},
            capture_output=True,
            check=True,
        )
        return float(json.loads(out.read_text())["first_token_seconds"])


def interrupt(shape: str, delay: float) -> dict[str, Any]:
    """What Ctrl-C does to a command that compiles since so many seconds."""
    command = ["generate", "--random-weights", shape, "--no-compilation-cache"]
    process = subprocess.Popen(
        [sys.executable, "-m", "turbojax", *command],
        env={**os.environ, "PYTHONPATH": _path(Path.cwd()), "JAX_LOG_COMPILES": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Compiling jit(run_prompts)" in line or "Compiling run_prompts" in line:
            break
    time.sleep(delay)
    begun = time.perf_counter()
    process.send_signal(signal.SIGINT)
    lines = process.stderr.read().splitlines()
    code = process.wait()
    return {
        "delay": delay,
        "seconds": round(time.perf_counter() - begun, 3),
        "exit_code": code,
        "last_line": lines[-1] if lines else "",
    }


def _path(tree: Path) -> str:
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--before", type=Path, help="a tree with another version")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=8, help="of the model for generate")
    parser.add_argument("--caches", nargs="+", default=["exact"])
    arguments = parser.parse_args()
    trees = {"now": Path.cwd()}
    if arguments.before is not None:
        trees["before"] = arguments.before.absolute()
    result: dict[str, Any] = {
        **environment(),
        "commit": os.environ.get("TURBOJAX_COMMIT"),
        "shape": arguments.shape,
        "generate_layers": arguments.layers,
        "prompts": LENGTHS,
        "new_tokens": NEW_TOKENS,
    }
    with tempfile.TemporaryDirectory() as name:
        seconds = [serve(Path(name)) for _ in range(3)]
    result["serve"] = {"cold": seconds[0], "kept": statistics.median(seconds[1:])}
    _save(arguments.out, result)
    result["interrupts"] = [interrupt(arguments.shape, delay) for delay in (0.1, 1.0, 3.0)]
    _save(arguments.out, result)
    for cache in arguments.caches:
        rows = result.setdefault("generate", {}).setdefault(cache, {})
        for name, tree in trees.items():
            rows[name] = generate(tree, arguments.shape, arguments.layers, cache)
            _save(arguments.out, result)


def _save(path: Path, result: dict[str, Any]) -> None:
    stored.save(path, result)
    print(f"{path}: {', '.join(result)}", file=sys.stderr, flush=True)


def first_calls_section(name: str, result: Result) -> str:
    """Programs and seconds of one call for each prompt length, before and now; a served request."""
    lines = []
    for cache, versions in result["generate"].items():
        before = versions.get("before")
        for label, found in versions.items():
            ratio = tables.times(before and before["seconds"] / found["seconds"])
            lines.append(
                [
                    CACHE_NAMES[cache],
                    {"now": "rounded up", "before": "one by one"}[label],
                    str(found["programs"]),
                    f"{found['seconds']:.1f}",
                    ratio,
                    f"{found['seconds_again']:.1f}",
                ]
            )
    header = ["cache", "sizes", "programs", "seconds", "speed", "the same calls again"]
    prompts, served = result["prompts"], result["serve"]
    slowest = max(row["seconds"] for row in result["interrupts"])
    calls = (
        f"{len(prompts)} calls of `models.generate`, prompts of {prompts[0]} to {prompts[-1]} "
        f"tokens and {result['new_tokens']} new ones, {result['generate_layers']} layers of "
        f"{result['shape']}, with nothing compiled before. "
    )
    commands = (
        "`turbojax serve` gave the first token of the embedded model after "
        f"{served['cold']:.1f} s without kept programs, and after {served['kept']:.1f} s with "
        "those of an earlier run. Ctrl-C while `turbojax generate` compiled for the whole model "
        f"ended it within {slowest:.1f} s. "
    )
    table = tables.table(header, lines)
    return f"{table}\n\n{calls}{commands}{tables.source(name, result)}"


SHOWN = Shown(("first_calls",), {"first calls": first_calls_section})


if __name__ == "__main__":
    main()
