"""CAS and PTS against their definitions, in float64 and in exact fractions."""

from fractions import Fraction

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from turbojax.smoothing import channel_absmean_scale, per_tensor_scale

LOW, HIGH = Fraction(7, 2**9), Fraction(7 * 2**6)
EPS = np.finfo(np.float32).eps


def uneven_weight(out=96, inputs=40, seed=0) -> np.ndarray:
    """Gaussian, with columns of very different sizes."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((out, inputs)) * np.exp(rng.standard_normal(inputs))


# Channel-wise absmean scaling.


@pytest.mark.parametrize("target", [None, 0.25])
def test_cas_is_definition_3_1(target):
    w = uneven_weight()
    w[:, 3] = 0
    means = np.abs(w).mean(0)
    goal = means.mean() if target is None else target
    want = np.where(means == 0, 1, goal / np.where(means == 0, 1, means))
    got = channel_absmean_scale(jnp.asarray(w, jnp.float32), target=target)
    assert got.dtype == jnp.float32
    # Two float32 sums of non-negative numbers, of 96 and 40 terms.
    np.testing.assert_allclose(got, want, rtol=(96 + 40) * EPS)
    with jax.enable_x64(True):
        got = np.asarray(channel_absmean_scale(jnp.asarray(w), target=target))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)
    scaled = np.abs(w * got).mean(0)
    np.testing.assert_allclose(np.delete(scaled, 3), goal, rtol=1e-14)


def test_cas_of_weights_that_share_an_input_counts_all_their_rows():
    a, b = uneven_weight(24, seed=1), uneven_weight(72, seed=2)
    with jax.enable_x64(True):
        got = channel_absmean_scale([jnp.asarray(a), jnp.asarray(b)])
        want = channel_absmean_scale(jnp.concatenate([jnp.asarray(a), jnp.asarray(b)]))
        mixed = channel_absmean_scale([jnp.asarray(a, jnp.float32), jnp.asarray(b)])
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-14)
    assert mixed.dtype == jnp.float64
    np.testing.assert_allclose(np.asarray(mixed), np.asarray(want), rtol=EPS)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_cas_of_narrow_weights_is_that_of_their_values(dtype):
    w = jnp.asarray(uneven_weight(), dtype)
    got = channel_absmean_scale(w)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, channel_absmean_scale(w.astype(jnp.float32)))


@pytest.mark.slow
@hypothesis.given(
    w=hypothesis.extra.numpy.arrays(
        np.float64,
        st.sampled_from([(1, 1), (3, 5), (6, 2)]),  # few, because each compiles
        elements=st.floats(-100, 100),
    ),
    seed=st.integers(0, 99),
)
def test_cas_leaves_products_unchanged(w, seed):
    x = np.random.default_rng(seed).standard_normal((3, w.shape[1]))
    with jax.enable_x64(True):
        scale = np.asarray(channel_absmean_scale(jnp.asarray(w)))
    assert np.isfinite(scale).all()
    assert (scale > 0).all()
    error = np.abs((x / scale) @ (w * scale).T - x @ w.T)
    # Rounding, of operands, products and sums; subnormal weights have absolute errors instead.
    bound = 8 * np.finfo(np.float64).eps * (np.abs(x) @ np.abs(w).T) + 1e-290
    assert (error <= bound).all()


def test_cas_of_zeros_and_of_next_to_nothing_is_one():
    w = np.zeros((4, 3), np.float32)
    np.testing.assert_array_equal(channel_absmean_scale(w), 1)
    w[:, 1] = 1
    w[:, 2] = 1e-40  # a factor to even this out would be infinite
    np.testing.assert_allclose(channel_absmean_scale(w), [1, 1 / 3, 1], rtol=EPS)


def test_cas_under_jit_keeps_nan_in_its_column():
    w = uneven_weight().astype(np.float32)
    np.testing.assert_allclose(
        jax.jit(channel_absmean_scale)(w), channel_absmean_scale(w), rtol=200 * EPS
    )
    w[5, 2] = np.nan
    got = np.asarray(jax.jit(lambda w: channel_absmean_scale(w, target=1.0))(w))
    assert np.flatnonzero(np.isnan(got)).tolist() == [2]


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        (np.ones((2, 2), np.int32), {}, TypeError, "must be floating point"),
        (np.ones(4, np.float32), {}, ValueError, r"must be \[out, in\]"),
        (np.ones((0, 4), np.float32), {}, ValueError, "no axis empty"),
        ([], {}, ValueError, "at least one"),
        ([np.ones((2, 4), np.float32), np.ones((2, 5), np.float32)], {}, ValueError, r"\[4, 5\]"),
        (np.full((2, 2), np.nan, np.float32), {}, ValueError, "finite"),
        (np.full((2, 2), np.inf, np.float32), {}, ValueError, "finite"),
        (np.ones((2, 2), np.float32), {"target": 0.0}, ValueError, "target=0.0 must be positive"),
        (np.ones((2, 2), np.float32), {"target": "1"}, TypeError, "Python number"),
    ],
)
def test_cas_refuses(weight, options, error, message):
    with pytest.raises(error, match=message):
        channel_absmean_scale(weight, **options)


# Per-tensor scaling.


def underflow(weight: list[Fraction], n: int) -> Fraction:
    """S(W 2^n) of Eq. 8, exactly."""
    return sum((max(Fraction(0), LOW - abs(w) * 2**n) for w in weight), Fraction(0))


def meets_a_condition(weight: list[Fraction], n: int, beyond: int) -> bool:
    """Def. 3.2 word by word; `beyond` is an exponent at which nothing underflows any more."""
    here = underflow(weight, n)
    first = all(underflow(weight, n + i) == here for i in range(1, max(beyond - n, 0) + 3))
    second = any(7 * Fraction(2) ** (5 - n) <= abs(w) < 7 * Fraction(2) ** (6 - n) for w in weight)
    return first or second


def smallest_exponent(weight: np.ndarray, most: int = 126) -> int:
    """n of Def. 3.2, by trying 0, 1, 2, ..."""
    values = [Fraction(float(w)) for w in weight.ravel()]
    beyond = 0
    while any(w != 0 and abs(w) * 2**beyond < LOW for w in values):
        beyond += 1
    return next(n for n in range(most + 1) if meets_a_condition(values, n, beyond))


def exponent(weight: np.ndarray) -> int:
    delta = float(per_tensor_scale(jnp.asarray(weight)))
    assert delta == 2.0 ** round(np.log2(delta))
    return round(np.log2(delta))


MAGNITUDES = st.one_of(
    st.just(0.0),
    st.floats(2.0**-60, 447.0, width=32),
    # Around the limits of both conditions, where a binade more or less decides.
    st.builds(
        lambda e, step: float(np.float32(7 * 2.0**e) * np.float32(1 + step * EPS)),
        st.integers(-50, 5),
        st.integers(-2, 2),
    ),
)


@pytest.mark.slow
@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(st.tuples(MAGNITUDES, st.sampled_from([-1, 1])), min_size=1, max_size=5))
def test_pts_is_the_smallest_exponent_that_meets_one_of_the_conditions(weight):
    w = np.array([sign * magnitude for magnitude, sign in weight], np.float32)
    hypothesis.assume(np.abs(w).max() < 448)
    n = exponent(w)
    assert n == smallest_exponent(w)
    # The point of the second condition.
    assert max(abs(Fraction(float(x))) for x in w) * 2**n < HIGH


@pytest.mark.parametrize(
    ("weight", "n"),
    [
        ([0.0, 0.0], 0),
        ([1.0], 0),
        ([7 * 2.0**-9], 0),
        ([np.nextafter(np.float32(7 * 2.0**-9), np.float32(0))], 1),
        ([7 * 2.0**-9 / 1024, 1.0], 8),  # by the second condition, ten would be enough
        ([7 * 2.0**-9 / 1024, 0.25], 10),  # by the first
        ([1e-20, 223.9], 1),
        ([1e-20, 224.0], 0),
        ([1e-20, 447.9], 0),
    ],
)
def test_pts_at_the_limits(weight, n):
    w = np.array(weight, np.float32)
    assert smallest_exponent(w) == n
    assert exponent(w) == n


def test_pts_never_scales_a_weight_further_beyond_the_limit():
    """The definition's word would: the second condition looks for some other weight."""
    w = np.array([500.0, 3.0, 1e-6], np.float32)
    assert smallest_exponent(w) > 0
    assert exponent(w) == 0


