"""Quantizers and packing against integer oracles: the same bits, and the promised errors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from turbojax import quantizers

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
BITS = (2, 3, 4)


@pytest.fixture(params=DTYPES, ids=lambda d: jnp.dtype(d).name)
def dtype(request):
    return request.param


@pytest.fixture(params=BITS, ids="{}bit".format)
def bits(request):
    return request.param


def normal(shape, dtype=jnp.float32, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


# Each as one program: one by one their operations take longer to compile.
quantize_int8 = jax.jit(quantizers.quantize_int8, static_argnames="axis")
quantize_channels = jax.jit(quantizers.quantize_channels, static_argnames="bits")
dequantize_channels = jax.jit(quantizers.dequantize_channels)

# Stage 1 -----------------------------------------------------------------------------------------


def assert_stage_1(x, axis):
    """Codes and scales are the oracle's, bit for bit, eager and compiled."""
    want, want_scale = oracles.quantize_int8(x, axis)
    for quantize in (quantizers.quantize_int8, quantize_int8):
        codes, scale = quantize(x, axis=axis)
        assert codes.dtype == jnp.int8
        assert scale.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(scale), want_scale)
        np.testing.assert_array_equal(np.asarray(codes), want)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("dtype", "axis"),
    [
        (jnp.float32, (1, 3)),
        (jnp.float32, 0),
        (jnp.bfloat16, -1),
        (jnp.bfloat16, (-2, -1)),
        (jnp.float16, (1, 3)),
    ],
    ids=str,
)
def test_stage_1_equals_the_oracle(dtype, axis):
    assert_stage_1(normal((3, 40, 5, 24), dtype, scale=3.0), axis)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e6, 3e38])
def test_stage_1_at_any_magnitude(magnitude):
    x = np.random.default_rng(5).uniform(-1, 1, (8, 64)).astype(np.float32)
    assert_stage_1(jnp.asarray(x * np.float32(magnitude)), -1)


def test_stage_1_breaks_ties_to_even():
    """Halves of a unit scale: rint goes to the even neighbour."""
    halves = np.arange(-118.5, 119, 1.0, dtype=np.float32)
    codes = quantizers.quantize_with_scale(jnp.asarray(halves), jnp.ones((1,), jnp.float32))
    np.testing.assert_array_equal(codes, np.rint(halves).astype(np.int8))


@pytest.mark.quick(1)
@pytest.mark.parametrize("compile_it", [False, True])
def test_stage_1_at_and_beside_every_tie(compile_it):
    """An approximate quotient may fall on either side: only exact comparisons get it right."""
    scale = oracles.sixteen_bits(np.random.default_rng(1).uniform(1e-3, 10, (500, 1)))
    ties = (np.arange(-119, 119) + np.float32(0.5)) * scale
    beside = [np.nextafter(ties, np.float32(side) * np.inf) for side in (-1, 1)]
    x = np.concatenate([ties, *beside], axis=1).astype(np.float32)
    quantize = quantizers.quantize_with_scale
    quantize = jax.jit(quantize) if compile_it else quantize
    codes = np.asarray(quantize(jnp.asarray(x), jnp.asarray(scale)))
    np.testing.assert_array_equal(codes, oracles.quantize_with_scale(x, scale))
    assert (codes[:, : ties.shape[1]] % 2 == 0).all()


