"""INT4 weights and e4m3 tokens: bits against `oracles.int4`, layouts, joins."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import turbojax as tj
from tests.oracles import int4 as oracle
from turbojax import fireq
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.layout import code_rows, code_tiles, scale_rows

SCALE_DTYPES = ("e4m3", "bf16", "f16")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Outputs and inputs: whole, and no multiple of anything.
SHAPES = ((64, 128), (1, 1), (70, 130), (5, 300))


def random_weight(shape, dtype=jnp.float32, seed=0):
    w = np.random.default_rng(seed).normal(size=shape) * 0.3
    return jnp.asarray(w, jnp.float32).astype(dtype)


def stored(x):
    """Codes of a weight in tiles, by the oracle's packing, with its own padding."""
    rows, inputs = -(-x.codes.shape[0] // 64) * 64, x.codes.shape[1]
    multiple = max(128, x.group_size)
    inputs = -(-inputs // multiple) * multiple
    padded = np.zeros((rows, inputs), np.int64)
    padded[: x.codes.shape[0], : x.codes.shape[1]] = x.codes
    return oracle.tiles(oracle.pack(padded))


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def assert_tiles(tiles, rows):
    """Numbers a group lie as the definition says."""
    np.testing.assert_array_equal(wide(tiles), oracle.group_tiles(rows))


def assert_equals_oracle(weight, w):
    want = oracle.quantize_weight(np.asarray(w, np.float64), weight.group_size, weight.scale_dtype)
    np.testing.assert_array_equal(weight.codes, stored(want))
    groups = want.scales.shape[1]
    scales = wide(scale_rows(weight.scales)).T
    assert_tiles(weight.scales, scales.T)
    np.testing.assert_array_equal(scales[:groups, : w.shape[0]].T, want.scales)
    np.testing.assert_array_equal(tj.fireq.dequantize(weight), want.values)
    nothing = 2.0**-9 if weight.scale_dtype == "e4m3" else 1.0
    assert (scales[groups:] == nothing).all()
    assert (scales[:, w.shape[0] :] == nothing).all()


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_the_oracle_knows_e4m3():
    """Its table and its rounding, against ml_dtypes, on every pattern and between."""
    bits = np.arange(256, dtype=np.uint8)
    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.e4m3_bits(values) & 127, bits & 127)
    x = np.random.default_rng(0).uniform(-448, 448, 10_000)
    x = np.concatenate([x, x * 2.0**-12, oracle._MIDDLES, -oracle._MIDDLES])
    np.testing.assert_array_equal(oracle.e4m3(x), x.astype(ml_dtypes.float8_e4m3fn).astype(float))
    y = x.astype(ml_dtypes.bfloat16).astype(float)
    np.testing.assert_array_equal(oracle.bf16(x), y)


def test_packing():
    """The bytes of one block, spelled out: inputs of each nibble, in order of bytes."""
    codes = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (3, 384)), jnp.int8)
    packed = int4.pack_codes(codes)
    np.testing.assert_array_equal(packed, oracle.pack(codes))
    np.testing.assert_array_equal(int4.unpack_codes(packed), codes)
    rows = jnp.concatenate([packed] * 50)[:128]
    np.testing.assert_array_equal(code_tiles(rows), oracle.tiles(np.asarray(rows)))
    np.testing.assert_array_equal(code_rows(code_tiles(rows)), rows)
    first = []
    for k in range(0, 128, 2):
        one = jnp.zeros((1, 128), jnp.int8).at[0, k].set(-1).at[0, k + 1].set(3)
        (byte,) = np.flatnonzero(np.asarray(int4.pack_codes(one))[0])
        assert int4.pack_codes(one)[0, byte] == 0x3F
        first.append((byte, k))
    order = [k for _, k in sorted(first)]
    assert order[:16] == [0, 2, 16, 18, 32, 34, 48, 50, 64, 66, 80, 82, 96, 98, 112, 114]
    assert order[16:20] == [4, 6, 20, 22]
    assert order[-4:] == [108, 110, 124, 126]


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_equals_the_oracle(shape, scale_dtype):
    w = random_weight(shape)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    weight.validate()
    assert weight.shape == shape
    assert weight.scale_dtype == scale_dtype
    assert_equals_oracle(weight, w)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("dtype", "group_size", "scale_dtype"),
    [
        (jnp.bfloat16, 32, "bf16"),
        (jnp.float16, 64, "e4m3"),
        (jnp.float32, 256, "bf16"),
        (jnp.float32, 32, "e4m3"),
    ],
)
def test_other_groups_and_dtypes(dtype, group_size, scale_dtype):
    w = random_weight((9, 330), dtype)
    weight = tj.fireq.quantize_weight(w, group_size=group_size, scale_dtype=scale_dtype)
    assert_equals_oracle(weight, w)


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_ties(scale_dtype):
    """Maxima in the middle between scales, weights in the middle between codes, and near them."""
    if scale_dtype == "f16":
        middles = np.ldexp(np.arange(2049, 4096, 62) / 4096, -3)
    elif scale_dtype == "e4m3":
        middles = oracle._MIDDLES[oracle._MIDDLES <= 64]
    else:
        middles = np.ldexp(np.arange(257, 512, 2) / 512, -3)
    largest = 7 * middles
    largest = np.concatenate([largest, np.nextafter(np.float32(largest), np.float32(0))])
    scales = oracle.quantize_weight(largest[:, None], 128, scale_dtype).scales
    halves = (np.arange(-15, 15) + 0.5) / 2 * scales
    w = np.concatenate([largest[:, None], np.clip(halves, -largest[:, None], largest[:, None])], 1)
    w = jnp.asarray(w, jnp.float32)
    assert_equals_oracle(tj.fireq.quantize_weight(w, scale_dtype=scale_dtype), w)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_every_magnitude(scale_dtype):
    """From below e4m3's smallest scale to its largest, see also `test_int4_ranges`."""
    w = random_weight((40, 64)) * jnp.logspace(-6, 2, 40, dtype=jnp.float32)[:, None]
    assert_equals_oracle(tj.fireq.quantize_weight(w, scale_dtype=scale_dtype), w)


