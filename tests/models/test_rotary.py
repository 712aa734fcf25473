"""Rotary embeddings against loops over pairs in float64, scalings against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.rotary_helpers import FAR, ROTARIES
from turbojax.models import TransformerConfig
from turbojax.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
    rotate,
)

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)
LONG = LongRopeScaling((1.0,), (2.0,), 16)


def rotate_one(vector, position, frequencies, amplitude=1.0):
    """One head's vector, pair by pair, as complex numbers."""
    out, half = vector.copy(), len(frequencies)
    for i, frequency in enumerate(frequencies):
        pair = complex(vector[i], vector[i + half]) * np.exp(1j * position * frequency) * amplitude
        out[i], out[i + half] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
@pytest.mark.parametrize(
    "scaling", [None, LinearScaling(4.0), YarnScaling(4.0, 64, attention_factor=1.25)]
)
def test_rotation_of_every_pair(rotary_dim, scaling):
    rope = Rope(12, theta=100.0, rotary_dim=rotary_dim, scaling=scaling)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 12)).astype(np.float32)
    positions = rng.integers(0, 300, (2, 5))
    out = np.asarray(rope.rotate(jnp.asarray(x), rope.angles(jnp.asarray(positions))))
    for index in np.ndindex(2, 5, 3):
        expected = rotate_one(
            x[index].astype(np.float64), positions[index[:2]], rope.frequencies(), rope.amplitude
        )
        # An angle of 300 radians has a rounding unit of 3e-5.
        np.testing.assert_allclose(out[index], expected, atol=2e-4)


