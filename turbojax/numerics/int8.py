"""FlashQ stage 1: symmetric INT8 with one scale per block (TurboAttention, Eq. 9).

Codes are the same bits everywhere: eagerly, under `jit`, whatever XLA fuses, on a CPU and on a GPU,
although division is approximate on a GPU and XLA may turn it into a product with a reciprocal. A
scale has 16 significant bits, so a code times a scale is exact in float32, and exact comparisons
with the remainder decide whether an approximate quotient was rounded correctly.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from turbojax._programs import one_program

INT8_RANGE = 119
"""Largest stage-1 code. Not 127: stage 2 rounds scales and zeros to integers, and 119 is the
largest range from which a 4-bit code always dequantizes back into int8."""

# A product, because XLA replaces a division by a constant with it on some devices only.
_RECIPROCAL_RANGE = float(np.float32(1 / INT8_RANGE))
_DROPPED_BITS = 8


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
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    scale = scale_from_maximum(absolute_maximum(x, axes))
    return _round_to_codes(x, scale), jnp.squeeze(scale, axis=axes)


@one_program("axis")
def absolute_maximum(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Largest absolute value over `axis`, which is kept with size 1; NaN if one is not finite.

    On a CPU a vectorized maximum may lose a NaN, so NaN is checked for separately.
    """
    magnitude = jnp.abs(x)
    maximum = jnp.max(magnitude, axis=axis, keepdims=True)
    return jnp.where(jnp.all(magnitude < jnp.inf, axis=axis, keepdims=True), maximum, jnp.nan)


@one_program()
def scale_from_maximum(maximum: jax.Array) -> jax.Array:
    """The stage-1 scale of values up to `maximum` in absolute value (Eq. 9).

    Args:
      maximum: float32, non-negative or NaN, any shape, as `absolute_maximum` returns it.

    Returns:
      float32, same shape: ``maximum / 119`` rounded up to 16 significant bits, 1 for 0, NaN for a
      maximum that is not finite. A maximum so small that the quotient is not a normal number counts
      as 0.
    """
    scale = round_scale(maximum * _RECIPROCAL_RANGE)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    return jnp.where(jnp.isfinite(maximum), scale, jnp.nan)


def round_scale(scale: jax.Array) -> jax.Array:
    """Rounds positive scales up to 16 significant bits, by at most 3 parts in 100,000.

    Args:
      scale: float32, positive and finite, any shape.

    Returns:
      float32, same shape, times any int8 code exact in float32.
    """
    dropped = jnp.uint32(2**_DROPPED_BITS - 1)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + dropped) & ~dropped, jnp.float32)


def quantize_with_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Quantizes with a scale fixed beforehand; larger values are clamped to +-119 (section 3.3).

    Args:
      x: floating point, any shape.
      scale: float32 of at most 16 significant bits (see `round_scale`), broadcastable to `x` with
        equal rank.

    Returns:
      int8 codes in [-119, 119], `x`'s shape. Values that are not finite get code 0: the caller
      marks them in the scale.

    Raises:
      TypeError: if `x` is not floating point.
    """
    _check_floating(x)
    return _round_to_codes(x.astype(jnp.float32), scale)


@one_program()
def _round_to_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``rint(x / scale)``, ties to even, clamped to the range: exact, see the module."""
    # Values far from any code, or not finite, need no exact comparison.
    quotient = jnp.clip(x * (1 / scale), -INT8_RANGE, INT8_RANGE)
    guess = jnp.rint(quotient)
    rest, half = x - guess * scale, 0.5 * scale
    is_odd = jnp.rint(0.5 * guess) * 2 != guess
    above = (rest > half) | (is_odd & (rest == half))
    below = (rest < -half) | (is_odd & (rest == -half))
    codes = guess + above.astype(jnp.float32) - below.astype(jnp.float32)
    codes = jnp.clip(codes, -INT8_RANGE, INT8_RANGE)
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(scale), codes, 0).astype(jnp.int8)


def _check_floating(x: jax.Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