def test_stage_1_of_zeros():
    codes, scale = quantizers.quantize_int8(jnp.zeros((2, 4, 8)), axis=(-2, -1))
    np.testing.assert_array_equal(scale, np.ones(2))
    np.testing.assert_array_equal(codes, np.zeros((2, 4, 8)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_stage_1_of_non_finite_blocks(dtype, bad):
    """Only the block that holds it turns NaN, and turns entirely."""
    x = np.array(normal((3, 16), seed=6))
    x[1, 7] = bad
    codes, scale = quantizers.quantize_int8(jnp.asarray(x, dtype), axis=-1)
    np.testing.assert_array_equal(np.isnan(scale), [False, True, False])
    want, want_scale = oracles.quantize_int8(jnp.asarray(x, dtype), -1)
    np.testing.assert_array_equal(np.asarray(scale), want_scale)
    np.testing.assert_array_equal(np.asarray(codes)[[0, 2]], want[[0, 2]])


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("quantize", [quantizers.quantize_int8, quantizers.quantize_fp8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_tokens_of_large_blocks(quantize, bad):
    """A vectorized maximum may lose a NaN: wherever it stands in a block, it is seen."""
    x = np.array(normal((2, 3, 64, 64), seed=6))
    for position in ((0, 0), (33, 5), (63, 63), (17, 32)):
        spoiled = x.copy()
        spoiled[1, 1][position] = bad
        for f in (quantize, jax.jit(quantize, static_argnames="axis")):
            scale = np.asarray(f(jnp.asarray(spoiled), axis=(-2, -1))[1])
            want = np.zeros((2, 3), bool)
            want[1, 1] = True
            np.testing.assert_array_equal(np.isnan(scale), want)


@pytest.mark.quick(2)
@pytest.mark.parametrize("top", [2.0**-126, 2.0**-130, 1e-44])
def test_stage_1_of_subnormal_blocks_stays_finite(top):
    """Scales that underflow never turn numbers into NaN, nor zeros into something."""
    x = jnp.asarray([top, -top, top / 2, 0.0], jnp.float32)
    codes, scale = quantizers.quantize_int8(x, axis=0)
    back = np.asarray(codes, np.float64) * float(scale)
    assert np.isfinite(back).all()
    assert np.abs(back).max() <= 2 * top
    assert back[3] == 0


finite = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(finite, min_size=32, max_size=32), st.sampled_from(DTYPES))
def test_stage_1_equals_the_oracle_on_anything(values, dtype):
    limit = 6e4 if dtype == jnp.float16 else 2.0**100
    x = jnp.asarray(np.clip(np.array(values, np.float32), -limit, limit).reshape(4, 8), dtype)
    codes, scale = quantizers.quantize_int8(x, axis=-1)
    want, want_scale = oracles.quantize_int8(x, -1)
    np.testing.assert_array_equal(np.asarray(scale), want_scale)
    np.testing.assert_array_equal(np.asarray(codes), want)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.floats(-20, 20))
def test_stage_1_error_is_at_most_half_a_step(seed, exponent):
    x = normal((4, 32), seed=seed, scale=2.0**exponent)
    codes, scale = quantizers.quantize_int8(x, axis=-1)
    step = np.asarray(scale, np.float64)[:, None]
    error = np.abs(np.asarray(codes, np.float64) * step - np.asarray(x, np.float64))
    # One part in 2**22 of the code: the quotient was itself rounded before it was rounded to int.
    assert (error <= step * (0.5 + 119 * 2.0**-23)).all()
    assert np.abs(np.asarray(codes)).max() == 119


@pytest.mark.quick(2)
def test_given_scale_clamps(dtype):
    x = normal((5, 64), dtype, seed=7, scale=4.0)
    scale = jnp.asarray(np.full((5, 1), 0.01, np.float32))
    codes = np.asarray(quantizers.quantize_with_scale(x, scale))
    np.testing.assert_array_equal(codes, oracles.quantize_with_scale(x, np.float32(0.01)))
    assert codes.max() == 119
    assert codes.min() == -119


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(2.0**-10, 4.0, width=32))
def test_given_scale_equals_the_oracle(seed, scale):
    x = normal((6, 16), seed=seed, scale=30.0)
    scales = np.full((6, 1), scale, np.float32)
    codes = quantizers.quantize_with_scale(x, jnp.asarray(scales))
    np.testing.assert_array_equal(np.asarray(codes), oracles.quantize_with_scale(x, scales))


def test_given_scale_clamps_the_largest_numbers():
    """Quotients beyond int8, and beyond float32, are clamped too."""
    x = jnp.asarray([3e38, -3e38, 1e38, -1e38], jnp.float32)
    codes = quantizers.quantize_with_scale(x, jnp.full((1,), 0.25, jnp.float32))
    np.testing.assert_array_equal(codes, [119, -119, 119, -119])


# e4m3 --------------------------------------------------------------------------------------------


def as_float(codes):
    return np.asarray(codes).astype(np.float32)


@pytest.mark.parametrize("axis", [-1, (1, 3)], ids=str)
def test_fp8_equals_the_oracle(dtype, axis):
    x = normal((3, 40, 5, 24), dtype, seed=8)
    want, want_scale = oracles.quantize_fp8(x, axis)
    codes, scale = quantizers.quantize_fp8(x, axis=axis)
    assert codes.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(scale), want_scale)
    np.testing.assert_array_equal(as_float(codes), as_float(want))
    assert np.abs(as_float(codes)).max() == 448