def test_scores_depend_on_distance_alone():
    rope = Rope(16, scaling=LLAMA3)
    q, k = (np.random.default_rng(i).standard_normal((1, 1, 1, 16)) for i in range(2))

    def score(at, to):
        rotated = [
            rope.rotate(jnp.asarray(x, jnp.float32), rope.angles(jnp.array([[p]])))
            for x, p in ((q, at), (k, to))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(40, 17) == pytest.approx(score(23, 0), abs=1e-4)


def test_plain_and_linear_frequencies():
    plain = [500.0 ** (-2 * i / 8) for i in range(4)]
    np.testing.assert_allclose(Rope(8, 500.0).frequencies(), plain)
    scaled = Rope(8, 500.0, scaling=LinearScaling(2.5)).frequencies()
    np.testing.assert_allclose(scaled, np.array(plain) / 2.5)


def test_llama3_keeps_high_and_divides_low_frequencies():
    plain = Rope(128, 500000.0).frequencies()
    scaled = Rope(128, 500000.0, scaling=LLAMA3).frequencies()
    seen = set()
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            seen.add("kept")
            assert after == pytest.approx(before)
        elif wavelength > 8192:
            seen.add("divided")
            assert after == pytest.approx(before / 8)
        else:
            seen.add("between")
            smooth = (8192 / wavelength - 1) / 3
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert seen == {"kept", "divided", "between"}


def test_yarn_by_its_formula():
    dim, theta, length, factor = 64, 10000.0, 4096, 16.0
    scaling = YarnScaling(factor, length)
    rope = Rope(dim, theta, scaling=scaling)
    assert rope.amplitude == pytest.approx(0.1 * math.log(factor) + 1)

    def correction(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(correction(32)), math.ceil(correction(1))
    for i, after in enumerate(rope.frequencies()):
        before = theta ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert after == pytest.approx(before * (1 - ramp) + before / factor * ramp)


@pytest.mark.parametrize(("max_length", "long"), [(1, False), (16, False), (17, True), (64, True)])
def test_long_rope_divides_each_frequency(max_length, long):
    short_factors, long_factors = (1.0, 1.5, 2.0, 3.0), (1.0, 2.0, 4.0, 8.0)
    scaling = LongRopeScaling(short_factors, long_factors, 16, 1.5)
    rope = Rope(8, scaling=scaling, max_length=max_length)
    factors = np.array(long_factors if long else short_factors)
    np.testing.assert_allclose(rope.frequencies(), Rope(8).frequencies() / factors)
    assert rope.amplitude == 1.5


def test_channels_beyond_rotary_dim_stay():
    x = jnp.arange(12.0).reshape(1, 1, 1, 12)
    rope = Rope(12, rotary_dim=4)
    out = rope.rotate(x, rope.angles(jnp.array([[3]])))
    assert np.array_equal(out[..., 4:], x[..., 4:])
    assert not np.array_equal(out[..., :4], x[..., :4])


def test_dtype_is_kept_and_nan_stays_in_its_pair():
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16).at[..., 1].set(jnp.nan)
    out = rotate(x, Rope(8).angles(jnp.array([[7]])))
    assert out.dtype == jnp.bfloat16
    assert np.isnan(np.asarray(out, np.float32)).nonzero()[-1].tolist() == [1, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rope(7), "head_dim=7 must be even"),
        (lambda: Rope(8, theta=0.0), "theta=0.0 must be positive"),
        (lambda: Rope(8, rotary_dim=3), "rotary_dim=3 must be even"),
        (lambda: Rope(8, rotary_dim=10), "rotary_dim=10 must be 2 to head_dim=8"),
        (lambda: Rope(0), "head_dim=0 must be at least 1"),
        (lambda: LinearScaling(0.5), "factor=0.5 must be finite and at least 1"),
        (lambda: Llama3Scaling(8, 4, 1, 8192), "low_freq_factor=4 must be positive and less"),
        (lambda: YarnScaling(4, 4096, 1, 32), "beta_slow=32 must be positive and less"),
        (lambda: LongRopeScaling((1.0, 0.0), (1.0, 1.0), 16), "short_factors hold 0.0"),
        (lambda: LongRopeScaling((1.0, 1.0), (1.0, 0.0), 16), "long_factors hold 0.0"),
        (lambda: LongRopeScaling((1.0,), (1.0,), 0), "original_max_length=0 must be finite and at"),
        (lambda: Rope(8, scaling=LONG, max_length=4), "1 LongRoPE factors must be 4"),
        (lambda: Rope(2, scaling=LONG), "max_length=None must be given"),
        (lambda: YarnScaling(4, 4096, attention_factor=0.0), "attention_factor=0.0 must be pos"),
        (lambda: YarnScaling(4, 4096, attention_factor=-1.0), "attention_factor=-1.0 must be pos"),
        (lambda: YarnScaling(4, 4096, attention_factor=math.nan), "attention_factor=nan must be"),
        (lambda: YarnScaling(4, 4096, beta_fast=math.inf), "beta_fast=inf must be finite"),
        (lambda: LongRopeScaling((1.0,), (1.0,), 16, 0.0), "attention_factor=0.0 must be positive"),
        (lambda: LongRopeScaling((1.0,), (1.0,), 16, math.inf), "attention_factor=inf must be"),
        (lambda: Llama3Scaling(8, 1, math.inf, 8192), "high_freq_factor=inf must be finite"),
        (lambda: Rope(8, theta=1.0, scaling=YarnScaling(4, 4096)), "theta=1.0 must be more than 1"),
        (lambda: Rope(8, theta=0.5, scaling=YarnScaling(4, 4096)), "theta=0.5 must be more than 1"),
        (lambda: Rope(2, max_length=4), "max_length=4 is of use for LongRoPE alone"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling("4"), "factor is a str, must be a Python number"),
        (lambda: LinearScaling(None), "factor=None must be a number"),
        (lambda: Llama3Scaling(8, "1", 4, 8192), "low_freq_factor is a str"),
        (lambda: YarnScaling(4, "4096"), "original_max_length is a str"),
        (lambda: YarnScaling(4, 4096, attention_factor="1"), "attention_factor is a str"),
        (lambda: LongRopeScaling(("1",), (1.0,), 16), "short_factors is a str"),
        (lambda: LongRopeScaling((1.0,), 1.0, 16), "long_factors=1.0 must be a tuple"),
        (lambda: Rope(8, theta="100"), "theta is a str"),
        (lambda: Rope(8, rotary_dim=4.0), "rotary_dim=4.0 must be an integer"),
    ],
)
def test_other_kinds(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_lists_of_factors_become_tuples():
    scaling = LongRopeScaling([1.0], [2.0], 16)
    assert scaling == LONG
    assert hash(Rope(2, scaling=scaling, max_length=4)) == hash(Rope(2, scaling=LONG, max_length=4))


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda p: jax.vmap(lambda row: f(row[None])[0])(p),
    "scan": lambda f: (
        lambda p: jax.lax.scan(lambda carry, row: (carry, f(row[None])[0]), None, p)[1]
    ),
}


@pytest.mark.parametrize("scaling", ["Llama-2-7b", "Llama-3.2-1B", "heads of 80"])
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "scan"])
def test_angles_next_to_float64(scaling, transform):
    """Within what float32 numbers allow, and the same bits in every transform."""
    rope = TransformerConfig.from_hf(ROTARIES[scaling]).rope
    positions = np.array([[0, 1, 700, 9_999], [FAR, FAR + 1, 2**17 - 1, 131_072]], np.int32)
    ours = np.asarray(TRANSFORMS[transform](rope.angles)(jnp.asarray(positions)))
    np.testing.assert_array_equal(ours, np.asarray(rope.angles(jnp.asarray(positions))))
    exact = positions[:, :, None, None] * rope.frequencies()
    # The exponent -2i/R is rounded to float32, which the power of theta multiplies with ln(theta);
    # then the power, its reciprocal, up to five steps of a scaling, and the product.
    unit = 2.0**-24
    relative = unit * (np.log(rope.theta) + 1 + 1 + 5 + 1)
    assert np.all(np.abs(ours - exact) <= relative * exact)
