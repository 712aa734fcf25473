"""Stage 1 of query rows inside a kernel: the bits of `turbojax.quantizers`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.triton._common import E4M3_MAX, rint
from pallas_kernels.triton._quantize import clamped_stage1_codes, scale_from_maximum

_RECIPROCAL_MAX = 0.002232142857142857  # 1 / 448
_TINY = 1.1754943508222875e-38


def quantize_rows(
    parts: tuple[jax.Array, ...], mode: str, interpret: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Quantizes rows, cut into parts along their channels, with one scale each.

    Args:
      parts: floating point ``[R, c]``.
      mode: ``"int8"``, ``"int8_fp8"``, ``"fp8"`` or ``"float"``.
      interpret: whether the kernel is interpreted.

    Returns:
      parts: int32 codes; in mode ``"fp8"`` e4m3 values as bfloat16; in ``"float"`` the inputs.
      scale: float32 ``[R]``, NaN where a row is not finite.
    """
    if mode == "float":
        return parts, jnp.ones(parts[0].shape[0], jnp.float32)
    wide = tuple(x.astype(jnp.float32) for x in parts)
    magnitudes = [jnp.abs(x) for x in wide]
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in magnitudes])
    # A maximum loses NaN. (One of bit patterns would not, but gave wrong rows on an H100 where
    # the rows were masked loads of 48 channels.)
    lost = [jnp.max(jnp.where(x < jnp.inf, 0.0, 1.0), axis=1) for x in magnitudes]
    maximum = jnp.where(functools.reduce(jnp.maximum, lost) > 0, jnp.nan, maximum)
    scale = scale_from_maximum(maximum)
    if mode == "fp8":
        scale = maximum * _RECIPROCAL_MAX
        scale = jnp.where(scale < _TINY, 1.0, scale)
        return tuple(_to_e4m3(x, scale[:, None]) for x in wide), scale
    return tuple(rint(clamped_stage1_codes(x, scale[:, None], interpret)) for x in wide), scale


def _to_e4m3(x: jax.Array, scale: jax.Array) -> jax.Array:
    value = jnp.minimum(jnp.maximum(x * (1 / scale), -E4M3_MAX), E4M3_MAX)
    return value.astype(jnp.float8_e4m3fn).astype(jnp.float32).astype(jnp.bfloat16)
