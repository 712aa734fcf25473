"""`tj.polar`'s codec against float64: codes, norms, bytes, and what a round trip costs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.caches.cache_helpers import assert_same_bits
from tests.oracles import paged as paged_oracle
from tests.oracles import polar as oracle
from turbojax import polar
from turbojax.polar import codec
from turbojax.polar.codec import check_norms

LARGEST_MSE = {2: 0.1213, 3: 0.0349, 4: 0.0095}
"""Relative. With Max's error `D`, vectors of equal length are ``2 - 2 sqrt(1 - D)`` apart: 0.1212
and 0.03485; of 4 bits less is asked, which the sphere's lighter tails allow."""


def normal(head_dim, count=2000, seed=0):
    return np.random.default_rng(seed).normal(size=(count, head_dim))


def round_trip(x, bits=4, seed=0):
    """Mean of ``|x - decoded|^2 / |x|^2``, and mean cosine, in float64."""
    rotation = polar.rotation(x.shape[-1], seed)
    x = jnp.asarray(x, jnp.float32)
    decoded = polar.decode(*polar.encode(x, rotation, bits), rotation, bits)
    x, decoded = (np.asarray(y, np.float64) for y in (x, decoded))
    square = (x**2).sum(-1)
    cosine = (x * decoded).sum(-1) / np.sqrt(square * (decoded**2).sum(-1))
    return (((x - decoded) ** 2).sum(-1) / square).mean(), cosine.mean()


# Quality -----------------------------------------------------------------------------------------


def spiky(name, head_dim):
    rng = np.random.default_rng(11)
    x = normal(head_dim, 4000)
    if name == "scaled channels":
        return x * np.exp(1.5 * rng.normal(size=head_dim))
    if name == "heavy tails":
        return rng.standard_t(1.5, size=x.shape)
    if name == "nearly one-hot":
        x *= 0.05
        x[np.arange(len(x)), rng.integers(0, head_dim, size=len(x))] += 1
        return x
    # Keys: a few channels have large means, and RoPE rotates pairs of channels with the position.
    x[:, rng.choice(head_dim, 4, replace=False)] += [12, -9, 7, 15]
    half = head_dim // 2
    angle = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("data", "head_dim"),
    [
        ("keys", 128),
        ("scaled channels", 80),
        ("heavy tails", 96),
        ("nearly one-hot", 128),
    ],
)
def test_a_round_trip_costs_little(data, head_dim):
    error, cosine = round_trip(spiky(data, head_dim))
    assert error <= LARGEST_MSE[4]
    assert cosine >= 0.995


@pytest.mark.quick(1)
@pytest.mark.parametrize("bits", [2, 3])
def test_fewer_bits(bits):
    error, cosine = round_trip(normal(128), bits)
    assert LARGEST_MSE[bits + 1] * 2 < error <= LARGEST_MSE[bits]
    assert cosine >= 1 - LARGEST_MSE[bits] / 2


def test_the_decoded_length_is_the_encoded_one():
    """Up to the norm's rounding to float16, and float32's in the sums."""
    x = normal(128) * np.exp(normal(1, seed=1))
    rotation = polar.rotation(128, 3)
    decoded = polar.decode(*polar.encode(jnp.asarray(x, jnp.float32), rotation), rotation)
    length = np.sqrt((np.asarray(decoded, np.float64) ** 2).sum(-1))
    np.testing.assert_allclose(length, np.sqrt((x**2).sum(-1)), rtol=2.0**-11 + 1e-5)


