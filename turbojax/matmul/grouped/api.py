"""`grouped_matmul`: arguments, checks, the choice of implementation, and the gradient's rule."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.matmul.fp8_tokens import quantize_activation
from turbojax.matmul.grouped import mosaic_gpu, reference, triton
from turbojax.matmul.int4.api import check_activation, check_precision, check_x, tokens_of
from turbojax.matmul.int4.static import Activation, Precision
from turbojax.matmul.int4.weight import Int4Weight, pad_rows
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import like, per_device

GROUPED_MATMUL = Registry(
    "grouped_matmul",
    (
        Implementation("mosaic_gpu", mosaic_gpu.matmul, mosaic_gpu.unsupported),
        Implementation("triton", triton.matmul, triton.unsupported),
        Implementation("xla", reference.matmul),
    ),
)


def grouped_matmul(
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    precision: Precision | None = None,
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """``act(x_e W_e^T + bias_e)`` of every expert `e` and its tokens, with INT4 weights.

    Tokens are sorted by expert: the first ``group_sizes[0]`` rows are those of expert 0, the next
    ``group_sizes[1]`` those of expert 1, and so on; groups may be empty. It is `matmul` of each
    group, and what is said there of quantization, sums and the gradient holds here. Memory and time
    are those of the experts that have tokens. Rows behind the last group belong to no expert: they
    are zeros, as in `jax.lax.ragged_dot`, and so is their gradient.

    Args:
      x: ``[M, K]``, bfloat16, float16 or float32; or tokens already quantized, which have no
        gradient.
      weight: ``[N, K]`` of each expert, arrays with a leading axis of `E` experts, see
        `quantize_experts` and `stack_experts`; of a gated product ``[2 F, K]``.
      group_sizes: integers ``[E]``, none negative, at most `M` together. Outside `jit` others raise
        an error; under `jit` they make every row of the result NaN.
      bias: optional floating point ``[E, N]``; of a gated weight ``[E, 2 F]``, that of the gate
        first.
      activation: as in `matmul`.
      precision: as in `matmul`.
      implementation: ``"mosaic_gpu"`` (compute capability 9.0 alone), ``"triton"`` or ``"xla"``, or
        None for the first of them that can run this. A name never falls back to another.

    Returns:
      ``[M, N]``, of a gated weight ``[M, F]``, in the dtype of `x` before it was quantized. A token
      with a value that is not finite gives NaN, and so does an output with such a weight.

    Raises:
      TypeError: if an argument is of another kind or dtype.
      ValueError: if a shape, size, name, activation or precision does not fit, or (outside `jit`)
        the sizes of groups.
      NotImplementedError: if the implementation asked for cannot run this, when quantized tokens
        are differentiated, or when anything is differentiated twice.
    """
    one = check_stack(weight)
    check_activation(activation, one)
    is_precise = check_precision(precision)
    [experts] = weight.stack
    bias = check_biases(bias, weight)
    x = check_x(x, one)
    if len(x.shape) != 2:
        raise ValueError(f"{x.shape=} must be [M, {weight.in_size}], tokens sorted by expert")
    group_sizes = _check_sizes(group_sizes, experts, x.shape[0])
    if bias is not None:
        bias = jax.vmap(lambda b: pad_rows(b, one))(bias.astype(jnp.float32))
    static: dict[str, Any] = {
        "activation": activation,
        "is_precise": is_precise,
        "implementation": implementation,
    }
    if isinstance(x, Fp8Tokens):
        run = per_device(tables.GROUPED_MATMUL, _product, adding=_product_of_parts, **static)
        call = refuse_gradients(run, "grouped_matmul of quantized tokens")
    else:
        call = _differentiable(**static)
    out: jax.Array = call(*together(x, weight, group_sizes, bias))
    return out


def _product(
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    is_precise: bool,
    implementation: ImplementationName | None,
) -> jax.Array:
    """`grouped_matmul` by the implementation for these arrays."""
    chosen = GROUPED_MATMUL.select(
        implementation,
        tokens=tokens_of(x),
        weight=weight,
        group_sizes=group_sizes,
        bias=bias,
        activation=activation,
    )
    tokens = x if isinstance(x, Fp8Tokens) else _quantized(x, implementation)
    static: dict[str, Any] = {"activation": activation, "is_precise": is_precise}
    out: jax.Array = chosen.run(tokens, weight, group_sizes, bias, **static)
    return out


def _quantized(x: jax.Array, implementation: ImplementationName | None) -> Fp8Tokens:
    # The name is that of the product; every quantizer gives the same bits.
    name: ImplementationName | None = "xla" if implementation == "xla" else None
    return quantize_activation(x, implementation=name)


def _product_of_parts(
    add: Callable[[jax.Array], jax.Array],
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Activation | None,
    **static: Any,
) -> jax.Array:
    """`_product` of a part of the inputs; `add` sums the devices' results in float32."""
    if activation is not None or bias is not None:
        what = "a bias" if activation is None else f"{activation=}"
        raise NotImplementedError(
            f"grouped_matmul cannot be split over its inputs with {what}: split the weight over "
            "its outputs"
        )
    tokens = x if isinstance(x, Fp8Tokens) else _quantized(x, static["implementation"])
    tokens = dataclasses.replace(tokens, dtype=np.dtype(np.float32))
    out = _product(tokens, weight, group_sizes, None, activation=None, **static)
    return add(out).astype(x.dtype)


