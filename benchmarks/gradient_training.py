"""Training the embedded model with 8-bit attention, beside exact attention.

`python -m benchmarks.gradient_training --out benchmarks/results/gradient_training_DATE.json`, or
with `--embedded --out benchmarks/results/gradient_tuning_DATE.json`

Runs of one seed start from the same weights, random ones or with `--embedded` those of the embedded
model, and read the same bytes in the same order; only attention differs, forward and backward.
Held-out bits are measured with exact attention.

`--only exact,fp8-8bit --seeds 2` runs some, for processes side by side; `--merge A B` puts such
files into one.
`--quick` is a small sample of the same: does everything run?
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.progress import Progress

import turbojax as tj
from benchmarks import stored, tables
from benchmarks.suite import Shown
from benchmarks.tables import Result
from turbojax import models
from turbojax._environment import environment
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.finetune.data import Corpus, standard_library_corpus
from turbojax.finetune.evaluate import bits_per_byte
from turbojax.finetune.settings import Settings
from turbojax.finetune.trainer import Trainer, dense_attention

SETTINGS = Settings(steps=1000, context=2048, batch_size=16, learning_rate=1e-3, warmup_steps=50)
# From the embedded model's weights.
TUNING = dataclasses.replace(SETTINGS, learning_rate=3e-4)
QUICK = Settings(steps=2, context=128, batch_size=1, warmup_steps=1)
# Modes of the forward pass, and what the gradient rounds.
RUNS = {
    "exact": None,
    "int8-float": ("int8", "float"),
    "int8-8bit": ("int8", "8bit"),
    "int8_fp8-float": ("int8_fp8", "float"),
    "int8_fp8-8bit": ("int8_fp8", "8bit"),
    "fp8-float": ("fp8", "float"),
    "fp8-8bit": ("fp8", "8bit"),
}
# Steps over which losses are averaged.
_SMOOTHING = 50
_HELD_OUT_WINDOWS = 64


def attention(name: str) -> models.Attend:
    chosen = RUNS[name]
    if chosen is None:
        return dense_attention
    mode, gradient = chosen
    config = tj.TurboConfig(mode=mode, softmax="exact", gradient=gradient)

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: Any = None,
        options: AttentionOptions = PLAIN,
    ) -> tuple[jax.Array, Any]:
        call = functools.partial(tj.turbo_attention, config=config, is_causal=True)
        return call(query, key, value, **options.arguments()), cache

    return attend


def train(
    name: str, settings: Settings, corpus: Corpus, progress: Progress, *, embedded: bool
) -> dict[str, Any]:
    """One run: losses of all steps in bits per byte, and held-out bits."""
    model = models.load(dtype="float32")
    if not embedded:
        model = models.Transformer(model.config, rngs=nnx.Rngs(params=settings.seed))
    trainer = Trainer(model, settings, corpus.stream)
    trainer.attend = attention(name)
    trainer.compile()
    task = progress.add_task(f"{name}, seed {settings.seed}", total=settings.steps)
    begun, losses = time.perf_counter(), []
    for _ in range(settings.steps):
        losses.append(trainer.run_step()["bits_per_byte"])
        progress.advance(task)
    losses = [float(x) for x in losses]
    seconds = time.perf_counter() - begun
    size = settings.context * _HELD_OUT_WINDOWS
    held_out = bits_per_byte(
        trainer.model(), {"all": corpus.held_out[:size]}, settings.context, batch_size=8
    )
    return {
        "losses": [round(x, 5) for x in losses],
        "seconds": seconds,
        "compile_seconds": trainer.compile_seconds,
        "held_out_bits_per_byte": held_out["all"],
    }


def measure(
    names: Sequence[str], settings: Settings, seeds: Sequence[int], *, embedded: bool
) -> dict[str, Any]:
    corpus = standard_library_corpus()
    with Progress() as progress:
        runs = {
            name: {
                str(seed): train(
                    name,
                    dataclasses.replace(settings, seed=seed),
                    corpus,
                    progress,
                    embedded=embedded,
                )
                for seed in seeds
            }
            for name in names
        }
    facts = {**dataclasses.asdict(settings), "seed": None}
    start = "those of the embedded model" if embedded else "random ones"
    return {**environment(), "settings": facts, "weights": start, "runs": runs}


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs of several files as one result, in the order of `RUNS`."""
    first = dict(parts[0])
    for part in parts[1:]:
        for name in ("device", "jax", "settings", "weights"):
            if part.get(name) != first.get(name):
                raise ValueError(f"{name}={part.get(name)!r} must be {first.get(name)!r}")
    runs: dict[str, dict[str, Any]] = {name: {} for name in RUNS}
    for part in parts:
        for name, by_seed in part["runs"].items():
            runs[name] |= by_seed
    found = {name: dict(sorted(by_seed.items())) for name, by_seed in runs.items() if by_seed}
    return {**first, "runs": found}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__.splitlines()[0], quick=True)
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs")
    parser.add_argument("--seeds", default="0,1,2", help="of weights and of the data's order")
    parser.add_argument("--embedded", action="store_true", help="go on with the embedded model")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps)
    parser.add_argument("--merge", type=Path, nargs="+", help="files of such runs")
    given = parser.parse_args(arguments)
    settings = TUNING if given.embedded else SETTINGS
    settings = QUICK if given.quick else dataclasses.replace(settings, steps=given.steps)
    if given.merge:
        result = merged([json.loads(path.read_text()) for path in given.merge])
    else:
        seeds = [int(x) for x in given.seeds.split(",")]
        result = measure(given.only.split(","), settings, seeds, embedded=given.embedded)
    stored.save(given.out, result)