# Codes and norms ---------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("dtype", "head_dim", "bits"),
    [
        (jnp.bfloat16, 128, 4),
        (jnp.float16, 80, 4),
        (jnp.float32, 64, 3),
        (jnp.float32, 128, 2),
    ],
)
def test_as_the_oracle(dtype, head_dim, bits):
    """Codes are equal but where float32 sums may cross a threshold; norms are rounded once.

    A coordinate in units of ``|x| / sqrt(d)`` errs by at most 36 additions of terms whose absolute
    values sum to at most ``sqrt(d)``, and the threshold by a few roundings.
    """
    x = jnp.asarray(normal(head_dim, 500) * np.exp(2 * normal(1, 500, seed=1)), dtype)
    codes, norms = polar.encode(x, polar.rotation(head_dim, 9), bits)
    assert (codes.dtype, norms.dtype, norms.shape) == (jnp.uint8, jnp.float16, (500,))
    codes, norms = np.asarray(codes), np.asarray(norms, np.float64)
    want, _, distance = oracle.encode(x, 9, bits)
    sure = distance > (36 * np.sqrt(head_dim) + 16) * 2.0**-24
    assert sure.mean() > 0.999
    np.testing.assert_array_equal(codes[sure], want[sure])
    assert np.abs(codes.astype(int) - want).max() <= 1
    length = np.sqrt((np.asarray(x, np.float64) ** 2).sum(-1))
    np.testing.assert_allclose(
        norms, oracle.norms_of(length, codes.astype(int), bits), rtol=2.0**-11 + 2e-6
    )


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_decoding_as_the_oracle(head_dim, bits):
    """Errors of float32: 36 additions, a few products, terms up to 3 norms over sqrt(d)."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 2**bits, size=(300, head_dim)).astype(np.uint8)
    norms = np.exp(rng.normal(size=300)).astype(np.float16)
    rotation = polar.rotation(head_dim, 2)
    got = polar.decode(jnp.asarray(codes), jnp.asarray(norms), rotation, bits)
    assert got.dtype == jnp.float32
    bound = 40 * 2.0**-24 * 3 * norms.astype(np.float64)[:, None]
    assert (np.abs(got - oracle.decode(codes, norms, 2, bits)) <= bound).all()
    for dtype in (jnp.bfloat16, jnp.float16):
        rounded = polar.decode(jnp.asarray(codes), jnp.asarray(norms), rotation, bits, dtype=dtype)
        assert_same_bits(rounded, got.astype(dtype))


def ties(threshold, dim=2):
    """Pairs of 12-bit numbers whose sum is the float32 product of threshold and length, exactly."""
    rng = np.random.default_rng(5)
    angle = np.pi / 4 + np.arccos(np.float64(threshold) / np.sqrt(dim))
    radius = rng.uniform(1, 2, size=400_000)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    x = np.rint(x * 2048).astype(np.float32) / np.float32(2048)
    length = np.sqrt((x[:, 0] ** 2 + x[:, 1] ** 2).astype(np.float32))
    return x[x[:, 0] + x[:, 1] == length * np.float32(threshold)]


def test_ties_go_up():
    """In two dimensions, where sums are exact; and what is next below a tie stays below."""
    rotation = polar.rotation(2)
    table = polar.lloyd_max(4)
    edges = 0.5 * (table[1:] + table[:-1])
    seen = 0
    for k in np.flatnonzero(np.abs(edges) < np.sqrt(2)):
        x = ties(edges[k])
        seen += len(x)
        codes, _ = polar.encode(jnp.asarray(x) * rotation.signs[None], rotation)
        np.testing.assert_array_equal(codes[:, 0], k + 1)
        # Both a little shorter: the first coordinate's share falls where it is the smaller one.
        lower = x - np.float32(2.0**-11)
        lower = lower[(lower.sum(-1) / np.hypot(*lower.T.astype(np.float64))) < edges[k] - 1e-5]
        codes, _ = polar.encode(jnp.asarray(lower) * rotation.signs[None], rotation)
        np.testing.assert_array_equal(codes[:, 0], k)
    assert seen > 100


def test_one_hot_vectors_come_back():
    """All rotated coordinates are equally large, so the norm's correction undoes the rounding."""
    x = np.eye(128) * np.linspace(0.5, 100, 128)[:, None]
    rotation = polar.rotation(128)
    decoded = polar.decode(*polar.encode(jnp.asarray(x, jnp.float32), rotation), rotation)
    bound = (2.0**-11 + 1e-5) * x.max(-1, keepdims=True)
    assert (np.abs(np.asarray(decoded, np.float64) - x) <= bound).all()


# Extremes ----------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_zero_vectors(dtype):
    rotation = polar.rotation(80)
    for x in (jnp.zeros((3, 80), dtype), -jnp.zeros((3, 80), dtype)):
        codes, norms = polar.encode(x, rotation)
        assert int(codes.max()) < 16
        np.testing.assert_array_equal(norms, np.zeros(3))
        np.testing.assert_array_equal(polar.decode(codes, norms, rotation), np.zeros((3, 80)))


@pytest.mark.parametrize("length", [1e-5, 1e-6, 2e-7, 1e-8, 1e-12, 1e-25, 1e-38, 1e-44])
def test_tiny_vectors(length):
    """The norm is what float16's subnormal numbers leave of it, down to 0."""
    x = normal(128, 50)
    x = (x / np.sqrt((x**2).sum(-1, keepdims=True)) * length).astype(np.float32)
    rotation = polar.rotation(128)
    codes, norms = polar.encode(jnp.asarray(x), rotation)
    exact = oracle.norms_of(np.sqrt((x.astype(np.float64) ** 2).sum(-1)), np.asarray(codes, int))
    slack = 2.0**-25 + (2.0**-11 + 2e-6) * exact
    assert (np.abs(np.asarray(norms, np.float64) - exact) <= slack).all()
    if length < 1e-8:
        assert not np.asarray(polar.decode(codes, norms, rotation)).any()
    else:
        np.testing.assert_array_equal(
            np.asarray(codes), polar.encode(jnp.asarray(x * 2.0**20), rotation)[0]
        )


