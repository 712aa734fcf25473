"""Which experts a token goes to, and the way there and back (mixture-of-experts layers)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from turbojax import _checks

SoftmaxOrder = Literal["before", "after"]
Scores = Literal["softmax", "sigmoid"]
_ORDERS = ("before", "after")
_SCORES = ("softmax", "sigmoid")
# Added to a sum of sigmoids before a division by it: all of them may be 0.
_TINY = 1e-20


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
    scores: Scores = "softmax",
    correction: jax.Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
) -> Routing:
    """Chooses the `top_k` experts of the largest logits, and their weights, in float32.

    ``softmax="before"`` takes the probabilities among all experts; the chosen ones keep theirs, or
    with `normalize` theirs divided by their sum (Qwen3-MoE: `norm_topk_prob`). Normalized, they
    are the softmax of the chosen logits alone, which is what ``"after"`` computes (Mixtral,
    gpt-oss).

    With ``scores="sigmoid"`` (DeepSeek-V3) each expert's score is the sigmoid of its logit, and
    experts are chosen by the score plus a `correction`, which balances their load and is no part of
    the weight.

    With groups, which are neighbouring experts, only experts of the best `top_groups` are chosen. A
    group is as good as its best expert, or with sigmoids as the sum of its best two.

    Args:
      logits: floating point ``[..., E]``.
      top_k: experts of a token.
      softmax: ``"before"`` or ``"after"`` the choice.
      normalize: whether weights shall sum to 1; after the choice they do anyway.
      scores: ``"softmax"`` or ``"sigmoid"``, for which `softmax` must be ``"before"``.
      correction: floating point ``[E]``, for sigmoids alone.
      groups: of experts, which share them evenly; with sigmoids at least 2 in each.
      top_groups: groups that a token's experts are of.
      scaling: factor of the weights in the end.

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
    count = logits.shape[-1]
    _check_scores(scores, softmax, correction, count)
    check_groups(count, top_k, groups, top_groups, scores)
    _checks.check_number("scaling", scaling)
    logits = logits.astype(jnp.float32)
    is_sigmoid = scores == "sigmoid"
    found = jax.nn.sigmoid(logits) if is_sigmoid else logits
    by = found
    if correction is not None:
        wide = jnp.asarray(correction).astype(jnp.float32)
        by = found + wide.reshape((1,) * (found.ndim - 1) + wide.shape)
    if top_groups < groups:
        by = _within_groups(by, groups, top_groups, 2 if is_sigmoid else 1)
    chosen, experts = jax.lax.top_k(by, top_k)
    if softmax == "after":
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        found = found if is_sigmoid else jax.nn.softmax(logits, axis=-1)
        weights = jnp.take_along_axis(found, experts, axis=-1)
        if normalize:
            total = jnp.sum(weights, axis=-1, keepdims=True)
            weights = weights / (total + _TINY if is_sigmoid else total)
    if scaling != 1:
        weights = weights * jnp.float32(scaling)
    # A NaN may be among the logits that are not chosen.
    bad = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
    return Routing(experts, jnp.where(bad, jnp.nan, weights))


def check_groups(count: int, top_k: int, groups: int, top_groups: int, scores: Scores) -> None:
    """Raises ValueError unless experts can be chosen by groups of these numbers."""
    _checks.check_sizes(groups=groups, top_groups=top_groups)
    size, least = count // groups, 2 if scores == "sigmoid" and groups > 1 else 1
    if count % groups or size < least:
        raise ValueError(f"{groups=} must share {count} experts evenly, at least {least} in each")
    if top_groups > groups or top_groups * size < top_k:
        raise ValueError(
            f"{top_groups=} must be at most {groups=}, and so many that {top_k=} experts are in "
            f"them, of {size} each"
        )


def _check_scores(scores: Scores, softmax: SoftmaxOrder, correction: object, count: int) -> None:
    if scores not in _SCORES:
        raise ValueError(f"{scores=} must be one of {_SCORES}")
    if scores == "sigmoid" and softmax != "before":
        raise ValueError(f"{softmax=} must be 'before' with {scores=}")
    if correction is None:
        return
    if scores != "sigmoid":
        raise ValueError(f"correction must be None with {scores=}")
    given = jnp.asarray(correction)
    _checks.check_float_dtype("correction", given)
    if given.shape != (count,):
        raise ValueError(f"correction.shape={given.shape} must be ({count},), one for each expert")


def _within_groups(by: jax.Array, groups: int, top_groups: int, best: int) -> jax.Array:
    """`by` (float32 ``[..., E]``), with ``-inf`` outside of the `top_groups` best groups.

    A group is as good as the sum of its `best` experts with the largest values.
    """
    each = by.reshape(*by.shape[:-1], groups, -1)
    worth = jnp.sum(jax.lax.top_k(each, best)[0], axis=-1)
    _, kept = jax.lax.top_k(worth, top_groups)
    numbers = jnp.arange(groups, dtype=kept.dtype).reshape((1,) * kept.ndim + (groups,))
    is_kept = jnp.any(kept[..., None] == numbers, axis=-2)
    return jnp.where(is_kept[..., None], each, -jnp.inf).reshape(by.shape)


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
