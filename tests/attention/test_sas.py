"""SAS: how near to `exp`, where exactly zero, safe at the row maximum; and its softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import turbojax as tj
from tests import oracles

BASES = ("e", "2")
RUNS = {"eager": lambda f: f, "jit": jax.jit}


@pytest.fixture(params=BASES)
def base(request):
    return request.param


@pytest.fixture(params=RUNS, ids=str)
def run(request):
    return RUNS[request.param]


@pytest.mark.quick(3)
def test_near_exp_on_the_kept_range(base, run):
    """Within 5e-4 of exp everywhere on [-6, 0], whole numbers and their neighbours included."""
    whole = np.arange(-6, 1, dtype=np.float32)
    x = np.concatenate(
        [
            np.linspace(-6, 0, 200_001, dtype=np.float32),
            whole,
            np.nextafter(whole[1:], np.float32(-9)),
            np.nextafter(whole[:-1], np.float32(9)),
        ]
    )
    got = np.asarray(run(tj.SAS(base=base))(jnp.asarray(x)), np.float64)
    assert np.abs(got - np.exp(x.astype(np.float64))).max() < 5e-4


@pytest.mark.quick(2)
def test_equals_the_oracle_away_from_whole_steps(base, run):
    """The published formula, to float32 rounding."""
    steps = np.linspace(0, 9, 50_001)
    fraction = steps - np.floor(steps)
    steps = steps[(fraction > 1e-4) & (fraction < 1 - 1e-4)]
    x = (-steps * (1.0 if base == "e" else np.log(2))).astype(np.float32)
    got = np.asarray(run(tj.SAS(base=base))(jnp.asarray(x)), np.float64)
    np.testing.assert_allclose(got, oracles.sas(x, base=base), rtol=2e-6, atol=0)


@pytest.mark.quick(2)
def test_exactly_zero_below_the_threshold(base, run):
    """Nothing below -6, the threshold itself still counts, and -inf is nothing."""
    below = np.array(
        [np.nextafter(np.float32(-6), np.float32(-7)), -6.5, -7, -100, -3e38, -np.inf], np.float32
    )
    sas = run(tj.SAS(base=base))
    np.testing.assert_array_equal(np.asarray(sas(jnp.asarray(below))), np.zeros(6, np.float32))
    at = float(sas(jnp.full((1,), -6.0, jnp.float32))[0])
    assert abs(at - np.exp(-6.0)) < 5e-4
    assert at > 0


@pytest.mark.parametrize("threshold", [-1.0, -3.5, -10.0])
def test_other_thresholds(base, threshold):
    """The threshold is where the weights end, whatever it is."""
    x = np.linspace(-12, 0, 4001, dtype=np.float32)
    got = np.asarray(jax.jit(tj.SAS(threshold=threshold, base=base))(jnp.asarray(x)))
    np.testing.assert_array_equal(got == 0, x < threshold)


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name
)
def test_one_at_zero_and_at_tiny_positive_rounding(base, run, dtype):
    """1 +- 4e-4 (and the dtype's own rounding) at 0 and just above: never off by a factor."""
    x = jnp.asarray([0.0, -0.0, 1e-7, 1e-6, 1e-3, 2.0**-20], dtype)
    got = run(tj.SAS(base=base))(x)
    assert got.dtype == dtype
    own = 0.0 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps) / 2
    assert np.abs(np.asarray(got, np.float64) - 1).max() <= 4e-4 + 1e-7 + own


def test_safe_under_a_contracted_row_maximum(base):
    """`s * c - m * c` compiled as one FMA may leave the maximum above 0: weight still 1."""
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) * 1e3
    scale = np.float32(0.0883883)

    def weights(scores):
        top = jnp.max(scores, axis=-1, keepdims=True)
        return tj.SAS(base=base)(scores * scale - top * scale)

    got = np.asarray(jax.jit(weights)(jnp.asarray(x)))
    # The contraction moves the maximum by the rounding of one product, here up to 3e-5.
    assert np.abs(got.max(-1) - 1).max() < 4e-4 + 3e-5
    assert got.max() < 1 + 4e-4


def test_nan_is_not_hidden(base, run):
    assert np.isnan(np.asarray(run(tj.SAS(base=base))(jnp.asarray([np.nan], jnp.float32))))[0]


@pytest.mark.quick(1)
def test_works_under_vmap_and_on_any_shape(base):
    x = jnp.asarray(-np.random.default_rng(0).exponential(size=(3, 4, 5)), jnp.float32)
    sas = tj.SAS(base=base)
    np.testing.assert_array_equal(jax.vmap(sas)(x), sas(x))
    assert sas(x[0, 0, 0]).shape == ()


def test_printed_cubic_is_least_squares():
    """The paper's coefficients: the fit of exp(-f) on [0, 1), printed to four digits."""
    best = np.array(oracles.least_squares_cubic(np.e))
    np.testing.assert_allclose(oracles.PRINTED_CUBIC, best, atol=2e-4)
    f = np.linspace(0, 1, 10_001)

    def rms(cubic):
        return np.sqrt(np.mean((np.polyval(cubic, f) - np.exp(-f)) ** 2))

    assert rms(oracles.PRINTED_CUBIC) < 1.1 * rms(best)