@pytest.mark.parametrize("value", [61_000.0, 61_700.0])
def test_the_largest_norms(value):
    """Of a one-hot vector every centroid is 0.94234 over ``sqrt(d)``: 65,504 allows 61,727."""
    x = jnp.zeros((2, 128)).at[1, 7].set(value)
    norms = polar.encode(x, polar.rotation(128))[1]
    np.testing.assert_allclose(np.asarray(norms, np.float64)[1], value / 0.942340, rtol=2.0**-11)


@pytest.mark.optimized
def test_norms_beyond_float16():
    """An error that says where, NaN under `jit`, and the neighbours are as they were."""
    rotation = polar.rotation(128)
    x = np.ones((2, 3, 128), np.float32)
    x[0, 1, 0] = np.nan
    x[1, 2] = 0
    x[1, 2, 7] = 61_740
    x = jnp.asarray(x)
    with pytest.raises(ValueError, match=r"x\[1, 2\] has length \d.*must be at most 65504"):
        polar.encode(x, rotation)
    codes, norms = jax.jit(polar.encode)(x, rotation)
    np.testing.assert_array_equal(
        np.isnan(np.asarray(norms)), [[False, True, False], [False, False, True]]
    )
    assert_same_bits(norms[0, 0], polar.encode(x[0, 0], rotation)[1])
    with pytest.raises(ValueError, match=r"key\[1, 2\] has length"):
        check_norms("key", x, norms)
    check_norms("key", x[0], norms[0])
    decoded = polar.decode(codes, norms, rotation)
    assert np.isnan(np.asarray(decoded)[1, 2]).all()


def test_a_whole_bfloat16_vector_of_the_largest_numbers():
    x = jnp.full((1, 128), 3e38, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x\[0\] has length 3.39\d+e\+39"):
        polar.encode(x, polar.rotation(128))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_the_norm(value):
    rotation = polar.rotation(96)
    for at in (0, 50, 95):
        x = normal(96, 3).astype(np.float32)
        x[1, at] = value
        codes, norms = polar.encode(jnp.asarray(x), rotation)
        np.testing.assert_array_equal(np.isnan(np.asarray(norms)), [False, True, False])
        decoded = np.asarray(polar.decode(codes, norms, rotation))
        np.testing.assert_array_equal(np.isnan(decoded).all(-1), [False, True, False])
        np.testing.assert_array_equal(np.isnan(decoded).any(-1), [False, True, False])


# Layouts -----------------------------------------------------------------------------------------


def test_bytes_of_a_vector():
    """66 for a head dim of 128: dimension 2 i low, 2 i + 1 high, then the norm's low byte."""
    rotation = polar.rotation(128)
    codes, norms = polar.encode(jnp.asarray(normal(128, 20), jnp.float32), rotation)
    packed = polar.pack(codes)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (20, 64))
    content = polar.to_interchange(packed, norms)
    assert (content.dtype, content.shape) == (jnp.uint8, (20, 66))
    for row, c, n in zip(np.asarray(content), np.asarray(codes), np.asarray(norms), strict=True):
        assert row.tobytes() == oracle.interchange(c, n)
    assert_same_bits(polar.unpack(packed), codes)
    back = polar.from_interchange(content)
    assert_same_bits(back[0], packed)
    assert_same_bits(back[1], norms)


def test_bytes_by_hand():
    codes = jnp.asarray([[1, 2, 15, 0]], jnp.uint8)
    packed = polar.pack(codes)
    np.testing.assert_array_equal(packed, [[0x21, 0x0F]])
    # 1.5 is 0x3E00, and a NaN keeps its bits.
    content = polar.to_interchange(packed, jnp.asarray([1.5], jnp.float16))
    np.testing.assert_array_equal(content, [[0x21, 0x0F, 0x00, 0x3E]])
    odd = jnp.asarray([[0x21, 0x0F, 0x01, 0x7E]], jnp.uint8)
    assert_same_bits(polar.to_interchange(*polar.from_interchange(odd)), odd)