def test_pts_and_its_reciprocal_are_normal_numbers():
    tiny = np.finfo(np.float32).tiny
    delta = per_tensor_scale(jnp.asarray([tiny], jnp.float32))
    # Condition 1 asks for 2^120.
    assert float(delta) == 2.0**120
    assert exponent(np.array([tiny, 1e-45], np.float32)) == 120  # a subnormal counts as zero
    with jax.enable_x64(True):
        delta = np.asarray(per_tensor_scale(jnp.asarray([1e-200])))
    assert delta.dtype == np.float64
    assert delta == 2.0**126
    assert 1 / np.float32(delta) >= tiny


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_pts_follows_the_values_whatever_their_dtype(dtype):
    w = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)) * 1e-3, dtype)
    delta = per_tensor_scale(w)
    assert delta.shape == ()
    assert delta.dtype == jnp.float32
    assert exponent(np.asarray(w, np.float32)) == smallest_exponent(np.asarray(w, np.float32))
    assert float(jax.jit(per_tensor_scale)(w)) == float(delta)


def int4_error(w: np.ndarray) -> float:
    """Relative RMSE of INT4 with an e4m3 scale per 128 weights, the scale at least 2^-9."""
    groups = w.reshape(-1, 128).astype(np.float64)
    sigma = (np.abs(groups).max(1, keepdims=True) / 7).astype(ml_dtypes.float8_e4m3fn)
    sigma = np.maximum(sigma.astype(np.float64), 2.0**-9)
    codes = np.clip(np.rint(groups / sigma), -8, 7)
    return float(np.sqrt(np.mean((codes * sigma - groups) ** 2) / np.mean(groups**2)))


@pytest.mark.parametrize("size", [1e-5, 1e-3, 3e-3])
def test_pts_saves_small_weights_from_underflow(size):
    w = np.random.default_rng(0).standard_normal((32, 512)) * size
    before, delta = int4_error(w), float(per_tensor_scale(w.astype(np.float32)))
    after = int4_error(w * delta)
    # As far as a 4-bit code with an e4m3 scale gets with Gaussian weights.
    assert after < 0.125
    # The groups' scales would be near size * 0.4, of which 2^-9 = 2e-3 is the smallest.
    assert before > {1e-5: 0.999, 1e-3: 0.25, 3e-3: 0.15}[size]


def test_pts_refuses():
    with pytest.raises(TypeError, match="floating point"):
        per_tensor_scale(np.ones(3, np.int8))
    with pytest.raises(ValueError, match="empty"):
        per_tensor_scale(np.ones((0, 3), np.float32))
    for bad in (np.nan, np.inf):
        w = np.array([1.0, bad], np.float32)
        with pytest.raises(ValueError, match="finite"):
            per_tensor_scale(w)
        assert np.isnan(jax.jit(per_tensor_scale)(w))
