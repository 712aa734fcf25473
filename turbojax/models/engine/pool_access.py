"""How an engine's step writes and reads pools of pages: those of keys and values, or of latents."""

from collections.abc import Callable
from typing import Any

import jax

from turbojax import paged
from turbojax.attention.optional_arrays import NOTHING, Extras
from turbojax.attention.options import PLAIN, Options
from turbojax.caches import holds_latents
from turbojax.caches import latent as latent_attention
from turbojax.caches import paged as paged_attention
from turbojax.caches.latent.kind import split_query, tokens_of

Pool = paged.PagedCache | paged.LatentPages
"""The pages of a layer."""

_Access = Callable[..., Any]


def access_to(pool: Pool) -> tuple[_Access, _Access]:
    """What appends to such a pool, and what attends to it.

    Their arguments are those of `turbojax.paged.append` and
    `turbojax.caches.paged.attend_pages`; queries, keys and values of latents are as
    `turbojax.caches.latent.kind` says.
    """
    if holds_latents(pool):
        return _append_latents, _attend_latents
    return paged.append, paged_attention.attend_pages


def check_call(
    implementation: str | None,
    pool: Pool,
    block_tables: jax.Array | jax.ShapeDtypeStruct,
    rows: int,
    tokens: int,
    num_heads: int,
) -> None:
    """Checks attention to a layer's pages, with `tokens` queries in each row; compiles nothing.

    Raises ValueError if the implementation's name is unknown, and NotImplementedError if it cannot
    run this here.
    """

    def query(channels: int) -> Any:
        return jax.ShapeDtypeStruct((rows, tokens, num_heads, channels), pool.dtype)

    if isinstance(pool, paged.LatentPages):
        options = PLAIN.complete(pool.latent_dim + pool.rope_dim)
        queries = query(pool.latent_dim), query(pool.rope_dim)
        latent_attention.select(implementation, *queries, pool, block_tables, options=options)
        return
    options = PLAIN.complete(pool.head_dim)
    queries = query(pool.head_dim)
    paged_attention.select(implementation, queries, pool, block_tables, options=options)


def _append_latents(
    pool: paged.LatentPages,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    new_lengths: jax.Array | None = None,
) -> paged.LatentPages:
    latent, rope = tokens_of(key, value)
    return paged.append_latents(pool, latent, rope, block_tables, lengths, new_lengths=new_lengths)


def _attend_latents(
    query: jax.Array,
    pool: paged.LatentPages,
    block_tables: jax.Array,
    lengths: jax.Array,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    extras: Extras = NOTHING,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    if refusal := extras.refusal():
        raise NotImplementedError(f"latent_attention cannot run here: {refusal}")
    return latent_attention.attend_latents(
        *split_query(query, pool.latent_dim),
        pool,
        block_tables,
        lengths,
        query_lengths,
        options=options,
        implementation=implementation,
    )
