"""Newest tokens that attend to a cache: where they are in it, where offsets say something else.

Queries are those of a cache's last tokens. With `query_offset` they are elsewhere: where a text's
keys lie in several caches, each is attended to by itself, with the position of its first token as
`key_offset`, and the results are merged.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from turbojax.ops.extras import Extras
from turbojax.ops.options import Options

C = TypeVar("C", bound=Any)


def check_whole(cache: Any, extras: Extras) -> None:
    """Raises NotImplementedError where a cache keeps a window of the newest tokens alone.

    Queries elsewhere would miss what is no longer there.
    """
    if extras.query_offset is not None and cache.is_ring:
        raise NotImplementedError(
            f"query_offset must be None: the cache keeps the newest {cache.room} tokens alone, for "
            f"a window of {cache.window}"
        )


def as_newest(
    query: jax.Array, lengths: jax.Array, query_lengths: jax.Array, extras: Extras, options: Options
) -> tuple[jax.Array, Extras]:
    """The same call as one of newest tokens, if it is: then every implementation can run it.

    A single query without a window sees a cache's tokens up to its own position. It is the newest
    token of a cache that ends there.

    Args:
      query: ``[B, T, N, H]``.
      lengths: int32 ``[B]``, tokens held.
      query_lengths: int32 ``[B]``, the real queries.
      extras: of the call.
      options: of the call.

    Returns:
      How many of the tokens held are to be there, int32 ``[B]``, and the extras that are left.
    """
    if extras.query_offset is None or query.shape[1] != 1 or options.window is not None:
        return lengths, extras
    seen = extras.begin(lengths, query_lengths) + 1
    left = dataclasses.replace(extras, query_offset=None, key_offset=None)
    return jnp.minimum(lengths, jnp.maximum(seen, 0)), left


def shortened(cache: C, lengths: jax.Array) -> C:
    """A cache of which so many tokens are there; none is moved."""
    if lengths is cache.lengths:
        return cache
    changed: C = dataclasses.replace(cache, lengths=lengths)
    return changed
