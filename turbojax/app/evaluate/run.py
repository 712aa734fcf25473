"""What `turbojax eval` does: a model, texts and tasks in, what caches cost out."""

import dataclasses
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax import _checks, _extras, _interrupt, evaluation, models
from turbojax.app import options, startup, text_model
from turbojax.caches import LATENT_CACHE_NAMES
from turbojax.evaluation import Method, Text
from turbojax.models.text.tokenizer import ByteTokenizer, JsonTokenizer, NumberTokenizer, Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is measured, how much of it is done, and how much there is."""

DEFAULT_METHODS = (
    *("exact", "4bit", "k4v2", "3bit", "2/4bit", "kivi4", "kv4", "k8v4"),
    *("paged_int8", "paged_int8_v4", "turbo4"),
)
DEFAULT_LATENT_METHODS = LATENT_CACHE_NAMES
"""The default methods of models with latent attention."""

_MOST_CONTEXT = 1023
_MEASURES = (*evaluation.MEASURES, "tasks")


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """What to measure: the options of the command; ValueError if they do not fit together."""

    model: str = "embedded"
    texts: tuple[Path, ...] = ()
    methods: tuple[str, ...] | None = None
    context: int | None = None
    prompt: int | None = None
    windows: int = 1
    batch_size: int = 8
    seed: int = 0
    measures: tuple[str, ...] | None = None
    recall_kinds: tuple[str, ...] | None = None
    recall_lengths: tuple[int, ...] | None = None
    recall_depths: tuple[float, ...] | None = None
    tasks: tuple[str, ...] = ()
    limit: float | None = None
    num_fewshot: int | None = None
    chat: bool = False
    max_new_tokens: int = 256
    adapters: str | None = None
    mesh: str | None = None
    weights: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    out: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
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
        if ("tasks" in self.chosen_measures) != bool(self.tasks):
            raise ValueError("the measure 'tasks' and --tasks must go together")
        if not self.tasks:
            for option, is_given in (
                ("--limit", self.limit is not None),
                ("--num-fewshot", self.num_fewshot is not None),
                ("--chat", self.chat),
            ):
                if is_given:
                    raise ValueError(f"{option} must go with --tasks")
        if "recall" not in self.chosen_measures:
            for option, given in (
                ("--recall-kinds", self.recall_kinds),
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
        return ("text", "layers", "tasks") if self.tasks else ("text", "layers")


def run(settings: EvalSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Measures everything; returns what `turbojax.evaluation.evaluate` does."""
    startup.check_output_file("--out", settings.out)
    if settings.plot is not None:
        _extras.need_matplotlib("--plot")
        startup.check_output_folder("--plot", settings.plot)
    startup.check_input_files(*settings.texts)
    found = _find(settings)
    methods = _methods(settings.methods, found)
    further = _further(settings, found.tokenizer)
    texts = _texts(settings.texts, found.tokenizer)
    context = _context(settings, found.config.max_length, texts)
    _check_memory(settings, found, methods, context)
    decoder = found.load().decoder
    result = evaluation.evaluate(
        decoder,
        texts,
        _settings(settings, methods, context),
        out=settings.out,
        progress=_report(progress, settings.out),
        further=further,
        tokenizer=found.tokenizer if isinstance(found.tokenizer, JsonTokenizer) else None,
    )
    if settings.out is not None:
        _partial(settings.out).unlink(missing_ok=True)  # the results hold all answers
    return result


def _partial(out: Path) -> Path:
    """Where answers to tasks are, until a method has answered all."""
    return out.with_name(f"{out.name}.tasks")


def _find(settings: EvalSettings) -> text_model.FoundModel:
    """The model, not loaded yet; ValueError if a mesh splits anything else than heads."""
    found = options.find(
        settings.model,
        None,
        settings.weights,
        settings.dtype,
        settings.max_length,
        settings.adapters,
        settings.mesh,
    )
    if found.axes is not None and found.axes.size("batch") * found.axes.size("sequence") > 1:
        raise ValueError(f"--mesh {settings.mesh} must split heads alone, as model=2 does")
    return found


def _kept(out: Path) -> str:
    files = [str(path) for path in (out, _partial(out)) if path.exists()]
    if not files:
        return "nothing was written yet; the same command begins anew"
    return f"what was measured is in {' and '.join(files)}; the same command goes on from there"


def _report(progress: Progress | None, out: Path | None) -> evaluation.Report:
    def tell(method: str, measure: str, done: int, total: int) -> None:
        # Not earlier: until a run has begun, the file may hold another run's results.
        if out is not None:
            _interrupt.say(lambda: _kept(out))
        if progress is not None:
            progress(f"{method}, {measure}", done, total)

    return tell


