"""The training step at a long context, and what is saved of it."""

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp
from flax import nnx

from turbojax.finetune import order
from turbojax.finetune.checkpoint import restore_tree, save_tree
from turbojax.finetune.optimizer import default_promotion
from turbojax.finetune.settings import Settings, for_context
from turbojax.models import Attend, PooledAttention, Transformer
from turbojax.ops import exact_attention
from turbojax.ops.options import PLAIN, AttentionOptions


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any = None,
    options: AttentionOptions = PLAIN,
) -> tuple[jax.Array, Any]:
    """Exact causal attention: cuDNN's where it runs, which needs a GPU and 16 bits, else XLA's."""
    return exact_attention.attend(
        query, key, value, options=options.complete(query.shape[3])
    ), cache


class Trainer:
    """Model, optimizer and their jitted step.

    Attributes:
      settings: see `Settings`.
      config: the model's, at the run's context.
      params: float32 master weights, an `nnx.State`.
      opt_state: the optimizer's state.
      step: steps done. It is the position in the data, too: their order is a function of it.
      compile_seconds: what compiling the step took, 0 before that.
    """

    def __init__(
        self,
        model: Transformer,
        settings: Settings,
        stream: np.ndarray,
        *,
        pooled: PooledAttention | None = None,
        remat: bool = False,
    ) -> None:
        """Takes up the weights of a model.

        Args:
          model: a byte-level model of any dtype.
          settings: see `Settings`.
          stream: ``[bytes]`` uint8, kept in the accelerator's memory.
          pooled: how to attend; exactly, if not given.
          remat: recompute layers in the backward pass to save memory.

        Raises:
          ValueError: if the model does not read bytes, or the stream is too short.
        """
        if model.config.vocab_size != 256:
            raise ValueError(f"vocab_size={model.config.vocab_size} must be 256: tokens are bytes")
        self.settings = settings
        self.config = for_context(model.config, settings.context)
        self.attend: Attend = dense_attention if pooled is None else pooled
        self._num_bytes = stream.size
        self._starts(0)
        unroll = self.config.num_layers
        make = functools.partial(Transformer, self.config, dtype=settings.precision)
        self._graph = nnx.graphdef(
            nnx.eval_shape(lambda: make(remat=remat, unroll=unroll, rngs=nnx.Rngs(0)))
        )
        # A copy even where they are float32 already: the step donates them.
        self.params = jax.tree.map(
            lambda x: jnp.array(x, jnp.float32, copy=True), nnx.state(model, nnx.Param)
        )
        with default_promotion():
            self.opt_state = settings.optimizer().init(self.params)
        self.step = 0
        self.compile_seconds = 0.0
        self._stream = jnp.asarray(stream)
        self._compiled: Any = None

    def run_step(self) -> dict[str, jax.Array]:
        """Does one optimizer step; returns before the device is done.

        Returns:
          Scalars on the device: `bits_per_byte` and `grad_norm` of the batch, and `density`, the
          mean over layers of what their levels leave of dense attention's work.
        """
        self.compile()
        starts = jnp.asarray(self._starts(self.step))
        self.params, self.opt_state, metrics = self._compiled(
            self.params, self.opt_state, self._stream, starts
        )
        self.step += 1
        return metrics

    def compile(self) -> None:
        """Compiles the step, if that is not done yet; `compile_seconds` says how long it took."""
        if self._compiled is not None:
            return
        begun = time.perf_counter()
        step = functools.partial(
            _train_step,
            graph=self._graph,
            attend=_MeasuredAttention(self.attend),
            settings=self.settings,
            num_layers=self.config.num_layers,
        )
        starts = jnp.asarray(self._starts(0))
        traced = jax.jit(step, donate_argnums=(0, 1))
        self._compiled = traced.lower(self.params, self.opt_state, self._stream, starts).compile()
        self.compile_seconds = time.perf_counter() - begun

    def model(self) -> Transformer:
        """The model with the current weights, float32, computing in the run's precision."""
        model: Transformer = nnx.merge(self._graph, self.params)
        return model

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

    def _starts(self, step: int) -> np.ndarray:
        """Where the windows of a step begin, int32 ``[batch_size]``."""
        size = self.settings.batch_size
        return order.window_starts(
            step * size + np.arange(size),
            num_bytes=self._num_bytes,
            context=self.settings.context,
            seed=self.settings.seed,
        )


class _MeasuredAttention:
    """An `Attend` whose cache is a number: the density of the layer's levels goes out there."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: jax.Array,
        options: AttentionOptions = PLAIN,
    ) -> tuple[jax.Array, jax.Array]:
        if not isinstance(self._attend, PooledAttention):
            return self._attend(query, key, value, None, options)[0], jnp.ones_like(cache)
        levels = self._attend.levels(query, key, options=options)
        out = self._attend.attend(query, key, value, levels, options=options)
        return out, self._attend.density(levels).astype(cache.dtype)


def _train_step(
    params: nnx.State,
    opt_state: Any,
    stream: jax.Array,
    starts: jax.Array,
    *,
    graph: Any,
    attend: _MeasuredAttention,
    settings: Settings,
    num_layers: int,
) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows that begin at `starts`."""
    indices = starts[:, None] + jnp.arange(settings.context + 1, dtype=jnp.int32)[None, :]
    tokens = stream[indices].astype(jnp.int32)

    def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        densities = jnp.ones(num_layers, jnp.float32)
        logits, densities = model(tokens[:, :-1], attend=attend, caches=densities)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), jnp.mean(densities)

    (value, density), grads = jax.value_and_grad(loss, has_aux=True)(params)
    with default_promotion():
        updates, opt_state = settings.optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    norm = optax.tree.norm(grads)
    metrics = {"bits_per_byte": value / math.log(2.0), "grad_norm": norm, "density": density}
    return params, opt_state, metrics
