"""Inline assembly of the Triton kernels, which interpret mode passes by: executed by an emulator.

The text and the order of arguments are the kernels' own, for every byte at every place of a word.
"""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import _e4m3, _packed, _paged_codes, kv4_decode
from tests.oracles import ptx
from tests.oracles.paged import INTEGERS, unpacked
from turbojax import polar

BYTES = np.arange(256, dtype=np.uint8)[:, None] + np.asarray([0, 61, 150, 7], np.uint8)
# Elements that show whether registers are shared rightly.
_SOME = 512
KINDS = (_paged_codes.KEYS, _paged_codes.VALUES)


def emulate(asm, *, args, constraints, pack, result_shape_dtypes):
    """Whichever registers the compiler lets results share with arguments."""
    flat = [np.asarray(x).reshape(-1) for x in args]
    dtypes = [x.dtype for x in result_shape_dtypes]
    out = ptx.run(asm, constraints, pack, flat, dtypes)
    some = [x[:_SOME] for x in flat]
    for shared in itertools.product(range(constraints.count("=")), range(len(args))):
        others = ptx.run(asm, constraints, pack, some, dtypes, shared=shared)
        for x, other in zip(out, others, strict=True):
            np.testing.assert_array_equal(bits(other), bits(x[:_SOME]), str(shared))
    return [
        jnp.asarray(x.reshape(like.shape)) for x, like in zip(out, result_shape_dtypes, strict=True)
    ]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(plgpu, "elementwise_inline_asm", emulate)


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def stored(codec_bits):
    """Stored vectors with every byte, and with 3 bits every two that belong together, everywhere.

    Returns:
      uint8 ``[t, 4]`` and those of the third bits ``[t, 2]``, both as a page holds them.
    """
    if codec_bits != 3:
        return BYTES, None
    low, high = np.indices((256, 256), dtype=np.uint8).reshape(2, -1, 1)
    return low + BYTES[:1], high + np.asarray([0, 91], np.uint8)


@pytest.mark.quick(5, slow=0)
@pytest.mark.parametrize("codec_bits", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_looked_up(kind, codec_bits):
    """Keys are float16 subnormals whose bits are the table's, values bfloat16 128 and more."""
    table, half, _ = polar.integer_centroids(codec_bits)
    codec = _paged_codes.Codec(table, half)
    data, third = stored(codec_bits)
    content = data if third is None else np.concatenate([data, third], axis=1)
    codes = unpacked(content, codec_bits, 4 * codec.pieces)
    upper = np.asarray(INTEGERS[codec_bits])
    integers = (np.concatenate([-upper[::-1], upper]) + 63.5)[codes].astype(np.uint16)

    high = None if third is None else jnp.asarray(np.repeat(third, 2, axis=1))
    got = _paged_codes.look_up(jnp.asarray(data), high, codec, kind, interpret=False)
    shown = _paged_codes.look_up(jnp.asarray(data), high, codec, kind, interpret=True)
    assert len(got) == len(shown) == codec.pieces
    for j, (x, y) in enumerate(zip(got, shown, strict=True)):
        want = integers[:, j :: codec.pieces]
        if kind == _paged_codes.KEYS:
            assert x.dtype == y.dtype == jnp.float16
            np.testing.assert_array_equal(bits(x), want)
            unit = _paged_codes.key_unit(interpret=False)
            wide = np.asarray(x).astype(np.float64)
            np.testing.assert_array_equal(wide, np.asarray(y).astype(np.float64) * unit)
        else:
            assert x.dtype == y.dtype == jnp.bfloat16
            wanted = (want + _paged_codes.VALUE_OFFSET).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(bits(x), bits(wanted))
            np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_becomes_float16(name):
    """To the bit, and NaN stays NaN."""
    x = BYTES.view(getattr(ml_dtypes, name))
    want = x.astype(np.float16)
    for interpret in (False, True):
        got = np.asarray(_paged_codes.fp8_to_float16(jnp.asarray(x), interpret))
        assert got.dtype == np.float16
        is_nan = np.isnan(want)
        assert is_nan.sum() == 4 * (2 if name == "float8_e4m3fn" else 6)
        np.testing.assert_array_equal(np.isnan(got), is_nan)
        np.testing.assert_array_equal(bits(got)[~is_nan], bits(want)[~is_nan])


@pytest.mark.parametrize("kind", KINDS)
def test_int8_becomes_16_bits(kind):
    x = BYTES.view(np.int8)
    for interpret in (False, True):
        got = _paged_codes.int8_to_16_bits(jnp.asarray(x), kind, interpret)
        assert got.dtype == (jnp.bfloat16 if kind == _paged_codes.VALUES else jnp.float16)
        np.testing.assert_array_equal(bits(got), bits(x.astype(got.dtype)))


@pytest.mark.parametrize("high", [False, True], ids=["low", "high"])
def test_nibbles_become_numbers(high):
    """bfloat16 of `kv4_decode`, float16 of `int4_matmul`; two's complement."""
    x = jnp.asarray(BYTES.view(np.int8))
    want = (BYTES >> 4 if high else BYTES & 15).astype(np.int64)
    want = np.where(want >= 8, want - 16, want)
    for interpret in (False, True):
        brain = kv4_decode._nibbles(x, 4 * high, interpret)
        np.testing.assert_array_equal(bits(brain), bits(want.astype(ml_dtypes.bfloat16)))
        half = _e4m3.nibble(x, high, interpret)
        np.testing.assert_array_equal(bits(half), bits(want.astype(np.float16)))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_fields_of_bytes(width):
    x = jnp.asarray(BYTES.view(np.int8))
    for shift in range(0, 8, width):
        got = np.asarray(_packed._field(x, shift, width, interpret=False))
        np.testing.assert_array_equal(got, BYTES >> shift & 2**width - 1)


# The emulator ------------------------------------------------------------------------------------


def test_a_result_must_not_be_written_too_early():
    """If it may share its register with an argument that is still to be read."""
    x = jnp.asarray(BYTES.view(np.int8))
    shape = jax.ShapeDtypeStruct(x.shape, jnp.int16)
    asm = "{ shr.u32 $0, $2, 8; shr.u32 $1, $2, 16; }"
    options = {"args": [x], "pack": 4, "result_shape_dtypes": [shape]}
    [out] = emulate(asm, constraints="=&r,=r,r", **options)
    wide = BYTES.astype(np.uint16)
    np.testing.assert_array_equal(bits(out)[:, 0], wide[:, 1] | wide[:, 2] << 8)
    with pytest.raises(AssertionError, match=r"\(0, 0\)"):
        emulate(asm, constraints="=r,=r,r", **options)


@pytest.mark.parametrize(
    "asm", ["mov.b32 $0, x;", "{ .reg .b32 x; mov.b32 $0, x; }", "frobnicate.b32 $0, $1;"]
)
def test_what_the_emulator_does_not_know_is_an_error(asm):
    with pytest.raises(KeyError):
        ptx.run(asm, "=r,r", 4, [np.zeros(4, np.int8)], [np.int8])
