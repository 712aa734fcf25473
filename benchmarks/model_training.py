r"""Fine-tuning of a real model with pooled and with dense attention: loss and time, over seeds.

    python -m benchmarks.model_training --out model_training_DATE.json
    python -m benchmarks.model_training --model FOLDER --plan 8192:8:60:3 --out FILE

Both attentions begin with the same weights and read the same windows of the standard library of
this Python, in an order that the seed says. `--plan CONTEXT:BATCH:STEPS:SEEDS` may be repeated.
Programs of all plans compile side by side before anything is timed; then one step after the other
runs, of one attention at a time.
"""

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import stored, tables
from benchmarks.gpu_tests import machine
from benchmarks.suite import Shown
from turbojax import finetune, models
from turbojax.app import text_model
from turbojax.finetune.trainer import dense_attention

DENSE, POOLED = KINDS = ("dense", "pooled")
# Steps at the end of a run whose mean loss is compared, held-out windows, and steps not timed.
_LAST, _WINDOWS, _WARMUP = 20, 16, 2
# Of Student's t distribution, 95 % of both sides, by the number of seeds.
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sequences of `context` tokens, `batch` of them a step, `steps` of each of `seeds` runs."""

    context: int
    batch: int
    steps: int
    seeds: int

    @classmethod
    def of(cls, text: str) -> "Plan":
        """``"8192:8:60:3"``; ValueError for anything else."""
        try:
            return cls(*map(int, text.split(":")))
        except (TypeError, ValueError):
            raise ValueError(f"plan {text!r} must be CONTEXT:BATCH:STEPS:SEEDS") from None


# Of a step's 65,536 tokens each.
PLANS = [Plan(8192, 8, 120, 3), Plan(16384, 4, 60, 3), Plan(32768, 2, 90, 3)]


def library_tokens(tokenizer: Any, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """The standard library of this Python, and held-out modules of it: int32 ``[n]`` each."""
    corpus = finetune.standard_library_corpus()

    def tokens(data: bytes) -> np.ndarray:
        texts = [text.decode(errors="replace") for text in data.split(b"\0") if text]
        return np.concatenate(
            [np.asarray([separator, *tokenizer.encode(text)], np.int32) for text in texts]
        )

    return tokens(corpus.stream.tobytes()), tokens(corpus.held_out)


class Contest:
    """Trainers of both attentions at one context, and what they score held-out text with."""

    def __init__(self, model: Any, plan: Plan, stream: np.ndarray, held_out: np.ndarray) -> None:
        self.plan, self._model, self._stream = plan, model, stream
        # The command's default.
        self.pooled = models.pooled_by_name(
            "threshold", block_size=128, bounds=(0.7, 0.85, 0.93, 0.98), near=256
        )
        self._attend = {DENSE: dense_attention, POOLED: self.pooled}
        self._steps = {kind: self._trainer(kind, 0) for kind in KINDS}
        count = (held_out.size - 1) // plan.context
        count = min(count - count % plan.batch, max(plan.batch, _WINDOWS * 8192 // plan.context))
        starts = np.arange(count)[:, None] * plan.context
        self._held_out = held_out[starts + np.arange(plan.context + 1)]

    def _trainer(self, kind: str, seed: int) -> finetune.Trainer:
        plan = self.plan
        settings = finetune.Settings(
            steps=plan.steps,
            context=plan.context,
            batch_size=plan.batch,
            learning_rate=1e-4,
            warmup_steps=10,
            seed=seed,
            precision="float32" if jax.default_backend() == "cpu" else "bfloat16",
        )
        pooled = self.pooled if kind == POOLED else None
        return finetune.Trainer(self._model, settings, self._stream, pooled=pooled)

    def compile(self, kind: str) -> None:
        """Compiles a step and the score of held-out text."""
        self._steps[kind].compile()
        self._steps[kind].bits(self._held_out[: self.plan.batch], self._attend[kind])

    def compile_seconds(self) -> dict[str, float]:
        """What compiling a step took, beside the others."""
        return {kind: round(step.compile_seconds, 1) for kind, step in self._steps.items()}

    def run(self, kind: str, seed: int) -> dict[str, Any]:
        """A whole run: losses in bits per token, seconds a step, density, held-out bits."""
        trainer = self._trainer(kind, seed)
        trainer._compiled = self._steps[kind]._compiled  # the seed is no part of the program
        trainer._scores = self._steps[kind]._scores
        results, begun = [], 0.0
        for step in range(self.plan.steps):
            if step == _WARMUP:
                float(results[-1]["grad_norm"])
                begun = time.perf_counter()
            results.append(trainer.run_step())
        losses = [float(x[f"bits_per_{trainer.unit}"]) for x in results]
        seconds = (time.perf_counter() - begun) / (self.plan.steps - _WARMUP)
        return {
            "attention": kind,
            "seed": seed,
            "losses": [round(x, 5) for x in losses],
            "step_seconds": round(seconds, 5),
            "density": round(float(np.mean([float(x["density"]) for x in results])), 5),
            "held_out": round(self._held_out_bits(trainer, kind), 5),
        }

    def _held_out_bits(self, trainer: finetune.Trainer, kind: str) -> float:
        batches = np.split(self._held_out, len(self._held_out) // self.plan.batch)
        return float(np.mean([trainer.bits(x, self._attend[kind]).mean() for x in batches]))


def ratio(runs: Sequence[Mapping[str, Any]], figure: Any) -> tuple[float, float | None]:
    """Pooled over dense, the mean over seeds, and half of its interval of 95 %."""
    by_seed: dict[int, dict[str, float]] = {}
    for run in runs:
        by_seed.setdefault(run["seed"], {})[run["attention"]] = figure(run)
    ratios = [one[POOLED] / one[DENSE] for one in by_seed.values() if len(one) == 2]
    mean, count = statistics.fmean(ratios), len(ratios)
    if count not in _STUDENT:
        return mean, None
    return mean, _STUDENT[count] * statistics.stdev(ratios) / count**0.5


def last_loss(run: Mapping[str, Any]) -> float:
    return statistics.fmean(run["losses"][-_LAST:])


def section(name: str, result: Mapping[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        runs = row["runs"]
        seconds = {
            kind: statistics.median(x["step_seconds"] for x in runs if x["attention"] == kind)
            for kind in KINDS
        }
        density = statistics.fmean(x["density"] for x in runs if x["attention"] == POOLED)
        tokens = row["context"] * row["batch"]
        losses = [last_loss(x) for x in runs if x["attention"] == DENSE]
        lines.append(
            [
                f"{row['batch']} x {row['context']:,}",
                f"{row['steps']}, {len(losses)}",
                f"{density:.3f}",
                *(f"{tokens / seconds[kind]:,.0f}" for kind in KINDS),
                f"{seconds[DENSE] / seconds[POOLED]:.2f}x",
                f"{statistics.fmean(losses):.4f}",
                _with_interval(ratio(runs, last_loss)),
                _with_interval(ratio(runs, lambda x: x["held_out"])),
            ]
        )
    header = ["tokens a step", "steps, seeds", "density", "dense, tokens/s", "pooled, tokens/s"]
    header += ["speed", "dense loss, bits per token", "pooled loss over dense", "held out"]
    return f"{tables.table(header, lines)}\n\n{tables.source(name, result)}"


def _with_interval(found: tuple[float, float | None]) -> str:
    mean, half = found
    return f"{mean:.4f}" if half is None else f"{mean:.4f} ± {half:.4f}"


SHOWN = Shown(("model_training",), {"model training": section})


def measure(model: str, plans: Sequence[Plan], out: Path) -> dict[str, Any]:
    """Runs the plans; writes `out` after each run, so that what is done is not lost."""
    tokenizer = text_model.find_text_model(model).tokenizer
    separator = next(iter(tokenizer.eos_token_ids), 0)
    stream, held_out = library_tokens(tokenizer, separator)
    print(f"{stream.size:,} tokens, {held_out.size:,} held out", flush=True)
    start = models.load_transformer(model)
    contests = [Contest(start, plan, stream, held_out) for plan in plans]
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(contest.compile, kind) for contest in contests for kind in KINDS]
        for one in waiting:
            one.result()
    print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    result: dict[str, Any] = {
        "benchmark": "fine-tuning of a real model with pooled attention",
        **machine(),
        "model": Path(model).name,
        "parameters": start.config.num_parameters,
        "tokens": int(stream.size),
        "policy": "Threshold(0.7, 0.85, 0.93, 0.98), near=256, blocks of 128",
        "rows": [],
    }
    for contest in contests:
        row: dict[str, Any] = {**dataclasses.asdict(contest.plan), "runs": []}
        row["compile_seconds"] = contest.compile_seconds()
        result["rows"].append(row)
        for seed in range(contest.plan.seeds):
            for kind in KINDS if seed % 2 == 0 else KINDS[::-1]:
                row["runs"].append(contest.run(kind, seed))
                shown = {k: v for k, v in row["runs"][-1].items() if k != "losses"}
                print(contest.plan.context, shown, row["runs"][-1]["losses"][-1], flush=True)
                stored.save(out, result)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = stored.parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="as of turbojax train")
    parser.add_argument("--plan", type=Plan.of, action="append", help="CONTEXT:BATCH:STEPS:SEEDS")
    given = parser.parse_args(arguments)
    result = measure(given.model, given.plan or PLANS, given.out)
    print(section(given.out.name, result))


if __name__ == "__main__":
    main()
