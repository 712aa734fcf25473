"""Decode, prefill and compress against what one would run instead; what is in which suite."""

from collections.abc import Iterator
from typing import Any

from benchmarks.shapes import Shape
from benchmarks.suite import Suite, over_cudnn
from benchmarks.suites.attention import tables
from benchmarks.suites.attention.cases import Group, run
from benchmarks.suites.attention.decode import COMPRESS, DECODE, SEVERAL
from benchmarks.suites.attention.prefill import PREFILL, TRAINING

# Heads of 64 to 256 channels, grouped and not.
GRID_MODELS = ("llama3-8b", "llama3.2-1b", "mha-16", "mha-16-narrow", "phi3-mini", "gemma2-9b")


def _attention() -> Iterator[Group]:
    llama, paper = "llama3-8b", "phi3-medium"
    yield Group(DECODE, Shape(llama, 16, 32768), "thorough")
    yield Group(PREFILL, Shape(llama, 2, 8192), "thorough")
    yield Group(PREFILL, Shape(llama, 2, 8192, is_causal=True), "thorough")
    yield Group(COMPRESS, Shape(llama, 16, 32768), "thorough")
    for batch, tokens in ((1, 1024), (16, 1024), (1, 32768), (64, 1024), (16, 4096)):
        yield Group(DECODE, Shape(llama, batch, tokens))
    for batch, tokens in ((64, 4096), (1, 131072)):
        yield Group(DECODE, Shape(llama, batch, tokens))
    figure_6 = [(1, 1024), (4, 1024), (16, 1024), (64, 1024)]
    figure_6 += [(4, 4096), (4, 8192), (4, 16384), (4, 32768)]
    for batch, tokens in figure_6:
        yield Group(DECODE, Shape(paper, batch, tokens))
    yield Group(COMPRESS, Shape(llama, 2, 8192))
    yield Group(PREFILL, Shape(llama, 1, 32768))
    yield Group(PREFILL, Shape(llama, 1, 32768, is_causal=True))
    for batch, tokens in figure_6:
        yield Group(PREFILL, Shape(paper, batch, tokens, is_causal=True))


def _hopper() -> Iterator[Group]:
    """What Hopper's own kernels are for, in minutes: long prompts, long and short caches."""
    llama, narrow = "llama3-8b", "llama3.2-1b"
    yield Group(DECODE, Shape(llama, 16, 32768), "hopper")
    for is_causal in (False, True):
        yield Group(PREFILL, Shape(llama, 2, 8192, is_causal), "hopper")
    for batch, tokens in ((1, 131072), (64, 4096), (1, 8192), (256, 2048), (1, 2**20)):
        yield Group(DECODE, Shape(llama, batch, tokens), "hopper")
    for batch, tokens in ((16, 32768), (64, 4096)):
        yield Group(SEVERAL, Shape(llama, batch, tokens))
    for is_causal in (False, True):
        yield Group(PREFILL, Shape(llama, 1, 32768, is_causal), "hopper-short")
    for is_causal in (True, False):
        yield Group(TRAINING, Shape(llama, 2, 8192, is_causal), "hopper")
    # Short prompts, narrow heads, windows.
    yield Group(PREFILL, Shape(llama, 8, 2048, is_causal=True), "hopper-short")
    yield Group(PREFILL, Shape("mha-16-narrow", 1, 32768, is_causal=True), "hopper-short")
    yield Group(PREFILL, Shape(llama, 2, 8192, is_causal=True, window=1024), "hopper-short")
    for shape in (
        Shape(llama, 8, 2048, is_causal=True),
        Shape("mha-16-narrow", 1, 32768, is_causal=True),
        Shape(llama, 2, 8192, is_causal=True, window=1024),
        Shape("gemma2-9b", 2, 4096, is_causal=True),
    ):
        yield Group(TRAINING, shape, "hopper-short")
    yield Group(PREFILL, Shape(narrow, 2, 8192), "hopper-short")
    for batch, tokens in ((1, 1024), (16, 4096), (1, 4096), (16, 1024), (4, 1024), (4, 4096)):
        yield Group(DECODE, Shape(llama, batch, tokens), "hopper-short")
    yield Group(PREFILL, Shape(narrow, 2, 8192, is_causal=True), "hopper-short")


def _default() -> Iterator[Group]:
    """Head dims and numbers of tokens, causal: a call without options beside cuDNN."""
    for tokens in (1024, 8192, 2048, 32768, 4096, 512, 131072, 128, 1):
        for model in GRID_MODELS:
            yield Group(PREFILL, Shape(model, max(1, 4096 // tokens), tokens, True), "default")


def _quick_default() -> Iterator[Group]:
    yield Group(PREFILL, Shape("tiny", 1, 128, is_causal=True), "default")


def _quick_groups() -> Iterator[Group]:
    yield Group(DECODE, Shape("tiny", 2, 192), "thorough")
    yield Group(PREFILL, Shape("tiny", 1, 128))
    yield Group(PREFILL, Shape("tiny", 1, 128, is_causal=True))
    yield Group(COMPRESS, Shape("tiny", 2, 192), "thorough")
    yield Group(SEVERAL, Shape("tiny", 2, 192))


# The suites differ in their rows, and in what the docs show of them.
_COMMON: dict[str, Any] = {
    "quick_groups": _quick_groups,
    "run": run,
    "with_ratios": over_cudnn,
    "formats": ("bf16", "int8", "fp8"),
}
ATTENTION = Suite(
    name="attention",
    groups=_attention,
    tables=tables.ATTENTION,
    plots={tables.DECODE[0]: tables.decode_plot, tables.PREFILL[0]: tables.prefill_plot},
    **_COMMON,
)
HOPPER = Suite(name="hopper", groups=_hopper, tables=tables.HOPPER, **_COMMON)
DEFAULT = Suite(
    name="default",
    groups=_default,
    tables=tables.DEFAULT,
    plots={tables.GRID[0]: tables.default_plot},
    **(_COMMON | {"quick_groups": _quick_default}),
)
