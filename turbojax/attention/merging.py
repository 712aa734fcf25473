"""Merging partial results of attention, each over a part of the keys."""

import jax
import jax.numpy as jnp

from turbojax import _checks


def merge_attention(outputs: jax.Array, residuals: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to all keys, from attention to parts of them.

    Every part is the result of an op with ``return_residual=True`` for the same queries and the
    part's own keys, with ``output_dtype=jnp.float32`` where nothing may be lost. Only one part may
    have sinks. Parts are added in order: the same parts give the same bits. Differentiable.

    Args:
      outputs: ``[P, B, T, N, H]``, the parts, floating-point.
      residuals: float32 ``[P, B, T, N]``, their log-sum-exps; ``-inf`` where a part saw nothing.

    Returns:
      ``[B, T, N, H]`` in the outputs' dtype, and float32 ``[B, T, N]``, the log-sum-exp; 0 and
      ``-inf`` where no part saw anything.

    Raises:
      TypeError: if dtypes are not supported.
      ValueError: if shapes do not fit.
    """
    _checks.check_float_dtype("outputs", outputs)
    if residuals.dtype != jnp.float32:
        raise TypeError(f"{residuals.dtype=} must be float32")
    if outputs.ndim != 5 or 0 in outputs.shape or outputs.shape[:4] != residuals.shape:
        raise ValueError(
            f"{outputs.shape=} must be [P, B, T, N, H], no axis empty, and {residuals.shape=} the "
            "same without H"
        )
    largest = jax.lax.stop_gradient(jnp.max(residuals, axis=0))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = jnp.exp(residuals - largest[None])
    total = weights[0]
    summed = outputs[0].astype(jnp.float32) * weights[0][..., None]
    for out, weight in zip(outputs[1:], weights[1:], strict=True):  # in this order
        total = total + weight
        summed = summed + out.astype(jnp.float32) * weight[..., None]
    nothing = total == 0
    safe = jnp.where(nothing, 1, total)
    merged = summed / safe[..., None]
    residual = jnp.where(nothing, -jnp.inf, largest + jnp.log(safe))
    return merged.astype(outputs.dtype), residual
