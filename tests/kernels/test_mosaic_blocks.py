"""Blocks that Hopper's kernels quantize: their own arithmetic on a CPU, with exact codes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic import quantize as of_rows
from pallas_kernels.mosaic.hopper import quantize
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes as oracle
from tests.oracles import quantizers, warp
from turbojax import _device
from turbojax.attention.turbo import operands

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@pytest.fixture
def emulated(monkeypatch):
    """Arrays of 32 lanes in place of numbers."""
    oracle.patch(monkeypatch, blocks, eight_bits, quantize)
    for module in (blocks, quantize):
        monkeypatch.setattr(module, "Int", warp.Int)


def values(shape, dtype, case="normal", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9)
    if case == "ties":  # a scale of few bits, and quotients that are halves of it
        x = rng.integers(-238, 239, shape) * 1.5
        x[:, ::16, :, 0] = 119 * 3
    elif case == "tiny":
        x = rng.normal(size=shape) * (1e-7 if dtype == "float16" else 1e-39)
    return x.astype(DTYPES[dtype])


def cut(x, lengths, block, size, channels):
    """Blocks ``[B, K, n, block, channels]``, 0 where there is nothing."""
    x = np.where(
        np.arange(x.shape[1])[None, :, None, None] < np.reshape(lengths, (-1, 1, 1, 1)), x, 0
    )
    x = np.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, channels - x.shape[3])))
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, block, channels)


def permuted(codes):
    row = np.arange(codes.shape[2])
    i, h, t, r = row // 16, row // 8 % 2, row // 2 % 4, row % 2
    return codes[:, :, 16 * i + 4 * t + 2 * h + r]


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def check(x, lengths, block, is_int8, channels=None, multiple=None, **options):
    dtype = jnp.int8 if is_int8 else jnp.float8_e4m3fn
    sizes = {"block": block, "channels": channels, "multiple": multiple}
    codes, scales = quantize.quantize(
        x, np.array(lengths, np.int32), dtype=dtype, **sizes, **options
    )
    size, multiple = x.shape[1], multiple or block
    known = cut(x, lengths, block, -(-size // multiple) * multiple, channels or x.shape[3])
    by_numpy = quantizers.quantize_int8 if is_int8 else quantizers.quantize_fp8
    want, want_scales = by_numpy(known, axis=(3, 4))
    want = want.reshape(*want.shape[:2], -1, want.shape[4])
    if options.get("permuted"):
        want = permuted(want)
    same(scales, want_scales)
    same(codes, want.swapaxes(2, 3) if options.get("tokens_last") else want)


@pytest.mark.quick(7, slow=0)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("case", ["normal", "ties", "tiny"])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize(
    ("shape", "block", "dtype", "options"),
    [
        ((2, 70, 1, 128), 64, "bfloat16", {"permuted": True}),
        ((1, 40, 2, 64), 64, "float16", {"tokens_last": True, "multiple": 128}),
        ((1, 20, 1, 80), 16, "float32", {"tokens_last": True, "channels": 128}),
        ((1, 90, 1, 24), 128, "bfloat16", {"channels": 24, "permuted": True}),
    ],
)
def test_codes_are_exact(case, is_int8, shape, block, dtype, options):
    lengths = [shape[1], 0][: shape[0]]
    check(values(shape, dtype, case), lengths, block, is_int8, **options)


@pytest.mark.quick(2, slow=0)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_not_finite_marks_its_block(bad, is_int8, dtype):
    x = np.ones((1, 40, 1, 64), DTYPES[dtype])
    x[0, 33, 0, 3] = bad
    options = {"block": 16, "dtype": jnp.int8 if is_int8 else jnp.float8_e4m3fn}
    codes, scales = quantize.quantize(x, np.array([40], np.int32), **options)
    assert np.isnan(scales).tolist() == [[[False, False, True]]]
    codes = np.asarray(codes[0, 0, 32:], np.float32)
    assert np.all(codes == 0) if is_int8 else np.all(np.isnan(codes))
    _, scales = quantize.quantize(x, np.array([33], np.int32), **options)
    assert not np.isnan(scales).any()


@pytest.mark.quick(1, slow=0)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 128), ("float16", 1), ("float32", 2)])
def test_maxima(monkeypatch, dtype, most):
    """Of one block of tokens each, or of several."""
    monkeypatch.setattr(quantize, "_MOST_MAXIMA", most)
    x, lengths = values((2, 300, 2, 64), dtype), np.array([300, 31], np.int32)
    maxima = np.asarray(quantize.absolute_maxima(x, lengths))
    assert maxima.shape[2] == min(3, most)
    known = np.abs(cut(x, lengths, 300, 300, 64).astype(np.float32))
    same(maxima.max(2), known.max((2, 3, 4)))
    x[0, 299, 1, 5], x[1, 31, 0, 0] = np.inf, np.nan
    maxima = np.asarray(quantize.absolute_maxima(x, lengths))
    assert np.isnan(maxima).any(2).tolist() == [[False, True], [False, False]]


@pytest.mark.quick(1, slow=0)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("value_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_keys_and_values(value_dtype):
    """One launch for both; values in e4m3 have one scale for a head."""
    key, value = (values((2, 40, 2, 64), "bfloat16", seed=i) for i in range(2))
    lengths = np.array([40, 9], np.int32)
    k, k_scale, v, v_scale = quantize.keys_and_values(
        *(key, value, lengths), block=16, key_dtype=jnp.int8, value_dtype=value_dtype, permuted=True
    )
    keys, known = (cut(x, lengths, 16, 48, 64) for x in (key, value))
    want, scale = quantizers.quantize_int8(keys, axis=(3, 4))
    same(k_scale, scale)
    same(k, permuted(want.reshape(2, 2, 48, 64)))
    if value_dtype == jnp.int8:
        want, scale = quantizers.quantize_int8(known, axis=(3, 4))
    else:
        want, scale = quantizers.quantize_fp8(known, axis=(2, 3, 4))
        scale = np.repeat(scale[..., None], 3, 2)
    same(v_scale, scale)
    same(v, want.reshape(2, 2, 48, 64).swapaxes(2, 3))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_every_quotient_of_few_bits_is_rounded_right(dtype, bits):
    """Of all significands of a value and of a scale, at all distances up to 119."""
    significand = np.arange(2 ** (bits - 1), 2**bits, dtype=np.float32)
    step = 1 if bits == 8 else 7
    for scale in significand[::step]:
        x = np.concatenate([significand * 2.0**e for e in range(-4, 8)]).astype(np.float32)
        x = x[x <= 119.5 * scale]
        lanes = np.resize(x, (-(-len(x) // 32), 32)).T
        rounding = eight_bits.Rounding.of(warp.number(scale), dtype)
        # Lanes of any number: these are no warps.
        codes = np.fmax(0, rounding_of(rounding, lanes))
        np.testing.assert_array_equal(codes, np.rint(lanes.astype(np.float64) / scale))


def rounding_of(rounding, x):
    """`Rounding.word`'s numbers, of an array."""
    f, u, o = (np.float64(getattr(rounding, n).value[0]) for n in ("factor", "unit", "offset"))
    first = (x.astype(np.float64) * f + warp.ROUNDER).astype(np.float32)
    return (first.astype(np.float64) * u + o).astype(np.float32) - warp.ROUNDER


