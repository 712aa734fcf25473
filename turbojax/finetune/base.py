"""What trainers share: a run's state, the order of its data, its compiled step, checkpoints."""

import abc
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp

from turbojax.finetune.checkpoint import restore_tree, save_tree
from turbojax.finetune.losses import (
    mean_of_learned,
    scaled_value_and_grad,
    share_of_learned,
    with_marks,
)
from turbojax.finetune.optimizer import default_promotion
from turbojax.finetune.settings import Settings
from turbojax.finetune.split import Split

Trained = TypeVar("Trained")
"""A pytree of float32 arrays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(abc.ABC):
    """The mean loss of some sequences of a step, in nats, of `context` predicted tokens each."""

    context: int
    is_marked: bool  # whether some tokens of the stream do not count, see `with_marks`

    @abc.abstractmethod
    def of_tokens(self, trained: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Losses at ``[B, context + 1]`` tokens, which of them count, and what else is wanted."""

    @abc.abstractmethod
    def learned(self, tokens: jax.Array) -> tuple[jax.Array, tuple[str, ...]]:
        """Which losses of these tokens count, and the axes of the mesh that they are split over."""

    def __call__(
        self, trained: Any, tokens: jax.Array, share: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """The mean loss; with a `share` the sum of what counts, divided by it."""
        losses, learned, more = self.of_tokens(trained, tokens)
        loss = jnp.mean(losses) if share is None else mean_of_learned(losses, learned, share)
        return loss, more

    def share(self, tokens: jax.Array) -> jax.Array | None:
        """How many of a step's tokens count, see `share_of_learned`; None if all do."""
        return share_of_learned(*self.learned(tokens)) if self.is_marked else None


class BaseTrainer(abc.ABC, Generic[Trained]):
    """What is trained, its optimizer, and their jitted step; a subclass says what a step is.

    `step` counts the steps done: it is also the position in the data, whose order is a function of
    it. `compile_seconds` is what compiling the step took, 0 before that. Steps call their bits
    `metric`; they are of a `unit`.
    """

    metric: str = "bits"
    unit: str = "token"

    def __init__(
        self,
        trained: Trained,
        settings: Settings,
        stream: np.ndarray,
        split: Split | None = None,
        learn: np.ndarray | None = None,
    ) -> None:
        """Copies the arrays to train, and puts the stream into the accelerator's memory.

        `split` says over which devices, None for one; the others are as `Trainer`'s.
        """
        self.settings = settings
        self._split = split
        if split is not None:
            split.check(settings)
        self._num_tokens, self._is_marked = stream.size, learn is not None
        stream = with_marks(stream, learn)
        self._starts(0)
        # Copied even if they are float32 already: the step donates them.
        self._trained: Trained = (
            jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), trained)
            if split is None
            else split.placed(trained)
        )
        self.opt_state = self._init_optimizer()
        self.step = 0
        self.compile_seconds = 0.0
        self._stream = jnp.asarray(stream) if split is None else split.everywhere(stream)
        self._compiled: Any = None

    def _init_optimizer(self) -> Any:
        """The optimizer's state, made where it stays."""
        init = self.settings.optimizer().init
        with default_promotion():
            if self._split is None:
                return init(self._trained)
            shardings = self._split.shardings(jax.eval_shape(init, self._trained))
            return jax.jit(init, out_shardings=shardings)(self._trained)

    def run_step(self) -> dict[str, jax.Array]:
        """Does one optimizer step; returns at once, with scalars that are still on the device."""
        self.compile()
        given = self._arguments(self.step)
        self._trained, self.opt_state, metrics = self._compiled(*given)
        self.step += 1
        return metrics

    def compile(self) -> None:
        """Compiles the step, if that is not done yet; `compile_seconds` says how long it took."""
        if self._compiled is not None:
            return
        begun = time.perf_counter()
        given, where = self._arguments(0), None
        if self._split is not None:
            # State stays where the next step expects it; metrics are the same on every device.
            state = (self._trained, self.opt_state)
            where = (*self._split.shardings(state), self._split.whole)
        step = jax.jit(self._make_step(), donate_argnums=(0, 1), out_shardings=where)
        self._compiled = step.lower(*given).compile()
        self.compile_seconds = time.perf_counter() - begun

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Writes what is trained, the optimizer's state and the step, in the background."""
        save_tree(manager, self.step, (self._trained, self.opt_state))

    def restore(self, manager: ocp.CheckpointManager) -> bool:
        """Takes up the latest checkpoint; False if there is none."""
        found = restore_tree(manager, (self._trained, self.opt_state))
        if found is None:
            return False
        self.step, (self._trained, self.opt_state) = found
        return True

    @abc.abstractmethod
    def _value_and_grad(self) -> Callable[..., Any]:
        """From what is trained, those of `_frozen`, the stream and the starts of windows.

        To what `jax.value_and_grad` gives: the loss with what else it returns, and the gradient.
        """

    def _metrics(self, bits: jax.Array, more: Any) -> dict[str, jax.Array]:
        """What a step returns beside the gradient's norm, from what the loss returned."""
        return {self.metric: bits}

    def _frozen(self) -> tuple[Any, ...]:
        """Further arguments of a step, which it leaves as they are."""
        return ()

    def _make_step(self) -> Callable[..., tuple[Trained, Any, dict[str, jax.Array]]]:
        return functools.partial(
            _train_step,
            gradient=self._value_and_grad(),
            metrics=self._metrics,
            settings=self.settings,
        )

    def _on_devices(self, tokens: np.ndarray) -> jax.Array:
        """Rows of sequences, on one device or split over those of `split`."""
        return jnp.asarray(tokens) if self._split is None else self._split.over_batch(tokens)

    def _arguments(self, step: int) -> tuple[Any, ...]:
        starts = self._on_devices(self._starts(step))
        return self._trained, self.opt_state, *self._frozen(), self._stream, starts

    def _starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, int32 ``[batch_size]``."""
        size = self.settings.batch_size
        return window_starts(
            step * size + np.arange(size),
            num_bytes=self._num_tokens,
            context=self.settings.context,
            seed=self.settings.seed,
        )


def _train_step(
    trained: Trained,
    opt_state: Any,
    *rest: Any,
    gradient: Callable[..., Any],
    metrics: Callable[[jax.Array, Any], dict[str, jax.Array]],
    settings: Settings,
) -> tuple[Trained, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows that begin at the last of `rest`."""
    (value, more), grads = gradient(trained, *rest)
    trained, opt_state = updated(trained, opt_state, grads, settings)
    found = {"grad_norm": optax.tree.norm(grads), **metrics(value / math.log(2.0), more)}
    return trained, opt_state, found


