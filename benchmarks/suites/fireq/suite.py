"""FireQ: INT4 weights times e4m3 activations, KV4, and models of them, against XLA and cuDNN.

Three suites: ``fireq`` are single operations of linear layers, and ``kv4`` is decoding from KV4 and
K8V4, both in device time; ``fireq_model`` is the prefill of a whole model in wall time.
"""

from typing import Any

from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Suite, over_baselines
from benchmarks.suites.fireq import cases as fireq_cases
from benchmarks.suites.fireq import model as fireq_model
from benchmarks.suites.fireq import tables


def _groups() -> list[Group]:
    """What matters most first: a run may be stopped by the clock."""
    size, llama3, llama2 = 4096, 14336, 11008
    groups = []
    for inner in (llama3, llama2):
        for tokens in (16, 1, 64, 128, 256, 1024, 2048, 4096):
            both = tokens in (16, 1024)
            groups.append(fireq_cases.matmul(size, inner, tokens, with_bf16_scales=both))
    groups += [fireq_cases.matmul(llama3, size, tokens) for tokens in (16, 4096)]
    # Queries, keys and values of Llama 3 8B; an output projection; gate and up of its 70B.
    for inputs, outputs in ((size, 6144), (size, size), (8192, 28672)):
        groups += [fireq_cases.matmul(inputs, outputs, tokens) for tokens in (16, 1, 64)]
    groups.append(fireq_cases.feed_forward("llama3-8b", size, llama3, 16))
    groups.append(fireq_cases.feed_forward("llama2-7b", size, llama2, 16))
    for with_norm in (False, True):
        for tokens in (16, 16384):
            groups.append(fireq_cases.quantize(tokens, size, with_norm=with_norm))
    return groups


def _decode_groups() -> list[Group]:
    places = ((16, 32768), (1, 32768), (64, 4096), (1, 8192), (1, 4096))
    return [fireq_cases.decode_kv4(Shape("llama3-8b", *place)) for place in places]


def _model_groups() -> list[Group]:
    return [fireq_model.prefill("llama-3-8b", 16, tokens) for tokens in (1024, 2048, 4096)]


def _quick_groups() -> list[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    every = ("xla", *fireq_cases.KERNELS)
    return [
        fireq_cases.matmul(192, 72, 5, implementations=every, with_bf16_scales=True),
        fireq_cases.feed_forward("tiny", 64, 96, 3, implementations=every),
        fireq_cases.quantize(3, 64, with_norm=False),
        fireq_cases.quantize(3, 64, with_norm=True),
    ]


def _quick_decode_groups() -> list[Group]:
    return [fireq_cases.decode_kv4(Shape("tiny", 2, 192), implementations=("xla", "triton"))]


def _quick_model_groups() -> list[Group]:
    return [fireq_model.prefill("tiny", 2, 24)]


_COMMON: dict[str, Any] = {
    "run": calls.run,
    "with_ratios": over_baselines(tables.BASELINES),
    "one_line": tables.one_line,
}
FIREQ = Suite(
    name="fireq",
    groups=_groups,
    quick_groups=_quick_groups,
    formats=("bf16", "fp8"),
    tables=tables.FIREQ,
    plots=tables.PLOTS,
    **_COMMON,
)
KV4 = Suite(
    name="kv4",
    groups=_decode_groups,
    quick_groups=_quick_decode_groups,
    formats=(),
    tables=tables.KV4,
    **_COMMON,
)
FIREQ_MODEL = Suite(
    name="fireq_model",
    groups=_model_groups,
    quick_groups=_quick_model_groups,
    formats=("bf16", "fp8"),
    tables=tables.FIREQ_MODEL,
    **_COMMON,
)
