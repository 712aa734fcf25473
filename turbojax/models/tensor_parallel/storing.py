"""Split caches as one device would have them, for files, and such caches split again.

Most arrays of a split cache lie together as one device has them. There are two exceptions: pages
are counted by each device from its own first one, and what all devices of the sequence's axis have
alike lies side by side (`turbojax.sharding.specs.Split.COPIES`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from turbojax.caches import PagedLayer
from turbojax.caches.progressive.cache import CacheSide, ProgressiveCache
from turbojax.sharding import Axes
from turbojax.sharding.specs import axes_of, shardings


def joined(cache: Any, axes: Axes) -> Any:
    """A layer's split cache of any kind as one device would have it, in host memory."""
    for x in jax.tree.leaves(cache):
        if not x.is_fully_addressable:
            raise NotImplementedError(
                "caches that are split over devices of several processes cannot be stored"
            )
    cache = jax.device_get(cache)
    if isinstance(cache, PagedLayer):
        tables = cache.block_tables + _first_pages(cache, axes)
        return dataclasses.replace(cache, block_tables=tables)
    return _without_copies(cache, axes) if isinstance(cache, ProgressiveCache) else cache


def split(cache: Any, axes: Axes) -> Any:
    """The inverse of `joined`: the cache of one device on the devices of a mesh.

    Its pages are in the order of sequences, and its length is one of `specs.whole_slots`.
    """
    if axes.size("sequence") > 1 and getattr(cache, "is_rolling", False):
        raise ValueError(
            f"a cache that keeps a window of {cache.window} tokens alone cannot be split over "
            f"{axes.of_dimension('sequence')}"
        )
    cache = jax.device_get(cache)
    if isinstance(cache, PagedLayer):
        cache = _pages_by_device(cache, axes)
    elif isinstance(cache, ProgressiveCache):
        cache = _with_copies(cache, axes)
    placed: Any = jax.device_put(cache, shardings(cache, axes))
    return placed


def _first_pages(cache: PagedLayer, axes: Axes) -> np.ndarray:
    """The first page of the device of each entry of the tables, int32 ``[B, max_pages]``."""
    devices = [axes.size("batch"), axes.size("sequence")]
    own = cache.pages.num_pages // math.prod(devices)
    row, column = (
        np.arange(size, dtype=np.int32) // (size // count)
        for size, count in zip(cache.block_tables.shape, devices, strict=True)
    )
    return (row[:, None] * np.int32(devices[1]) + column) * np.int32(own)


def _pages_by_device(cache: PagedLayer, axes: Axes) -> PagedLayer:
    """Puts each device's pages together, and counts them in the tables from its first one."""
    batch, entries = cache.batch_size, cache.rolling_pages
    devices = axes.size("batch"), axes.size("sequence")
    if batch % devices[0] or entries % devices[1]:
        raise ValueError(
            f"{batch} sequences of {entries} pages must be multiples of {devices}, to be split "
            f"over {axes.of_dimension('batch')} and {axes.of_dimension('sequence')}"
        )
    # Pages in the order of sequences are to be in that of devices.
    shape = (devices[0], batch // devices[0], devices[1], entries // devices[1])
    numbers = np.arange(batch * entries, dtype=np.int32).reshape(shape)
    order = np.swapaxes(numbers, 1, 2).reshape(-1)
    pages = cache.pages
    moved: dict[str, Any] = {
        name: np.asarray(x)[order]
        for name in pages.PAGE_ARRAYS
        if (x := getattr(pages, name)) is not None
    }
    places = np.empty_like(order)
    places[order] = np.arange(order.size, dtype=np.int32)
    tables = places[cache.block_tables] - _first_pages(cache, axes)
    return dataclasses.replace(
        cache, pages=dataclasses.replace(pages, **moved), block_tables=tables
    )


def _without_copies(cache: ProgressiveCache, axes: Axes) -> ProgressiveCache:
    """Keeps one of the copies that the devices of the sequence's axis have."""

    def first(x: np.ndarray, axis: int, parts: int, copies: int) -> np.ndarray:
        of_parts = x.reshape(*x.shape[:axis], parts, copies, -1, *x.shape[axis + 1 :])
        return of_parts.take(0, axis + 1).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def whole(side: CacheSide) -> CacheSide:
        side = _change(side, axes, first)
        if len(side.codes) > 1:
            return side
        # Of one width nobody reads slots: every device has those of its own heads alone.
        heads = side.head_slots.shape[1]
        slots = np.arange(heads, dtype=np.int32) % (side.heads_per_group or heads)
        every: Any = np.tile(slots, (len(side.head_slots), 1))
        return dataclasses.replace(side, head_slots=every)

    return dataclasses.replace(cache, key=whole(cache.key), value=whole(cache.value))


def _with_copies(cache: ProgressiveCache, axes: Axes) -> ProgressiveCache:
    """The inverse of `_without_copies`."""

    def copied(x: np.ndarray, axis: int, parts: int, copies: int) -> np.ndarray:
        of_parts = x.reshape(*x.shape[:axis], parts, 1, -1, *x.shape[axis + 1 :])
        of_parts = np.repeat(of_parts, copies, axis=axis + 1)
        return of_parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    key, value = (_change(side, axes, copied) for side in (cache.key, cache.value))
    return dataclasses.replace(cache, key=key, value=value)


def _change(side: CacheSide, axes: Axes, change: Callable[..., np.ndarray]) -> CacheSide:
    """Applies ``change(x, axis, parts, copies)`` to every array of which devices have copies.

    The copies lie along an axis that is split into so many parts, side by side in each of them.
    """
    is_split = side.block_scale.shape[1] > 1
    changes: dict[str, Any] = {}
    for name, axis in side.COPIES.items():
        parts = axes.count(axes_of(side.AXES[name][axis], axes)) if is_split else 1
        changes[name] = change(getattr(side, name), axis, parts, axes.size("sequence"))
    return dataclasses.replace(side, **changes)
