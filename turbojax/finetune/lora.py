"""Training of low-rank adapters beside the weights of a decoder, INT4 or floats."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from turbojax.finetune.base import BaseTrainer, check_stream, updated, windows
from turbojax.finetune.losses import (
    cross_entropy,
    marked,
    mean_of_learned,
    scaled_value_and_grad,
)
from turbojax.finetune.settings import Settings
from turbojax.finetune.trainer import dense_attention
from turbojax.models import Attend
from turbojax.models.decoder import Decoder, for_length
from turbojax.models.lora import Adapters, check_adapters, usual_gradient, with_adapters
from turbojax.models.quantized import QuantizedDecoder
from turbojax.ops.int4_matmul.static import Gradient


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
      settings: see `Settings`.
      decoder: the frozen model.
      opt_state: the optimizer's state.
      step: steps done, see `BaseTrainer`.
      compile_seconds: what compiling the step took, 0 before that.
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
    ) -> None:
        """Takes up adapters, new ones or loaded ones.

        Args:
          decoder: the frozen model, on one device.
          adapters: of its sizes.
          settings: see `Settings`; `precision` must be the decoder's dtype.
          stream: ``[n]`` integers, the tokens to train on, kept in the accelerator's memory.
          learn: see `Trainer`.
          gradient: see `with_adapters`.
          attend: how the model attends.

        Raises:
          TypeError: if the stream is not one array of integers.
          ValueError: if the adapters, the stream, the context, the precision or the gradient does
            not fit.
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
        self.decoder: Decoder | QuantizedDecoder = for_length(decoder, settings.context)
        super().__init__(adapters, settings, stream, learn=learn)
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

    def _make_step(self) -> Callable[..., tuple[Adapters, Any, dict[str, jax.Array]]]:
        return functools.partial(
            _train_step,
            gradient=self._gradient,
            attend=self._attend,
            settings=self.settings,
            is_marked=self._is_marked,
        )

    def _frozen(self) -> tuple[Decoder | QuantizedDecoder]:
        return (self.decoder,)


def _train_step(
    adapters: Adapters,
    opt_state: Any,
    decoder: Any,
    stream: jax.Array,
    starts: jax.Array,
    *,
    gradient: Gradient | None,
    attend: Attend,
    settings: Settings,
    is_marked: bool,
) -> tuple[Adapters, Any, dict[str, jax.Array]]:
    """One optimizer step on the windows that begin at `starts`."""
    tokens, learn = marked(windows(stream, starts, settings.context))

    def loss(adapters: Adapters) -> tuple[jax.Array, None]:
        model = with_adapters(decoder, adapters, gradient=gradient)
        losses, learned = token_losses(model, tokens, attend=attend), learn[:, 1:]
        if not is_marked:
            return jnp.mean(losses), None
        return mean_of_learned(losses, learned), None

    (value, _), grads = scaled_value_and_grad(loss, settings.loss_scale)(adapters)
    adapters, opt_state = updated(adapters, opt_state, grads, settings)
    metrics = {"bits": value / math.log(2.0), "grad_norm": optax.tree.norm(grads)}
    return adapters, opt_state, metrics
