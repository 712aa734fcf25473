"""Decode of many queries of a KV head on Hopper, on a CPU: what a warp computes, launches, lowering.

A warp's arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real
matrix unit are checked on a GPU, in `test_gpu_mosaic_decode.py`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_helpers import SOFTMAXES, filled, normal
from oracles import warp

import turbojax as tj
from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.decode import block as few_block
from pallas_kernels.mosaic.hopper.decode import kernel as few_kernel
from pallas_kernels.mosaic.hopper.decode import query as few_query
from pallas_kernels.mosaic.hopper.decode import types as few_types
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Shape, SparseExponential
from pallas_kernels.mosaic.hopper.decode_rows import block, kernel, operands, query, team
from turbojax.quantizers.progressive import dequantize_channels


@pytest.fixture
def here(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    few = (few_block, few_kernel, few_query, few_types)
    for module in (frame, *few, block, kernel, operands, query, team):
        monkeypatch.setattr(module, "lane", warp)
    number = warp.Int(warp.LANES)
    g = number >> 2
    return Place(g, number & 3, g & 3, ((g & 3) * 0x1111) ^ 0x3210)


def memory(x):
    """An array, as a pointer."""
    return warp.Pointer(np.array(x).reshape(-1).view(np.uint8).copy())


def side_of(side):
    codes = [np.asarray(x)[0, 0] for x in side.codes]
    return types.SimpleNamespace(
        codes=codes[0],
        channels=[np.asarray(x)[0, 0] for x in (side.channel_scale, side.channel_zero)],
        block_scale=np.asarray(side.block_scale)[0, 0],
        buffer=memory(np.asarray(side.buffer)[0, 0]),
        buffer_scale=memory(np.asarray(side.buffer_scale)[0, :1]),
    )


def slot_of(shape, key, value, number):
    """A block in shared memory."""
    parts = [key.codes[number], value.codes[number]]
    parts += [x[number] for side in (key, value) for x in side.channels]
    slot = np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in parts])
    assert len(slot) == shape.bytes
    return warp.Pointer(slot)


def run(here, cache, q, query_length, *, rows, scale=0.1, window=None, soft_cap=None):
    """Outputs ``[rows, H]``, maxima in powers of two and sums ``[rows]`` of one warp."""
    config, head_dim = cache.config, cache.head_dim
    [key_bits], [value_bits] = cache.key.bits, cache.value.bits
    shape = Shape(head_dim, config.block_kv, key_bits, value_bits, rows)
    sas = config.softmax
    exponential = (
        None if sas == "exact" else SparseExponential(sas.coefficients, sas.threshold, sas.unit)
    )
    tokens, heads = q.shape[1:3]
    n = Numerics(exponential, window, soft_cap, tokens > 1 or window is not None)
    key, value = side_of(cache.key), side_of(cache.value)
    length, buffered = int(cache.lengths[0]), int(cache.buffer_lengths[0])
    a = types.SimpleNamespace(
        query=memory(q), tokens=tokens, heads=heads, group=heads, rows=heads * tokens,
        head_dim=head_dim, dtype=q.dtype.name, key=key, value=value,
        buffer_size=config.buffer_size,
    )  # fmt: skip
    zero = warp.integer(0)
    at = types.SimpleNamespace(
        tile=zero, head=zero, batch=zero, pair=zero, begin=warp.integer(length - query_length),
        query_length=warp.integer(query_length), compressed=warp.integer(length - buffered),
        buffered=warp.integer(buffered),
    )  # fmt: skip
    widths = few_types.Width((key_bits,), None), few_types.Width((value_bits,), None)
    area = warp.Pointer(np.zeros(block.query_bytes(rows, head_dim), np.uint8))
    queries = block.Queries.of(area, rows, head_dim)
    for number in range(4):
        query.store_queries(
            a, at, shape, here, queries, widths[0], warp.integer(number), scale, n.unit
        )
    scratch = warp.Pointer(np.zeros(operands.scratch_bytes(head_dim), np.uint8))
    one = team.Team(1, zero, zero, None, rows)
    tokens_of = block.Tokens.of(head_dim, config.block_kv, widths[1], one)
    products = kernel.Products(shape, *widths, here, n, tokens_of, queries, scratch, one)
    tiles = rows // 16
    state = block.State.empty(tiles, head_dim)
    for i in range((length - buffered) // config.block_kv):
        scales = [warp.number(x.block_scale[i]) for x in (key, value)]
        slot, first = slot_of(shape, key, value, i), warp.integer(i * config.block_kv)
        state = products.attend_block(state, slot, scales, first, at, lambda: None)
        state = block.State.of(state.flat(), tiles)
    if buffered:
        state = products.attend_buffer(a, state, at)
    result = warp.Pointer(np.full(rows * (head_dim + 2) * 4, 0x7F, np.uint8))
    kernel._keep(shape, state, result, queries, here, one, n)
    found = result.memory.view(np.float32)
    outputs, maxima, totals = np.split(found, [rows * head_dim, rows * (head_dim + 1)])
    return outputs.reshape(rows, head_dim), maxima, totals


def compare(here, cache, q, *, query_length=None, rows, relative=2e-5, **options):
    """Against the definition."""
    tokens, heads = q.shape[1:3]
    real = tokens if query_length is None else query_length
    outputs, maxima, totals = run(here, cache, np.asarray(q), real, rows=rows, **options)
    names = {"window": "local_window_size", "soft_cap": "logits_soft_cap"}
    given = {names.get(name, name): x for name, x in options.items()}
    want, residual = tj.decode(
        q, cache, implementation="xla", return_residual=True,
        query_seq_lengths=jnp.array([real]), **{"scale": 0.1, **given},
    )  # fmt: skip
    # Row ``head * T + token``.
    want = np.asarray(want.astype(jnp.float32))[0].swapaxes(0, 1).reshape(heads * tokens, -1)
    residual = np.asarray(residual)[0].T.reshape(-1)
    count = heads * tokens
    empty = totals == 0
    np.testing.assert_array_equal(empty[:count], np.isneginf(residual))
    assert empty[count:].all()
    assert not outputs[empty].any()
    got = (outputs / np.where(empty, 1, totals)[:, None])[:count]
    lse = np.where(empty, -np.inf, (maxima + np.log2(np.where(empty, 1, totals))) * np.log(2))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(want)
    difference = np.linalg.norm((got - want)[finite])
    assert difference <= relative * max(np.linalg.norm(want[finite]), 1e-30)
    np.testing.assert_allclose(lse[:count], residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [(4, 4), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize(
    ("rows", "shape"), [(16, (3, 4, 128)), (32, (8, 4, 128)), (16, (1, 12, 64)), (16, (2, 6, 256))]
)
def test_a_warp_attends_as_the_definition_says(here, bits, rows, shape):
    tokens, group, head_dim = shape
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1])
    cache = filled(1, head_dim, config, (190,), dtype=jnp.float32)
    q = normal(9, (1, tokens, group, head_dim), jnp.float32)
    compare(here, cache, q, rows=rows)


def test_one():
    pass
