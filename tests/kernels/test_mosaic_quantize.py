"""Queries that a kernel quantizes itself: its own arithmetic on a CPU, with exact codes."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import eight_bits, quantize
from tests.oracles import quantizers, warp

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture
def lanes(monkeypatch):
    for module in (quantize, eight_bits):
        monkeypatch.setattr(module, "lane", warp)
    for name in ("Int", "Pointer"):
        monkeypatch.setattr(quantize, name, getattr(warp, name))


def unswizzled(codes, channels):
    """``[rows, channels]`` of bytes whose rows are interleaved by 16 as the hardware does it."""
    rows = codes.reshape(-1, channels)
    units = rows.reshape(len(rows), -1, 16)
    row = np.arange(len(rows))[:, None]
    turn = row % 8 if channels == 128 else row // 2 % 4
    return units[row, np.arange(channels // 16)[None] ^ turn].reshape(rows.shape)


def run(x, count, tile):
    """Codes ``[rows, channels]`` and scales ``[rows / 64]``."""
    raw = np.ascontiguousarray(x).view(np.uint8).ravel()
    codes = np.zeros(tile.rows * tile.channels, np.uint8)
    source, target = warp.Pointer(raw), warp.Pointer(codes)
    threads = [warp.Int(32 * w + warp.LANES) for w in range(4)]
    scales = []
    for thread in threads:
        quantize.clear(source, thread, warp.integer(count), tile)
    groups = tile.block // 64
    for i in range(tile.rows // 64):
        first = i // groups * groups
        bits = max(
            int(quantize.largest(source, thread, first + j, tile).value.max())
            for j in range(groups)
            for thread in threads
        )
        scale = quantize.scale_of(warp.integer(bits), tile)
        scales.append(scale.value[0])
        for thread in threads:
            quantize.write(source, target, thread, i, scale, tile)
    codes = unswizzled(codes, tile.channels)
    return codes.view(np.int8 if tile.is_int8 else ml_dtypes.float8_e4m3fn), np.array(scales)


def values(case, shape, dtype, rng):
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9)
    if case == "ties":  # a scale of few bits, and quotients that are halves of it
        x = rng.integers(-238, 239, shape) * 1.5
        x[::64, 0] = 119 * 3
    elif case == "tiny":
        x = rng.normal(size=shape) * (1e-39 if dtype == "bfloat16" else 1e-7)
    elif case == "zero":
        x = np.zeros(shape)
    return x.astype(DTYPES[dtype])


@pytest.mark.quick(3, slow=0)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("case", ["normal", "ties", "tiny", "zero"])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "block", "dtype"),
    [(128, 128, 64, "bfloat16"), (128, 64, 128, "float16"), (192, 64, 64, "bfloat16")],
)
def test_codes_are_exact(case, is_int8, rows, channels, block, dtype):
    tile = quantize.Tile(rows, channels, block, dtype, is_int8)
    rng = np.random.default_rng(rows + channels)
    for count in (rows, 70, 0):
        x = values(case, (rows, channels), dtype, rng)
        known = np.where(np.arange(rows)[:, None] < count, x, x.dtype.type(0))
        codes, scales = run(x.copy(), count, tile)
        oracle = quantizers.quantize_int8 if is_int8 else quantizers.quantize_fp8
        want, want_scales = oracle(known.reshape(-1, block, channels), axis=(1, 2))
        np.testing.assert_array_equal(scales, np.repeat(want_scales, block // 64))
        want = np.asarray(want).reshape(codes.shape)
        np.testing.assert_array_equal(codes.astype(np.float32), want.astype(np.float32))


@pytest.mark.quick(3, slow=0)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_int8", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_is_not_finite_marks_its_block(bad, is_int8, dtype):
    x = np.ones((128, 128), DTYPES[dtype])
    x[90, 3] = bad
    _, scales = run(x, 128, quantize.Tile(128, 128, 64, dtype, is_int8))
    assert np.isnan(scales).tolist() == [False, True]
    _, scales = run(x, 90, quantize.Tile(128, 128, 64, dtype, is_int8))
    assert not np.isnan(scales).any()
