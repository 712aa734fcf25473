"""What trainers share: the state of a run, its compiled step, and the checkpoints of both."""

import abc
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp

from turbojax.finetune import order
from turbojax.finetune.checkpoint import restore_tree, save_tree
from turbojax.finetune.losses import with_marks
from turbojax.finetune.optimizer import default_promotion
from turbojax.finetune.settings import Settings
from turbojax.finetune.split import Split

Trained = TypeVar("Trained")
"""A pytree of float32 arrays."""


class BaseTrainer(abc.ABC, Generic[Trained]):
    """What is trained, its optimizer, and their jitted step; a subclass says what a step is.

    `step` counts the steps done: it is also the position in the data, whose order is a function of
    it. `compile_seconds` is what compiling the step took, 0 before that.
    """

    def __init__(
        self,
        trained: Trained,
        settings: Settings,
        stream: np.ndarray,
        split: Split | None = None,
        learn: np.ndarray | None = None,
    ) -> None:
        """Copies the arrays to train, and puts the stream into the accelerator's memory.

        `stream` is ``[n]`` integers, `learn` bool ``[n]``, which of them count in the loss, None
        for all; `split` says over which devices, None for one. Raises ValueError if the stream is
        too short or too long, `learn` has another shape, or devices do not divide a step.
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
        """The optimizer's state, born where it stays."""
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
    def _make_step(self) -> Callable[..., tuple[Trained, Any, dict[str, jax.Array]]]:
        """The function that is compiled.

        Its arguments are what is trained, the optimizer's state, those of `_frozen`, the stream,
        and where windows begin. It returns the first two as they are afterwards, and metrics.
        """

    def _frozen(self) -> tuple[Any, ...]:
        """Further arguments of a step, which it leaves as they are."""
        return ()

    def _arguments(self, step: int) -> tuple[Any, ...]:
        starts: Any = self._starts(step)
        starts = jnp.asarray(starts) if self._split is None else self._split.over_batch(starts)
        return self._trained, self.opt_state, *self._frozen(), self._stream, starts

    def _starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, int32 ``[batch_size]``."""
        size = self.settings.batch_size
        return order.window_starts(
            step * size + np.arange(size),
            num_bytes=self._num_tokens,
            context=self.settings.context,
            seed=self.settings.seed,
        )


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


def updated(
    trained: Trained, opt_state: Any, grads: Trained, settings: Settings
) -> tuple[Trained, Any]:
    """What is trained, and the optimizer's state, after a step with this gradient."""
    with default_promotion():
        updates, opt_state = settings.optimizer().update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    return trained, opt_state
