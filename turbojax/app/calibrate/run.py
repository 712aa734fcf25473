"""What `turbojax calibrate` does and shows: a model and text in, a cache for every layer out."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turbojax import _checks, evaluation
from turbojax._environment import environment
from turbojax.app import options, startup, text_model
from turbojax.app.quantize.run import calibration_text, cut
from turbojax.caches import CacheKind
from turbojax.evaluation import Method
from turbojax.evaluation.methods import of_one_layer
from turbojax.models.text.tokenizer import NumberTokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is measured, how much of it is done, and how much there is."""

DEFAULT_CANDIDATES = ("k4v2", "4bit", "paged_int8_v4", "paged_int8")
CHOSEN = "chosen"
"""The name of the layers' own caches among those that are measured."""

_DECODED = 128
_LOSS = 0.01


@dataclasses.dataclass(frozen=True)
class CalibrateSettings:
    """What to choose, and by what: the options of the command."""

    out: Path
    model: str = "embedded"
    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    loss: float | None = None
    ratio: float | None = None
    context: int = 1024
    decoded: int = _DECODED
    windows: int = 8
    batch_size: int = 4
    length: int | None = None
    texts: tuple[Path, ...] = ()
    weights: str | None = None
    dtype: str = "float32"
    max_length: int | None = None

    def __post_init__(self) -> None:
        _checks.check_sizes(
            context=self.context,
            decoded=self.decoded,
            windows=self.windows,
            batch_size=self.batch_size,
            length=self.sized_for,
        )
        if self.decoded >= self.context:
            raise ValueError(f"decoded={self.decoded} must be below context={self.context}")
        if self.loss is not None and self.ratio is not None:
            raise ValueError("give a loss or a ratio, one of them")
        for name in ("loss", "ratio"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be above 0")
        if not self.candidates or len(set(self.candidates)) != len(self.candidates):
            raise ValueError(f"candidates={self.candidates} must name each cache once")

    @property
    def sized_for(self) -> int:
        """Tokens that caches are sized for."""
        return self.context if self.length is None else self.length

    @property
    def prompt(self) -> int:
        """Tokens of a window that are prefilled."""
        return self.context - self.decoded

    @property
    def limit(self) -> str:
        """What the choice keeps within, in words."""
        if self.ratio is not None:
            return f"at least {self.ratio:g}x smaller than bfloat16"
        return f"at most {self.most_loss:g} bits per token"

    @property
    def most_loss(self) -> float:
        """The loss that is chosen by, where there is no ratio."""
        return _LOSS if self.loss is None else self.loss


@dataclasses.dataclass(frozen=True)
class Row:
    """A cache of all layers, or the layers' own.

    Attributes:
      predicted: bits per token, the sum of what its layers cost alone.
      divergence: bits per token, measured.
      cost: bits per token that true tokens cost more than through the exact cache, measured.
      nbytes: of a sequence.
      ratio: bytes of a bfloat16 cache over these.
    """

    predicted: float
    divergence: float
    cost: float
    nbytes: int
    ratio: float


@dataclasses.dataclass(frozen=True)
class CalibrateReport:
    """What one run chose and measured; per layer where there are several numbers.

    Attributes:
      costs: by candidate, the measured divergence in bits per token with this cache in one layer
        alone; `scales` are the factors that these were multiplied by, see `run`.
      predicted: the scaled costs of the chosen caches.
      nbytes: bytes of the chosen caches; `exact_bytes` are those of a sequence's bfloat16 cache.
      rows: by candidate, and `CHOSEN`.
      tokens: that were decoded for each figure.
    """

    settings: CalibrateSettings
    layers: tuple[str, ...]
    costs: dict[str, tuple[float, ...]]
    scales: dict[str, float]
    predicted: tuple[float, ...]
    nbytes: tuple[int, ...]
    rows: dict[str, Row]
    exact_bytes: int
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; numbers that are not finite are None."""
        found = _plain(dataclasses.asdict(self))
        texts = [str(path) for path in self.settings.texts]
        found["settings"] |= {"out": str(self.settings.out), "texts": texts}
        return {**environment(), **found}


def run(settings: CalibrateSettings, progress: Progress | None = None) -> CalibrateReport:
    """Chooses a cache for every layer, measures the choice, and writes it.

    The costs of single layers add up only roughly: errors of several layers meet, and prompts are
    left out. So all costs of a candidate are scaled by one factor, to sum up to the divergence that
    is measured with this candidate in all layers. The choice is made by these scaled costs, and is
    then measured itself.
    """
    startup.check_output_file("--out", settings.out)
    startup.check_input_files(*settings.texts)
    found = options.find(
        settings.model, None, settings.weights, settings.dtype, settings.max_length
    )
    config = found.config
    if settings.context > config.max_length:
        raise ValueError(
            f"--context {settings.context} must be at most the model's {config.max_length}"
        )
    kinds = {name: of_one_layer(name, config) for name in settings.candidates}
    sizes = np.stack([_sizes(config, kind, settings) for kind in kinds.values()])
    exact = int(_sizes(config, "bfloat16", settings).sum())
    _check_ratio(settings, sizes, exact)
    tokens = _windows(settings, found)
    _check_memory(settings, found)
    decoder, tell = found.load().decoder, progress or _tell_nobody
    costs = _layer_costs(settings, decoder, tokens, kinds, tell)
    measure = _Measure(settings, decoder, tokens, tell)
    measured = {name: measure(name, kind) for name, kind in kinds.items()}
    scales = [
        one.divergence / total if total > 0 else 1.0
        for one, total in zip(measured.values(), costs.sum(axis=1), strict=True)
    ]
    scaled = costs * np.array(scales)[:, None]
    chosen = _choose(settings, scaled, sizes, exact)
    names = [settings.candidates[i] for i in chosen]
    everywhere = np.arange(config.num_layers)
    own = measure(CHOSEN, tuple(kinds[name] for name in names))
    report = CalibrateReport(
        settings=settings,
        layers=tuple(names),
        costs={name: tuple(map(float, row)) for name, row in zip(kinds, costs, strict=True)},
        scales={name: float(x) for name, x in zip(kinds, scales, strict=True)},
        predicted=tuple(map(float, scaled[chosen, everywhere])),
        nbytes=tuple(map(int, sizes[chosen, everywhere])),
        rows={
            **{
                name: _row(costs[i].sum(), measured[name], sizes[i].sum(), exact)
                for i, name in enumerate(kinds)
            },
            CHOSEN: _row(
                scaled[chosen, everywhere].sum(), own, sizes[chosen, everywhere].sum(), exact
            ),
        },
        exact_bytes=exact,
        tokens=len(tokens) * settings.decoded,
    )
    evaluation.write_layers(settings.out, report.layers, report.to_json())
    return report


@dataclasses.dataclass(frozen=True)
class _Measured:
    divergence: float
    cost: float


class _Measure:
    """What caches of a whole model cost, step by step; the exact run is shared."""

    def __init__(
        self, settings: CalibrateSettings, decoder: Any, tokens: np.ndarray, tell: Progress
    ) -> None:
        self._settings, self._tell, self._decoder = settings, tell, decoder
        self._run = evaluation.ExactRun(
            decoder, tokens, prompt=settings.prompt, batch_size=settings.batch_size
        )

    def __call__(self, name: str, cache: Any) -> _Measured:
        run, done = self._run, 0
        total = run.tokens[:, run.prompt :].size

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._tell(f"{name}, all layers", done, total)

        method = Method(name, cache)
        scores = evaluation.score(
            self._decoder, run.tokens, method, prompt=run.prompt, exact=run, progress=advance
        )
        # The first target follows the prompt: it is predicted without reading the cache.
        bits, exact, divergence = (
            x[:, 1:].mean(dtype=np.float64)
            for x in (scores.bits, scores.exact_bits, scores.divergence)
        )
        return _Measured(float(divergence), float(bits - exact))


def _layer_costs(
    settings: CalibrateSettings,
    decoder: Any,
    tokens: np.ndarray,
    kinds: Mapping[str, CacheKind],
    tell: Progress,
) -> np.ndarray:
    batches = -(-len(tokens) // min(settings.batch_size, len(tokens)))
    done, total = 0, batches * len(kinds) * decoder.config.num_layers

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell("layers, one by one", done, total)

    tell("layers, one by one", 0, total)
    return evaluation.layer_costs(
        decoder,
        tokens,
        tuple(kinds.values()),
        prompt=settings.prompt,
        batch_size=settings.batch_size,
        progress=advance,
    )


def _choose(
    settings: CalibrateSettings, costs: np.ndarray, sizes: np.ndarray, exact: int
) -> np.ndarray:
    if settings.ratio is not None:
        return evaluation.choose(costs, sizes, size=int(exact / settings.ratio))
    try:
        return evaluation.choose(costs, sizes, loss=settings.most_loss)
    except ValueError as error:
        raise ValueError(f"{error}: give a larger --loss, or candidates that lose less") from error


def _check_ratio(settings: CalibrateSettings, sizes: np.ndarray, exact: int) -> None:
    """Raises ValueError, before anything is measured, if no choice is so small."""
    most = exact / int(sizes.min(axis=0).sum())
    if settings.ratio is not None and settings.ratio > most:
        raise ValueError(
            f"--ratio {settings.ratio:g} must be at most {most:.2f}, that of the smallest "
            f"candidates at {settings.sized_for:,} tokens: give smaller ones, or another --length"
        )


def _sizes(config: Any, kind: CacheKind, settings: CalibrateSettings) -> np.ndarray:
    # As on GPUs, in bfloat16: a CPU computes in float32, and some scales have the model's dtype.
    return evaluation.layer_bytes(config, kind, settings.sized_for, jnp.bfloat16)


def _row(predicted: float, measured: _Measured, nbytes: int, exact: int) -> Row:
    ratio = exact / int(nbytes)
    return Row(float(predicted), measured.divergence, measured.cost, int(nbytes), ratio)


def _windows(settings: CalibrateSettings, found: text_model.FoundModel) -> np.ndarray:
    """int32 ``[n, context + 1]``, spread over the text; ValueError if it has not one window."""
    if isinstance(found.tokenizer, NumberTokenizer) and not settings.texts:
        raise ValueError("tokens are numbers here, there is no tokenizer.json: give --text")
    length = settings.context + 1

    def default() -> Sequence[bytes]:
        # On average a token is at most eight bytes.
        return calibration_text(8 * length * settings.windows)

    found_windows, _ = cut(
        "calibration", found.tokenizer, settings.texts, default, length, settings.windows
    )
    return found_windows


def _check_memory(settings: CalibrateSettings, found: text_model.FoundModel) -> None:
    """Raises ValueError if windows, or weights, need more memory than there is."""
    config, batch = found.config, min(settings.batch_size, settings.windows)
    streams = (config.num_layers + 1) * settings.decoded * config.hidden_size
    startup.check_memory(
        {
            "weights": found.weight_bytes,
            "exact caches": 2
            * startup.cache_bytes(config, found.dtype, batch, settings.context, "exact"),
            "what layers read": batch * streams * found.dtype.itemsize,
            "logits": 3 * 4 * batch * settings.decoded * config.vocab_size,
            "prompts that run": startup.prompt_bytes(config, found.dtype, batch, settings.context),
        },
        "smaller --batch-size, --decoded or --context",
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tell_nobody(what: str, done: int, total: int) -> None:
    del what, done, total


def render(report: CalibrateReport) -> RenderableType:
    """The tables of a run."""
    settings = report.settings
    note = (
        f"Bits per token, of {report.tokens:,} tokens decoded after {settings.prompt:,}: KL is the "
        "divergence from the exact cache, cost what true tokens cost more. Bytes are those of "
        f"{settings.sized_for:,} tokens. Costs of layers add up roughly; what counts is what was "
        "measured."
    )
    return Group(_layers_table(report), _caches_table(report), Text(note, style="dim"))


def groups(report: CalibrateReport) -> Iterator[tuple[int, int, str]]:
    """The first and the last of neighbouring layers with the same cache, and its name."""
    numbered = itertools.groupby(enumerate(report.layers), key=lambda item: item[1])
    for name, members in numbered:
        layers = [layer for layer, _ in members]
        yield layers[0], layers[-1], name


def _layers_table(report: CalibrateReport) -> Table:
    table = Table(title=f"A cache for each layer: {report.settings.limit}", pad_edge=False)
    table.add_column("layers")
    table.add_column("cache", overflow="fold")
    for column in ("predicted KL", "bytes", "smaller"):
        table.add_column(column, justify="right")
    each = report.exact_bytes / len(report.layers)
    for first, last, name in groups(report):
        part = slice(first, last + 1)
        size = sum(report.nbytes[part])
        table.add_row(
            str(first) if first == last else f"{first} to {last}",
            name,
            f"{sum(report.predicted[part]):.4f}",
            f"{size:,}",
            f"{each * (last + 1 - first) / size:.2f}x",
        )
    return table


def _caches_table(report: CalibrateReport) -> Table:
    table = Table(title="The choice beside the same cache in all layers", pad_edge=False)
    table.add_column("cache", overflow="fold")
    for column in ("sum of\nlayers' KL", "KL,\nmeasured", "cost,\nmeasured", "bytes", "smaller"):
        table.add_column(column, justify="right")
    for name, row in report.rows.items():
        table.add_row(
            name,
            f"{row.predicted:.4f}",
            f"{row.divergence:.4f}",
            f"{row.cost:+.4f}",
            f"{row.nbytes:,}",
            f"{row.ratio:.2f}x",
            style="bold" if name == CHOSEN else None,
        )
    return table
