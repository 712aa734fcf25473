"""What each part of FireQ's smoothing is worth: bits per byte of the embedded model, quantized.

`python -m benchmarks.fireq_ablation --out benchmarks/results/fireq_ablation.json --plot FILE`

Linear layers are INT4 times e4m3, keys and values 4 bits with a scale per token and head, queries
e4m3 (`models.token_bits` with ``cache="kv4"``). The model is measured as it is, and with planted
outliers: exact rescalings by powers of two (`smoothing.plant_outliers`) that leave what it computes
the same and make its keys and its weights' input channels uneven, moderately and strongly. Keys of
two channel pairs a head grow, and the queries shrink for it; input channels of every linear layer
grow, and the rows or the norm's factor before them shrink. CAS can undo the latter exactly: for it
these outliers are the best case.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from benchmarks import stored
from turbojax import _writing, models, smoothing
from turbojax._environment import environment
from turbojax.app.quantize import run as quantizing
from turbojax.app.text_model import read_text
from turbojax.models.layer_by_layer import calibrate
from turbojax.models.quantize import layer_params, layer_weights, quantize_from
from turbojax.models.text.tokenizer import ByteTokenizer

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

OUTLIERS: dict[str, smoothing.Outliers | None] = {
    "as_is": None,
    "planted": smoothing.Outliers(
        key_factors=(4.0, 8.0), spread=0.5, channel_share=0.01, channel_factors=(4.0, 8.0)
    ),
    "planted_strongly": smoothing.Outliers(),
}
"""The models that are measured, by what is planted in them."""

PAPER = {
    "none": 8.15,
    "RPN": 8.00,
    "CRS": 7.48,
    "CAS": 7.68,
    "PTS": 7.98,
    "RPN+CRS": 7.44,
    "RPN+CRS+CAS": 7.18,
    "all": 7.11,
}
"""Perplexity of Llama-3.1-8B on Wikitext-2, as the paper (Baek et al., 2025) reports it."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Windows of bytes.

    Attributes:
      calibration: int32 ``[n, T]``, of modules that are not held out.
      held_out: int32 ``[m, T + 1]``, of the held-out modules.
    """

    calibration: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of_library(cls, window: int, calibrated: int, evaluated: int) -> "Text":
        """So many windows of the running Python's standard library."""
        tokenizer = ByteTokenizer()

        def cut(contents: list[bytes], length: int, count: int) -> np.ndarray:
            stream = [
                token for content in contents for token in tokenizer.encode(read_text(content))
            ]
            return quantizing.windows(stream, length, count)

        calibration = quantizing.calibration_text(4 * window * calibrated)
        return cls(
            cut(calibration, window, calibrated),
            cut(quantizing.evaluation_text(), window + 1, evaluated),
        )


def plant(decoder: models.Decoder, outliers: smoothing.Outliers, seed: int = 0) -> models.Decoder:
    layers = []
    for i, params in enumerate(decoder.layers):
        weights = layer_weights(params, decoder.config)
        planted = smoothing.plant_outliers(weights, seed=seed + i, outliers=outliers)
        layers.append(layer_params(planted))
    return dataclasses.replace(decoder, layers=tuple(layers))


def bits(model: Any, text: Text, cache: Any, advance: Callable[[int], None]) -> float:
    scores = models.token_bits(model, text.held_out, cache=cache, batch_size=1, progress=advance)
    return float(scores.mean(dtype=np.float64))


def measure(
    decoder: models.Decoder,
    text: Text,
    options: smoothing.Smoothing,
    advance: Callable[[int], None],
    columns: tuple[str, ...] = tuple(COLUMNS),
    scale_dtype: Any = "e4m3",
) -> dict[str, float]:
    statistics = calibrate(decoder, text.calibration)
    rows = {}
    for name in columns:
        parts = {part: part in COLUMNS[name] for part in ("cas", "pts", "rpn", "crs")}
        chosen = dataclasses.replace(options, **parts)
        quantized = quantize_from(decoder, statistics, chosen, scale_dtype=scale_dtype)
        rows[name] = bits(quantized, text, "kv4", advance)
    return rows


def recovered(exact: float, as_is: dict[str, float], planted: dict[str, float]) -> dict[str, float]:
    """Shares of what the planted outliers cost that smoothing recovers."""
    gain = planted["none"] - planted["all"]
    return {
        "against_unsmoothed": gain / (planted["none"] - as_is["none"]),
        "against_smoothed": gain / (planted["none"] - as_is["all"]),
        "against_exact": gain / (planted["none"] - exact),
    }


