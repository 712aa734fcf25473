"""What makes `polar.encode` the same everywhere: roots and norms that comparisons decide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax import polar
from turbojax.polar import codec


def radicands():
    """At random, squares, next to squares, and around powers of two."""
    rng = np.random.default_rng(0)
    wide = np.exp(rng.uniform(np.log(codec.TINY), np.log(codec.HUGE), size=300_000))
    squares = np.arange(2**23, 2**23 + 100_000).astype(np.float64) ** 2 * 2.0**-46
    powers = np.float32(2.0) ** np.arange(-59, 40, dtype=np.float32)
    near = (powers.view(np.int32)[:, None] + np.arange(-20, 21, dtype=np.int32)).view(np.float32)
    squares = squares.astype(np.float32)
    around = [np.nextafter(squares, np.float32(side)) for side in (0, 9)]
    return np.concatenate([wide.astype(np.float32), near.ravel(), squares, *around])


@pytest.mark.parametrize("units", range(-2, 3))
def test_roots_do_not_depend_on_the_approximation(units):
    """From a root that is off by so many units in the last place, numpy's, which is exact."""
    x = radicands()
    want = np.sqrt(x)
    root = jnp.asarray((want.view(np.int32) + np.int32(units)).view(np.float32))
    for _ in range(2):
        root = jax.jit(codec._nearer_root)(root, jnp.asarray(x))
    np.testing.assert_array_equal(root, want)
    np.testing.assert_array_equal(jax.jit(codec._exact_root)(jnp.asarray(x)), want)


def test_norms_are_rounded_to_nearest():
    """Within half a unit of float16 and the rounding of one product, subnormal numbers too."""
    rng = np.random.default_rng(1)
    squares = np.exp(rng.uniform(np.log(2.0**-59), np.log(2.0**33), 200_000)).astype(np.float32)
    levels = rng.uniform(0.02, 7.4, squares.size).astype(np.float32)
    exact = np.sqrt(squares.astype(np.float64) / levels)
    got = np.asarray(jax.jit(codec._corrected)(jnp.asarray(squares), jnp.asarray(levels)))
    inside = exact < 65504 * (1 - 2.0**-23)
    beyond = exact > 65504 * (1 + 2.0**-23)
    assert min(inside.sum(), beyond.sum()) > 500
    assert np.isinf(got[beyond]).all()
    got, exact = got[inside].astype(np.float64), exact[inside]
    np.testing.assert_array_equal(got, got.astype(np.float16))
    unit = np.maximum(2.0 ** (np.floor(np.log2(exact)) - 10), 2.0**-24)
    assert (np.abs(got - exact) <= unit / 2 + exact * 2.0**-23).all()
    assert (got == 0).any()
    assert (got == 2.0**-24).any()


def test_norms_halfway_between_two_go_up():
    """Of roots that are exact midpoints of float16; what is next below them stays below."""
    lower = np.arange(1024, 2048).astype(np.float32)
    squares = (lower + np.float32(0.5)) ** 2
    found = jax.jit(codec._corrected)
    one = jnp.ones(squares.size)
    np.testing.assert_array_equal(found(jnp.asarray(squares), one), lower + 1)
    below = np.nextafter(squares, np.float32(0))
    np.testing.assert_array_equal(found(jnp.asarray(below), one), lower)


def test_tables():
    """Their sums fit 31 bits, and their unit leaves the mean of the squares."""
    for head_dim in (16, 80, 128, 256):
        tables = codec.level_tables(4, head_dim)
        assert 2**29 < head_dim * max(tables.squares) < 2**31
        mean = np.asarray(tables.squares) * np.float64(tables.unit) * head_dim
        np.testing.assert_allclose(mean, polar.lloyd_max(4) ** 2, rtol=1e-5)
        assert tables.thresholds == tuple(-t for t in tables.thresholds[::-1])
