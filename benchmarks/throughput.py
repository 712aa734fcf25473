"""Generated tokens per second against the batch, until memory is full: the paper's figure 7a.

`python -m benchmarks.throughput --out benchmarks/results/throughput.json`

A model of random weights decodes through each cache, batch by batch, until one does not fit; then
the largest batch that does is looked for. The time is that of decoding after the prefill, which is
measured by itself. What runs on the device runs in a process of its own.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import stored, tables
from benchmarks.plots import wide_figure
from benchmarks.suite import Shown
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_CACHES = "exact,4bit,2/4bit"
DEFAULT_BATCHES = "16,32,64,128,192,256,384,512,768,1024"
# Largest batches are looked for in steps of 8, at most this often, each try 4 % below the last.
_BATCH_MULTIPLE, _TRIES, _SHRINK = 8, 4, 0.96


class Worker:
    """A process that measures; a new one is started when the last one ended."""

    def __init__(self, settings: dict[str, Any], row_seconds: float, log: Any) -> None:
        self._settings = settings
        self._row_seconds = row_seconds
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self.machine: dict[str, Any] = {}

    def measure(self, cache: str, batch: int, prefill: bool) -> Row:
        """The row of one cache and batch; its `status` says whether there is one."""
        begun = time.perf_counter()
        answer = None
        if self._process is not None or self._start():
            answer = self._ask({"cache": cache, "batch": batch, "prefill": prefill})
        if answer is None:
            self.close()
            seconds = time.perf_counter() - begun
            note = f"the process ended or was stopped after {seconds:.0f} s; see {self._log.name}"
            return _empty_row(self._settings, cache, batch, "error", note)
        if answer["status"] == "out of memory":
            self.close()
        return answer

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.communicate("", timeout=None)

    def _start(self) -> bool:
        # Memory is what is measured here: leave little of it to others.
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95", **os.environ}
        command = [sys.executable, "-m", "benchmarks.throughput_worker", json.dumps(self._settings)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        machine = self._read()
        self.machine = machine or self.machine
        return machine is not None

    def _ask(self, job: dict[str, Any]) -> Row | None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        """The next answer; None if the process ends, or is ended for taking too long."""
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._row_seconds, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        return json.loads(line) if line else None


def _empty_row(settings: dict[str, Any], cache: str, batch: int, status: str, note: str) -> Row:
    return {
        "cache": cache,
        "batch": batch,
        "prompt": settings["prompt"],
        "new": settings["new"],
        "tokens_per_second": None,
        "step_ms": None,
        "prefill_ms_per_sequence": None,
        "cache_bytes": None,
        "status": status,
        "note": note,
    }


def sweep(
    worker: Worker, settings: dict[str, Any], cache: str, batches: list[int], deadline: float
) -> Iterator[Row]:
    """Rows of one cache: each batch until one fails, then the largest that fits."""
    rows: list[Row] = []

    def measure(batch: int) -> Row:
        if time.monotonic() > deadline:
            row = _empty_row(settings, cache, batch, "skipped", "no time left (--seconds)")
        else:
            known = next((r["prefill_ms_per_sequence"] for r in rows if _ok(r)), None)
            row = worker.measure(cache, batch, prefill=settings["prefill"] and known is None)
            _add_combined(row, known)
        rows.append(row)
        return row

    for batch in batches:
        row = measure(batch)
        yield row
        if not _ok(row):
            break
    if rows[-1]["status"] not in ("ok", "out of memory") or not settings["find_largest"]:
        return
    candidate = largest_batch(rows, worker.machine)
    for _ in range(_TRIES):
        if candidate is None or candidate <= max((r["batch"] for r in rows if _ok(r)), default=0):
            return
        row = measure(candidate)
        row["note"] = "; ".join(filter(None, [row["note"], "looked for: largest that fits"]))
        yield row
        if row["status"] != "out of memory":
            return
        candidate = int(candidate * _SHRINK) // _BATCH_MULTIPLE * _BATCH_MULTIPLE


def largest_batch(rows: list[Row], machine: dict[str, Any]) -> int | None:
    """The batch that should just fit, from the memory that the largest measured one took."""
    limit, weights = machine.get("memory_limit"), machine.get("memory_used_by_weights")
    fitting = [row for row in rows if _ok(row)]
    if not limit or weights is None or not fitting:
        return None
    row = fitting[-1]
    per_sequence = (row["cache_bytes"] + row["temporary_bytes"]) / row["batch"]
    estimate = int((limit - weights) / per_sequence)
    too_large = [row["batch"] for row in rows if row["status"] == "out of memory"]
    return min([estimate, *(batch - 1 for batch in too_large)]) // _BATCH_MULTIPLE * _BATCH_MULTIPLE


def _ok(row: Row) -> bool:
    return row["status"] == "ok"


def _add_combined(row: Row, prefill_ms: float | None) -> None:
    """Adds the rate of whole requests: prompts prefilled, then continued."""
    if not _ok(row):
        return
    if row["prefill_ms_per_sequence"] is None:
        row["prefill_ms_per_sequence"] = prefill_ms
    prefill = row["prefill_ms_per_sequence"]
    combined = None
    if prefill is not None:
        milliseconds = row["batch"] * prefill + row["new"] * row["step_ms"]
        combined = 1e3 * row["batch"] * row["new"] / milliseconds
    row["tokens_per_second_with_prefill"] = combined


def summary(rows: list[Row]) -> dict[str, Any]:
    """The best row of each cache, and its ratio to the exact cache's."""
    best: dict[str, Row] = {}
    for row in filter(_ok, rows):
        so_far = best.setdefault(row["cache"], row)
        if row["tokens_per_second"] > so_far["tokens_per_second"]:
            best[row["cache"]] = row
    exact = best.get("exact")
    return {
        cache: {
            "batch": row["batch"],
            "largest_batch": max(r["batch"] for r in rows if _ok(r) and r["cache"] == cache),
            "tokens_per_second": row["tokens_per_second"],
            "ratio_to_exact": (
                row["tokens_per_second"] / exact["tokens_per_second"] if exact else None
            ),
        }
        for cache, row in best.items()
    }


