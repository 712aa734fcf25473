"""SAS, the sparse activated softmax: exponentials from a small table and a cubic.

Source: TurboAttention (Kang et al., 2024), Eqs. 13-15 and Algorithm 3.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from turbojax._pytrees import static

# Least-squares cubics on [0, 1), constant term first: exp(-f) as the paper prints it (Eq. 15),
# and 2**-f refitted the same way.
_POLYNOMIALS = {
    "e": (0.9996, -0.9922, 0.4626, -0.1025),
    "2": (0.99989843, -0.69107548, 0.23059295, -0.03950994),
}

# Smaller arguments have no normal float32 exponential.
_SMALLEST_THRESHOLD = -87.0


@static
@dataclasses.dataclass(frozen=True)
class SAS:
    """The SAS approximation of ``exp`` on non-positive arguments (Eqs. 13-15).

    With ``y = max(-x, 0)``, ``i = floor(y)`` and ``f = y - i`` the value is 0 below the
    threshold and ``exp(-i) * poly(f)`` elsewhere. With base 2, ``y`` counts powers of two: the
    integer part becomes an exponent and needs no table. Both stay within 5e-4 of ``exp`` above
    the threshold.

    Tiny positive arguments count as zero: compilers contract ``s * c - m * c`` into a fused
    multiply-add, which leaves the row maximum slightly above 0.

    Attributes:
      threshold: natural-log units, in [-87, 0); below it the result is exactly 0.
      base: ``"e"``, the paper's table, or ``"2"``.

    Raises:
      ValueError: if the threshold is outside this range, or the base is another string.
    """

    threshold: float = -6.0
    base: Literal["e", "2"] = "e"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and _SMALLEST_THRESHOLD <= self.threshold < 0):
            raise ValueError(
                f"{self.threshold=} must be finite, negative and at least {_SMALLEST_THRESHOLD}"
            )
        if self.base not in _POLYNOMIALS:
            raise ValueError(f"{self.base=} must be 'e' or '2'")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The cubic on [0, 1), constant term first, for kernels that are not written in jax."""
        return _POLYNOMIALS[self.base]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Approximates ``exp(x)`` elementwise.

        Args:
          x: floating point, any shape, ``x <= 0``. ``-inf`` gives 0, NaN gives NaN.

        Returns:
          Same shape and dtype; computed in at least float32.

        Raises:
          TypeError: if ``x`` is not floating point.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x.dtype={x.dtype} must be floating point")
        exponent = _at_least_float32(x)
        y = jnp.maximum(-exponent, 0) * self.unit
        # The limit keeps -inf finite; NaN passes through minimum and the polynomial.
        y = jnp.minimum(y, self._table_size())
        whole = jnp.floor(y)
        value = _polynomial(y - whole, _POLYNOMIALS[self.base]) * self._power(whole)
        return jnp.where(exponent < self.threshold, 0, value).astype(x.dtype)

    @property
    def unit(self) -> float:
        """Factor that turns natural-log units into powers of `base`."""
        return math.log2(math.e) if self.base == "2" else 1.0

    def in_kernel(
        self,
        x: jax.Array,
        *,
        floor: Callable[[jax.Array], jax.Array],
        exp2: Callable[[jax.Array], jax.Array],
        fma: Callable[[jax.Array, jax.Array | float, float], jax.Array],
    ) -> jax.Array:
        """The same function on `unit` scaled arguments, from a kernel's own instructions.

        Within a few units in the last place of `__call__`: in a kernel one `exp2` of an integer is
        faster than the table's selects.

        Args:
          x: float32, natural-log units times `unit`. NaN may give any value.
          floor: rounds non-negative numbers down.
          exp2: powers of two.
          fma: ``a * b + c``.
        """
        y = jnp.maximum(-x, 0.0)
        whole = floor(y)
        power = exp2(whole * (-math.log2(math.e) / self.unit))
        fraction = y - whole
        *lower, highest = _POLYNOMIALS[self.base]
        value = fma(fraction, highest, lower[-1])
        for coefficient in reversed(lower[:-1]):
            value = fma(value, fraction, coefficient)
        value = value * power
        return jnp.where(x < self.threshold * self.unit, 0.0, value)

    def _table_size(self) -> int:
        """Number of integer parts that can occur at or above the threshold."""
        return math.floor(-self.threshold * self.unit) + 1

    def _power(self, whole: jax.Array) -> jax.Array:
        """``base ** -whole`` for integral ``whole`` of at most the table's size."""
        if self.base == "2":
            return jnp.exp2(-whole)
        # Selects instead of a gather: kernels lower them, and the table is short (7 at -6).
        power = jnp.ones_like(whole)
        for i in range(1, self._table_size() + 1):
            power = jnp.where(whole >= i, math.exp(-i), power)
        return power


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _polynomial(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    value = jnp.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + c
    return value


def sas_softmax(
    x: jax.Array, axis: int = -1, sas: SAS = SAS(), where: jax.Array | None = None
) -> jax.Array:
    """Softmax with SAS in place of the exponential (Algorithm 3).

    Args:
      x: floating point scores, any shape.
      axis: the axis that sums to one.
      sas: the approximation.
      where: optional boolean mask, broadcastable to ``x``; False entries get weight 0.

    Returns:
      Weights of ``x``'s shape and dtype, computed in at least float32. A row with no unmasked
      entry is all zeros; an unmasked NaN makes its row NaN.

    Raises:
      TypeError: if ``x`` is not floating point or ``where`` not boolean.
      ValueError: if ``where`` does not broadcast to ``x``'s shape.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x.dtype={x.dtype} must be floating point")
    scores = _at_least_float32(x)
    mask = None
    if where is not None:
        if where.dtype != jnp.bool_:
            raise TypeError(f"where.dtype={where.dtype} must be bool")
        try:
            mask = jnp.broadcast_to(where, x.shape)
        except ValueError:
            raise ValueError(f"{where.shape=} must broadcast to {x.shape=}") from None
        scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=axis, keepdims=True)
    weights = sas(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weights, axis=axis, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return weights.astype(x.dtype)
