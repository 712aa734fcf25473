"""Paged attention for Hopper, on a CPU: refusals, lowering, and what a warp computes.

A warp's arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real
matrix unit are checked on a GPU, in `test_gpu_paged.py`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.shapes import MODELS
from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper.paged import (
    codes,
    floats,
    inputs,
    int8,
    integers,
    kernel,
    merge,
    rotation,
    turbo4,
    turbo4_rows,
    unpack,
)
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from turbojax import polar
from turbojax.attention.options import Options
from turbojax.caches.paged import checks, mosaic_gpu
from turbojax.caches.paged.pool import init_paged_cache

# Bits of keys and of values, each stored in its own way; 8 of e4m3, or "int8".
INT8 = "int8"
MIXED = {
    "k8v4": (8, 4),
    "int8": (INT8, INT8),
    "int8_v4": (INT8, 4),
    "turbo_k3v2": (3, 2),
    "turbo_k2v3": (2, 3),
    "turbo_k4v2": (4, 2),
}
# Turbo4 as well, as other head dims have it.
STORED_BITS = {**MIXED, "turbo_k4v4": (4, 4)}
# Of ``kv_dtype="auto"`` by dtype, which is the queries' too.
PLAIN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
STORED = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, **PLAIN}
KINDS = ("turbo4", *STORED, *MIXED)
SHARED_BYTES = 227 * 1024


# What is refused, and that the rest lowers --------------------------------------------------------


def specification(
    kind, *, batch=2, tokens=1, heads=8, kv_heads=2, head_dim=128, page_size=64, max_pages=40,
    dtype=jnp.bfloat16,
):  # fmt: skip
    """Arguments of `attend` that are shapes alone."""
    if kind in PLAIN:
        kind, dtype = "auto", PLAIN[kind]
    cache = jax.eval_shape(
        lambda: init_paged_cache(64, page_size, kv_heads, head_dim, kv_dtype=kind, dtype=dtype)
    )
    query = jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), dtype)
    tables = jax.ShapeDtypeStruct((batch, max_pages), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return query, cache, tables, lengths, lengths


def lower(kind, *, window=None, logits_soft_cap=None, launch=None, **shape):
    attend = functools.partial(
        mosaic_gpu.attend,
        options=Options(True, window, scale=0.1, logits_soft_cap=logits_soft_cap),
        launch=launch,
    )
    return lower_for_cuda(jax.jit(attend), *specification(kind, **shape))


def refusal(kind, **shape):
    query, cache, tables, _, _ = specification(kind, **shape)
    options = Options(True, scale=1.0)
    return mosaic_gpu.unsupported(query=query, cache=cache, block_tables=tables, options=options)


LOWERED = pairwise(
    queries=[(8, 1), (8, 5), (2, 1), (6, 1), (32, 4)],
    page_size=[64, 16, 32, 128],
    kind=KINDS,
    head_dim=[128, 64, 256],
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
    options=[{}, {"window": (300, 0), "logits_soft_cap": 30.0}],
)


@pytest.mark.quick(first=3, slow=0)
@pytest.mark.parametrize(
    ("queries", "page_size", "kind", "head_dim", "dtype", "options"),
    LOWERED,
)
def test_it_lowers(queries, page_size, kind, head_dim, dtype, options):
    """Every page, head dim, dtype and number of queries, each with each other."""
    heads, tokens = queries
    options = {**options, "page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    assert "mosaic_gpu" in lower(kind, heads=heads, tokens=tokens, **options)


@pytest.mark.parametrize(
    ("shape", "is_split"),
    [
        ({"batch": 1, "kv_heads": 8, "heads": 32, "max_pages": 128}, True),
        ({"batch": 1, "kv_heads": 8, "heads": 32, "max_pages": 2048}, False),
        ({"batch": 16, "kv_heads": 8, "heads": 32, "max_pages": 512}, False),
        ({"batch": 4, "kv_heads": 8, "heads": 32, "max_pages": 64}, False),
        ({"batch": 1, "kv_heads": 1, "heads": 16, "tokens": 2, "max_pages": 8}, False),
    ],
)
def test_programs_take_few_tokens_where_they_would_be_few(shape, is_split):
    query, cache, tables, *_ = specification("turbo4", **shape)
    call = mosaic_gpu.call_of(query, cache, tables, Options(True, scale=1.0))
    assert mosaic_gpu.default_launch(call).is_split == is_split


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "in_pairs"),
    [
        ("fp8_e4m3", 64, 4096, True),
        ("fp8_e5m2", 32, 4096, True),
        ("int8", 64, 4096, True),
        ("fp8_e4m3", 16, 32768, False),
        ("fp8_e4m3", 1, 4096, False),
        ("turbo4", 64, 4096, False),
    ],
)
def test_few_rounds_of_programs_of_8_bit_pages_are_taken_in_pairs(kind, batch, tokens, in_pairs):
    shape = {"batch": batch, "kv_heads": 8, "heads": 32, "max_pages": tokens // 64}
    query, cache, tables, *_ = specification(kind, **shape)
    call = mosaic_gpu.call_of(query, cache, tables, Options(True, scale=1.0))
    launch = mosaic_gpu.default_launch(call)
    s = mosaic_gpu.settings_of(query, cache, Options(True, scale=1.0), launch)
    programs = SHARED_BYTES // (s.warps * s.warp_bytes(128))
    assert programs == (2 if in_pairs else 3)


@pytest.mark.parametrize("is_split", [False, True])
def test_both_ways_lower(is_split):
    text = lower("turbo4", tokens=4, launch=mosaic_gpu.Launch(is_split))
    assert "turbojax_paged_hopper" in text
    assert "turbojax_paged_merge_hopper" in text


@pytest.mark.parametrize("name", MODELS)
def test_models_of_usual_head_dims_are_taken(hopper, name):
    heads = MODELS[name]
    found = refusal("turbo4", heads=heads.query, kv_heads=heads.kv, head_dim=heads.dim)
    is_usual = heads.dim % 8 == 0 and heads.dim <= 256 and heads.query // heads.kv <= 64
    assert (found is None) == is_usual


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        (
            "auto",
            {"dtype": jnp.float32},
            "with kv_dtype='auto' dtype=float32 must be one of ('bfloat16', 'float16')",
        ),
        ("fp8_e4m3", {"head_dim": 96}, "head_dim=96 must be one of (64, 128, 256)"),
        (
            "turbo_k3v2",
            {"head_dim": 80},
            "head_dim=80 must be one of (64, 128, 256), or a multiple of 32 below 256",
        ),
        ("turbo4", {"tokens": 17}, "68 queries of a KV head must be at most 64"),
    ],
)
def test_refusals_name_value_and_requirement(hopper, kind, shape, words):
    assert refusal(kind, **shape) == words


def test_it_is_refused_where_there_is_no_gpu():
    assert "needs an NVIDIA GPU of compute capability 8.0, 8.9, 9.0 or 10.0" in refusal("turbo4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 16])
def test_what_is_in_flight_fits_shared_memory(kind, head_dim, tokens):
    query, cache, *_ = specification(kind, head_dim=head_dim, tokens=tokens)
    launch = mosaic_gpu.Launch(is_split=False)
    s = mosaic_gpu.settings_of(query, cache, Options(True, scale=1.0), launch)
    assert s.warps * s.warp_bytes(head_dim) <= SHARED_BYTES
    assert s.part % (s.block * s.warps) == 0


# What a warp computes -----------------------------------------------------------------------------


@pytest.fixture
def lanes(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    modules = (
        codes,
        floats,
        inputs,
        int8,
        integers,
        kernel,
        rotation,
        turbo4,
        turbo4_rows,
        unpack,
    )
    for module in (frame, *modules):
        monkeypatch.setattr(module, "lane", warp)
    number = warp.Int(warp.LANES)
    g = number >> 2
    return inputs.Place(g, number & 3, number, inputs.parity(g))


def stored(bits):
    if bits == INT8:
        return inputs.Stored(8, is_int8=True)
    if bits == 8:
        return inputs.Stored(8)
    table, middle, _ = polar.integer_centroids(bits)
    return inputs.Stored(bits, tuple(table), middle)


def mixed_block(rng, kind, block, head_dim):
    """A block in shared memory, and its keys and values in float64."""
    sides = [random_side(rng, bits, block, head_dim) for bits in STORED_BITS[kind]]
    data, norms, values = zip(*sides, strict=True)
    return np.concatenate([*data, *norms]), list(values)


def random_side(rng, bits, block, head_dim):
    """Bytes of keys or values, those of their norms, and what they stand for."""
    if bits == 8:
        x = rng.normal(size=(block, head_dim)).astype(ml_dtypes.float8_e4m3fn)
        return x.view(np.uint8).ravel(), np.zeros(0, np.uint8), x.astype(np.float64)
    if bits == INT8:
        data = rng.integers(-127, 128, size=(block, head_dim), dtype=np.int8)
        scales = rng.uniform(0.005, 0.05, size=block).astype(np.float16)
        values = data * scales[:, None].astype(np.float64)
        return data.view(np.uint8).ravel(), scales.view(np.uint8), values
    data = rng.integers(2**bits, size=(block, head_dim), dtype=np.uint8)
    norms = rng.uniform(1, 20, size=block).astype(np.float16)
    table, middle, _ = polar.integer_centroids(bits)
    values = (np.asarray(table) - middle)[data] * norms[:, None].astype(np.float64)
    packed = np.asarray(polar.pack(jnp.asarray(data), bits))
    return packed.ravel(), norms.view(np.uint8), values


def norms_of(memory, s, head_dim, side):
    """The norms of a block's keys or values, to be changed in place."""
    sizes = [0 if x and x.is_float else 2 for x in s.stored or (None, None)]
    first = s.block * (s.token_bytes(head_dim) - sum(sizes[side:]))
    return memory[first : first + sizes[side] * s.block].view(np.float16)


