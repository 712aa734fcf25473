"""`matmul`: arguments, checks, the choice of implementation, and the gradient's rule."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.matmul.fp8_tokens import quantize_activation
from turbojax.matmul.int4 import gradient as gradients
from turbojax.matmul.int4 import mosaic_gpu, mosaic_gradient, reference, triton
from turbojax.matmul.int4.static import (
    ACTIVATIONS,
    GATED,
    GRADIENTS,
    TOKEN_KINDS,
    Activation,
    Gradient,
    Precision,
    TokenKind,
)
from turbojax.matmul.int4.weight import Int4Weight, in_blocks, pad_rows
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import like, per_device

MATMUL = Registry(
    "int4_matmul",
    (
        Implementation("mosaic_gpu", mosaic_gpu.matmul, mosaic_gpu.unsupported),
        Implementation("triton", triton.matmul, triton.unsupported),
        Implementation("xla", reference.matmul),
    ),
)


def matmul(
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    residual: jax.Array | None = None,
    activations: TokenKind = "e4m3",
    precision: Precision | None = None,
    gradient: Gradient = "exact",
    implementation: ImplementationName | None = None,
) -> jax.Array:
    """``act(x W^T + bias) + residual`` with INT4 weights (FireQ, section 3.1; W4A8 and W4A16).

    Activations are quantized to e4m3 with a scale per token, unless they are already quantized or
    ``activations="bf16"`` leaves them unrounded, and multiplied with the weight's values.
    Everything after that is float32, rounded once to the result's dtype; only ``"mosaic_gpu"``
    leaves part of the sums to an 8-bit matrix unit, see `precision`.

    The gradient is that of ``act(x W^T + bias) + residual`` with the dequantized weight, straight
    through the rounding of `x`, if it is rounded: for `x`, `bias` and `residual`. The weight is
    frozen, its gradient is zero. It takes memory for the dequantized weight. There are no second
    derivatives and no forward mode (`jax.jvp`).

    Args:
      x: ``[..., K]``, bfloat16, float16 or float32; or tokens already quantized, which have no
        gradient.
      weight: ``[N, K]``, see `quantize_weight`; of a gated product ``[2 F, K]``, see `gate_and_up`.
      bias: optional floating point ``[N]``; of a gated weight ``[2 F]``, that of the gate first.
      activation: ``"silu"``, ``"gelu"`` (its tanh form), or None; for a gated weight ``"swiglu"``,
        ``silu(gate) * up``, or ``"geglu"``, ``gelu(gate) * up``, and nothing else.
      residual: optional ``[..., N]`` or ``[..., F]`` in `x`'s dtype, added after the activation.
      activations: ``"e4m3"``, or ``"bf16"``: tokens are multiplied unrounded, in their own dtype,
        bfloat16 or float16; float32 ones by ``"xla"`` only. Values that are not finite propagate as
        in any product of floats.
      precision: None, ``"default"``, ``"high"``, ``"highest"`` or a `jax.lax.Precision`. By
        default, with more than 128 tokens, sums may stay in an 8-bit matrix unit, whose additions
        keep about 14 bits, as those of XLA's own products of e4m3 do. From ``"high"`` on they leave
        it after each group of 128 inputs and are added in float32. That concerns ``"mosaic_gpu"``
        alone: the others, and an exact gradient, always sum in float32.
      gradient: ``"exact"``, computed by XLA from operands in bfloat16 if `x` is, else float32; or
        ``"e4m3"``, for weights with e4m3 scales: cotangents times `output_scale` are rounded to
        e4m3 with a scale per token, as `x` is, which costs 2 to 3 % of their norm, and multiplied
        by e4m3 weights, on Hopper in kernels that take about as long as the product itself.
      implementation: ``"mosaic_gpu"`` (compute capability 9.0 alone), ``"triton"`` or ``"xla"``, or
        None for the first of them that can run this. A name never falls back to another.

    Returns:
      ``[..., N]``, of a gated weight ``[..., F]``, in the dtype of `x` before it was quantized. A
      token with a value that is not finite gives NaN, and so does an output with such a weight.

    Raises:
      TypeError: if an argument is of another kind or dtype.
      ValueError: if a shape, size, name, activation or precision does not fit.
      NotImplementedError: if the implementation asked for cannot run this, when quantized tokens
        are differentiated, or when anything is differentiated twice.
    """
    check_activation(activation, weight)
    check_token_kind(activations)
    is_precise = check_precision(precision)
    check_gradient(gradient, weight)
    bias = check_bias(bias, weight)
    x = check_x(x, weight)
    bias, residual = _check_rest(x, weight, bias, residual)
    if isinstance(x, Fp8Tokens) and activations != "e4m3":
        raise TypeError(f"x is Fp8Tokens, must be an array for {activations=}")
    static: dict[str, Any] = {
        "activation": activation,
        "activations": activations,
        "is_precise": is_precise,
        "implementation": implementation,
    }
    if isinstance(x, Fp8Tokens):
        run = per_device(tables.MATMUL, _product, adding=_product_of_parts, **static)
        call = refuse_gradients(run, "matmul of quantized tokens")
    else:
        call = _differentiable(gradient=gradient, **static)
    out: jax.Array = call(*together(x, weight, bias, residual))
    return out


def _product(
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    activations: TokenKind,
    is_precise: bool,
    implementation: ImplementationName | None,
) -> jax.Array:
    """`matmul` by the implementation for these arrays."""
    flat, residual = _as_matrices(x, residual)
    is_rounded = activations == "e4m3"
    chosen = _select(implementation, flat, weight, bias, residual, activation, is_rounded)
    quantize = _quantization(chosen, implementation, is_rounded)
    tokens = flat if isinstance(flat, Fp8Tokens) else quantize(flat)
    options: dict[str, Any] = {"activation": activation, "is_precise": is_precise}
    if is_rounded and not isinstance(tokens, Fp8Tokens):
        options["rounds"] = True
    out = _run(chosen.run, chosen.name != "xla", tokens, weight, bias, residual, **options)
    return out.reshape(*x.shape[:-1], weight.result_size)


def _select(
    implementation: ImplementationName | None,
    flat: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    activation: Activation | None,
    is_rounded: bool,
) -> Implementation:
    return MATMUL.select(
        implementation,
        tokens=tokens_of(flat) if is_rounded else flat,
        weight=jax.eval_shape(in_blocks, weight),
        bias=bias,
        residual=residual,
        activation=activation,
    )


def _quantization(
    chosen: Implementation, implementation: ImplementationName | None, is_rounded: bool
) -> Callable[[jax.Array], Fp8Tokens | jax.Array]:
    """How tokens are quantized before the product; one kernel rounds few tokens in its product."""
    if not is_rounded or chosen.name == "mosaic_gpu":
        return _as_it_is
    return functools.partial(quantize_activation, implementation=_quantizer(implementation))


def _product_of_parts(
    add: Callable[[jax.Array], jax.Array],
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    *,
    activation: Activation | None,
    activations: TokenKind,
    **static: Any,
) -> jax.Array:
    """`_product` of a part of the inputs; `add` sums the devices' results in float32.

    Each device rounds its part of a token with a scale of its own.
    """
    if activation is not None:
        raise NotImplementedError(
            f"int4_matmul cannot be split over its inputs with {activation=}, which takes whole "
            "sums: split the weight over its outputs"
        )
    dtype, tokens = x.dtype, x
    if not isinstance(tokens, Fp8Tokens) and activations == "e4m3":
        quantizer = _quantizer(static["implementation"])
        tokens = quantize_activation(tokens, implementation=quantizer)
    if isinstance(tokens, Fp8Tokens):
        tokens = dataclasses.replace(tokens, dtype=np.dtype(np.float32))
    out = _product(tokens, weight, None, None, activation=None, activations=activations, **static)
    out = add(out.astype(jnp.float32))
    if bias is not None:
        out = out + jnp.expand_dims(bias[: weight.result_size], tuple(range(out.ndim - 1)))
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)


def check_activation(activation: Activation | None, weight: Int4Weight) -> None:
    """Raises TypeError or ValueError unless the weight is valid and the activation fits it."""
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"weight is a {type(weight).__name__}, must be an Int4Weight")
    weight.validate()
    if weight.stack:
        raise ValueError(f"{weight.stack=} must be (): for a stack of weights see jax.vmap")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{activation=} must be None or one of {ACTIVATIONS}")
    if weight.gated != (activation in GATED):
        raise ValueError(f"{activation=} must be one of {GATED} for gated weights, and only there")


def check_token_kind(activations: TokenKind) -> None:
    """Raises ValueError unless `activations` is one of `TOKEN_KINDS`."""
    if activations not in TOKEN_KINDS:
        raise ValueError(f"{activations=} must be one of {TOKEN_KINDS}")


def check_precision(precision: Precision | None) -> bool:
    """Whether sums are to leave the matrix unit after each group of inputs."""
    # An enumeration also takes its members' numbers, and tuples of them.
    if precision is None or isinstance(precision, str | jax.lax.Precision):
        with contextlib.suppress(ValueError):
            return jax.lax.Precision(precision) != jax.lax.Precision.DEFAULT
    names = "None, 'default', 'high', 'highest' or a jax.lax.Precision"
    raise ValueError(f"{precision=} must be {names}")


def check_gradient(gradient: Gradient, weight: Int4Weight) -> None:
    """Raises ValueError if the name is unknown, or ``"e4m3"`` for values that are not e4m3."""
    if gradient not in GRADIENTS:
        raise ValueError(f"{gradient=} must be one of {GRADIENTS}")
    if gradient == "e4m3" and weight.scale_dtype != "e4m3":
        raise ValueError(f"{gradient=} needs weights with e4m3 scales, not {weight.scale_dtype}")


def check_bias(bias: jax.Array | None, weight: Int4Weight) -> jax.Array | None:
    """A bias that is floating point ``[out_size]``, or None; otherwise TypeError or ValueError."""
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    _checks.check_float_dtype("bias", bias)
    if bias.shape != (weight.out_size,):
        raise ValueError(f"{bias.shape=} must be ({weight.out_size},)")
    return bias


def check_x(x: jax.Array | Fp8Tokens, weight: Int4Weight) -> jax.Array | Fp8Tokens:
    """Raises TypeError or ValueError unless these are activations for the weight."""
    if isinstance(x, Fp8Tokens):
        if x.codes.dtype != jnp.float8_e4m3fn or x.scale.dtype != jnp.bfloat16:
            raise TypeError(
                f"x.codes.dtype={x.codes.dtype} and x.scale.dtype={x.scale.dtype} must be "
                "float8_e4m3fn and bfloat16"
            )
        if x.scale.shape != x.shape[:-1]:
            raise ValueError(f"{x.scale.shape=} must be {x.shape[:-1]}, one for each token")
    else:
        x = jnp.asarray(x)
        _checks.check_float_dtype("x", x)
    if not x.shape or x.shape[-1] != weight.in_size or 0 in x.shape:
        raise ValueError(f"{x.shape=} must be [..., {weight.in_size}], no axis empty")
    return x


def _check_rest(
    x: jax.Array | Fp8Tokens,
    weight: Int4Weight,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """The bias in the order of the weight's rows, and the residual; raises if they do not fit."""
    bias = None if bias is None else pad_rows(bias.astype(jnp.float32), weight)
    if residual is not None:
        residual = jnp.asarray(residual)
        if residual.dtype != x.dtype:
            raise TypeError(f"{residual.dtype=} must equal that of x, {x.dtype}")
        wanted = (*x.shape[:-1], weight.result_size)
        if residual.shape != wanted:
            raise ValueError(f"{residual.shape=} must be {wanted}")
    return bias, residual