def test_bfloat16_scales_of_extreme_weights():
    """Far beyond e4m3; the oracle's rounding has no range."""
    w = random_weight((60, 64)) * jnp.logspace(-36, 37, 60, dtype=jnp.float32)[:, None]
    assert_equals_oracle(tj.fireq.quantize_weight(w, scale_dtype="bf16"), w)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_zero_groups(scale_dtype):
    w = random_weight((6, 384)).at[0].set(0).at[1, 128:256].set(0).at[2, 256:].set(0)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    assert_equals_oracle(weight, w)
    assert not np.asarray(tj.fireq.dequantize(weight))[1, 128:256].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_what_is_not_finite_stays_so(scale_dtype, bad):
    w = random_weight((6, 384)).at[1, 130].set(bad).at[5, 0].set(bad)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    assert_equals_oracle(weight, w)
    is_nan = np.isnan(tj.fireq.dequantize(weight))
    want = np.zeros((6, 384), bool)
    want[1, 128:256] = want[5, :128] = True
    np.testing.assert_array_equal(is_nan, want)


def test_the_largest_e4m3_scale():
    """It is 64; 475 / 7 rounds to it and 477 / 7 does not, so that row alone is halved."""
    w = random_weight((2, 300))
    good, large = w.at[1, 200].set(-475), w.at[1, 200].set(-477)
    assert_equals_oracle(tj.fireq.quantize_weight(good), good)
    weight = tj.fireq.quantize_weight(large)
    assert_equals_oracle(weight, large)
    np.testing.assert_array_equal(weight.output_scale, [1, 2] + [1] * 62)
    bf16 = tj.fireq.quantize_weight(large, scale_dtype="bf16")
    assert_equals_oracle(bf16, large)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_transforms(scale_dtype):
    w = random_weight((3, 20, 200))
    one = [tj.fireq.quantize_weight(x, scale_dtype=scale_dtype) for x in w]
    stacked = jax.tree.map(lambda *x: np.stack(x), *one)

    def quantize(w):
        return tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)

    assert_same_bits(jax.jit(quantize)(w[0]), one[0])
    assert_same_bits(jax.jit(jax.vmap(quantize))(w), stacked)
    values = [tj.fireq.dequantize(x) for x in one]
    _, scanned = jax.lax.scan(lambda _, x: (None, tj.fireq.dequantize(x)), None, stacked)
    np.testing.assert_array_equal(scanned, np.stack(values))
    np.testing.assert_array_equal(jax.jit(jax.vmap(tj.fireq.dequantize))(stacked), scanned)


