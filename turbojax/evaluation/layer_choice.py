"""Which of several caches each layer gets: the least loss in a size, or the least size for it."""

import math

import numpy as np

_MOST_STEPS = 2**16
"""Steps of size at most: with more, sizes are rounded up to them."""


def choose(
    costs: np.ndarray, sizes: np.ndarray, *, loss: float | None = None, size: int | None = None
) -> np.ndarray:
    """A choice for every layer, as if what layers cost added up.

    By dynamic programming over sizes, layer by layer. The choice is optimal where differences of
    sizes are at most `_MOST_STEPS` times their common divisor, as they are where the caches of all
    layers are alike. Elsewhere each layer's size is rounded up by a correspondingly small part of
    their sum.

    Args:
      costs: float ``[C, L]``, what each of C caches costs in each of L layers; a cache is not
        chosen where its cost is not finite.
      sizes: int ``[C, L]``, bytes.
      loss: what the costs may sum up to: then the fewest bytes, and of these choices the one that
        costs least.
      size: instead of `loss`, what the bytes may sum up to: then the least cost, and of these
        choices the smallest.

    Returns:
      int ``[L]``, which of the caches.

    Raises:
      ValueError: if shapes differ, not exactly one of `loss` and `size` is given, or no choice is
        within it; the error says what the nearest one has.
    """
    if costs.ndim != 2 or costs.shape != sizes.shape or 0 in costs.shape:
        raise ValueError(f"{costs.shape=} and {sizes.shape=} must be the same, [C, L]")
    if (loss is None) == (size is None):
        raise ValueError("give a loss or a size, one of them")
    costs = np.where(np.isfinite(costs), costs, np.inf)
    if not np.all(np.isfinite(costs).any(axis=0)):
        raise ValueError("costs must be finite for one cache of each layer at least")
    least = np.where(np.isfinite(costs), sizes, sizes.max()).min(axis=0)
    if size is not None and size < least.sum():
        raise ValueError(f"size={size} must be at least {least.sum()}, of the smallest caches")
    steps, unit = _steps(sizes - least)
    best, picks = _table(costs, steps)
    if loss is None:
        assert size is not None
        loss = float(best[min(len(best) - 1, int(size - least.sum()) // unit)])
    if best[-1] > loss:
        least_loss = f"{best[-1]:.6f}, of the caches that lose least"
        raise ValueError(f"{loss=} must be at least {least_loss}")
    return _walk(picks, steps, int(np.argmax(best <= loss)))


def _steps(extra: np.ndarray) -> tuple[np.ndarray, int]:
    """Sizes ``[C, L]`` above each layer's smallest, in steps, and bytes of a step."""
    unit = max(1, math.gcd(*extra.ravel().tolist()))
    unit *= -(-int(extra.max(axis=0).sum()) // (unit * _MOST_STEPS)) or 1
    return -(-extra // unit), unit


def _table(costs: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least cost for each size, and per layer the cache that the best choice so far ends with.

    As float64 ``[S + 1]`` and int32 ``[L, S + 1]``.
    """
    count = int(steps.max(axis=0).sum()) + 1
    best, picks = np.zeros(count), np.zeros((costs.shape[1], count), np.int32)
    for layer, (cost, step) in enumerate(zip(costs.T, steps.T, strict=True)):
        now = np.full(count, np.inf)
        # The smallest first: among equal costs it is kept.
        for cache in np.argsort(step, kind="stable"):
            there = np.full(count, np.inf)
            if 0 <= step[cache] < count:
                there[step[cache] :] = best[: count - step[cache]] + cost[cache]
            better = there < now
            now[better], picks[layer][better] = there[better], cache
        best = now
    return best, picks


def _walk(picks: np.ndarray, steps: np.ndarray, room: int) -> np.ndarray:
    """The choice of every layer, from the last one back."""
    chosen = np.zeros(len(picks), int)
    for layer in reversed(range(len(picks))):
        chosen[layer] = picks[layer, room]
        room -= int(steps[chosen[layer], layer])
    return chosen
