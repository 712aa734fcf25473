"""Texts cut into windows: of bytes for byte-level models, or of tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from turbojax import _checks
from turbojax.models import BEGINNING_OF_FILE

Text = bytes | np.ndarray | Sequence[int]
"""What a text can be given as: bytes of a byte-level model, or integer tokens ``[m]``."""


def windows(texts: Mapping[str, Text], context: int, per_text: int) -> dict[str, np.ndarray]:
    """The first windows of every text that is long enough; they do not overlap.

    Args:
      texts: by name. Of bytes, the first window begins with `turbojax.models.BEGINNING_OF_FILE`;
        tokens are taken as they are, so that a tokenizer's first token is there if it was given.
      context: tokens predicted per window.
      per_text: windows of each text at most.

    Returns:
      name -> int32 ``[n, context + 1]``: a window's inputs are ``[:, :-1]``, its targets
      ``[:, 1:]``, and it begins with the last target of the one before.

    Raises:
      TypeError: if a size is not an integer, or tokens are not integers ``[m]``.
      ValueError: if a size is not positive, or no text is long enough.
    """
    _checks.check_sizes(context=context, per_text=per_text)
    cut = {}
    for name, text in texts.items():
        tokens = tokens_of(name, text)
        count = min((len(tokens) - 1) // context, per_text)
        if count > 0:
            starts = np.arange(count)[:, None] * context
            cut[name] = tokens[starts + np.arange(context + 1)[None]]
    if not cut:
        longest = max((len(tokens_of(x, y)) - 1 for x, y in texts.items()), default=0)
        raise ValueError(f"{context=} must be at most the {longest} tokens of the longest text")
    return cut


def tokens_of(name: str, text: Text) -> np.ndarray:
    """A text's tokens, int32 ``[m]``, see `windows`; TypeError unless integers of one axis."""
    if isinstance(text, bytes):
        return np.frombuffer(bytes([BEGINNING_OF_FILE]) + text, np.uint8).astype(np.int32)
    tokens = np.asarray(text)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(
            f"text {name!r} is {tokens.dtype}{list(tokens.shape)}, must be integers [m]"
        )
    return tokens.astype(np.int32)
