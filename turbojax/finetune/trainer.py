"""Training of all weights of a model, at a long context, on bytes or any tokens."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from turbojax import _checks
from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches import exact as exact_attention
from turbojax.caches.layered import FirstLayers
from turbojax.finetune.base import BaseTrainer, Loss, check_stream, in_parts
from turbojax.finetune.losses import cross_entropy, marked
from turbojax.finetune.settings import REMATS, Settings, for_context
from turbojax.finetune.split import Slices, Split
from turbojax.models import BEGINNING_OF_FILE, Attend, PooledAttention, Transformer
from turbojax.models.decoder import config_for_length
from turbojax.models.tensor_parallel.layout import local_config
from turbojax.models.text.tokenizer import BYTES
from turbojax.parallel.layers import ContextAttention
from turbojax.parallel.zigzag import from_zigzag
from turbojax.parallel.zigzag import positions as zigzag_positions
from turbojax.sharding.axes import Axes


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
        modifiers=of_layer(query, sinks),
    ), cache


class Trainer(BaseTrainer[nnx.State]):
    """Model, optimizer and their jitted step.

    `run_step` returns `bits_per_byte` of a byte-level model, `bits_per_token` of others, and
    `grad_norm` of the batch, and `density`, the mean over layers of what their levels leave of
    dense attention's work; not of pooled attention to tokens that are split over devices.

    Attributes:
      settings: see `Settings`.
      config: the model's, at the run's context.
      unit: ``"byte"`` or ``"token"``, what the model reads.
      attend: how the model attends.
      packed: as given.
      separator: the token that stands before each document; None if nothing marks them.
      opt_state: the optimizer's state.
      step: steps done.
      compile_seconds: what compiling the step took, 0 before that.
    """

    def __init__(
        self,
        model: Transformer,
        settings: Settings,
        stream: np.ndarray,
        *,
        pooled: PooledAttention | None = None,
        dense_layers: int = 0,
        packed: bool = False,
        separator: int | None = None,
        learn: np.ndarray | None = None,
        axes: Axes | None = None,
        fsdp: bool = True,
    ) -> None:
        """Takes up the weights of a model.

        Args:
          model: of any dtype; with a vocabulary of 256 its tokens are bytes.
          settings: see `Settings`.
          stream: ``[n]`` integers, the bytes or tokens to train on, kept in the accelerator's
            memory; the smallest dtype will do.
          pooled: how to attend; exactly, if not given.
          dense_layers: how many of the first layers attend exactly all the same.
          packed: whether a sequence's documents, each after a `separator`, do not see each other.
          learn: bool ``[n]``, which tokens of the stream count in the loss, such as those of
            answers; all if not given. The loss is the mean over those of a step.
          separator: the token before each document; by default byte 0 of a byte-level model, and
            nothing of others.
          axes: the devices to train on: sequences are split over `axes.batch`, heads and inner
            sizes of layers over `axes.heads` (tensor parallelism), and the tokens of each sequence
            over `axes.sequence`, in zig-zag order, with attention over a ring
            (`turbojax.parallel.ContextAttention`). The losses are those of one device but for the
            order of sums.
          fsdp: whether weights and the optimizer's state are split over these devices, too, see
            `Split`; otherwise each device holds all of them.

        Raises:
          TypeError: if the stream is not one array of integers.
          ValueError: if the stream is too short, or holds what is no token; if it is packed, but
            not `pooled`, without a `separator`, or has `dense_layers`; if there are some without
            `pooled`, or no layer is left; if `axes` split nothing, or do not divide batch,
            context, heads or inner sizes; if `settings.remat` is ``"attention"`` without `pooled`.
        """
        if packed and pooled is None:
            raise ValueError(
                "packed=True needs pooled attention; LocalWindow(window=context) has every block "
                "at level 1, which is exact"
            )
        check_remat(settings.remat, is_pooled=pooled is not None)
        _check_dense_layers(dense_layers, model.config.num_layers, pooled, packed)
        check_stream(stream, model.config.vocab_size)
        self.unit = "byte" if model.config.vocab_size == BYTES else "token"
        self.metric = f"bits_per_{self.unit}"
        if separator is None and self.unit == "byte":
            separator = BEGINNING_OF_FILE
        if packed and separator is None:
            raise ValueError("packed=True needs a separator: the token before each document")
        self.config = for_context(model.config, settings.context)
        params = nnx.state(model, nnx.Param)
        split = None if axes is None else Split(axes, settings.precision, fsdp, self.config)
        super().__init__(params, settings, stream, split, learn)
        self.attend: Attend = dense_attention if pooled is None else pooled
        if dense_layers:
            self.attend = FirstLayers(dense_attention, self.attend, dense_layers)
        self.packed, self.separator = packed, separator
        more: Any = {"dtype": settings.precision, "remat": REMATS[settings.remat]}
        more["unroll"] = self.config.num_layers

        def made(config: Any) -> Transformer:
            return nnx.eval_shape(lambda: Transformer(config, **more, rngs=nnx.Rngs(0)))

        self._graph = nnx.graphdef(made(self.config))
        # A run's steps have LongRoPE's factors for its context, as texts of that length have.
        running = config_for_length(self.config, settings.context)
        self._scores: dict[Attend, Callable[..., jax.Array]] = {}
        self._slices: Slices | None = None
        if split is None:
            shapes = made(running)
        else:
            self._slices = split.slices(params)
            shapes = made(local_config(running, split.of_heads))
            shapes.gather = self._slices.of_layer()
            shapes.axes = split.of_heads
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

    def bits(self, tokens: np.ndarray, attend: Attend | None = None) -> np.ndarray:
        """Information content of every target of `[n, T + 1]` tokens: `[n, T]` float32 bits.

        `attend` is the trainer's, if not given. On a mesh all processes must ask for it, and `n`
        must be a multiple of the devices that sequences are split over.
        """
        attend = attend or self.attend
        if attend not in self._scores:
            self._scores[attend] = self._make_score(attend)
        return np.asarray(self._scores[attend](self.params, self._on_devices(tokens)))

    def _make_score(self, attend: Attend) -> Callable[..., jax.Array]:
        graph, split, slices = self._step_graph, self._split, self._slices
        if split is None or slices is None:

            def score(params: nnx.State, tokens: jax.Array) -> jax.Array:
                model: Transformer = nnx.merge(graph, params)
                hidden, _ = model.hidden(tokens[:, :-1], attend=attend)
                vocabulary = model.config.vocab_size
                losses = cross_entropy(model.logits, hidden, tokens[:, 1:], vocabulary)
                return losses * (1.0 / math.log(2.0))

            return jax.jit(score)
        loss = dataclasses.replace(self._make_loss(), attend=attend, separator=None)

        def local(params: nnx.State, tokens: jax.Array) -> jax.Array:
            losses, *_ = loss.of_tokens(slices.outside()(params), tokens)
            names, bits = split.axes.of_dimension("sequence"), losses * (1.0 / math.log(2.0))
            if split.axes.heads:
                bits = jax.lax.all_gather(bits, split.axes.heads, axis=1, tiled=True)
            return from_zigzag(bits, names) if names else bits

        given = split.specs(self.params), split.axes.spec("B.")
        return jax.jit(split.run(local, given, split.axes.spec("BT")), out_shardings=split.whole)

    def exported_params(self) -> nnx.State:
        """`params`, whole in the host's memory where they are split; all processes must ask."""
        return self.params if self._split is None else self._split.on_host(self.params)

    def _merged(self, params: nnx.State) -> Transformer:
        model: Transformer = nnx.merge(self._graph, params)
        return model

    def _make_loss(self) -> "_Loss":
        return _Loss(
            graph=self._step_graph,
            attend=self.attend,
            context=self.settings.context,
            num_layers=self.config.num_layers,
            separator=self.separator if self.packed else None,
            is_marked=self._is_marked,
            axes=None if self._split is None else self._split.axes,
        )

    def _value_and_grad(self) -> Callable[..., Any]:
        loss, split, slices = self._make_loss(), self._split, self._slices
        beside = jnp.zeros((), jnp.float32)  # what parts' densities of levels are added to
        if split is None or slices is None:
            return in_parts(loss, self.settings, beside=beside)
        more: Any = {"devices": split.count, "whole": slices.outside(), "beside": beside}
        gradient = in_parts(loss, self.settings, **more)

        def local(params: nnx.State, stream: jax.Array, starts: jax.Array) -> Any:
            (value, density), grads = gradient(slices.own(params), stream, starts)
            value = jax.lax.psum(value, split.names)
            return (value, jax.lax.pmean(density, split.names)), slices.summed(grads)

        whole, specs = PartitionSpec(), split.specs(self.params)
        return split.run(local, (specs, whole, split.axes.spec("B")), ((whole, whole), specs))

    def _metrics(self, bits: jax.Array, more: jax.Array) -> dict[str, jax.Array]:
        found = super()._metrics(bits, more)
        if self._make_loss().tokens_are_whole or self.attend is dense_attention:
            found["density"] = more
        return found


