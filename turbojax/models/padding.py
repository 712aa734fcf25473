"""Prompts of different lengths in one batch: from padding anywhere to padding on the right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks


def align(tokens: Any, attention_mask: Any) -> tuple[jax.Array, jax.Array]:
    """Moves the real tokens of every row to its beginning.

    Args:
      tokens: int ``[B, T]``, with any numbers in the padding.
      attention_mask: bool or 0 and 1 ``[B, T]``, what a Hugging Face tokenizer returns along with
        the tokens: true at real tokens, which must follow each other. Padding may stand on either
        side of them, or on both.

    Returns:
      Tokens int32 ``[B, T]``, with zeros on the right, and lengths int32 ``[B]``: what `start` and
      `generate` take.

    Raises:
      TypeError: if the tokens are not integers, or the mask is neither bool nor integers.
      ValueError: if a shape does not fit, the mask holds something else than 0 and 1, a row has no
        real token, or padding between real ones.
    """
    ids, mask = np.asarray(_checks.as_int32("tokens", tokens)), np.asarray(attention_mask)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"tokens.shape={ids.shape} must be [B, T], no axis empty")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask.shape={mask.shape} must be tokens.shape={ids.shape}")
    if mask.dtype != bool and not np.issubdtype(mask.dtype, np.integer):
        raise TypeError(f"attention_mask.dtype={mask.dtype} must be bool or an integer type")
    if wrong := sorted(set(np.unique(mask).tolist()) - {0, 1}):
        raise ValueError(f"attention_mask holds {wrong[0]}, must be 0 and 1")
    mask = mask.astype(bool)
    lengths, first = mask.sum(axis=1), mask.argmax(axis=1)[:, None]
    place = np.arange(ids.shape[1])[None]
    if not lengths.all():
        rows = np.flatnonzero(lengths == 0).tolist()
        raise ValueError(f"attention_mask: rows {rows} must have at least one real token")
    holes = mask != ((place >= first) & (place < first + lengths[:, None]))
    if holes.any():
        rows = np.flatnonzero(holes.any(axis=1)).tolist()
        raise ValueError(f"attention_mask: rows {rows} must not have padding between real tokens")
    moved = np.take_along_axis(ids, (place + first) % ids.shape[1], axis=1)
    moved = np.where(place < lengths[:, None], moved, 0)
    return jnp.asarray(moved, jnp.int32), jnp.asarray(lengths, jnp.int32)
