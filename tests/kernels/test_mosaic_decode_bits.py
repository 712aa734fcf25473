"""Decode for Hopper, on a CPU: what a warp computes of blocks of 4, 3 and 2 bits and of the buffer.

Its arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real matrix
unit are checked on a GPU, in `test_gpu_mosaic_decode.py`.
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.decode import block, kernel
from pallas_kernels.mosaic.hopper.decode import types as kernel_types
from tests.attention.decode_helpers import append, decode, empty, store, tokens
from tests.oracles import warp
from turbojax.quantizers import pack


def signed_byte(x, index):
    return warp.Int(warp._bytes(x)[:, index])


@pytest.fixture
def lanes(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    for module in (frame, block, kernel, kernel_types):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr(warp, "signed_byte", signed_byte, raising=False)
    number = warp.Int(warp.LANES)
    g, t = number >> 2, number & 3
    return kernel_types.Place(g, t, g & 3, ((g & 3) * 0x1111) ^ 0x3210)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_codes_are_unpacked_in_the_order_of_channels(lanes, bits, size):
    codes = np.random.default_rng(size).integers(2**bits, size=size).astype(np.uint8)
    packed = np.zeros(16 * -(-size * bits // 128), np.uint8)
    packed[: size * bits // 8] = pack(jnp.asarray(codes), bits)
    found, order = (
        np.stack([warp._bytes(x) for x in words], 1)
        for words in (
            block.code_words(warp.Pointer(packed), warp.integer(0), lanes, size, bits),
            block.channel_words(warp.Pointer(np.arange(size, dtype=np.uint8)), lanes, size, bits),
        )
    )
    np.testing.assert_array_equal(found, codes[order.astype(np.uint8)])
    assert sorted(order[:4].astype(np.uint8).ravel()) == list(range(size))


def bytes_of(x):
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def attend(lane, x, cache):
    """`decode` of one query of each head by one warp, for a cache of one sequence and KV head."""
    config, dim = cache.config, cache.head_dim
    s = kernel_types.Shape(dim, config.block_kv, cache.key.bits[0], cache.value.bits[0], 4)
    n = kernel_types.Numerics(None, None, None, is_masked=False)
    length, buffered = int(cache.lengths[0]), int(cache.buffer_lengths[0])

    def side(of):
        return types.SimpleNamespace(
            buffer=warp.Pointer(bytes_of(of.buffer)),
            buffer_scale=warp.Pointer(bytes_of(of.buffer_scale)),
        )

    zero = warp.integer(0)
    a = types.SimpleNamespace(
        query=warp.Pointer(bytes_of(x)), tokens=1, heads=x.shape[2], group=x.shape[2],
        rows=x.shape[2], head_dim=dim, dtype="float32", buffer_size=config.buffer_size,
        key=side(cache.key), value=side(cache.value),
    )  # fmt: skip
    at = types.SimpleNamespace(
        tile=zero, head=zero, batch=zero, pair=zero, begin=warp.integer(length - 1),
        query_length=warp.integer(1), compressed=warp.integer(length - buffered),
    )  # fmt: skip
    widths = [kernel_types.Width(of.bits, None) for of in (cache.key, cache.value)]
    products = kernel.Products.of(s, *widths, lane, n)
    loaded, state = products.query(a, at, dim**-0.5), kernel_types.State.empty(s)
    for i in range((length - buffered) // s.block):
        key, value = cache.key, cache.value
        parts = (
            key.codes[0], value.codes[0], key.channel_scale, key.channel_zero,
            value.channel_scale, value.channel_zero,
        )  # fmt: skip
        memory = np.concatenate([bytes_of(y[0, 0, i]) for y in parts])
        assert len(memory) == s.bytes
        scales = [warp.number(float(of.block_scale[0, 0, i])) for of in (key, value)]
        state = products.attend_block(
            state, warp.Pointer(memory), tuple(scales), warp.integer(i * s.block), loaded
        )
    for i in range(-(-buffered // s.block)):
        state = products.attend_buffer(a, state, at, warp.integer(i), loaded)
    out, g, t = np.full((8, dim), np.nan), warp.LANES // 4, warp.LANES % 4
    for k in range(dim // 8):
        channel = g * (dim // 8) + ((lane.rotation.value ^ (k % 4)) + k // 4 * 4)
        for j in (0, 1):
            out[2 * t + j, channel] = state.outputs[2 * k + j].value
    total = warp.reduce_lanes(state.totals[0], lambda u, v: u + v, (4, 8, 16)).value[:4]
    return out[: x.shape[2]] / total[: x.shape[2], None]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("bits", "dim", "size"),
    [
        ((3, 3), 128, 64),
        ((4, 4), 96, 32),
        ((2, 3), 64, 128),
        ((3, 4), 256, 64),
        ((2, 4), 192, 64),
        ((4, 2), 32, 64),
        ((4, 4), 160, 64),
    ],
)
def test_a_warp_attends_as_the_definition_says(lanes, bits, dim, size):
    """Two blocks, two of the buffer; weights have the definition's 8 bits, so only sums differ."""
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1], block_kv=size)
    cache = empty(config, 1, 4 * size, 1, dim)
    for write, count in ((store, 3 * size + 7), (append, 2)):
        cache = write(cache, *(tokens(count + i, 1, count, 1, dim) for i in (0, 1)))
    x = np.random.default_rng(3).normal(size=(1, 1, 4, dim)).astype(np.float32)
    want, _ = decode(x, cache)
    np.testing.assert_allclose(attend(lanes, x, cache), want[0, 0], rtol=0, atol=2e-5)
