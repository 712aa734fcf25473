"""A run from start or checkpoint to the exported model, and its log."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from turbojax import _writing, models
from turbojax._environment import environment
from turbojax.caches.layered import FirstLayers
from turbojax.finetune.checkpoint import checkpoint_manager, last_step
from turbojax.finetune.data import Corpus, TokenCorpus
from turbojax.finetune.evaluate import windows
from turbojax.finetune.frozen import sliced
from turbojax.finetune.log import LOG_NAME, Log
from turbojax.finetune.lora import LoraTrainer
from turbojax.finetune.losses import marked, with_marks
from turbojax.finetune.settings import Settings
from turbojax.finetune.trainer import Trainer, dense_attention
from turbojax.matmul.int4.static import Gradient
from turbojax.models import (
    BEGINNING_OF_FILE,
    Attend,
    PooledAttention,
    StoredDecoder,
    Transformer,
)
from turbojax.models.decoder import Decoder
from turbojax.models.lora import Adapters, usual_gradient
from turbojax.models.quantized import QuantizedDecoder
from turbojax.models.text.tokenizer import BYTES
from turbojax.sharding.axes import Axes

CHECKPOINTS_NAME = "checkpoints"
MODEL_NAME = "model"
ADAPTERS_NAME = "adapters"

Report = Callable[[dict[str, Any]], None]
"""Called with the step that a run begins at, then with every record and evaluation of the log."""


@dataclasses.dataclass(frozen=True)
class Rhythm:
    """How often, in steps, a run logs, saves and evaluates; none of this changes its weights.

    Attributes:
      log_every: at most between records; the device is waited for then.
      save_every: between checkpoints.
      evaluate_every: between evaluations on the held-out text; 0 for the end alone.
      evaluate_windows: how many sequences of it are read then at most, the first ones.

    Raises:
      ValueError: if a number is not positive, or negative for `evaluate_every`.
    """

    log_every: int = 10
    save_every: int = 100
    evaluate_every: int = 100
    evaluate_windows: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, value = int(field.name != "evaluate_every"), getattr(self, field.name)
            if value < least:
                raise ValueError(f"{field.name}={value} must be at least {least}")

    def next_stop(self, step: int, steps: int) -> int:
        """The step after `step` at which there is something to do."""
        every = [n for n in (self.log_every, self.save_every, self.evaluate_every) if n]
        return min(steps, *((step // n + 1) * n for n in every))


def fine_tune(
    folder: Path,
    model: Transformer,
    settings: Settings,
    corpus: Corpus | TokenCorpus,
    *,
    pooled: PooledAttention | None = None,
    dense_layers: int = 0,
    packed: bool = False,
    axes: Axes | None = None,
    fsdp: bool = True,
    rhythm: Rhythm = Rhythm(),
    source: str = "",
    extra_config: Mapping[str, Any] | None = None,
    companions: Mapping[str, Path | bytes] | None = None,
    report: Report = lambda row: None,
) -> dict[str, Any]:
    """Fine-tunes a model and exports it; continues where `folder` holds checkpoints.

    The state of a run is weights, optimizer and step, and the data of a step are a function of
    the step: after an interruption of any kind the weights are those of an uninterrupted run, bit
    for bit where the device's kernels give the same bits twice. A run may go on on another mesh,
    where sums have another order.

    With several processes (`turbojax.parallel.processes`) each calls this with the same arguments
    and a folder that all of them see; the first one writes log and model, and reports.

    Args:
      folder: gets `log.json`, checkpoints and, at the end, the model in Hugging Face's layout.
        Created if it does not exist.
      model: the model to start from.
      settings: see `Settings`.
      corpus: training and held-out text: a `Corpus` for a byte-level model, see `corpus_of`, a
        `TokenCorpus` for others, see `tokens_of`.
      pooled: see `Trainer`, as the next four.
      dense_layers: the same.
      packed: the same; the held-out text is read without it.
      axes: the same.
      fsdp: the same.
      rhythm: see `Rhythm`.
      source: where the model came from, for the log.
      extra_config: further keys of the exported model's `config.json`, see `models.save`; of a
        byte-level model its `bos_token_id` and `eos_token_id` by default.
      companions: files of the exported model beside its weights, such as the tokenizer's.
      report: see `Report`; `tracker` gives one for TensorBoard and W&B.

    Returns:
      The log, see `docs/training.md`.

    Raises:
      BlockingIOError: if another run is writing into `folder`.
      ValueError: if the corpus is not one of the model's tokens or too short, or `folder` holds a
        run with other settings, data or starting weights.
      FloatingPointError: if the loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    how: dict[str, Any] = {"packed": packed, "dense_layers": dense_layers}
    how |= {"axes": axes, "fsdp": fsdp}
    if isinstance(corpus, TokenCorpus):
        how |= {"separator": corpus.separator, "learn": corpus.learn}
    with _writing.exclusive(folder) if _is_first() else contextlib.nullcontext():
        held_out = _held_out(corpus, model, settings.context, rhythm.evaluate_windows)
        trainer = Trainer(model, settings, corpus.stream, pooled=pooled, **how)
        digests = _digests(corpus, held_out, rhythm.evaluate_windows * settings.context)
        header = _describe(trainer, corpus, digests, pooled, source)
        log = _train(folder, trainer, header, held_out, rhythm, report)
        log.content[f"held_out_bits_per_{trainer.unit}"] = {
            name: mean_bits(trainer, held_out, attend)
            for name, attend in {"run": trainer.attend, "dense": dense_attention}.items()
            if name == "run" or pooled is not None
        }
        _export(folder / MODEL_NAME, trainer, extra_config, companions)
        log.write()
    return log.content


