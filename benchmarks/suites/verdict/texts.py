"""Rows of a model that reads held-out text through a cache: bits per byte, and layers' errors."""

import dataclasses
import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path

import jax

from benchmarks.suites.verdict.methods import BF16, CACHES, TEXT
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
    def cases(self) -> Iterable[str]:
        """The caches."""
        return self.methods

    def name(self, case: str) -> str:
        """``verdict-text/embedded-t4095/turbo4``."""
        return f"{TEXT}/{self.label}-t{self.context}/{case}"

    @property
    def label(self) -> str:
        """What the model is called."""
        return self.model or Path(_folder()).name

    def describe(self, case: str) -> Row:
        """What is known of a row before it runs."""
        return {
            "name": self.name(case),
            "operation": TEXT,
            "method": case,
            "model": self.label,
            "context": self.context,
            "windows_per_file": self.windows,
        }

    def measure(self, case: str) -> Row:
        """What a cache costs the model.

        Raises:
          NotImplementedError: if the model cannot be evaluated with it.
        """
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
