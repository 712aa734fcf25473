"""Trains the model that ships with turbojax, or a larger one. See README.md beside this file.

    python -m training.train_embedded_model --out runs/embedded --steps 30000
    python -m training.train_embedded_model --out runs/32m --shape 32m --minutes 13

Rerun the same command to resume: the weights are those of an uninterrupted run. With `--init` a
run starts from exported weights instead of random ones, for instance to anneal a run whose
checkpoints are lost: lower `--learning-rate`, `--decay-fraction 1`, and another `--seed`, so that
the data come in a new order.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training import archive, corpus, pace, report
from training.shapes import EMBEDDED, SHAPES
from training.state import Settings, Trainer
from turbojax import _writing
from turbojax._environment import environment
from turbojax.finetune.checkpoint import checkpoint_manager
from turbojax.finetune.documents import read_held_out
from turbojax.finetune.evaluate import bits_per_byte
from turbojax.models import BEGINNING_OF_FILE, Transformer, held_out_modules, load_transformer, save
from turbojax.models.checkpoint.huggingface import WEIGHTS_NAME

_LIBRARY_REPEATS = 3
EVAL_CONTEXTS = (1024, 2048, 4096, 8192, 16384)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of everything written")
    parser.add_argument("--shape", choices=SHAPES, default=EMBEDDED, help="of the model")
    parser.add_argument(
        "--corpus", type=Path, help="file of training.archive; default: what is installed here"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="as many steps as this machine does in so much time in steps, which is measured once; "
        "instead of --steps",
    )
    parser.add_argument("--devices", type=int, default=1, help="that share a step's windows")
    parser.add_argument("--export", type=Path, help="the model's folder; default: OUT/model")
    parser.add_argument(
        "--init", type=Path, help="exported folder whose weights to start from; default: random"
    )
    parser.add_argument("--stop-after-minutes", type=float, default=float("inf"))
    parser.add_argument(
        "--no-export", action="store_true", help="of a run that is stopped: write checkpoints alone"
    )
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=500, help="steps")
    parser.add_argument("--save-every", type=int, default=5000, help="steps")
    parser.add_argument(
        "--library-repeats",
        type=int,
        help=f"of the standard library, default {_LIBRARY_REPEATS}; a --corpus has its own",
    )
    parser.add_argument("--remat", action="store_true", help="recompute layers to save memory")
    parser.add_argument("--unroll", type=int, help="layers per scan iteration; default: all")
    for field in dataclasses.fields(Settings):
        default = None if field.name == "steps" else field.default
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=field.type, default=default)
    args = parser.parse_args(arguments)
    if (args.steps is None) == (args.minutes is None):
        parser.error("one of --steps and --minutes must be given")
    if args.corpus is None and args.library_repeats is None:
        args.library_repeats = _LIBRARY_REPEATS
    elif args.corpus is not None and args.library_repeats is not None:
        parser.error("--library-repeats must not go with --corpus, which has its own")
    return args


class Log:
    """The run's JSON log, which survives interruptions.

    Args:
      path: the file; continued if it exists.
      header: facts about the run, replacing those of an earlier session.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.content = {"records": [], "evaluations": [], "seconds": 0.0, **old, **header}

    def rewind(self, step: int) -> None:
        """Forgets what lies after `step`: it will be computed again."""
        for name in ("records", "evaluations"):
            self.content[name] = [row for row in self.content[name] if row["step"] <= step]

    def write(self) -> None:
        """Writes the file."""
        _writing.write_text(self._path, json.dumps(self.content, indent=1) + "\n")