def ablate(
    text: Text, options: smoothing.Smoothing, progress: Progress, seed: int = 0
) -> dict[str, Any]:
    decoder = models.unstack(models.load_transformer(dtype=jnp.float32))
    # Each model also runs unquantized, through either cache; and four variants in two columns.
    rounds = len(OUTLIERS) * (len(COLUMNS) + 2) + 8
    task = progress.add_task("bytes", total=rounds * text.held_out[:, 1:].size)

    def advance(count: int) -> None:
        progress.advance(task, count)

    floats: dict[str, dict[str, float]] = {}
    columns: dict[str, dict[str, float]] = {}
    for name, outliers in OUTLIERS.items():
        model = decoder if outliers is None else plant(decoder, outliers, seed)
        floats[name] = {c: bits(model, text, c, advance) for c in quantizing.CACHES}
        columns[name] = measure(model, text, options, advance)
    exact = floats["as_is"]["exact"]
    return {
        "model": "embedded",
        "evaluated_bytes": int(text.held_out[:, 1:].size),
        "window": text.calibration.shape[1],
        "calibration_bytes": int(text.calibration.size),
        "scale_dtype": "e4m3",
        "smoothing": dataclasses.asdict(options),
        "outliers": {k: v and dataclasses.asdict(v) for k, v in OUTLIERS.items()},
        "seed": seed,
        "exact_bits_per_byte": exact,
        "float_weights_bits_per_byte": floats,
        "bits_per_byte": columns,
        "variants": _variants(decoder, text, options, seed, advance),
        "recovered": {
            name: recovered(exact, columns["as_is"], columns[name])
            for name in OUTLIERS
            if name != "as_is"
        },
        "paper_perplexity_llama_3_1_8b": PAPER,
    }


def _variants(
    decoder: models.Decoder,
    text: Text,
    options: smoothing.Smoothing,
    seed: int,
    advance: Callable[[int], None],
) -> dict[str, dict[str, float]]:
    """Other choices, in the first and the last column."""
    outliers = OUTLIERS["planted"]
    assert outliers is not None
    constant: Any = dataclasses.replace(options, cas_inputs="constant")
    planted = plant(decoder, outliers, seed)
    elsewhere = plant(decoder, dataclasses.replace(outliers, inputs="constant"), seed)

    def ends(model: models.Decoder, chosen: Any, scale_dtype: str) -> dict[str, float]:
        return measure(model, text, chosen, advance, ("none", "all"), scale_dtype)

    return {
        "as_is, scale_dtype=bf16": ends(decoder, options, "bf16"),
        "as_is, cas_inputs=constant": ends(decoder, constant, "e4m3"),
        "planted, cas_inputs=constant": ends(planted, constant, "e4m3"),
        "planted behind no norm, cas_inputs=constant": ends(elsewhere, constant, "e4m3"),
    }


def save_plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    # Label, color, marker, and the place of a mark's number: the marks may coincide.
    looks = {
        "planted_strongly": ("strong outliers planted", "#8c2d19", "s", (0, 8)),
        "planted": ("moderate outliers planted", "#e08a5b", "D", (21, -3)),
        "as_is": ("model as it is", "#3b6ea5", "o", (0, -14)),
    }
    exact = result["exact_bits_per_byte"]
    for row, (label, color, marker, offset) in looks.items():
        costs = [result["bits_per_byte"][row][name] - exact for name in COLUMNS]
        axes.plot(range(len(COLUMNS)), costs, marker, color=color, label=label)
        for i, cost in enumerate(costs):
            number = f"{cost:.3f}" if cost < 1 else f"{cost:.2f}"
            style = {"textcoords": "offset points", "fontsize": 7, "ha": "center", "color": color}
            axes.annotate(number, (i, cost), offset, **style)
    axes.set_yscale("log")
    axes.set_ylim(0.04, 20)
    axes.set_xlim(-0.5, len(COLUMNS) - 0.3)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xticks(range(len(COLUMNS)), list(COLUMNS))
    axes.set_ylabel(f"bits per byte above float32's {exact:.3f}")
    share = min(row["against_unsmoothed"] for row in result["recovered"].values())
    axes.set_title(
        "INT4 weights, e4m3 activations, KV4: smoothing gives back "
        f"{min(share, 1):.1%} of what planted outliers cost",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.8))
    with _writing.replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def main() -> None:
    parser = stored.parser(__doc__.splitlines()[0], required=False)
    parser.add_argument("--plot", type=Path, help="PNG file to draw")
    parser.add_argument("--window", type=int, default=1024, help="bytes per window")
    parser.add_argument("--calibration-windows", type=int, default=16)
    parser.add_argument("--windows", type=int, default=24, help="held-out windows")
    parser.add_argument("--seed", type=int, default=0, help="of the planted outliers")
    parser.add_argument("--alpha", type=float, default=8.0)
    parser.add_argument("--beta", type=float, default=8.0)
    parser.add_argument("--cas-inputs", default="all", choices=("constant", "all"))
    parser.add_argument("--redraw", type=Path, help="draw this result instead of measuring")
    arguments = parser.parse_args()
    if arguments.redraw is not None:
        result = json.loads(arguments.redraw.read_text(encoding="utf-8"))
    else:
        with Progress() as progress:
            found = ablate(
                Text.of_library(arguments.window, arguments.calibration_windows, arguments.windows),
                smoothing.Smoothing(
                    alpha=arguments.alpha, beta=arguments.beta, cas_inputs=arguments.cas_inputs
                ),
                progress,
                arguments.seed,
            )
        result = {**environment(), **found}
        stored.save(arguments.out, result)
    if arguments.plot is not None:
        save_plot(result, arguments.plot)


if __name__ == "__main__":
    main()