def settings(kind, *, block=64, rows=4, window=None, soft_cap=None, scale=0.125):
    pair = tuple(stored(bits) for bits in STORED_BITS[kind]) if kind in STORED_BITS else None
    key_bits = pair[0].bits if pair else 4 if kind == "turbo4" else 8
    table, middle, step = polar.integer_centroids(min(key_bits, 4))
    return inputs.Settings(
        "mixed" if pair else kind, tuple(table), middle,
        scale * (step if key_bits < 8 else 1.0), 1.0, window, soft_cap, rows=rows, part=1024,
        is_split=False, few=256, block=block, warpgroups=1, stages=2, stored=pair,
    )  # fmt: skip


def normal(rng, kind, shape):
    """A query."""
    return rng.normal(size=shape).astype(PLAIN.get(kind, np.float32))


def random_block(rng, kind, block, head_dim):
    """A block in shared memory, and its keys and values in float64."""
    if kind in MIXED:
        return mixed_block(rng, kind, block, head_dim)
    if kind != "turbo4":
        dtype = STORED[kind]
        sides = [rng.normal(size=(block, head_dim)).astype(dtype) for _ in range(2)]
        return np.concatenate([x.view(np.uint8).ravel() for x in sides]), [
            x.astype(np.float64) for x in sides
        ]
    codes = rng.integers(16, size=(2, block, head_dim), dtype=np.uint8)
    norms = rng.uniform(1, 20, size=(2, block)).astype(np.float16)
    packed = np.asarray(polar.pack(jnp.asarray(codes)))
    table, middle, _ = polar.integer_centroids(4)
    values = (np.asarray(table) - middle)[codes] * norms[..., None].astype(np.float64)
    memory = np.concatenate([packed.ravel(), norms.view(np.uint8).ravel()])
    return memory, list(values)