def test_fp8_rounds_to_nearest_even():
    """Halfway between every two neighbours, and a hair to either side: no double rounding."""
    grid = np.arange(0x7F).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    grid = grid.astype(np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    middle = middle[middle >= 2.0**-9]
    x = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(448))]
    )
    x = np.concatenate([x, [448.0]]).astype(np.float32)
    codes, scale = quantizers.quantize_fp8(jnp.asarray(x), axis=0)
    want, _ = oracles.quantize_fp8(x, 0)
    assert float(scale) == pytest.approx(1.0)
    np.testing.assert_array_equal(as_float(codes), as_float(want))


def test_fp8_of_zeros_and_non_finite_blocks():
    x = jnp.asarray([[0.0, 0.0], [1.0, np.nan], [np.inf, 1.0], [1.0, 2.0]], jnp.float32)
    codes, scale = quantizers.quantize_fp8(x, axis=-1)
    np.testing.assert_array_equal(np.isnan(scale), [False, True, True, False])
    assert float(scale[0]) == 1
    np.testing.assert_array_equal(as_float(codes)[0], 0)


@settings(max_examples=30)
@given(st.integers(0, 2**31))
def test_fp8_error_is_half_a_step(seed):
    """Relative error 2**-4 for normal numbers, 2**-10 of a unit below."""
    x = normal((4, 32), seed=seed)
    codes, scale = quantizers.quantize_fp8(x, axis=-1)
    scale = np.asarray(scale, np.float64)[:, None]
    error = np.abs(as_float(codes) * scale - np.asarray(x, np.float64))
    bound = np.maximum(np.abs(np.asarray(x, np.float64)) * 2.0**-4, scale * 2.0**-10)
    assert (error <= bound * (1 + 1e-6)).all()


# Stage 2 -----------------------------------------------------------------------------------------


def every_span():
    """All (lo, hi) with -119 <= lo <= hi <= 119."""
    lo, hi = np.meshgrid(np.arange(-119, 120), np.arange(-119, 120), indexing="ij")
    keep = lo <= hi
    return lo[keep], hi[keep]


@pytest.mark.quick(1)
@pytest.mark.optimized
def test_stage_2_for_every_span(bits):
    """Every (lo, hi), every code between: equals the oracle, never leaves int8, errs by s/2.

    A channel per span; the tokens run through the whole span, so every stage-1 code of every
    span is coded once.
    """
    lo, hi = every_span()
    codes = np.clip(np.arange(239)[:, None] + lo[None, :], None, hi[None, :]).astype(np.int8)
    q2, scale, zero = quantize_channels(jnp.asarray(codes), bits=bits)
    assert (q2.dtype, scale.dtype, zero.dtype) == (jnp.uint8, jnp.int8, jnp.int8)
    want, want_scale, want_zero = oracles.quantize_channels(codes, bits)
    np.testing.assert_array_equal(np.asarray(scale), want_scale)
    np.testing.assert_array_equal(np.asarray(zero), want_zero)
    np.testing.assert_array_equal(np.asarray(q2), want)
    assert int(q2.max()) == 2**bits - 1

    exact = oracles.dequantize_channels(want, want_scale, want_zero)
    assert np.abs(exact).max() <= 127
    back = dequantize_channels(q2, scale, zero)
    assert back.dtype == jnp.int8
    np.testing.assert_array_equal(np.asarray(back), exact)

    free = oracles.round_ratio(codes, want_scale) - want_zero.astype(np.int64)
    twice_the_error = 2 * np.abs(exact - codes)
    assert (twice_the_error <= want_scale)[free == want].all()
    # What was clipped sits at an end of the range of codes.
    _, _, first, last = oracles.channel_parameters(lo, hi, bits)
    assert ((want == first) | (want == last))[free != want].all()
    if bits == 4:
        # The int8 bounds never act at 4 bits.
        np.testing.assert_array_equal(want, np.clip(free, 0, 15))


@pytest.mark.parametrize("limit", [120, 127])
def test_119_is_the_largest_safe_range(limit):
    """Without the clip bounds, 4-bit codes leave int8 from ranges above 119, never from 119."""

    def worst(span):
        lo, hi = np.meshgrid(np.arange(-span, span + 1), np.arange(-span, span + 1), indexing="ij")
        keep = lo <= hi
        lo, hi = lo[keep], hi[keep]
        scale = np.maximum(1, oracles.round_ratio(hi - lo, 15))
        zero = oracles.round_ratio(lo, scale)
        codes = np.stack([np.clip(oracles.round_ratio(v, scale) - zero, 0, 15) for v in (lo, hi)])
        return np.abs((codes + zero) * scale).max()

    assert worst(119) <= 127
    assert worst(limit) > 127


