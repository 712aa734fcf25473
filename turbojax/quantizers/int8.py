"""FlashQ stage 1: symmetric INT8 with one scale per block (TurboAttention, Eq. 9)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

INT8_RANGE = 119
"""Largest stage-1 code. Not 127: stage 2 rounds scales and zeros to integers, and 119 is the
largest range from which a 4-bit code always dequantizes back into int8."""

# A product, because XLA turns a division by a constant into this product under jit but not
# outside it: written out, eager and jitted bits are the same.
_RECIPROCAL_RANGE = float(np.float32(1 / INT8_RANGE))


def quantize_int8(x: jax.Array, *, axis: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantizes with one scale over `axis`: ``s = max|x| / 119``, ``q = rint(x / s)``.

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
    scale = scale_from_maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    return _round_to_codes(x, scale), jnp.squeeze(scale, axis=_axes(axis))


def scale_from_maximum(maximum: jax.Array) -> jax.Array:
    """The stage-1 scale of values up to `maximum` in absolute value (Eq. 9).

    Args:
      maximum: float32, non-negative or NaN, any shape.

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
    codes = jnp.rint(x / scale)
    codes = jnp.where(jnp.isfinite(x) & jnp.isfinite(scale), codes, 0)
    return jnp.clip(codes, -INT8_RANGE, INT8_RANGE).astype(jnp.int8)


def _axes(axis: int | Sequence[int]) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else tuple(axis)


def _check_floating(x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
