"""`tj.polar`'s rotation: orthogonal, the same everywhere, and what it makes of coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.caches.cache_helpers import assert_same_bits
from tests.oracles import polar as oracle
from turbojax import polar

HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def vectors(head_dim, count=50, seed=0):
    return np.random.default_rng(seed).normal(size=(count, head_dim)).astype(np.float32)


def rounding_bound(x):
    """Of a rotation in float32: each coordinate is a sum of `d` terms, up to 8 + 28 deep.

    No partial sum exceeds ``sum |x|``, the scaled result has two more roundings.
    """
    magnitude = np.abs(np.asarray(x, np.float64)).sum(-1, keepdims=True)
    return 38 * 2.0**-24 * magnitude / np.sqrt(x.shape[-1])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS[::2], 1, 2, 12, 56, 320])
def test_orthogonal_and_as_the_oracle(head_dim):
    """The matrix is Hadamard's with signs, exactly; both directions apply it."""
    rotation = polar.rotation(head_dim, seed=5)
    assert rotation.head_dim == head_dim
    root = np.sqrt(head_dim)
    matrix = np.asarray(rotation.matrix()).astype(np.float64) * root
    integers = np.rint(matrix).astype(int)
    assert np.abs(matrix - integers).max() < 1e-6
    np.testing.assert_array_equal(integers @ integers.T, head_dim * np.eye(head_dim, dtype=int))
    want = oracle.rotation_matrix(head_dim, 5)
    np.testing.assert_array_equal(integers, np.rint(want * root))

    x = vectors(head_dim)
    bound = rounding_bound(x)
    turned = polar.rotate(jnp.asarray(x), rotation)
    assert turned.dtype == jnp.float32
    assert (np.abs(np.asarray(turned, np.float64) - x @ want.T) <= bound).all()
    back = polar.unrotate(jnp.asarray(x), rotation)
    assert (np.abs(np.asarray(back, np.float64) - x @ want) <= bound).all()


@pytest.mark.parametrize("head_dim", [3, 6, 10, 14, 36, 49, 72, 100, 144])
def test_other_head_dims_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"head_dim={head_dim} must be a power of two, or 12, 20"):
        polar.rotation(head_dim)


def test_signs_are_the_same_everywhere():
    """Pinned: caches written elsewhere are read with them."""
    got = "".join("-" if s < 0 else "+" for s in np.asarray(polar.rotation(16).signs))
    assert got == "-+++-------+-+-+"
    np.testing.assert_array_equal(polar.rotation(128, 7).signs, oracle.signs(128, 7))
    assert (np.asarray(polar.rotation(128, 7).signs) != polar.rotation(128, 8).signs).any()


@pytest.mark.quick(1)
@pytest.mark.optimized
@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.bfloat16, 128), (jnp.float32, 80)])
def test_bits_do_not_depend_on_the_array_around(head_dim, dtype):
    rotation = polar.rotation(head_dim)
    x = jnp.asarray(vectors(head_dim, 60), dtype)
    for turn in (polar.rotate, polar.unrotate):
        want = turn(x, rotation)
        assert_same_bits(turn(x[17], rotation), want[17])
        assert_same_bits(turn(x[3:10], rotation), want[3:10])
        assert_same_bits(turn(x.reshape(3, 1, 5, 4, head_dim), rotation).reshape(want.shape), want)
        assert_same_bits(jax.jit(turn)(x, rotation), want)
        assert_same_bits(jax.vmap(turn, (0, None))(x, rotation), want)
        mapped = jax.jit(lambda x, turn=turn: jax.lax.map(lambda v: turn(v, rotation), x))
        assert_same_bits(mapped(x), want)


def test_made_under_jit_and_differentiated():
    """The derivative of a rotation is its inverse's map."""
    x = jnp.asarray(vectors(80, 3))
    pull = jax.jit(lambda x, g: jax.vjp(lambda x: polar.rotate(x, polar.rotation(80)), x)[1](g)[0])
    weight = jnp.asarray(vectors(80, 3, seed=1))
    want = np.asarray(weight, np.float64) @ oracle.rotation_matrix(80, 0)
    assert (np.abs(np.asarray(pull(x, weight)) - want) <= rounding_bound(weight)).all()