@pytest.mark.quick(5, slow=0)
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("dim", [8, 80, 128])
def test_packed_codes_have_no_gaps(dim, bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 2, dim)).astype(np.uint8)
    packed = jax.jit(polar.pack, static_argnames="bits")(jnp.asarray(codes), bits=bits)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (5, 2, dim * bits // 8))
    assert polar.packed_width(dim, bits) == packed.shape[-1]
    np.testing.assert_array_equal(packed, paged_oracle.packed(codes, bits))
    assert_same_bits(polar.unpack(packed, bits), jnp.asarray(codes))


def test_bytes_of_2_and_3_bits_by_hand():
    codes = jnp.asarray([[1, 2, 3, 0, 7, 4, 5, 6]], jnp.uint8)
    np.testing.assert_array_equal(polar.pack(codes & 3, 2), [[0b00111001, 0b10010011]])
    # The third bits of the last four channels: bits 2, 3, 6 and 7.
    want = [[0b00111001, 0b10010011, 0b11001100]]
    np.testing.assert_array_equal(polar.pack(codes, 3), want)


def test_encoded_bytes_are_pinned():
    """Caches on disk hold them: neither signs nor tables nor order may change."""
    x = jnp.arange(-16, 16, dtype=jnp.float32).at[5].set(40)
    codes, norms = polar.encode(x, polar.rotation(32, 1))
    content = polar.to_interchange(polar.pack(codes), norms)
    assert np.asarray(content).tobytes().hex() == "3b9988d65c1c78e96c3cb9e839aa65981854"


# Transforms --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.optimized
def test_bits_do_not_depend_on_the_array_around():
    head_dim = 80
    rotation = polar.rotation(head_dim)
    x = jnp.asarray(normal(head_dim, 66), jnp.bfloat16)
    encode = functools.partial(polar.encode, rotation=rotation)
    want = encode(x)
    others = {
        "jit": jax.jit(encode)(x),
        "rotation traced": jax.jit(polar.encode)(x, rotation),
        "vmap": jax.vmap(encode)(x),
        "map": jax.lax.map(encode, x),
        "shape": [y.reshape(66, *y.shape[3:]) for y in encode(x.reshape(11, 2, 3, head_dim))],
        "part": encode(x[:7]),
        "one": [y[None] for y in encode(x[0])],
    }
    for name, got in others.items():
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b[: len(a)], err_msg=name)
    decoded = polar.decode(*want, rotation)
    assert_same_bits(jax.jit(polar.decode)(*want, rotation), decoded)
    assert_same_bits(jax.vmap(polar.decode, (0, 0, None))(*want, rotation), decoded)
    assert_same_bits(polar.decode(want[0][3:5], want[1][3:5], rotation), decoded[3:5])


def test_encode_has_no_gradient():
    rotation = polar.rotation(16)
    with pytest.raises(NotImplementedError, match=r"polar.encode has no gradient: rounding"):
        jax.grad(lambda x: polar.encode(x, rotation)[1].astype(jnp.float32).sum())(
            jnp.ones((2, 16))
        )


# Errors ------------------------------------------------------------------------------------------


def test_errors_of_encode_and_decode():
    rotation = polar.rotation(16)
    x = jnp.ones((2, 16))
    codes, norms = polar.encode(x, rotation)
    with pytest.raises(ValueError, match=r"x.shape=\(2, 8\) must be \[..., 16\]"):
        polar.encode(x[:, :8], rotation)
    with pytest.raises(TypeError, match="x.dtype=int32"):
        polar.encode(x.astype(jnp.int32), rotation)
    with pytest.raises(TypeError, match="rotation is a int, must be a polar.Rotation"):
        polar.encode(x, 16)
    with pytest.raises(ValueError, match="bits=8 must be 2, 3 or 4"):
        polar.encode(x, rotation, 8)
    with pytest.raises(TypeError, match="codes.dtype=int32 must be uint8"):
        polar.decode(codes.astype(jnp.int32), norms, rotation)
    with pytest.raises(TypeError, match="norms.dtype=float32 must be float16"):
        polar.decode(codes, norms.astype(jnp.float32), rotation)
    with pytest.raises(ValueError, match=r"norms.shape=\(2, 1\) must be \(2,\), one per vector"):
        polar.decode(codes, norms[:, None], rotation)
    with pytest.raises(ValueError, match=r"codes.shape=\(2, 4\) must be \[..., 16\]"):
        polar.decode(codes[:, :4], norms, rotation)
    with pytest.raises(TypeError, match="dtype=int8 must be bfloat16, float16 or float32"):
        polar.decode(codes, norms, rotation, dtype=jnp.int8)
    with pytest.raises(ValueError, match="bits=1 must be 2, 3 or 4"):
        polar.decode(codes, norms, rotation, 1)
    with pytest.raises(ValueError, match="codes holds 8, must be below 8"):
        polar.decode(jnp.full_like(codes, 8), norms, rotation, 3)
    traced = jax.jit(functools.partial(polar.decode, bits=3))
    assert np.isnan(np.asarray(traced(jnp.full_like(codes, 8), norms, rotation))).all()


