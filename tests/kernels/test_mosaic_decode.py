"""The decode kernel for Hopper, on a CPU: refusals, launches, lowering; warps, and the merge.

A warp's arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real
matrix unit are checked on a GPU, in `test_gpu_mosaic_decode.py`.
"""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.decode import block, kernel, merge
from pallas_kernels.mosaic.hopper.decode import types as kernel_types
from tests.attention.decode_helpers import append, decode, empty, store, tokens
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes as emulated
from tests.oracles import warp
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_mosaic
from turbojax.quantizers import pack


def abstract_cache(config=tj.TurboConfig(), *, batch=2, length=1024, kv_heads=2, head_dim=128):
    return jax.eval_shape(lambda: tj.init_cache(batch, length, kv_heads, head_dim, config=config))


CAUSAL = Options(True, scale=0.1)


def abstract_query(cache, *, tokens=1, group=4, dtype=jnp.bfloat16):
    shape = (cache.batch_size, tokens, cache.num_kv_heads * group, cache.head_dim)
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(query, cache, *, options=CAUSAL, launch=None):
    run = functools.partial(decode_mosaic.decode, options=options, launch=launch)
    lengths = jax.ShapeDtypeStruct((cache.batch_size,), jnp.int32)
    return lower_for_cuda(run, query, cache, lengths)


LOWERED = pairwise(
    queries=[(4, 1), (16, 8), (5, 1), (1, 1), (16, 1), (4, 8)],
    bits=[(4, 2), (2, 2), (4, 4), (2, 4), (3, 3), (3, 4)],
    head_dim=[128, 64, 256, 192],
    softmax=[tj.SAS(), "exact", tj.SAS(base="2")],
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
)[::2]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(("queries", "bits", "head_dim", "softmax", "dtype"), LOWERED)
def test_it_lowers(queries, bits, head_dim, softmax, dtype):
    """Every width, softmax, head dim, dtype and number of queries."""
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1], softmax=softmax)
    cache = abstract_cache(config, head_dim=head_dim)
    query = abstract_query(cache, group=queries[0], tokens=queries[1], dtype=dtype)
    assert "mosaic_gpu" in lower(query, cache)


@pytest.mark.parametrize("config", [tj.TurboConfig(), "kv4"], ids=["4 bits", "kv4"])
def test_a_call_is_its_kernels_alone(hopper, config):
    """No array is made that depends on no data: each took a kernel, a tenth of a short call."""
    if config == "kv4":
        cache = jax.eval_shape(lambda: tj.fireq.init_cache(2, 1024, 2, 128))
    else:
        cache = abstract_cache(config)
    text = lower_for_cuda(tj.decode, abstract_query(cache), cache)
    assert "mosaic_gpu" in text
    assert not re.search(r"stablehlo\.(iota|broadcast_in_dim|add|select)\b", text)


@pytest.mark.slow
def test_it_lowers_with_window_cap_mixed_widths_and_long_blocks():
    config = tj.TurboConfig(
        num_low_bit_key_heads=1, num_low_bit_value_heads=1, block_kv=128, buffer_size=128,
        low_bits=3,
    )  # fmt: skip
    cache = abstract_cache(config, head_dim=256)
    text = lower(
        abstract_query(cache, tokens=3),
        cache,
        options=Options(True, (300, 0), scale=0.1, logits_soft_cap=30.0),
    )
    assert "mosaic_gpu" in text


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(("splits", "cluster"), [(3, 1), (8, 8), (1, 1), (3, 3), (8, 4)])
def test_only_clusters_apart_need_a_second_kernel(splits, cluster):
    cache = abstract_cache()
    launch = decode_mosaic.Launch(splits, warpgroups=2, stages=3, cluster=cluster)
    text = lower(abstract_query(cache), cache, launch=launch)
    assert ("turbojax_decode_merge_hopper" in text) == (splits > cluster)


@pytest.mark.parametrize(
    ("tokens", "launch", "words"),
    [
        (1, (5, 1, 2, 2), "splits=5 must be a positive multiple"),
        (1, (16, 1, 2, 16), "cluster=16 must be from 1 to 8"),
        (8, (1, 1, 2, 1, 32, 3), "self.team=3 must be 1 or 2"),
        (8, (1, 1, 1, 1, 32, 2), "self.stages=1 must be at least self.team=2"),
    ],
)
def test_a_launch_that_would_lose_blocks_or_has_no_code_is_refused(tokens, launch, words):
    cache = abstract_cache()
    query = abstract_query(cache, tokens=tokens)
    with pytest.raises(ValueError, match=words):
        lower(query, cache, launch=decode_mosaic.Launch(*launch))