def test_nan_and_infinity_stay():
    x = np.ones((3, 64), np.float32)
    x[1, 5], x[2, 60] = np.nan, np.inf
    turned = np.asarray(polar.rotate(jnp.asarray(x), polar.rotation(64)))
    assert np.isfinite(turned[0]).all()
    assert not np.isfinite(turned[1:]).any()


# The law of rotated coordinates ------------------------------------------------------------------


def cell_counts(coordinates, bits=4):
    table = oracle.lloyd_max(bits)
    edges = 0.5 * (table[1:] + table[:-1])
    return edges, np.bincount(np.searchsorted(edges, coordinates.ravel()), minlength=len(table))


def unit_coordinates(x, turned=True):
    """``sqrt(d) u`` of each vector."""
    y = np.asarray(polar.rotate(jnp.asarray(x, jnp.float32), polar.rotation(x.shape[-1])))
    y = y if turned else x
    return y * np.sqrt(x.shape[-1]) / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotated_normal_vectors_are_uniform_on_the_sphere(head_dim):
    """Chi-square over 16 cells: its mean is 15 and its deviation sqrt(30); five of them allowed.

    One coordinate of each vector, so that the counts are independent.
    """
    count = 100_000
    x = np.random.default_rng(head_dim).normal(size=(count, head_dim))
    index = np.random.default_rng(1).integers(0, head_dim, size=(count, 1))
    edges, counts = cell_counts(np.take_along_axis(unit_coordinates(x), index, axis=-1))
    expected = count * oracle.sphere_cells(edges, head_dim)
    assert ((counts - expected) ** 2 / expected).sum() < 15 + 5 * np.sqrt(30)


@pytest.mark.quick(2)
@pytest.mark.parametrize("data", ["scaled channels", "outlier channels", "heavy tails"])
def test_rotated_spiky_vectors_are_nearly_normal(data):
    """Chi-square per sample, which is far from zero before the rotation and near it after."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4000, 128))
    if data == "scaled channels":
        x *= np.exp(rng.normal(size=128))
    elif data == "outlier channels":
        x[:, [5, 40, 77, 100]] += [8, -6, 10, 7]
    else:
        x = rng.standard_t(2.5, size=x.shape)

    def divergence(turned):
        edges, counts = cell_counts(unit_coordinates(x, turned))
        law = oracle.sphere_cells(edges, 128)
        return ((counts / counts.sum() - law) ** 2 / law).sum()

    assert divergence(False) > 0.1
    assert divergence(True) < 0.02


# Errors ------------------------------------------------------------------------------------------


def test_errors_name_value_and_requirement():
    rotation = polar.rotation(64)
    x = jnp.ones((2, 64))
    with pytest.raises(ValueError, match=r"x.shape=\(2, 32\) must be \[..., 64\]"):
        polar.rotate(x[:, :32], rotation)
    with pytest.raises(ValueError, match=r"x.shape=\(\) must be"):
        polar.unrotate(x[0, 0], rotation)
    with pytest.raises(TypeError, match="x.dtype=int32"):
        polar.rotate(x.astype(jnp.int32), rotation)
    with pytest.raises(TypeError, match="rotation is a ArrayImpl, must be a polar.Rotation"):
        polar.rotate(x, rotation.signs)
    with pytest.raises(ValueError, match="head_dim=0 must be at least 1"):
        polar.rotation(0)
    with pytest.raises(TypeError, match="head_dim=64.0 must be an integer"):
        polar.rotation(64.0)
    with pytest.raises(ValueError, match="seed=-1 must not be negative"):
        polar.rotation(64, -1)
    with pytest.raises(TypeError, match="seed=0.5 must be an integer"):
        polar.rotation(64, 0.5)
