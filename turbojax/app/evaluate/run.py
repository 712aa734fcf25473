"""What `turbojax eval` does: a model, texts and tasks in, what caches cost out."""

import dataclasses
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax import _checks, _extras, _interrupt, evaluation, models
from turbojax.app import options, startup, text_model
from turbojax.evaluation import Method, PreparedTasks, Text, prepare_tasks, read_tasks
from turbojax.kv import LATENT_CACHE_NAMES
from turbojax.models.text.tokenizer import ByteTokenizer, NumberTokenizer, Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is measured, how much of it is done, and how much there is."""

DEFAULT_METHODS = ("exact", "4bit", "3bit", "2/4bit", "2bit", "kivi4", "kv4", "k8v4", "turbo4")
DEFAULT_LATENT_METHODS = LATENT_CACHE_NAMES
"""Of models with latent attention."""

_MOST_CONTEXT = 2047
_MEASURES = (*evaluation.MEASURES, "tasks")


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """What to measure.

    Attributes:
      model: ``"embedded"`` or a checkpoint's folder, quantized or not.
      texts: files to read; the embedded model's held-out modules if empty.
      methods: names, see `turbojax.evaluation.method`; None for the default ones that the model can
        have.
      context: tokens predicted per window; None for 2047, or fewer where model or texts are short.
      prompt: of these how many are prefilled; None for half.
      windows: of each text, at most.
      batch_size: windows, or tasks, that run at once.
      seed: of what is drawn.
      measures: some of ``"text"``, ``"layers"``, ``"recall"`` and ``"tasks"``; None for text and
        layers, and tasks where there are some.
      recall_lengths: tokens; None for the default.
      recall_depths: 0 to 1; None for the default.
      tasks: a file of tasks, or None.
      max_new_tokens: of tasks that do not say.
      adapters: a folder of low-rank adapters, or None.
      dtype: of weights and computation, by name; None for the default.
      max_length: longest sequence; None for the checkpoint's.
      out: file for the results, or None.
      plot: folder for plots, or None.

    Raises:
      ValueError: if numbers are out of range, or options contradict each other.
    """

    model: str = "embedded"
    texts: tuple[Path, ...] = ()
    methods: tuple[str, ...] | None = None
    context: int | None = None
    prompt: int | None = None
    windows: int = 1
    batch_size: int = 8
    seed: int = 0
    measures: tuple[str, ...] | None = None
    recall_lengths: tuple[int, ...] | None = None
    recall_depths: tuple[float, ...] | None = None
    tasks: Path | None = None
    max_new_tokens: int = 256
    adapters: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    out: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without a model."""
        sizes = {"context": self.context, "prompt": self.prompt, "max_length": self.max_length}
        _checks.check_sizes(
            windows=self.windows,
            batch_size=self.batch_size,
            max_new_tokens=self.max_new_tokens,
            **{name: size for name, size in sizes.items() if size is not None},
        )
        for name in self.chosen_measures:
            if name not in _MEASURES:
                raise ValueError(f"measure {name!r} must be one of {', '.join(_MEASURES)}")
        if ("tasks" in self.chosen_measures) != (self.tasks is not None):
            raise ValueError("the measure 'tasks' and --tasks FILE must go together")
        if "recall" not in self.chosen_measures:
            for option, given in (
                ("--recall-lengths", self.recall_lengths),
                ("--recall-depths", self.recall_depths),
            ):
                if given is not None:
                    raise ValueError(f"{option} must go with the measure 'recall'")

    @property
    def chosen_measures(self) -> tuple[str, ...]:
        """What is measured."""
        if self.measures is not None:
            return self.measures
        return ("text", "layers") if self.tasks is None else ("text", "layers", "tasks")


def run(settings: EvalSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures everything.

    Args:
      settings: what.
      progress: told how far it is.

    Returns:
      What `turbojax.evaluation.evaluate` returns.

    Raises:
      OSError: if a file cannot be read or written.
      ValueError, NotImplementedError, ImportError: see `evaluate`, `read_tasks` and
        `text_model.find_text_model`; if the run needs more memory than there is.
    """
    startup.check_output_file("--out", settings.out)
    if settings.plot is not None:
        _extras.need_matplotlib("--plot")
        startup.check_output_folder("--plot", settings.plot)
    startup.check_input_files(*settings.texts)
    tasks = None
    if settings.tasks is not None:
        tasks = read_tasks(settings.tasks, settings.max_new_tokens)
    found = options.find(
        settings.model, None, None, settings.dtype, settings.max_length, settings.adapters
    )
    methods = _methods(settings.methods, found)
    prepared = None if tasks is None else prepare_tasks(tasks, found.tokenizer, found.config)
    texts = _texts(settings.texts, found.tokenizer)
    context = _context(settings, found.config.max_length, texts)
    _check_memory(settings, found, methods, context)
    decoder = found.load().decoder
    if settings.out is not None:
        _interrupt.say(lambda: _kept(settings.out))
    return evaluation.evaluate(
        decoder,
        texts,
        _settings(settings, methods, context),
        out=settings.out,
        progress=_report(progress),
        further=_further(settings, prepared),
    )
