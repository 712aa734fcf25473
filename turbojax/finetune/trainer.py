"""Training of a byte-level model at a long context."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import PartitionSpec

from turbojax.finetune.base import BaseTrainer, updated, windows
from turbojax.finetune.evaluate import target_bits
from turbojax.finetune.settings import Settings, for_context
from turbojax.finetune.split import Slices, Split
from turbojax.models import BEGINNING_OF_FILE, Attend, PooledAttention, Transformer
from turbojax.ops import exact_attention
from turbojax.ops.extras import of_layer
from turbojax.ops.options import PLAIN, AttentionOptions
from turbojax.sharding.axes import Axes

Loss = Callable[[nnx.State, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Of weights, stream and starts of windows: the mean loss, and the mean density of levels."""
Gradient = Callable[[nnx.State, jax.Array, jax.Array], tuple[tuple[jax.Array, jax.Array], Any]]
"""What `jax.value_and_grad` makes of a `Loss`."""


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
        axes: Axes | None = None,
        fsdp: bool = True,
    ) -> None:
        """Takes up the weights of a model.

        Args:
          model: a byte-level model of any dtype.
          settings: see `Settings`.
          stream: ``[bytes]`` uint8, kept in the accelerator's memory.
          pooled: how to attend; exactly, if not given.
          packed: whether a sequence's documents, each after a byte 0, do not see each other.
          remat: recompute layers in the backward pass to save memory.
          axes: the devices to train on: sequences are split over `axes.batch`. The losses are those
            of one device but for the order of sums.
          fsdp: whether weights and the optimizer's state are split over these devices, too, see
            `Split`; otherwise each device holds all of them.

        Raises:
          ValueError: if the model does not read bytes, or the stream is too short; if it is packed,
            but not `pooled`; if `axes` split something else, or do not divide the batch.
        """
        if packed and pooled is None:
            raise ValueError(
                "packed=True needs pooled attention; LocalWindow(window=context) has every block "
                "at level 1, which is exact"
            )
        if model.config.vocab_size != 256:
            raise ValueError(f"vocab_size={model.config.vocab_size} must be 256: tokens are bytes")
        self.config = for_context(model.config, settings.context)
        params = nnx.state(model, nnx.Param)
        split = None if axes is None else Split(axes, settings.precision, fsdp)
        super().__init__(params, settings, stream, split)
        self.attend: Attend = dense_attention if pooled is None else pooled
        self.packed = packed
        unroll = self.config.num_layers
        make = functools.partial(Transformer, self.config, dtype=settings.precision)
        shapes = nnx.eval_shape(lambda: make(remat=remat, unroll=unroll, rngs=nnx.Rngs(0)))
        self._graph = nnx.graphdef(shapes)
        self._scores: dict[Attend, Callable[..., jax.Array]] = {}
        self._slices: Slices | None = None
        if split is not None:
            self._slices = split.slices(params)
            shapes.gather = self._slices.of_layer()
        self._step_graph = nnx.graphdef(shapes)

    @property
    def params(self) -> nnx.State:
        """Float32 master weights."""
        return self._trained

    @params.setter
    def params(self, params: nnx.State) -> None:
        self._trained = params

    def model(self) -> Transformer:
        """The model with the current weights, float32, computing in the run's precision.

        On a mesh all processes must ask for it, and each gets the whole of it on one device.
        """
        return self._merged(jax.tree.map(jnp.asarray, self.exported_params()))

    def exported(self) -> Transformer:
        """The same with its weights in the host's memory where they are split, to be saved."""
        return self._merged(self.exported_params())

    def bits(self, tokens: np.ndarray, attend: Attend) -> np.ndarray:
        """Information content of every target of `[n, T + 1]` tokens: `[n, T]` float32 bits.

        On a mesh all processes must ask for it, and `n` must be a multiple of the devices that
        sequences are split over.
        """
        if attend not in self._scores:
            graph = self._step_graph

            def score(params: nnx.State, tokens: jax.Array) -> jax.Array:
                if self._slices is not None:
                    params = self._slices.outside()(params)
                logits = nnx.merge(graph, params)(tokens[:, :-1], attend=attend)
                return target_bits(logits, tokens)

            self._scores[attend] = self._jitted_score(score)
        if self._split is not None:
            return np.asarray(self._scores[attend](self.params, self._split.over_batch(tokens)))
        return np.asarray(self._scores[attend](self.params, jnp.asarray(tokens)))

    def _jitted_score(self, score: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        split = self._split
        if split is None:
            return jax.jit(score)
        rows = split.axes.spec("BT")
        spread = jax.shard_map(
            score,
            mesh=split.mesh,
            in_specs=(split.specs(self.params), rows),
            out_specs=rows,
            check_vma=False,
        )
        return jax.jit(spread, out_shardings=split.whole)

    def exported_params(self) -> nnx.State:
        """`params`, whole in the host's memory where they are split; all processes must ask."""
        return self.params if self._split is None else self._split.on_host(self.params)

    def _merged(self, params: nnx.State) -> Transformer:
        model: Transformer = nnx.merge(self._graph, params)
        return model

    def _make_step(self) -> Callable[..., tuple[nnx.State, Any, dict[str, jax.Array]]]:
        loss = _Loss(
            graph=self._step_graph,
            attend=_MeasuredAttention(self.attend),
            context=self.settings.context,
            num_layers=self.config.num_layers,
            packed=self.packed,
        )
        gradient: Gradient = jax.value_and_grad(loss, has_aux=True)
        if self._split is not None and self._slices is not None:
            gradient = over_devices(loss, self._split, self._slices, self.params)
        return functools.partial(_train_step, gradient=gradient, settings=self.settings)


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


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The mean loss of the windows that begin at `starts`, in nats, and the density of levels."""

    graph: Any
    attend: _MeasuredAttention
    context: int
    num_layers: int
    packed: bool

    def __call__(
        self, params: nnx.State, stream: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        tokens, attend = windows(stream, starts, self.context), self.attend
        if self.packed:
            attend = attend.within(segments(tokens[:, :-1]))
        model = nnx.merge(self.graph, params)
        densities = jnp.ones(self.num_layers, jnp.float32)
        logits, densities = model(tokens[:, :-1], attend=attend, caches=densities)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses), jnp.mean(densities)


def over_devices(loss: Loss, split: Split, slices: Slices, params: nnx.State) -> Gradient:
    """`jax.value_and_grad` of the mean loss of all devices, each of which has some sequences.

    Args:
      loss: of a device's sequences, given weights of which layers are slices.
      split: of the run.
      slices: of its weights.
      params: these.
    """
    outside = slices.outside()

    def local(params: nnx.State, stream: jax.Array, starts: jax.Array) -> Any:
        def share(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            value, density = loss(outside(params), stream, starts)
            return value / split.count, density

        (value, density), grads = jax.value_and_grad(share, has_aux=True)(slices.own(params))
        value = jax.lax.psum(value, split.names)
        return (value, jax.lax.pmean(density, split.names)), slices.summed(grads)

    whole, specs = PartitionSpec(), split.specs(params)
    return jax.shard_map(
        local,
        mesh=split.mesh,
        in_specs=(specs, whole, split.axes.spec("B")),
        out_specs=((whole, whole), specs),
        axis_names=set(split.mesh.axis_names),
        check_vma=False,
    )


def _train_step(
    params: nnx.State,
    opt_state: Any,
    stream: jax.Array,
    starts: jax.Array,
    *,
    gradient: Gradient,
    settings: Settings,
) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows that begin at `starts`."""
    (value, density), grads = gradient(params, stream, starts)
    params, opt_state = updated(params, opt_state, grads, settings)
    norm = optax.tree.norm(grads)
    metrics = {"bits_per_byte": value / math.log(2.0), "grad_norm": norm, "density": density}
    return params, opt_state, metrics
