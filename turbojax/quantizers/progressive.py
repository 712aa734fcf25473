"""FlashQ stage 2: channelwise asymmetric codes of stage-1 integers (TurboAttention, Eq. 10).

Everything here is integer arithmetic; float32 division of integers below 2**8 is exact enough
that rounding to nearest even always sees the true quotient.
"""

import jax
import jax.numpy as jnp

from turbojax.config import SUPPORTED_BITS

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
      ValueError: if `bits` is no supported number or `codes` has fewer than two axes.
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
    zero = jnp.rint(low / scale)
    smallest = jnp.maximum(0, jnp.ceil(-_INT8_MAX / scale) - zero)
    largest = jnp.minimum(top, jnp.floor(_INT8_MAX / scale) - zero)
    q2 = jnp.clip(jnp.rint(q1 / scale) - zero, smallest, largest)
    return (
        q2.astype(jnp.uint8),
        jnp.squeeze(scale, axis=-2).astype(jnp.int8),
        jnp.squeeze(zero, axis=-2).astype(jnp.int8),
    )


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
