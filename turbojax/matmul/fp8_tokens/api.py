"""`quantize_activation` and `rms_norm_quantize`: arguments, checks, the choice."""

import math

import jax

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.matmul.fp8_tokens import mosaic_gpu, reference, triton
from turbojax.numerics.fp8 import Fp8Tokens
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device

QUANTIZE = Registry(
    "fp8_tokens",
    (
        Implementation("mosaic_gpu", mosaic_gpu.quantize, mosaic_gpu.unsupported),
        Implementation("triton", triton.quantize, triton.unsupported),
        Implementation("xla", reference.quantize),
    ),
)


def quantize_activation(
    x: jax.Array, *, implementation: ImplementationName | None = None
) -> Fp8Tokens:
    """Quantizes activations to e4m3, one scale per token (FireQ, section 3.1).

    ``s = bf16(max|x| / 448)``, ``q = e4m3(x / s)``, saturating: it is
    `turbojax.quantizers.quantize_tokens` in one pass over the activations. It has no gradient;
    `matmul` of activations that are not quantized has one.

    Args:
      x: ``[..., K]``, bfloat16, float16 or float32.
      implementation: ``"mosaic_gpu"`` (compiles for Ada to Blackwell, run only on Hopper),
        ``"triton"`` or ``"xla"``, or None for the first of them that can run this. A name never
        falls back to another.

    Returns:
      Codes ``[..., K]`` and scales ``[...]``: NaN, both, where a value of a token is not finite.

    Raises:
      TypeError: if the dtype is not supported.
      ValueError: if an axis is missing or empty, or the name unknown.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    return _quantize("quantize_activation", x, None, 0.0, implementation)


def rms_norm_quantize(
    x: jax.Array,
    scale: jax.Array,
    eps: float,
    *,
    implementation: ImplementationName | None = None,
) -> Fp8Tokens:
    """RMSNorm, then `quantize_activation`, in one pass over the activations.

    ``y = x / sqrt(mean(x^2) + eps) * scale`` over the last axis is computed in float32 and rounded
    to `x`'s dtype, as `turbojax.models` does, before it is quantized. Implementations add up the
    squares in different orders, so occasionally a code differs by one step.

    Args:
      x: ``[..., K]``, bfloat16, float16 or float32.
      scale: ``[K]``, one of these dtypes.
      eps: added to the mean square; not negative.
      implementation: see `quantize_activation`.

    Returns:
      Codes and scales of `y`, see `quantize_activation`.

    Raises:
      TypeError: if a dtype is not supported or `eps` is not a Python number.
      ValueError: if a shape does not fit, `eps` is negative or not finite, or the name unknown.
      NotImplementedError: see `quantize_activation`.
    """
    _checks.check_float_dtype("scale", scale)
    if x.ndim and scale.shape != x.shape[-1:]:
        raise ValueError(f"{scale.shape=} must be {x.shape[-1:]}, the last axis of x")
    if eps is None:
        raise TypeError("eps is None, must be a Python number")
    _checks.check_number("eps", eps)
    if eps < 0:
        raise ValueError(f"{eps=} must not be negative")
    return _quantize("rms_norm_quantize", x, scale, float(eps), implementation)


def scale_quantize(
    x: jax.Array, scale: jax.Array, *, implementation: ImplementationName | None = None
) -> Fp8Tokens:
    """`quantize_activation` of ``x * scale``, in one pass over the activations.

    The product is rounded to `x`'s dtype first. `scale` is floating point ``[K]``.
    """
    _checks.check_float_dtype("scale", scale)
    if x.ndim and scale.shape != x.shape[-1:]:
        raise ValueError(f"{scale.shape=} must be {x.shape[-1:]}, the last axis of x")
    return _quantize("scale_quantize", x, scale, None, implementation)


def _quantize(
    op: str,
    x: jax.Array,
    scale: jax.Array | None,
    eps: float | None,
    implementation: ImplementationName | None,
) -> Fp8Tokens:
    _checks.check_float_dtype("x", x)
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"{x.shape=} must be [..., K], no axis empty")
    run = per_device(tables.QUANTIZE, _quantize_here, eps=eps, implementation=implementation)
    tokens: Fp8Tokens = refuse_gradients(run, op)(x, scale)
    return tokens


def _quantize_here(
    x: jax.Array,
    scale: jax.Array | None,
    *,
    eps: float | None,
    implementation: ImplementationName | None,
) -> Fp8Tokens:
    """Quantization by the implementation for these arrays."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    run = QUANTIZE.select(implementation, x=flat, scale=scale).run
    tokens = run(*together(flat, scale), eps=eps)
    codes, scales = tokens.codes.reshape(x.shape), tokens.scale.reshape(x.shape[:-1])
    return Fp8Tokens(codes, scales, tokens.dtype)
