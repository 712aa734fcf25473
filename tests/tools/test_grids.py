"""The grids of the other tests."""

import itertools

import pytest

from tests.grids import one_of_each, pairwise, tiers

AXES = {"a": "xyz", "b": [1, 2, 3, 4], "c": [None, True], "d": [0.5, 1.5, 2.5]}


def pairs(cases):
    return {
        (i, case[i], j, case[j]) for case in cases for i, j in itertools.combinations(range(4), 2)
    }


def test_every_pair_occurs():
    assert pairs(pairwise(**AXES)) == pairs(itertools.product(*AXES.values()))


def test_there_are_few_of_them():
    """Of 72 combinations, 12 are needed for the two longest axes."""
    assert 12 <= len(pairwise(**AXES)) <= 15
    assert len(pairwise(a=range(5), b=range(4))) == 20
    assert pairwise(a="xy") == [("x",), ("y",)]


def test_they_are_the_same_each_time_and_none_twice():
    cases = pairwise(**AXES)
    assert cases == pairwise(**AXES)
    assert len(set(cases)) == len(cases)


def test_an_axis_without_values_is_refused():
    with pytest.raises(ValueError, match="axis 'b' must"):
        pairwise(a=[1, 2], b=[])


def test_tiers():
    every = set(range(9))
    assert tiers(9, 1) == ({0}, every - {0})
    assert tiers(9, 3) == ({0, 3, 6}, every - {0, 3, 6})
    assert tiers(9, 3, offset=13) == ({4, 7, 1}, every - {1, 4, 7})
    assert tiers(9, first=2) == ({0, 1}, every - {0, 1})
    assert tiers(9, first=2, slow=3) == ({0, 1}, {2, 4, 6})
    assert tiers(9, slow=2) == (set(), {0, 4})
    assert tiers(3, 5, slow=7) == ({0, 1, 2}, set())
    assert tiers(0, 2, slow=1, offset=5) == (set(), set())
    assert tiers(2, 1, slow=2, more=3) == ({0}, {1, 3})
    assert tiers(2, 1, more=1) == ({0}, {1, 2})
    for wrong in ({}, {"spread": 2, "first": 1}, {"spread": -1}, {"first": 1, "slow": -1}):
        with pytest.raises(ValueError, match="one of them alone"):
            tiers(9, **wrong)


def test_one_of_each():
    kinds = ["xla", "triton", "xla", "mosaic_gpu", "triton"]
    assert one_of_each({2}, kinds) == {1, 3}
    assert one_of_each({0, 3, 4}, kinds) == set()
    assert one_of_each(set(), [None, None]) == {0}
