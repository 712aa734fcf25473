"""`store_and_attend`: a decode step's two calls in one, and where it can be in one kernel."""

from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._registry import ImplementationName
from turbojax.attention.options import Options, require_causal
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers, of_layer
from turbojax.caches.paged import api, mosaic_gpu, pool
from turbojax.caches.paged.pool import APPEND, PagedCache
from turbojax.sharding import tables, together
from turbojax.sharding.per_device import per_device


def append_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    new_lengths: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output_dtype: jax.typing.DTypeLike | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
) -> tuple[jax.Array | tuple[jax.Array, jax.Array], PagedCache]:
    """Writes new tokens to pages, and attends their queries to all tokens so far.

    The bits are those of `turbojax.paged.append`, then `paged_attention`. Under `jit` on Hopper one
    kernel does both where there is one token of each sequence, keys and values are stored alike in
    16, 8 or 4 bits, heads have 128 channels, at most eight of queries for one of keys, the
    sequences times the heads of keys are at most 128, and there are no sinks: the program that
    reads a sequence's last block also writes its token. Donate the pool.

    Args:
      query: ``[B, T, N, H]`` in `cache.dtype`, after the rotary embedding.
      key: ``[B, T, K, H]``, as the query.
      value: the same shape and dtype.
      cache: the pool.
      block_tables: as `paged_attention`.
      lengths: integer ``[B]``, tokens held before.
      new_lengths: optional integer ``[B]``: how many of the `T` tokens belong to each sequence, the
        first ones; all of them if not given. Queries of the others are padding.
      scale: as `paged_attention`.
      local_window_size: as `paged_attention`.
      logits_soft_cap: as `paged_attention`.
      sinks: as `paged_attention`.
      output_dtype: as `paged_attention`.
      implementation: as `paged_attention`; what writes is chosen.
      return_residual: as `paged_attention`.

    Returns:
      The results of `paged_attention`, and the pool as `turbojax.paged.append` leaves it.

    Raises:
      TypeError: as both.
      ValueError: as both.
      NotImplementedError: as both.
    """
    _checks.check_query(query)
    options = Options.complete(
        query.shape[3],
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        output_dtype=output_dtype,
        implementation=implementation,
        residual=return_residual,
    )
    (out, residual), cache = store_and_attend(
        query,
        key,
        value,
        cache,
        block_tables,
        lengths,
        new_lengths,
        new_lengths,
        options=options,
        modifiers=of_layer(query, sinks),
    )
    return (out, residual) if return_residual else out, cache


def store_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    *,
    options: Options,
    max_length: int | None = None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[tuple[jax.Array, jax.Array], PagedCache]:
    """`turbojax.paged.append`, then attention to all that is held, its log-sum-exp too.

    Arguments are those of both; `lengths` are those before. With a `max_length` and without
    `new_lengths`, tokens past it are left out. All bits are the same, however many kernels run:
    outside `jit` those of two calls, which are checked.
    """
    require_causal(options)
    block_tables, lengths = pool.check_arguments(cache, key, value, block_tables, lengths)
    api.check_query(cache, query)
    batch, tokens = key.shape[:2]
    if new_lengths is not None or max_length is None:
        new_lengths = _checks.check_lengths("new_lengths", new_lengths, batch, tokens)
    if not _is_one(query, key, cache, block_tables, lengths, modifiers, options):
        if new_lengths is None:
            assert max_length is not None
            new_lengths = jnp.clip(max_length - lengths, 0, tokens)
        where = block_tables, lengths
        cache = pool.append(cache, key, value, *where, new_lengths=new_lengths)
        held = lengths + jnp.clip(new_lengths, 0, tokens)
        after = (query, cache, block_tables, held, query_lengths)
        return api.attend(*after, options=options, modifiers=modifiers), cache
    if query_lengths is not None:
        query_lengths = _checks.check_lengths("query_seq_lengths", query_lengths, batch, 1)
    run = per_device(tables.PAGED_APPEND_AND_ATTEND, _run, options=options, max_length=max_length)
    call = refuse_gradients(run, "append_and_attend")
    arrays = (query, key, value, cache, block_tables, lengths, new_lengths, query_lengths)
    results: tuple[tuple[jax.Array, jax.Array], PagedCache] = call(*arrays)
    return results


def _is_one(
    query: jax.Array,
    key: jax.Array,
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    modifiers: ScoreModifiers,
    options: Options,
) -> bool:
    """Whether one kernel does both: where each would be Mosaic's, and there is nothing to check."""
    if modifiers.refusal() is not None or _checks.is_concrete(block_tables, lengths):
        return False
    attends = api.select(query, cache, block_tables, options=options, modifiers=modifiers)
    writes = APPEND.select(None, cache=cache, key=key, block_tables=block_tables)
    is_mosaic = attends.name == writes.name == "mosaic_gpu"
    return is_mosaic and mosaic_gpu.stores(cache, query)


def _run(*arrays: Any, **static: Any) -> tuple[tuple[jax.Array, jax.Array], PagedCache]:
    results: tuple[tuple[jax.Array, jax.Array], PagedCache]
    results = mosaic_gpu.append_and_attend(*together(*arrays), **static)
    return results
