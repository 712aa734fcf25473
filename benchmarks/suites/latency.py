"""Attention's latency with Phi-3 Medium's heads: figure 6 of TurboAttention in form, on this GPU.

Batches of 1 to 64 at 1k tokens, and 4 sequences of 4k to 32k; decoding and prompts each against
cuDNN in bfloat16. The paper compares with FlashAttention in FP16 on an A100.
"""

import dataclasses
from typing import TYPE_CHECKING

from benchmarks import plots, tables
from benchmarks.shapes import Shape
from benchmarks.suite import Suite, over_cudnn
from benchmarks.suites.attention import cases as attention
from benchmarks.suites.attention.cases import Case
from benchmarks.suites.attention.decode import DECODE
from benchmarks.suites.attention.prefill import PREFILL
from benchmarks.suites.attention.tables import DECODE_METHODS, is_cudnn, mode_of
from benchmarks.tables import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MODEL = "phi3-medium"
_PLACES = (
    *((1, 1024), (4, 1024), (16, 1024), (64, 1024)),
    *((4, 4096), (4, 8192), (4, 16384), (4, 32768)),
)
# What decodes, and the modes of prompts: ours by the kernels made for this GPU, and KIVI.
_DECODING = ("turbo-4bit", "turbo-2/4bit", "kivi-4bit")
_MODES = ("int8", "int8_fp8", "fp8")
_OURS, _TINY = ("mosaic_gpu",), ("xla",)
# What the paper reports of an A100 at best, over FlashAttention in FP16.
PAPER = {"prefill": 1.8, "decode": 1.7}
PLOT = ("latency.png", "Attention with Phi-3 Medium's heads: speed over cuDNN by shape")


@dataclasses.dataclass(frozen=True)
class Group(attention.Group):
    """Rows of the attention suite that the figure shows: cuDNN, these of ours and KIVI."""

    implementations: tuple[str, ...] = _OURS

    @property
    def cases(self) -> list[Case]:
        return [case for case in super().cases if self._shows(case)]

    def _shows(self, case: Case) -> bool:
        if case.implementation is None:
            return case.method.startswith("cudnn") or case.method in _DECODING
        return case.implementation in self.implementations


# What the docs show -------------------------------------------------------------------------------


def speeds(result: Result, operation: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    rows = [row for row in tables.finished(result, operation) if not is_cudnn(row)]
    for row in rows:
        title = _title(row)
        if title is not None and (ratio := row.get("speedup_over_cudnn")) is not None:
            place = found.setdefault(tables.batch_and_tokens(row), {})
            place[title] = max(ratio, place.get(title, 0.0))
    return found


def _title(row: Row) -> str | None:
    if row["operation"] == "decode":
        return DECODE_METHODS[row["method"]] if row["method"] in _DECODING else None
    mode = mode_of(row)
    return mode if mode in _MODES else None


def speed_table(result: Result, operation: str) -> str:
    """Microseconds of cuDNN by shape, and how many times as fast the others are."""
    found = speeds(result, operation)
    columns = list(dict.fromkeys(title for place in found.values() for title in place))
    lines = []
    for place, ratios in found.items():
        line = [place, tables.number(_cudnn(result, operation, place))]
        lines.append(line + [tables.times(ratios.get(title)) for title in columns])
    return tables.table(["batch x tokens", "cuDNN bf16, us", *columns], lines)


def _cudnn(result: Result, operation: str, place: str) -> float | None:
    rows = tables.finished(result, operation)
    here = [row for row in rows if is_cudnn(row) and tables.batch_and_tokens(row) == place]
    return min((row["us"] for row in here), default=None)


def claims(result: Result) -> str:
    """What the paper says of an A100, beside the best and the worst of ours here."""
    said = []
    for operation, words in (("prefill", "prompts"), ("decode", "decoding")):
        places = speeds(result, operation)
        ours = [
            max(ratio for title, ratio in ratios.items() if title != "KIVI 4-bit")
            for ratios in places.values()
            if set(ratios) - {"KIVI 4-bit"}
        ]
        if ours:
            theirs = f"up to {PAPER[operation]}x"
            said.append(f"{words} {theirs} in the paper, {min(ours):.2f}x to {max(ours):.2f}x here")
    kivi = [
        ratios["KIVI 4-bit"]
        for ratios in speeds(result, "decode").values()
        if "KIVI 4-bit" in ratios
    ]
    if kivi:
        said.append(
            f"KIVI slower than FP16 in the paper, {min(kivi):.2f}x to {max(kivi):.2f}x here"
        )
    return (
        f"Against exact attention, the best of ours by shape: {'; '.join(said)}. " if said else ""
    )


def section(name: str, result: Result) -> str:
    parts = [tables.picture(*PLOT).strip(), "Decoding, one token of each sequence:"]
    parts += [speed_table(result, "decode"), "Causal prompts, the fastest block of each mode:"]
    parts.append(speed_table(result, "prefill"))
    note = (
        "In the paper the baseline is FlashAttention in FP16 on an A100, and 2/4-bit caches; here "
        "it is the fastest of cuDNN's calls in bfloat16, in time of the kernels on the device. "
    )
    return "\n\n".join([*parts, f"{claims(result)}{note}{tables.source(name, result)}"])


def speed_plot(result: Result) -> "Figure":
    """Speed over cuDNN by shape: decoding's bars, then those of prompts."""
    bars = {}
    for operation, words in (("decode", "decode"), ("prefill", "prompt")):
        for place, ratios in speeds(result, operation).items():
            bars[f"{words} {place}"] = {
                title: (ratio, f"{ratio:.2f}") for title, ratio in ratios.items()
            }
    title = f"Attention with Phi-3 Medium's heads on {result['device']}"
    return plots.of_ratios(bars, title, "times as fast as cuDNN bf16", width=14)


_TINY_SHAPES = {
    DECODE: Shape("tiny", 2, 192),
    PREFILL: Shape("tiny", 1, 128, is_causal=True),
}
SUITE = Suite(
    name="latency",
    groups=lambda: [
        *(Group(DECODE, Shape(_MODEL, *place)) for place in _PLACES),
        *(
            Group(PREFILL, Shape(_MODEL, *place, is_causal=True), "hopper-short")
            for place in _PLACES
        ),
    ],
    quick_groups=lambda: [
        Group(operation, shape, implementations=_TINY) for operation, shape in _TINY_SHAPES.items()
    ],
    run=attention.run,
    with_ratios=over_cudnn,
    formats=("bf16", "int8", "fp8"),
    tables={"latency": section},
    plots={PLOT[0]: speed_plot},
)
