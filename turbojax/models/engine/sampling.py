"""Choosing the next token of every row from its logits, inside the compiled step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

NOTHING = -1
"""Chosen where the logits hold NaN: there is no next token."""

Array = Any
"""numpy's on the host, which fills it in; jax's inside the step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each of R rows is sampled; see `Sampling`.

    Attributes:
      temperature: float32 ``[R]``, 0 for greedy.
      top_k: int32 ``[R]``, 0 for all tokens.
      top_p: float32 ``[R]``, 1 for all tokens.
      seed: uint32 ``[R]``.
      index: int32 ``[R]``, new tokens that the row's request has so far.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    index: Array


def sample(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """The next token of every row: the largest logit, or of logits with Gumbel noise.

    A row's token depends on nothing but that row. Sorting for `top_k` and `top_p`, and drawing,
    happen only where some row asks for it.

    Args:
      logits: float32 ``[R, V]``.
      rows: how to choose.

    Returns:
      int32 ``[R]``; `NOTHING` where a logit is NaN.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(logits, rows), lambda: greedy)
    chosen = jnp.where(rows.temperature > 0, drawn, greedy)
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), NOTHING, chosen)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Gumbel-max: the largest of logits plus noise is a sample of their softmax."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Differences to the largest first: a tiny temperature leaves 0 and -inf, no NaN.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    restricted = (rows.top_k > 0) | (rows.top_p < 1)
    scaled = jax.lax.cond(
        jnp.any(restricted & (rows.temperature > 0)),
        lambda: restrict(scaled, rows.top_k, rows.top_p),
        lambda: scaled,
    )

    def noise(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    noisy = scaled + jax.vmap(noise)(rows.seed, rows.index)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def restrict(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits with -inf for all tokens that `top_k` and then `top_p` leave out.

    Args:
      scaled: float32 ``[R, V]``, after temperature.
      top_k: int32 ``[R]``, 0 for all.
      top_p: float32 ``[R]``, 1 for all.

    Returns:
      float32 ``[R, V]``; rows without a restriction as they were.
    """
    size = scaled.shape[-1]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, size), size) - 1
    smallest = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    ordered = jnp.where(ordered >= smallest, ordered, -jnp.inf)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Rounding may bring the sum before the last tokens to 1: with top_p = 1 none is left out. The
    # first is always kept.
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    kept = kept.at[:, 0].set(True)
    threshold = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    # Left out by top_k is -inf here, which must not become the threshold of the others.
    threshold = jnp.maximum(threshold, smallest)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)
