"""Which tokens of a sequence a device holds: in their natural order, or in zig-zag.

Of ``2 n`` chunks device `d` of `n` holds number `d` and number ``2 n - 1 - d`` in zig-zag order: an
early one, whose queries see little, and a late one, whose queries see the more. Under a causal mask
all devices then have the same to do; in the natural order, where device `d` holds the chunks
``2 d`` and ``2 d + 1``, the last one has nearly twice the mean.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from turbojax.sharding.axes import Names

Order = Literal["natural", "zigzag"]
"""``"natural"``: device `d` holds the `d`-th part of the tokens; ``"zigzag"``: see this module."""


def check_order(order: object) -> None:
    """Raises ValueError unless it is one of `Order`."""
    if order not in get_args(Order):
        raise ValueError(f"{order=} must be one of {get_args(Order)}")


def chunks(order: Order, devices: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of the chunks that each of `n` devices holds, in its order: `n` tuples.

    In natural order a device holds one chunk, in zig-zag order two of half the size.
    """
    if order == "natural":
        return tuple((d,) for d in range(devices))
    return tuple((d, 2 * devices - 1 - d) for d in range(devices))


def positions(tokens: int, axis_name: Names, order: Order = "zigzag") -> jax.Array:
    """The positions of this device's tokens, for rotary embeddings and the like.

    Called inside `jax.shard_map`.

    Args:
      tokens: how many this device holds, a multiple of 2 in zig-zag order.
      axis_name: of the mesh, one or several, over which tokens are split.
      order: in which they are.

    Returns:
      int32 ``[tokens]``, which differs between devices.

    Raises:
      ValueError: if the number of tokens or the order does not fit.
    """
    check_order(order)
    devices = jax.lax.axis_size(axis_name)
    held = jnp.asarray(chunks(order, devices), jnp.int32)[jax.lax.axis_index(axis_name)]
    parts = held.shape[0]
    check_chunks(tokens, parts)
    size = tokens // parts
    places = held[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    return places.reshape(tokens)


def permutation(tokens: int, devices: int) -> jax.Array:
    """Where in the natural order the tokens of the zig-zag order are, over all devices.

    ``x[:, permutation(T, n)]`` brings whole sequences into zig-zag order before they are split;
    ``jnp.argsort`` of it leads back.

    Args:
      tokens: of a whole sequence, `T`, a multiple of ``2 n``.
      devices: how many share it, `n`.

    Returns:
      int32 ``[T]``.

    Raises:
      ValueError: if the number of tokens does not fit.
    """
    check_chunks(tokens, 2 * devices)
    size = tokens // (2 * devices)
    order = jnp.asarray(chunks("zigzag", devices), jnp.int32).reshape(-1)
    places = order[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    return places.reshape(tokens)


def check_chunks(tokens: int, parts: int) -> None:
    """Raises ValueError unless so many tokens are `parts` chunks of equal size."""
    if tokens % parts:
        raise ValueError(f"{tokens} tokens must be a multiple of {parts}, chunks of equal size")


def check_blocks(blocks: tuple[int, int], tokens: int, parts: int, devices: int) -> None:
    """Raises ValueError unless a device's tokens are `parts` chunks of whole blocks."""
    for name, block in zip(("block_q", "block_kv"), blocks, strict=True):
        if tokens % (parts * block):
            kind = "two chunks, an early and a late one," if parts == 2 else "one chunk"
            raise ValueError(
                f"{tokens} tokens on each of {devices} devices must be a multiple of "
                f"{parts * block}: {kind} of whole blocks, {name}={block}"
            )


def to_zigzag(x: jax.Array, axis_name: Names, axis: int = 1) -> jax.Array:
    """An array in natural order, in zig-zag order. Differentiable; called inside `jax.shard_map`.

    Two collective permutations of half of it each: chunks of even number, and those of odd number,
    each map onto all devices.

    Args:
      x: this device's part, whose axis `axis` are tokens, a multiple of 2.
      axis_name: of the mesh, one or several, over which tokens are split.
      axis: of the tokens.

    Raises:
      ValueError: if the number of tokens does not fit.
    """
    devices, early, late = _halves(x, axis_name, axis)
    # Chunk 2 d is at home on the device that holds it in zig-zag order, and so is 2 d + 1.
    homes = _homes(devices)
    even, odd = (
        jax.lax.ppermute(x, axis_name, [(d, homes[d][i]) for d in range(devices)])
        for i, x in enumerate((early, late))
    )
    # Device d holds the chunks d and 2 n - 1 - d, one of which is even.
    is_even = _is_even(axis_name)
    return jnp.concatenate(
        [jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=axis
    )


def from_zigzag(x: jax.Array, axis_name: Names, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`, at the same cost."""
    devices, early, late = _halves(x, axis_name, axis)
    is_even = _is_even(axis_name)
    even, odd = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    homes = _homes(devices)
    first, second = (
        jax.lax.ppermute(x, axis_name, [(homes[d][i], d) for d in range(devices)])
        for i, x in enumerate((even, odd))
    )
    return jnp.concatenate([first, second], axis=axis)


def _homes(devices: int) -> list[tuple[int, int]]:
    """For each device the two that hold its chunks of natural order in zig-zag order."""
    held = [min(chunk, 2 * devices - 1 - chunk) for chunk in range(2 * devices)]
    return list(zip(held[::2], held[1::2], strict=True))


def _halves(x: jax.Array, axis_name: Names, axis: int) -> tuple[int, jax.Array, jax.Array]:
    check_chunks(x.shape[axis], 2)
    early, late = jnp.split(x, 2, axis=axis)
    return jax.lax.axis_size(axis_name), early, late


def _is_even(axis_name: Names) -> jax.Array:
    return jax.lax.axis_index(axis_name) % 2 == 0