def _end(run: Mapping[str, Any]) -> float:
    return float(np.mean(run["losses"][-_SMOOTHING:]))


def _held_out(run: Mapping[str, Any]) -> float:
    return float(run["held_out_bits_per_byte"])


def changes(
    result: Result, name: str, of: Callable[[Mapping[str, Any]], float] = _end
) -> list[float]:
    """A figure of each of a run's seeds over that of exact attention with the same seed, less 1."""
    exact = result["runs"]["exact"]
    return [of(run) / of(exact[seed]) - 1 for seed, run in result["runs"][name].items()]


def loss_ratio(result: Result, name: str) -> float:
    """A run's loss at the end over that of exact attention, the mean of its seeds."""
    return 1 + float(np.mean(changes(result, name)))


def _change(values: Sequence[float]) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{100 * np.mean(values):+.2f} ± {100 * error:.2f} %"


def training_table(name: str, result: Result) -> str:
    lines = []
    for label, by_seed in result["runs"].items():
        mode, _, gradient = label.partition("-")
        line = [mode, gradient or "-"]
        for of in (_end, _held_out):
            line.append(f"{np.mean([of(run) for run in by_seed.values()]):.4f}")
            line.append("" if label == "exact" else _change(changes(result, label, of)))
        lines.append(line)
    header = ["forward", "`gradient=`", "loss", "beside exact", "held out", "beside exact"]
    settings = result["settings"]
    seeds = len(result["runs"]["exact"])
    note = (
        f"{settings['steps']} steps of {settings['batch_size']} sequences of "
        f"{settings['context']:,} bytes; weights to begin with: {result['weights']}. Means of "
        f"{seeds} seeds, with the standard errors of their differences; bits per byte, of the last "
        f"{_SMOOTHING} steps and of modules that were not trained on, read with exact attention."
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, result)}"


SHOWN = Shown(("gradient_training",), {"gradient training": training_table})
# With `--embedded`, called so by `--out`.
TUNED = Shown(("gradient_tuning",), {"gradient tuning": training_table})

if __name__ == "__main__":
    main()