def check_stack(weight: Int4Weight) -> Int4Weight:
    """Checks a stack of experts; returns the shapes and dtypes of one of them."""
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"weight is a {type(weight).__name__}, must be an Int4Weight")
    weight.validate()
    if len(weight.stack) != 1 or 0 in weight.stack:
        raise ValueError(
            f"{weight.stack=} must be one axis of experts, not empty: see stack_experts"
        )
    one: Int4Weight = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), weight)
    return one


def check_biases(bias: jax.Array | None, weight: Int4Weight) -> jax.Array | None:
    """Checked biases, floating point ``[E, out_size]``, or None; raises TypeError or ValueError."""
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    _checks.check_float_dtype("bias", bias)
    wanted = (*weight.stack, weight.out_size)
    if bias.shape != wanted:
        raise ValueError(f"{bias.shape=} must be {wanted}, one for each expert")
    return bias


def _check_sizes(group_sizes: jax.Array, experts: int, rows: int) -> jax.Array:
    """Sizes of groups as int32 ``[E]``; outside `jit` none may be negative or too many together."""
    # A size beyond int32 is beyond any number of rows, too.
    group_sizes = _checks.as_int32("group_sizes", group_sizes, saturate=True)
    if group_sizes.shape != (experts,):
        raise ValueError(f"{group_sizes.shape=} must be ({experts},), one for each expert")
    if _checks.is_concrete(group_sizes):
        sizes = np.asarray(group_sizes).astype(np.int64)
        if sizes.min() < 0 or sizes.sum() > rows:
            raise ValueError(
                f"group_sizes={sizes.tolist()} must not be negative, and at most {rows} together, "
                "the rows of x"
            )
    return group_sizes


def _gradients(*saved: Any, activation: Activation | None) -> tuple[jax.Array, Any]:
    return reference.gradient(*saved, activation=activation)


def _differentiable(**static: Any) -> Callable[..., jax.Array]:
    """Quantization and product, differentiable in reverse mode straight through the rounding."""
    multiply = per_device(tables.GROUPED_MATMUL, _product, adding=_product_of_parts, **static)
    differentiate_once = refuse_gradients(
        per_device(tables.GROUPED_MATMUL_GRADIENT, _gradients, activation=static["activation"]),
        "the gradient of grouped_matmul",
        because="only first derivatives are supported",
    )

    @jax.custom_vjp
    def call(
        x: jax.Array, weight: Int4Weight, group_sizes: jax.Array, bias: jax.Array | None
    ) -> jax.Array:
        out: jax.Array = multiply(x, weight, group_sizes, bias)
        return out

    def forward(*arrays: Any) -> Any:
        # `call`, not `multiply`: a second derivative must not find a way through it.
        return call(*arrays), arrays

    def backward(saved: Any, d_out: jax.Array) -> Any:
        d_x, d_bias = differentiate_once(*saved, d_out)
        d_x, d_bias = like((d_x, d_bias), (saved[0], saved[3]))
        # None: the weight is frozen, and sizes of groups are integers.
        return d_x, None, None, d_bias

    call.defvjp(forward, backward)
    return call