def check_remat(remat: str, *, is_pooled: bool) -> None:
    """Raises ValueError if attention's results are to be kept, and none are named."""
    if remat == "attention" and not is_pooled:
        raise ValueError(f"{remat=} must be 'none' or 'full' without pooled attention")


def _check_dense_layers(
    count: int, num_layers: int, pooled: PooledAttention | None, packed: bool
) -> None:
    """Raises ValueError unless so many layers can be dense beside others that are pooled."""
    _checks.check_integer("dense_layers", count)
    if count and pooled is None:
        raise ValueError(f"dense_layers={count} must be 0 without pooled attention")
    if not 0 <= count < num_layers:
        raise ValueError(f"dense_layers={count} must be at least 0 and below {num_layers=}")
    if count and packed:
        raise ValueError(
            f"dense_layers={count} must be 0 with packed=True: dense layers see other documents"
        )


def segments(tokens: jax.Array, separator: int) -> jax.Array:
    """The documents of sequences: int32 ``[B, T]``, each beginning with the separator."""
    return jnp.cumsum(tokens == separator, axis=1, dtype=jnp.int32)


class _MeasuredAttention:
    """An `Attend` whose cache is a number: the density of the layer's levels is returned there.

    `segment_ids` are those of packed documents, int32 ``[B, T]``. Tokens that `axes` split attend
    over a ring; their density is not known.
    """

    def __init__(
        self,
        attend: Attend,
        segment_ids: jax.Array | None,
        axes: Axes | None,
    ) -> None:
        self._attend = attend
        self._segment_ids = segment_ids
        self._ring: ContextAttention | None = None
        if axes is not None and axes.sequence:
            if not (attend is dense_attention or isinstance(attend, PooledAttention)):
                raise ValueError(f"{attend=} must be dense or pooled where tokens are split")
            pooled: Any = attend if isinstance(attend, PooledAttention) else "exact"
            of_tokens = dataclasses.replace(axes, heads=None)  # heads are the device's own
            self._ring = ContextAttention(of_tokens, pooled, order="zigzag")

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: jax.Array,
        options: AttentionOptions = PLAIN,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        if self._ring is not None:
            arrays = (query, key, value, None, options, sinks, self._segment_ids)
            return self._ring(*arrays)[0], jnp.ones_like(cache)
        if not isinstance(self._attend, PooledAttention):
            return self._attend(query, key, value, None, options, sinks)[0], jnp.ones_like(cache)
        more: Any = {"options": options, "segment_ids": self._segment_ids}
        levels = self._attend.levels(query, key, **more)
        out = self._attend.attend(query, key, value, levels, sinks=sinks, **more)
        return out, self._attend.density(levels).astype(cache.dtype)