def fine_tune_adapters(
    folder: Path,
    decoder: Decoder | QuantizedDecoder | StoredDecoder,
    adapters: Adapters,
    settings: Settings,
    corpus: TokenCorpus,
    *,
    gradient: Gradient | None = None,
    fsdp: bool = True,
    rhythm: Rhythm = Rhythm(),
    base_model: str | None = None,
    report: Report = lambda row: None,
) -> dict[str, Any]:
    """Trains adapters and writes them; continues where `folder` holds checkpoints, bit for bit.

    As `fine_tune`, with the arguments of `LoraTrainer`. At the end `folder` gets the adapters as
    PEFT stores them, in `ADAPTERS_NAME`. The decoder may also be a `StoredDecoder` over a mesh,
    whose layers are cut as they are read, see `sliced`. `base_model` says where the model came
    from, for the log and the adapters. Returns the log: `records` with bits per token,
    `evaluations` of the held-out tokens.

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
        header = {
            "identity": {
                "settings": dataclasses.asdict(settings),
                "gradient": usual_gradient(trainer.decoder, gradient),
                "targets": list(adapters.targets),
                "scale": adapters.scale,
                "start_sha256": _digest(trainer.adapters),
                "model_sha256": _digest(trainer.decoder),
                **_digests(corpus, windows, 0),
            },
            "source": base_model,
            "parameters": adapters.num_parameters,
            "environment": environment(),
        }
        log = _train(folder, trainer, header, windows, rhythm, report)
        models.save_adapters(trainer.adapters, folder / ADAPTERS_NAME, base_model=base_model)
        log.write()
    return log.content


def _is_first() -> bool:
    return jax.process_index() == 0


def _train(
    folder: Path,
    trainer: Trainer | LoraTrainer,
    header: dict[str, Any],
    held_out: np.ndarray,
    rhythm: Rhythm,
    report: Report,
) -> Log:
    """A run to its last step, alone in the folder; its log is yet to be written.

    Adapters are evaluated before the first step and after the last one in any case.
    """
    if not _is_first():
        report = lambda row: None  # noqa: E731
    has_ends, steps = isinstance(trainer, LoraTrainer), trainer.settings.steps
    log = Log(folder / LOG_NAME, header, is_kept=_is_first())
    with checkpoint_manager(folder / CHECKPOINTS_NAME) as manager:
        trainer.restore(manager)
        log.rewind(trainer.step)
        report({"step": trainer.step, "resumed": trainer.step > 0})
        every = rhythm.evaluate_every
        if trainer.step == 0 and (every or has_ends):
            log.content["evaluations"] = []
            _evaluate(trainer, held_out, log, report)
        while trainer.step < steps:
            _run_interval(trainer, log, rhythm, report)
            is_last = trainer.step == steps
            if (every and trainer.step % every == 0) or (is_last and has_ends):
                _evaluate(trainer, held_out, log, report)
            if is_last or trainer.step % rhythm.save_every == 0:
                # The log first: a log that is ahead of the checkpoint can be rewound.
                log.write()
                trainer.save(manager)
    return log


def _held_out(
    corpus: Corpus | TokenCorpus, model: Transformer, context: int, most: int
) -> np.ndarray:
    """The windows that a run is measured with, int32 ``[n, context + 1]``.

    Raises:
      ValueError: if there is none, or the corpus is of other tokens than the model's.
    """
    if isinstance(corpus, TokenCorpus):
        return corpus.held_out_windows(context, most)
    if model.config.vocab_size != BYTES:
        raise ValueError(
            f"vocab_size={model.config.vocab_size} must be {BYTES} for a Corpus, which holds "
            "bytes: tokens_of makes a TokenCorpus"
        )
    if len(corpus.held_out) < context:
        raise ValueError(
            f"{len(corpus.held_out)} bytes of held-out text must be at least {context=}"
        )
    return windows(corpus.held_out[: most * context], context)


def last_checkpoint(folder: Path) -> int | None:
    """The step at which a run in this folder goes on; None if it begins anew."""
    return last_step(folder / CHECKPOINTS_NAME)


def mean_bits(
    trainer: Trainer | LoraTrainer, held_out: np.ndarray, attend: Attend | None = None
) -> float:
    """Bits per byte, or token, of windows ``[n, context + 1]``, under the trainer's way to attend.

    Of tokens that do not count, see `losses.with_marks`, the bits are left out of the mean.
    """
    size, how = trainer.settings.part_size, () if attend is None else (attend,)
    tokens, learned = (np.asarray(x) for x in marked(held_out))
    padded = np.pad(tokens, ((0, -len(tokens) % size), (0, 0)))
    batches = [trainer.bits(x, *how) for x in padded.reshape(-1, size, tokens.shape[1])]
    bits = np.concatenate(batches)[: len(tokens)]
    return float(bits.mean(dtype=np.float64, where=learned[:, 1:]))


def _run_interval(trainer: Trainer | LoraTrainer, log: Log, rhythm: Rhythm, report: Report) -> None:
    """Does the steps up to the next stop, and logs and reports them as a record.

    Raises FloatingPointError if the loss is not finite.
    """
    trainer.compile()
    log.content["compile_seconds"] = round(trainer.compile_seconds, 2)
    settings, first = trainer.settings, trainer.step
    stop = rhythm.next_stop(first, settings.steps)
    begun = time.perf_counter()
    metrics = [trainer.run_step() for _ in range(stop - first)]
    losses = [float(row[trainer.metric]) for row in metrics]
    seconds = time.perf_counter() - begun
    if not np.isfinite(losses).all():
        hint = "; float16 ends at 65,504: try float32" if settings.precision == "float16" else ""
        raise FloatingPointError(f"the loss is not finite between steps {first} and {stop}{hint}")
    log.content["losses"] += [round(loss, 6) for loss in losses]
    record = {
        "step": stop,
        f"bits_per_{trainer.unit}": round(float(np.mean(losses)), 5),
        "grad_norm": round(float(metrics[-1]["grad_norm"]), 4),
    }
    if "density" in metrics[-1]:
        record["density"] = round(float(np.mean([float(row["density"]) for row in metrics])), 5)
    record |= {
        "learning_rate": float(settings.schedule()(stop - 1)),
        "tokens_per_second": round((stop - first) * settings.tokens_per_step / seconds),
        "seconds": round(log.seconds + seconds, 4),
    }
    log.content["records"].append(record)
    report(record)


def _evaluate(
    trainer: Trainer | LoraTrainer, held_out: np.ndarray, log: Log, report: Report
) -> None:
    bits = mean_bits(trainer, held_out)
    row = {"step": trainer.step, f"held_out_bits_per_{trainer.unit}": round(bits, 5)}
    log.content["evaluations"].append(row)
    report(row)


def _export(
    folder: Path,
    trainer: Trainer,
    extra_config: Mapping[str, Any] | None,
    companions: Mapping[str, Path | bytes] | None,
) -> None:
    if extra_config is None and trainer.unit == "byte":
        extra_config = {"bos_token_id": BEGINNING_OF_FILE, "eos_token_id": BEGINNING_OF_FILE}
    model = trainer.exported()  # which takes all processes
    if _is_first():
        more: Any = {"extra_config": extra_config, "companions": companions}
        models.save(model, folder, dtype=trainer.settings.precision, **more)


def _describe(
    trainer: Trainer,
    corpus: Corpus | TokenCorpus,
    digests: dict[str, str],
    pooled: PooledAttention | None,
    source: str,
) -> dict[str, Any]:
    """Facts about run, machine and versions; those that decide the figures under "identity"."""
    config, start = trainer.config, _digest(trainer.exported_params())
    attention: dict[str, Any] = {"kind": "dense"}
    if pooled is not None:
        attention = {"kind": "pooled", **pooled.describe()}
    if isinstance(trainer.attend, FirstLayers):
        attention["dense_layers"] = trainer.attend.count
    if trainer.packed:
        attention["packed"] = True
    return {
        "identity": {
            "settings": dataclasses.asdict(trainer.settings),
            "attention": attention,
            "model": {**config.described(), "parameters": config.num_parameters},
            "start_sha256": start,
            **digests,
        },
        "source": source,
        "data": {
            "description": corpus.description,
            f"{trainer.unit}s": int(corpus.stream.size),
            f"held_out_{trainer.unit}s": len(corpus.held_out),
        },
        "environment": {
            **environment(),
            **{
                name: importlib.metadata.version(name)
                for name in ("jaxlib", "flax", "optax", "orbax-checkpoint")
            },
        },
    }


def _digests(corpus: Corpus | TokenCorpus, windows: np.ndarray, most: int) -> dict[str, str]:
    """Checksums of what is trained on and, up to `most` bytes, measured with, as logs have them."""
    if isinstance(corpus, TokenCorpus):
        return {
            "stream_sha256": _digest(with_marks(corpus.stream, corpus.learn)),
            "held_out_sha256": _digest(windows),
        }
    held_out = hashlib.sha256(corpus.held_out[:most]).hexdigest()
    return {"stream_sha256": _digest(corpus.stream), "held_out_sha256": held_out}


def _digest(tree: Any) -> str:
    """The checksum of the bytes of all arrays, one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for array in jax.tree.leaves(tree):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()
