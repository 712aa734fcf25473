"""Grids of test cases that stay small: each pair of values meets, not each combination."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every two values of two axes occur together at least once.

    The axes keep their order in each case, and the same axes always give the same cases. One axis
    alone gives its values. About as many cases as the two longest axes have combinations.
    """
    for name, values in axes.items():
        if not len(values):
            raise ValueError(f"axis {name!r} must have at least one value")
    sizes = [len(values) for values in axes.values()]
    count = len(sizes)
    if count < 2:
        return [(value,) for values in axes.values() for value in values]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(count), 2)
        for a, b in itertools.product(range(sizes[i]), range(sizes[j]))
    }
    cases = []
    while missing:
        case: list[int | None] = [None] * count
        # A pair that is still missing, then for each axis the value that meets the most others.
        i, a, j, b = min(missing)
        case[i], case[j] = a, b
        for k in range(count):
            if case[k] is None:
                case[k] = max(
                    range(sizes[k]),
                    key=lambda value, k=k, case=case: (
                        sum(_pair(k, value, m, case[m]) in missing for m in range(count)),
                        -sum(chosen[k] == value for chosen in cases),
                    ),
                )
        missing -= {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(count), 2)}
        cases.append(case)
    values = list(axes.values())
    return [tuple(values[k][chosen] for k, chosen in enumerate(case)) for case in cases]


def _pair(i: int, a: int, j: int, b: int | None) -> tuple[int, int, int, int] | None:
    """Two chosen values in the order in which pairs are kept; None if there is no pair."""
    if i == j or b is None:
        return None
    return (i, a, j, b) if i < j else (j, b, i, a)


def tiers(
    total: int,
    spread: int = 0,
    *,
    first: int = 0,
    slow: int | None = None,
    offset: int = 0,
    more: int = 0,
) -> tuple[set[int], set[int]]:
    """Which of a test's `total` cases `make test` runs, and which `make test-slow`.

    Args:
      total: cases.
      spread: of them in `make test`, spread evenly.
      first: of them in `make test`, the first ones.
      slow: of the others in `make test-slow`, spread evenly; all if None.
      offset: the case at which spreading begins, so that unlike tests with the same grid run unlike
        cases.
      more: cases after these `total` that are too slow for `make test`.
    """
    if min(spread, first, slow or 0) < 0 or (spread and first) or not (spread or first or slow):
        raise ValueError(
            f"{spread=} or {first=}, and one of them alone, or {slow=} must be positive"
        )
    quick = set(range(min(first, total))) | _spread(total, spread, offset)
    others = [i for i in range(total + more) if i not in quick]
    if slow is None:
        return quick, set(others)
    return quick, {others[i] for i in _spread(len(others), slow, offset)}


def one_of_each(chosen: set[int], kinds: Sequence[object]) -> set[int]:
    """The first case of each kind of which none is chosen; `kinds` has one for every case."""
    there = {kinds[i] for i in chosen}
    return {kinds.index(kind) for kind in set(kinds) - there}


def _spread(total: int, count: int, offset: int) -> set[int]:
    return {(offset + i * total // min(count, total)) % total for i in range(min(count, total))}
