"""Codes with one scale per vector, as `turbojax.caches.token_scaled.cache` stores tokens: 4 bits, or e4m3."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.numerics.fp8 import quantize_tokens
from turbojax.numerics.int8 import absolute_maximum
from turbojax.numerics.packing import pack, unpack

LARGEST_CODE = 7
"""Largest 4-bit code; with these scales -8 does not occur."""

_RECIPROCAL_RANGE = float(np.float32(1 / LARGEST_CODE))
_BITS = 4


def quantize_vectors(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """4-bit codes with one scale per vector: ``s = bf16(max|x| / 7)``, ``q = rint(x / s)``.

    The division by 7 is a product with the float32 nearest to a seventh. The codes are exactly
    those of the rounded scale, everywhere: a code times a scale has 11 significant bits, so exact
    comparisons with the remainder decide whether an approximate quotient was rounded correctly.

    Codes of ``[..., H]`` (`H` even) are uint8 ``[..., H / 2]``, see `turbojax.caches.token_scaled.cache`; zeros
    where the scale is NaN. Scales are bfloat16 ``[...]``: 1 where all is zero (or so small that the
    scale is no normal number), NaN where a value is not finite.
    """
    x = x.astype(jnp.float32)
    # Not a conversion to bfloat16 and back, which XLA may drop.
    scale = jax.lax.reduce_precision(absolute_maximum(x, -1) * _RECIPROCAL_RANGE, 8, 7)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    quotient = jnp.clip(x * (1 / scale), -LARGEST_CODE - 1, LARGEST_CODE)
    guess = jnp.rint(quotient)
    rest, half = x - guess * scale, 0.5 * scale
    is_odd = jnp.rint(0.5 * guess) * 2 != guess
    above = (rest > half) | (is_odd & (rest == half))
    below = (rest < -half) | (is_odd & (rest == -half))
    codes = guess + above.astype(jnp.float32) - below.astype(jnp.float32)
    codes = jnp.clip(codes, -LARGEST_CODE - 1, LARGEST_CODE)
    codes = jnp.where(jnp.isfinite(scale), codes, 0).astype(jnp.int8)
    nibbles = jax.lax.bitcast_convert_type(codes, jnp.uint8) & 15
    return pack(nibbles, _BITS), scale[..., 0].astype(jnp.bfloat16)


def unpack_codes(packed: jax.Array) -> jax.Array:
    """The codes of `quantize_vectors`: int8 ``[..., H]`` from uint8 ``[..., H / 2]``."""
    nibbles = jax.lax.bitcast_convert_type(unpack(packed, _BITS), jnp.int8)
    return (nibbles ^ 8) - 8


def quantize(x: jax.Array, codes: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Codes and bfloat16 scales of `quantize_vectors` (uint8) or `quantize_tokens` (e4m3)."""
    if codes == jnp.uint8:
        return quantize_vectors(x)
    tokens = quantize_tokens(x)
    return tokens.codes, tokens.scale


def numbers(codes: jax.Array) -> jax.Array:
    """Stored codes as numbers before their scale: int8 or float8_e4m3fn ``[..., H]``."""
    return unpack_codes(codes) if codes.dtype == jnp.uint8 else codes
