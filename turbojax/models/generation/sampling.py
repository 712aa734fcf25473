"""Choosing the next token of every row from its logits.

What is needed depends on the rows: the largest logit, a draw, or a draw from some of the tokens,
for which the logits are sorted. The host knows which (`kind_of`), so each case is a program of its
own instead of a branch on the device, which would make device and host wait for each other.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._pytrees import pytree

Kind = Literal["greedy", "draw", "restrict"]
"""What the rows of a step need at most."""

NOTHING = -1
"""Chosen where the logits hold NaN, or nothing but -inf: there is no next token."""

Array = Any
"""numpy's on the host, which fills it in; jax's inside a compiled step."""

# Python's numbers, which any other can be compared with.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_RESTRICTIONS = ("top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    The random numbers of a token follow from `seed` and from how many new tokens its sequence has
    so far, so they do not depend on what else runs, nor on when.

    Attributes:
      temperature: 0 for the most likely token; otherwise logits are divided by it.
      top_k: draw from the `top_k` most likely tokens, ties with the last of them included; None
        for all.
      top_p: draw from the fewest most likely tokens whose probabilities, after temperature and
        `top_k`, add up to at least this, ties with the last of them included; None for all.
      min_p: draw from the tokens left by `top_k` and `top_p` whose probability after temperature is
        at least `min_p` times that of the most likely one; None, or 0, for all.
      seed: of the random numbers, ``0..2**32 - 1``.

    Raises:
      TypeError: if an option is not a number.
      ValueError: if it is out of range, or `top_k`, `top_p` or `min_p` come without a temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # numpy's integers are narrow: what is added to them would not fit.
            if isinstance(x := getattr(self, field.name), np.number):
                object.__setattr__(self, field.name, x.item())
        for name in ("temperature", "top_p", "min_p"):
            x = getattr(self, name)
            if name != "temperature" and x is None:
                continue
            if isinstance(x, bool) or not isinstance(x, int | float | np.number):
                raise TypeError(f"{name}={x!r} must be a number")
        if self.temperature and not _SMALLEST <= self.temperature <= _LARGEST:
            raise ValueError(
                f"temperature={self.temperature} must be 0, or positive and finite in float32"
            )
        if self.top_k is not None:
            _checks.check_sizes(top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be within 0..1")
        for name in _RESTRICTIONS:
            if not self.temperature and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} needs a temperature above 0")
        _checks.check_integer("seed", self.seed)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be within 0..2**32 - 1")


GREEDY = Sampling()
"""The most likely token, always."""


@pytree
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each of R rows is sampled, see `Sampling`: arrays ``[R]``.

    `temperature` (0 for greedy), `top_p` (1 for all tokens) and `min_p` (0 for all) are float32,
    `top_k` (0 for all) and `index`, the new tokens that the sequence has so far, int32, `seed`
    uint32.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    index: Array

    def set(self, row: int, sampling: Sampling, index: int) -> None:
        """Fills in one row; the arrays must be numpy's."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k or 0, np.iinfo(np.int32).max)
        self.top_p[row] = 1.0 if sampling.top_p is None else sampling.top_p
        self.min_p[row] = sampling.min_p or 0.0
        self.seed[row] = sampling.seed
        self.index[row] = index


def greedy_rows(count: int) -> SamplingRows:
    """Rows that take the most likely token, in numpy arrays, to be filled in."""
    return SamplingRows(
        temperature=np.zeros(count, np.float32),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint32),
        index=np.zeros(count, np.int32),
    )


def sampling_rows(options: Sequence[Sampling], index: int = 0) -> SamplingRows:
    """One row for each of these options, in numpy arrays, all with the same `index`."""
    rows = greedy_rows(len(options))
    for row, sampling in enumerate(options):
        rows.set(row, sampling, index)
    return rows


def kind_of(options: Iterable[Sampling]) -> Kind:
    """What rows with these options need."""
    drawn = [option for option in options if option.temperature]
    if any(getattr(option, name) is not None for option in drawn for name in _RESTRICTIONS):
        return "restrict"
    return "draw" if drawn else "greedy"


def sample(logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
    """The next token of every row, int32 ``[R]``: the largest logit, with Gumbel noise in draws.

    `logits` is float32 ``[R, V]``. `kind` says what is used besides them: ``"greedy"`` nothing,
    ``"draw"`` temperature and seed, ``"restrict"`` everything. A row's token depends only on that
    row, not on which `kind` that covers the row is used. A token with logit +inf is chosen, in
    draws as well; `NOTHING` where a logit is NaN, or all are -inf.
    """
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind != "greedy":
        chosen = jnp.where(rows.temperature > 0, _draw(logits, rows, kind), chosen)
    none = jnp.any(jnp.isnan(logits), axis=-1) | jnp.all(logits == -jnp.inf, axis=-1)
    return jnp.where(none, NOTHING, chosen)


def _draw(logits: jax.Array, rows: SamplingRows, kind: Kind) -> jax.Array:
    """Gumbel-max: the largest of logits plus noise is a sample of their softmax."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Differences to the largest first: a tiny temperature leaves 0 and -inf, no NaN. The largest is
    # 0 also where it is infinite, and all others are -inf then.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    difference = jnp.where(logits == largest, jnp.zeros_like(logits), logits - largest)
    scaled = difference / temperature[:, None]
    if kind == "restrict":
        scaled = restrict(scaled, rows.top_k, rows.top_p, rows.min_p)

    def noise(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    noisy = scaled + jax.vmap(noise)(rows.seed, rows.index)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def restrict(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Logits with -inf for all tokens that `top_k`, then `top_p`, then `min_p` leave out.

    `scaled` is float32 ``[R, V]``, after temperature; the others are those of `SamplingRows`. Rows
    without a restriction stay as they were.
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
    # p >= min_p * max p, in logarithms: tokens left out by top_k and top_p do not enter the ratio.
    threshold = jnp.maximum(threshold, ordered[:, :1] + jnp.log(min_p)[:, None])
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Penalties:
    """How logits of tokens change that were there before, ahead of temperature and restrictions.

    Attributes:
      repetition: logits of tokens of prompt or result are divided by it where positive, and
        multiplied where negative (Keskar et al., 2019), 1e-6..1e6; 1 for none.
      presence: subtracted from the logits of tokens that the result has, -1e6..1e6.
      frequency: subtracted from them once for each time that the result has them, -1e6..1e6.

    Raises:
      TypeError: if one is not a number.
      ValueError: if one is out of range.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name, smallest in (("repetition", 1e-6), ("presence", -1e6), ("frequency", -1e6)):
            x = getattr(self, name)
            if isinstance(x, bool) or x is None:
                raise TypeError(f"{name}={x} must be a number")
            _checks.check_number(name, x)
            if not smallest <= x <= 1e6:
                raise ValueError(f"{name}={x} must be within {smallest:g}..1e6")
            object.__setattr__(self, name, float(x))


NO_PENALTIES = Penalties()
"""What was there before makes no difference."""
