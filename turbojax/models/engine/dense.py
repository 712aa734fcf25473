"""Prompts that begin in a step attend among themselves, to keys and values that are not compressed.

The prompts of several requests stand side by side as segments of one sequence. With 8-bit operands
this is faster than attending to pages where prompts are long, and the results lose nothing to the
pages' format. Requests of a step share scales, so a prompt's result depends, within rounding, on
what else is in the step; but NaN and infinity in one are kept from the others here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from turbojax.attention import turbo as turbo_attention
from turbojax.attention.optional_arrays import Extras
from turbojax.attention.options import Options
from turbojax.numerics.config import TurboConfig


def segments_of(slots: jax.Array, positions: jax.Array) -> jax.Array:
    """The number of each token's segment, int32 ``[N]``, ascending.

    A segment is a run of tokens at consecutive `positions` int32 ``[N]`` of one slot.
    """
    follows = (slots[1:] == slots[:-1]) & (positions[1:] == positions[:-1] + 1)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), (~follows).astype(jnp.int32)])
    return jnp.cumsum(begins, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Queries, keys and values with zeros in place of what is not finite, and where that matters.

    They are ``[1, N, heads, H]`` and ``[1, N, K, H]``. `lost` bool ``[N]`` marks tokens that see
    something that is not finite in their own segment; `segments` are as in `segments_of`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    lost: jax.Array
    segments: jax.Array

    @staticmethod
    def of(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> "Tokens":
        """Puts zeros in place of what is not finite."""
        arrays = query, key, value
        finite = [jnp.isfinite(x) for x in arrays]
        good = functools.reduce(jnp.logical_and, (jnp.all(x[0], axis=(1, 2)) for x in finite))
        # Of a segment all from the first such token on, which see it.
        count = jnp.cumsum((~good).astype(jnp.int32), dtype=jnp.int32)
        is_first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
        before = jax.lax.cummax(jnp.where(is_first, count - (~good).astype(jnp.int32), 0))
        query, key, value = (
            jnp.where(x, y, jnp.zeros_like(y)) for x, y in zip(finite, arrays, strict=True)
        )
        return Tokens(query, key, value, count > before, segments)

    def spoiled(self, out: jax.Array) -> jax.Array:
        """Results ``[N, heads, H]``, NaN where they are lost."""
        return jnp.where(self.lost[:, None, None], jnp.nan, out)


@functools.partial(jax.jit, static_argnames=("config", "options", "implementation"))
def attend(
    tokens: Tokens,
    config: TurboConfig,
    options: Options,
    extras: Extras,
    implementation: str | None,
) -> jax.Array:
    """Causal attention of each segment's tokens among themselves, without meaning where `lost`.

    Of `implementation`, that of attention to pages, only ``"xla"`` is followed.
    """
    ids = tokens.segments[None]
    out, _ = turbo_attention.attend(
        tokens.query,
        tokens.key,
        tokens.value,
        config=config,
        options=options,
        extras=Extras(query_segment_ids=ids, key_value_segment_ids=ids, sinks=extras.sinks),
        implementation="xla" if implementation == "xla" else None,
    )
    return out[0]
