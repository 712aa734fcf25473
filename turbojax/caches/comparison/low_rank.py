"""Approximations of low rank: what GEAR keeps of the error that codes make."""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.caches.comparison.codes import rounded


def factors(x: jax.Array, rank: int, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """The best approximation of a rank, by the singular vectors of its channels.

    These are the last eigenvectors of ``x^T x``: a small matrix, however many tokens there are, and
    no random start, so that the same tokens give the same bits.

    Args:
      x: float32 ``[..., n, H]``, finite.
      rank: `r`, at most `H`.
      dtype: in which both factors are stored.

    Returns:
      left: ``[..., n, r]`` in `dtype`.
      right: ``[..., r, H]``, rows of length 1; ``x`` is about ``left @ right``, and no other
        product of such factors is nearer to it, but for the rounding of both.
    """
    exact = jax.lax.Precision.HIGHEST
    gram = jnp.einsum("...nc,...nd->...cd", x, x, precision=exact)
    _, vectors = jnp.linalg.eigh(gram)
    right = rounded(jnp.swapaxes(vectors[..., -rank:], -1, -2), dtype)
    left = jnp.einsum("...nc,...rc->...nr", x, right, precision=exact)
    return rounded(left, dtype).astype(dtype), right.astype(dtype)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 ``[..., n, H]`` of what `factors` gave."""
    wide = [x.astype(jnp.float32) for x in (left, right)]
    return jnp.einsum("...nr,...rc->...nc", *wide, precision=jax.lax.Precision.HIGHEST)