def how(settings: dict[str, Any]) -> list[str]:
    """What a reader must know about the figures, in words."""
    notes = ["random weights; greedy decoding; all sequences of one length"]
    if settings["measure_steps"]:
        notes.append(
            f"{settings['measure_steps']} steps around the middle of the continuation were timed "
            f"in place of all {settings['new']}"
        )
    if settings["fill"] == "synthetic":
        notes.append("caches were filled with random keys and values, not by a prefill")
    notes.append(
        f"prefill_ms_per_sequence is that of {settings['prefill_batch_size']} prompts at a time"
        if settings["prefill"]
        else "the prefill was not timed"
    )
    return notes


def run(arguments: argparse.Namespace, log: Any) -> dict[str, Any]:
    caches = [name.strip() for name in arguments.caches.split(",")]
    batches = sorted({int(batch) for batch in arguments.batches.split(",")})
    settings = {
        name: getattr(arguments, name)
        for name in (
            "model",
            "prompt",
            "new",
            "measure_steps",
            "fill",
            "prefill_batch_size",
            "implementation",
            "prefill",
            "find_largest",
        )
    }
    rows: list[Row] = []
    deadline = time.monotonic() + arguments.seconds
    worker = Worker(settings, arguments.row_seconds, log)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    result: dict[str, Any] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("starting", total=len(caches) * len(batches))
        for i, cache in enumerate(caches):
            bar.update(task, description=f"{cache} cache")
            for row in sweep(worker, settings, cache, batches, deadline):
                rows.append(row)
                console.print(_line(row))
                bar.advance(task)
                result = {
                    **worker.machine,
                    "settings": settings,
                    "notes": how(settings),
                    "summary": summary(rows),
                    "rows": rows,
                }
                if arguments.out is not None:
                    stored.save(arguments.out, result)
            bar.update(task, completed=(i + 1) * len(batches))
    worker.close()
    return result


def _line(row: Row) -> str:
    name = f"{row['cache']:8} batch {row['batch']:5}"
    if not _ok(row):
        return f"{name}: {row['status']} {row['note'][:120]}"
    return (
        f"{name}: {row['tokens_per_second']:10.1f} tokens/s, {row['step_ms']:8.2f} ms a step, "
        f"{row['cache_bytes'] / 2**30:.2f} GiB"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = stored.parser(__doc__.splitlines()[0], required=False)
    parser.add_argument("--model", default="llama-3-8b", help="a shape: llama-3-8b or tiny")
    parser.add_argument("--caches", default=DEFAULT_CACHES)
    parser.add_argument("--batches", default=DEFAULT_BATCHES)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=125, help="tokens to generate")
    parser.add_argument(
        "--measure-steps", type=int, help="time so many steps around the middle instead of all"
    )
    parser.add_argument("--fill", choices=("prefill", "synthetic"), default="prefill")
    parser.add_argument("--prefill-batch-size", type=int, default=8, help="prompts at a time")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false", help="do not time it")
    parser.add_argument(
        "--no-largest", dest="find_largest", action="store_false", help="only the batches given"
    )
    parser.add_argument("--implementation", help="see turbojax.models.start")
    parser.add_argument("--seconds", type=float, default=1500, help="begin no row after this")
    parser.add_argument("--row-seconds", type=float, default=300, help="stop a row after this")
    arguments = parser.parse_args(argv)
    for name in ("prompt", "new", "prefill_batch_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.measure_steps is not None and not 1 <= arguments.measure_steps <= arguments.new:
        parser.error(f"--measure-steps must be between 1 and --new={arguments.new}")
    if not all(b.strip().isdigit() and int(b) > 0 for b in arguments.batches.split(",")):
        parser.error(f"--batches {arguments.batches} must be positive numbers")
    return arguments


def main() -> None:
    arguments = parse()
    with tempfile.NamedTemporaryFile("w", prefix="throughput-", suffix=".log", delete=False) as log:
        result = run(arguments, log)
    if arguments.out is None:
        stored.save(None, result)


def throughput_table(result: Result) -> str:
    """Generation: the best throughput of each cache, and what stopped larger batches."""
    by_cache: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_cache.setdefault(row["cache"], []).append(row)
    best = {cache: _best(rows) for cache, rows in by_cache.items()}
    base = best.get("exact")
    lines = []
    for cache, row in best.items():
        stops = {r["batch"]: _stop(r) for r in by_cache[cache] if r["status"] != "ok"}
        stopped = ", ".join(f"{batch}: {stops[batch]}" for batch in sorted(stops))
        if row is None:
            lines.append([cache, "-", "-", "-", "-", stopped])
            continue
        ratio = "-"
        if base is not None:
            ratio = f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}x"
        size = row.get("cache_bytes")
        megabytes = "-" if size is None else f"{size / row['batch'] / 1e6:.1f}"
        rate = tables.number(row["tokens_per_second"], 4)
        lines.append([cache, str(row["batch"]), rate, ratio, megabytes, stopped or "-"])
    header = ["cache", "best batch", "tokens per second", "over exact", "MB per sequence"]
    return tables.table([*header, "did not run"], lines)


