"""Bounds of keys for `turbojax.turbo_attention`: prefix-LMs, images, windows and segments.

Each function gives ``(start, end)``, int32 ``[B, T]`` each, as `key_bounds` takes them: query `t`
is at position `t` of its sequence, and sees keys from ``start[b, t]`` to before ``end[b, t]``. All
of them can be jitted.
"""

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks

Bounds = tuple[jax.Array, jax.Array]
"""Where a query's keys start, and where they end: int32 ``[B, T]`` each."""


def prefix_lm(prefix_lengths: jax.Array, tokens: int) -> Bounds:
    """All tokens see the prefix, and those after it see each other causally (Raffel et al., 2020).

    >>> import jax.numpy as jnp, turbojax as tj
    >>> start, end = tj.bounds.prefix_lm(jnp.array([3]), 5)
    >>> print(start, end)
    [[0 0 0 0 0]] [[3 3 3 4 5]]

    Args:
      prefix_lengths: integers ``[B]``, the tokens of each sequence's prefix; 0 for a causal one.
      tokens: `T`, at least 1.

    Raises:
      TypeError: if the lengths or `tokens` are not integers.
      ValueError: if a shape does not fit, or, outside `jit`, a length is negative or beyond
        `tokens`. Under `jit` a length out of range acts as the nearest bound.
    """
    _checks.check_sizes(tokens=tokens)
    lengths = _checks.as_int32("prefix_lengths", prefix_lengths)
    if lengths.ndim != 1:
        raise ValueError(f"prefix_lengths.shape={lengths.shape} must be [B], one per sequence")
    lengths = _checks.check_lengths("prefix_lengths", lengths, lengths.shape[0], tokens)
    position = jnp.arange(tokens, dtype=jnp.int32)[None]
    end = jnp.maximum(position + 1, jnp.minimum(lengths, tokens)[:, None])
    return jnp.zeros_like(end), end


def image_blocks(token_types: jax.Array, *, local_window_size: int | None = None) -> Bounds:
    """Text is causal, and tokens of one image see all of it, as in Gemma 3 and PaliGemma.

    >>> import jax.numpy as jnp, turbojax as tj
    >>> start, end = tj.bounds.image_blocks(jnp.array([[0, 1, 1, 1, 0]]))
    >>> print(start, end)
    [[0 0 0 0 0]] [[1 4 4 4 5]]

    Args:
      token_types: integers ``[B, T]``: 0 for text, others for images. Neighbours with the same
        number are of one image, so images side by side need different ones; `token_type_ids` of
        Transformers' processors, all 1, have text between images.
      local_window_size: optional: a token sees so many before its own, and of its image the others
        however far they are. The window of `turbo_attention` would cut images on both sides. Where
        it shall cut them on the left, as in Gemma 3's layers with windows since Transformers 5,
        `intersect` these bounds without a window with ``window(batch, tokens, (left, tokens))``.

    Raises:
      TypeError: if the types are not integers.
      ValueError: if they are not ``[B, T]``, or the window is not an integer from 0 on.
    """
    types = _ids("token_types", token_types)
    first, end = _runs(types)
    position = jnp.arange(types.shape[1], dtype=jnp.int32)[None]
    is_image = types != 0
    end = jnp.where(is_image, end, position + 1)
    if local_window_size is None:
        return jnp.zeros_like(end), end
    left, _ = _pair((local_window_size, 0))
    start = jnp.maximum(position - left, 0)
    return jnp.where(is_image, jnp.minimum(start, first), start), end


def window(batch: int, tokens: int, local_window_size: int | tuple[int, int]) -> Bounds:
    """A sliding window of the tokens on either side, for bounds that have other parts, too.

    >>> import jax.numpy as jnp, turbojax as tj
    >>> start, end = tj.bounds.window(1, 5, (2, 0))
    >>> print(start, end)
    [[0 0 0 1 2]] [[1 2 3 4 5]]

    Args:
      batch: `B`.
      tokens: `T`.
      local_window_size: `w` or ``(left, right)``: how many tokens before and after its own a query
        sees, as in `turbojax.turbo_attention`.

    Raises:
      TypeError: if `batch` or `tokens` is not an integer.
      ValueError: if one of them is below 1, or the window is not of integers from 0 on.
    """
    _checks.check_sizes(batch=batch, tokens=tokens)
    left, right = _pair(local_window_size)
    position = jnp.arange(tokens, dtype=jnp.int32)[None]
    start, end = jnp.maximum(position - left, 0), jnp.minimum(position + right + 1, tokens)
    return jnp.broadcast_to(start, (batch, tokens)), jnp.broadcast_to(end, (batch, tokens))


def segments(segment_ids: jax.Array) -> Bounds:
    """A token sees its own segment, in packed sequences.

    >>> import jax.numpy as jnp, turbojax as tj
    >>> start, end = tj.bounds.segments(jnp.array([[7, 7, 7, 2, 2]]))
    >>> print(start, end)
    [[0 0 0 3 3]] [[3 3 3 5 5]]

    Args:
      segment_ids: integers ``[B, T]``; a segment's tokens follow each other. Under `jit` those that
        do not are segments of their own.

    Raises:
      TypeError: if the ids are not integers.
      ValueError: if they are not ``[B, T]``, or, outside `jit`, an id comes again after another.
    """
    ids = _ids("segment_ids", segment_ids)
    if _checks.is_concrete(ids):
        for b, row in enumerate(np.asarray(ids)):
            firsts = row[np.flatnonzero(np.diff(row, prepend=row[:1] - 1))]
            names, counts = np.unique(firsts, return_counts=True)
            if (counts > 1).any():
                raise ValueError(
                    f"segment_ids of sequence {b} have {names[counts > 1][0]} again after others: "
                    "a segment's tokens must follow each other"
                )
    return _runs(ids)


def intersect(*bounds: Bounds) -> Bounds:
    """What all of these bounds show.

    >>> import jax.numpy as jnp, turbojax as tj
    >>> ids = jnp.array([[7, 7, 7, 2, 2]])
    >>> start, end = tj.bounds.intersect(tj.bounds.segments(ids), tj.bounds.window(1, 5, (4, 0)))
    >>> print(start, end)
    [[0 0 0 3 3]] [[1 2 3 4 5]]

    Raises:
      ValueError: if there are none, or their shapes differ.
    """
    shapes = {x.shape for pair in bounds for x in pair}
    if len(shapes) != 1:
        raise ValueError(f"bounds of shapes {sorted(shapes)} must be some, and of one shape")
    start, end = bounds[0]
    for other_start, other_end in bounds[1:]:
        start, end = jnp.maximum(start, other_start), jnp.minimum(end, other_end)
    return start, end


def _ids(name: str, ids: jax.Array) -> jax.Array:
    ids = _checks.as_int32(name, ids)
    if ids.ndim != 2:
        raise ValueError(f"{name}.shape={ids.shape} must be [B, T], one per token")
    return ids


def _pair(window: int | tuple[int, int]) -> tuple[int, int]:
    pair = _checks.normalize_window(window if isinstance(window, tuple) else (window, window))
    assert pair is not None
    return pair


def _runs(ids: jax.Array) -> Bounds:
    """For each token where its run of equal ids starts, and where it ends."""
    tokens = ids.shape[1]
    position = jnp.arange(tokens, dtype=jnp.int32)[None]
    changes = ids[:, 1:] != ids[:, :-1]
    is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    start = jax.lax.cummax(jnp.where(is_first, position, 0), axis=1)
    end = jax.lax.cummin(jnp.where(is_last, position + 1, tokens), axis=1, reverse=True)
    return start, end
