"""Which experts a token goes to, and the way there and back (mixture-of-experts layers)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import _checks

SoftmaxOrder = Literal["before", "after"]
_ORDERS = ("before", "after")


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      experts: int32 ``[..., top_k]``, most probable first.
      weights: float32 ``[..., top_k]``, the factors of their outputs.
    """

    experts: jax.Array
    weights: jax.Array


class Dispatch(NamedTuple):
    """Copies of tokens, one for each of a token's experts, sorted by expert.

    Attributes:
      tokens: int32 ``[T * top_k]``, of each sorted row the token.
      places: int32 ``[T, top_k]``, the row of each token's copies.
      group_sizes: int32 ``[E]``, rows of each expert.
    """

    tokens: jax.Array
    places: jax.Array
    group_sizes: jax.Array


def route(
    logits: jax.Array,
    top_k: int,
    *,
    softmax: SoftmaxOrder = "before",
    normalize: bool = False,
) -> Routing:
    """Chooses the `top_k` experts of the largest logits, and their weights, in float32.

    ``softmax="before"`` takes the probabilities among all experts, of which the chosen ones keep
    theirs; with `normalize` divided by their sum (Qwen3-MoE: `norm_topk_prob`). Normalized, they
    are the softmax of the chosen logits alone, which is what ``"after"`` computes (Mixtral,
    gpt-oss).

    Args:
      logits: floating point ``[..., E]``.
      top_k: experts of a token.
      softmax: ``"before"`` or ``"after"`` the choice.
      normalize: whether weights shall sum to 1; after the choice they do anyway.

    Returns:
      Experts and weights ``[..., top_k]``; of equal logits the experts with lower numbers. Weights
      of a token with a logit that is NaN or +inf are NaN.

    Raises:
      TypeError: if a dtype or kind is not supported.
      ValueError: if `top_k` is not between 1 and `E`, or an option or shape is none of these.
    """
    logits = jnp.asarray(logits)
    _checks.check_float_dtype("logits", logits)
    _checks.check_sizes(top_k=top_k)
    if logits.ndim == 0 or top_k > logits.shape[-1]:
        raise ValueError(f"{top_k=} must be at most the last axis of {logits.shape=}, experts")
    if softmax not in _ORDERS:
        raise ValueError(f"{softmax=} must be one of {_ORDERS}")
    logits = logits.astype(jnp.float32)
    chosen, experts = jax.lax.top_k(logits, top_k)
    if softmax == "after":
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
        if normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # A NaN may be among the logits that are not chosen.
    bad = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
    return Routing(experts, jnp.where(bad, jnp.nan, weights))


def dispatch(experts: jax.Array, num_experts: int) -> Dispatch:
    """Sorts tokens by expert; those of one expert stay in order.

    Args:
      experts: int32 ``[T, top_k]``, each in ``0..num_experts - 1``.
      num_experts: `E`.

    Returns:
      The order, and how many rows each expert has; together ``T * top_k``.
    """
    _checks.check_sizes(num_experts=num_experts)
    if experts.ndim != 2:
        raise ValueError(f"{experts.shape=} must be [tokens, top_k]")
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    count = jnp.arange(flat.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(count).at[order].set(count, unique_indices=True)
    is_mine = flat[None] == jnp.arange(num_experts, dtype=flat.dtype)[:, None]
    sizes = jnp.sum(is_mine.astype(jnp.int32), axis=1)
    return Dispatch(order // experts.shape[1], places.reshape(experts.shape), sizes)


def combine(y: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of what a token's experts computed, in float32.

    Args:
      y: ``[T * top_k, H]``, sorted by expert.
      places: int32 ``[T, top_k]``, see `Dispatch`.
      weights: float32 ``[T, top_k]``, see `Routing`.

    Returns:
      ``[T, H]`` in `y`'s dtype.
    """
    # Gathered, not scattered: sums have one order, and the same bits every time.
    mine = y[places].astype(jnp.float32)
    return jnp.sum(mine * weights[..., None], axis=1).astype(y.dtype)