def describe_run(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Facts about machine, versions and settings for the log."""
    config = SHAPES[args.shape]
    return {
        "command": _command(args, settings),
        **environment(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
        },
        "shape": args.shape,
        "devices": args.devices,
        "model": {**dataclasses.asdict(config), "parameters": config.num_parameters},
        "settings": dataclasses.asdict(settings),
        "library_repeats": args.library_repeats,
        "init_sha256": _sha256(args.init / WEIGHTS_NAME) if args.init else None,
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _command(args: argparse.Namespace, settings: Settings) -> str:
    """A command that repeats the run, whatever interruptions this one had."""
    defaults = parse_arguments(["--out", "", "--steps", "0"])
    options = []
    for name, value in {**vars(args), "minutes": None, "steps": settings.steps}.items():
        incidental = name in (
            "export",
            "no_export",
            "stop_after_minutes",
            "log_every",
            "save_every",
        )
        if not incidental and value not in (None, getattr(defaults, name)):
            options.append("--" + name.replace("_", "-"))
            options += [] if value is True else [str(value)]
    return "python -m training.train_embedded_model " + shlex.join(options)


def train(args: argparse.Namespace, trainer: Trainer, log: Log, files: dict[str, bytes]) -> None:
    """Trains until the last step or the time limit, then checkpoints."""
    manager = checkpoint_manager(args.out / "checkpoints")
    if trainer.restore(manager):
        print(f"resuming at step {trainer.step}", flush=True)
    log.rewind(trainer.step)
    started = time.monotonic()
    deadline = started + 60 * args.stop_after_minutes
    before = log.content["seconds"]
    with _progress() as progress:
        total = trainer.settings.steps
        task = progress.add_task("training", bpb="-", total=total, completed=trainer.step)
        while trainer.step < total and time.monotonic() < deadline:
            _run_interval(args, trainer, log, files)
            log.content["seconds"] = before + time.monotonic() - started
            record = log.content["records"][-1]
            progress.update(task, completed=trainer.step, bpb=f"{record['bits_per_byte']:.3f}")
            progress.console.print(_line(record))
            if trainer.step % args.save_every < args.log_every:
                trainer.save(manager)
                log.write()
    if manager.latest_step() != trainer.step:
        trainer.save(manager)
    manager.close()
    log.write()


def _run_interval(
    args: argparse.Namespace, trainer: Trainer, log: Log, files: dict[str, bytes]
) -> None:
    """Does the steps up to the next line of the log, and evaluates if it is time."""
    settings, first = trainer.settings, trainer.step
    last = min(settings.steps, (first // args.log_every + 1) * args.log_every)
    began = time.monotonic()
    metrics = [trainer.run_step() for _ in range(last - first)]
    losses = [float(row["bits_per_byte"]) for row in metrics]
    seconds = time.monotonic() - began
    log.content["records"].append(
        {
            "step": last,
            "tokens": last * settings.tokens_per_step,
            "context": settings.context(last - 1),
            "bits_per_byte": round(float(np.mean(losses)), 5),
            "grad_norm": round(float(metrics[-1]["grad_norm"]), 4),
            "learning_rate": float(settings.schedule()(last - 1)),
            "tokens_per_second": round((last - first) * settings.tokens_per_step / seconds),
        }
    )
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"the loss is not finite between steps {first} and {last}")
    if last // args.evaluate_every > first // args.evaluate_every or last == settings.steps:
        context = settings.context(last - 1)
        scores = bits_per_byte(trainer.model(), files, context, attend=trainer.attend)
        row = {"step": last, "context": context, "held_out_bits_per_byte": scores["all"]}
        log.content["evaluations"].append(row)
        print(f"held out at {context}: {scores['all']:.4f} bits per byte", flush=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bpb]} bits/byte"),
        TimeRemainingColumn(),
    )


def _line(record: dict[str, Any]) -> str:
    return (
        f"step {record['step']:6d}  context {record['context']}  "
        f"{record['bits_per_byte']:.4f} bits/byte  rate {record['learning_rate']:.2e}  "
        f"norm {record['grad_norm']:.2f}  {record['tokens_per_second'] / 1e6:.3f} M tokens/s"
    )


def export(folder: Path, trainer: Trainer, log: Log, files: dict[str, bytes]) -> None:
    """Writes the model in bfloat16, evaluates what was written, and reports."""
    tokens = {"bos_token_id": BEGINNING_OF_FILE, "eos_token_id": BEGINNING_OF_FILE}
    save(trainer.model(), folder, dtype="bfloat16", extra_config=tokens)
    shipped = load_transformer(folder)
    log.content["held_out_bits_per_byte"] = _held_out(shipped, files, trainer)
    if log.content["shape"] != EMBEDDED:
        embedded = load_transformer("embedded")
        log.content["embedded_bits_per_byte"] = _held_out(embedded, files, trainer)
    log.content["tokens_seen"] = trainer.step * trainer.settings.tokens_per_step
    log.write()


def _held_out(
    model: Transformer, files: dict[str, bytes], trainer: Trainer
) -> dict[str, dict[str, float]]:
    """Context -> file -> bits per byte, of the contexts that the model is meant for."""
    longest = max(map(len, files.values()))
    return {
        str(context): bits_per_byte(model, files, context, attend=trainer.attend)
        for context in EVAL_CONTEXTS
        if context <= min(model.config.max_length, longest)
    }


def _make_trainer(args: argparse.Namespace, stream: np.ndarray) -> Trainer:
    """The trainer, and with it the settings: the steps may have to be measured."""
    config = SHAPES[args.shape]
    names = [field.name for field in dataclasses.fields(Settings)]
    values = {name: getattr(args, name) for name in names}
    settings = Settings(**{**values, "steps": args.steps or 1})
    make = functools.partial(
        Trainer,
        config,
        stream=stream,
        remat=args.remat,
        unroll=args.unroll or config.num_layers,
        init=load_transformer(args.init) if args.init else None,
        devices=args.devices,
    )
    if args.minutes is not None:
        settings = pace.for_minutes(args.minutes, settings, make, args.out)
    return make(settings)


def main(arguments: list[str] | None = None) -> None:
    """Builds the corpus, trains, exports."""
    args = parse_arguments(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "corpus.npy").exists():
        repeats = args.library_repeats
        corpus.write(
            args.out,
            corpus.collect(held_out_modules(), library_repeats=repeats)
            if args.corpus is None
            else archive.read(args.corpus),
        )
    stream = np.load(args.out / "corpus.npy")
    files = read_held_out(held_out_modules())
    trainer = _make_trainer(args, stream)
    log = Log(args.out / "log.json", describe_run(args, trainer.settings))
    parameters = trainer.config.num_parameters
    print(f"{stream.size:,} bytes of text, {parameters:,} parameters", flush=True)
    train(args, trainer, log, files)
    if args.no_export and trainer.step < trainer.settings.steps:
        print(f"stopped at step {trainer.step}; the same command goes on from there")
        return
    folder = args.export or args.out / "model"
    export(folder, trainer, log, files)
    report.write(folder, [log.content], json.loads((args.out / "corpus.json").read_text()))
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