@pytest.mark.slow
def test_relative_error_on_gaussian_weights():
    """0.1191 with the table and 0.1174 without, within a unit of the last place.

    The table's depends on where the scales lie between powers of two: 0.1187 to 0.1193 over an
    octave of standard deviations.
    """
    gaussian = np.random.default_rng(0).normal(size=(512, 4096)).astype(np.float32)

    def error(w, values):
        return np.sqrt(np.mean(np.square(np.asarray(values) - w)) / np.mean(np.square(w)))

    dequantize, quantize = tj.fireq.dequantize, tj.fireq.quantize_weight
    octave = [gaussian * np.float32(0.7 * 2 ** (i / 6)) for i in range(6)]
    errors = [error(w, dequantize(quantize(w))) for w in octave]
    assert abs(errors[0] - 0.1191) < 1e-4
    assert max(abs(e - 0.1191) for e in errors) < 5e-4
    groups = gaussian.reshape(512, 32, 128).astype(np.float64)
    scale = np.abs(groups).max(2, keepdims=True) / 7
    exact = (np.rint(groups / scale) * scale).reshape(gaussian.shape)
    assert abs(error(gaussian, exact) - 0.1174) < 1e-4
    assert abs(error(gaussian, dequantize(quantize(gaussian, scale_dtype="bf16"))) - 0.1174) < 1e-4


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_a_weight_is_half_a_step_away(scale_dtype):
    """And, in e4m3, half a unit in the last place of the value, at most 2**-4 of it."""
    w = random_weight((50, 256), seed=3)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    scale = np.repeat(wide(scale_rows(weight.scales))[:50], 128, axis=1)
    values = np.asarray(tj.fireq.dequantize(weight), np.float64)
    rounding = np.abs(values) / 15 if scale_dtype == "e4m3" else 0
    assert (np.abs(values - w) <= 0.5 * scale + rounding).all()


