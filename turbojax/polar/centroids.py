"""The scalar quantizer of rotated coordinates: Lloyd-Max for N(0, 1), in floats and in integers.

Lloyd (1982), Max (1960): a quantizer of least mean squared error has each threshold midway between
two centroids and each centroid at the mean of its cell.
"""

import functools
import itertools
import math

import numpy as np

from turbojax import _checks

BITS = (2, 3, 4)
LARGEST_INTEGER = 127
"""Of an integer table's entries: 7 bits leave a byte's highest bit free for kernels to select
with."""

HALF = 63.5
"""What kernels subtract from an entry of an integer table."""


@functools.cache
def lloyd_max(bits: int) -> np.ndarray:
    """The Lloyd-Max centroids of the standard normal distribution.

    Args:
      bits: 2, 3 or 4.

    Returns:
      float64 ``[2**bits]``, increasing and exactly symmetric; read-only.

    Raises:
      TypeError: if `bits` is not an integer.
      ValueError: if `bits` is another number.
    """
    check_bits(bits)
    count = 2 ** (bits - 1)
    # By symmetry only the positive half: its first threshold is 0, its last cell unbounded.
    half = np.linspace(0, 3, 2 * count + 1)[1::2]
    for _ in range(100_000):
        inner = 0.5 * (half[1:] + half[:-1])
        edges = np.concatenate([[0.0], inner, [math.inf]])
        means = np.array([_cell_mean(*edge) for edge in itertools.pairwise(edges)])
        change, half = np.abs(means - half).max(), means
        if change < 1e-15:
            break
    return _frozen(np.concatenate([-half[::-1], half]))


@functools.cache
def centroids(bits: int, head_dim: int) -> np.ndarray:
    """The centroids of a rotated unit vector's coordinates, which are close to N(0, 1/d).

    Args:
      bits: 2, 3 or 4.
      head_dim: channels, ``d``.

    Returns:
      float32 ``[2**bits]``: `lloyd_max` over ``sqrt(d)``; read-only.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if `bits` is none of these or `head_dim` is not positive.
    """
    _checks.check_sizes(head_dim=head_dim)
    return _frozen((lloyd_max(bits) / math.sqrt(head_dim)).astype(np.float32))


def thresholds(bits: int) -> np.ndarray:
    """Midway between the centroids of `lloyd_max`: float64 ``[2**bits - 1]``, increasing."""
    table = lloyd_max(bits)
    return 0.5 * (table[1:] + table[:-1])


@functools.cache
def integer_centroids(bits: int = 4) -> tuple[tuple[int, ...], float, float]:
    """The centroids as 7-bit integers with one step, for kernels.

    ``(table[i] - half) * step`` stands for ``lloyd_max(bits)[i]``, and ``table[-1 - i] = 127 -
    table[i]``. The step has the least mean squared rounding error, which costs 4 bits 0.6 % of
    their error.

    Args:
      bits: 2, 3 or 4.

    Returns:
      table: ``2**bits`` integers in 0..127.
      half: 63.5.
      step: a float.

    Raises:
      TypeError: if `bits` is not an integer.
      ValueError: if `bits` is another number.
    """
    target = lloyd_max(bits)[2 ** (bits - 1) :]
    weights = _cell_probabilities(bits)
    best = (math.inf, np.zeros(0), 0.0)
    for trial in np.linspace(target[-1] / HALF, target[-1] / 20, 4001):
        levels = np.minimum(np.floor(target / trial) + 0.5, HALF)
        # For given levels the best step is a least-squares fit.
        step = float((weights * target * levels).sum() / (weights * levels**2).sum())
        error = float((weights * (target - levels * step) ** 2).sum())
        if error < best[0]:
            best = (error, levels, step)
    upper = [int(HALF + level) for level in best[1]]
    return (*[LARGEST_INTEGER - i for i in upper[::-1]], *upper), HALF, best[2]


def check_bits(bits: int) -> None:
    """Raises unless `bits` is 2, 3 or 4."""
    _checks.check_integer("bits", bits)
    if bits not in BITS:
        raise ValueError(f"{bits=} must be 2, 3 or 4")


def _cell_probabilities(bits: int) -> np.ndarray:
    """Probabilities of the positive half's cells under the normal distribution."""
    edges = [0.0, *thresholds(bits)[2 ** (bits - 1) :], math.inf]
    return np.array([_tail(low) - _tail(high) for low, high in itertools.pairwise(edges)])


def _cell_mean(low: float, high: float) -> float:
    """The mean of a standard normal variable between `low` and `high`."""
    return (_density(low) - _density(high)) / (_tail(low) - _tail(high))


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2))


def _frozen(x: np.ndarray) -> np.ndarray:
    x.setflags(write=False)
    return x