def _measured(attend: Attend, segment_ids: jax.Array | None, axes: Axes | None) -> Attend:
    """A `_MeasuredAttention` within segments, of tokens that `axes` split; two of `FirstLayers`."""
    if not isinstance(attend, FirstLayers):
        return _MeasuredAttention(attend, segment_ids, axes)
    first, others = (_measured(a, segment_ids, axes) for a in (attend.first, attend.others))
    return FirstLayers(first, others, attend.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """The mean loss of windows, and the density of levels.

    Inside a `shard_map` over a sequence axis it is that of the device's own tokens.
    """

    graph: Any
    attend: Attend
    num_layers: int
    separator: int | None  # between documents that do not see each other; None if all do
    axes: Axes | None = None

    @property
    def tokens_are_whole(self) -> bool:
        """Whether a device has all tokens of its sequences."""
        return self.axes is None or not self.axes.sequence

    def learned(self, tokens: jax.Array) -> tuple[jax.Array, tuple[str, ...]]:
        names = () if self.axes is None else self.axes.names
        return self._scored(self._own(marked(tokens)[1][:, 1:])), names

    def of_tokens(
        self, params: nnx.State, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Losses at ``[B, context + 1]`` tokens, ``[B, T]`` of this device's own, in its order.

        Of the devices that split heads each takes some of these tokens, ``[B, T / n]``. Also which
        of them count, bool of that shape, and the density.
        """
        tokens, learn = marked(tokens)
        inputs, targets, learned = tokens[:, :-1], tokens[:, 1:], self._own(learn[:, 1:])
        ids = None if self.separator is None else self._own(segments(inputs, self.separator))
        positions = None
        if not self.tokens_are_whole:
            positions = self._own(jnp.broadcast_to(jnp.arange(self.context)[None], inputs.shape))
        inputs, targets = self._own(inputs), self._own(targets)
        attend = _measured(self.attend, ids, self.axes)
        densities = jnp.ones(self.num_layers, jnp.float32)
        model: Transformer = nnx.merge(self.graph, params)
        hidden, densities = model.hidden(
            inputs, positions=positions, attend=attend, caches=densities
        )
        hidden, targets, learned = (self._scored(x) for x in (hidden, targets, learned))
        losses = cross_entropy(model.logits, hidden, targets, model.config.vocab_size)
        return losses, learned, jnp.mean(densities)

    def _own(self, x: jax.Array) -> jax.Array:
        """Of ``[B, context]`` what belongs to this device's tokens, in its order."""
        if self.axes is None or self.tokens_are_whole:
            return x
        names = self.axes.of_dimension("sequence")
        return x[:, zigzag_positions(self.context // self.axes.size("sequence"), names)]

    def _scored(self, x: jax.Array) -> jax.Array:
        """Of ``[B, T, ...]`` the tokens that this one of the devices of heads has logits of."""
        if self.axes is None or not self.axes.heads:
            return x
        count = x.shape[1] // self.axes.size("heads")
        first = jax.lax.axis_index(self.axes.heads) * count
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis=1)
