"""`tj.polar`'s tables: Lloyd-Max by quadrature and against published values, and in integers."""

import itertools

import numpy as np
import pytest

from tests.oracles import polar as oracle
from turbojax import polar

SPEC_4 = (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590)
DISTORTION = {2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean squared errors of Max's table I."""


def cells(table):
    edges = [-np.inf, *(0.5 * (table[1:] + table[:-1])), np.inf]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_centroid_is_the_mean_of_its_cell(bits):
    """Lloyd's second condition, in float64 by quadrature; the first defines the cells."""
    table = polar.lloyd_max(bits)
    assert (table.dtype, table.shape) == (np.float64, (2**bits,))
    assert (np.diff(table) > 0).all()
    np.testing.assert_array_equal(table, -table[::-1])
    means = [oracle.normal_cell(*c, 1) / oracle.normal_cell(*c, 0) for c in cells(table)]
    np.testing.assert_allclose(table, means, rtol=0, atol=1e-12)
    np.testing.assert_allclose(table, oracle.lloyd_max(bits), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_printed_table(bits):
    """To the digits printed: half a unit of the last, or a whole where print rounded down."""
    upper = polar.lloyd_max(bits)[2 ** (bits - 1) :]
    digits = [1e-4 if level < 1 else 1e-3 for level in oracle.MAX_1960[bits]]
    assert (np.abs(upper - oracle.MAX_1960[bits]) <= digits).all()
    if bits == 4:
        np.testing.assert_allclose(upper, SPEC_4, rtol=0, atol=5.01e-7)
    error = sum(
        oracle.normal_cell(*cell, 2)
        - 2 * c * oracle.normal_cell(*cell, 1)
        + c * c * oracle.normal_cell(*cell, 0)
        for c, cell in zip(polar.lloyd_max(bits), cells(polar.lloyd_max(bits)), strict=True)
    )
    np.testing.assert_allclose(error, DISTORTION[bits], rtol=5e-4)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_centroids_of_a_head(head_dim):
    table = polar.centroids(4, head_dim)
    assert table.dtype == np.float32
    want = (oracle.lloyd_max(4) / np.sqrt(head_dim)).astype(np.float32)
    np.testing.assert_array_max_ulp(table, want, 1)
    np.testing.assert_array_equal(table, -table[::-1])


def loss_of(bits):
    """Mean squared distance of integer levels to the centroids, by the cells' probabilities."""
    exact = oracle.lloyd_max(bits)
    weights = np.array([oracle.normal_cell(*c, 0) for c in cells(exact)])
    return lambda table, step: (weights * (exact - (np.array(table) - 63.5) * step) ** 2).sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_integer_centroids(bits):
    """Seven bits, symmetric, and no other step does better."""
    table, half, step = polar.integer_centroids(bits)
    assert half == 63.5
    assert len(table) == 2**bits
    assert all(isinstance(i, int) and 0 <= i <= 127 for i in table)
    assert all(a + b == 127 for a, b in zip(table, table[::-1], strict=True))
    assert list(table) == sorted(set(table))
    rounding_loss = loss_of(bits)
    loss = rounding_loss(table, step)
    assert loss <= {2: 1e-4, 3: 1e-3, 4: 0.0062}[bits] * DISTORTION[bits]
    exact = oracle.lloyd_max(bits)
    for other in np.linspace(exact[-1] / 63.5, 4 * exact[-1] / 63.5, 997):
        rounded = np.clip(np.floor(exact / other + 63.5 + 0.5), 0, 127)
        assert loss <= rounding_loss(rounded, other) * (1 + 1e-9)


def test_the_integers_of_four_bits_are_these():
    """Pinned: kernels hold them as constants."""
    table, _, step = polar.integer_centroids()
    upper = [2.5, 7.5, 12.5, 18.5, 24.5, 31.5, 40.5, 53.5]
    assert [i - 63.5 for i in table[8:]] == upper
    assert round(step, 5) == 0.05129


def test_tables_are_read_only_and_errors_name_the_value():
    with pytest.raises(ValueError, match="read-only"):
        polar.lloyd_max(4)[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        polar.centroids(4, 64)[0] = 0
    for call in (polar.lloyd_max, polar.integer_centroids, lambda b: polar.centroids(b, 64)):
        with pytest.raises(ValueError, match="bits=5 must be 2, 3 or 4"):
            call(5)
        with pytest.raises(TypeError, match="bits=4.5 must be an integer"):
            call(4.5)
    with pytest.raises(ValueError, match="head_dim=0 must be at least 1"):
        polar.centroids(4, 0)
