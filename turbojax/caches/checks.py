"""Checks of tokens, prompts and queries against the cache they are for, whatever its kind."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from turbojax import _checks

Cache = Any
"""Has `batch_size`, `num_kv_heads`, `head_dim`, `dtype`, `lengths` and `max_length`."""


def check_kind(cache: Cache, *kinds: type) -> None:
    """Raises TypeError unless `cache` is of this class, or one of these classes."""
    if not isinstance(cache, kinds):
        names = " or a ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"cache is a {type(cache).__name__}, must be a {names}")


def check_arrays(cache: Cache, wanted: Cache, names: Iterable[str]) -> None:
    """Raises ValueError unless these arrays of a cache have the shapes and dtypes of `wanted`."""
    for name in names:
        leaf, want = _describe(getattr(cache, name)), _describe(getattr(wanted, name))
        if leaf != want:
            raise ValueError(
                f"cache.{name} is {leaf}, must be {want} for kv_dtype={cache.kv_dtype!r}"
            )


def _describe(x: jax.Array | None) -> str:
    return "None" if x is None else f"{x.dtype}{list(x.shape)}"


def check_tokens(cache: Cache, key: jax.Array, value: jax.Array) -> None:
    """Raises unless `key` and `value` are tokens for this cache."""
    _checks.check_key_value(key, value)
    expected = (cache.batch_size, cache.num_kv_heads, cache.head_dim)
    if (key.shape[0], key.shape[2], key.shape[3]) != expected:
        batch, heads, channels = expected
        raise ValueError(
            f"{key.shape=} must be [{batch}, T, {heads}, {channels}], as the cache was made for"
        )
    if key.dtype != cache.dtype:
        raise TypeError(f"key.dtype={key.dtype} must equal cache.dtype={cache.dtype}")


def check_room(cache: Cache, lengths: jax.Array) -> None:
    """Raises unless there is room for this many tokens; under `jit`, lengths cannot be seen."""
    if _checks.is_concrete(lengths, cache.lengths):
        total = np.asarray(cache.lengths) + np.asarray(lengths)
        if np.any(total > cache.max_length):
            raise ValueError(
                f"appending would give lengths {total.tolist()}, "
                f"which must be at most max_length={cache.max_length}"
            )


def check_prompt_lengths(cache: Cache, lengths: jax.Array) -> None:
    """Raises unless prompts fit empty sequences; under `jit`, lengths cannot be seen."""
    if _checks.is_concrete(lengths, cache.lengths):
        held, new = np.asarray(cache.lengths), np.asarray(lengths)
        if np.any((held > 0) & (new > 0)):
            raise ValueError(f"cache.lengths={held.tolist()} must be 0: prefill starts a sequence")
        if np.any(new > cache.max_length):
            raise ValueError(
                f"prompt lengths {new.tolist()} must be at most max_length={cache.max_length}"
            )


def check_query(cache: Cache, query: jax.Array) -> None:
    """Raises unless `query` is ``[B, T, N, H]`` for this cache."""
    _checks.check_query(query)
    if query.dtype != cache.dtype:
        raise TypeError(f"query.dtype={query.dtype} must equal cache.dtype={cache.dtype}")
    if (query.shape[0], query.shape[3]) != (cache.batch_size, cache.head_dim):
        raise ValueError(
            f"{query.shape=} must be [{cache.batch_size}, T, N, {cache.head_dim}], "
            "as the cache was made for"
        )
    _checks.check_head_groups(query.shape[2], cache.num_kv_heads)


def check_prompt(
    cache: Cache,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None,
) -> jax.Array:
    """Raises unless a prompt's arrays fit together and into this cache; gives int32 lengths."""
    check_tokens(cache, key, value)
    batch, size = key.shape[:2]
    if query.ndim != 4 or query.shape[1] != size:
        raise ValueError(f"{query.shape=} must be [B, {size}, N, H]: one query per key")
    _checks.check_query_key_value(query, key, value)
    lengths = _checks.check_lengths("key_value_seq_lengths", lengths, batch, size)
    check_prompt_lengths(cache, lengths)
    return lengths
