"""What splitting costs on many GPUs, and where it stops to pay: a model of times.

Fitted to the rows of the suite `parallel`: the time of a collective is a latency and its bytes over
a bandwidth, that of decoding one sequence a constant and its tokens times another, that of a causal
prompt its tokens squared times one; of a step of a model, the part that more GPUs do not shorten.
What two GPUs of one host cannot show is assumed, and stands here by name.

The model counts what a strategy must do one thing after the other, and takes the work of each
device as even. So it is too good where devices wait for each other for other reasons.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import plots, tables
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT = ("parallel_costs.png", "Times the speed of one GPU by the number of GPUs, by a cost model")
COUNTS = (8, 64, 1024)
CONTEXTS = {"128k": 2**17, "1M": 2**20, "10M": 10 * 2**20}
LEAST_OF_DOUBLING = 1.5
"""Twice the GPUs pay where they are this many times as fast."""

# Assumed: hosts of 8 GPUs, and between hosts 400 Gbit/s for each GPU, of which 90 % are reached.
HOST = 8
NETWORK_GIGABYTES = 45.0
HOP, NETWORK_HOP = 1.5, 5.0
"""Microseconds more of a collective for each doubling of its GPUs, within a host and beyond."""
TRAINING_TFLOPS = 400.0
"""Of a GPU's products in training, in 16 bits."""

# Llama-3-8B's attention and layers, which the suite measures.
HEADS, KV_HEADS, CHANNELS, LAYERS, WIDTH, VOCABULARY = 32, 8, 128, 32, 4096, 128256


@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of collective between two GPUs of one host.

    Attributes:
      latency: microseconds, however few bytes there are.
      gigabytes: a second.
    """

    latency: float
    gigabytes: float

    def time(self, size: float, devices: int, *, to_neighbours: bool = False) -> float:
        """Microseconds for `size` bytes that each device sends, between so many devices."""
        inside = 0.0 if to_neighbours else math.log2(max(min(devices, HOST) / 2, 1))
        outside = math.log2(max(devices / HOST, 1))
        hops = HOP * inside + NETWORK_HOP * (min(outside, 1) if to_neighbours else outside)
        rate = self.gigabytes if devices <= HOST else min(self.gigabytes, NETWORK_GIGABYTES)
        return self.latency + hops + size / rate / 1e3


def fit(rows: Sequence[Row], kind: str) -> Link:
    """Latency and bandwidth of a collective, by least squares of relative errors."""
    found = [(row["bytes"], row["us"]) for row in rows if _is_ok(row) and row.get("kind") == kind]
    if len({size for size, _ in found}) < 2:
        raise ValueError(f"collective {kind!r} needs times of two sizes, has {found}")
    latency, per_byte = _line(found)
    return Link(latency, 1e-3 / per_byte)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line ``a + b x`` through times, by least squares of relative errors, neither below 0."""
    x, y = np.array(points, np.float64).T
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)
    if a < 0:
        a, b = 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))
    return float(a), float(b)


