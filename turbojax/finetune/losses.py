"""Cross-entropy of tokens, of a large vocabulary without all logits at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

MOST_LOGITS = 2**26
"""Float32 logits that a step holds at a time: 256 MB, and as much for their gradient."""


def with_marks(tokens: np.ndarray, learn: np.ndarray | None) -> np.ndarray:
    """Tokens of which those that are only read stand as their complement ``~token``.

    So a stream on the device says both. `marked` takes it apart.

    Raises:
      TypeError: if `learn` is not bool.
      ValueError: if it has another shape, or no token counts.
    """
    if learn is None:
        return tokens
    if learn.dtype != np.bool_:
        raise TypeError(f"learn.dtype={learn.dtype} must be bool")
    if learn.shape != tokens.shape:
        raise ValueError(f"learn.shape={learn.shape} must be that of the tokens, {tokens.shape}")
    if not learn.any():
        raise ValueError("learn must have a token that counts")
    wide = tokens.astype(np.int32)
    return np.where(learn, wide, ~wide)


def marked(tokens: Any) -> tuple[Any, Any]:
    """The tokens, and whether each is learned, of what `with_marks` made or of plain tokens."""
    return jnp.where(tokens < 0, ~tokens, tokens), tokens >= 0


def share_of_learned(learned: jax.Array, names: tuple[str, ...] = ()) -> jax.Array:
    """How many tokens count, at least 1, float32: what a sum of losses is divided by.

    `learned` is bool of any shape. Inside a `shard_map` over the axes `names` it is the mean over
    the devices, which may be less than 1.
    """
    total, devices = jnp.sum(learned), 1
    if names:
        total, devices = jax.lax.psum(total, names), jax.lax.axis_size(names)
    # One at least before the division: a device's share of a few tokens is less than one.
    return jnp.maximum(total, 1).astype(jnp.float32) / devices


def mean_of_learned(
    losses: jax.Array, learned: jax.Array, share: jax.Array | None = None
) -> jax.Array:
    """The mean of the losses that count; 0 where none does.

    With a `share`, see `share_of_learned`, these are some of the tokens that it counts: the sum of
    what parts of a batch get is the batch's mean, and the mean of what devices get that of all.
    """
    share = share_of_learned(learned) if share is None else share
    return jnp.sum(jnp.where(learned, losses, 0.0)) / share


def scaled_value_and_grad(loss: Callable[..., tuple[jax.Array, Any]], scale: float) -> Any:
    """`jax.value_and_grad` of a loss with an auxiliary result, through the loss times `scale`.

    What is returned is that of the loss itself. With a scale cotangents in float16 do not vanish;
    where one overflows instead, the gradient is not finite.

    Args:
      loss: returns a scalar and what else is wanted; its first argument is a pytree of float32
        arrays.
      scale: a power of two, see `Settings.loss_scale`; with 1 nothing is scaled.

    Returns:
      A function that returns the pair of the loss and what else, and the gradient in float32.
    """
    if scale == 1:
        return jax.value_and_grad(loss, has_aux=True)

    def scaled(*arguments: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        value, more = loss(*arguments)
        return value * scale, (value, more)

    def run(*arguments: Any) -> Any:
        (_, found), grads = jax.value_and_grad(scaled, has_aux=True)(*arguments)
        return found, jax.tree.map(lambda x: x / scale, grads)

    return run


def cross_entropy(
    logits: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    *,
    most: int = MOST_LOGITS,
) -> jax.Array:
    """The loss of every token: ``-ln softmax(logits(hidden))[target]``.

    Where there are more than `most` logits, tokens are taken in chunks, one after the other, and
    the backward pass computes a chunk's logits again: of 8k tokens and 128k words 4 GB would stand
    at a time otherwise, and their gradient beside them.

    Args:
      logits: from rows of hidden states ``[..., D]`` to ``[..., vocab_size]``.
      hidden: ``[B, T, D]``.
      targets: int ``[B, T]``.
      vocab_size: logits of a token.
      most: see `MOST_LOGITS`; at least one token is taken at a time.

    Returns:
      float32 ``[B, T]``.
    """

    def losses(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(hidden), targets)

    count, chunk = targets.size, max(most // vocab_size, 1)
    if count <= chunk:
        return losses(hidden, targets)
    padding = -count % chunk
    rows = jnp.pad(hidden.reshape(count, -1), ((0, padding), (0, 0)))
    wanted = jnp.pad(targets.reshape(count), (0, padding))
    chunks = rows.reshape(-1, chunk, rows.shape[1]), wanted.reshape(-1, chunk)
    found = jax.lax.map(lambda x: jax.checkpoint(losses)(*x), chunks)
    return found.reshape(-1)[:count].reshape(targets.shape)
