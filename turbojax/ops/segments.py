"""Which blocks of packed sequences have a segment in common."""

import jax
import jax.numpy as jnp


def bounds(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Least and largest id of every block of tokens.

    Args:
      ids: int32 ``[B, T]``.
      block: tokens of a block; the last one may have fewer.

    Returns:
      int32 ``[B, ceil(T / block)]`` twice.
    """
    batch, tokens = ids.shape
    whole = jnp.pad(ids, ((0, 0), (0, -tokens % block)), mode="edge").reshape(batch, -1, block)
    return jnp.min(whole, axis=-1), jnp.max(whole, axis=-1)


def meet(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Pairs of blocks that may have a segment in common: those whose ranges of ids meet.

    These are exactly those that have where queries and keys have the same ascending ids, as those
    of a packed sequence.

    Args:
      query_ids: int32 ``[B, T]``.
      key_ids: int32 ``[B, S]``.
      block_q: queries of a block.
      block_kv: keys of a block.

    Returns:
      bool ``[B, ceil(T / block_q), ceil(S / block_kv)]``.
    """
    q_least, q_largest = (x[:, :, None] for x in bounds(query_ids, block_q))
    k_least, k_largest = (x[:, None, :] for x in bounds(key_ids, block_kv))
    return (q_least <= k_largest) & (k_least <= q_largest)


def key_blocks(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Per block of queries the blocks of keys ``first <= j < last`` outside which none `meet`.

    Args:
      query_ids: int32 ``[B, T]``.
      key_ids: int32 ``[B, S]``.
      block_q: queries of a block.
      block_kv: keys of a block.

    Returns:
      int32 ``[B, ceil(T / block_q), 2]``; ``first == last`` where none does.
    """
    found = meet(query_ids, key_ids, block_q, block_kv)
    count = found.shape[2]
    first = jnp.argmax(found, axis=2)
    last = count - jnp.argmax(found[:, :, ::-1], axis=2)
    last = jnp.where(jnp.any(found, axis=2), last, first)
    return jnp.stack([first, last], axis=-1).astype(jnp.int32)
