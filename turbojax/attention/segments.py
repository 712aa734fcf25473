"""Which blocks of packed sequences have a segment in common."""

import jax
import jax.numpy as jnp


def bounds(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest id of every block of tokens: int32 ``[B, ceil(T / block)]`` twice."""
    batch, tokens = ids.shape
    whole = jnp.pad(ids, ((0, 0), (0, -tokens % block)), mode="edge").reshape(batch, -1, block)
    return jnp.min(whole, axis=-1), jnp.max(whole, axis=-1)


def meet(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Pairs of blocks whose ranges of ids meet, bool ``[B, query blocks, key blocks]``.

    Others have no segment in common. Where queries and keys have the same ascending ids, as in
    packed sequences, exactly the pairs that meet have one.
    """
    q_least, q_largest = (x[:, :, None] for x in bounds(query_ids, block_q))
    k_least, k_largest = (x[:, None, :] for x in bounds(key_ids, block_kv))
    return (q_least <= k_largest) & (k_least <= q_largest)


def key_blocks(query_ids: jax.Array, key_ids: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """Per block of queries the blocks of keys ``first <= j < last`` outside which none `meet`.

    int32 ``[B, ceil(T / block_q), 2]``; ``first == last`` where none does.
    """
    found = meet(query_ids, key_ids, block_q, block_kv)
    count = found.shape[2]
    first = jnp.argmax(found, axis=2)
    last = count - jnp.argmax(found[:, :, ::-1], axis=2)
    last = jnp.where(jnp.any(found, axis=2), last, first)
    return jnp.stack([first, last], axis=-1).astype(jnp.int32)
