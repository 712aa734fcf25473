"""Packing: the layout written down, and no byte pattern that does not survive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from turbojax import quantizers

BITS = (2, 3, 4)
MULTIPLE = {2: 4, 3: 8, 4: 2}


@pytest.fixture(params=BITS, ids="{}bit".format)
def bits(request):
    return request.param


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