def program(query, length, query_length, key_scale=None):
    """The arrays and the place of a program with one sequence and one KV head."""
    _, tokens, heads, head_dim = query.shape
    memory = warp.Pointer(query.reshape(-1).view(np.uint8))
    scale = None if key_scale is None else warp.Pointer(np.float32([key_scale]).view(np.uint8))
    a = types.SimpleNamespace(
        query=memory, tokens=tokens, heads=heads, group=heads, rows=heads * tokens,
        head_dim=head_dim, dtype=query.dtype.name,
        pages=types.SimpleNamespace(key_scale=scale, signs=None),
    )  # fmt: skip
    zero = warp.integer(0)
    at = types.SimpleNamespace(
        tile=zero, head=zero, batch=zero, begin=warp.integer(length - query_length),
        query_length=warp.integer(query_length), length=warp.integer(length),
    )  # fmt: skip
    return a, at


def run(lane, s, blocks, query, length, query_length, key_scale=None):
    """Outputs ``[rows, H]``, maxima and sums ``[rows]`` of a warp that takes all blocks."""
    a, at = program(query, length, query_length, key_scale)
    channel_of = kernel.channel_of(s)
    products = kernel.products_of(a.head_dim, s)
    loaded = kernel._load_query(a, at, lane, products, None, s)
    state = inputs.State.empty(s.entries, s.outputs(a.head_dim))
    for i, memory in enumerate(blocks):
        place = warp.Pointer(memory.copy()), warp.integer(i * s.block)
        is_whole = s.window is None and (i + 1) * s.block <= length - query_length + 1
        is_masked = not (s.has_rows and is_whole)
        state = state.joined(kernel._attend(place, at, loaded, lane, products, is_masked, s))
        state = inputs.State.of(state.flat(), s.entries)
    if s.has_rows:
        state = turbo4_rows.existing(state, loaded)
    out = np.full((s.rows, a.head_dim), np.nan)
    maxima, totals = np.zeros(s.rows), np.zeros(s.rows)
    for entry in range(s.entries):
        row, writes = s.row(entry, lane).value.astype(np.int64), s.writes(lane).value
        for i, x in enumerate(state.outputs[entry]):
            channel = channel_of(i, lane, a.head_dim).value.astype(np.int64)
            assert np.all(np.isnan(out[row, channel])), "a channel is written twice"
            out[row, channel] = x.value
        maxima[row[writes]] = state.maxima[entry].value[writes]
        totals[row[writes]] = state.totals[entry].value[writes]
    return out, maxima, totals


