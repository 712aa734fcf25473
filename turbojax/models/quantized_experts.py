"""A layer of experts with INT4 weights and e4m3 activations, the counterpart of `QuantizedMlp`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from turbojax._pytrees import pytree
from turbojax.flax.norms import rms_norm
from turbojax.matmul.grouped import grouped_matmul
from turbojax.matmul.int4.static import Activation
from turbojax.matmul.int4.weight import Int4Weight
from turbojax.models.config import TransformerConfig
from turbojax.models.feed_forward import apply_experts, gated


@pytree
@dataclasses.dataclass(frozen=True)
class QuantizedExperts:
    """``sum_k w_k down_k(activation(gate_k(x)) * up_k(x))`` over a token's experts.

    Attributes:
      router: float32 ``[D, E]``, not rounded.
      gate_up: two ``[F, D]`` for each of `E` experts, the leading axis: a gated weight, or, if the
        SwiGLU is clamped (`ExpertsConfig.swiglu_limit`), gate above up.
      down: ``[D, F]``, the same.
      router_bias: float32 ``[E]``, or None.
      gate_up_bias: float32 ``[E, 2 F]``, that of the gate first, or None.
      down_bias: float32 ``[E, D]``, or None.
    """

    router: jax.Array
    gate_up: Int4Weight
    down: Int4Weight
    router_bias: jax.Array | None = None
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None

    def __call__(
        self,
        hidden: jax.Array,
        norm: jax.Array | None,
        config: TransformerConfig,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Maps the residual stream ``[B, T, D]`` to what is added to it; see `QuantizedMlp`."""
        experts = config.experts
        assert experts is not None
        assert norm is not None
        activation: Activation = "swiglu" if config.activation == "silu" else "geglu"

        def compute(x: jax.Array, sizes: jax.Array) -> jax.Array:
            first: Any = functools.partial(
                grouped_matmul, x, self.gate_up, sizes, bias=self.gate_up_bias
            )
            if experts.swiglu_limit is None:
                inner = first(activation=activation)
            else:
                gate, up = jnp.split(first(), 2, axis=-1)
                inner = gated(gate, up, config)
            return grouped_matmul(inner, self.down, sizes, bias=self.down_bias)

        # The router reads unrounded tokens.
        normed = rms_norm(hidden, norm, config.norm_eps)
        out = apply_experts(normed, self.router, experts, compute, bias=self.router_bias)
        return out if residual is None else residual + out
