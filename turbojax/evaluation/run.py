"""One evaluation of many methods: every measure of each, in one file that can be gone on with."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turbojax import _checks
from turbojax.evaluation.decoding import AnyDecoder, AnyModel, counted, decoder_of
from turbojax.evaluation.layers import Errors, LayerErrors, layer_errors
from turbojax.evaluation.methods import Method, method
from turbojax.evaluation.recall import RecallMeasure
from turbojax.evaluation.recall_items import KINDS, Kind
from turbojax.evaluation.records import (
    Json,
    Records,
    describe_machine,
    describe_model,
    describe_texts,
)
from turbojax.evaluation.scoring import ExactRun, Scores, cache_bytes, score
from turbojax.evaluation.texts import Text, bootstrap, windows
from turbojax.models import Tokenizer

Report = Callable[[str, str, int, int], None]
"""Called with a method's name, a measure, and how much of how much is done."""

MEASURES = ("text", "layers", "recall")
"""What `evaluate` can measure by itself."""

_FILES_TO_DRAW = 5
"""From this many texts on, intervals come from drawing texts; with fewer, from drawing windows."""

_MOST_BITS = 1024
"""From this many bits on, perplexity, 2 to their power, does not fit a float."""

_NO_WINDOWS = np.zeros((0, 0), np.int32)
"""The windows of a text that is too short."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      methods: names, see `turbojax.evaluation.method`.
      context: tokens predicted per window.
      prompt: how many of a window's tokens are prefilled; half of them, rounded up, if None.
      windows_per_file: the first windows of each text, at most.
      batch_size: windows that run at once.
      seed: of what is drawn: resamples, and the items of recall.
      measures: some of `MEASURES`, and names of what `evaluate` is given as `further`.
      samples: resamples of an interval.
      layer_windows: windows, spread over all, whose layers are looked into.
      recall_kinds: what is asked for, see `turbojax.evaluation.make_item`; None for all, or of a
        model that reads bytes what stands in source code.
      recall_lengths: tokens of recall's items, see `turbojax.evaluation.make_item`; a model with
        fewer positions is asked up to its own length.
      recall_depths: where what is asked for stands, from 0, the beginning, to 1.
      recall_items: items of each kind, length and depth.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if one is out of range, or a method or measure is missing or named twice.
    """

    methods: tuple[str, ...]
    context: int = 4095
    prompt: int | None = None
    windows_per_file: int = 4
    batch_size: int = 8
    seed: int = 0
    measures: tuple[str, ...] = MEASURES
    samples: int = 2000
    layer_windows: int = 4
    recall_kinds: tuple[Kind, ...] | None = None
    recall_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    recall_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    recall_items: int = 4

    def __post_init__(self) -> None:
        _checks.check_sizes(
            context=self.context,
            windows_per_file=self.windows_per_file,
            batch_size=self.batch_size,
            samples=self.samples,
            prompt=self.prompt_length,
            layer_windows=self.layer_windows,
            recall_items=self.recall_items,
            **{f"recall_lengths[{i}]": x for i, x in enumerate(self.recall_lengths)},
        )
        _checks.check_integer("seed", self.seed)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        if self.prompt_length > self.context:
            raise ValueError(f"prompt={self.prompt} must be at most context={self.context}")
        if "layers" in self.measures and self.prompt_length == self.context:
            # Its windows are the inputs alone, and some must be left to decode.
            raise ValueError(
                f"prompt={self.prompt_length} must be below context={self.context} for the measure "
                "'layers'"
            )
        for depth in self.recall_depths:
            _checks.check_number("recall_depths", depth)
            if not 0 <= depth <= 1:
                raise ValueError(f"recall_depths={self.recall_depths} must be between 0 and 1")
        for kind in self.recall_kinds or ():
            if kind not in KINDS:
                raise ValueError(f"recall_kinds: {kind!r} must be one of {', '.join(KINDS)}")
        for name in ("methods", "measures", "recall_kinds", "recall_lengths", "recall_depths"):
            given = getattr(self, name)
            if given is None:
                continue
            if not given or len(set(given)) != len(given):
                raise ValueError(f"{name}={given} must name at least one, and each once")

    @property
    def prompt_length(self) -> int:
        """How many of a window's tokens are prefilled."""
        return (self.context + 1) // 2 if self.prompt is None else self.prompt


