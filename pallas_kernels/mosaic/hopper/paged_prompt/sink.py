"""A head's sink, a logit in its softmax's denominator alone, in a warpgroup's rows."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import Ref
from pallas_kernels.mosaic.hopper.paged_prompt.products import along
from pallas_kernels.mosaic.hopper.paged_prompt.tiles import Work
from pallas_kernels.mosaic.ring import ROW, ROWS, WARPGROUPS


def with_sink(
    o: jax.Array, m: jax.Array, l: jax.Array, shift: jax.Array, work: Work, sinks: Ref
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds each row's head's sink; returns the new outputs, maxima and sums.

    `m` are maxima, ``-inf`` where nothing is seen; `o` and `l` are not normalized, and to be
    multiplied by two to the power ``m - shift``. `sinks` are in powers of two, ``[N]``.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
    each = work.tokens // WARPGROUPS
    sink = jnp.full_like(l, sinks[work.head])
    for g in range(1, work.together):
        sink = jnp.where(row >= g * each, sinks[work.head + g], sink)
    top = m - shift
    new = jnp.maximum(top, sink)
    new = jnp.where(new == -jnp.inf, 0.0, new)
    weight = jnp.exp2(top - new)
    # What sees nothing may have been multiplied with 0 times NaN.
    o = jnp.where(along(l == 0, o.shape, 0), 0.0, o) * along(weight, o.shape, 0)
    return o, new + shift, l * weight + jnp.exp2(sink - new)