def refusal(query, cache, window=None):
    options = Options(True, window, scale=1.0)
    return decode_mosaic.unsupported(query=query, cache=cache, options=options)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_usual_head_dims_are_taken(hopper, name):
    heads = MODELS[name]
    cache = abstract_cache(kv_heads=heads.kv, head_dim=heads.dim)
    found = refusal(abstract_query(cache, group=heads.query // heads.kv), cache)
    assert (found is None) == (heads.dim % 32 == 0)


@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
def test_every_8_bit_mode_is_taken(hopper, mode):
    cache = abstract_cache(tj.TurboConfig(mode=mode))
    assert refusal(abstract_query(cache), cache) is None


# Configuration, head dim and tokens.
REFUSED = {
    "config.mode='float' must be an 8-bit mode: its products are of int8": (
        {"mode": "float"}, 128, 1,
    ),
    "head_dim=80 must be a multiple of 32 up to 256 with key bits (4,)": ({}, 80, 1),
    "head_dim=96 must be a multiple of 64 up to 256 with key bits (3,)": ({"key_bits": 3}, 96, 1),
    "block_kv=16 must be one of (32, 64, 128) with codes of 4 bits": ({"block_kv": 16}, 128, 1),
    "block_kv=32 must be one of (64, 128) with codes of 2 bits": (
        {"block_kv": 32, "value_bits": 2}, 128, 1,
    ),
    "64 query tokens must be at most 63 with config.num_first_tokens=1; "
    "TurboConfig(first_tokens=0) takes any": ({}, 128, 64),
    "132 queries of a KV head must be at most 128": ({}, 128, 33),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_value_and_requirement(hopper, words):
    config, head_dim, tokens = REFUSED[words]
    cache = abstract_cache(tj.TurboConfig(**config), head_dim=head_dim)
    assert refusal(abstract_query(cache, tokens=tokens), cache) == words


def test_windows_are_taken_of_caches_without_first_tokens(hopper):
    for config, is_taken in ((tj.TurboConfig(), False), (tj.TurboConfig(first_tokens=0), True)):
        cache = abstract_cache(config)
        found = refusal(abstract_query(cache), cache, window=(9, 0))
        assert found is None if is_taken else "window=(9, 0) must be None" in found


@pytest.mark.parametrize("capability", [7.5, 8.6, 10.3, 12.0])
def test_only_what_it_is_compiled_for_is_taken(monkeypatch, capability):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    cache = abstract_cache()
    words = refusal(abstract_query(cache), cache)
    assert "needs an NVIDIA GPU of compute capability 8.0, 8.9, 9.0 or 10.0" in words
    assert f"has {capability}" in words


@pytest.mark.parametrize(
    ("batch", "length", "splits"),
    [(1, 1024, 4), (1, 4096, 16), (16, 1024, 1), (16, 32768, 4), (64, 4096, 1), (1, 131072, 32)],
)
def test_short_caches_fill_the_gpu_and_long_ones_are_cut_evenly(batch, length, splits):
    cache = abstract_cache(batch=batch, length=length, kv_heads=8)
    launch = decode_mosaic.default_launch(abstract_query(cache), cache)
    assert launch.splits == splits
    assert launch.cluster == (4 if (batch, length) == (1, 1024) else 1)


FITTING = [
    (dim, block, bits)
    for dim in (32, 64, 96, 128, 160, 192, 256)
    for block in (32, 64, 128)
    for bits in (2, 3, 4)
    if bits == 4 or (block > 32 and dim % 64 == 0)
]


@pytest.mark.parametrize(("head_dim", "block", "bits"), FITTING)
@pytest.mark.parametrize("batch", [1, 64])
def test_blocks_in_flight_and_results_fit_shared_memory(head_dim, block, bits, batch):
    from pallas_kernels.mosaic.hopper.decode.kernel import stage_bytes

    config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
    cache = abstract_cache(config, batch=batch, length=32768, head_dim=head_dim)
    launch = decode_mosaic.default_launch(abstract_query(cache, group=8), cache)
    stage = stage_bytes(head_dim, block, (bits,), (bits,))
    assert 4 * launch.warpgroups * launch.stages * stage <= 227 * 1024
    # A warp leaves 8 queries' results where its blocks were.
    assert 8 * (head_dim + 2) * 4 <= launch.stages * stage


@pytest.mark.parametrize(
    ("shape", "tokens", "launch"),
    [
        ((16, 32768), 2, (4, 1, 2, 1, None, 1)),
        ((16, 32768), 3, (2, 1, 2, 1, 16, 1)),
        ((16, 32768), 8, (1, 3, 3, 1, 32, 2)),
        ((64, 4096), 8, (1, 1, 3, 1, 32, 2)),
        ((1, 8192), 8, (16, 3, 3, 1, 32, 2)),
        ((1, 1024), 4, (4, 1, 2, 4, 16, 1)),
    ],
)
def test_many_queries_have_programs_that_run_at_once(shape, tokens, launch):
    cache = abstract_cache(batch=shape[0], length=shape[1], kv_heads=8)
    got = decode_mosaic.default_launch(abstract_query(cache, tokens=tokens), cache)
    assert got == decode_mosaic.Launch(*launch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [4, 8, 32])
def test_many_queries_fit_shared_memory(head_dim, block, bits, tokens):
    from pallas_kernels.mosaic.hopper.decode_rows.kernel import RowSettings

    config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
    cache = abstract_cache(config, batch=16, length=32768, head_dim=head_dim)
    launch = decode_mosaic.default_launch(abstract_query(cache, tokens=tokens), cache)
    s = RowSettings(**decode_mosaic._settings(cache, launch))
    assert s.warps * s.warp_bytes(head_dim) <= 227 * 1024
    # A team leaves its results where its blocks were.
    assert launch.rows * (head_dim + 10) * 4 <= s.slot_bytes(head_dim)


def test_an_unsplit_short_cache_has_blocks_for_one_stage_only():
    cache = abstract_cache(length=64)
    launch = decode_mosaic.default_launch(abstract_query(cache), cache)
    assert launch == decode_mosaic.Launch(splits=1, warpgroups=1, stages=1, cluster=1)


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


BATCH, KV_HEADS = 2, 3


def merged(o, m, l, tokens):
    """In float64 ``[B, T, N, H]`` and ``[B, T, N]``."""
    o, m, l = (np.asarray(x, np.float64) for x in (o, m, l))
    with np.errstate(all="ignore"):
        top = m.max(1, keepdims=True)
        weights = np.exp2(m - np.where(np.isfinite(top), top, 0))
        total = (weights * l).sum(1)
        out = (weights[..., None] * o).sum(1) / np.where(total == 0, 1, total)[..., None]
        residual = top[:, 0] * np.log(2) + np.log(total)

    def in_order(x):
        x = x.reshape(BATCH, KV_HEADS, -1, tokens, *x.shape[2:])
        return np.moveaxis(x, 3, 1).reshape(BATCH, tokens, -1, *x.shape[4:])

    return in_order(out), in_order(residual)


@pytest.mark.quick(first=3)
@pytest.mark.parametrize(
    ("parts", "head_dim", "dtype"),
    [(5, 128, "bfloat16"), (37, 64, "float16"), (8, 256, "float32"), (2, 64, "bfloat16")],
)
def test_merge(monkeypatch, parts, head_dim, dtype):
    emulated.patch(monkeypatch, merge)
    tokens, group = 2, 3
    rng = np.random.default_rng(parts)
    shape = BATCH * KV_HEADS, parts, group * tokens
    m = rng.normal(size=shape).astype(np.float32) * 10
    l = rng.uniform(0.5, 9, size=shape).astype(np.float32)
    o = rng.normal(size=(*shape, head_dim)).astype(np.float32)
    # A split without tokens, a query that sees none, one whose value is no number.
    for missing in ((slice(None), 1), (1, slice(None), 4)):
        m[missing], l[missing], o[missing] = -np.inf, 0, 0
    o[2, 0, 3, 7] = np.nan
    query = jax.ShapeDtypeStruct((BATCH, tokens, KV_HEADS * group, head_dim), dtype)
    out, residual = merge.merge(*map(jnp.asarray, (o, m, l)), query, KV_HEADS)
    want, want_residual = merged(o, m, l, tokens)
    assert out.dtype == dtype
    assert np.isnan(want).sum() == 1
    tolerance = float(jnp.finfo(dtype).eps) + 2.0**-20
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(residual, want_residual, rtol=2.0**-20, atol=2.0**-20)
    assert (want == 0).all(-1).sum() == 1
    assert np.isneginf(want_residual).sum() == 1