class Further(Protocol):
    """A measure that is not one of `MEASURES`, such as a file of tasks."""

    @property
    def identity(self) -> Json:
        """What its results depend on, beside model and seed, as plain JSON values."""
        ...

    def __call__(
        self, decoder: AnyDecoder, method: Method, progress: Callable[[int, int], None]
    ) -> Json:
        """A method's row; `progress` is called with how much of how much is done."""
        ...


def evaluate(
    model: AnyModel,
    texts: Mapping[str, Text],
    settings: Settings,
    *,
    out: Path | None = None,
    progress: Report | None = None,
    further: Mapping[str, Further] | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """Measures all methods.

    Args:
      model: the model.
      texts: by name, bytes of a byte-level model or tokens; too short ones are left out, and have
        0 windows in what is returned.
      settings: what is measured.
      out: a file that is written after every row. If it is there, its rows are kept: the same call
        goes on, and one with further methods or measures adds theirs.
      progress: told how far each measure is.
      further: measures by name, for those of `settings.measures` that are not in `MEASURES`.
      tokenizer: of texts that are tokens, for recall, which writes lines of its own.

    Returns:
      What the file holds, see `docs/evaluation.md`. What a method cannot do with this model (a
      `NotImplementedError`) is a row ``{"refused": WHY}``. With the same seed and device all but
      ``"date"`` and ``"seconds"`` are equal bit for bit, in one run or several.

    Raises:
      TypeError, ValueError: if model, texts or settings do not fit, a method is unknown or its
        cache cannot hold the model's heads, or `out` holds results that were made with something
        else.
      OSError: if `out` cannot be written.
    """
    further = further or {}
    decoder = decoder_of(model)
    methods = [method(name, decoder.config) for name in settings.methods]
    for one in methods:
        cache_bytes(decoder, settings.context, one.cache)  # refuses now what would later
    for name in settings.measures:
        if (name in MEASURES) == (name in further):
            known = ", ".join([*MEASURES, *further])
            raise ValueError(f"measure {name!r} must be one of {known}, and each there once")
    cut = windows(texts, settings.context, settings.windows_per_file)
    is_bytes = all(isinstance(texts[name], bytes) for name in cut)
    work = _Work(decoder, cut, settings, "byte" if is_bytes else "token")
    own = {"text": work.text, "layers": work.layers}
    measures: dict[str, Any] = {**own, **further}
    if "recall" in settings.measures:
        measures["recall"] = RecallMeasure(
            texts,
            tokenizer,
            kinds=settings.recall_kinds,
            lengths=settings.recall_lengths,
            depths=settings.recall_depths,
            count=settings.recall_items,
            seed=settings.seed,
            max_length=decoder.config.max_length,
            batch_size=settings.batch_size,
        )
    tell = progress or (lambda method, measure, done, total: None)
    machine, dates = describe_machine()
    asked, kept_by_row = dataclasses.asdict(settings), ("methods", "measures")
    records = Records(
        out,
        {
            **machine,
            "model": describe_model(decoder),
            "settings": {
                **{name: value for name, value in asked.items() if name not in kept_by_row},
                "prompt": settings.prompt_length,
            },
            "texts": describe_texts({name: cut.get(name, _NO_WINDOWS) for name in texts}),
        },
        dates,
        # By name, so that a later run can add further measures to the file.
        {
            **{x: measures[x].identity for x in settings.measures if x not in own},
            # The layers that a method's file names: the file may change later.
            **{
                one.name: {"layers": [str(kind) for kind in one.cache]}
                for one in methods
                if isinstance(one.cache, tuple)
            },
        },
    )
    for one in methods:
        for name in settings.measures:
            told = functools.partial(tell, one.name, name)
            make = functools.partial(_row_of, measures[name], decoder, one, told)
            records.row(("methods", one.name, name), make)
    return records.document


def _row_of(
    measure: Further, decoder: AnyDecoder, method: Method, tell: Callable[[int, int], None]
) -> Json:
    """A row, or the reason why there is none."""
    try:
        return measure(decoder, method, tell)
    except NotImplementedError as error:
        return {"refused": str(error)}


class _Work:
    """What the measures of one evaluation share: decoder, windows of every text, settings, unit."""

    def __init__(
        self, decoder: AnyDecoder, cut: Mapping[str, np.ndarray], settings: Settings, unit: str
    ) -> None:
        self.settings, self.unit = settings, unit
        self.tokens = np.concatenate(list(cut.values()))
        self.owners = np.repeat(list(cut), [len(rows) for rows in cut.values()])
        self.exact = ExactRun(
            decoder,
            self.tokens,
            prompt=settings.prompt_length,
            batch_size=settings.batch_size,
        )

    def text(
        self, decoder: AnyDecoder, method: Method, progress: Callable[[int, int], None]
    ) -> Json:
        """What text costs, see `text_row`."""
        settings, prompt = self.settings, self.settings.prompt_length
        found = score(
            decoder,
            self.tokens,
            method,
            prompt=prompt,
            batch_size=settings.batch_size,
            progress=counted(progress, self.tokens[:, prompt:].size),
            exact=self.exact,
        )
        return text_row(found, self.owners, self.unit, seed=settings.seed, samples=settings.samples)

    def layers(
        self, decoder: AnyDecoder, method: Method, progress: Callable[[int, int], None]
    ) -> Json:
        """How far every layer is off, see `layer_errors`."""
        count = min(self.settings.layer_windows, len(self.tokens))
        chosen = np.unique(np.linspace(0, len(self.tokens) - 1, count).astype(int))
        size = min(2, count)
        total = -(-len(chosen) // size) * decoder.config.num_layers
        found = layer_errors(
            decoder,
            self.tokens[chosen, :-1],
            method,
            prompt=self.settings.prompt_length,
            batch_size=size,
            progress=counted(progress, total),
        )
        return layers_row(found, len(chosen))


def layers_row(found: LayerErrors, windows: int) -> dict[str, Json]:
    """A method's errors by layer as an evaluation's file has them."""

    def plain(errors: Errors) -> dict[str, Json]:
        names = ("cosine", "relative_l1", "rmse")
        return {name: getattr(errors, name).tolist() for name in names}

    parts = {"prefill": plain(found.prefill), "decode": plain(found.decode)}
    return {"windows": windows, **plain(found), **parts}


def text_row(
    found: Scores, owners: np.ndarray, unit: str, *, seed: int = 0, samples: int = 2000
) -> dict[str, Json]:
    """A method's scores as an evaluation's file has them.

    Args:
      found: the scores of all windows.
      owners: ``[n]``, the text that each window is of.
      unit: ``"byte"`` or ``"token"``.
      seed: of the resamples.
      samples: resamples.

    Returns:
      Means over windows, and their 95 % intervals. ``"cost"`` is what the method adds to the bits
      of the exact cache, window by window; ``"divergence"`` is in bits, too.
    """
    names = list(dict.fromkeys(owners.tolist()))
    by_files = len(names) >= _FILES_TO_DRAW
    groups = owners.tolist() if by_files else None

    def interval(values: np.ndarray) -> Any:
        return bootstrap(values, groups, seed=seed, samples=samples)

    bits, exact = (x.mean(axis=1, dtype=np.float64) for x in (found.bits, found.exact_bits))
    # Differences per token first: where tokens do not differ, the result is exactly 0.
    cost = (found.bits.astype(np.float64) - found.exact_bits).mean(axis=1)
    divergence = found.divergence.mean(axis=1, dtype=np.float64)
    agree = (found.choices == found.exact_choices) & (found.choices >= 0)
    middle = found.bits.shape[1] // 2
    mean, extra, diverged = interval(bits), interval(cost), interval(divergence)
    return {
        f"bits_per_{unit}": mean.mean,
        "perplexity": 2**mean.mean if mean.mean < _MOST_BITS else math.inf,
        "interval": mean.ends,
        "interval_of": "files" if by_files else "windows",
        "cost": extra.mean,
        "cost_interval": extra.ends,
        "same_greedy_choice": float(agree.mean()),
        "divergence": diverged.mean,
        "divergence_interval": diverged.ends,
        f"exact_bits_per_{unit}": float(exact.mean()),
        "by_file": {name: float(bits[owners == name].mean()) for name in names},
        "cost_by_file": {name: float(cost[owners == name].mean()) for name in names},
        "by_window": bits.tolist(),
        "cost_by_window": cost.tolist(),
        "cost_by_half": [
            _mean_difference(found, slice(None, middle)),
            _mean_difference(found, slice(middle, None)),
        ],
        "decoded": int(found.bits.size),
        "cache_bytes": found.cache_bytes,
        "exact_cache_bytes": found.exact_cache_bytes,
    }


def _mean_difference(found: Scores, part: slice) -> float | None:
    """What the method adds to a part of the targets; None where that is empty."""
    bits = found.bits[:, part].astype(np.float64) - found.exact_bits[:, part]
    return float(bits.mean()) if bits.size else None
