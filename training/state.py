"""What a training step needs: the schedule, the order of the data, the step itself, checkpoints."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turbojax.finetune import base
from turbojax.finetune.checkpoint import restore_tree, save_tree
from turbojax.finetune.optimizer import OPTIMIZERS, default_promotion
from turbojax.finetune.trainer import dense_attention
from turbojax.models import Attend, Transformer, TransformerConfig

# How far the rate has fallen, from 0 to 1, over the share of the decay that is done.
_DECAY_SHAPES = {"sqrt": jnp.sqrt, "linear": lambda done: done}
_OPTIMIZERS = {name: OPTIMIZERS[name] for name in ("adamw", "muon")}
# The axis of a mesh over which the windows of a step are split.
_DATA = "data"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides which weights come out, apart from corpus and machine.

    Attributes:
      steps: optimizer steps in all.
      tokens_per_step: bytes predicted per step, a multiple of the contexts.
      short_context: window of the first steps.
      long_context: window of the steps after them.
      long_fraction: share of the steps at `long_context`.
      longest_context: window of the last steps, if there are any.
      longest_fraction: share of the steps at `longest_context`.
      learning_rate: peak of the schedule.
      warmup_steps: linear rise from 0.
      decay_fraction: share of the steps, the last ones, in which the rate falls to 0.
      decay_shape: "sqrt" falls as 1 - sqrt(x), for a decay from a high rate; "linear" as 1 - x.
      weight_decay: of matrices and embeddings, not of norms; with Muon, of its matrices alone.
      clip_norm: bound on the global norm of the gradient.
      seed: of initial weights and data order.
      precision: compute dtype; master weights and optimizer state are float32.
      optimizer: "adamw", or "muon" of the layers' matrices, see `turbojax.finetune.optimizer`.

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
    longest_context: int = 16384
    longest_fraction: float = 0.0
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        contexts = ("short_context", "long_context", "longest_context")
        for name in ("steps", "tokens_per_step", *contexts):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("long_fraction", "longest_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.long_fraction + self.longest_fraction > 1:
            raise ValueError(
                f"long_fraction={self.long_fraction} and "
                f"longest_fraction={self.longest_fraction} must be at most 1 together"
            )
        for name in contexts if self.longest_fraction else contexts[:2]:
            if self.tokens_per_step % getattr(self, name):
                raise ValueError(
                    f"tokens_per_step={self.tokens_per_step} must be a multiple of "
                    f"{name}={getattr(self, name)}"
                )
        for name, known in (("decay_shape", _DECAY_SHAPES), ("optimizer", _OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {sorted(known)}")

    @property
    def phases(self) -> tuple[tuple[int, range], ...]:
        """The contexts and their steps, in order; those without steps are left out."""
        longest = self.steps - round(self.steps * self.longest_fraction)
        long = max(0, longest - round(self.steps * self.long_fraction))
        phases = (
            (self.short_context, range(long)),
            (self.long_context, range(long, longest)),
            (self.longest_context, range(longest, self.steps)),
        )
        return tuple((context, steps) for context, steps in phases if steps)

    def phase(self, step: int) -> tuple[int, range]:
        """The window of a step, and the steps that have it; the last ones of steps past the end."""
        return next((p for p in self.phases if step < p[1].stop), self.phases[-1])

    def context(self, step: int) -> int:
        """The window of a step."""
        return self.phase(step)[0]

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

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer by that name, with a clipped gradient."""
        return _OPTIMIZERS[self.optimizer](
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
    context, steps = settings.phase(step)
    batch_size = settings.tokens_per_step // context
    index = (step - steps.start) * batch_size + np.arange(batch_size)
    return base.window_starts(index, num_bytes=num_bytes, context=context, seed=settings.seed)


@functools.partial(jax.jit, static_argnames=("graph", "attend", "context", "mesh"))
def _gradient(
    params: nnx.State,
    stream: jax.Array,
    starts: jax.Array,
    *,
    graph: Any,
    attend: Attend,
    context: int,
    mesh: Mesh | None,
) -> tuple[jax.Array, nnx.State]:
    """Mean loss in nats at the windows of `context` bytes that begin at `starts`; its gradient.

    By itself, not in one program with the optimizer: this one takes long to compile, and is the
    same for all settings with such windows.
    """

    def loss(params: nnx.State, stream: jax.Array, starts: jax.Array) -> jax.Array:
        indices = starts[:, None] + jnp.arange(context + 1, dtype=jnp.int32)[None, :]
        tokens = stream[indices].astype(jnp.int32)
        logits = nnx.merge(graph, params)(tokens[:, :-1], attend=attend)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    gradient = jax.value_and_grad(loss)
    return (gradient if mesh is None else _over(mesh, gradient))(params, stream, starts)


@functools.partial(jax.jit, static_argnames="settings", donate_argnames=("params", "opt_state"))
def _update(
    params: nnx.State, opt_state: Any, grads: nnx.State, *, settings: Settings
) -> tuple[nnx.State, Any, jax.Array]:
    """Weights and optimizer after a step, and the gradient's norm."""
    norm = optax.tree.norm(grads)
    with default_promotion():
        updates, opt_state = settings.make_optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, norm


def _over(mesh: Mesh, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The mean of what devices compute, each of its own windows."""

    def local(params: nnx.State, stream: jax.Array, starts: jax.Array) -> Any:
        return jax.lax.pmean(gradient(params, stream, starts), _DATA)

    whole, windows = PartitionSpec(), PartitionSpec(_DATA)
    # That sums over devices are equal on all of them is not checked: weights have no such types.
    return jax.shard_map(
        local, mesh=mesh, in_specs=(whole, whole, windows), out_specs=whole, check_vma=False
    )


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
        devices: int = 1,
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
          devices: over how many the windows of a step are split; each has all weights. Losses are
            those of one device but for the order of sums.

        Raises:
          ValueError: if `init` is of another shape, a window is longer than the model is meant for,
            or there are not as many devices or windows.
        """
        _check_fits(config, settings, devices)
        self.settings, self.config, self.attend = settings, config, attend
        rngs = nnx.Rngs(settings.seed)
        model = Transformer(config, dtype=settings.precision, remat=remat, unroll=unroll, rngs=rngs)
        self._graph, self.params = nnx.split(model)
        if init is not None:
            self.params = _float32_weights(init, config)
        self.opt_state = settings.make_optimizer().init(self.params)
        self.step = 0
        self._num_bytes = stream.size
        self._stream = jnp.asarray(stream)
        self._mesh: Mesh | None = None
        if devices > 1:
            self._mesh = Mesh(np.array(jax.devices()[:devices]), (_DATA,))
            whole = NamedSharding(self._mesh, PartitionSpec())
            state = (self.params, self.opt_state, self._stream)
            self.params, self.opt_state, self._stream = jax.device_put(state, whole)

    def run_step(self) -> dict[str, jax.Array]:
        """Does one optimizer step.

        Returns:
          `bits_per_byte` and `grad_norm` of the batch, scalars still on the device.
        """
        starts = window_starts(self.settings, self.step, self._num_bytes)
        context = self.settings.context(self.step)
        value, grads = _gradient(
            self.params,
            self._stream,
            jnp.asarray(starts),
            graph=self._graph,
            attend=self.attend,
            context=context,
            mesh=self._mesh,
        )
        self.params, self.opt_state, norm = _update(
            self.params, self.opt_state, grads, settings=self.settings
        )
        self.step += 1
        return {"bits_per_byte": value * (1 / math.log(2.0)), "grad_norm": norm}

    def model(self) -> Transformer:
        """The model with the current weights, float32, computing in the training precision."""
        params = self.params
        if self._mesh is not None:
            params = jax.device_put(params, self._mesh.devices.flat[0])
        return nnx.merge(self._graph, params)

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


def _check_fits(config: TransformerConfig, settings: Settings, devices: int) -> None:
    """Raises ValueError if a step does not fit the model or the devices."""
    longest = max(context for context, _ in settings.phases)
    if longest > config.max_length:
        raise ValueError(
            f"a context of {longest} must be at most max_length={config.max_length} of the model"
        )
    if not 1 <= devices <= jax.device_count():
        raise ValueError(f"{devices=} must be from 1 to {jax.device_count()}, which are there")
    if (settings.tokens_per_step // longest) % devices:
        raise ValueError(
            f"{settings.tokens_per_step // longest} windows of {longest} bytes must be a multiple "
            f"of {devices=}"
        )


def _float32_weights(model: Transformer, config: TransformerConfig) -> nnx.State:
    """The model's parameters in float32, in the structure of a fresh model's."""
    if model.config != config:
        raise ValueError(f"the model to start from has {model.config}, must have {config}")
    return jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model))