def in_parts(
    loss: Loss,
    settings: Settings,
    *,
    devices: int = 1,
    whole: Callable[[Any], Any] = lambda trained: trained,
    beside: Any = None,
) -> Callable[[Any, jax.Array, jax.Array], Any]:
    """`scaled_value_and_grad` of the mean loss of windows, one part in memory at a time.

    Args:
      loss: see `Loss`.
      settings: say into how many parts the windows are taken apart, and the scale of the loss.
      devices: what loss and gradient are divided by, each of which has as many windows.
      whole: makes what the loss takes of what the gradient is of, in each part anew.
      beside: zeros of what else the loss returns, which is averaged over the parts.

    Returns:
      A function of what is trained, the stream and the starts of windows.
    """
    parts = settings.accumulate

    def of_part(trained: Any, tokens: jax.Array, share: jax.Array | None) -> tuple[jax.Array, Any]:
        value, more = loss(whole(trained), tokens, share)
        # A share counts the tokens of all parts already.
        return value / (devices * parts if share is None else devices), more

    step = scaled_value_and_grad(of_part, settings.loss_scale)

    def gradient(trained: Any, stream: jax.Array, starts: jax.Array) -> Any:
        tokens = windows(stream, starts, loss.context)
        share = loss.share(tokens)
        if parts == 1:
            return step(trained, tokens, share)

        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, step(trained, tokens, share)), None

        nothing = (jnp.zeros((), jnp.float32), beside), jax.tree.map(jnp.zeros_like, trained)
        total, _ = jax.lax.scan(add, nothing, tokens.reshape(parts, -1, tokens.shape[1]))
        (value, more), grads = total
        return (value, jax.tree.map(lambda x: x / parts, more)), grads

    return gradient


def check_stream(stream: np.ndarray, vocab_size: int) -> None:
    """Raises TypeError unless it is one array of integers, ValueError unless all are tokens."""
    if stream.ndim != 1 or not np.issubdtype(stream.dtype, np.integer):
        found = f"{stream.dtype} {list(stream.shape)}"
        raise TypeError(f"the stream is {found}, must be integers [n]")
    if (largest := int(stream.max(initial=0))) >= vocab_size:
        raise ValueError(f"token {largest} must be below {vocab_size}")
    if stream.min(initial=0) < 0:
        raise ValueError(f"token {stream.min()} must not be negative")


def windows(stream: jax.Array, starts: jax.Array, context: int) -> jax.Array:
    """The tokens of the windows that begin at `starts`, int32 ``[B, context + 1]``."""
    indices = starts[:, None] + jnp.arange(context + 1, dtype=jnp.int32)[None, :]
    return stream[indices].astype(jnp.int32)


def window_starts(index: np.ndarray, *, num_bytes: int, context: int, seed: int) -> np.ndarray:
    """Where windows begin, int32 ``[n]``, given their numbers from 0 in an endless sequence.

    Every epoch visits all windows once, in a new order and cut at a new offset, both by `seed`. The
    stream has `num_bytes` bytes, of which a window predicts `context`. Raises ValueError if the
    stream holds no two windows, or its positions do not fit int32.
    """
    # One window is lost to the offset, one byte to the shift between inputs and targets.
    num_windows = (num_bytes - 1) // context - 1
    if num_windows < 1:
        raise ValueError(f"{num_bytes=} must be more than twice {context=}")
    if num_bytes >= 2**31:
        raise ValueError(f"{num_bytes=} must be below 2**31")
    starts = np.empty(index.shape, np.int32)
    for epoch in np.unique(index // num_windows):
        order, offset = _epoch(seed, context, int(epoch), num_windows)
        here = index // num_windows == epoch
        starts[here] = order[index[here] % num_windows] * context + offset
    return starts


@functools.lru_cache(maxsize=4)
def _epoch(seed: int, context: int, epoch: int, num_windows: int) -> tuple[np.ndarray, int]:
    generator = np.random.default_rng([seed, context, epoch])
    return generator.permutation(num_windows), int(generator.integers(context))


def updated(
    trained: Trained, opt_state: Any, grads: Trained, settings: Settings
) -> tuple[Trained, Any]:
    """What is trained, and the optimizer's state, after a step with this gradient."""
    with default_promotion():
        updates, opt_state = settings.optimizer().update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    return trained, opt_state