def test_errors_of_layouts():
    codes = jnp.ones((2, 16), jnp.uint8)
    norms = jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match="codes holds 16, must be below 16"):
        polar.pack(16 * codes)
    with pytest.raises(ValueError, match=r"codes.shape=\(2, 15\) must be \[..., H\], H even"):
        polar.pack(codes[:, 1:])
    with pytest.raises(TypeError, match="codes.dtype=int8 must be uint8"):
        polar.pack(codes.astype(jnp.int8))
    with pytest.raises(ValueError, match=r"\[..., H\], H a multiple of 8"):
        polar.pack(codes[:, :4] & 7, 3)
    with pytest.raises(ValueError, match="codes holds .*, must be below 4"):
        polar.pack(codes | 4, 2)
    with pytest.raises(ValueError, match=r"must be \[..., H \* 3 / 8\]"):
        polar.unpack(codes[:, :4], 3)
    with pytest.raises(ValueError, match="bits=5 must be 2, 3 or 4"):
        polar.pack(codes, 5)
    with pytest.raises(ValueError, match="head_dim=20 must be a multiple of 8 for codes of 3 bits"):
        polar.packed_width(20, 3)
    with pytest.raises(TypeError, match="packed.dtype=float32 must be uint8"):
        polar.unpack(codes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"packed.shape=\(\) must be"):
        polar.unpack(codes[0, 0])
    with pytest.raises(ValueError, match=r"norms.shape=\(2,\) must be \(1,\)"):
        polar.to_interchange(codes[:1], norms)
    with pytest.raises(TypeError, match="norms.dtype=bfloat16 must be float16"):
        polar.to_interchange(codes, norms.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"content.shape=\(2, 2\) must be \[..., H / 2 \+ 2\]"):
        polar.from_interchange(codes[:, :2])
    with pytest.raises(TypeError, match="content.dtype=int32 must be uint8"):
        polar.from_interchange(codes.astype(jnp.int32))


def test_bfloat16_is_encoded_as_its_float32_values():
    x = normal(128, 40).astype(ml_dtypes.bfloat16)
    rotation = polar.rotation(128)
    want = polar.encode(jnp.asarray(x.astype(np.float32)), rotation)
    for got, wanted in zip(polar.encode(jnp.asarray(x), rotation), want, strict=True):
        assert_same_bits(got, wanted)


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
    rotated = polar.rotate(jnp.asarray(x), rotation)
    assert rotated.dtype == jnp.float32
    assert (np.abs(np.asarray(rotated, np.float64) - x @ want.T) <= bound).all()
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
def test_bits_of_rotations_do_not_depend_on_the_array_around(head_dim, dtype):
    rotation = polar.rotation(head_dim)
    x = jnp.asarray(vectors(head_dim, 60), dtype)
    for rotate in (polar.rotate, polar.unrotate):
        want = rotate(x, rotation)
        assert_same_bits(rotate(x[17], rotation), want[17])
        assert_same_bits(rotate(x[3:10], rotation), want[3:10])
        assert_same_bits(
            rotate(x.reshape(3, 1, 5, 4, head_dim), rotation).reshape(want.shape), want
        )
        assert_same_bits(jax.jit(rotate)(x, rotation), want)
        assert_same_bits(jax.vmap(rotate, (0, None))(x, rotation), want)
        mapped = jax.jit(lambda x, rotate=rotate: jax.lax.map(lambda v: rotate(v, rotation), x))
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
    rotated = np.asarray(polar.rotate(jnp.asarray(x), polar.rotation(64)))
    assert np.isfinite(rotated[0]).all()
    assert not np.isfinite(rotated[1:]).any()


# The law of rotated coordinates ------------------------------------------------------------------


def cell_counts(coordinates, bits=4):
    table = oracle.lloyd_max(bits)
    edges = 0.5 * (table[1:] + table[:-1])
    return edges, np.bincount(np.searchsorted(edges, coordinates.ravel()), minlength=len(table))


def unit_coordinates(x, rotated=True):
    """``sqrt(d) u`` of each vector."""
    y = np.asarray(polar.rotate(jnp.asarray(x, jnp.float32), polar.rotation(x.shape[-1])))
    y = y if rotated else x
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

    def divergence(rotated):
        edges, counts = cell_counts(unit_coordinates(x, rotated))
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
