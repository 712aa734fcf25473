"""Caches whose tokens are split over an axis of a mesh: whose slots are whose, and writing.

Device `d` of `n` has a contiguous run of the slots of every sequence: those of tokens ``d * size``
to ``(d + 1) * size - 1``. What all devices of the axis have (lengths, and whether a sequence
overflowed) is of whole sequences; arrays with an axis of slots hold the device's own. So inside of
`jax.shard_map` a cache looks like one with fewer slots than its lengths say. All devices have all
new tokens and store those of their own slots: there is no collective.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.caches import checks
from turbojax.caches.exact.cache import ExactCache
from turbojax.caches.kinds import kind_of
from turbojax.caches.paged import pool
from turbojax.caches.paged.layer import PagedLayer
from turbojax.caches.progressive.cache import ProgressiveCache
from turbojax.caches.progressive.update import append_part, store_prompt_part

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
    writer = kind.writer(implementation, tokens)
    new = kind.append(of_run(cache, run), key, value, lengths=count, implementation=writer)
    # Computed from numbers of whole sequences only, so that all devices get the same.
    changes = {"lengths": cache.lengths + accepted}
    changes["overflowed"] = cache.overflowed | (lengths > accepted)
    if isinstance(cache, PagedLayer):
        changes["pages"] = dataclasses.replace(new.pages, dropped_tokens=cache.pages.dropped_tokens)
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

    As `append`, with `lengths` int32 ``[B]`` of the prompts and the `implementation` that `prefill`
    is asked for beside it. Returns the device's part of the cache with the prompts, as one device
    would have stored them.
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

    Arguments and errors are those of `turbojax.paged.append`, but that `cache` is the device's
    pool, `block_tables` (integer ``[B, max_pages]``) the device's part, see `paged_attention`, and
    `lengths` are of all devices together; keys and values are the same on all devices of `axis`.

    Returns:
      The device's pool. `dropped_tokens` counts the tokens that are past the table, on all devices
      alike. One without a page is left out and not counted: what attends to it gives NaN.
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
    dropped_tokens = cache.dropped_tokens + jnp.sum(jnp.maximum(new_lengths, 0) - accepted).astype(
        jnp.int32
    )
    return dataclasses.replace(new, dropped_tokens=dropped_tokens)


def _from(x: jax.Array, begin: jax.Array) -> jax.Array:
    """``x [B, T, K, H]`` from each sequence's token `begin` on; what follows its last is any."""
    if x.shape[1] == 1:
        return x
    token = jnp.minimum(begin[:, None] + jnp.arange(x.shape[1])[None], x.shape[1] - 1)
    return jnp.take_along_axis(x, token[:, :, None, None], axis=1)
