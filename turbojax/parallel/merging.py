"""Parts of attention that the devices of an axis have found, merged on all of them."""

import functools

import jax
import jax.numpy as jnp

from turbojax.ops.sinks import with_sinks
from turbojax.parallel.runs import AxisName


def merged(
    out: jax.Array,
    residual: jax.Array,
    axis: AxisName,
    *,
    sinks: jax.Array | None = None,
    real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention to all devices' keys, from what each found of its own, by one all-gather.

    Its size is that of the results, whatever the context. Every device adds the parts in the order
    of the devices, so that all have the same bits.

    `out` (float32 ``[B, T, N, H]``) and `residual` (the log-sum-exp, float32 ``[B, T, N]``,
    ``-inf`` where nothing was seen) are this device's, without `sinks` (float32 ``[N]``, see
    `turbojax.decode`). Queries that are not `real` (bool ``[B, T]``) give 0 and ``-inf``. Returns
    both for all keys, the same on every device.
    """
    packed = jnp.concatenate([out.reshape(-1), residual.reshape(-1)])
    parts = jax.lax.all_gather(packed, axis, to="invarying")
    outs = [part[: out.size].reshape(out.shape) for part in parts]
    residuals = [part[out.size :].reshape(residual.shape) for part in parts]
    # A chain, not a reduction, so that XLA makes one kernel of all that follows.
    largest = functools.reduce(jnp.maximum, residuals)
    shift = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = [jnp.exp(x - shift) for x in residuals]
    total = functools.reduce(jnp.add, weights)
    summed = functools.reduce(
        jnp.add, (x * w[..., None] for x, w in zip(outs, weights, strict=True))
    )
    nothing = total == 0
    safe = jnp.where(nothing, 1, total)
    whole, found = summed / safe[..., None], jnp.where(nothing, -jnp.inf, shift + jnp.log(safe))
    if real is not None:
        whole = jnp.where(real[..., None, None], whole, 0)
        found = jnp.where(real[..., None], found, -jnp.inf)
    return (whole, found) if sinks is None else with_sinks(whole, found, sinks, real)
