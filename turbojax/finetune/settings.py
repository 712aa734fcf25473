"""What decides which weights a fine-tuning run ends with, apart from model, data and machine."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from turbojax.finetune.optimizer import clipped_adamw
from turbojax.models import TransformerConfig

PRECISIONS = ("float32", "bfloat16", "float16")
# Gradients of weights, which float16 rounds too, then have room up to 65,504 / 4096 = 16.
_MOST_LOSS_SCALE_BITS = 12


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and rates of a run.

    Attributes:
      steps: optimizer steps in all.
      context: bytes per sequence.
      batch_size: sequences per step.
      learning_rate: peak of the schedule.
      warmup_steps: linear rise from 0.
      final_rate: where the cosine ends, a share of `learning_rate`.
      weight_decay: of matrices and embeddings, not of norms.
      clip_norm: bound on the global norm of the gradient.
      seed: of the data's order, the only thing that is random.
      precision: compute dtype; master weights and optimizer state are float32. In float16 the loss
        is scaled, see `loss_scale`.

    Raises:
      ValueError: if a value is out of range.
    """

    steps: int = 300
    context: int = 16384
    batch_size: int = 8
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    final_rate: float = 0.1
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("steps", "context", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive and finite")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate={self.final_rate} must be between 0 and 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted per step."""
        return self.context * self.batch_size

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
        """Linear warm-up, then a cosine to `final_rate` of the peak."""

        def rate(step: Any) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            rise = jnp.minimum(1.0, (step + 1.0) / max(1, self.warmup_steps))
            done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
            cosine = 0.5 + 0.5 * jnp.cos(jnp.pi * jnp.clip(done, 0.0, 1.0))
            return self.learning_rate * rise * (self.final_rate + (1 - self.final_rate) * cosine)

        return rate

    def optimizer(self) -> optax.GradientTransformation:
        """Clipped AdamW at the rate of `schedule`."""
        return clipped_adamw(
            self.schedule(), weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )


def for_context(config: TransformerConfig, context: int) -> TransformerConfig:
    """The configuration of a model that is to be fine-tuned at a longer context.

    Where the context grows by a factor s, the base of the rotary frequencies grows to
    ``theta * s**(H / (H - 2))`` for heads of H channels: the slowest pair of channels then turns
    over the new context as far as it turned over the old one, while the fastest, which tells
    neighbours apart, keeps its speed ("NTK-aware" scaling).

    Args:
      config: of the model as it is.
      context: tokens per sequence.

    Returns:
      The configuration with `max_length` and `rope_theta` changed; the same one where the model's
      `max_length` suffices. A base of its own of layers with a window stays: they see no further.

    Raises:
      ValueError: if the heads have two channels, of which none turns more slowly.
    """
    if context <= config.max_length:
        return config
    if config.head_dim < 4:
        raise ValueError(f"head_dim={config.head_dim} must be at least 4 to lengthen the context")
    growth = context / config.max_length
    theta = config.rope_theta * growth ** (config.head_dim / (config.head_dim - 2))
    return dataclasses.replace(config, max_length=context, rope_theta=theta)