def _as_matrices(
    x: jax.Array | Fp8Tokens, residual: jax.Array | None
) -> tuple[jax.Array | Fp8Tokens, jax.Array | None]:
    """Tokens and residual with one row a token."""
    *lead, inputs = x.shape
    rows = math.prod(lead)
    if residual is not None:
        residual = residual.reshape(rows, residual.shape[-1])
    if isinstance(x, Fp8Tokens):
        codes, scale = x.codes.reshape(rows, inputs), x.scale.reshape(rows)
        return Fp8Tokens(codes, scale, x.dtype), residual
    return x.reshape(rows, inputs), residual


def tokens_of(x: jax.Array | Fp8Tokens) -> Fp8Tokens:
    """The shapes and dtypes of ``[M, K]`` once it is quantized."""
    if isinstance(x, Fp8Tokens):
        return x
    codes: Any = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn)
    scale: Any = jax.ShapeDtypeStruct(x.shape[:1], jnp.bfloat16)
    return Fp8Tokens(codes, scale, np.dtype(x.dtype))


def _run(
    run: Callable[..., jax.Array],
    is_kernel: bool,
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    *rest: jax.Array | None,
    **static: Any,
) -> jax.Array:
    """Runs an implementation; kernels take groups of 128 inputs in place of larger groups."""
    return run(tokens, in_blocks(weight) if is_kernel else weight, *rest, **static)