def oracle(query, sides, s, length, query_length, key_scale=1.0):
    """The same in float64, normalized: outputs and log-sum-exps by row ``head * T + token``."""
    key, value = sides
    _, tokens, heads, _ = query.shape
    outs, residuals = [], []
    for row in range(heads * tokens):
        head, token = divmod(row, tokens)
        x = query[0, token, head].astype(np.float64) @ key.T * (s.scale * key_scale)
        if s.soft_cap is not None:
            x = s.soft_cap * np.tanh(x / s.soft_cap)
        position = length - query_length + token
        where = np.arange(len(key))
        seen = (where <= position) & (token < query_length)
        if s.window is not None:
            seen &= (where >= position - s.window[0]) & (where <= position + s.window[1])
        if not seen.any():
            outs.append(np.zeros(key.shape[1]))
            residuals.append(-np.inf)
            continue
        x, v = x[seen], value[seen]
        p = np.exp(x - x.max())
        outs.append(p @ v / p.sum())
        residuals.append(x.max() + np.log(p.sum()))
    return np.array(outs), np.array(residuals)


def compare(lane, s, blocks, query, length, query_length, key_scale=None):
    memories, sides = zip(*blocks, strict=True)
    out, maxima, totals = run(lane, s, memories, query, length, query_length, key_scale)
    whole = [np.concatenate(side) for side in zip(*sides, strict=True)]
    want, residual = oracle(query, whole, s, length, query_length, key_scale or 1.0)
    real = len(want)
    seen = np.isfinite(residual)
    assert np.all(totals[:real][~seen] == 0)
    assert np.all(out[:real][~seen] == 0)
    out, totals = out[:real][seen], totals[:real][seen]
    error, weight_error = 1e-6, 1e-6
    if s.is_plain:
        # Weights are sums of two numbers; of float16 what is below its range is lost.
        weight_error += float(ml_dtypes.finfo(PLAIN[s.kind]).eps) ** 2 + length * 2.0**-25
    if s.has_norms:
        # Queries, and weights times norms in a block, are rounded to a 65,024th of their largest.
        error += s.scale * np.abs(whole[0]).sum(1).max() * np.abs(query).max() / 65024
        weight_error += length / 65024
    error = error * (key_scale or 1.0) + 1e-6 * np.abs(residual[seen]).max()
    np.testing.assert_allclose(
        maxima[:real][seen] / np.log2(np.e) + np.log(totals), residual[seen], rtol=0, atol=error
    )
    tolerance = (2 * error + weight_error) * np.abs(whole[1]).max()
    np.testing.assert_allclose(out / totals[:, None], want[seen], rtol=0, atol=tolerance)


