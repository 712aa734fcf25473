"""Logits of which each device has those of some tokens."""

import jax
import jax.numpy as jnp

from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding import Axes


def gather_logits(logits: jax.Array, config: TransformerConfig, axes: Axes | None) -> jax.Array:
    """Logits ``[..., V]`` of the whole vocabulary from those of each device.

    Args:
      logits: ``[..., V / n]`` of the device's tokens, V rounded up.
      config: of the model.
      axes: over which it is split, within `shard_map`, or None.
    """
    over = hidden_axes(axes)
    if not over:
        return logits
    whole = jax.lax.all_gather(logits, over, axis=logits.ndim - 1, tiled=True)
    return whole[..., : config.vocab_size]


def mask_padding(logits: jax.Array, config: TransformerConfig, axes: Axes | None) -> jax.Array:
    """Logits ``[..., V / n]`` with -inf where the device has no token; see `gather_logits`."""
    over = hidden_axes(axes)
    if not over:
        return logits
    there = first_token(logits, over) + jnp.arange(logits.shape[-1]) < config.vocab_size
    return jnp.where(there.reshape((1,) * (logits.ndim - 1) + there.shape), logits, -jnp.inf)


def first_token(logits: jax.Array, over: tuple[str, ...]) -> jax.Array:
    """The first of the device's tokens, int32."""
    return jax.lax.axis_index(over) * logits.shape[-1]


def greedy(logits: jax.Array, axes: Axes | None) -> jax.Array:
    """The likeliest token, the first of equals; where one is NaN the first of these.

    As `jnp.argmax` of all logits, by one collective of two numbers a row.

    Args:
      logits: float32 ``[..., V / n]``, see `Decoder.local_logits`.
      axes: over which the model is split, within `shard_map`, or None.

    Returns:
      int32 ``[...]``, the same on all devices.
    """
    over = hidden_axes(axes)
    mine = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not over:
        return mine
    best = jnp.take_along_axis(logits, mine[..., None], axis=-1)[..., 0]
    mine = mine + first_token(logits, over)
    # In one array: tokens as bits of float32.
    both = jnp.stack([best, jax.lax.bitcast_convert_type(mine, jnp.float32)])
    both = jax.lax.all_gather(both, over)
    device = jnp.argmax(both[:, 0], axis=0)
    tokens = jax.lax.bitcast_convert_type(both[:, 1], jnp.int32)
    return jnp.take_along_axis(tokens, device[None], axis=0)[0]
