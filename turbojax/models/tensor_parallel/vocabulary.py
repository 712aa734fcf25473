"""Logits of which each device has those of some tokens."""

import jax
import jax.numpy as jnp

from turbojax.models.config import TransformerConfig
from turbojax.models.tensor_parallel.layout import hidden_axes
from turbojax.sharding import Axes


def gather_logits(logits: jax.Array, vocab_size: int, axes: Axes | None) -> jax.Array:
    """Logits ``[..., V]`` of the whole vocabulary from those of each device.

    Args:
      logits: ``[..., V / n]`` of the device's tokens, V rounded up.
      vocab_size: V, of the model.
      axes: over which it is split, within `shard_map`, or None.
    """
    over = hidden_axes(axes)
    if not over:
        return logits
    whole = jax.lax.all_gather(logits, over, axis=logits.ndim - 1, tiled=True)
    return whole[..., :vocab_size]


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


def likeliest(logits: jax.Array, axes: Axes | None) -> tuple[jax.Array, jax.Array]:
    """The largest logit and its token, the first of equals; where one is NaN the first of these.

    As `jnp.argmax` of all logits, by one collective of two numbers a row.

    Args:
      logits: float32 ``[..., V / n]``, see `Decoder.local_logits`.
      axes: over which the model is split, within `shard_map`, or None.

    Returns:
      float32 ``[...]`` and int32 ``[...]``, the same on all devices.
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
