"""Decode of many queries of a KV head on Hopper, on a CPU: what a warp computes.

A warp's arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real
matrix unit are checked on a GPU, in `test_gpu_mosaic_decode.py`.
"""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.decode import block as few_block
from pallas_kernels.mosaic.hopper.decode import frame as few_frame
from pallas_kernels.mosaic.hopper.decode import kernel as few_kernel
from pallas_kernels.mosaic.hopper.decode import types as few_types
from pallas_kernels.mosaic.hopper.decode.types import Numerics, Place, Shape, SparseExponential
from pallas_kernels.mosaic.hopper.decode_rows import block, kernel, operands
from tests.gpu.gpu_helpers import SOFTMAXES, filled, normal
from tests.oracles import programs as emulated
from tests.oracles import warp
from tests.oracles.programs import RoundRobin
from turbojax.caches import cache_by_name


@pytest.fixture
def here(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    few = (few_block, few_kernel, few_types)
    for module in (frame, *few, block, kernel, operands):
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
    slot = np.full(shape.bytes, 0x7F, np.uint8)
    parts = [key.codes[number], value.codes[number]]
    parts += [x[number] for side in (key, value) for x in side.channels]
    for (name, size), x in zip(shape.parts, parts, strict=True):
        found = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        assert len(found) <= size
        slot[shape.offset(name) :][: len(found)] = found
    return warp.Pointer(slot)


def numerics(config, tokens, window, soft_cap):
    sas = config.softmax
    exponential = (
        None if sas == "exact" else SparseExponential(sas.coefficients, sas.threshold, sas.unit)
    )
    return Numerics(exponential, window, soft_cap, tokens > 1 or window is not None)


def run(
    here, cache, q, query_length, *,
    rows, size=1, widest=None, scale=0.1, window=None, soft_cap=None,
):  # fmt: skip
    """Outputs ``[rows, H]``, maxima in powers of two and sums ``[rows]`` of one team of warps.

    With `widest` the cache's codes are those of low heads where others have so many bits.
    """
    config, head_dim = cache.config, cache.head_dim
    bits = [x for side in (cache.key, cache.value) for x in side.bits]
    widths = [few_types.Width((x,), None) for x in bits]
    if widest:
        widths = [few_types.Width((widest, x), warp.Bool(np.ones(32, bool))) for x in bits]
    shape = Shape(head_dim, config.block_kv, *([widest] * 2 if widest else bits), rows)
    tokens, heads = q.shape[1:3]
    n = numerics(config, tokens, window, soft_cap)
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
    area = warp.Pointer(np.zeros(block.query_bytes(rows, head_dim), np.uint8))
    queries = block.Queries.of(area, rows, head_dim)
    for number in range(4):
        kernel.store_queries(
            a, at, shape, here, queries, widths[0], warp.integer(number), scale, n.unit
        )
    exchange = warp.Pointer(np.zeros(block.exchange_bytes(size, rows, config.block_kv), np.uint8))
    step = head_dim + 8
    result = warp.Pointer(np.full(rows * (step + 2) * 4, 0x7F, np.uint8))
    slots = [slot_of(shape, key, value, i) for i in range((length - buffered) // config.block_kv)]

    def of_member(number):
        own = block.Team(size, zero, warp.integer(number), exchange, rows)
        scratch = warp.Pointer(np.zeros(operands.scratch_bytes(head_dim), np.uint8))
        tokens_of = block.Tokens.of(head_dim, config.block_kv, widths[1], own)
        attended = kernel.Products(shape, *widths, here, n, tokens_of, queries, scratch, own)
        state = block.State.empty(rows // 16, head_dim // size)
        for i, slot in enumerate(slots):
            scales = [warp.number(x.block_scale[i]) for x in (key, value)]
            first = warp.integer(i * config.block_kv)
            is_masked = window is not None or (i + 1) * config.block_kv > length - query_length + 1
            state = attended.attend_block(state, slot, scales, first, is_masked, lambda: None)
            state = block.State.of(state.flat(), rows // 16)
        for i in range(-(-buffered // config.block_kv)):
            state = attended.attend_buffer(a, state, at, warp.integer(i))
        kernel._keep(shape, state, result, queries, here, own, n)

    scheduler = RoundRobin([functools.partial(of_member, number) for number in range(size)])
    warp.named_barrier = lambda _, threads: scheduler.barrier(0, threads // 32)
    scheduler.run()
    found = result.memory.view(np.float32)
    outputs, maxima, totals = np.split(found, [rows * step, rows * (step + 1)])
    outputs = outputs.reshape(rows, step)[:, :head_dim]
    channels = np.concatenate(
        [
            operands.channel_of(k, warp.Int(warp.LANES % 8), head_dim).value[:8]
            for k in range(head_dim // 8)
        ]
    )
    ordered = np.empty_like(outputs)
    ordered[:, channels] = outputs
    return ordered, maxima, totals


def compare(here, cache, q, *, query_length=None, rows, relative=2e-5, **options):
    """Against the definition."""
    tokens, heads = q.shape[1:3]
    real = tokens if query_length is None else query_length
    outputs, maxima, totals = run(here, cache, np.asarray(q), real, rows=rows, **options)
    given = {name: options[name] for name in ("scale",) if name in options}
    names = {"window": "local_window_size", "soft_cap": "logits_soft_cap"}
    given |= {name: options[own] for own, name in names.items() if own in options}
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


SHAPES = {
    "three tokens": (16, (3, 4, 128)),
    "eight tokens": (32, (8, 4, 128)),
    "one token": (16, (1, 12, 64)),
    "64 channels": (32, (5, 4, 64)),
    "256 channels": (16, (2, 6, 256)),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bits", [(4, 4), (2, 4), (4, 2), (2, 2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_team_attends_as_the_definition_says(here, shape, bits, size):
    rows, (tokens, group, head_dim) = SHAPES[shape]
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1])
    cache = filled(1, head_dim, config, (190,), dtype=jnp.float32)
    # Queries no weight of which lies between two codes, where either would be right.
    seed = 10 if bits[0] == 2 else 9
    q = normal(seed, (1, tokens, group, head_dim), jnp.float32)
    compare(here, cache, q, rows=rows, size=size)


OPTIONS = {
    "window": {"window": (70, 0)},
    "window ahead": {"window": (20, 1)},
    "soft cap": {"soft_cap": 3.0},
    "negative scale": {"scale": -0.2},
    "no scale": {"scale": 0.0},
    "padding": {"query_length": 2},
    "no query": {"query_length": 0},
}


def config_for(options, **fields):
    """The kernel has no windows of caches that keep their first tokens."""
    return tj.TurboConfig(first_tokens=0 if options.get("window") else None, **fields)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(here, case, size):
    cache = filled(1, 64, config_for(OPTIONS[case]), (190,), dtype=jnp.float32)
    q = normal(9, (1, 5, 3, 64), jnp.float32)
    compare(here, cache, q, rows=16, size=size, **OPTIONS[case])


@pytest.mark.fuzz
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("softmax", "dtype"), [("sas", jnp.bfloat16), ("sas-2", jnp.float16)])
def test_other_softmaxes_blocks_and_dtypes(here, softmax, dtype, size):
    config = tj.TurboConfig(softmax=SOFTMAXES[softmax], block_kv=128, buffer_size=128)
    cache = filled(1, 64, config, (390,), dtype=dtype)
    q = normal(9, (1, 4, 3, 64), dtype)
    compare(here, cache, q, rows=16, size=size, relative=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("size", [1, 2])
def test_heads_of_the_lower_of_two_widths(here, size):
    cache = filled(1, 64, tj.TurboConfig(key_bits=2, value_bits=2), (190,), dtype=jnp.float32)
    q = normal(9, (1, 3, 4, 64), jnp.float32)
    compare(here, cache, q, rows=16, size=size, widest=4)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("window", [None, (70, 0)])
def test_nan_reaches_what_it_reaches_in_the_definition(here, softmax, window):
    config = config_for({"window": window}, softmax=SOFTMAXES[softmax])
    cache = filled(1, 64, config, (190,), dtype=jnp.float32)
    key, value = cache.key, cache.value
    cache = dataclasses.replace(
        cache,
        key=dataclasses.replace(key, block_scale=key.block_scale.at[0, 0, 0].set(jnp.nan)),
        value=dataclasses.replace(value, buffer_scale=value.buffer_scale.at[0, 0].set(jnp.nan)),
    )
    q = normal(9, (1, 4, 3, 64), jnp.float32).at[0, 1, 2, 5].set(jnp.nan)
    options = {} if window is None else {"window": window}
    compare(here, cache, q, rows=16, **options)
    clean = dataclasses.replace(cache, value=value)
    compare(here, clean, q, rows=16, size=2, **options)


@pytest.mark.parametrize("bits", [2, 4])
def test_every_code_scale_and_zero_is_exact(here, bits):
    """All that quantizers may store, through float16."""
    top, limit = 2**bits - 1, 127 if bits == 2 else 31
    scale, zero, code = np.meshgrid(
        np.arange(1, limit + 1), np.arange(-128, 128), np.arange(top + 1), indexing="ij"
    )
    scale, zero, code = (
        x[np.abs((code + zero) * scale) <= 127].reshape(-1) for x in (scale, zero, code)
    )
    for first in range(0, len(code), 128):
        at = [np.resize(x[first : first + 128], (32, 4)) for x in (scale, zero, code)]
        s, z = (warp.Int(x.astype(np.int8).view(np.uint32)[:, 0]) for x in at[:2])
        for run in range(8 // bits):
            word = warp.Int((at[2].astype(np.uint8) << (bits * run)).view(np.uint32)[:, 0])
            boost = operands._boost(bits, run)
            boosts = tuple(warp.half.constant(x) for x in (boost, 1 / boost))
            channels = operands._channels(s, z, boosts, False)
            pairs = operands.dequantized(
                operands.code_pairs(word, bits, run), channels[:2], channels[2:]
            )
            want = (at[2] + at[1]) * at[0]
            np.testing.assert_array_equal(numbers(pairs) / operands.UNIT, want)


def numbers(pairs):
    """What two words of float16 stand for, in the order of the bytes that they were made of."""
    found = np.stack([x.value[:, None].view(np.float16) for x in pairs], 2)
    return found.reshape(32, 4).astype(np.float64)


@pytest.mark.parametrize("run", [0, 1])
def test_queries_times_scales_of_four_bits_are_exact(here, run):
    """Every code of a query times every scale that there is, and zeros and codes as they are."""
    boosts = tuple(warp.half.constant(x) for x in (16.0**-run, 16.0**run))
    codes = np.resize(np.arange(16, dtype=np.uint8), (32, 4))
    word = warp.Int((codes << (4 * run)).view(np.uint32)[:, 0])
    zeros = np.resize(np.arange(-127, 128, dtype=np.int8), (32, 4))
    query = np.resize(np.arange(-119, 120), (32, 4))
    pairs = [
        warp.half.pack(*(warp.Float(query[:, i].astype(np.float32)) for i in (first, first + 2)))
        for first in (0, 1)
    ]
    for scale in range(1, 17):
        s, z = (warp.Int(x.view(np.uint32)[:, 0]) for x in (np.full_like(zeros, scale), zeros))
        channels = operands._channels(s, z, boosts, True)
        scaled = [warp.half.multiply(x, own) for x, own in zip(pairs, channels, strict=False)]
        stored = operands.code_pairs(word, 4, run)
        for found, want in ((stored, codes), (channels[2:], zeros)):
            got = numbers(scaled) * numbers(found) / operands.UNIT
            np.testing.assert_array_equal(got, query * scale * want.astype(np.float64))


def test_bytes_of_values_do_not_reach_into_each_other(here):
    """All that a channel may hold: every scale and zero with the codes that stay within int8."""
    for bits in (2, 4):
        shape = Shape(64, 64, bits, bits, 16)
        for scale in range(1, 80):
            for zero in range(-127, 128):
                codes = np.arange(2**bits)
                codes = codes[np.abs((codes + zero) * scale) <= 127].astype(np.uint8)
                if not len(codes):
                    continue
                word = warp.Int(np.resize(codes, (32, 4)).view(np.uint32)[:, 0])
                offset = warp.integer((scale * zero + 128) % 2**32) * 0x01010101
                found = operands.value_words(shape, [word], (warp.integer(scale), offset))[0]
                got = found.value[:, None].view(np.uint8).astype(np.int64) - operands.VALUE_OFFSET
                want = (np.resize(codes, (32, 4)).astype(np.int64) + zero) * scale
                np.testing.assert_array_equal(got, want)


# Whole programs -----------------------------------------------------------------------------------


@pytest.fixture
def programs(here, monkeypatch):
    """Runs a program of warps."""
    for module in (few_frame,):
        monkeypatch.setattr(module, "lane", warp)
    choose = types.SimpleNamespace(choose=lambda c, a, b: a if c.value.all() else b)
    monkeypatch.setattr(few_frame, "Pointer", choose)

    def run(a, ids, s):
        area = s.warps * s.warp_bytes(a.head_dim)

        def body(_, shared):
            smem = shared, shared.at(warp.integer(area))
            kernel._program(a, [warp.integer(x) for x in ids], smem, s)

        sizes = {"warps": s.warps, "shared": area + 8 * s.warps * s.stages}
        emulated.run(monkeypatch, body, programs=1, **sizes)

    return run


def arrays(cache, q, query_length, parts):
    """The call's arrays of one sequence."""

    def side(x):
        return few_frame.SidePointers(
            codes=tuple(memory(c) for c in x.codes),
            heads=tuple(c.shape[1] for c in x.codes),
            **{
                name: memory(getattr(x, name))
                for name in (
                    "channel_scale", "channel_zero", "block_scale", "head_slots", "buffer",
                    "buffer_scale",
                )
            },
        )  # fmt: skip

    _, tokens, heads, head_dim = q.shape
    kv_heads = cache.num_kv_heads
    rows = heads // kv_heads * tokens
    sizes = (kv_heads * parts * rows * head_dim, kv_heads * parts * rows, kv_heads * parts * rows)
    return few_frame.Arrays(
        query=memory(q), key=side(cache.key), value=side(cache.value),
        lengths=memory(cache.lengths), buffered=memory(cache.buffer_lengths),
        query_lengths=memory(np.int32([query_length])),
        outputs=[memory(np.full(size, np.nan, np.float32)) for size in sizes],
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype.name,
        blocks=cache.key.block_scale.shape[2], buffer_size=cache.config.buffer_size,
    )  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("window", [None, (100, 0)])
@pytest.mark.parametrize(("team", "stages"), [(1, 1), (2, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize(("length", "appended"), [(9 * 64, 3), (700, 3)])
def test_programs_share_blocks_and_the_buffer(programs, length, appended, team, stages, window):
    """Blocks seen whole, blocks that need masks, the buffer, and parts of a head."""
    config = config_for({"window": window}, num_low_bit_key_heads=1, num_low_bit_value_heads=1)
    cache = filled(2, 64, config, (length,), appended=appended, dtype=jnp.float32)
    check_programs(programs, cache, team, stages, window)


@pytest.mark.fuzz
@pytest.mark.parametrize("heads", [1, 3, 5, 7])
def test_programs_of_odd_numbers_of_heads(programs, heads):
    """``"2/4bit"``: each head's keys and values in the codes that hold them."""
    cache = filled(heads, 64, cache_by_name("2/4bit", heads), (3 * 64,), 1, jnp.float32)
    check_programs(programs, cache, 1, 1, None)


def check_programs(programs, cache, team, stages, window):
    """All programs of 24 queries a KV head, in two parts, against plain JAX."""
    pairs, splits, rows = cache.num_kv_heads, 2, 24
    q = normal(9, (1, 8, 3 * pairs, 64), jnp.float32)
    s = kernel.RowSettings(
        exponential=None, key_bits=cache.key.bits, value_bits=cache.value.bits, block=64,
        scale=0.1, window=window, soft_cap=None, rows=16, splits=splits, cluster=1,
        warpgroups=1, stages=stages, team=team,
    )  # fmt: skip
    a = arrays(cache, np.asarray(q), 7, splits)
    for ids in np.ndindex(2, splits, pairs):
        programs(a, [*ids, 0], s)
    o, m, l = (x.memory.view(np.float32).reshape(pairs, splits, rows, -1) for x in a.outputs)
    top = m.max(1, keepdims=True)
    weight = np.exp2(m - np.where(np.isfinite(top), top, 0))
    out, total = (o * weight).sum(1), (l * weight).sum(1)
    out = out / np.where(total == 0, 1, total)
    want = tj.decode(
        q, cache, implementation="xla", scale=0.1, local_window_size=window,
        query_seq_lengths=jnp.array([7]),
    )  # fmt: skip
    want = np.asarray(want)[0].swapaxes(0, 1).reshape(pairs, rows, 64)
    error = np.linalg.norm(out - want, axis=-1) / np.maximum(np.linalg.norm(want, axis=-1), 1e-30)
    # A weight half way between two codes may become either: 1 / 119 of it, here once.
    assert np.sort(error, axis=None)[-2] <= 2e-6
    assert error.max() <= 2e-3
