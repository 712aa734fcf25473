"""FlashQ stage 1: symmetric INT8 with one scale per block (TurboAttention, Eq. 9).

Divisions are written as products with a reciprocal. XLA makes them of its own accord, but not
everywhere, and kernels want one division per block: spelled out, the bits are the same eagerly,
under `jit` and in a kernel.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

INT8_RANGE = 119
"""Largest stage-1 code. Not 127: stage 2 rounds scales and zeros to integers, and 119 is the
largest range from which a 4-bit code always dequantizes back into int8."""

_RECIPROCAL_RANGE = float(np.float32(1 / INT8_RANGE))


def quantize_int8(x: jax.Array, *, axis: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantizes with one scale over `axis`: ``s = max|x| * (1/119)``, ``q = rint(x * (1/s))``.

    Args:
      x: floating point, any shape.
      axis: the axes that share a scale, for example tokens and channels of a block.

    Returns:
      codes: int8 in [-119, 119], `x`'s shape.
      scale: float32, `x`'s shape without `axis`; 1 where all of a block is zero, NaN where some
        value is not finite, so that such a block never dequantizes to finite numbers.

    Raises:
      TypeError: if `x` is not floating point.
    """
    _check_floating(x)
    x = x.astype(jnp.float32)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    scale = scale_from_maximum(absolute_maximum(x, axes))
    return _round_to_codes(x, scale), jnp.squeeze(scale, axis=axes)


def absolute_maximum(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Largest absolute value over `axis`, which is kept with size 1; NaN if one is not finite.

    On a CPU a vectorized maximum may lose a NaN, so it is looked for by itself.
    """
    magnitude = jnp.abs(x)
    maximum = jnp.max(magnitude, axis=axis, keepdims=True)
    return jnp.where(jnp.all(magnitude < jnp.inf, axis=axis, keepdims=True), maximum, jnp.nan)


def scale_from_maximum(maximum: jax.Array) -> jax.Array:
    """The stage-1 scale of values up to `maximum` in absolute value (Eq. 9).

    Args:
      maximum: float32, non-negative or NaN, any shape, as `absolute_maximum` returns it.

    Returns:
      float32, same shape: ``maximum / 119``, 1 for 0, NaN for a maximum that is not finite. A
      maximum so small that the quotient is no normal number counts as 0.
    """
    scale = maximum * _RECIPROCAL_RANGE
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    return jnp.where(jnp.isfinite(maximum), scale, jnp.nan)


def quantize_with_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Quantizes with a scale fixed beforehand; larger values are clamped to +-119 (section 3.3).

    Args:
      x: floating point, any shape.
      scale: float32, broadcastable to `x` with equal rank, as `quantize_int8` returns them.

    Returns:
      int8 codes in [-119, 119], `x`'s shape. Values that are not finite get code 0: the caller
      marks them in the scale.

    Raises:
      TypeError: if `x` is not floating point.
    """
    _check_floating(x)
    return _round_to_codes(x.astype(jnp.float32), scale)


def _round_to_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    codes = jnp.rint(x * (1 / scale))
    codes = jnp.where(jnp.isfinite(x) & jnp.isfinite(scale), codes, 0)
    return jnp.clip(codes, -INT8_RANGE, INT8_RANGE).astype(jnp.int8)


def _check_floating(x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
