"""Texts cut into windows, and how far a mean over windows may be off."""

import dataclasses
import math
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


_AT_ONCE = 2**22
"""Numbers drawn at a time."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its percentile interval.

    Attributes:
      mean: of the values.
      low: lower end; NaN where fewer than two units leave nothing to resample.
      high: upper end, the same.
    """

    mean: float
    low: float
    high: float

    @property
    def ends(self) -> list[float] | None:
        """``[low, high]`` for JSON; None where there is no interval."""
        return None if math.isnan(self.low) or math.isnan(self.high) else [self.low, self.high]


def bootstrap(
    values: Sequence[float] | np.ndarray,
    groups: Sequence[str] | None = None,
    *,
    samples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """The mean of values, and between which bounds the means of resamples lie.

    With groups, whole groups are drawn with replacement, and a resample's mean is that of all
    values in it: windows of a file are alike, so that as many files would vary less than as many
    windows suggest. Of a difference between two methods, give the differences.

    Args:
      values: ``[n]``, one per window. A NaN makes everything NaN.
      groups: ``[n]``, the file of each window; None for windows that are drawn one by one.
      samples: resamples.
      seed: of the draws; the result is a function of the arguments alone.
      level: share of the resamples between the bounds.

    Raises:
      TypeError: if a number is of the wrong kind.
      ValueError: if there are no values, or another number of groups, or a number is out of range.
    """
    _checks.check_sizes(samples=samples)
    _checks.check_integer("seed", seed)
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"values.shape={x.shape} must be [n] with n at least 1")
    if groups is not None and len(groups) != len(x):
        raise ValueError(f"{len(groups)} groups must be {len(x)}, one per value")
    if not 0 < level < 1:
        raise ValueError(f"{level=} must be between 0 and 1")
    if groups is None:
        owner, count = np.arange(len(x)), len(x)
    else:
        _, owner = np.unique(np.asarray(groups), return_inverse=True)
        count = int(owner.max()) + 1
    mean = float(x.mean())
    if count < 2 or not np.all(np.isfinite(x)):
        return Interval(mean, math.nan, math.nan)
    totals = np.bincount(owner, weights=x, minlength=count)
    sizes = np.bincount(owner, minlength=count).astype(np.float64)
    rng, means, left = np.random.default_rng(seed), [], samples
    while left:
        rows = min(left, max(1, _AT_ONCE // count))
        drawn = rng.integers(0, count, (rows, count))
        means.append(totals[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
        left -= rows
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(mean, float(low), float(high))
