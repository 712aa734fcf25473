"""Moving a sequence's pages between the pools of all layers and host memory, bit for bit."""

import functools
from typing import Any

import jax
import numpy as np

from turbojax import paged
from turbojax.models.engine import compilation
from turbojax.models.engine.access import Pool

Content = list[tuple[dict[str, np.ndarray], ...]]
"""Pages in host memory: groups of pages, of each group the layers, of each layer the arrays."""

# One shape, compiled once; the last group is filled up with -1, which names no page.
_GROUP = 16


def read(caches: tuple[Pool, ...], pages: tuple[int, ...]) -> list[Any]:
    """Starts to copy pages on the device, without waiting; the pages may be overwritten after that.

    Args:
      caches: one per layer.
      pages: page numbers.

    Returns:
      What `fetch` takes.
    """
    return [_read(caches, group) for group in _groups(pages)]


def fetch(copies: list[Any]) -> Content:
    """Waits for what `read` began, and brings it to host memory.

    Args:
      copies: as `read` gave them.
    """
    return [jax.device_get(group) for group in copies]


def write(caches: tuple[Pool, ...], pages: tuple[int, ...], content: Content) -> tuple[Pool, ...]:
    """Writes what was read to other pages.

    Args:
      caches: one per layer, donated.
      pages: as many page numbers as were read.
      content: what to write.
    """
    for group, arrays in zip(_groups(pages), content, strict=True):
        caches = _write(caches, group, arrays)
    return caches


Layers = tuple[tuple[int, ...], ...]
"""Of each group those that have the same pages."""


def read_groups(
    caches: tuple[Pool, ...], layers: Layers, pages: tuple[tuple[int, ...], ...]
) -> list[list[Any]]:
    """`read` of each group's pages in the pools of its layers."""
    return [
        read(tuple(caches[layer] for layer in of_group), numbers)
        for of_group, numbers in zip(layers, pages, strict=True)
    ]


def write_groups(
    caches: tuple[Pool, ...],
    layers: Layers,
    pages: tuple[tuple[int, ...], ...],
    content: list[Content],
) -> tuple[Pool, ...]:
    """`write` of each group's pages to the pools of its layers; gives those of all layers."""
    every = list(caches)
    for of_group, numbers, copies in zip(layers, pages, content, strict=True):
        written = write(tuple(every[layer] for layer in of_group), numbers, copies)
        for layer, cache in zip(of_group, written, strict=True):
            every[layer] = cache
    return tuple(every)


def nbytes(content: list[Content]) -> int:
    """Bytes held in host memory by a sequence's pages of all groups."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(content))


def _groups(pages: tuple[int, ...]) -> list[np.ndarray]:
    padded = np.array([*pages, *[-1] * (-len(pages) % _GROUP)], np.int32)
    return list(padded.reshape(-1, _GROUP))


@jax.jit
def _read(caches: tuple[Pool, ...], pages: jax.Array) -> Any:
    compilation.note()
    return tuple(paged.read_pages(cache, pages) for cache in caches)


@functools.partial(jax.jit, donate_argnames="caches")
def _write(caches: tuple[Pool, ...], pages: jax.Array, content: Any) -> tuple[Pool, ...]:
    compilation.note()
    return tuple(
        paged.write_pages(cache, pages, arrays)
        for cache, arrays in zip(caches, content, strict=True)
    )
