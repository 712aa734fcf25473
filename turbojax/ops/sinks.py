"""Attention sinks: a learned logit of every head, in the denominator of its softmax alone."""

import jax
import jax.numpy as jnp


def with_sinks(
    out: jax.Array, residual: jax.Array, sinks: jax.Array, real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The result of attention with sinks, from the result without (gpt-oss; Xiao et al., 2024).

    A sink has the weight ``exp(sink)`` and a value of zeros: the log-sum-exp becomes
    ``logaddexp(lse, sink)`` and the output shrinks by ``exp(lse - lse')``. With `SAS` too a sink's
    weight is the exact exponential.

    Args:
      out: ``[B, T, N, H]``, float32 where nothing shall be lost.
      residual: float32 ``[B, T, N]``, the log-sum-exp.
      sinks: float32 ``[N]``; ``-inf`` is none.
      real: bool ``[B, T]``, queries that are no padding, which stays 0 and ``-inf``; all if not
        given.

    Returns:
      The output in its dtype, and the log-sum-exp. A real query that sees nothing gives 0 and its
      head's sink.
    """
    sinks = sinks[None, None]
    total = jnp.logaddexp(residual, sinks)
    # Where neither has weight the difference would be NaN.
    share = jnp.where(residual == -jnp.inf, 0, jnp.exp(residual - total))
    share = jnp.where(jnp.isnan(sinks), jnp.nan, share)
    if real is not None:
        total = jnp.where(real[..., None], total, residual)
        share = jnp.where(real[..., None], share, 1)
    shrunk = out.astype(jnp.float32) * share[..., None]
    return shrunk.astype(out.dtype), total


def sink_gradient(
    residual: jax.Array, sinks: jax.Array, delta: jax.Array, real: jax.Array
) -> jax.Array:
    """The sinks' gradient: ``-sum(exp(sink - lse') * delta)`` over queries.

    Args:
      residual: float32 ``[B, T, N]``, the log-sum-exp with sinks.
      sinks: float32 ``[N]``.
      delta: float32 ``[B, T, N]``, ``dO . O`` less the log-sum-exp's cotangent.
      real: bool ``[B, T]``, queries that are no padding.

    Returns:
      float32 ``[N]``.
    """
    # A sink of -inf weighs nothing, even where the query sees nothing and lse' is -inf too.
    sinks = sinks[None, None]
    weight = jnp.where(sinks == -jnp.inf, 0, jnp.exp(sinks - residual))
    return -jnp.sum(jnp.where(real[..., None], weight * delta, 0), axis=(0, 1))
