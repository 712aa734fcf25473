"""Symmetric e4m3 quantization, the operands of the 8-bit float modes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.quantizers.int8 import absolute_maximum

E4M3_MAX = 448.0
"""Largest finite e4m3 value."""

_RECIPROCAL_MAX = float(np.float32(1 / E4M3_MAX))


def quantize_fp8(x: jax.Array, *, axis: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantizes to e4m3 with one scale over `axis`: ``s = max|x| / 448``, ``q = e4m3(x / s)``.

    Both divisions are products with a float32 reciprocal.

    Args:
      x: floating point, any shape.
      axis: the axes that share a scale.

    Returns:
      codes: float8_e4m3fn, `x`'s shape.
      scale: float32, `x`'s shape without `axis`; 1 where everything is zero, NaN where some value
        is not finite.

    Raises:
      TypeError: if `x` is not floating point.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    x = x.astype(jnp.float32)
    scale = absolute_maximum(x, axes) * _RECIPROCAL_MAX
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    codes = round_to_e4m3(jnp.clip(x * (1 / scale), -E4M3_MAX, E4M3_MAX))
    return codes, jnp.squeeze(scale, axis=axes)


def round_to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-448 to float8_e4m3fn, and keeps it so.

    XLA drops a conversion that is followed by one back to float32, and the rounding with it
    (`xla_allow_excess_precision`; seen on GPUs). The barrier prevents that.
    """
    return jax.lax.optimization_barrier(x.astype(jnp.float8_e4m3fn))
