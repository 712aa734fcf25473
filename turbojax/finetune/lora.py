"""Training of low-rank adapters beside the weights of a decoder, INT4 or floats."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from turbojax.finetune.base import BaseTrainer, Loss, check_stream, in_parts
from turbojax.finetune.frozen import AdapterSplit, Cuts, Layout, check_frozen, sliced
from turbojax.finetune.losses import cross_entropy, marked
from turbojax.finetune.settings import Settings
from turbojax.finetune.trainer import check_remat, dense_attention
from turbojax.matmul.int4.static import Gradient
from turbojax.models import Attend, PooledAttention
from turbojax.models.decoder import Decoder, apply_layers, for_length
from turbojax.models.lora import (
    Adapter,
    Adapters,
    added,
    added_on_device,
    check_adapters,
    joined_layer,
    scaled_pairs,
    usual_gradient,
    with_adapters,
)
from turbojax.models.quantized import QuantizedDecoder
from turbojax.remat import save_all_but_gathered, save_attention


def token_losses(
    decoder: Decoder | QuantizedDecoder, tokens: jax.Array, *, attend: Attend = dense_attention
) -> jax.Array:
    """The loss of every token but the first of each sequence, differentiable with adapters.

    Args:
      decoder: what `with_adapters` returns.
      tokens: int ``[B, T + 1]``.
      attend: how the model attends.

    Returns:
      float32 ``[B, T]``: ``-ln p(token | those before)``. Mask what is padding.
    """
    inputs = tokens[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
    hidden, _ = decoder.hidden(inputs, positions, attend, (None,) * decoder.config.num_layers)
    return cross_entropy(decoder.logits, hidden, tokens[:, 1:], decoder.config.vocab_size)


class LoraTrainer(BaseTrainer[Adapters]):
    """Adapters, optimizer and their jitted step; the decoder's weights stay what they are.

    `run_step` returns `bits`, per token of the batch, and `grad_norm`.

    Attributes:
      decoder: the frozen model.
      settings, opt_state, step, compile_seconds: as of `Trainer`.
    """

    def __init__(
        self,
        decoder: Decoder | QuantizedDecoder,
        adapters: Adapters,
        settings: Settings,
        stream: np.ndarray,
        *,
        learn: np.ndarray | None = None,
        gradient: Gradient | None = None,
        attend: Attend = dense_attention,
        fsdp: bool = True,
    ) -> None:
        """Takes up adapters, new ones or loaded ones.

        Args:
          decoder: the frozen model, on one device or a mesh (`models.shard`, or
            `models.load_decoder` with a mesh): then sequences of a step are split over its
            `axes.batch`, and the adapters, whole on every device, end as on one device but for the
            order of sums.
          adapters: of its sizes.
          settings: see `Settings`; `precision` must be the decoder's dtype.
          stream: ``[n]`` integers, the tokens to train on, kept in the accelerator's memory.
          learn: see `Trainer`.
          gradient: see `with_adapters`.
          attend: how the model attends.
          fsdp: of a decoder on a mesh: whether its matrices are slices over `axes.batch`, too, see
            `sliced`; otherwise each of these devices holds them whole.

        Raises:
          TypeError: if the stream is not one array of integers.
          ValueError: if the adapters, the stream, the context, the precision or the gradient does
            not fit, `settings.remat` is ``"attention"`` without pooled attention, or a mesh does
            not divide a step.
          NotImplementedError: if there are adapters of experts, or heads of INT4 weights are split.
        """
        check_stream(stream, decoder.config.vocab_size)
        gradient = usual_gradient(decoder, gradient)
        check_adapters(adapters, decoder.config)
        if settings.precision != decoder.dtype.name:
            raise ValueError(
                f"precision={settings.precision!r} must be the decoder's dtype, {decoder.dtype}"
            )
        if settings.context > decoder.config.max_length:
            raise ValueError(
                f"context={settings.context} must be at most the decoder's max_length, "
                f"{decoder.config.max_length}"
            )
        check_remat(settings.remat, is_pooled=isinstance(attend, PooledAttention))
        check_frozen(decoder.axes, is_quantized=isinstance(decoder, QuantizedDecoder))
        axes, decoder = decoder.axes, for_length(decoder, settings.context)
        split = None if axes is None else AdapterSplit(axes, settings.precision)
        super().__init__(adapters, settings, stream, split, learn)
        is_sliced = fsdp and axes is not None
        self.decoder: Decoder | QuantizedDecoder = sliced(decoder) if is_sliced else decoder
        self._layout = Layout.of(self.decoder, is_sliced=is_sliced)
        self._gradient = gradient
        self._attend = attend

    @property
    def adapters(self) -> Adapters:
        """Float32, as they are after the last step."""
        return self._trained

    @adapters.setter
    def adapters(self, adapters: Adapters) -> None:
        self._trained = adapters

    def model(self) -> Decoder | QuantizedDecoder:
        """The decoder with the adapters as they are now."""
        decoder: Any = self.decoder
        model: Decoder | QuantizedDecoder = with_adapters(
            decoder, jax.tree.map(jnp.copy, self.adapters)
        )
        return model

    def bits(self, tokens: np.ndarray) -> np.ndarray:
        """Information content of every target of ``[n, T + 1]`` tokens: ``[n, T]`` float32 bits.

        On a mesh layers are gathered one after the other, and `n` must be a multiple of the devices
        that sequences are split over.
        """
        return np.asarray(self._score(self.decoder, self.adapters, self._on_devices(tokens)))

    @functools.cached_property
    def _score(self) -> Callable[..., jax.Array]:
        def local(decoder: Any, adapters: Adapters, tokens: jax.Array) -> jax.Array:
            loss = self._make_loss(self._layout.with_whole_ends(decoder))
            return loss.losses(adapters, tokens) * (1.0 / math.log(2.0))

        if self._split is None:
            return jax.jit(local)
        rows = self._split.axes.spec("B")
        given = self._layout.specs, PartitionSpec(), rows
        return jax.jit(self._split.run(local, given, rows), out_shardings=self._split.whole)

    def _value_and_grad(self) -> Callable[..., Any]:
        split, layout = self._split, self._layout
        if split is None:
            return lambda adapters, decoder, *rest: in_parts(
                self._make_loss(decoder), self.settings
            )(adapters, *rest)

        def local(adapters: Adapters, decoder: Any, stream: jax.Array, starts: jax.Array) -> Any:
            loss = self._make_loss(layout.with_whole_ends(decoder))
            find = in_parts(loss, self.settings, devices=split.count)
            (value, _), grads = find(adapters, stream, starts)
            # Each device differentiates its own copy of the adapters, see `Split`.
            return (jax.lax.psum(value, split.names), None), jax.lax.psum(grads, split.names)

        whole = PartitionSpec()
        given = whole, layout.specs, whole, split.axes.spec("B")
        return split.run(local, given, ((whole, None), whole))

    def _make_loss(self, decoder: Any) -> "_Loss":
        return _Loss(
            decoder=decoder,
            layout=self._layout,
            attend=self._attend,
            gradient=self._gradient,
            context=self.settings.context,
            remat=self.settings.remat,
            is_marked=self._is_marked,
        )

    def _frozen(self) -> tuple[Decoder | QuantizedDecoder]:
        return (self.decoder,)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "adapters"),
    meta_fields=("cuts",),
)
@dataclasses.dataclass(frozen=True)
class _Layer:
    """A frozen layer, as a device has it, with its adapters; `cuts` are those of its arrays."""

    weights: Any
    adapters: dict[str, Adapter]
    cuts: Cuts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """The mean loss of windows as a function of the adapters beside `decoder`.

    On a mesh for use within `shard_map`: `decoder` is what a device has of it, as `layout` says,
    with whole embeddings, and the loss is that of the device's own sequences.
    """

    decoder: Any
    layout: Layout
    attend: Attend
    gradient: Gradient | None
    remat: str

    def of_tokens(self, adapters: Adapters, tokens: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        tokens, learn = marked(tokens)
        return self.losses(adapters, tokens), learn[:, 1:], None

    def learned(self, tokens: jax.Array) -> tuple[jax.Array, tuple[str, ...]]:
        axes = self.decoder.axes
        return marked(tokens)[1][:, 1:], () if axes is None else axes.names

    def losses(self, adapters: Adapters, tokens: jax.Array) -> jax.Array:
        """`token_losses` of ``[B, T + 1]`` tokens."""
        decoder, inputs = self.decoder, tokens[:, :-1]
        each = zip(decoder.layers, adapters.layers, self.layout.layers, strict=True)
        layers = [_Layer(*x) for x in each]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
        hidden, _ = apply_layers(
            functools.partial(self._apply, adapters.scale),
            layers,
            decoder.embed(inputs),
            positions,
            self.attend,
            (None,) * len(layers),
            decoder.config,
        )
        hidden, vocabulary = decoder.finish(hidden), decoder.config.vocab_size
        return cross_entropy(decoder.logits, hidden, tokens[:, 1:], vocabulary)

    def _apply(
        self,
        scale: float,
        layer: _Layer,
        hidden: jax.Array,
        angles: jax.Array | None,
        attend: Attend,
        cache: Any,
        *options: Any,
    ) -> tuple[jax.Array, Any]:
        """One layer; the backward pass computes again what `remat` says, and what is gathered."""

        def run(layer: _Layer, hidden: jax.Array, angles: jax.Array | None) -> jax.Array:
            weights = self.layout.gathered(layer.weights, layer.cuts)
            whole = self._beside(weights, layer.adapters, scale)
            out, _ = self.decoder.apply(whole, hidden, angles, attend, cache, *options)
            return out

        if self.remat != "none":
            policy = save_attention if self.remat == "attention" else None
            run = jax.checkpoint(run, policy=policy)
        elif any(cut is not None for cut in layer.cuts):
            run = jax.checkpoint(run, policy=save_all_but_gathered)
        return run(layer, hidden, angles), cache

    def _beside(self, weights: Any, adapters: dict[str, Adapter], scale: float) -> Any:
        """A layer, whole or a device's part of it, with these adapters."""
        config, axes = self.decoder.config, self.decoder.axes
        if self.gradient is not None:
            return joined_layer(weights, adapters, scale, config, self.gradient)
        pairs = scaled_pairs(adapters, scale)
        if axes is None:
            return added(weights, pairs, config=config, axes=None)
        return added_on_device(weights, pairs, config=config, axes=axes)