def _methods(given: Sequence[str] | None, found: text_model.FoundModel) -> tuple[Method, ...]:
    """The methods, checked before the model is loaded; of the default ones those it can have."""
    config = found.config
    if given is not None:
        made = tuple(evaluation.method(name, config) for name in given)
        for one in made:
            startup.cache_bytes(config, found.dtype, 1, config.max_length, one.cache)
        return made
    names = DEFAULT_METHODS if config.latent is None else DEFAULT_LATENT_METHODS
    able = list[Method]()
    for name in names:
        try:
            one = evaluation.method(name, config)
            startup.cache_bytes(config, found.dtype, 1, config.max_length, one.cache)
        except (ValueError, NotImplementedError):
            continue
        able.append(one)
    return tuple(able)


def _texts(files: Sequence[Path], tokenizer: Tokenizer) -> dict[str, Text]:
    """The texts by name, of bytes or tokens; ValueError if there is none, or it is unreadable."""
    if not files:
        if isinstance(tokenizer, NumberTokenizer):
            raise ValueError("tokens are numbers here, there is no tokenizer.json: give --text")
        library = Path(sysconfig.get_path("stdlib"))
        files = [library / name for name in models.held_out_modules()]
        files = [path for path in files if path.is_file()]
        if not files:
            raise ValueError(f"none of the held-out modules is in {library}: give --text")
    short = [path.name for path in files]
    texts: dict[str, Text] = {}
    for path in files:
        name = path.name if short.count(path.name) == 1 else str(path)
        if name in texts:
            raise ValueError(f"--text {path} must be given once")
        content = path.read_bytes()
        if isinstance(tokenizer, ByteTokenizer):
            texts[name] = content
            continue
        try:
            texts[name] = tokenizer.encode(text_model.read_text(content))
        except ValueError as error:
            raise ValueError(f"--text {path}: {error}") from error
    return texts


def _context(settings: EvalSettings, max_length: int, texts: Mapping[str, Text]) -> int:
    """Tokens of a window; ValueError if the model takes fewer."""
    if settings.context is None:
        # The first token of a text is fed, not predicted. Texts of bytes get an extra one for that.
        longest = max(len(text) - (not isinstance(text, bytes)) for text in texts.values())
        return max(1, min(_MOST_CONTEXT, max_length, longest))
    if settings.context > max_length:
        raise ValueError(
            f"--context {settings.context} must be at most the model's max_length={max_length}"
        )
    return settings.context


def _settings(
    settings: EvalSettings, methods: Sequence[Method], context: int
) -> evaluation.Settings:
    given: dict[str, Any] = {
        name: value
        for name, value in (
            ("recall_kinds", settings.recall_kinds),
            ("recall_lengths", settings.recall_lengths),
            ("recall_depths", settings.recall_depths),
        )
        if value is not None
    }
    return evaluation.Settings(
        methods=tuple(one.name for one in methods),
        context=context,
        prompt=settings.prompt,
        windows_per_file=settings.windows,
        batch_size=settings.batch_size,
        seed=settings.seed,
        measures=settings.chosen_measures,
        **given,
    )


def _further(settings: EvalSettings, tokenizer: Tokenizer) -> dict[str, evaluation.Further]:
    """The tasks, found before the model is loaded."""
    if not settings.tasks:
        return {}
    if isinstance(tokenizer, NumberTokenizer):
        raise ValueError("tokens are numbers here, there is no tokenizer.json: --tasks are texts")
    measure = evaluation.TaskMeasure(
        settings.tasks,
        tokenizer,
        batch_size=settings.batch_size,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        chat=settings.chat,
        max_new_tokens=settings.max_new_tokens,
        partial=None if settings.out is None else _partial(settings.out),
    )
    return {"tasks": measure}


def _check_memory(
    settings: EvalSettings, found: text_model.FoundModel, methods: Sequence[Method], context: int
) -> None:
    """Raises ValueError if windows, or weights, need more memory than there is."""
    config, batch = found.config, settings.batch_size
    # On one device; latents have no heads to split.
    heads = 1 if found.axes is None or config.latent else found.axes.size("heads")
    largest = max(
        startup.cache_bytes(config, found.dtype, batch, context, one.cache) for one in methods
    )
    startup.check_memory(
        {
            "weights": found.weight_bytes,
            "a method's caches": largest // heads,
            "exact caches": startup.cache_bytes(config, found.dtype, batch, context, "exact")
            // heads,
            "prompts that run": startup.prompt_bytes(config, found.dtype, batch, context),
        },
        "smaller --batch-size or --context",
    )
