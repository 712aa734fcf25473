"""The exponentials of the softmax in float64."""

import math
from collections.abc import Callable

import numpy as np

PRINTED_CUBIC = (-0.1025, 0.4626, -0.9922, 0.9996)


def least_squares_cubic(base):
    """Least-squares cubic of ``base ** -f`` on [0, 1), highest power first.

    Solves the normal equations of the continuous problem with Legendre polynomials.
    """
    x, w = np.polynomial.legendre.leggauss(40)
    target = base ** -((x + 1) / 2)
    legendre = np.polynomial.legendre.Legendre(
        [
            (2 * n + 1) / 2 * np.sum(w * target * np.polynomial.legendre.legval(x, [0] * n + [1]))
            for n in range(4)
        ]
    )
    in_f = legendre.convert(kind=np.polynomial.Polynomial)(np.polynomial.Polynomial([-1.0, 2.0]))
    return tuple(in_f.coef[::-1])


def sas(x, threshold=-6.0, base="e"):
    """Sparse activated softmax's exponential, float64."""
    x = np.asarray(x, np.float64)
    cubic = PRINTED_CUBIC if base == "e" else least_squares_cubic(2.0)
    unit, steps = (np.e, 1.0) if base == "e" else (2.0, 1 / math.log(2))
    with np.errstate(invalid="ignore"):
        y = np.maximum(-x, 0.0) * steps
        whole = np.where(np.isinf(y), 0, np.floor(y))
        fraction = np.where(np.isinf(y), 0, y - whole)
        value = unit**-whole * np.polyval(cubic, fraction)
        return np.where(x < threshold, 0.0, value)


def exponential(softmax) -> Callable:
    """The exponential named by a configuration: ``"exact"`` or a pair (threshold, base)."""
    if softmax == "exact":
        return lambda x: np.exp(np.minimum(x, 0.0))
    threshold, base = softmax
    return lambda x: sas(x, threshold, base)
