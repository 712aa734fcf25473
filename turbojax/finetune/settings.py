"""What decides which weights a fine-tuning run ends with, apart from model, data and machine."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from turbojax.finetune.optimizer import OPTIMIZERS, SCHEDULES, shape_of
from turbojax.models import TransformerConfig
from turbojax.remat import Remat

PRECISIONS = ("float32", "bfloat16", "float16")
REMATS: dict[str, Remat] = {"none": False, "full": True, "attention": "attention"}
"""Names of what the backward pass computes again, and what `Transformer` calls it."""
_FINAL_RATE = 0.1
# Gradients of weights, which float16 rounds too, then have room up to 65,504 / 4096 = 16.
_MOST_LOSS_SCALE_BITS = 12


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates of a run.

    Attributes:
      steps: optimizer steps in all.
      context: bytes per sequence.
      batch_size: sequences per step.
      accumulate: into how many parts of as many sequences a step is taken apart, one after the
        other: a step has the loss and the gradient of the whole batch and needs the memory of a
        part, and that of a second gradient.
      optimizer_name: ``"adamw"``, ``"lion"``, ``"adafactor"``, ``"sgd"`` or ``"muon"``, see
        `turbojax.finetune.optimizer`.
      schedule_name: ``"cosine"``, ``"linear"``, ``"constant"`` or ``"wsd"``, after the warm-up.
      decay_fraction: of ``"wsd"``: in which share of the steps after the warm-up the rate falls;
        None for a tenth.
      learning_rate: peak of the schedule.
      warmup_steps: linear rise from 0.
      final_rate: where the schedule ends, a share of `learning_rate`; none of ``"constant"``.
      weight_decay: of matrices and embeddings, not of norms, biases and sinks; with ``"muon"`` of
        the layers' kernels alone.
      clip_norm: bound on the global norm of the gradient.
      seed: of the data's order, the only thing that is random.
      precision: compute dtype; master weights and optimizer state are float32. In float16 the loss
        is scaled, see `loss_scale`.
      remat: what the backward pass computes again instead of keeping it: ``"none"``; ``"full"``,
        whole layers; or ``"attention"``, layers but for pooled attention, whose results are kept
        (`turbojax.remat`). The gradient is the same but for rounding.

    Raises:
      ValueError: if a value is out of range.
    """

    steps: int = 300
    context: int = 16384
    batch_size: int = 8
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    final_rate: float = _FINAL_RATE
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "bfloat16"
    accumulate: int = 1
    optimizer_name: str = "adamw"
    schedule_name: str = "cosine"
    decay_fraction: float | None = None
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("steps", "context", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive and finite")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate={self.final_rate} must be between 0 and 1")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of accumulate={self.accumulate}"
            )
        names = {
            "precision": PRECISIONS,
            "optimizer_name": tuple(OPTIMIZERS),
            "schedule_name": SCHEDULES,
            "remat": tuple(REMATS),
        }
        for name, known in names.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}"
                )
        if self.schedule_name == "constant" and self.final_rate != _FINAL_RATE:
            raise ValueError(f"final_rate={self.final_rate} must not be given with 'constant'")
        if self.decay_fraction is None:
            return
        if self.schedule_name != "wsd":
            raise ValueError(
                f"decay_fraction={self.decay_fraction} must be None with {self.schedule_name!r}: "
                "it is of 'wsd'"
            )
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction={self.decay_fraction} must be above 0 and at most 1")

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted per step."""
        return self.context * self.batch_size

    @property
    def part_size(self) -> int:
        """Sequences that are in memory at a time."""
        return self.batch_size // self.accumulate

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by for its gradient, which is divided by it in float32.

        A power of two of at most the tokens of a step, and at most 4096; 1 unless the precision is
        float16: gradients of a mean over many tokens are smaller than its smallest numbers.
        """
        if self.precision != "float16":
            return 1.0
        return 2.0 ** min(int(math.log2(self.tokens_per_step)), _MOST_LOSS_SCALE_BITS)

    def schedule(self) -> optax.Schedule:
        """Linear warm-up, then what `schedule_name` says: step -> rate, a float32 scalar."""
        shape = shape_of(
            self.schedule_name, self.steps - self.warmup_steps, self.final_rate, self.decay_fraction
        )

        def rate(step: Any) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            rise = jnp.minimum(1.0, (step + 1.0) / max(1, self.warmup_steps))
            return self.learning_rate * rise * shape(step - self.warmup_steps)

        return rate

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of `optimizer_name` at the rate of `schedule`, with a clipped gradient."""
        return OPTIMIZERS[self.optimizer_name](
            self.schedule(), weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )


def with_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What a log says of a run under "identity", with settings that there were not yet.

    A run that was begun before a setting was added has its default. Without `remat`, which like a
    mesh decides what a step keeps, not what it computes: a run may go on with another one.
    """
    settings = identity.get("settings")
    if not isinstance(settings, dict):
        return dict(identity)
    complete = {**dataclasses.asdict(Settings()), **settings}
    del complete["remat"]
    return {**identity, "settings": complete}


def for_context(config: TransformerConfig, context: int) -> TransformerConfig:
    """The configuration of a model that is to be fine-tuned at a longer context.

    Where the context grows by a factor s, the base of the rotary frequencies grows to
    ``theta * s**(R / (R - 2))`` where R channels of a head are rotated: the slowest pair of
    channels then rotates over the new context as far as it was rotated over the old one, while the
    fastest, which tells neighbours apart, keeps its speed ("NTK-aware" scaling).

    Args:
      config: of the model as it is.
      context: tokens per sequence.

    Returns:
      The configuration with `max_length` and `rope_theta` changed; the same one where the model's
      `max_length` suffices. A base of its own of layers with a window stays: they see no further.

    Raises:
      ValueError: if two channels are rotated, of which none is rotated more slowly.
    """
    if context <= config.max_length:
        return config
    width = config.rope.channels
    if width < 4:
        raise ValueError(f"{width} rotated channels must be at least 4 to lengthen the context")
    growth = context / config.max_length
    theta = config.rope_theta * growth ** (width / (width - 2))
    return dataclasses.replace(config, max_length=context, rope_theta=theta)
