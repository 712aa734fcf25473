"""Tables of what is rounded how: channels against tokens (figure 10), FireQ's columns (table g)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import tables
from benchmarks.evidence.rows import BITS, Spec, channel_errors
from benchmarks.evidence.subject import Subject
from benchmarks.evidence.writing import EvidenceTable, Section, found
from benchmarks.plots import Bar, draw_bars, wide_figure
from benchmarks.tables import Result, Row
from turbojax import models, smoothing
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_params, layer_weights, quantize_from

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (e) Channels against tokens ----------------------------------------------------------------------

_CHANNELS = "channels"


def _channel_specs(subject: Subject) -> list[Spec]:
    return [channel_errors()]


def channel_section(result: Result) -> Section:
    row = found(result, _CHANNELS)
    lines = []
    for side, errors in () if row is None else row["relative_l2"].items():
        for bits in BITS:
            channel, token = (np.asarray(errors[f"{x}-{bits}"]) for x in ("channel", "token"))
            worse = [str(i) for i in np.flatnonzero(channel > token)]
            lines.append(
                [
                    f"{side}s, {bits} bits",
                    f"{channel.mean():.4f}",
                    f"{token.mean():.4f}",
                    f"{token.mean() / channel.mean():.2f}x",
                    ", ".join(worse) or "none",
                ]
            )
    header = ["codes of", "channel-wise error", "token-wise error", "token-wise is larger by"]
    about = (
        "Relative L2 error, the mean over layers, of codes with a minimum and a scale for 64 "
        "tokens of a channel, or for as many channels of a token: the same bytes."
    )
    return Section(
        [tables.table([*header, "layers where channel-wise is worse"], lines)], about, [_CHANNELS]
    )


def channel_plot(result: Result) -> "Figure":
    """Errors by layer: keys on the left, values on the right."""
    figure = wide_figure(11)
    row = found(result, _CHANNELS)
    for axes, side in zip(figure.subplots(1, 2, sharey=True), ("key", "value"), strict=True):
        for kind, style in (("channel", "o-"), ("token", "s--")):
            for i, bits in enumerate(BITS if row is not None else ()):
                assert row is not None
                errors = row["relative_l2"][side][f"{kind}-{bits}"]
                axes.plot(errors, style, color=f"C{i}", label=f"{kind}-wise, {bits} bits")
        axes.set(title=f"{side}s", xlabel="layer", ylabel="relative L2 error", yscale="log")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return figure


# (g) FireQ's columns ------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[str, ...]] = {
    "none": (),
    "RPN": ("rpn",),
    "CRS": ("crs",),
    "CAS": ("cas",),
    "PTS": ("pts",),
    "RPN+CRS": ("rpn", "crs"),
    "RPN+CRS+CAS": ("rpn", "crs", "cas"),
    "all": ("rpn", "crs", "cas", "pts"),
}
"""The paper's columns and what each of them smooths."""
# Perplexity of Llama-3.1-8B on Wikitext-2 in these columns, by the paper (Baek et al., 2025).
_PAPER = (8.15, 8.00, 7.48, 7.68, 7.98, 7.44, 7.18, 7.11)
_MODELS = ("as_is", "planted")
# Exact rescalings by powers of two, which leave what the model computes the same.
OUTLIERS = smoothing.Outliers(
    key_factors=(4.0, 8.0), spread=0.5, channel_share=0.01, channel_factors=(4.0, 8.0)
)
_WINDOWS, _LENGTH = 24, 1025


def plant(decoder: models.Decoder) -> models.Decoder:
    """The model with `OUTLIERS`: its keys and its weights' input channels are uneven."""
    layers = []
    for i, params in enumerate(decoder.layers):
        weights = layer_weights(params, decoder.config)
        planted = smoothing.plant_outliers(weights, seed=i, outliers=OUTLIERS)
        layers.append(layer_params(planted))
    return dataclasses.replace(decoder, layers=tuple(layers))


def bits(model: Any, windows: np.ndarray, cache: Any) -> float:
    """Per token of windows ``[n, T + 1]``."""
    scores = models.token_bits(model, windows, cache=cache, batch_size=1)
    return float(scores.mean(dtype=np.float64))