def _stop(row: Row) -> str:
    """Why a batch was not measured; the text of an allocator's error says no more than its kind."""
    return row["note"] if row["status"] == "skipped" else row["status"]


def _best(rows: list[Row]) -> Row | None:
    ran = (row for row in rows if row["status"] == "ok")
    return max(ran, key=lambda row: row["tokens_per_second"], default=None)


def throughput_section(name: str, result: Result) -> str:
    notes = [note[0].upper() + note[1:] for note in result.get("notes", ())]
    if settings := result.get("settings"):
        shape = f"prompts of {settings['prompt']} tokens and {settings['new']} new ones"
        notes.insert(0, f"A model of the shape {settings['model']}, {shape}")
    text = "".join(f"{note}. " for note in notes)
    source = tables.source(name, result)
    return f"{tables.picture(*PLOT)}{throughput_table(result)}\n\n{text}{source}"


# The best throughput over that of the uncompressed cache, as TurboAttention reports it for Phi-3
# Medium on an A100.
_PAPER = 2.37


def batches_table(result: Result) -> str:
    """Tokens per second by batch and cache: figure 7a as a table, and its highest points."""
    found: dict[int, dict[str, Row]] = {}
    for row in filter(_ok, result["rows"]):
        found.setdefault(row["batch"], {})[row["cache"]] = row
    caches, lines = _caches(result), []
    for batch in sorted(found):
        line = [str(batch)]
        for cache in caches:
            row = found[batch].get(cache)
            line.append("-" if row is None else tables.number(row["tokens_per_second"], 4))
        lines.append(line)
    return tables.table(["batch", *caches], lines)


def batches_section(name: str, result: Result) -> str:
    """The table, the paper's claim beside ours, and where the figures come from."""
    best = {
        cache: _best([r for r in result["rows"] if r["cache"] == cache])
        for cache in _caches(result)
    }
    rates = {cache: row["tokens_per_second"] for cache, row in best.items() if row is not None}
    said = ""
    if "exact" in rates:
        ratios = [
            f"{rate / rates['exact']:.2f}x with `{cache}`"
            for cache, rate in rates.items()
            if cache != "exact"
        ]
        here = ", ".join(ratios)
        said = f"The best over that of the exact cache: {_PAPER}x in the paper, {here} here. "
    note = "Tokens per second; where there are none, nothing was measured, or memory was full. "
    return f"{batches_table(result)}\n\n{note}{said}{tables.source(name, result)}"


def _caches(result: Result) -> list[str]:
    return list(dict.fromkeys(row["cache"] for row in result["rows"]))


PLOT = ("throughput.png", "Generation: tokens per second against the batch size")


def throughput_plot(result: Result) -> "Figure":
    """Tokens per second against the batch, one line per cache; a cross where memory ends."""
    figure = wide_figure(7)
    axes = figure.subplots()
    curves: dict[str, list[Row]] = {}
    for row in result["rows"]:
        curves.setdefault(row["cache"], []).append(row)
    for cache, rows in curves.items():
        ran = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["batch"])
        if not ran:
            continue
        batches = [row["batch"] for row in ran]
        rates = [row["tokens_per_second"] for row in ran]
        (line,) = axes.plot(batches, rates, marker="o", label=cache)
        ended = [row["batch"] for row in rows if row["status"] == "out of memory"]
        if ended:
            axes.plot(min(ended), 0, "x", color=line.get_color(), clip_on=False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Generation on {result['device']}")
    axes.set(xlabel="sequences in the batch (x: out of memory)", ylabel="tokens per second")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


SHOWN = Shown(
    ("generate", "throughput"),
    {"throughput": throughput_section, "batches": batches_section},
    {PLOT[0]: throughput_plot},
)


if __name__ == "__main__":
    main()
