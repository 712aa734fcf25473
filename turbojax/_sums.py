"""Checksums of arrays, computed where the arrays are."""

import jax
import jax.numpy as jnp


@jax.jit
def checksums(leaves: dict[str, jax.Array]) -> jax.Array:
    """`[arrays]` uint32, a checksum of each array that any change of a single number changes.

    In the order of their names. Computed on the devices that hold the arrays or their slices: words
    times odd numbers, by their place in the whole array, added modulo 2^32.
    """

    def total(x: jax.Array) -> jax.Array:
        size = min(x.dtype.itemsize, 4)
        words = jax.lax.bitcast_convert_type(x, f"uint{8 * size}").astype(jnp.uint32)
        place, step = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):  # no reshape, which would gather slices
            place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(step)
            step = step * words.shape[axis] % 2**32
        return jnp.sum(words * (2 * place + 1))

    return jnp.stack([total(leaves[name]) for name in sorted(leaves)])