@pytest.mark.parametrize(("base", "value"), [("e", np.e), ("2", 2.0)])
def test_cubic_in_use_is_least_squares(base, value):
    """Recovers the cubic from one step of the function itself and compares it with the fit."""
    f = np.linspace(0, 1, 513)[1:-1]
    x = (-f * np.log(value)).astype(np.float32)
    cubic = np.polyfit(
        -x.astype(np.float64) / np.log(value),
        np.asarray(tj.SAS(base=base)(jnp.asarray(x)), np.float64),
        3,
    )
    best = oracles.least_squares_cubic(value)
    np.testing.assert_allclose(cubic, best, atol=2e-4 if base == "e" else 5e-6)


def test_base_two_is_finer():
    """Halvings are shorter than e-folds: the refitted cubic errs by about 1e-4."""
    x = np.linspace(-6, 0, 20_001, dtype=np.float32)
    got = np.asarray(tj.SAS(base="2")(jnp.asarray(x)), np.float64)
    assert np.abs(got - np.exp(x.astype(np.float64))).max() < 1.1e-4


def test_is_a_static_value():
    """Equal by value and hashable, so that it can be static under jit."""
    assert tj.SAS() == tj.SAS(-6.0, "e")
    assert hash(tj.SAS(base="2")) == hash(tj.SAS(base="2"))
    assert tj.SAS() != tj.SAS(base="2")


# sas_softmax -------------------------------------------------------------------------------------


def softmax_oracle(x, axis, base, where=None):
    x = x.astype(np.float64)
    where = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    top = np.where(where, x, -np.inf).max(axis, keepdims=True)
    p = np.where(where, oracles.sas(np.where(where, x, 0) - np.where(where, top, 0), base=base), 0)
    total = p.sum(axis, keepdims=True)
    return p / np.where(total == 0, 1, total)


def scores_away_from_steps(seed, shape, axis, base):
    """Scores whose distances to the row maximum keep clear of the steps of SAS."""
    rng = np.random.default_rng(seed)
    unit = 1.0 if base == "e" else np.log(2)
    distance = (rng.integers(0, 10, shape) + rng.uniform(0.01, 0.99, shape)) * unit
    # The largest weight of every row is the row maximum itself.
    x = 0.25 - distance
    first = [slice(None)] * len(shape)
    first[axis] = 0
    x[tuple(first)] = 0.25
    return x.astype(np.float32)


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_equals_the_oracle(base, axis, run):
    x = scores_away_from_steps(1, (6, 7, 33), axis, base)
    got = run(lambda v: tj.sas_softmax(v, axis=axis, sas=tj.SAS(base=base)))(jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(got), softmax_oracle(x, axis, base), rtol=4e-6, atol=1e-9)


def test_softmax_sums_to_one_and_is_near_the_exact_one(base):
    x = np.random.default_rng(2).uniform(-5.9, 0, (16, 400)).astype(np.float32)
    got = np.asarray(tj.sas_softmax(jnp.asarray(x), sas=tj.SAS(base=base)), np.float64)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)
    total = np.exp(x.astype(np.float64)).sum(-1, keepdims=True)
    exact = np.exp(x.astype(np.float64)) / total
    # Numerators err by 5e-4, the sum of 400 by 400 times that.
    assert (np.abs(got - exact) <= 5e-4 / total + exact * 400 * 5e-4 / total + 1e-6).all()


def test_softmax_mask(run):
    """Masked entries get exactly 0 whatever they hold; a row without entries is all zeros."""
    x = scores_away_from_steps(3, (4, 50), -1, "e")
    mask = np.random.default_rng(3).random((4, 50)) < 0.5
    mask[:, 0], mask[2] = True, False
    dirty = np.where(mask, x, np.float32(np.nan))
    got = np.asarray(
        run(lambda v, w: tj.sas_softmax(v, where=w))(jnp.asarray(dirty), jnp.asarray(mask))
    )
    np.testing.assert_array_equal(got[~mask], 0)
    np.testing.assert_array_equal(got[2], 0)
    np.testing.assert_allclose(got, softmax_oracle(x, -1, "e", mask), rtol=4e-6, atol=1e-9)


def test_softmax_of_minus_infinity(run):
    """-inf scores are how masks are often written: weight 0, and a row of them is all zeros."""
    x = jnp.asarray([[-np.inf, 1.0, -np.inf], [-np.inf, -np.inf, -np.inf]], jnp.float32)
    got = np.asarray(run(tj.sas_softmax)(x))
    np.testing.assert_allclose(got, [[0, 1, 0], [0, 0, 0]], atol=1e-6)


def test_softmax_nan_reaches_its_row_only(run):
    x = jnp.asarray([[0.0, np.nan, -1.0], [0.0, -1.0, -2.0]], jnp.float32)
    got = np.asarray(run(tj.sas_softmax)(x))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_softmax_keeps_the_dtype(dtype):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 65)), dtype)
    got = tj.sas_softmax(x)
    assert got.dtype == dtype
    want = tj.sas_softmax(x.astype(jnp.float32))
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want), rtol=float(jnp.finfo(dtype).eps), atol=1e-6
    )


@settings(max_examples=30)
@given(st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=1), st.integers(0, 2**31))
def test_softmax_ignores_a_shift(shift, seed):
    """Whole rows moved by a power-of-two-exact shift weigh the same."""
    x = np.round(np.random.default_rng(seed).uniform(-8, 8, 40) * 64) / 64
    moved = x + np.round(shift[0])
    a, b = (np.asarray(tj.sas_softmax(jnp.asarray(v, jnp.float32))) for v in (x, moved))
    np.testing.assert_array_equal(a, b)
