"""A mixture-of-experts layer with INT4 weights, for Flax nnx."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from turbojax import _checks
from turbojax._registry import ImplementationName
from turbojax.flax.linear import FrozenParam
from turbojax.matmul.grouped.api import check_stack, grouped_matmul
from turbojax.matmul.int4.api import check_precision
from turbojax.matmul.int4.experts import quantize_experts
from turbojax.matmul.int4.static import Precision
from turbojax.matmul.int4.weight import BLOCK, Int4Weight, ScaleDtype
from turbojax.matmul.routing import SoftmaxOrder, combine, dispatch, route


class FrozenWeight(nnx.Module):
    """An `Int4Weight`, of a layer or a stack of experts, as `FrozenParam`s in pytree order."""

    def __init__(self, weight: Int4Weight):
        leaves, structure = jax.tree.flatten(weight)
        self.arrays = nnx.List([FrozenParam(x) for x in leaves])
        self._structure = structure

    def get_value(self) -> Int4Weight:
        """The weight."""
        weight: Int4Weight = jax.tree.unflatten(
            self._structure, [x.get_value() for x in self.arrays]
        )
        return weight


class Int4Experts(nnx.Module):
    """``sum_k w_k down_k(silu(gate_k(x)) * up_k(x))`` over a token's experts, weights in INT4.

    A router in floating point chooses `top_k` experts for each token and weighs their outputs (see
    `route`). Tokens are sorted by expert inside, so that each expert's weights are read once (see
    `grouped_matmul`). All shapes are static: no expert has a capacity, and no token is dropped.

    The gradient passes through the activations and the router; the experts' weights are frozen.

    Attributes:
      router: `nnx.Param` ``[in, E]``.
      gate_up: the experts' gated weights ``[2 inner, in]``.
      down: their other ones, ``[in, inner]``.
      num_experts: `E`.
      top_k: experts of a token.
      softmax: before or after the choice, see `route`.
      normalize: whether weights sum to 1, see `route`.
      precision: of the sums of products, see `matmul`.
      implementation: what computes them, see `grouped_matmul`.
    """

    def __init__(
        self,
        router: jax.Array,
        gate_up: Int4Weight,
        down: Int4Weight,
        *,
        top_k: int,
        softmax: SoftmaxOrder = "before",
        normalize: bool = False,
        precision: Precision | None = None,
        implementation: ImplementationName | None = None,
    ):
        """Takes quantized weights; `from_kernels` quantizes some.

        `router` is bfloat16, float16 or float32 ``[in, E]``, `gate_up` gated, ``[2 inner, in]``
        with a leading axis of `E` experts, and `down` ``[in, inner]`` with the same. For the other
        arguments see the attributes.

        Raises:
          TypeError: if a weight is of another kind or dtype.
          ValueError: if shapes do not fit together, or an option is none of these.
        """
        check_precision(precision)
        router = jnp.asarray(router)
        _checks.check_float_dtype("router", router)
        for weight in (gate_up, down):
            check_stack(weight)
        if not gate_up.gated or down.gated:
            raise ValueError(
                f"{gate_up.gated=} and {down.gated=} must be True and False: see gate_and_up"
            )
        sizes, [experts] = (gate_up.in_size, gate_up.result_size), gate_up.stack
        if down.shape != sizes or down.stack != gate_up.stack:
            raise ValueError(
                f"down has {down.stack} experts of {down.shape}, must have "
                f"{gate_up.stack} of {sizes}, as gate_up has"
            )
        if router.shape != (sizes[0], experts):
            raise ValueError(f"{router.shape=} must be {(sizes[0], experts)}")
        # Checks the options.
        jax.eval_shape(
            lambda x: route(x, top_k, softmax=softmax, normalize=normalize),
            jax.ShapeDtypeStruct((experts,), jnp.float32),
        )
        self.router = nnx.Param(router)
        self.gate_up, self.down = FrozenWeight(gate_up), FrozenWeight(down)
        self.num_experts, self.top_k = experts, int(top_k)
        self.softmax, self.normalize = softmax, normalize
        self.precision, self.implementation = precision, implementation

    @classmethod
    def from_kernels(
        cls,
        router: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        *,
        top_k: int,
        softmax: SoftmaxOrder = "before",
        normalize: bool = False,
        group_size: int = BLOCK,
        scale_dtype: ScaleDtype = "e4m3",
        precision: Precision | None = None,
        implementation: ImplementationName | None = None,
    ) -> Self:
        """Quantizes the experts' kernels; the router stays as it is.

        `router` is ``[in, E]``; `gate` and `up` are ``[E, in, inner]`` and `down`
        ``[E, inner, in]``, kernels as Flax has them, inputs first. `group_size` and `scale_dtype`
        are `quantize_weight`'s; for the other arguments see the attributes.

        Raises:
          TypeError: if a dtype is not supported.
          ValueError: if shapes do not fit together, or an option is none of these.
        """
        kernels = {"gate": jnp.asarray(gate), "up": jnp.asarray(up), "down": jnp.asarray(down)}
        for name, kernel in kernels.items():
            if kernel.ndim != 3:
                raise ValueError(f"{name}.shape={kernel.shape} must be [experts, inputs, outputs]")
        transposed = [jnp.swapaxes(kernel, 1, 2) for kernel in kernels.values()]
        gate_up = quantize_experts(*transposed[:2], group_size=group_size, scale_dtype=scale_dtype)
        return cls(
            router,
            gate_up,
            quantize_experts(transposed[2], group_size=group_size, scale_dtype=scale_dtype),
            top_k=top_k,
            softmax=softmax,
            normalize=normalize,
            precision=precision,
            implementation=implementation,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer's output.

        Args:
          x: ``[..., in]``, bfloat16, float16 or float32.

        Returns:
          ``[..., in]`` in `x`'s dtype. A token that is not finite gives NaN, and changes no other.
        """
        router = self.router.get_value()
        tokens = x.reshape(-1, x.shape[-1])
        # As in the checkpoints' original models: in the activations' dtype, sums in float32.
        logits = jnp.dot(tokens, router.astype(x.dtype), preferred_element_type=jnp.float32)
        routing = route(logits, self.top_k, softmax=self.softmax, normalize=self.normalize)
        sorted_by = dispatch(routing.experts, self.num_experts)

        def product(x: jax.Array, weight: FrozenWeight, activation: object) -> jax.Array:
            return grouped_matmul(
                *(x, weight.get_value(), sorted_by.group_sizes),
                activation="swiglu" if activation else None,
                precision=self.precision,
                implementation=self.implementation,
            )

        inner = product(tokens[sorted_by.tokens], self.gate_up, True)
        y = product(inner, self.down, False)
        return combine(y, sorted_by.places, routing.weights).reshape(x.shape)
