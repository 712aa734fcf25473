"""Logits that are split over devices: each device has those of some tokens."""

import jax
import jax.numpy as jnp

from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding import Axes


def gather_logits(logits: jax.Array, vocab_size: int, axes: Axes | None) -> jax.Array:
    """All logits ``[..., V]`` from each device's ``[..., V / n]``, V rounded up, in `shard_map`."""
    over = hidden_axes(axes)
    if not over:
        return logits
    whole = jax.lax.all_gather(logits, over, axis=logits.ndim - 1, tiled=True)
    return whole[..., :vocab_size]


def mask_padding(logits: jax.Array, config: TransformerConfig, axes: Axes | None) -> jax.Array:
    """A device's logits ``[..., V / n]`` with -inf where it has no token; see `gather_logits`."""
    over = hidden_axes(axes)
    if not over:
        return logits
    there = first_token(logits, over) + jnp.arange(logits.shape[-1]) < config.vocab_size
    return jnp.where(there.reshape((1,) * (logits.ndim - 1) + there.shape), logits, -jnp.inf)


def first_token(logits: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """The number of the device's first token, int32."""
    return jax.lax.axis_index(over) * logits.shape[-1]


def likeliest(logits: jax.Array, axes: Axes | None) -> tuple[jax.Array, jax.Array]:
    """The largest logit float32 ``[...]`` and its token int32, the same on all devices.

    As `jnp.argmax` of all logits: of equal logits the first counts, and where one is NaN the first
    NaN. Takes a device's logits ``[..., V / n]`` and one collective of two numbers a row, in
    `shard_map`.
    """
    over = hidden_axes(axes)
    mine = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best = jnp.take_along_axis(logits, mine[..., None], axis=-1)[..., 0]
    if not over:
        return best, mine
    mine = mine + first_token(logits, over)
    # In one array, of integers: as floats tokens would be denormal numbers.
    both = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), mine])
    both = jax.lax.all_gather(both, over)
    every = jax.lax.bitcast_convert_type(both[:, 0], jnp.float32)
    device = jnp.argmax(every, axis=0)[None]
    best, token = (jnp.take_along_axis(x, device, axis=0)[0] for x in (every, both[:, 1]))
    return best, token