# Lowering, and the choice ------------------------------------------------------------------------


def lowered(monkeypatch, x, **options):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    config = tj.TurboConfig(mode=options.pop("mode"), **options)
    length = jax.ShapeDtypeStruct((x.shape[0],), jnp.int32)
    call = functools.partial(operands.quantize_operands, config=config, permuted=True)
    return lower_for_cuda(call, x, x, x, length, length)


@pytest.mark.parametrize(
    ("mode", "shape", "dtype"),
    [
        ("int8", (2, 200, 2, 128), jnp.bfloat16),
        ("int8_fp8", (2, 9000, 1, 80), jnp.float16),
        ("fp8", (1, 70, 2, 256), jnp.float32),
    ],
)
def test_a_call_lowers(monkeypatch, mode, shape, dtype):
    """Queries, keys with values or their maxima, and then values in e4m3."""
    text = lowered(monkeypatch, jax.ShapeDtypeStruct(shape, dtype), mode=mode)
    assert text.count("mosaic_gpu_v2") == (2 if mode == "int8" else 3)
    assert "turbojax_quantize_hopper" in text
    assert "triton" not in text


@pytest.mark.parametrize(
    ("head_dim", "block", "words"),
    [(36, 64, "head_dim=36 must be a multiple of 8"), (64, 8, "block=8 must be at least 16")],
)
def test_what_is_left_to_the_kernels_for_triton(monkeypatch, head_dim, block, words):
    x = jax.ShapeDtypeStruct((1, 40, 2, head_dim), jnp.bfloat16)
    assert words in quantize.unsupported(x, block)
    blocks = {"block_q": block, "block_kv": block, "buffer_size": block}
    assert "mosaic_gpu" not in lowered(monkeypatch, x, mode="int8", **blocks)


HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture
def lanes(monkeypatch):
    for module in (of_rows, eight_bits):
        monkeypatch.setattr(module, "lane", warp)
    for name in ("Int", "Pointer"):
        monkeypatch.setattr(of_rows, name, getattr(warp, name))


def unswizzled(codes, channels):
    """``[rows, channels]`` of bytes whose rows are interleaved by 16 as the hardware does it."""
    rows = codes.reshape(-1, channels)
    units = rows.reshape(len(rows), -1, 16)
    row = np.arange(len(rows))[:, None]
    swizzle = row % 8 if channels == 128 else row // 2 % 4
    return units[row, np.arange(channels // 16)[None] ^ swizzle].reshape(rows.shape)


def run_tile(x, count, tile):
    """Codes ``[rows, channels]`` and scales ``[rows / 64]``."""
    raw = np.ascontiguousarray(x).view(np.uint8).ravel()
    codes = np.zeros(tile.rows * tile.channels, np.uint8)
    source, target = warp.Pointer(raw), warp.Pointer(codes)
    threads = [warp.Int(32 * w + warp.LANES) for w in range(4)]
    scales = []
    for thread in threads:
        of_rows.clear(source, thread, warp.integer(count), tile)
    groups = tile.block // 64
    for i in range(tile.rows // 64):
        first = i // groups * groups
        bits = max(
            int(of_rows.largest(source, thread, first + j, tile).value.max())
            for j in range(groups)
            for thread in threads
        )
        scale = of_rows.scale_of(warp.integer(bits), tile)
        scales.append(scale.value[0])
        for thread in threads:
            of_rows.write(source, target, thread, i, scale, tile)
    codes = unswizzled(codes, tile.channels)
    return codes.view(np.int8 if tile.is_int8 else ml_dtypes.float8_e4m3fn), np.array(scales)


def values_of_rows(case, shape, dtype, rng):
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9)
    if case == "ties":  # a scale of few bits, and quotients that are halves of it
        x = rng.integers(-238, 239, shape) * 1.5
        x[::64, 0] = 119 * 3
    elif case == "tiny":
        x = rng.normal(size=shape) * (1e-39 if dtype == "bfloat16" else 1e-7)
    elif case == "zero":
        x = np.zeros(shape)
    return x.astype(HALVES[dtype])


@pytest.mark.quick(3, slow=0)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("case", ["normal", "ties", "tiny", "zero"])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "block", "dtype"),
    [(128, 128, 64, "bfloat16"), (128, 64, 128, "float16"), (192, 64, 64, "bfloat16")],
)
def test_codes_of_rows_are_exact(case, is_int8, rows, channels, block, dtype):
    tile = of_rows.Tile(rows, channels, block, dtype, is_int8)
    rng = np.random.default_rng(rows + channels)
    for count in (rows, 70, 0):
        x = values_of_rows(case, (rows, channels), dtype, rng)
        known = np.where(np.arange(rows)[:, None] < count, x, x.dtype.type(0))
        codes, scales = run_tile(x.copy(), count, tile)
        oracle = quantizers.quantize_int8 if is_int8 else quantizers.quantize_fp8
        want, want_scales = oracle(known.reshape(-1, block, channels), axis=(1, 2))
        np.testing.assert_array_equal(scales, np.repeat(want_scales, block // 64))
        want = np.asarray(want).reshape(codes.shape)
        np.testing.assert_array_equal(codes.astype(np.float32), want.astype(np.float32))


@pytest.mark.quick(3, slow=0)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("dtype", list(HALVES))
def test_what_is_not_finite_marks_its_rows(bad, is_int8, dtype):
    x = np.ones((128, 128), HALVES[dtype])
    x[90, 3] = bad
    _, scales = run_tile(x, 128, of_rows.Tile(128, 128, 64, dtype, is_int8))
    assert np.isnan(scales).tolist() == [False, True]
    _, scales = run_tile(x, 90, of_rows.Tile(128, 128, 64, dtype, is_int8))
    assert not np.isnan(scales).any()
