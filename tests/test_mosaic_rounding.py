"""Tokens that a product rounds itself: emulated on a CPU against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import lanes
from test_fp8_tokens import activations, bits

import turbojax as tj
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.matmul import rounding
from pallas_kernels.mosaic.hopper.matmul.rounding import Rounding


def interleaved(codes, columns, groups):
    """Codes ``[M, inputs]`` as `load_rounded` leaves them, by the definition."""
    out = np.zeros((groups, columns, 128), np.uint8)
    padded = np.zeros((columns, groups * 128), np.uint8)
    # The sign of NaN is the device's.
    codes = np.where((codes & 127) == 127, 127, codes)
    padded[: len(codes)] = np.where(codes[:, :1] == 127, 127, 0)
    padded[: codes.shape[0], : codes.shape[1]] = codes
    for group, column, chunk in np.ndindex(groups, columns, 8):
        byte = 128 * group + 16 * chunk
        place = 16 * (chunk ^ (column % 8))
        out[group, column, place : place + 16] = padded[column, byte : byte + 16]
    return out


def rounded(x, r):
    """What a program of one warpgroup or more leaves in its memory: codes and scales."""
    sizes = (r.groups * r.columns * 128, r.columns * 4, r.columns * 4)
    ends = [sum(sizes[: i + 1]) for i in range(3)]

    def body(arrays, ids):
        given, codes, scales, shared = arrays
        places = (shared, shared.at(ends[0]), shared.at(ends[1]))
        rounding.load_rounded(given, ids[0], *places, r)
        lane = rounding.lane
        lane.block_barrier()
        warp, number = lane.thread() >> 5, lane.thread() & 31
        with lane.when(warp.equals(0)):
            for i in range(sizes[0] // 128):
                at = number * 4 + i * 128
                codes.at(at).store(shared.at(at).word())
            for i in range(-(-r.columns // 32)):
                at = (number + 32 * i).minimum(r.columns - 1) * 4
                scales.at(at).store(places[1].at(at).word())

    out = [
        jax.ShapeDtypeStruct((r.groups, r.columns, 128), jnp.uint8),
        jax.ShapeDtypeStruct((r.columns,), jnp.float32),
    ]
    options = {"grid": {"part": 1}, "warpgroups": r.warpgroups, "shared": ends[2]}
    return lanes.launch(body, "test", [x], out, **options)


@pytest.mark.parametrize(
    ("tokens", "inputs", "columns", "warpgroups", "dtype"),
    [
        (1, 384, 8, 1, jnp.bfloat16),
        (5, 200, 8, 2, jnp.float16),
        (16, 640, 16, 4, jnp.bfloat16),
        (33, 136, 64, 4, jnp.bfloat16),
    ],
)
def test_the_bits_of_the_definition(monkeypatch, tokens, inputs, columns, warpgroups, dtype):
    """Zeros, outliers, and tokens with NaN or infinity among them."""
    lanes.patch(monkeypatch, rounding, eight_bits)
    x = activations((tokens, inputs), dtype)
    x = x.at[0, inputs - 1].set(jnp.inf) if tokens > 1 else x
    x = x.at[1, 0].set(jnp.nan).at[3].set(0) if tokens > 4 else x
    groups = -(-inputs // 128)
    r = Rounding(x.dtype.name, tokens, inputs, columns, groups, 1, warpgroups)
    codes, scales = rounded(x, r)
    want = tj.fireq.quantize_tokens(x)
    np.testing.assert_array_equal(scales[:tokens], want.scale.astype(jnp.float32))
    codes = np.where((np.asarray(codes) & 127) == 127, 127, codes)
    expected = interleaved(bits(want.codes).astype(np.uint8), columns, groups)
    np.testing.assert_array_equal(codes, expected)


def test_words_that_a_lane_holds():
    """Those of 16 tokens of a Llama's down product, in a cluster of 8; and a whole token's."""
    assert Rounding("bfloat16", 16, 14336, 16, 14, 8, 4).held == 7
    assert Rounding("bfloat16", 1, 4096, 8, 32, 1, 4).held == 16
