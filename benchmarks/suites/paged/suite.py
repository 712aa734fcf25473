"""Attention over pages of 16, 8 and 4 bits, and appending to them, in device time.

Against cuDNN on dense bfloat16, jax's own paged kernel, our bfloat16 pages and our fp8 pages. The
whole public call is timed, with its checks and the rotations of queries and outputs.

Two suites: ``paged``, and ``paged_formats`` with keys and values that are stored unlike each other.
"""

from typing import Any

from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Suite, over_baselines
from benchmarks.suites.paged import cases as paged_cases
from benchmarks.suites.paged import tables as paged_tables
from benchmarks.suites.paged.cases import MOSAIC, TRITON
from benchmarks.suites.paged.inputs import Problem

_DECODE = (
    ("auto", MOSAIC),
    ("auto", TRITON),
    ("fp8_e4m3", MOSAIC),
    ("turbo4", MOSAIC),
    ("fp8_e4m3", TRITON),
    ("turbo4", TRITON),
    ("int8", MOSAIC),
    ("fp8_e5m2", MOSAIC),
)
_UNLIKE = ("k8v4", "int8_v4", "turbo_k4v2", "turbo_k3v2")
_FORMATS = (
    *_DECODE[:-1],
    *((kind, kernel) for kernel in (MOSAIC, TRITON) for kind in _UNLIKE),
    ("int8", TRITON),
)
_APPEND = ("auto", "fp8_e4m3", "turbo4")
_PLACES = ((64, 4096), (1, 32768), (1, 8192), (1, 4096), (1, 1024))
_PROMPT = (
    *(("auto", MOSAIC), ("fp8_e4m3", MOSAIC), ("turbo4", MOSAIC), ("int8", MOSAIC)),
    ("auto", TRITON),
)
# Chunks of prompts, and tokens held then.
_PROMPTS = (
    *((8192, 8192), (1024, 8192), (256, 8192)),
    *((8192, 32768), (1024, 32768), (256, 32768), (64, 32768)),
)


def _groups() -> list[Group]:
    """What matters most first: a run may be stopped by the clock."""
    model = "llama3-8b"
    largest = Shape(model, 16, 32768)
    shapes = (largest, *(Shape(model, *place) for place in _PLACES))
    groups = [paged_cases.decode(Problem(shape), _DECODE) for shape in shapes]
    groups.append(paged_cases.decode(Problem(largest, ragged=True), _DECODE[:4]))
    for kv_dtype in ("turbo4", "fp8_e4m3"):
        groups.append(paged_cases.page_sizes(largest, kv_dtype, MOSAIC, (16, 32, 128)))
    groups.append(paged_cases.append(Shape(model, 64, 4096), 1, _APPEND))
    groups.append(paged_cases.append(Shape(model, 4, 32768), 4096, _APPEND))
    for queries in (4, 16, 64, 256):
        problem = Problem(Shape(model, 4, 8192), queries=queries)
        groups.append(paged_cases.decode(problem, _PROMPT, operation=paged_tables.CHUNK))
    for queries, tokens in _PROMPTS:
        problem = Problem(Shape(model, 1, tokens), queries=queries)
        groups.append(paged_cases.decode(problem, _PROMPT, operation=paged_tables.CHUNK))
    return groups


def _format_groups() -> list[Group]:
    model, kinds = "llama3-8b", (*_APPEND, "k8v4", "int8", "int8_v4")
    shapes = [Shape(model, *place) for place in ((16, 32768), *_PLACES)]
    groups = [paged_cases.decode(Problem(shape), _FORMATS, with_jax=False) for shape in shapes]
    groups.append(paged_cases.append(Shape(model, 64, 4096), 1, kinds))
    groups.append(paged_cases.append(Shape(model, 4, 32768), 4096, kinds))
    return groups


def _quick_groups() -> list[Group]:
    """Tiny shapes: whether everything runs, and nothing about speed."""
    shape = Shape("tiny", 2, 192)
    kinds = tuple((kv_dtype, "xla") for kv_dtype in ("turbo4", "auto", "fp8_e4m3", "fp8_e5m2"))
    kernels = (("turbo4", TRITON), ("turbo4", MOSAIC))
    chunk = Problem(shape, queries=4)
    return [
        paged_cases.decode(Problem(shape), kinds + kernels),
        paged_cases.decode(Problem(shape, ragged=True), kinds[:1]),
        paged_cases.page_sizes(shape, "turbo4", "xla", (16,)),
        paged_cases.append(shape, 1, _APPEND),
        paged_cases.append(shape, 96, ("auto", "turbo4")),
        paged_cases.decode(chunk, kinds[:1], operation=paged_tables.CHUNK),
    ]


def _quick_format_groups() -> list[Group]:
    shape, kinds = Shape("tiny", 2, 192), ("auto", "int8", "fp8_e4m3", *_UNLIKE)
    chosen = [(kv_dtype, "xla") for kv_dtype in kinds]
    return [
        paged_cases.decode(Problem(shape), chosen, with_jax=False),
        paged_cases.append(shape, 1, kinds[:4]),
    ]


_COMMON: dict[str, Any] = {
    "run": calls.run,
    "with_ratios": over_baselines(paged_tables.BASELINES),
    "one_line": paged_tables.one_line,
    "formats": ("bf16",),
}
SUITE = Suite(
    name="paged",
    groups=_groups,
    quick_groups=_quick_groups,
    tables=paged_tables.TABLES,
    plots=paged_tables.PLOTS,
    **_COMMON,
)
FORMATS = Suite(
    name="paged_formats",
    groups=_format_groups,
    quick_groups=_quick_format_groups,
    tables=paged_tables.FORMATS,
    **_COMMON,
)
