"""Caches whose tokens are split over an axis of a mesh: which slots a device has.

Device `d` of `n` has a contiguous run of the slots of every sequence: those of tokens ``d * size``
to ``(d + 1) * size - 1``. What all devices of the axis have (lengths, and whether a sequence
overflowed) is of whole sequences; arrays with an axis of slots hold the device's own. So inside of
`jax.shard_map` a cache looks like one with fewer slots than its lengths say.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax.caches.exact.cache import ExactCache
from turbojax.caches.kinds import kind_of
from turbojax.caches.paged.layer import PagedLayer
from turbojax.caches.progressive.cache import ProgressiveCache

AxisName = str | tuple[str, ...]
"""An axis of the mesh, or several that split the tokens together, the first the outermost."""


class Run(NamedTuple):
    """The `size` slots of a device, as many on every device.

    `first`, int32 ``[]``, is the token of the first slot; `is_last`, bool ``[]``, says whether no
    other device has later ones.
    """

    first: jax.Array
    size: int
    is_last: jax.Array

    @classmethod
    def of(cls, size: int, axis: AxisName) -> "Run":
        """This device's run of `size` slots; NameError outside a `jax.shard_map` with this axis."""
        index = jax.lax.axis_index(axis).astype(jnp.int32)
        return cls(index * size, size, index == jax.lax.axis_size(axis) - 1)

    def held(self, lengths: jax.Array) -> jax.Array:
        """How many of each sequence's tokens are here: int32 ``[B]``."""
        return jnp.clip(lengths - self.first, 0, self.size)

    def new(self, lengths: jax.Array, count: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """Which of `count` new tokens, of at most `most`, belong here, after `lengths` older ones.

        The first one, and how many from there on; all are int32 ``[B]``.
        """
        begin = jnp.clip(self.first - lengths, 0, most)
        end = jnp.clip(self.first + self.size - lengths, 0, count)
        return begin, jnp.maximum(end - begin, 0)


def run_of_cache(cache: Any, axis: AxisName) -> Run:
    """The slots of a layer's cache that this device has.

    Raises TypeError if it is no cache of a layer, NotImplementedError if tokens of its kind cannot
    be split, ValueError if the devices of the axis have fewer slots together than a sequence may
    grow to: a cache that keeps only a window cannot be split.
    """
    if not kind_of(cache).splits_tokens:
        raise NotImplementedError(
            f"the tokens of a {type(cache).__name__} cannot be split over {axis=}: it is for "
            "comparison"
        )
    size, devices = _slots(cache), int(jax.lax.axis_size(axis))
    limit = needed = length_limit(cache, axis)
    if isinstance(cache, ProgressiveCache):  # what fills no block stays in the buffer
        needed = limit // cache.config.block_kv * cache.config.block_kv
    if devices * size < needed:
        raise ValueError(
            f"{devices} devices of {axis=} with {size} slots each must have {needed} together, for "
            f"max_length={limit}: a cache that keeps a window alone cannot be split"
        )
    return Run.of(size, axis)


def length_limit(cache: Any, axis: AxisName) -> int:
    """Tokens that a sequence may grow to on all devices together."""
    if isinstance(cache, ExactCache) and cache.limit is None:
        return cache.room * int(jax.lax.axis_size(axis))
    limit: int = cache.max_length
    return limit


def _slots(cache: Any) -> int:
    if isinstance(cache, PagedLayer):
        return cache.block_tables.shape[1] * cache.pages.page_size
    slots: int = cache.room
    return slots


def of_run(cache: Any, run: Run) -> Any:
    """A cache of only the tokens in this device's slots, as if they were a text's first."""
    held, changes = run.held(cache.lengths), dict[str, Any]()
    if isinstance(cache, ExactCache):
        return dataclasses.replace(cache, lengths=held, window=None, limit=None)
    if isinstance(cache, ProgressiveCache):
        # All devices have the buffer; the device whose slots come next attends to it.
        compressed = cache.lengths - cache.buffer_lengths
        is_next = (compressed >= run.first) & ((compressed < run.first + run.size) | run.is_last)
        buffered = jnp.where(is_next, cache.buffer_lengths, 0)
        held, changes = run.held(compressed) + buffered, {"buffer_lengths": buffered}
        # Places are used as positions here, see `ProgressiveCache.why_not_in_order`.
        changes["config"] = dataclasses.replace(cache.config, first_tokens=0)
    if any(field.name == "window" for field in dataclasses.fields(cache)):
        changes["window"] = None
    return dataclasses.replace(cache, lengths=held, max_length=run.size, **changes)