def _quantizer(implementation: ImplementationName | None) -> ImplementationName | None:
    """The implementation that rounds tokens for this product; all of them give the same bits."""
    return "xla" if implementation == "xla" else None


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def _rounded_rule(
    chosen: Implementation,
    implementation: ImplementationName | None,
    quantize: Callable[[jax.Array], Fp8Tokens | jax.Array],
    *,
    is_precise: bool,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`gradients.rounded` beside a product of the `chosen` implementation."""
    has_kernel = chosen.name == "mosaic_gpu" and not is_precise
    return functools.partial(
        gradients.rounded,
        quantize=quantize,
        run=functools.partial(_sums, implementation=implementation, is_precise=is_precise),
        transposed=mosaic_gradient.transposed if has_kernel else reference.transposed,
        quantizer=_quantizer(implementation),
    )


def _sums(
    tokens: Fp8Tokens | jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    *,
    implementation: ImplementationName | None,
    is_precise: bool,
) -> jax.Array:
    """The product before the activation, with the weight's rows in stored order."""
    fitting = jax.eval_shape(in_blocks, weight)
    arguments = {"tokens": tokens, "weight": fitting, "bias": bias}
    chosen = MATMUL.select(implementation, **arguments, residual=None, activation=None)
    static: dict[str, Any] = {"activation": None, "is_precise": is_precise}
    return _run(chosen.run, chosen.name != "xla", tokens, weight, bias, None, **static)


def _gradients(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None,
    d_out: jax.Array,
    *,
    gradient: Gradient,
    activation: Activation | None,
    activations: TokenKind,
    is_precise: bool,
    implementation: ImplementationName | None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of the activations and of the bias's rows."""
    flat, d_flat = _as_matrices(x, d_out)
    rule: Callable[..., tuple[jax.Array, jax.Array]] = gradients.exact
    if gradient == "e4m3":
        is_rounded = activations == "e4m3"
        chosen = _select(implementation, flat, weight, bias, None, activation, is_rounded)
        quantize: Callable[[jax.Array], Fp8Tokens | jax.Array] = _as_it_is
        if is_rounded:
            quantizer = _quantizer(implementation)
            quantize = functools.partial(quantize_activation, implementation=quantizer)
        rule = _rounded_rule(chosen, implementation, quantize, is_precise=is_precise)
    d_x, d_bias = rule(flat, weight, bias, d_flat, activation=activation)
    return d_x.reshape(x.shape), d_bias


def _differentiable(*, gradient: Gradient, **static: Any) -> Callable[..., jax.Array]:
    """Quantization and product with a gradient; keeps the activations, the weight and the bias."""
    multiply = per_device(tables.MATMUL, _product, adding=_product_of_parts, **static)
    differentiate_once = refuse_gradients(
        per_device(tables.MATMUL_GRADIENT, _gradients, gradient=gradient, **static),
        "the gradient of matmul",
        because="only first derivatives are supported",
    )

    @jax.custom_vjp
    def call(
        x: jax.Array, weight: Int4Weight, bias: jax.Array | None, residual: jax.Array | None
    ) -> jax.Array:
        out: jax.Array = multiply(x, weight, bias, residual)
        return out

    def forward(*arrays: Any) -> Any:
        # `call`, not `multiply`: a second derivative must not find a way through it.
        return call(*arrays), arrays

    def backward(saved: Any, d_out: jax.Array) -> Any:
        x, weight, bias, residual = saved
        d_x, d_bias = differentiate_once(x, weight, bias, d_out)
        d_bias = None if bias is None else d_bias
        d_x, d_bias, d_residual = like(
            (d_x, d_bias, None if residual is None else d_out), (x, bias, residual)
        )
        return d_x, None, d_bias, d_residual  # None: the weight is frozen

    call.defvjp(forward, backward)
    return call
