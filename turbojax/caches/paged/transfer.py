"""Whole pages of a pool: copied for copy on write, read and written to move them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax.caches import checks
from turbojax.caches.latent.pages import LatentPages
from turbojax.caches.paged import checks as page_checks
from turbojax.caches.paged.pool import PagedCache
from turbojax.caches.paged.writing import page_arrays

PoolT = TypeVar("PoolT", bound=PagedCache | LatentPages)


def copy_pages(cache: PoolT, sources: jax.Array, destinations: jax.Array) -> PoolT:
    """Copies pages inside the pool, all at once: every source is read before a page is written.

    Args:
      cache: the pool, a `PagedCache` or `LatentPages`.
      sources: integer ``[n]``, pages to read; -1 is padding.
      destinations: integer ``[n]``, pages to overwrite; -1 is padding.

    Returns:
      The pool with the copies. A pair with a -1 does nothing. Under `jit`, a pair with another
      number outside the pool does nothing either, and `dropped_tokens` counts its tokens.

    Raises:
      TypeError: if `cache` is another kind or the numbers are not integers.
      ValueError: if the shapes are not ``[n]``, or, outside `jit`, a number is neither -1 nor in
        the pool, or two copies (pairs without a -1) have one destination.
    """
    checks.check_kind(cache, PagedCache, LatentPages)
    sources = page_checks.check_page_numbers(cache, "sources", sources, None)
    destinations = page_checks.check_page_numbers(cache, "destinations", destinations, sources.size)
    page_checks.check_destinations("destinations", destinations, sources)
    return _copy(cache, sources, destinations)


def read_pages(cache: PoolT, pages: jax.Array) -> dict[str, jax.Array]:
    """The stored content of pages, for instance to keep it in host memory.

    Args:
      cache: the pool, a `PagedCache` or `LatentPages`.
      pages: integer ``[n]``; -1 is padding.

    Returns:
      By field name (`key`, `value`, and for turbo4 `key_norm`, `value_norm`; of `LatentPages`
      `latent`, `rope`, and perhaps `scale`), what ``cache.key[pages]`` would be: ``[n, K,
      page_size, ...]``, of latents ``[n, page_size, ...]``. Padding reads as NaN (as 0 where the
      field holds codes), as does, under `jit`, a number outside the pool.

    Raises:
      TypeError: if `cache` is another kind or the numbers are not integers.
      ValueError: if their shape is not ``[n]``, or, outside `jit`, one is neither -1 nor in the
        pool.
    """
    checks.check_kind(cache, PagedCache, LatentPages)
    return _read(cache, page_checks.check_page_numbers(cache, "pages", pages, None))


def write_pages(cache: PoolT, pages: jax.Array, content: Mapping[str, jax.Array]) -> PoolT:
    """Overwrites pages with what `read_pages` gave, to the bit.

    Args:
      cache: the pool, a `PagedCache` or `LatentPages`.
      pages: integer ``[n]``; -1 is padding, its content is not used.
      content: arrays (of jax or numpy) by field name, as `read_pages` returns them.

    Returns:
      The pool with the pages. Under `jit`, a number outside the pool other than -1 is not written,
      and `dropped_tokens` counts its tokens.

    Raises:
      TypeError: if `cache` is another kind, the numbers are not integers or a dtype differs.
      ValueError: if a field is missing or unknown, a shape does not fit, or, outside `jit`, a
        number is neither -1 nor in the pool, or a page is named twice.
    """
    checks.check_kind(cache, PagedCache, LatentPages)
    pages = page_checks.check_page_numbers(cache, "pages", pages, None)
    page_checks.check_destinations("pages", pages)
    arrays = page_arrays(cache)
    if set(content) != set(arrays):
        raise ValueError(f"content has {sorted(content)}, must have {sorted(arrays)}")
    for name, old in arrays.items():
        new = content[name]
        if new.shape != (pages.size, *old.shape[1:]):
            raise ValueError(
                f"content[{name!r}].shape={new.shape} must be {(pages.size, *old.shape[1:])}"
            )
        if new.dtype != old.dtype:
            raise TypeError(f"content[{name!r}].dtype={new.dtype} must be {old.dtype}")
    return _write(cache, pages, {name: jnp.asarray(content[name]) for name in arrays})


@jax.jit
def _copy(cache: PoolT, sources: jax.Array, destinations: jax.Array) -> PoolT:
    asked = (sources != -1) & (destinations != -1)
    readable = (sources >= 0) & (sources < cache.num_pages)
    destinations = jnp.where(asked & ~readable, cache.num_pages, destinations)
    return _write(cache, jnp.where(asked, destinations, -1), _read(cache, sources))


@jax.jit
def _read(cache: PoolT, pages: jax.Array) -> dict[str, jax.Array]:
    # A negative number would count from the end.
    pages = jnp.where(pages < 0, cache.num_pages, pages)

    def read(x: jax.Array) -> jax.Array:
        fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        return x.at[pages].get(mode="fill", fill_value=fill)

    return {name: read(x) for name, x in page_arrays(cache).items()}


@jax.jit
def _write(cache: PoolT, pages: jax.Array, content: dict[str, jax.Array]) -> PoolT:
    inside = (pages >= 0) & (pages < cache.num_pages)
    dropped_tokens = jnp.sum((pages != -1) & ~inside, dtype=jnp.int32) * cache.page_size
    # Dropped by the scatter, and no page named twice.
    nowhere = cache.num_pages + jnp.arange(pages.size, dtype=jnp.int32)
    pages = jnp.where(inside, pages, nowhere)
    arrays: dict[str, Any] = {
        name: old.at[pages].set(content[name], mode="drop", unique_indices=True)
        for name, old in page_arrays(cache).items()
    }
    return dataclasses.replace(
        cache, dropped_tokens=cache.dropped_tokens + dropped_tokens, **arrays
    )
