"""Are 4-bit rotated caches slower than fp8? Bytes, speed, error and bits per byte in one run.

Attention of one layer with Llama 3 8B's heads through every cache: one token after long and short
contexts, and whole prompts; and a byte-level model that reads held-out text through the same
caches (the embedded one, or that in the folder which VERDICT_MODEL names).
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from pathlib import Path

import jax

from benchmarks import timing
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Group
from benchmarks.shapes import Shape
from benchmarks.suite import Asked, Measure, Rows, Suite, each, joined, over_baselines, parted
from benchmarks.suites.verdict import cases, tables
from benchmarks.suites.verdict.tables import (
    BASELINES,
    BF16,
    CACHES,
    DECODE,
    FP8,
    FULL,
    TEXT,
    TRITON,
)
from benchmarks.tables import Row
from turbojax import evaluation, models
from turbojax.finetune.documents import read_held_out

MODEL = "VERDICT_MODEL"
"""The variable of the environment that names a folder with a byte-level model, instead of the
embedded one."""

MEASURES = ("text", "layers")
METHODS = tuple(name for name in CACHES if name != "paged")
"""In float32 uncompressed pages are the exact cache."""

# What an evaluation calls a cache in bfloat16 of a model in float32.
_EVALUATED = {BF16: "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Texts:
    """Caches through which a model reads the same windows of the same files.

    Attributes:
      context: tokens predicted of each window, of which the first half is a prompt.
      windows: of each file.
      files: at most so many.
      model: random weights of this shape of `turbojax.models.SHAPES`, to see that it runs; if
        empty, the model that `MODEL` names.
      methods: names of caches.
    """

    context: int = 4095
    windows: int = 4
    files: int = 12
    model: str = ""
    methods: tuple[str, ...] = METHODS

    @property
    def cases(self) -> tuple[str, ...]:
        return self.methods

    def name(self, case: str) -> str:
        """``verdict-text/embedded-t4095/turbo4``."""
        return joined(TEXT, f"{self.label}-t{self.context}", case)

    @property
    def label(self) -> str:
        return self.model or Path(_folder()).name

    def describe(self, case: str) -> Row:
        return {
            "operation": TEXT,
            "method": case,
            "model": self.label,
            "context": self.context,
            "windows_per_file": self.windows,
        }

    def measure(self, case: str) -> Row:
        begun, name = time.perf_counter(), _EVALUATED.get(case, case)
        model = _random(self.model) if self.model else _loaded(_folder(), self.context)
        settings = evaluation.Settings(
            methods=(name,),
            context=self.context,
            windows_per_file=self.windows,
            batch_size=self.files * self.windows,
            measures=MEASURES,
            layer_windows=2,
        )
        texts = _held_out(self.files, self.context)
        with jax.default_matmul_precision("highest"):  # not what GPUs do by default, TF32
            found = evaluation.evaluate(model, texts, settings)
        measured = found["methods"][name]
        if refusals := [row["refused"] for row in measured.values() if "refused" in row]:
            raise NotImplementedError(refusals[0])
        return {
            "status": "ok",
            **{name: measured[name] for name in MEASURES},
            "seconds": time.perf_counter() - begun,
        }


def _folder() -> str:
    """Of the model, or the name of the embedded one."""
    return os.environ.get(MODEL, "") or "embedded"


@functools.cache
def _loaded(folder: str, context: int) -> models.Transformer | models.QuantizedDecoder:
    """In float32, so that a cost is the cache's and not that of rounding."""
    return models.load(folder, dtype="float32", max_length=context + 1)


@functools.cache
def _random(shape: str) -> models.Decoder:
    return models.random_decoder(models.SHAPES[shape], dtype="float32")


@functools.cache
def _held_out(files: int, length: int) -> dict[str, bytes]:
    """Modules that the embedded model was not trained on, those that are long enough."""
    found = read_held_out(models.held_out_modules())
    long = [(name, text) for name, text in found.items() if len(text) >= length]
    return dict(long[:files])


# The suite ----------------------------------------------------------------------------------------

_MODEL = "llama3-8b"
_LONG = ((16, 32768), (1, 131072), (64, 4096))
_SHORT = ((1, 1024), (1, 8192))
_PROMPTS = ((1, 8192), (1, 32768))


def _groups() -> list[Group | Texts]:
    long, short = ([Shape(_MODEL, *place) for place in places] for places in (_LONG, _SHORT))
    prompts = [Shape(_MODEL, *place, is_causal=True) for place in _PROMPTS]
    groups: list[Group | Texts] = [cases.decoding(shape) for shape in long]
    groups.append(Texts())
    groups += [cases.decoding(shape) for shape in short]
    return groups + [cases.prompts(shape) for shape in prompts]


def begin(rows: Rows, asked: Asked) -> Measure:
    """See `suite.each`: of one group, whose caches are freed before the next."""
    group = rows[0][0]
    if isinstance(group, Texts):
        return _alone
    if group.operation == DECODE:
        _compile_filling(group, [case.method for _, case in rows])
    return calls.begin(rows, asked)


def _alone(group: Texts, case: str) -> Row:
    with timing.alone():
        return group.measure(case)


def _compile_filling(group: Group, methods: list[str]) -> None:
    """What fills the caches, side by side. What fails here fails again in its row, and says so."""
    shape = Shape(group.facts["model"], group.facts["batch"], group.facts["tokens"])

    names = {cases.cache_of(method) for method in methods if method != FULL}

    def compile_it(name: str) -> None:
        with contextlib.suppress(Exception):
            cases.filling(shape, name)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compile_it, sorted(names)))


def with_ratios(rows: list[Row]) -> list[Row]:
    """Speeds over those of bfloat16 and of fp8 pages, of all rows that have a time."""
    timed = iter(_over([row for row in rows if row["operation"] != TEXT]))
    return [row if row["operation"] == TEXT else next(timed) for row in rows]


_over = over_baselines(BASELINES)

SUITE = Suite(
    name="verdict",
    groups=_groups,
    quick_groups=lambda: [
        cases.decoding(Shape("tiny", 2, 192), (BF16, FULL, FP8, "turbo4", f"turbo4{TRITON}")),
        cases.prompts(Shape("tiny", 1, 192, is_causal=True), ("4bit",)),
        Texts(context=95, windows=1, files=2, model="tiny", methods=("turbo4",)),
    ],
    run=each(begin, parted(id)),
    with_ratios=with_ratios,
    one_line=tables.one_line,
    formats=("bf16",),
    tables=tables.TABLES,
    plots={tables.PLOT[0]: tables.side_by_side},
)