@pytest.mark.quick(first=5, slow=0)
@pytest.mark.parametrize(
    ("kind", "head_dim", "block"),
    [
        *(
            (kind, *shape)
            for shape in ((128, 32), (64, 64), (128, 64), (256, 32))
            for kind in KINDS
        ),
        *((kind, 256, 16) for kind in PLAIN),
    ],
)
def test_a_warp_attends_as_the_definition_says(lanes, kind, head_dim, block):
    rng = np.random.default_rng(head_dim + block)
    s = settings(kind, block=block)
    blocks = [random_block(rng, kind, block, head_dim) for _ in range(3)]
    query = normal(rng, kind, (1, 1, 4, head_dim))
    compare(lanes, s, blocks, query, 3 * block - 5, 1, 0.5 if "8" in kind else None)


@pytest.mark.quick(first=9, slow=0)
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (s, k)
        for s in (1e-39, 3e38, 1e-30, 1e-6, 1e6, 1e30)
        for k in KINDS
        # Queries of 16 bits are not scaled: their products with keys overflow as in float32.
        if k not in PLAIN or (s < 1e38 if k == "bfloat16" else s < 1)
    ],
)
def test_queries_of_any_size_are_finite(lanes, kind, size):
    rng = np.random.default_rng(5)
    s = settings(kind, scale=1e-3 / max(size, 1e-3))
    memory, _ = random_block(rng, kind, 64, 128)
    query = rng.uniform(-1, 1, size=(1, 1, 4, 128)) * size
    query = query.astype(PLAIN.get(kind, np.float32))
    query[0, 0, 1, ::2] = 0
    query[0, 0, 2] = 0
    out, _, totals = run(lanes, s, [memory], query, 64, 1)
    assert np.isfinite(out / totals[:, None]).all()
    # A query of zeros attends to all alike, and so do those too small to tell.
    alike = [2] if size > 1e-25 else [0, 1, 2, 3]
    np.testing.assert_allclose(totals[alike], 64, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_weighted_as_the_weights_say(lanes, kind):
    """The second product alone, where no score's error hides it."""
    rng = np.random.default_rng(6)
    s = settings(kind, rows=8)
    memory, (_, values) = random_block(rng, kind, 64, 128)
    channel_of = kernel.channel_of(s)
    products = kernel.products_of(128, s)
    weights = rng.random((8, 64))
    g, t = warp.LANES // 4, warp.LANES % 4
    odd = lanes.odd.value.astype(np.int64)

    def of_lanes(x):
        return warp.Float(x.astype(np.float32))

    p = [[of_lanes(weights[4 * n + t, 8 * g + (i ^ odd)]) for i in range(8)] for n in (0, 1)]
    seen = [[warp.Bool(np.ones(32, bool))] * 8] * 2
    channels = [channel_of(i, lanes, 128).value.astype(np.int64) for i in range(16)]
    nonfinite = [warp.integer(0)] * 2
    after = products.weighted(warp.Pointer(memory), p, seen, nonfinite, lanes)
    out = np.zeros((8, 128))
    for n in (0, 1):
        for c, x in zip(channels, after[n], strict=True):
            out[4 * n + t, c] = x.value
    want = weights @ values
    error = (2.0**-15 if kind == "bfloat16" else 2.0**-20) * np.abs(want).max()
    if s.has_norms:
        norms = norms_of(memory, s, 128, 1).astype(np.float64)
        largest = (weights * norms).max()
        error += largest / 65024 * np.abs(values / norms[:, None]).sum(0).max()
    np.testing.assert_allclose(out, want, rtol=0, atol=error)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    pairwise(
        dtype=[ml_dtypes.bfloat16, np.float16, np.float32],
        kind=[kind for kind in KINDS if kind not in PLAIN],
    ),
)
def test_queries_of_every_dtype_are_loaded(lanes, kind, dtype):
    rng = np.random.default_rng(0)
    blocks = [random_block(rng, kind, 64, 128)]
    query = rng.normal(size=(1, 1, 4, 128)).astype(dtype)
    compare(lanes, settings(kind), blocks, query, 64, 1)


