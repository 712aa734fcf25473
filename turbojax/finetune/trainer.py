"""Training of a byte-level model at a long context."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from turbojax.finetune.base import BaseTrainer, updated, windows
from turbojax.finetune.settings import Settings, for_context
from turbojax.models import BEGINNING_OF_FILE, Attend, PooledAttention, Transformer
from turbojax.ops import exact_attention
from turbojax.ops.extras import of_layer
from turbojax.ops.options import PLAIN, AttentionOptions


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any = None,
    options: AttentionOptions = PLAIN,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Exact causal attention: cuDNN's where it runs, which needs a GPU and 16 bits, else XLA's."""
    return exact_attention.attend(
        query,
        key,
        value,
        options=options.complete(query.shape[3]),
        extras=of_layer(query, sinks),
    ), cache


class Trainer(BaseTrainer[nnx.State]):
    """Model, optimizer and their jitted step.

    `run_step` returns `bits_per_byte` and `grad_norm` of the batch, and `density`, the mean over
    layers of what their levels leave of dense attention's work.

    Attributes:
      settings: see `Settings`.
      config: the model's, at the run's context.
      attend: how the model attends.
      packed: whether documents of a sequence do not see each other.
      opt_state: the optimizer's state.
      step: steps done, see `BaseTrainer`.
      compile_seconds: what compiling the step took, 0 before that.
    """

    def __init__(
        self,
        model: Transformer,
        settings: Settings,
        stream: np.ndarray,
        *,
        pooled: PooledAttention | None = None,
        packed: bool = False,
        remat: bool = False,
    ) -> None:
        """Takes up the weights of a model.

        Args:
          model: a byte-level model of any dtype.
          settings: see `Settings`.
          stream: ``[bytes]`` uint8, kept in the accelerator's memory.
          pooled: how to attend; exactly, if not given.
          packed: whether a sequence's documents, each after a byte 0, do not see each other.
          remat: recompute layers in the backward pass to save memory.

        Raises:
          ValueError: if the model does not read bytes, or the stream is too short; if it is packed,
            but not `pooled`.
        """
        if packed and pooled is None:
            raise ValueError(
                "packed=True needs pooled attention; LocalWindow(window=context) has every block "
                "at level 1, which is exact"
            )
        if model.config.vocab_size != 256:
            raise ValueError(f"vocab_size={model.config.vocab_size} must be 256: tokens are bytes")
        self.config = for_context(model.config, settings.context)
        super().__init__(nnx.state(model, nnx.Param), settings, stream)
        self.attend: Attend = dense_attention if pooled is None else pooled
        self.packed = packed
        unroll = self.config.num_layers
        make = functools.partial(Transformer, self.config, dtype=settings.precision)
        self._graph = nnx.graphdef(
            nnx.eval_shape(lambda: make(remat=remat, unroll=unroll, rngs=nnx.Rngs(0)))
        )

    @property
    def params(self) -> nnx.State:
        """Float32 master weights."""
        return self._trained

    @params.setter
    def params(self, params: nnx.State) -> None:
        self._trained = params

    def model(self) -> Transformer:
        """The model with the current weights, float32, computing in the run's precision."""
        model: Transformer = nnx.merge(self._graph, self.params)
        return model

    def _make_step(self) -> Callable[..., tuple[nnx.State, Any, dict[str, jax.Array]]]:
        return functools.partial(
            _train_step,
            graph=self._graph,
            attend=_MeasuredAttention(self.attend),
            settings=self.settings,
            num_layers=self.config.num_layers,
            packed=self.packed,
        )


def segments(tokens: jax.Array) -> jax.Array:
    """The documents of sequences: int32 ``[B, T]``, each beginning with byte 0."""
    return jnp.cumsum(tokens == BEGINNING_OF_FILE, axis=1, dtype=jnp.int32)


class _MeasuredAttention:
    """An `Attend` whose cache is a number: the density of the layer's levels goes out there."""

    def __init__(self, attend: Attend, segment_ids: jax.Array | None = None) -> None:
        self._attend = attend
        self._segment_ids = segment_ids

    def within(self, segment_ids: jax.Array) -> "_MeasuredAttention":
        """The same within segments, int32 ``[B, T]``."""
        return _MeasuredAttention(self._attend, segment_ids)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: jax.Array,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        if not isinstance(self._attend, PooledAttention):
            return self._attend(query, key, value, None, options, sinks)[0], jnp.ones_like(cache)
        more: Any = {"options": options, "segment_ids": self._segment_ids}
        levels = self._attend.levels(query, key, **more)
        out = self._attend.attend(query, key, value, levels, sinks=sinks, **more)
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
    packed: bool,
) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows that begin at `starts`."""
    tokens = windows(stream, starts, settings.context)
    if packed:
        attend = attend.within(segments(tokens[:, :-1]))

    def loss(params: nnx.State) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        densities = jnp.ones(num_layers, jnp.float32)
        logits, densities = model(tokens[:, :-1], attend=attend, caches=densities)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), jnp.mean(densities)

    (value, density), grads = jax.value_and_grad(loss, has_aux=True)(params)
    params, opt_state = updated(params, opt_state, grads, settings)
    norm = optax.tree.norm(grads)
    metrics = {"bits_per_byte": value / math.log(2.0), "grad_norm": norm, "density": density}
    return params, opt_state, metrics