@pytest.mark.optimized
@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(BITS), st.integers(0, 119))
def test_stage_2_equals_the_oracle(seed, bits, spread):
    rng = np.random.default_rng(seed)
    middle = rng.integers(-119, 120, (2, 1, 8))
    codes = np.clip(middle + rng.integers(-spread, spread + 1, (2, 16, 8)), -119, 119)
    codes = codes.astype(np.int8)
    got = quantizers.quantize_channels(jnp.asarray(codes), bits)
    want = oracles.quantize_channels(codes, bits)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), w)
    np.testing.assert_array_equal(
        np.asarray(quantizers.dequantize_channels(*got)), oracles.dequantize_channels(*want)
    )


@pytest.mark.quick(1)
def test_stage_2_of_constant_channels(bits):
    """A channel of one value is stored exactly."""
    codes = np.broadcast_to(np.arange(-119, 120, dtype=np.int8)[None, :], (16, 239))
    back = dequantize_channels(*quantize_channels(codes, bits=bits))
    np.testing.assert_array_equal(back, codes)


@pytest.mark.quick(1)
def test_stage_2_survives_packing(bits):
    codes, _ = quantize_int8(normal((2, 3, 64, 80), seed=9), axis=(-2, -1))
    q2, scale, zero = quantize_channels(codes, bits=bits)
    for axis in (-1, -2):
        again = quantizers.unpack(quantizers.pack(q2, bits, axis=axis), bits, axis=axis)
        np.testing.assert_array_equal(again, q2)
        np.testing.assert_array_equal(
            dequantize_channels(again, scale, zero),
            oracles.dequantize_channels(q2, scale, zero),
        )


@pytest.mark.quick(1)
def test_two_stages_err_by_the_sum_of_their_steps(bits):
    """|x - x'| <= s / 2 + s * s_int / 2 wherever no code was clipped."""
    x = normal((4, 64, 32), seed=10)
    codes, s = quantize_int8(x, axis=(-2, -1))
    q2, s_int, zero = quantize_channels(codes, bits=bits)
    free = oracles.round_ratio(codes, np.asarray(s_int)[:, None]) - np.asarray(zero)[:, None]
    back = np.asarray(dequantize_channels(q2, s_int, zero), np.float64)
    s = np.asarray(s, np.float64)[:, None, None]
    step = np.asarray(s_int, np.float64)[:, None, :]
    error = np.abs(back * s - np.asarray(x, np.float64))
    clipped = free != np.asarray(q2)
    bound = np.broadcast_to(s * (0.5 + 1e-4) + s * step / 2, error.shape)
    assert (error <= bound)[~clipped].all()
    assert clipped.mean() < 0.05


@pytest.mark.quick(1)
@pytest.mark.optimized
@pytest.mark.parametrize("bits", [BITS[0], BITS[-1]], ids="{}bit".format)
def test_transforms(bits):
    """jit and vmap give the bits that eager calls give."""
    x = normal((3, 16, 24), seed=11)

    def whole(block):
        codes, scale = quantizers.quantize_int8(block, axis=(-2, -1))
        return scale, *quantizers.quantize_channels(codes, bits)

    eager = whole(x)
    for f in (jax.jit(jax.vmap(whole)), jax.jit(whole)):
        for got, want in zip(f(x), eager, strict=True):
            np.testing.assert_array_equal(got, want)


# Wrong calls -------------------------------------------------------------------------------------


def test_wrong_calls():
    integers = jnp.zeros((4, 8), jnp.int32)
    codes = jnp.zeros((4, 8), jnp.int8)
    for call in (
        lambda: quantizers.quantize_int8(integers, axis=-1),
        lambda: quantizers.quantize_fp8(integers, axis=-1),
        lambda: quantizers.quantize_with_scale(integers, jnp.ones((1, 1))),
        lambda: quantizers.quantize_channels(integers, 4),
    ):
        with pytest.raises(TypeError, match="int32"):
            call()
    for wrong in (0, 1, 5, 8):
        with pytest.raises(ValueError, match=f"bits={wrong}"):
            quantizers.quantize_channels(codes, wrong)
    with pytest.raises(ValueError, match=r"\(8,\)"):
        quantizers.quantize_channels(codes[0], 4)
    with pytest.raises(TypeError, match="int8"):
        quantizers.dequantize_channels(codes, codes[0], codes[0])


MULTIPLE = {2: 4, 3: 8, 4: 2}


def random_codes(bits, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, shape).astype(np.uint8)


@pytest.mark.parametrize("axis", [-1, -2, 0, 1, 2])
def test_layout_is_the_one_written_down(bits, axis):
    codes = random_codes(bits, (16, 24, 40))
    got = np.asarray(quantizers.pack(jnp.asarray(codes), bits, axis=axis))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, oracles.pack(codes, bits, axis))
    np.testing.assert_array_equal(oracles.unpack(got, bits, axis), codes)