def test_output_scale():
    w = random_weight((70, 100))
    plain = tj.fireq.quantize_weight(w)
    for factor in (0.25, np.float32(0.25), jnp.full(70, 0.25)):
        weight = tj.fireq.quantize_weight(w, output_scale=factor)
        np.testing.assert_array_equal(weight.codes, plain.codes)
        np.testing.assert_array_equal(weight.output_scale, [0.25] * 70 + [1] * 58)
        want = tj.fireq.dequantize(plain) * 0.25
        np.testing.assert_array_equal(tj.fireq.dequantize(weight), want)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("sizes", "scale_dtype"), [((70, 3, 60), "e4m3"), ((64, 128, 64), "bf16")], ids=str
)
def test_concatenate(sizes, scale_dtype):
    """As if quantized together: rows one after the other, padded at the end alone."""
    parts = [random_weight((n, 200), seed=n) for n in sizes]
    factors = [jnp.full(n, 0.5**i, jnp.float32) for i, n in enumerate(sizes)]
    joined = tj.fireq.concatenate(
        [
            tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=f)
            for w, f in zip(parts, factors, strict=True)
        ]
    )
    joined.validate()
    want = tj.fireq.quantize_weight(
        jnp.concatenate(parts), scale_dtype=scale_dtype, output_scale=jnp.concatenate(factors)
    )
    assert_same_bits(joined, want)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("size", "scale_dtype"), [(13, "e4m3"), (64, "bf16"), (1, "e4m3")], ids=str
)
def test_gate_and_up(size, scale_dtype):
    """Rows by eights, as the definition says; what is no row is nothing."""
    arrays = [random_weight((size, 200), seed=i) for i in (1, 2)]
    parts = [
        tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=f)
        for w, f in zip(arrays, (0.5, 2.0), strict=True)
    ]
    gated = tj.fireq.gate_and_up(*parts)
    gated.validate()
    assert (gated.shape, gated.result_size, gated.gated) == ((2 * size, 200), size, True)
    codes, scales = code_rows(np.asarray(gated.codes)), wide(scale_rows(gated.scales))
    for i, part in enumerate(parts):
        for row in range(size):
            place = 16 * (row // 8) + 8 * i + row % 8
            np.testing.assert_array_equal(codes[place], code_rows(part.codes)[row])
            np.testing.assert_array_equal(scales[place], wide(scale_rows(part.scales)[row]))
            assert gated.output_scale[place] == part.output_scale[row]
    assert codes.any(axis=1).sum() == 2 * size
    both = jnp.concatenate([tj.fireq.dequantize(part) for part in parts])
    np.testing.assert_array_equal(tj.fireq.dequantize(gated), both)
    bias = jnp.arange(1.0, 2 * size + 1)
    rows = int4.pad_rows(bias, gated)
    assert rows.shape == gated.output_scale.shape
    np.testing.assert_array_equal(int4.unpad_rows(rows, gated), bias)
    assert rows[8] == size + 1


def test_bad_input():
    w = random_weight((8, 128))
    quantize = tj.fireq.quantize_weight
    with pytest.raises(TypeError, match=r"w.dtype=int8 must be"):
        quantize(w.astype(jnp.int8))
    with pytest.raises(ValueError, match=r"w.shape=\(128,\) must be \[out, in\]"):
        quantize(w[0])
    with pytest.raises(ValueError, match="no axis empty"):
        quantize(w[:0])
    for size in (0, 16, 96, 192, -128):
        with pytest.raises(ValueError, match=f"group_size={size} must be 32, 64 or a multiple"):
            quantize(w, group_size=size)
    with pytest.raises(TypeError, match="group_size=128.0 must be an integer"):
        quantize(w, group_size=128.0)
    with pytest.raises(ValueError, match="scale_dtype='fp8' must be one of"):
        quantize(w, scale_dtype="fp8")
    with pytest.raises(ValueError, match=r"output_scale.shape=\(7,\) must be \(\) or \(8,\)"):
        quantize(w, output_scale=jnp.ones(7))
    with pytest.raises(TypeError, match=r"output_scale.dtype=int32 must be floating point"):
        quantize(w, output_scale=jnp.ones(8, jnp.int32))


def test_weights_that_do_not_join():
    one = tj.fireq.quantize_weight(random_weight((8, 128)))
    other = tj.fireq.quantize_weight(random_weight((8, 128)), scale_dtype="bf16")
    gated = tj.fireq.gate_and_up(one, one)
    for weights in ([one, other], [gated], [one, gated]):
        with pytest.raises(ValueError, match="must be alike"):
            tj.fireq.concatenate(weights)
    with pytest.raises(ValueError, match="at least one"):
        tj.fireq.concatenate([])
    small = tj.fireq.quantize_weight(random_weight((7, 128)))
    with pytest.raises(ValueError, match=r"gate.out_size=8 must equal up.out_size=7"):
        tj.fireq.gate_and_up(one, small)


def test_validate():
    weight = tj.fireq.quantize_weight(random_weight((8, 200)))
    wrong = {
        "codes": weight.codes[:, :-1],
        "scales": weight.scales[:, :-1],
        "zeros": weight.scales[:, :-1].astype(jnp.int8),
        "output_scale": weight.output_scale[:8],
        "out_size": 0,
        "in_size": 300,
        "group_size": 96,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(weight, **{name: value}).validate()
    with pytest.raises(TypeError, match=r"codes.dtype=int8 must be uint8"):
        dataclasses.replace(weight, codes=weight.codes.astype(jnp.int8)).validate()
    with pytest.raises(ValueError, match="must be even"):
        dataclasses.replace(weight, out_size=7, gated=True).validate()
    assert weight.nbytes == 64 * 128 + 2 * 64 + 4 * 64


def tokens(dtype):
    """Rows of every magnitude, zeros, what saturates, and what is not finite."""
    x = np.random.default_rng(0).normal(size=(24, 77))
    x[:12] *= np.logspace(-4, 3, 12)[:, None]
    x[12] = 0
    x[13, :76] = 0
    x[14] = np.where(np.arange(77) % 2, 448 * (1 + 2**-8), -448)
    x[15] = 448
    x[16, 3], x[17, 76], x[18, 0] = np.nan, np.inf, -np.inf
    x[19, 2], x[19, 3] = np.nan, np.inf
    return jnp.asarray(x, jnp.float32).astype(dtype)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens(dtype):
    x = tokens(dtype)
    got = tj.fireq.quantize_tokens(x)
    codes, scale = oracle.quantize_tokens(np.asarray(x.astype(jnp.float32)))
    assert (got.codes.dtype, got.scale.dtype) == (jnp.float8_e4m3fn, jnp.bfloat16)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    np.testing.assert_array_equal(got.scale.astype(jnp.float32), scale)
    np.testing.assert_array_equal(got.codes.astype(jnp.float32), codes)
    assert np.isfinite(codes[:16]).all()
    assert np.isnan(codes[16:20]).all()
    assert np.abs(codes[14]).max() == 448
    assert_same_bits(jax.jit(tj.fireq.quantize_tokens)(x), got)
    assert_same_bits(jax.vmap(tj.fireq.quantize_tokens)(x[:, None]).codes[:, 0], got.codes)


def test_tokens_near_the_ends_of_float32():
    """Beneath 2**-126 is nothing; from there on the scale is at least that."""
    factors = np.array([1e-45, 1.1e-38, 1.2e-38, 5e-36, 6e-36, 1e30, 3e38], np.float32)
    x = jnp.asarray(factors[:, None] * np.linspace(-1, 1, 9, dtype=np.float32)[None])
    got = tj.fireq.quantize_tokens(x)
    codes, scale = oracle.quantize_tokens(np.asarray(x))
    np.testing.assert_array_equal(got.scale.astype(jnp.float32), scale)
    assert (scale[:4] == [1, 1, 2.0**-126, 2.0**-126]).all()
    assert scale[4] > scale[3]
    # What is smaller itself may count as zero: the device decides.
    np.testing.assert_array_equal(got.codes[3:].astype(jnp.float32), codes[3:])
    assert abs(got.codes[2, 8].astype(jnp.float32)) == codes[2, 8]
    assert not got.codes[:2].astype(jnp.float32).any()


def test_tokens_bad_input():
    with pytest.raises(TypeError, match="x.dtype=int32 must be"):
        tj.fireq.quantize_tokens(jnp.ones((2, 3), jnp.int32))
    for shape in ((), (3, 0)):
        with pytest.raises(ValueError, match="K at least 1"):
            tj.fireq.quantize_tokens(jnp.ones(shape))
    assert tj.fireq.quantize_tokens(jnp.ones(5)).scale.shape == ()


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_files(tmp_path, scale_dtype):
    """Every bit, NaN scales included, and several weights in one file."""
    w = random_weight((30, 300)).at[3, 5].set(jnp.nan)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=0.5)
    gated = tj.fireq.gate_and_up(weight, weight)
    wide = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, group_size=256)
    weights = {"layers.0.o": weight, "layers.0.gate_up": gated, "wide": wide}
    path = tmp_path / "weights.safetensors"
    tj.fireq.save_weights(weights, path)
    loaded = tj.fireq.load_weights(path)
    assert set(loaded) == set(weights)
    for name, got in loaded.items():
        assert_same_bits(got, weights[name])


