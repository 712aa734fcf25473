"""Activations to e4m3 in plain JAX: the definition (FireQ, Baek et al., 2025, section 3.1)."""

import jax
import jax.numpy as jnp

from turbojax.numerics.fp8 import Fp8Tokens, quantize_tokens


def quantize(x: jax.Array, scale: jax.Array | None, *, eps: float | None) -> Fp8Tokens:
    """Quantizes each token of ``[M, K]``, after `scaled` if there is a `scale` ``[K]``."""
    return quantize_tokens(x if scale is None else scaled(x, scale, eps))


def scaled(x: jax.Array, scale: jax.Array, eps: float | None) -> jax.Array:
    """``x * scale``, after an RMSNorm unless `eps` is None: no op may import `turbojax.flax`."""
    wide = x.astype(jnp.float32)
    if eps is not None:
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normalized = wide * scale.astype(jnp.float32)[None]
    # Otherwise XLA drops the rounding of a conversion that the next one undoes.
    return jax.lax.optimization_barrier(normalized.astype(x.dtype))
