"""Masks of Flax's modules, read as lengths, segments or bounds, compared with what is computed."""

import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from turbojax import _checks
from turbojax.attention.options import Visibility


class MaskWarning(UserWarning):
    """A mask under `jit` hides or shows what an attention function cannot, and made NaN of it."""


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """What a function hides besides what lies past a length.

    With `expects_causal` the mask itself must hide later keys: the function is causal, the call is
    not. With `segments` the mask may also hide tokens of other packed sequences, and keys and
    queries anywhere; with `bounds` of each query all keys but some that follow each other. `window`
    is ``(left, right)``.
    """

    is_causal: bool
    expects_causal: bool
    window: tuple[int, int] | None
    segments: bool = False
    bounds: bool = False

    def __str__(self) -> str:
        parts = "keys and queries past a length"
        if self.segments:
            parts = "keys of other segments than the query's, or keys or queries altogether"
        elif self.bounds:
            parts = "keys before and after some that follow each other, for each query"
        text = (
            f"must hide {parts}, for all heads alike, and nothing else but "
            f"what is_causal={self.is_causal} and local_window_size={self.window} hide"
        )
        if not (self.segments or self.bounds):
            text += (
                " (for packed sequences and padding elsewhere take one with segments=True, for "
                "prefix-LMs and images TurboAttentionFn with bounds=True)"
            )
        if self.expects_causal:
            return f"{text}; it {_MUST_BE_CAUSAL}"
        return text if self.is_causal else f"{text}; a causal mask needs is_causal=True"


_MUST_BE_CAUSAL = (
    "must hide the keys after each query, as the function does: combine it with a causal mask, "
    "give is_causal=True to the call, or take a function with is_causal=False"
)


def as_mask(mask: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """A mask as bool ``[B or 1, N or 1, T or 1, S]``.

    Raises TypeError if it is not an array of numbers or bool; ValueError if it cannot be broadcast
    to ``[batch..., N, T, S]``, or, outside `jit`, has negative numbers, as masks have that are
    added to scores.
    """
    mask = jnp.asarray(mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.number)):
        raise TypeError(f"mask.dtype={mask.dtype} must be bool or a number")
    is_number = mask.dtype != jnp.bool_ and mask.size
    if is_number and _checks.is_concrete(mask) and (least := np.min(np.asarray(mask))) < 0:
        raise ValueError(
            f"mask holds {least:g}: must be True, or a number other than 0, where a key is seen, "
            "and is not added to scores"
        )
    batch = query.shape[:-3]
    full = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    shape = (1,) * (len(full) - mask.ndim) + mask.shape
    if len(shape) != len(full) or any(m not in (1, n) for m, n in zip(shape, full, strict=True)):
        raise ValueError(f"{mask.shape=} must be broadcastable to {full}")
    own = (1,) * len(batch) if math.prod(shape[:-3]) == 1 else batch
    visible = mask.astype(jnp.bool_).reshape(shape)
    visible = jnp.broadcast_to(visible, (*own, *shape[-3:-1], full[-1]))
    return visible.reshape(math.prod(own), *visible.shape[-3:])