def smoothed_bits(
    decoder: models.Decoder,
    calibration: np.ndarray,
    windows: np.ndarray,
    columns: tuple[str, ...] = tuple(COLUMNS),
) -> dict[str, float]:
    """Of INT4 weights and KV4, by what is smoothed."""
    statistics = calibrate(decoder, calibration)
    found = {}
    for name in columns:
        parts = {part: part in COLUMNS[name] for part in ("cas", "pts", "rpn", "crs")}
        chosen = smoothing.Smoothing(alpha=8.0, beta=8.0, cas_inputs="all", **parts)
        quantized = quantize_from(decoder, statistics, chosen, scale_dtype="e4m3")
        found[name] = bits(quantized, windows, "kv4")
    return found


def _fireq_spec(name: str) -> Spec:
    def measure(subject: Subject) -> Row:
        held_out = subject.tokens[:: max(1, len(subject.tokens) // _WINDOWS), :_LENGTH]
        model = subject.decoder if name == "as_is" else plant(subject.decoder)
        # A cut model is to show that everything runs.
        every = tuple(COLUMNS)
        columns = every if subject.sizes.layers is None else (every[0], every[-1])
        return {
            "exact": bits(model, held_out, "exact"),
            "columns": smoothed_bits(model, subject.calibration, held_out, columns),
            "decoded": int(held_out[:, 1:].size),
        }

    return Spec(f"fireq/{name}", measure, quick=name == "as_is")


def _fireq_specs(subject: Subject) -> list[Spec]:
    return [_fireq_spec(name) for name in _MODELS]


_TITLES = {"as_is": "the model as it is", "planted": "with moderate outliers planted"}


def fireq_section(result: Result) -> Section:
    rows = {x: found(result, f"fireq/{x}") for x in _MODELS}
    columns = list(COLUMNS)
    lines = []
    for model, row in rows.items():
        if row is None:
            continue
        costs = [row["columns"].get(x) for x in columns]
        cells = ["-" if x is None else f"{x - row['exact']:+.4f}" for x in costs]
        lines.append([_TITLES[model], f"{row['exact']:.4f}", *cells])
    lines.append(
        [
            "the paper: perplexity of Llama-3.1-8B on Wikitext-2",
            "-",
            *(f"{x:.2f}" for x in _PAPER),
        ]
    )
    unit = result["texts"]["unit"]
    worse = [
        f"{column}, {_TITLES[model]} ({bits - row['columns']['none']:+.4f})"
        for model, row in rows.items()
        for column, bits in ({} if row is None else row["columns"]).items()
        if row is not None and bits > row["columns"]["none"]
    ]
    about = (
        f"Bits per {unit} above exact attention with float weights: INT4 weights, e4m3 activations "
        "and the KV4 cache, whole windows in one pass. "
        f"Worse than without smoothing: {'; '.join(worse) or 'none'}."
    )
    every = [f"fireq/{x}" for x in _MODELS]
    return Section([tables.table(["", f"exact, bits per {unit}", *columns], lines)], about, every)


def fireq_plot(result: Result) -> "Figure":
    groups: dict[str, dict[str, Bar]] = {column: {} for column in COLUMNS}
    for model in _MODELS:
        row = found(result, f"fireq/{model}")
        for column, bits in {} if row is None else row["columns"].items():
            assert row is not None
            cost = bits - row["exact"]
            groups[column][_TITLES[model]] = Bar(cost, f"{cost:.3f}")
    figure = wide_figure(10)
    axes = draw_bars(figure, groups, 0.35)
    axes.margins(y=0.2)
    axes.set(title="FireQ's smoothing", ylabel=f"bits per {result['texts']['unit']} above exact")
    return figure


CHANNELS = EvidenceTable(
    "e",
    "channels",
    "Errors of channel-wise and of token-wise codes by layer",
    _channel_specs,
    channel_section,
    channel_plot,
)
FIREQ = EvidenceTable(
    "g",
    "fireq",
    "What each column of FireQ's smoothing costs",
    _fireq_specs,
    fireq_section,
    fireq_plot,
)