@pytest.mark.quick(13, slow=0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"window": (20, 0)}, {"window": (9, 2), "soft_cap": 3.0}])
def test_several_queries_see_what_they_may(lanes, kind, options):
    rng = np.random.default_rng(1)
    s = settings(kind, rows=8, block=32, **options)
    blocks = [random_block(rng, kind, 32, 128) for _ in range(3)]
    # Two heads of three tokens, of which two are real, fill six rows of eight.
    query = normal(rng, kind, (1, 3, 2, 128))
    compare(lanes, s, blocks, query, 71, 2)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("is_spoiled", [False, True])
@pytest.mark.parametrize(("head_dim", "block"), [(128, 64), (64, 64), (256, 32)])
@pytest.mark.parametrize("options", [{}, {"window": (20, 0)}, {"window": (9, 2), "soft_cap": 3.0}])
def test_queries_as_rows_have_the_bits_of_queries_as_columns(
    lanes, options, head_dim, block, is_spoiled
):
    """Of 16 queries a program's products have queries as rows, of fewer as columns."""
    rng = np.random.default_rng(0)
    rows, columns = (settings("turbo4", rows=n, block=block, **options) for n in (16, 4))
    assert (rows.has_rows, columns.has_rows) == (True, False)
    blocks = [random_block(rng, "turbo4", block, head_dim)[0] for _ in range(3)]
    for side in (0, 1):
        norms_of(blocks[1], rows, head_dim, side)[side] = np.nan if is_spoiled else 1
    query = normal(rng, "turbo4", (1, 4, 4, head_dim))
    query[0, 1, 2, 3], length = np.nan, 3 * block - 9
    together = run(lanes, rows, blocks, query, length, 3)
    for head in range(4):
        alone = run(lanes, columns, blocks, query[:, :, head : head + 1], length, 3)
        for all_rows, own in zip(together, alone, strict=True):
            np.testing.assert_array_equal(all_rows[4 * head : 4 * head + 4], own)


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_no_query_sees_changes_no_bit(lanes, kind):
    rng = np.random.default_rng(2)
    s = settings(kind)
    memories = [random_block(rng, kind, 64, 128)[0] for _ in range(3)]
    query = normal(rng, kind, (1, 1, 4, 128))
    # Garbage, as shared memory may hold: NaN norms and floats, here and past the end of block 1.
    memories[2] = np.full_like(memories[2], 0xFF)
    tails = memories[1].reshape(2, -1)
    if s.has_norms:
        tails = [norms_of(memories[1], s, 128, side).view(np.uint8) for side in (0, 1)]
    for tail in tails:
        tail[len(tail) * 36 // 64 :] = 0xFF
    short = run(lanes, s, memories[:2], query, 100, 1)
    long = run(lanes, s, memories, query, 100, 1)
    for a, b in zip(short, long, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick(14, slow=0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_what_attends_to_it_and_nothing_else(lanes, kind, where):
    rng = np.random.default_rng(3)
    s = settings(kind, rows=8)
    memory = random_block(rng, kind, 64, 128)[0]
    query = normal(rng, kind, (1, 2, 2, 128))
    if where == "query":
        query[0, 1, 0, 5] = np.nan
    elif len(norms := norms_of(memory, s, 128, int(where == "value"))) and s.has_norms:
        norms[40] = np.nan
    elif kind in MIXED:  # its keys
        memory[: 64 * 128].view(ml_dtypes.float8_e4m3fn).reshape(64, 128)[40, 7] = np.nan
    else:
        memory.view(STORED[kind]).reshape(2, 64, 128)[int(where == "value"), 40, 7] = np.nan
    out, _, totals = run(lanes, s, [memory], query, 41, 2)
    # Rows: two heads, each with tokens 39 and 40.
    is_nan = np.isnan(out[:4] / totals[:4, None]).any(1)
    assert is_nan.tolist() == (
        [False, True, False, False] if where == "query" else [False, True] * 2
    )


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize(
    ("kind", "channels", "padded"),
    [
        ("turbo_k4v4", 80, 128),
        ("turbo_k4v2", 80, 128),
        ("turbo_k3v2", 96, 128),
        ("turbo_k2v3", 160, 256),
        ("turbo_k2v3", 32, 64),
        ("turbo_k4v4", 24, 64),
    ],
)
def test_a_warp_attends_to_fewer_channels(lanes, kind, channels, padded):
    rng, block = np.random.default_rng(channels), 32
    s = dataclasses.replace(settings(kind, block=block), channels=channels)
    blocks = [mixed_block(rng, kind, block, channels) for _ in range(3)]
    memories, sides = zip(*blocks, strict=True)
    query = np.zeros((1, 1, 4, padded), np.float32)
    query[..., :channels] = rng.normal(size=(1, 1, 4, channels))
    out, _, totals = run(lanes, s, memories, query, 3 * block - 5, 1)
    whole = [np.concatenate(side) for side in zip(*sides, strict=True)]
    want, _ = oracle(query[..., :channels], whole, s, 3 * block - 5, 1)
    # Queries, and weights times norms in a block, are rounded to a 65,024th of their largest.
    error = s.scale * np.abs(whole[0]).sum(1).max() * np.abs(query).max() / 65024
    bound = (2 * error + 3 * block / 65024) * np.abs(whole[1]).max()
    np.testing.assert_allclose(out[:, :channels] / totals[:, None], want, rtol=0, atol=bound)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [("turbo4", 80), ("turbo4", 96), ("turbo_k3v2", 96), ("turbo_k4v2", 112), ("turbo4", 160)],
)
def test_other_head_dims_lower(kind, head_dim):
    assert "turbojax_paged_hopper" in lower(kind, head_dim=head_dim, dtype=jnp.bfloat16)


def test_every_code_is_its_centroid(lanes):
    table, _, _ = polar.integer_centroids(4)
    products = turbo4.Turbo4.of(128, settings("turbo4"))
    rng = np.random.default_rng(4)
    codes = rng.integers(16, size=(32, 8))
    word = warp.Int((codes << (4 * np.arange(8))).sum(1))
    found = np.concatenate([warp._bytes(x) for x in products.look_up(word)], axis=1)
    np.testing.assert_array_equal(found, np.asarray(table)[codes])


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_rotations_have_the_bits_of_the_definition(lanes, channels):
    size = 32 * channels
    made = polar.rotation(size, seed=3)
    x = np.random.default_rng(size).normal(size=(1, size)).astype(np.float32)
    given = x.reshape(32, channels)
    signs = warp.Pointer(np.asarray(made.signs).view(np.uint8))
    signs = signs.at(warp.Int(warp.LANES * channels * 4))
    numbers = [warp.Float(given[:, i]) for i in range(channels)]
    for ours, definition in (
        (rotation.rotated, polar.rotate),
        (rotation.unrotated, polar.unrotate),
    ):
        found = np.stack([v.value for v in ours(numbers, signs, lanes.number)], 1)
        np.testing.assert_array_equal(found.reshape(1, size), np.asarray(definition(x, made)))


@pytest.mark.quick(5, slow=0)
@pytest.mark.parametrize("window", [None, (40, 0), (700, 3)])
@pytest.mark.parametrize("shared", [1, 4, 16])
def test_the_pages_that_must_exist(monkeypatch, window, shared):
    """Those the definition names: no page before the windows, and none past the length."""
    for module in (frame, inputs, merge):
        monkeypatch.setattr(module, "lane", warp)
    rng = np.random.default_rng(shared)
    tokens, entries, size, num_pages = 3, 100, 16, 50
    pool = types.SimpleNamespace(page_size=size, num_pages=num_pages)
    for _ in range(40):
        length = int(rng.choice([0, 1, 16, 33, 555, 1599, 1600]))
        count = int(rng.integers(0, tokens + 1))
        tables = rng.integers(0, num_pages, (1, entries)).astype(np.int32)
        seen = max(length - count - (window or (length,))[0], 0) // size
        bad = rng.choice([0, seen - 1, seen, seen + 40, length // size, entries - 1])
        tables[0, np.clip(bad, 0, entries - 1)] = rng.choice([-1, num_pages])
        lengths, counts = jnp.asarray([length]), jnp.asarray([count])
        first = checks.first_seen(lengths, counts, tokens, window)
        want = bool(checks.readable(pool, jnp.asarray(tables), lengths, first)[0])
        held = warp.integer(length), warp.integer(count)
        a = types.SimpleNamespace(
            tables=warp.Pointer(tables.view(np.uint8).ravel()), max_pages=entries, page_size=size,
            num_pages=num_pages, held=lambda _, held=held: held,
        )  # fmt: skip
        a.page = functools.partial(inputs.Arrays.page, a)
        s = types.SimpleNamespace(window=window)
        zero = warp.integer(0)
        found = 0
        for number in range(shared):
            row = merge.Row(
                a, [], s, types.SimpleNamespace(shared=shared), zero, zero, zero,
                warp.integer(length), zero, warp.Int(warp.LANES), warp.integer(number), zero,
            )  # fmt: skip
            pages = row.pages(row.first_needed + row.warp * 32)
            found |= int(row.has_bad_page(pages).value[0])
        assert (found == 0) == want


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 8), ("float32", 6)])
def test_a_call_of_one_part_is_finished_as_the_merge_does(monkeypatch, dtype, rows):
    """Bit for bit, in the kernel or after it; where nothing is seen, and where a page is none."""
    for module in (frame, inputs, kernel, merge, rotation):
        monkeypatch.setattr(module, "lane", warp)
    rng = np.random.default_rng(rows)
    s, head_dim, batch = dataclasses.replace(settings("turbo4", rows=8), part=2048), 64, 3
    lengths, kinds = np.int32([100, 90, 80]), {"bfloat16": ml_dtypes.bfloat16}
    tables = np.arange(batch * 8, dtype=np.int32).reshape(batch, 8)
    tables[1, 2] = -1
    size = batch * rows
    final = [np.zeros((size, head_dim), kinds.get(dtype, np.float32)), np.zeros(size, np.float32)]
    again = [x.copy() for x in final]
    partials = [np.zeros((size + 8, *end), np.float32) for end in ((head_dim,), (), ())]

    def pointers(*arrays):
        return [warp.Pointer(x.reshape(-1).view(np.uint8)) for x in arrays]

    signs = rng.choice(np.float32([-1, 1]), head_dim)
    a = inputs.Arrays(
        *(None, *pointers(lengths), None, pointers(*final), 1, rows, 1, head_dim, dtype),
        *(inputs.Pages(*[None] * 6, *pointers(signs)), *pointers(tables), 16, 8, batch * 8, 8),
    )
    merged = dataclasses.replace(a, outputs=pointers(*again))
    left = dataclasses.replace(a, outputs=pointers(*partials))
    lane_of, zero = kernel.Place.here, warp.integer(0)
    for b in range(batch):
        area = np.zeros(4 * s.warp_bytes(head_dim), np.uint8)
        for number in range(4):
            found = area[number * s.warp_bytes(head_dim) :][: 4 * 8 * (head_dim + 2)]
            o, m, l = np.split(found.view(np.float32), [8 * head_dim, 8 * head_dim + 8])
            o[:], m[:], l[:] = (rng.normal(size=x.shape) ** 2 for x in (o, m, l))
            m[number :: number + 1], l[number :: number + 1] = -np.inf, 0
            m[5], l[5] = -np.inf, 0
        at = types.SimpleNamespace(
            tile=zero, run=zero, pair=warp.integer(b), batch=warp.integer(b), head=zero,
            length=warp.integer(int(lengths[b])),
        )  # fmt: skip
        for number in range(4):
            monkeypatch.setattr(warp.STATE, "number", number)
            kernel._finish(a, at, lane_of(), warp.Pointer(area), s)
            kernel._combine(left, at, warp.Pointer(area), s)
        for tile in range(-(-rows // 4)):
            for number in range(4):
                monkeypatch.setattr(warp.STATE, "number", number)
                ids = [warp.integer(tile), warp.integer(b)]
                row = merge.Row.of(merged, pointers(*partials), ids, s, merge.Layout(1, 4))
                with warp.when(row.number < rows):
                    residues = [row.residue(warp.integer(i)) for i in range(4)]
                    merge.finish(row, residues, row.has_bad_page(row.pages(row.first_needed)))
    for x, y in zip(final, again, strict=True):
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))
    assert np.isnan(final[0][rows : 2 * rows].astype(np.float32)).all()
    assert np.isfinite(final[0][:rows].astype(np.float32)).all()
    assert (final[1] == -np.inf).any()