def read_mask(
    mask: jax.Array, batch: int, tokens: int, rule: MaskRule, warn_for: Hashable | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a mask stands for by its rule: lengths, segments or bounds.

    `mask` is bool ``[B or 1, N or 1, T or 1, S]``, `tokens` is `T`. Under `jit` masks that stand
    for no such thing are warned about, once for each `warn_for`; None for no warning.

    Returns two arrays of int32, and bool ``[B]``: whether they and the rule show exactly what the
    mask shows. False only under `jit`: outside of it such a mask is a ValueError. Under `jit`, too,
    one is raised if the mask's shape says that it shows later keys, and the rule expects it to be
    causal. The arrays are

    - lengths of queries and of keys, ``[B]``;
    - segments of queries, ``[B, T]``, and of keys, ``[B, S]``, -1 for those that no query sees.
      Queries that share a key are of one segment, and a key is of the segment of those that see it.
      So a mask may hide other packed sequences, in a row or interleaved, and keys and queries
      anywhere, as padding on either side;
    - the first key of each query and the one after its last, ``[B, T]`` each, both 0 for a query
      that sees nothing.
    """
    if rule.expects_causal and mask.shape[2] == 1 < tokens and mask.shape[3] > 1:
        raise ValueError(
            f"mask of {tokens} queries and {mask.shape[3]} keys shows the same keys to every "
            f"query; it {_MUST_BE_CAUSAL}"
        )
    read = _read_segments if rule.segments else _read_bounds if rule.bounds else _read_lengths
    found = read(mask, tokens, rule)
    one, other, fits = (jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in found)
    if not _checks.is_concrete(fits):
        _report(fits, rule, warn_for)
    elif wrong := np.flatnonzero(~np.asarray(fits)).tolist():
        raise ValueError(f"mask of sequences {wrong} {rule}")
    return one, other, fits


@functools.partial(jax.jit, static_argnames=("tokens", "rule"))
def _read_lengths(
    mask: jax.Array, tokens: int, rule: MaskRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, _, rows, size = mask.shape
    row, column = jnp.arange(rows)[None], jnp.arange(size)[None]
    visibility = _visibility(rule, rows)

    def shown(query_length: jax.Array, key_length: jax.Array) -> jax.Array:
        visible = (
            visibility.mask(row, column, key_length) & (row < query_length[:, None])[..., None]
        )
        return visible[:, None]

    seen = mask & shown(jnp.full(batch, rows), jnp.full(batch, size))
    key_length = jnp.max(jnp.where(seen.any((1, 2)), column + 1, 0), axis=1)
    query_length = jnp.max(jnp.where(seen.any((1, 3)), row + 1, 0), axis=1)
    fits = (seen == shown(query_length, key_length)).all((1, 2, 3))
    if rows == 1:
        query_length = jnp.full(batch, tokens)
    fits &= ~_shows_later(mask, rule)
    return query_length.astype(jnp.int32), key_length.astype(jnp.int32), fits


@functools.partial(jax.jit, static_argnames=("tokens", "rule"))
def _read_segments(
    mask: jax.Array, tokens: int, rule: MaskRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A segment is named by its first query.

    From a query, take the first key that it sees, and from there the first query that sees this
    key, which is of the same segment. Without a window that is the segment's first query. With one,
    this step is repeated until a query leads to itself. Two queries that share a key arrive at the
    same one: the earlier sees the later one's first key, too.
    """
    batch, _, rows, size = mask.shape
    visibility = _visibility(rule, rows)
    shown = visibility.mask(jnp.arange(rows)[None], jnp.arange(size)[None], jnp.full(batch, size))
    seen = mask & shown[:, None]
    pairs = seen.any(1)
    first_query, first_key = jnp.argmax(pairs, axis=1), jnp.argmax(pairs, axis=2)
    queries = jnp.take_along_axis(first_query, first_key, axis=1)
    queries = jnp.where(pairs.any(2), queries, jnp.arange(rows))  # alone, as it sees nothing
    if rule.window is not None:
        for _ in range((rows - 1).bit_length()):
            queries = jnp.take_along_axis(queries, queries, axis=1)
    keys = jnp.where(pairs.any(1), jnp.take_along_axis(queries, first_query, axis=1), -1)
    alike = queries[:, :, None] == keys[:, None]
    fits = (seen == (shown & alike)[:, None]).all((1, 2, 3)) & ~_shows_later(mask, rule)
    queries = jnp.broadcast_to(queries, (batch, tokens if rows == 1 else rows))
    return queries.astype(jnp.int32), keys.astype(jnp.int32), fits


@functools.partial(jax.jit, static_argnames=("tokens", "rule"))
def _read_bounds(
    mask: jax.Array, tokens: int, rule: MaskRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, _, rows, size = mask.shape
    shown = _visibility(rule, rows).mask(
        jnp.arange(rows)[None], jnp.arange(size)[None], jnp.full(batch, size)
    )
    seen = mask & shown[:, None]
    pairs, key = seen.any(1), jnp.arange(size)[None, None]
    start = jnp.argmax(pairs, axis=2)
    end = jnp.max(jnp.where(pairs, key + 1, 0), axis=2)
    between = (start[:, :, None] <= key) & (key < end[:, :, None])
    fits = (seen == between[:, None]).all((1, 2, 3)) & ~_shows_later(mask, rule)
    if rows == 1:
        start, end = (jnp.broadcast_to(x, (batch, tokens)) for x in (start, end))
    return start.astype(jnp.int32), end.astype(jnp.int32), fits


def _visibility(rule: MaskRule, rows: int) -> Visibility:
    """What a mask of so many rows shows besides what it says itself."""
    if rows == 1:  # of keys alone: all queries see the same, as far as the mask knows
        return Visibility(is_causal=False, window=None)
    return Visibility(rule.is_causal, rule.window)


def _shows_later(mask: jax.Array, rule: MaskRule) -> jax.Array:
    """Whether a mask, bool ``[B]``, shows a key after a query, where the rule says it must not."""
    batch, _, rows, size = mask.shape
    if rows == 1 or not rule.expects_causal:
        return jnp.zeros(batch, bool)
    later = jnp.arange(size)[None] > jnp.arange(rows)[:, None]
    return (mask & later[None, None]).any((1, 2, 3))


def _report(fits: jax.Array, rule: MaskRule, warn_for: Hashable | None) -> None:
    """Reports at run time which masks do not fit: to `checkify`, and as a warning.

    `fits` is reduced to numbers first, which lie on every device of a mesh.
    """
    count, first, whole = jnp.sum(~fits), jnp.argmin(fits), fits.all()
    text = "mask of {count} of {batch} sequences, the first one is {first}, " + f"{rule}"
    checkify.debug_check(whole, text, count=count, batch=jnp.int32(fits.size), first=first)
    if warn_for is None:
        return
    text = text.replace("{batch}", str(fits.size))

    # So the host is called only for a bad mask, except under `vmap`, which runs both branches.
    def call(count: jax.Array, first: jax.Array) -> None:
        jax.debug.callback(functools.partial(_warn, warn_for, text), count, first)

    jax.lax.cond(whole, lambda count, first: None, call, count, first)


_warned: set[Hashable] = set()
_lock = threading.Lock()


def _warn(warn_for: Hashable, text: str, count: jax.Array, first: jax.Array) -> None:
    """Warns of a mask that does not fit, once for each function."""
    if not count:
        return
    with _lock:
        if warn_for in _warned:
            return
        # Marked as warned only after this: a filter may make it an error, to be raised again.
        warnings.warn(
            f"{text.format(count=count, first=first)}. Under jit the outputs of such sequences "
            "are NaN. This is said once; warn=False leaves it out of the compiled program",
            MaskWarning,
            stacklevel=2,
        )
        _warned.add(warn_for)
