"""Writing to caches whose tokens are split over an axis of a mesh, each device to its own slots.

All devices of the axis have all new tokens and store those of their own slots (`turbojax.parallel.
runs`): there is no collective.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.caches import checks
from turbojax.caches.kinds import kind_of
from turbojax.caches.paged import pool
from turbojax.caches.paged.layer import PagedLayer
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.caches.progressive.update import append_part, store_prompt_part
from turbojax.parallel.runs import AxisName, Run, length_limit, of_run, run_of_cache


def append(
    cache: Any,
    key: jax.Array,
    value: jax.Array,
    axis: AxisName,
    *,
    lengths: jax.Array | None = None,
    implementation: Any = None,
) -> Any:
    """Adds new tokens to a cache whose tokens are split over `axis`, one or many per sequence.

    Args:
      cache: the device's part of one of a layer's caches, of any kind; see
        `turbojax.parallel.partition_specs`.
      key: ``[B, T, K, H]``, the same on all devices of the axis; for a `LatentCache` rotary keys
        ``[B, T, 1, R]``.
      value: the same shape; latents ``[B, T, 1, C]``.
      axis: of the mesh, or several.
      lengths: optional int ``[B]``, how many of the `T` tokens are real, the first ones.
      implementation: the same as that of the `decode` that reads the cache; None to choose.

    Returns:
      The device's part of the extended cache. Tokens past `max_length` are left out, and
      `overflowed` turns True for their sequence, on all devices.

    Raises:
      TypeError: if `cache` is no cache of a layer, or a dtype does not fit.
      ValueError: if a shape does not fit, or the cache keeps only a window.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    kind, run = kind_of(cache), run_of_cache(cache, axis)
    batch, tokens = key.shape[:2]
    lengths = _checks.check_lengths("lengths", lengths, batch, tokens)
    if isinstance(cache, ProgressiveCache):
        return append_part(cache, key, value, lengths, run.first, implementation=implementation)
    accepted = jnp.clip(lengths, 0, jnp.minimum(length_limit(cache, axis) - cache.lengths, tokens))
    begin, count = run.new(cache.lengths, accepted, tokens)
    key, value = (_from(x, begin) for x in (key, value))
    new = kind.append(of_run(cache, run), key, value, lengths=count, implementation=implementation)
    # Computed from numbers of whole sequences only, so that all devices get the same.
    changes = {"lengths": cache.lengths + accepted}
    changes["overflowed"] = cache.overflowed | (lengths > accepted)
    if isinstance(cache, PagedLayer):
        changes["pages"] = dataclasses.replace(new.pages, lost=cache.pages.lost)
    static = {
        field.name: getattr(cache, field.name)
        for field in dataclasses.fields(cache)
        if field.name in ("max_length", "window", "limit")
    }
    return dataclasses.replace(new, **changes, **static)


def store_prompt(
    cache: Any,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    axis: AxisName,
    *,
    implementation: Any = None,
) -> Any:
    """Stores prompts that something else attended to, in empty sequences of a split cache.

    Args:
      cache: see `append`.
      key: ``[B, S, K, H]``, the same on all devices of the axis.
      value: the same.
      lengths: int32 ``[B]``, tokens of each prompt.
      axis: of the mesh, or several.
      implementation: what `prefill` is asked for beside it; None to choose.

    Returns:
      The device's part of the cache with the prompts, as one device would have stored them.

    Raises:
      TypeError, ValueError, NotImplementedError: see `append`.
    """
    if not isinstance(cache, ProgressiveCache):
        return append(cache, key, value, axis, lengths=lengths, implementation=implementation)
    run = run_of_cache(cache, axis)
    return store_prompt_part(cache, key, value, lengths, run.first, implementation=implementation)


def append_to_pages(
    cache: pool.PagedCache,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    axis: AxisName,
    *,
    new_lengths: jax.Array | None = None,
    implementation: Any = None,
) -> pool.PagedCache:
    """Writes new tokens to pages, of which each device has its own pool: `turbojax.paged.append`.

    Args:
      cache: the device's pool.
      key: ``[B, T, K, H]``, the same on all devices of the axis.
      value: the same.
      block_tables: integer ``[B, max_pages]``, the device's part, see
        `turbojax.parallel.paged_attention`.
      lengths: integer ``[B]``, tokens held before, on all devices together.
      axis: of the mesh, or several.
      new_lengths: optional integer ``[B]``, how many of the `T` tokens are real, the first ones.
      implementation: of `turbojax.paged.append`.

    Returns:
      The device's pool. `lost` counts the tokens that are past the table, on all devices alike. One
      without a page is left out and not counted: what attends to it gives NaN.

    Raises:
      TypeError, ValueError, NotImplementedError: see `turbojax.paged.append`.
    """
    checks.check_kind(cache, pool.PagedCache)
    batch, tokens = key.shape[:2]
    lengths = _checks.as_int32("lengths", lengths)
    new_lengths = _checks.check_lengths("new_lengths", new_lengths, batch, tokens)
    run = Run.of(block_tables.shape[1] * cache.page_size, axis)
    room = run.size * jax.lax.axis_size(axis) - lengths
    accepted = jnp.clip(new_lengths, 0, jnp.clip(room, 0, tokens))
    begin, count = run.new(lengths, accepted, tokens)
    key, value = (_from(x, begin) for x in (key, value))
    new = pool.append(
        cache,
        key,
        value,
        block_tables,
        run.held(lengths),
        new_lengths=count,
        implementation=implementation,
    )
    lost = cache.lost + jnp.sum(jnp.maximum(new_lengths, 0) - accepted).astype(jnp.int32)
    return dataclasses.replace(new, lost=lost)


def _from(x: jax.Array, begin: jax.Array) -> jax.Array:
    """``x [B, T, K, H]`` from each sequence's token `begin` on; what follows its last is any."""
    if x.shape[1] == 1:
        return x
    token = jnp.minimum(begin[:, None] + jnp.arange(x.shape[1])[None], x.shape[1] - 1)
    return jnp.take_along_axis(x, token[:, :, None, None], axis=1)