def of_version_1(weight, tensors, metadata):
    """What was stored before arrays lay in tiles."""
    scales = np.ascontiguousarray(scale_rows(tensors["a.scales"]).T)
    tensors = {**tensors, "a.codes": code_rows(tensors["a.codes"]), "a.scales": scales}
    sizes = json.loads(metadata["a"])
    assert sizes.pop("version") == 2
    return tensors, {"a": json.dumps(sizes)}


@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_files_of_version_1(tmp_path, scale_dtype):
    """They hold rows; what is read lies in tiles."""
    weight = tj.fireq.quantize_weight(random_weight((70, 300)), scale_dtype=scale_dtype)
    tensors, metadata = of_version_1(weight, *tj.fireq.to_tensors(weight, "a"))
    assert tensors["a.codes"].shape == (128, 192)
    assert tensors["a.scales"].shape == (3, 128)
    safetensors.numpy.save_file(tensors, tmp_path / "old", metadata=metadata)
    assert_same_bits(tj.fireq.load_weights(tmp_path / "old")["a"], weight)
    for part, wrong in (("codes", (127, 192)), ("codes", (128, 191)), ("scales", (3, 127))):
        broken = {**tensors, f"a.{part}": np.zeros(wrong, tensors[f"a.{part}"].dtype)}
        with pytest.raises(ValueError, match=rf"a.{part}.shape=\({wrong[0]}, {wrong[1]}\) of ver"):
            tj.fireq.from_tensors(broken, metadata, "a")
    later = {"a": json.dumps({**json.loads(metadata["a"]), "version": 3})}
    with pytest.raises(ValueError, match="version='?3'? must be 2 or less"):
        tj.fireq.from_tensors(tensors, later, "a")


