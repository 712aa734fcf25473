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
from turbojax.finetune.optimizer import default_promotion
from turbojax.finetune.settings import Settings

Trained = TypeVar("Trained")
"""A pytree of float32 arrays."""


class BaseTrainer(abc.ABC, Generic[Trained]):
    """What is trained, its optimizer, and their jitted step; a subclass says what a step is.

    Attributes:
      settings: see `Settings`.
      opt_state: the optimizer's state.
      step: steps done. It is the position in the data, too: their order is a function of it.
      compile_seconds: what compiling the step took, 0 before that.
    """

    def __init__(self, trained: Trained, settings: Settings, stream: np.ndarray) -> None:
        """Takes up what is to be trained.

        Args:
          trained: arrays, which are copied.
          settings: see `Settings`.
          stream: ``[n]`` integers, kept in the accelerator's memory.

        Raises:
          ValueError: if the stream is too short or too long.
        """
        self.settings = settings
        self._num_tokens = stream.size
        self._starts(0)
        # A copy even where they are float32 already: the step donates them.
        self._trained: Trained = jax.tree.map(
            lambda x: jnp.array(x, jnp.float32, copy=True), trained
        )
        with default_promotion():
            self.opt_state = settings.optimizer().init(self._trained)
        self.step = 0
        self.compile_seconds = 0.0
        self._stream = jnp.asarray(stream)
        self._compiled: Any = None

    def run_step(self) -> dict[str, jax.Array]:
        """Does one optimizer step; returns before the device is done.

        Returns:
          Scalars on the device, see the class.
        """
        self.compile()
        starts = jnp.asarray(self._starts(self.step))
        self._trained, self.opt_state, metrics = self._compiled(*self._arguments(starts))
        self.step += 1
        return metrics

    def compile(self) -> None:
        """Compiles the step, if that is not done yet; `compile_seconds` says how long it took."""
        if self._compiled is not None:
            return
        begun = time.perf_counter()
        given = self._arguments(jnp.asarray(self._starts(0)))
        self._compiled = jax.jit(self._make_step(), donate_argnums=(0, 1)).lower(*given).compile()
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

        Its arguments are what is trained, the optimizer's state, what is `_frozen`, the stream, and
        where windows begin. It returns the first two as they are afterwards, and metrics.
        """

    def _frozen(self) -> tuple[Any, ...]:
        """Further arguments of a step, which it leaves as they are."""
        return ()

    def _arguments(self, starts: jax.Array) -> tuple[Any, ...]:
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
