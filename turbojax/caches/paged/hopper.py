"""Pages on Hopper: which of two kernels runs a call, that of few queries or that of many."""

import functools

import jax

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches.paged import mosaic_gpu, mosaic_prompt
from turbojax.caches.paged.pool import PagedCache

# Query rows of a KV head up to which a call counts as decoding.
_MOST_FEW_ROWS = 64


def _has_many(query: jax.Array | jax.ShapeDtypeStruct, cache: PagedCache) -> bool:
    return query.shape[1] * query.shape[2] // cache.num_kv_heads > _MOST_FEW_ROWS


def has_sinks(query: jax.Array | jax.ShapeDtypeStruct, cache: PagedCache) -> bool:
    """Whether the kernel itself takes sinks."""
    return _has_many(query, cache) and mosaic_prompt.has_sinks(query, cache)


def unsupported(
    *,
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    options: Options,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> str | None:
    """Why `attend` cannot run this here; None if it can."""
    refusal = modifiers.refusal(("sinks",) if has_sinks(query, cache) else ())
    if refusal is not None:
        return refusal
    if _has_many(query, cache):
        return mosaic_prompt.unsupported(query, cache, options)
    return mosaic_gpu.unsupported(
        query=query, cache=cache, block_tables=block_tables, options=options
    )


@functools.partial(jax.jit, static_argnames="options")
def attend(
    query: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    *,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`mosaic_prompt.attend` of many queries, `mosaic_gpu.attend` of few."""
    arrays = query, cache, block_tables, lengths, query_lengths
    if _has_many(query, cache):
        return mosaic_prompt.attend(*arrays, modifiers.sinks, options=options)
    return mosaic_gpu.attend(*arrays, options=options)
