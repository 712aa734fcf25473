"""Attention sinks: a learned logit of every head, in the denominator of its softmax alone."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import ScoreModifiers


def with_sinks(
    out: jax.Array, residual: jax.Array, sinks: jax.Array, real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The result of attention with sinks, from the result without (gpt-oss; Xiao et al., 2024).

    A sink has the weight ``exp(sink)`` and a value of zeros: the log-sum-exp becomes
    ``logaddexp(lse, sink)`` and the output shrinks by ``exp(lse - lse')``. With `SAS` too a sink's
    weight is the exact exponential. A sink of ``-inf`` is none. Queries that are not `real` stay 0
    and ``-inf``; a real one that sees nothing gives 0 and its head's sink.
    """
    sinks = sinks[None, None]
    # Where neither has a weight, the difference and the derivatives of both lines would be NaN.
    is_none = sinks == -jnp.inf
    total = jnp.logaddexp(residual, jnp.where(is_none, 0, sinks))
    total = jnp.where(is_none, residual, total)
    share = jnp.exp(jnp.where(residual == -jnp.inf, -jnp.inf, residual - total))
    share = jnp.where(jnp.isnan(sinks), jnp.nan, share)
    if real is not None:
        total = jnp.where(real[..., None], total, residual)
        share = jnp.where(real[..., None], share, 1)
    shrunk = out.astype(jnp.float32) * share[..., None]
    return shrunk.astype(out.dtype), total


def after(
    run: Callable[[ScoreModifiers, Options], tuple[jax.Array, jax.Array]],
    query: jax.Array,
    query_length: jax.Array | None,
    modifiers: ScoreModifiers,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """A call's result with its sinks, by an implementation that knows no sinks.

    `run` is asked for float32, so that the result is rounded only once.
    """
    if modifiers.sinks is None:
        return run(modifiers, options)
    out, residual = run(
        dataclasses.replace(modifiers, sinks=None),
        dataclasses.replace(options, out_dtype="float32"),
    )
    dtype = options.dtype_of_output(query).name
    return _rounded_once(out, residual, modifiers.sinks, query_length, dtype=dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _rounded_once(
    out: jax.Array,
    residual: jax.Array,
    sinks: jax.Array,
    query_length: jax.Array | None,
    *,
    dtype: str,
) -> tuple[jax.Array, jax.Array]:
    real = None
    if query_length is not None:
        real = jnp.arange(out.shape[1])[None] < query_length[:, None]
    out, residual = with_sinks(out, residual, sinks, real)
    return out.astype(dtype), residual


def sees_only_sink(out: jax.Array, residual: jax.Array, sinks: jax.Array) -> jax.Array:
    """Queries all of whose weight is their sink's, up to rounding: bool ``[B, T, N]``.

    The gradient of their outputs reaches no input; it must not do so as 0 * NaN. `residual` is the
    log-sum-exp with sinks.
    """
    return (residual == sinks[None, None]) & jnp.all(out == 0, axis=-1)


def sink_gradient(
    residual: jax.Array, sinks: jax.Array, delta: jax.Array, real: jax.Array
) -> jax.Array:
    """The sinks' gradient ``-sum(exp(sink - lse') * delta)`` over real queries: float32 ``[N]``.

    `delta` is ``dO . O`` less the log-sum-exp's cotangent, `residual` the log-sum-exp with sinks.
    """
    # A sink of -inf weighs nothing, even where the query sees nothing and lse' is -inf too.
    sinks = sinks[None, None]
    weight = jnp.where(sinks == -jnp.inf, 0, jnp.exp(sinks - residual))
    return -jnp.sum(jnp.where(real[..., None], weight * delta, 0), axis=(0, 1))
