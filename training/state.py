"""What a training step needs: the schedule, the order of the data, the step itself, checkpoints."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp
from flax import nnx

from turbojax.finetune import order
from turbojax.finetune.checkpoint import restore_tree, save_tree
from turbojax.finetune.optimizer import clipped_adamw, default_promotion
from turbojax.finetune.trainer import dense_attention
from turbojax.models import Attend, Transformer, TransformerConfig

MODEL = TransformerConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_length=4096,
    tie_embeddings=True,
)

# How far the rate has fallen, from 0 to 1, over the share of the decay that is done.
_DECAY_SHAPES = {"sqrt": jnp.sqrt, "linear": lambda done: done}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides which weights come out, apart from corpus and machine.

    Attributes:
      steps: optimizer steps in all.
      tokens_per_step: bytes predicted per step, a multiple of both contexts.
      short_context: window of the first steps.
      long_context: window of the last steps.
      long_fraction: share of the steps at `long_context`.
      learning_rate: peak of the schedule.
      warmup_steps: linear rise from 0.
      decay_fraction: share of the steps, the last ones, in which the rate falls to 0.
      decay_shape: "sqrt" falls as 1 - sqrt(x), for a decay from a high rate; "linear" as 1 - x.
      weight_decay: of matrices and embeddings, not of norms.
      clip_norm: bound on the global norm of the gradient.
      seed: of initial weights and data order.
      precision: compute dtype; master weights and optimizer state are float32.

    Raises:
      ValueError: if a value is out of range.
    """

    steps: int
    tokens_per_step: int = 131072
    short_context: int = 1024
    long_context: int = 4096
    long_fraction: float = 0.3
    learning_rate: float = 3e-3
    warmup_steps: int = 1000
    decay_fraction: float = 0.4
    decay_shape: str = "sqrt"
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "short_context", "long_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("short_context", "long_context"):
            if self.tokens_per_step % getattr(self, name):
                raise ValueError(
                    f"tokens_per_step={self.tokens_per_step} must be a multiple of "
                    f"{name}={getattr(self, name)}"
                )
        for name in ("long_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.decay_shape not in _DECAY_SHAPES:
            raise ValueError(f"{self.decay_shape=} must be one of {sorted(_DECAY_SHAPES)}")

    @property
    def short_steps(self) -> int:
        """Steps at the short context."""
        return self.steps - round(self.steps * self.long_fraction)

    def context(self, step: int) -> int:
        """The window of a step."""
        return self.short_context if step < self.short_steps else self.long_context

    def schedule(self) -> optax.Schedule:
        """Warm-up, constant, then decay to 0 (WSD: the decay's length can be chosen late)."""
        shape = _DECAY_SHAPES[self.decay_shape]
        decay_steps = max(1, round(self.steps * self.decay_fraction))

        def rate(step: Any) -> jax.Array:
            step = jnp.asarray(step, jnp.float32)
            rise = jnp.minimum(1.0, (step + 1.0) / max(1, self.warmup_steps))
            done = jnp.clip((step - (self.steps - decay_steps)) / decay_steps, 0.0, 1.0)
            return self.learning_rate * rise * (1.0 - shape(done))

        return rate

    def optimizer(self) -> optax.GradientTransformation:
        """Clipped AdamW."""
        return clipped_adamw(
            self.schedule(), weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )


def window_starts(settings: Settings, step: int, num_bytes: int) -> np.ndarray:
    """Where the windows of a step begin, a pure function of the step: resuming is exact.

    Every epoch visits all windows once, in a new order and cut at a new offset.

    Args:
      settings: gives seed, contexts and batch sizes.
      step: from 0.
      num_bytes: length of the stream, at least twice the context.

    Returns:
      `[tokens_per_step / context]` int32.

    Raises:
      ValueError: if the stream is too short.
    """
    context = settings.context(step)
    batch_size = settings.tokens_per_step // context
    first_step = 0 if step < settings.short_steps else settings.short_steps
    index = (step - first_step) * batch_size + np.arange(batch_size)
    return order.window_starts(index, num_bytes=num_bytes, context=context, seed=settings.seed)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "attend", "settings", "context"),
    donate_argnames=("params", "opt_state"),
)
def _train_step(
    params: nnx.State,
    opt_state: Any,
    stream: jax.Array,
    starts: jax.Array,
    *,
    graph: Any,
    attend: Attend,
    settings: Settings,
    context: int,
) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows of `context` bytes that begin at `starts`."""
    indices = starts[:, None] + jnp.arange(context + 1, dtype=jnp.int32)[None, :]
    tokens = stream[indices].astype(jnp.int32)

    def loss(params: nnx.State) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1], attend=attend)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    value, grads = jax.value_and_grad(loss)(params)
    with default_promotion():
        updates, opt_state = settings.optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    metrics = {"bits_per_byte": value / math.log(2.0), "grad_norm": optax.global_norm(grads)}
    return params, opt_state, metrics


class Trainer:
    """Model, optimizer and their jitted step.

    Attributes:
      settings: see `Settings`.
      params: float32 master weights, an `nnx.State`.
      opt_state: the optimizer's state.
      step: steps done.
    """

    def __init__(
        self,
        config: TransformerConfig,
        settings: Settings,
        stream: np.ndarray,
        *,
        attend: Attend = dense_attention,
        remat: bool = False,
        unroll: int = 1,
        init: Transformer | None = None,
    ) -> None:
        """Initializes weights from the seed, or takes those of another model.

        Args:
          config: shape of the model.
          settings: see `Settings`.
          stream: `[bytes]` uint8, kept in the accelerator's memory.
          attend: how layers attend.
          remat: see `Transformer`.
          unroll: see `Transformer`.
          init: a model to start from, of the same shape in any dtype; its optimizer state is
            unknown, so that a fresh one is used.

        Raises:
          ValueError: if `init` is of another shape.
        """
        self.settings, self.config, self.attend = settings, config, attend
        rngs = nnx.Rngs(settings.seed)
        model = Transformer(config, dtype=settings.precision, remat=remat, unroll=unroll, rngs=rngs)
        self._graph, self.params = nnx.split(model)
        if init is not None:
            self.params = _float32_weights(init, config)
        self.opt_state = settings.optimizer().init(self.params)
        self.step = 0
        self._num_bytes = stream.size
        self._stream = jnp.asarray(stream)

    def run_step(self) -> dict[str, jax.Array]:
        """Does one optimizer step.

        Returns:
          `bits_per_byte` and `grad_norm` of the batch, scalars still on the device.
        """
        starts = window_starts(self.settings, self.step, self._num_bytes)
        context = self.settings.context(self.step)
        self.params, self.opt_state, metrics = _train_step(
            self.params,
            self.opt_state,
            self._stream,
            jnp.asarray(starts),
            graph=self._graph,
            attend=self.attend,
            settings=self.settings,
            context=context,
        )
        self.step += 1
        return metrics

    def model(self) -> Transformer:
        """The model with the current weights, float32, computing in the training precision."""
        return nnx.merge(self._graph, self.params)

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes weights, optimizer state and step, in the background."""
        save_tree(manager, self.step, (self.params, self.opt_state))

    def restore(self, manager: ocp.CheckpointManager) -> bool:
        """Takes up the latest checkpoint; False if there is none."""
        found = restore_tree(manager, (self.params, self.opt_state))
        if found is None:
            return False
        self.step, (self.params, self.opt_state) = found
        return True


def _float32_weights(model: Transformer, config: TransformerConfig) -> nnx.State:
    """The model's parameters in float32, in the structure of a fresh model's."""
    if model.config != config:
        raise ValueError(f"the model to start from has {model.config}, must have {config}")
    return jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model))