def _is_ok(row: Row) -> bool:
    return row["status"] == "ok"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times in microseconds.

    Attributes:
      gather: of an all-gather.
      reduce: of an all-reduce.
      permute: of a collective permutation.
      decode: a constant, and what a token more costs, of decoding one sequence on one GPU.
      prompt: what a causal prompt costs on one GPU, over its tokens squared.
      step: a step of 16 sequences of a whole model on one GPU.
      fixed: the share of a step that more GPUs do not shorten, as two show it.
    """

    gather: Link
    reduce: Link
    permute: Link
    decode: tuple[float, float]
    prompt: float
    step: float
    fixed: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Costs":
        gather, reduce, permute = (
            fit(rows, kind) for kind in ("all-gather", "all-reduce", "collective-permute")
        )
        decode = [
            (row["tokens"], row["us"])
            for row in rows
            if _is_ok(row) and row["devices"] == 1 and _is(row, "decode-sequence/4bit")
        ]
        if len(decode) < 2:
            raise ValueError(f"decoding one sequence needs two contexts, has {decode}")
        [prompt] = [(r["tokens"], r["us"]) for r in _of(rows, "prefill", 1)][:1] or [(1, math.nan)]
        one, two = (
            next((row["us"] for row in _of(rows, "step/bf16/paged", n)), math.nan) for n in (1, 2)
        )
        costs = cls(gather, reduce, permute, _line(decode), prompt[1] / prompt[0] ** 2, one, 0.0)
        # two = one * (fixed + (1 - fixed) / 2) + exchanges
        fixed = 2 * (two - costs.exchanges(2)) / one - 1
        return dataclasses.replace(costs, fixed=float(np.clip(fixed, 0, 1)))

    def exchanges(self, devices: int) -> float:
        """What a step of 16 sequences exchanges: two sums a layer, one of embeddings, logits."""
        batch = 16
        sums = (2 * LAYERS + 1) * self.reduce.time(
            2 * (devices - 1) / devices * 2 * batch * WIDTH, devices
        )
        logits = 4 * batch * VOCABULARY * (devices - 1) / devices
        return sums + self.gather.time(logits, devices)

    def decode_sequence(self, tokens: int, devices: int) -> float:
        """A query attends to the tokens of one sequence, which are split; parts are gathered."""
        constant, each = self.decode
        parts = 4 * HEADS * (CHANNELS + 1) * (devices - 1)
        exchange = 0.0 if devices == 1 else self.gather.time(parts, devices)
        return constant + each * tokens / devices + exchange

    def ring(self, tokens: int, devices: int) -> float:
        """A causal prompt whose keys travel, as codes of 8 bits, while devices attend."""
        work = self.prompt * tokens**2 / devices
        if devices == 1:
            return work
        size = 2 * KV_HEADS * CHANNELS * tokens / devices
        exchange = self.permute.time(size, devices, to_neighbours=True)
        return work + (devices - 1) * max(exchange - work / devices, 0.0)

    def heads(self, tokens: int, devices: int) -> float:
        """The same with heads for tokens, and back: two exchanges of everything."""
        if devices > KV_HEADS:
            return math.nan
        work = self.prompt * tokens**2 / devices
        if devices == 1:
            return work
        size = 2 * 2 * (HEADS + KV_HEADS) * CHANNELS * tokens / devices * (devices - 1) / devices
        return work + 2 * self.permute.time(size / 2, devices)

    def tensor(self, tokens: int, devices: int) -> float:
        """A step of a model whose heads and hidden sizes are split; `tokens` are those measured."""
        del tokens
        if devices > KV_HEADS:
            return math.nan
        work = self.step * (self.fixed + (1 - self.fixed) / devices)
        return work if devices == 1 else work + self.exchanges(devices)

    def least_tokens(self, devices: int) -> float:
        """Tokens of a training step for each GPU, below which FSDP waits for weights.

        A weight is gathered twice in 16 bits, and its gradient summed in 32: 8 bytes. A token is 6
        operations of it.
        """
        seconds = self.gather.time(8e9, devices) / 1e6
        return seconds / (6 * 1e9 / (TRAINING_TFLOPS * 1e12))


def _is(row: Row, label: str) -> bool:
    name: str = row["name"]
    return name.startswith(f"parallel/{label}/")


def _of(rows: Sequence[Row], label: str, devices: int) -> list[Row]:
    return [x for x in rows if _is_ok(x) and x["devices"] == devices and _is(x, label)]


Time = Callable[[int, int], float]
"""Microseconds of so many tokens on so many devices; NaN where they cannot be split so."""


def strategies(costs: Costs) -> dict[str, tuple[Time, tuple[str, ...]]]:
    """What is split how, and the contexts for which it is shown."""
    every = tuple(CONTEXTS)
    return {
        "decode one sequence, tokens split": (costs.decode_sequence, every),
        "prompt, tokens split: ring": (costs.ring, every),
        "prompt, heads for tokens: all-to-all": (costs.heads, every),
        "step of Llama-3-8B, heads and hidden sizes split": (costs.tensor, ("8k x 16",)),
    }


def speedup(time: Time, tokens: int, devices: int) -> float:
    return time(tokens, 1) / time(tokens, devices)


def pays_to(time: Time, tokens: int) -> int:
    """The largest power of two of GPUs to which each doubling pays, see LEAST_OF_DOUBLING."""
    devices = 1
    while devices < 4096:
        gain = speedup(time, tokens, 2 * devices) / speedup(time, tokens, devices)
        if math.isnan(gain) or gain < LEAST_OF_DOUBLING:
            break
        devices *= 2
    return devices


def table(name: str, result: Result) -> str:
    """The tables of docs/parallel.md: what was fitted, and what follows."""
    costs = Costs.of(result["rows"])
    links = {"all-gather": costs.gather, "all-reduce": costs.reduce, "permutation": costs.permute}
    fitted = tables.table(
        ["collective of two GPUs", "latency", "bandwidth"],
        [
            [kind, f"{link.latency:.1f} us", f"{link.gigabytes:.0f} GB/s"]
            for kind, link in links.items()
        ],
    )
    lines = []
    for what, (time, contexts) in strategies(costs).items():
        for context in contexts:
            tokens = CONTEXTS.get(context, 0)
            cells = [_times(speedup(time, tokens, n)) for n in COUNTS]
            lines.append([what, context, *cells, f"{pays_to(time, tokens):,}"])
    header = ["work", "context", *(f"{n:,} GPUs" for n in COUNTS), "pays to"]
    least = ", ".join(f"{costs.least_tokens(n):,.0f} on {n:,} GPUs" for n in COUNTS)
    fsdp = (
        "Training with FSDP waits for weights where a GPU has fewer tokens in a step than "
        f"{least}, at {TRAINING_TFLOPS:.0f} Tflop/s of products."
    )
    picture = tables.picture(f"benchmarks/{PLOT[0]}", PLOT[1])
    parts = [picture + fitted, tables.table(header, lines), fsdp]
    return "\n\n".join([*parts, tables.source(name, result)])


def _times(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.1f}x"


def plot(result: Result) -> "Figure":
    costs = Costs.of(result["rows"])
    figure = plots.wide_figure(12)
    axes = figure.subplots()
    counts = [2**i for i in range(11)]
    styles = ["-", "--", ":"]
    for color, (what, (time, contexts)) in enumerate(strategies(costs).items()):
        for style, context in zip(styles, contexts, strict=False):
            tokens = CONTEXTS.get(context, 0)
            speeds = [speedup(time, tokens, n) for n in counts]
            axes.plot(counts, speeds, style, color=f"C{color}", label=f"{what}, {context}")
    axes.plot(counts, counts, color="0.8", label="as many times as GPUs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("GPUs, 8 in a host")
    axes.set_ylabel("times one GPU")
    axes.legend(fontsize="small")
    axes.set_title(f"Cost model, fitted on {result['device']}")
    return figure
