"""Activations to e4m3 in plain JAX: the definition (FireQ, Baek et al., 2025, section 3.1)."""

import jax
import jax.numpy as jnp

from turbojax.quantizers import Fp8Tokens, quantize_tokens


def quantize(x: jax.Array, scale: jax.Array | None, *, eps: float) -> Fp8Tokens:
    """Quantizes each token, after RMSNorm if its `scale` is given.

    Args:
      x: ``[M, K]``.
      scale: ``[K]``, or None.
      eps: added to the mean square.

    Returns:
      Codes ``[M, K]`` and scales ``[M]``, as `quantize_tokens` returns them.
    """
    return quantize_tokens(x if scale is None else _rms_norm(x, scale, eps))


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`turbojax.flax.norms.rms_norm`, which no op may import."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normalized = wide * inverse * scale.astype(jnp.float32)[None]
    # Otherwise XLA drops the rounding of a conversion that the next one undoes.
    return jax.lax.optimization_barrier(normalized.astype(x.dtype))