def test_layout_by_hand():
    """Halves, quarters, and the two planes of three bits, spelled out."""
    four = quantizers.pack(jnp.asarray([1, 2, 3, 4], jnp.uint8), 4)
    np.testing.assert_array_equal(four, [0x31, 0x42])
    two = quantizers.pack(jnp.asarray([0, 1, 2, 3, 3, 2, 1, 0], jnp.uint8), 2)
    np.testing.assert_array_equal(two, [0b01_11_10_00, 0b00_10_11_01])
    three = quantizers.pack(jnp.asarray([0, 1, 2, 3, 4, 5, 6, 7], jnp.uint8), 3)
    np.testing.assert_array_equal(three, [0b10_00_10_00, 0b11_01_11_01, 0b1111_0000])


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("axis", [-1, -2])
def test_pack_then_unpack_is_the_identity(bits, axis):
    codes = random_codes(bits, (3, 64, 80), seed=1)
    packed = quantizers.pack(jnp.asarray(codes), bits, axis=axis)
    np.testing.assert_array_equal(quantizers.unpack(packed, bits, axis=axis), codes)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("axis", [0, 1])
def test_unpack_then_pack_keeps_every_byte_pattern(bits, axis):
    """All 256 bytes in every position of a packed group, along either axis."""
    every = np.arange(256, dtype=np.uint8)
    group = 3 if bits == 3 else 1
    packed = np.stack([np.roll(every, 37 * k) for k in range(group)])  # [group, 256]
    packed = packed if axis == 0 else packed.T
    codes = quantizers.unpack(jnp.asarray(packed), bits, axis=axis)
    assert codes.dtype == jnp.uint8
    assert int(codes.max()) == 2**bits - 1
    np.testing.assert_array_equal(codes, oracles.unpack(packed, bits, axis))
    np.testing.assert_array_equal(quantizers.pack(codes, bits, axis=axis), packed)


@settings(max_examples=8)
@given(st.sampled_from(BITS), st.integers(1, 2), st.sampled_from([-1, -2]), st.integers(0, 2**31))
def test_any_size_that_divides(bits, groups, axis, seed):
    size = groups * MULTIPLE[bits]
    codes = random_codes(bits, (size, 3) if axis == -2 else (3, size), seed)
    packed = np.asarray(quantizers.pack(jnp.asarray(codes), bits, axis=axis))
    assert packed.shape[axis] == quantizers.packed_size(size, bits) == size * bits // 8
    np.testing.assert_array_equal(packed, oracles.pack(codes, bits, axis))
    np.testing.assert_array_equal(quantizers.unpack(jnp.asarray(packed), bits, axis=axis), codes)


@pytest.mark.quick(1)
@pytest.mark.optimized
def test_under_jit_and_vmap(bits):
    codes = jnp.asarray(random_codes(bits, (5, 16, 32), seed=2))

    def there_and_back(x):
        return quantizers.unpack(quantizers.pack(x, bits), bits)

    np.testing.assert_array_equal(jax.jit(there_and_back)(codes), codes)
    np.testing.assert_array_equal(jax.vmap(there_and_back)(codes), codes)


def test_a_size_that_does_not_divide_is_refused(bits):
    size = MULTIPLE[bits] + 1
    with pytest.raises(ValueError, match=rf"size={size}.*multiple of {MULTIPLE[bits]}"):
        quantizers.packed_size(size, bits)
    with pytest.raises(ValueError, match=rf"{size}.*multiple of {MULTIPLE[bits]}"):
        quantizers.pack(jnp.zeros((size,), jnp.uint8), bits)


@pytest.mark.parametrize("wrong", [0, 1, 5, 8])
def test_other_bits_are_refused(wrong):
    for call in (
        lambda: quantizers.packed_size(16, wrong),
        lambda: quantizers.pack(jnp.zeros((16,), jnp.uint8), wrong),
        lambda: quantizers.unpack(jnp.zeros((12,), jnp.uint8), wrong),
    ):
        with pytest.raises(ValueError, match=rf"bits={wrong}"):
            call()


def test_other_dtypes_are_refused(bits):
    with pytest.raises(TypeError, match="int8"):
        quantizers.pack(jnp.zeros((16,), jnp.int8), bits)
    with pytest.raises(TypeError, match="int32"):
        quantizers.unpack(jnp.zeros((12,), jnp.int32), bits)
