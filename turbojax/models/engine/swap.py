"""Moving a sequence's pages between the pools of all layers and host memory, bit for bit."""

import functools
from typing import Any

import jax
import numpy as np

from turbojax import paged
from turbojax.models.engine import compilation, split
from turbojax.models.engine.pool_access import Pool
from turbojax.sharding import Axes

Content = list[tuple[dict[str, np.ndarray], ...]]
"""Pages in host memory: groups of pages, of each group the layers, of each layer the arrays."""

# One shape, compiled once; the last group is filled up with -1, which names no page.
_GROUP = 16


def read(caches: tuple[Pool, ...], pages: tuple[int, ...], axes: Axes | None = None) -> list[Any]:
    """Starts to copy pages for `fetch`, without waiting; the pages may be overwritten at once."""
    return [_read(caches, group, axes) for group in _groups(pages)]


def fetch(copies: list[Any]) -> Content:
    """Waits for what `read` began, and brings it to host memory."""
    return [jax.device_get(group) for group in copies]


def write(
    caches: tuple[Pool, ...],
    pages: tuple[int, ...],
    content: Content,
    axes: Axes | None = None,
) -> tuple[Pool, ...]:
    """Writes what was read to other pages, as many as were read; the caches are donated."""
    for group, arrays in zip(_groups(pages), content, strict=True):
        caches = _write(caches, group, arrays, axes)
    return caches


Layers = tuple[tuple[int, ...], ...]
"""Of each group those that have the same pages."""


def read_groups(
    caches: tuple[Pool, ...],
    layers: Layers,
    pages: tuple[tuple[int, ...], ...],
    axes: Axes | None = None,
) -> list[list[Any]]:
    """`read` of each group's pages in the pools of its layers."""
    return [
        read(tuple(caches[layer] for layer in of_group), numbers, axes)
        for of_group, numbers in zip(layers, pages, strict=True)
    ]


def write_groups(
    caches: tuple[Pool, ...],
    layers: Layers,
    pages: tuple[tuple[int, ...], ...],
    content: list[Content],
    axes: Axes | None = None,
) -> tuple[Pool, ...]:
    """`write` of each group's pages to the pools of its layers; returns the pools of all layers."""
    every = list(caches)
    for of_group, numbers, copies in zip(layers, pages, content, strict=True):
        written = write(tuple(every[layer] for layer in of_group), numbers, copies, axes)
        for layer, cache in zip(of_group, written, strict=True):
            every[layer] = cache
    return tuple(every)


def nbytes(content: list[Content]) -> int:
    """Bytes held in host memory by a sequence's pages of all groups."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(content))


def _groups(pages: tuple[int, ...]) -> list[np.ndarray]:
    padded = np.array([*pages, *[-1] * (-len(pages) % _GROUP)], np.int32)
    return list(padded.reshape(-1, _GROUP))


@functools.partial(jax.jit, static_argnames="axes")
def _read(caches: tuple[Pool, ...], pages: jax.Array, axes: Axes | None) -> Any:
    compilation.note()

    def run(caches: tuple[Pool, ...], pages: jax.Array) -> Any:
        return tuple(paged.read_pages(cache, pages) for cache in caches)

    specs = (split.held(caches, axes), split.SAME)
    return split.run_on(run, axes, specs, split.pages_of(caches, axes))(caches, pages)


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="caches")
def _write(
    caches: tuple[Pool, ...], pages: jax.Array, content: Any, axes: Axes | None
) -> tuple[Pool, ...]:
    compilation.note()

    def run(caches: tuple[Pool, ...], pages: jax.Array, content: Any) -> tuple[Pool, ...]:
        return tuple(
            paged.write_pages(cache, pages, arrays)
            for cache, arrays in zip(caches, content, strict=True)
        )

    held = split.held(caches, axes)
    specs = (held, split.SAME, split.pages_of(caches, axes))
    written: tuple[Pool, ...] = split.run_on(run, axes, specs, held)(caches, pages, content)
    return written
