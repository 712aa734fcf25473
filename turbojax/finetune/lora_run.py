"""A run that trains adapters, from start or checkpoint to the folder of adapters, and its log."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from turbojax import _writing, models
from turbojax._environment import environment
from turbojax.finetune.checkpoint import checkpoint_manager
from turbojax.finetune.data import TokenCorpus
from turbojax.finetune.frozen import sliced
from turbojax.finetune.lora import LoraTrainer
from turbojax.finetune.losses import with_marks
from turbojax.finetune.run import (
    CHECKPOINTS_NAME,
    LOG_NAME,
    Log,
    Report,
    Rhythm,
    mean_bits,
    run_interval,
    sha256,
)
from turbojax.finetune.settings import Settings
from turbojax.matmul.int4.static import Gradient
from turbojax.models import StoredDecoder
from turbojax.models.decoder import Decoder
from turbojax.models.lora import Adapters, usual_gradient
from turbojax.models.quantized import QuantizedDecoder

ADAPTERS_NAME = "adapters"
_RHYTHM = Rhythm()


def fine_tune_adapters(
    folder: Path,
    decoder: Decoder | QuantizedDecoder | StoredDecoder,
    adapters: Adapters,
    settings: Settings,
    corpus: TokenCorpus,
    *,
    gradient: Gradient | None = None,
    fsdp: bool = True,
    rhythm: Rhythm = _RHYTHM,
    base_model: str | None = None,
    report: Report = lambda row: None,
) -> dict[str, Any]:
    """Trains adapters and writes them; continues where `folder` holds checkpoints, bit for bit.

    Args:
      folder: gets `log.json`, checkpoints and, at the end, the adapters as PEFT stores them, in
        `ADAPTERS_NAME`. Created if it does not exist.
      decoder: the frozen model, on one device or a mesh, see `LoraTrainer`; also a `StoredDecoder`
        over a mesh, whose layers are cut as they are read, see `sliced`.
      adapters: to start from.
      settings: see `LoraTrainer`.
      corpus: training and held-out tokens.
      gradient: see `with_adapters`.
      fsdp: see `LoraTrainer`.
      rhythm: see `Rhythm`.
      base_model: where the model came from, for the log and the adapters.
      report: see `Report`; bits are per token.

    Returns:
      The log: `records` with bits per token, `evaluations` of the held-out tokens.

    Raises:
      BlockingIOError: if another run is writing into `folder`.
      ValueError: if something does not fit, see `LoraTrainer`, or `folder` holds another run.
      FloatingPointError: if the loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _writing.exclusive(folder):
        windows = corpus.held_out_windows(settings.context, rhythm.evaluate_windows)
        if isinstance(decoder, StoredDecoder):
            decoder = sliced(decoder)
        more: Any = {"learn": corpus.learn, "gradient": gradient, "fsdp": fsdp}
        trainer = LoraTrainer(decoder, adapters, settings, corpus.stream, **more)
        header = _describe(trainer, corpus, windows, gradient, base_model)
        log = Log(folder / LOG_NAME, header)
        with checkpoint_manager(folder / CHECKPOINTS_NAME) as manager:
            trainer.restore(manager)
            log.rewind(trainer.step)
            report({"step": trainer.step, "resumed": trainer.step > 0})
            if trainer.step == 0:
                log.content["evaluations"] = []
                _evaluate(trainer, windows, log, report)
            while trainer.step < settings.steps:
                run_interval(trainer, log, rhythm, report, metric="bits", name="bits_per_token")
                is_last = trainer.step == settings.steps
                every = rhythm.evaluate_every
                if is_last or (every and trainer.step % every == 0):
                    _evaluate(trainer, windows, log, report)
                if is_last or trainer.step % rhythm.save_every == 0:
                    # The log first: a log that is ahead of the checkpoint can be rewound.
                    log.write()
                    trainer.save(manager)
        models.save_adapters(trainer.adapters, folder / ADAPTERS_NAME, base_model=base_model)
        log.write()
    return log.content


def _evaluate(trainer: LoraTrainer, windows: np.ndarray, log: Log, report: Report) -> None:
    mean = mean_bits(trainer.bits, windows, trainer.settings.part_size)
    row = {"step": trainer.step, "held_out_bits_per_token": round(mean, 5)}
    log.content["evaluations"].append(row)
    report(row)


def _describe(
    trainer: LoraTrainer,
    corpus: TokenCorpus,
    windows: np.ndarray,
    gradient: Gradient | None,
    base_model: str | None,
) -> dict[str, Any]:
    """Facts about the run; those that decide its figures under "identity"."""
    return {
        "identity": {
            "settings": dataclasses.asdict(trainer.settings),
            "gradient": usual_gradient(trainer.decoder, gradient),
            "targets": list(trainer.adapters.targets),
            "scale": trainer.adapters.scale,
            "start_sha256": _digest(*jax.tree.leaves(trainer.adapters)),
            "model_sha256": _digest(*jax.tree.leaves(trainer.decoder)),
            "stream_sha256": _digest(with_marks(corpus.stream, corpus.learn)),
            "held_out_sha256": _digest(windows),
        },
        "source": base_model,
        "parameters": trainer.adapters.num_parameters,
        "environment": environment(),
    }


def _digest(*arrays: Any) -> str:
    return sha256(np.asarray(array).tobytes() for array in arrays)
