"""Asymmetric codes of groups: what KIVI, GEAR and token-wise INT4 store, and how it is rounded."""

import jax
import jax.numpy as jnp
import numpy as np


def stored_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """The 16 bits of what groups share: float16 beside float32 numbers, else the numbers' own.

    float16 rather than bfloat16: a minimum is an offset that codes do not make good, and keys with
    a large bias have large minima.
    """
    return np.dtype(jnp.float16) if jnp.dtype(dtype) == jnp.float32 else jnp.dtype(dtype)


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 as it is after a round trip through `dtype`.

    Not a conversion and back, which XLA may drop. Of float16 also the numbers that are too small to
    be normal, with fewer bits: scales of small values are among them. Of bfloat16 those are 0.
    """
    info = jnp.finfo(dtype)
    normal = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if dtype != jnp.float16:
        return normal
    step = 2.0 ** (info.minexp - info.nmant)
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, jnp.rint(x * (1 / step)) * step, normal)


def quantize(
    x: jax.Array, bits: int, axis: int, dtype: np.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes along one axis: ``code = rint((x - minimum) / scale)``, of what is stored of both.

    Args:
      x: floating point.
      bits: of a code.
      axis: the axis that shares a minimum and a scale, ``(maximum - minimum) / (2**bits - 1)``.
      dtype: in which both are stored.

    Returns:
      uint8 codes, and minimum and scale in `dtype`, without `axis`. The scale is NaN where a value
      is not finite.
    """
    top = 2**bits - 1
    wide = x.astype(jnp.float32)
    minimum = jnp.min(wide, axis=axis)
    scale = (jnp.max(wide, axis=axis) - minimum) * (1 / top)
    # Written out, because not every device's minimum propagates NaN.
    scale = jnp.where(jnp.all(jnp.isfinite(wide), axis=axis), scale, jnp.nan)
    minimum, scale = rounded(minimum, dtype), rounded(scale, dtype)
    step = jnp.expand_dims(jnp.where(scale == 0, 1, scale), axis)
    codes = jnp.clip(jnp.rint((wide - jnp.expand_dims(minimum, axis)) / step), 0, top)
    codes = jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.uint8)
    return codes, minimum.astype(dtype), scale.astype(dtype)


def dequantize(codes: jax.Array, minimum: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
    """float32 ``minimum + codes * scale``, `axis` as in `quantize`."""
    low, step = (jnp.expand_dims(x.astype(jnp.float32), axis) for x in (minimum, scale))
    return low + codes.astype(jnp.float32) * step
