"""FlashQ stage 2: channelwise asymmetric codes of stage-1 integers (TurboAttention, Eq. 10).

Everything here is integer arithmetic, carried out in float32.
"""

import jax
import jax.numpy as jnp

from turbojax.numerics.config import SUPPORTED_BITS

_INT8_MAX = 127


def quantize_channels(codes: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compresses a block of stage-1 codes to `bits` bits, channel by channel.

    For each channel, over the block's tokens: ``s = max(1, rint((hi - lo) / (2**bits - 1)))``,
    ``z = rint(lo / s)`` and ``q2 = clip(rint(q1 / s) - z, a, b)``, where the bounds keep the
    dequantized ``(q2 + z) * s`` inside int8.

    Args:
      codes: int8 ``[..., B, H]``, stage-1 codes of `B` tokens and `H` channels.
      bits: 2, 3 or 4.

    Returns:
      codes: uint8 ``[..., B, H]`` below ``2**bits``.
      channel_scale: int8 ``[..., H]``, at least 1.
      channel_zero: int8 ``[..., H]``.

    Raises:
      TypeError: if `codes` is not int8.
      ValueError: if `bits` is not a supported number or `codes` has fewer than two axes.
    """
    if codes.dtype != jnp.int8:
        raise TypeError(f"codes.dtype={codes.dtype} must be int8")
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"{bits=} must be one of {SUPPORTED_BITS}")
    if codes.ndim < 2:
        raise ValueError(f"{codes.shape=} must have a token axis and a channel axis")
    top = 2**bits - 1
    q1 = codes.astype(jnp.float32)
    low = jnp.min(q1, axis=-2, keepdims=True)
    high = jnp.max(q1, axis=-2, keepdims=True)
    scale = jnp.maximum(1, jnp.rint((high - low) / top))
    reciprocal = 1 / scale
    zero = _round_quotient(low, reciprocal)
    # 127 / scale is a whole number for scale 1 alone, where the product is exact.
    limit = jnp.floor(_INT8_MAX * reciprocal)
    smallest = jnp.maximum(0, -limit - zero)
    largest = jnp.minimum(top, limit - zero)
    q2 = jnp.clip(_round_quotient(q1, reciprocal) - zero, smallest, largest)
    return (
        q2.astype(jnp.uint8),
        jnp.squeeze(scale, axis=-2).astype(jnp.int8),
        jnp.squeeze(zero, axis=-2).astype(jnp.int8),
    )


def _round_quotient(numerator: jax.Array, reciprocal: jax.Array) -> jax.Array:
    """Half-to-even rounding of an integer over a scale, exact although the reciprocal is not.

    Scales are at most 79, so a quotient that is not a tie is at least 1/158 away from one. Rounding
    to 12 fractional bits first restores ties and moves nothing else across.
    """
    quotient = jnp.rint(numerator * reciprocal * 4096) * (1 / 4096)
    return jnp.rint(quotient)


def dequantize_channels(
    codes: jax.Array, channel_scale: jax.Array, channel_zero: jax.Array
) -> jax.Array:
    """Back to stage-1 codes: ``q1' = (q2 + z) * s`` (Eq. 10, Algorithm 2).

    Args:
      codes: uint8 ``[..., B, H]``.
      channel_scale: int8 ``[..., H]``.
      channel_zero: int8 ``[..., H]``.

    Returns:
      int8 ``[..., B, H]``.

    Raises:
      TypeError: if a dtype differs from these.
    """
    if codes.dtype != jnp.uint8:
        raise TypeError(f"codes.dtype={codes.dtype} must be uint8")
    for name, x in (("channel_scale", channel_scale), ("channel_zero", channel_zero)):
        if x.dtype != jnp.int8:
            raise TypeError(f"{name}.dtype={x.dtype} must be int8")
    # Codes plus zero stay within +-127, and so does the product: int8 throughout.
    shifted = codes.astype(jnp.int8) + jnp.expand_dims(channel_zero, -2)
    return shifted * jnp.expand_dims(channel_scale, -2)
