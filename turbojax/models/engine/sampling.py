"""Choosing the next tokens of all rows after the engine's compiled step; see `models.sampling`."""

import functools

import jax
import jax.numpy as jnp

from turbojax.models.engine import compilation
from turbojax.models.generation.sampling import Array, Kind, SamplingRows, sample


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
    """The next tokens, and those that the slots continue with; one program for each kind.

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
