"""Symmetric e4m3 quantization, the operands of the 8-bit float modes."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._programs import one_program
from turbojax._pytrees import pytree
from turbojax.numerics.int8 import absolute_maximum

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
    return _blocks(x, (axis,) if isinstance(axis, int) else tuple(axis))


@one_program("axes")
def _blocks(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    scale = absolute_maximum(x, axes) * _RECIPROCAL_MAX
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    codes = round_to_e4m3(jnp.clip(x * (1 / scale), -E4M3_MAX, E4M3_MAX))
    return codes, jnp.squeeze(scale, axis=axes)


@pytree
@dataclasses.dataclass(frozen=True)
class Fp8Tokens:
    """Activations in e4m3, one scale per token (FireQ, section 3.1).

    Attributes:
      codes: float8_e4m3fn ``[..., K]``.
      scale: bfloat16 ``[...]``; NaN marks a token in which some value was not finite.
      dtype: dtype of what was quantized, in which products of it are returned.
    """

    codes: jax.Array
    scale: jax.Array
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {"codes": "...I", "scale": "..."}
    """The letter of every axis of every array, see `turbojax.sharding.notation`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., K]``, that of what was quantized."""
        return self.codes.shape


def quantize_tokens(x: jax.Array) -> Fp8Tokens:
    """Quantizes to e4m3 with a bfloat16 scale per token (FireQ, section 3.1).

    ``s = bf16(max|x| / 448)``, ``q = e4m3(x / s)``. Both divisions are products with a float32
    reciprocal. A scale rounded down makes the largest values saturate.

    Args:
      x: bfloat16, float16 or float32 ``[..., K]``.

    Returns:
      The codes and scales: 1 where a token is zero (a magnitude below the smallest normal
      float32 number counts as zero), otherwise at least the smallest normal number; NaN, of scale
      and codes, where a value is not finite.

    Raises:
      TypeError: if the dtype is not supported.
      ValueError: if `x` has no axis, or no channels.
    """
    _checks.check_float_dtype("x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{x.shape=} must be [..., K], K at least 1")
    return Fp8Tokens(*_tokens(x), np.dtype(x.dtype))


@one_program()
def _tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    maximum = absolute_maximum(wide, x.ndim - 1)
    tiny = float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.maximum(maximum * _RECIPROCAL_MAX, tiny)
    scale = jnp.where(maximum < tiny, 1.0, scale)
    scale = jnp.where(jnp.isnan(maximum), jnp.nan, scale)
    # XLA would drop the rounding where the scale is widened again.
    rounded = jax.lax.optimization_barrier(scale.astype(jnp.bfloat16))
    scale = rounded.astype(jnp.float32)
    codes = jnp.clip(wide * (1 / scale), -E4M3_MAX, E4M3_MAX)
    codes = round_to_e4m3(jnp.where(jnp.isnan(scale), jnp.nan, codes))
    return codes, jnp.squeeze(rounded, axis=-1)


def round_to_e4m3(x: jax.Array) -> jax.Array:
    """Rounds float32 within +-448 to float8_e4m3fn, and keeps it so.

    XLA drops a conversion that is followed by one back to float32, and the rounding with it
    (`xla_allow_excess_precision`; seen on GPUs). The barrier prevents that.
    """
    return jax.lax.optimization_barrier(x.astype(jnp.float8_e4m3fn))
