"""Prompts that begin in a step attend among themselves, to keys and values as they are.

Those of several requests stand side by side as segments of one sequence. With 8-bit operands that
is faster than attending to pages, and prompts lose nothing to the pages' format. Requests of a step
share scales, so that what a prompt gets depends, within rounding, on what else is in the step; but
NaN and infinity in one are kept from the others here.
"""

import functools

import jax
import jax.numpy as jnp

from turbojax.config import TurboConfig
from turbojax.ops import turbo_attention
from turbojax.ops.extras import Extras
from turbojax.ops.options import Options


def segments_of(slots: jax.Array, positions: jax.Array) -> jax.Array:
    """int32 ``[N]``, ascending: a number for each run of tokens that follow each other in one slot.

    Args:
      slots: int32 ``[N]``.
      positions: int32 ``[N]``, in the slots' sequences.
    """
    follows = (slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), (~follows).astype(jnp.int32)])
    return jnp.cumsum(begins, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("config", "options", "implementation"))
def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    config: TurboConfig,
    options: Options,
    extras: Extras,
    implementation: str | None,
) -> jax.Array:
    """Causal attention of each segment's tokens among themselves.

    Args:
      query: ``[1, N, heads, H]``.
      key: ``[1, N, K, H]``.
      value: ``[1, N, K, H]``.
      segments: int32 ``[N]``, ascending.
      config: numerics.
      options: of the layer.
      extras: of the layer: sinks.
      implementation: ``"xla"``, or another name or None for the fastest.

    Returns:
      ``[1, N, heads, H]``: NaN from the first token on of a segment that has a query, key or value
      which is not finite.
    """
    finite = [jnp.isfinite(x[0]) for x in (query, key, value)]
    lost = ~functools.reduce(jnp.logical_and, (jnp.all(x, axis=(1, 2)) for x in finite))
    clean = [
        jnp.where(x[None], y, jnp.zeros_like(y))
        for x, y in zip(finite, (query, key, value), strict=True)
    ]
    ids = segments[None]
    out, _ = turbo_attention.attend(
        *clean,
        config=config,
        options=options,
        extras=Extras(query_segment_ids=ids, key_value_segment_ids=ids, sinks=extras.sinks),
        implementation="xla" if implementation == "xla" else None,
    )
    # Of a segment all that come after the first such token, which see it.
    count = jnp.cumsum(lost.astype(jnp.int32), dtype=jnp.int32)
    is_first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    before = jax.lax.cummax(jnp.where(is_first, count - lost.astype(jnp.int32), 0))
    return jnp.where((count > before)[None, :, None, None], jnp.nan, out)
