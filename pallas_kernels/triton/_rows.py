"""Stage 1 of query rows inside a kernel: the bits of `turbojax.quantizers`.

`_quantize` computes the same codes in fewer operations on bit patterns. On rows whose channels are
no power of two (masked loads of 48 channels) that gave wrong codes on an H100, though not in
interpret mode nor for whole blocks; this form was right there, and for a few rows its cost does not
matter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.triton import _common


def quantize_rows(
    parts: tuple[jax.Array, ...], mode: str
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Quantizes rows, cut into parts ``[R, c]`` along their channels, with one scale each.

    By `mode`, parts become int32 codes (``"int8"``), e4m3 values as bfloat16 (``"fp8"``), or stay
    as they are (``"float"``). Scales are float32 ``[R]``, NaN where a row is not finite.
    """
    if mode == "float":
        return parts, jnp.ones(parts[0].shape[0], jnp.float32)
    wide = tuple(x.astype(jnp.float32) for x in parts)
    magnitudes = [jnp.abs(x) for x in wide]
    maximum = functools.reduce(jnp.maximum, [jnp.max(x, axis=1) for x in magnitudes])
    # A maximum loses NaN here.
    lost = [jnp.max(jnp.where(x < jnp.inf, 0.0, 1.0), axis=1) for x in magnitudes]
    bad = functools.reduce(jnp.maximum, lost)
    if mode == "fp8":
        scale = _or_nan(maximum * float(np.float32(1 / _common.E4M3_MAX)), bad)
        return tuple(_to_e4m3(x, scale[:, None]) for x in wide), scale
    scale = _round_scale(maximum * float(np.float32(1 / _common.INT8_RANGE)))
    scale = _or_nan(scale, bad)
    return tuple(_to_codes(x, scale[:, None]) for x in wide), scale


def _or_nan(scale: jax.Array, bad: jax.Array) -> jax.Array:
    tiny = float(np.finfo(np.float32).tiny)
    return jnp.where(bad > 0, jnp.nan, jnp.where(scale < tiny, 1.0, scale))


def _round_scale(scale: jax.Array) -> jax.Array:
    """Rounds up to 16 significant bits."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type((bits + 255) & -256, jnp.float32)


def _to_e4m3(x: jax.Array, scale: jax.Array) -> jax.Array:
    value = jnp.minimum(jnp.maximum(x * (1 / scale), -_common.E4M3_MAX), _common.E4M3_MAX)
    return value.astype(jnp.float8_e4m3fn).astype(jnp.float32).astype(jnp.bfloat16)


def _to_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``rint(x / scale)``, made exact by comparisons as in `turbojax.numerics.int8`."""
    limit = _common.INT8_RANGE
    code = _common.rint(jnp.minimum(jnp.maximum(x * (1 / scale), -limit), limit))
    guess = code.astype(jnp.float32)
    rest, half = x - guess * scale, 0.5 * scale
    is_odd = (code & 1) == 1
    above = (rest > half) | (is_odd & (rest == half))
    below = (rest < -half) | (is_odd & (rest == -half))
    code = code + above.astype(jnp.int32) - below.astype(jnp.int32)
    code = jnp.minimum(jnp.maximum(code, -int(limit)), int(limit))
    return jnp.where((jnp.abs(x) < jnp.inf) & (scale < jnp.inf), code, 0)