def test_tensors_that_do_not_fit():
    weight = tj.fireq.quantize_weight(random_weight((3, 5)))
    tensors, metadata = tj.fireq.to_tensors(weight, "a")
    assert {name: x.dtype.name for name, x in tensors.items()} == {
        "a.codes": "uint8",
        "a.scales": "uint8",
        "a.output_scale": "float32",
    }

    def load(tensors=tensors, **sizes):
        text = {"a": json.dumps({**json.loads(metadata["a"]), **sizes})}
        return tj.fireq.from_tensors(tensors, text, "a")

    assert_same_bits(load(), weight)
    with pytest.raises(ValueError, match=r"'a' lacks \['a.scales'\]"):
        load({k: x for k, x in tensors.items() if k != "a.scales"})
    with pytest.raises(ValueError, match="'b' lacks"):
        tj.fireq.from_tensors(tensors, metadata, "b")
    with pytest.raises(ValueError, match="'a' lacks its entry in the metadata"):
        tj.fireq.from_tensors(tensors, {}, "a")
    with pytest.raises(ValueError, match=r"codes.shape=\(1, 1, 64, 64\) must be \(2, 1, 64, 64\)"):
        load(out_size=70)
    with pytest.raises(ValueError, match="must hold"):
        load(out_size="3")
    with pytest.raises(ValueError, match="is no JSON"):
        tj.fireq.from_tensors(tensors, {"a": "{"}, "a")
    with pytest.raises(TypeError, match=r"scales.dtype=uint8 must be float8_e4m3fn or bfl"):
        load(scale_dtype="bf16")
    with pytest.raises(TypeError, match="must be uint8, bits of e4m3"):
        load({**tensors, "a.scales": tensors["a.scales"].astype(np.float32)})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        tj.fireq.load_weights(tmp_path / "absent")
    (tmp_path / "text").write_text("no safetensors", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        tj.fireq.load_weights(tmp_path / "text")


CODES = [(70, 200, None), (64, 256, 128), (10, 96, 32), (100, 384, 384), (65, 512, 256)]


def plain(outputs, inputs, group_size, seed=0):
    """Codes, scales some of which are subnormal, zeros, output scales."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-inputs // group_size)
    scales = rng.uniform(0.1, 1, (outputs, groups)) * 10.0 ** rng.integers(-7, 0, (outputs, 1))
    return (
        rng.integers(-8, 8, (outputs, inputs)).astype(np.int8),
        scales.astype(np.float16),
        rng.integers(-8, 9, (outputs, groups)).astype(np.int8),
        rng.uniform(0.5, 2, outputs).astype(np.float32),
    )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("shape", CODES)
def test_values_there_and_back(shape):
    _, inputs, group_size = shape
    codes, scales, zeros, factor = plain(*shape)

    def wide(x):
        return np.repeat(x.astype(np.float32), group_size or inputs, axis=1)[:, :inputs]

    for z, f in ((None, None), (zeros, None), (zeros, factor)):
        weight = fireq.from_codes(codes, scales, z, group_size=group_size, output_scale=f)
        weight.validate()
        expected = (codes - (0 if z is None else wide(z))) * wide(scales)
        expected = expected if f is None else expected * f[:, None]
        assert np.asarray(fireq.dequantize(weight)).tobytes() == expected.tobytes()
        back = fireq.to_codes(weight)
        np.testing.assert_array_equal(back.codes, codes)
        again = fireq.from_codes(
            *back[:3], group_size=weight.group_size, output_scale=back.output_scale
        )
        assert jax.tree.structure(again) == jax.tree.structure(weight)
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(weight), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_gated_weights_and_transforms():
    codes, scales, zeros, _ = plain(2 * 24, 128, 128)
    halves = [[x[i * 24 : (i + 1) * 24] for x in (codes, scales, zeros)] for i in (0, 1)]
    joined = fireq.gate_and_up(*(fireq.from_codes(*half) for half in halves))
    for one, other in zip(fireq.to_codes(joined)[:3], (codes, scales, zeros), strict=True):
        np.testing.assert_array_equal(one, other)
    stacks = [np.stack(x) for x in zip(*halves, strict=True)]
    stacked = jax.jit(jax.vmap(fireq.from_codes))(*stacks)
    for i, half in enumerate(halves):
        weight = fireq.from_codes(*half)
        for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(weight), strict=True):
            assert np.asarray(one[i]).tobytes() == np.asarray(other).tobytes()


def test_refusals():
    codes, scales, zeros, factor = plain(16, 128, 64)
    for error, message, args, keys in (
        (TypeError, "codes.dtype=int32", (codes.astype(np.int32), scales), {}),
        (TypeError, "scales.dtype=float32", (codes, scales.astype(np.float32)), {}),
        (TypeError, "zeros.dtype=float16", (codes, scales, scales), {"group_size": 64}),
        (TypeError, "output_scale.dtype=float16", (codes, scales), {"output_scale": scales[:, 0]}),
        (ValueError, "codes.shape=.128,. must be", (codes[0], scales), {}),
        (ValueError, r"scales.shape=\(16, 2\) must be \(16, 1\)", (codes, scales), {}),
        (ValueError, "group_size=96 must be 32, 64", (codes, scales), {"group_size": 96}),
        (ValueError, "zeros.shape", (codes, scales, zeros[:, :1]), {"group_size": 64}),
        (ValueError, "codes from -7 to 8 must be from -8 to 7", (codes + 1, scales), {}),
        (ValueError, "zeros from -9 to .* must be from -8 to 8", (codes, scales, zeros - 1), {}),
        (ValueError, "output_scale.shape", (codes, scales), {"output_scale": factor[:3]}),
    ):
        given = {"group_size": 64, **keys} if "scales.shape" not in message else keys
        with pytest.raises(error, match=message):
            fireq.from_codes(*map(jnp.asarray, args), **given)
