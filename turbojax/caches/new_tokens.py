"""Newest tokens that attend to a cache, many in chunks; queries at other positions, by offsets.

Queries are those of a cache's last tokens. With `query_offset` they are elsewhere: where a text's
keys lie in several caches, each is attended to separately, with the position of its first token as
`key_offset`, and the results are merged.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import Registry
from turbojax.attention import sinks
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.base import Attended, Kind
from turbojax.sharding import together
from turbojax.sharding.notation import Table
from turbojax.sharding.per_device import per_device

C = TypeVar("C", bound=Any)


class Codes(Kind[C]):
    """A kind of contiguous caches of codes, whose newest tokens attend by what a registry has.

    Attributes:
      reads: the implementations; its name is the one in the message that refuses gradients.
      table: of the call's arrays.
      shortens: whether a token is stored alike wherever the cache ends: `as_newest` applies.
    """

    reads: Registry
    table: Table
    shortens: bool = False

    def decode(
        self,
        query: jax.Array,
        cache: C,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> Attended:
        """See `Kind.decode`; the log-sum-exp is always there."""
        require_causal(options)
        checks.check_query(cache, query)
        real = query_lengths
        if real is not None:  # making it an array would take a kernel
            real = _checks.check_lengths("query_seq_lengths", real, *query.shape[:2])
        rolling_buffer.check_visible(cache, options.window, query.shape[1])
        check_whole(cache, modifiers)
        how: Any = {"options": options, "registry": self.reads, "shortens": self.shortens}
        run = per_device(self.table, _decode, **how)
        results: Attended = run(query, cache, real, modifiers)
        return results


def _decode(
    query: jax.Array,
    cache: Any,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    *,
    registry: Registry,
    options: Options,
    shortens: bool,
) -> tuple[jax.Array, jax.Array]:
    """`Codes.decode` by the implementation for these arrays."""
    real = None if query_lengths is None else jnp.clip(query_lengths, 0, query.shape[1])
    if shortens:
        lengths, modifiers = as_newest(query, cache.lengths, real, modifiers, options)
        cache = shortened(cache, lengths)

    def run(modifiers: ScoreModifiers, options: Options) -> tuple[jax.Array, jax.Array]:
        chosen = registry.select(
            options.implementation, query=query, cache=cache, options=options, modifiers=modifiers
        )
        call = refuse_gradients(chosen.run, registry.op, options=options)
        out, residual = call(*together(query, cache, real, modifiers))
        return out, residual

    return sinks.after(run, query, real, modifiers, options)


def in_chunks(
    run: Callable[[jax.Array, jax.Array, jax.Array | None], Any],
    query: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    size: int,
) -> Any:
    """Lets `size` newest tokens of every sequence attend at a time, one chunk after another.

    `run` takes queries ``[B, t, N, H]``, how many tokens each sequence then holds, int32 ``[B]``,
    and the real queries, int32 ``[B]`` or None for all; what it gives has tokens as its second
    axis. `lengths` int32 ``[B]`` are tokens held, those of all queries included.
    """
    batch, tokens = query.shape[:2]
    if tokens <= size:
        return run(query, lengths, query_lengths)
    if query_lengths is None:
        query_lengths = jnp.full(batch, tokens, jnp.int32)
    before = lengths - query_lengths

    def chunk(item: tuple[jax.Array, jax.Array]) -> Any:
        first, queries = item
        held = before + jnp.minimum(query_lengths, first + size)
        return run(queries, held, jnp.clip(query_lengths - first, 0, size))

    chunks = jax.lax.map(chunk, (first_tokens(tokens, size), split_tokens(query, size)))
    return jax.tree.map(lambda x: joined_tokens(x, tokens), chunks)


def first_tokens(tokens: int, size: int) -> jax.Array:
    """The first token of each chunk, int32 ``[n]``."""
    return size * jnp.arange(-(-tokens // size), dtype=jnp.int32)


def split_tokens(x: jax.Array, size: int) -> jax.Array:
    """``[B, T, N, H]`` in chunks ``[n, B, size, N, H]``, the last one padded with zeros."""
    batch, tokens = x.shape[:2]
    count = -(-tokens // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - tokens), (0, 0), (0, 0)))
    return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)


def joined_tokens(chunks: jax.Array, tokens: int) -> jax.Array:
    """Chunks ``[n, B, size, ...]`` one after the other, without the padding: ``[B, T, ...]``."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def check_whole(cache: Any, modifiers: ScoreModifiers) -> None:
    """Raises NotImplementedError for queries elsewhere than at the end of a window's cache."""
    if modifiers.query_offset is not None and cache.is_rolling:
        raise NotImplementedError(
            f"query_offset must be None: the cache keeps the newest {cache.room} tokens alone, for "
            f"a window of {cache.window}"
        )


def as_newest(
    query: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers,
    options: Options,
) -> tuple[jax.Array, ScoreModifiers]:
    """Turns a call into one of newest tokens where possible: every implementation can run these.

    A single query without a window sees a cache's tokens up to its own position: it is the newest
    token of a cache that ends there. Returns that cache's lengths, int32 ``[B]``, and the modifiers
    that are left.
    """
    if modifiers.query_offset is None or query.shape[1] != 1 or options.window is not None:
        return lengths, modifiers
    real = _checks.check_lengths("query_seq_lengths", query_lengths, *query.shape[:2])
    seen = modifiers.begin(lengths, real) + 1
    left = dataclasses.replace(modifiers, query_offset=None, key_offset=None)
    return jnp.minimum(lengths, jnp.maximum(seen, 0)), left


def shortened(cache: C, lengths: jax.Array) -> C:
    """A cache with so many tokens; its arrays stay the same."""
    if lengths is cache.lengths:
        return cache
    changed: C = dataclasses.replace(cache, lengths=lengths)
    return changed
