"""A linear layer with INT4 weights, for Flax nnx."""

from typing import Self

import jax
from flax import nnx

from turbojax._registry import ImplementationName
from turbojax.matmul.int4.api import (
    check_activation,
    check_bias,
    check_gradient,
    check_precision,
    check_token_kind,
    matmul,
)
from turbojax.matmul.int4.static import Activation, Gradient, Precision, TokenKind
from turbojax.matmul.int4.weight import BLOCK, Int4Weight, ScaleDtype, quantize_weight
from turbojax.numerics.fp8 import Fp8Tokens


class FrozenParam(nnx.Variable):
    """A parameter that is not trained: no `nnx.Param`, so that optimizers leave it alone."""


class Int4Linear(nnx.Module):
    """``act(x W^T + bias)`` with an INT4 weight (FireQ, section 3.1; see `matmul`).

    The gradient passes through the activations; the weight is frozen and the bias an `nnx.Param`.
    Low-rank adapters go beside it:
    ``nnx.LoRA(in_features, rank, out_features, base_module=layer, rngs=rngs)``, trained with
    ``nnx.DiffState(0, nnx.LoRAParam)``.

    Attributes:
      codes: `FrozenParam`, see `Int4Weight`, as are the next three.
      scales: `FrozenParam`.
      output_scale: `FrozenParam`.
      zeros: `FrozenParam`, or None.
      bias: `nnx.Param` ``[out]``, or None.
      in_features: inputs.
      out_features: outputs, of a gated weight half of its rows.
      activation: what is applied to the result.
      activations: how tokens are multiplied, see `matmul`.
      precision: of its sums, see `matmul`.
      gradient: how that of its inputs is computed, see `matmul`.
      implementation: what computes it, see `matmul`.
    """

    def __init__(
        self,
        weight: Int4Weight,
        *,
        bias: jax.Array | None = None,
        activation: Activation | None = None,
        activations: TokenKind = "e4m3",
        precision: Precision | None = None,
        gradient: Gradient = "exact",
        implementation: ImplementationName | None = None,
    ):
        """Takes a quantized weight; `from_linear` quantizes one.

        `weight` is ``[out, in]``, or gated, `bias` floating point ``[out]``, of a gated weight that
        of the gate first. The other arguments are `matmul`'s.

        Raises:
          TypeError: if the weight or the bias is of another kind or dtype.
          ValueError: if the bias has another shape, or the activation, precision or gradient does
            not fit.
        """
        check_activation(activation, weight)
        check_token_kind(activations)
        check_precision(precision)
        check_gradient(gradient, weight)
        bias = check_bias(bias, weight)
        self.codes = FrozenParam(weight.codes)
        self.scales = FrozenParam(weight.scales)
        self.output_scale = FrozenParam(weight.output_scale)
        self.zeros = None if weight.zeros is None else FrozenParam(weight.zeros)
        self.bias = None if bias is None else nnx.Param(bias)
        self.in_features = weight.in_size
        self.out_features = weight.result_size
        self.group_size = weight.group_size
        self.gated = weight.gated
        self.activation = activation
        self.activations = activations
        self.precision = precision
        self.gradient: Gradient = gradient
        self.implementation = implementation

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        *,
        group_size: int = BLOCK,
        scale_dtype: ScaleDtype = "e4m3",
        activation: Activation | None = None,
        activations: TokenKind = "e4m3",
        precision: Precision | None = None,
        gradient: Gradient = "exact",
        implementation: ImplementationName | None = None,
    ) -> Self:
        """Quantizes a layer's kernel; its bias is kept as it is.

        `linear` has a kernel ``[in, out]``. `group_size` and `scale_dtype` are `quantize_weight`'s,
        and the other arguments `matmul`'s.

        Raises:
          TypeError: if it is not an `nnx.Linear`, or of another dtype.
          ValueError: as `quantize_weight`.
        """
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}, must be an nnx.Linear")
        kernel = linear.kernel.get_value()
        return cls(
            quantize_weight(kernel.T, group_size=group_size, scale_dtype=scale_dtype),
            bias=None if linear.bias is None else linear.bias.get_value(),
            activation=activation,
            activations=activations,
            precision=precision,
            gradient=gradient,
            implementation=implementation,
        )

    @property
    def weight(self) -> Int4Weight:
        """The weight, for `dequantize` and for storing it."""
        return Int4Weight(
            codes=self.codes.get_value(),
            scales=self.scales.get_value(),
            output_scale=self.output_scale.get_value(),
            out_size=self.out_features * (2 if self.gated else 1),
            in_size=self.in_features,
            group_size=self.group_size,
            gated=self.gated,
            zeros=None if self.zeros is None else self.zeros.get_value(),
        )

    def __call__(self, x: jax.Array | Fp8Tokens, *, residual: jax.Array | None = None) -> jax.Array:
        """The layer's output.

        Args:
          x: ``[..., in]``, bfloat16, float16 or float32, or quantized tokens.
          residual: optional ``[..., out]`` in the same dtype, added after the activation.

        Returns:
          ``[..., out]`` in `x`'s dtype.
        """
        return matmul(
            x,
            self.weight,
            bias=None if self.bias is None else self.bias.get_value(),
            activation=self.activation,
            activations=self.activations,
            precision=self.precision,
            gradient=self.gradient,
            residual=residual,
            implementation=self.implementation,
        )
