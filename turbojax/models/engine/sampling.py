"""Choosing the next token of every row from its logits, after the compiled step.

What is needed depends on the rows: the largest logit, a draw, or a draw from some of the tokens,
for which they are sorted. The host knows which, so these are programs of their own and no branches
inside the step: a branch on the device would make it wait for the host, and the host for it.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from turbojax.models.engine import compilation
from turbojax.models.engine.requests import Sampling

Kind = Literal["greedy", "draw", "restrict"]
"""What the rows of a step need at most."""

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


def kind_of(options: Iterable[Sampling]) -> Kind:
    """What rows with these options need.

    Args:
      options: of the rows whose tokens are wanted.
    """
    drawn = [option for option in options if option.temperature]
    if any(option.top_k is not None or option.top_p is not None for option in drawn):
        return "restrict"
    return "draw" if drawn else "greedy"


@functools.partial(jax.jit, static_argnames="kind", donate_argnames="last_tokens")
def choose(
    logits: jax.Array,
    last_tokens: jax.Array,
    counts: Array,
    piece_slot: Array,
    rows: SamplingRows,
    *,
    kind: Kind,
) -> tuple[jax.Array, jax.Array]:
    """The next tokens, and which of them the slots go on with; a program for each kind.

    Args:
      logits: float32 ``[S + 1, V]``, as `run_step` gives them.
      last_tokens: int32 ``[S]``, the token that each slot got last, donated.
      counts: int32 ``[S + 1]``, see `Work`.
      piece_slot: int32 ``[]``, see `Work`.
      rows: how to choose.
      kind: of the rows, see `kind_of`.

    Returns:
      int32 ``[S + 1]``, the rows' next tokens, see `sample` (of rows without work they mean
      nothing), and the new last tokens.
    """
    compilation.note()
    slots = last_tokens.shape[0]
    chosen = sample(logits, rows, kind)
    last_tokens = jnp.where(counts[:slots] > 0, chosen[:slots], last_tokens)
    return chosen, last_tokens.at[piece_slot].set(chosen[slots], mode="drop")


def sample(logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
    """The next token of every row: the largest logit, or of logits with Gumbel noise.

    A row's token depends on nothing but that row: not on `kind` either, where that is enough.

    Args:
      logits: float32 ``[R, V]``.
      rows: how to choose.
      kind: what is looked at: ``"greedy"``: nothing but the logits; ``"draw"``: temperature and
        seed, too; ``"restrict"``: everything.

    Returns:
      int32 ``[R]``; `NOTHING` where a logit is NaN.
    """
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind != "greedy":
        chosen = jnp.where(rows.temperature > 0, _draw(logits, rows, kind), chosen)
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), NOTHING, chosen)


def _draw(logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
    """Gumbel-max: the largest of logits plus noise is a sample of their softmax."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Differences to the largest first: a tiny temperature leaves 0 and -inf, no NaN.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
    if kind == "restrict":
        scaled = restrict(scaled, rows.top_k, rows.top_p)

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
