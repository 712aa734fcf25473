"""KV4 and K8V4 for Hopper, on a CPU: refusals, lowering, and what a warp computes.

A warp's arithmetic runs on arrays of 32 lanes (`oracles.warp`); copies, barriers and the real
matrix unit are checked on a GPU, in `test_gpu_kv4.py`.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import warp as frame
from pallas_kernels.mosaic.hopper import kv4_append
from pallas_kernels.mosaic.hopper.paged import floats, inputs, kernel, scaled
from tests.attention.test_kv4_decode import INIT, assert_matches, filled, normal
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.test_kv4_cache import awkward
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes as emulated
from tests.oracles import warp
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.caches.token_scaled import append_mosaic, mosaic_gpu
from turbojax.caches.token_scaled import cache as kv4
from turbojax.quantizers import quantize_fp8

SHARED_BYTES = 227 * 1024
LOG2_E = np.log2(np.e)


# What is refused, and that the rest lowers --------------------------------------------------------


def specification(kind, *, batch=2, tokens=1, heads=8, head_dim=128, room=4000):
    cache = jax.eval_shape(lambda: INIT[kind](batch, room, 2, head_dim))
    return jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), jnp.bfloat16), cache


def refusal(kind, **shape):
    query, cache = specification(kind, **shape)
    return mosaic_gpu.decode_unsupported(query=query, cache=cache, options=Options(True, scale=1.0))


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(
    ("kind", "shape", "window"),
    [
        ("kv4", {"batch": 16, "room": 2**15}, None),
        ("k8v4", {"tokens": 3, "head_dim": 64}, (300, 0)),
        ("kv4", {"heads": 12, "head_dim": 256}, (300, 0)),
        ("k8v4", {"head_dim": 256}, None),
        ("kv4", {"tokens": 5, "head_dim": 64}, None),
    ],
)
def test_it_lowers(kind, shape, window):
    query, cache = specification(kind, **shape)
    lengths = jax.ShapeDtypeStruct((query.shape[0],), jnp.int32)
    call = functools.partial(mosaic_gpu.decode, options=Options(True, window, scale=0.1))
    assert "turbojax_paged_hopper" in lower_for_cuda(jax.jit(call), query, cache, lengths)


@pytest.mark.parametrize("kind", INIT)
def test_refusals_name_value_and_requirement(kind, monkeypatch):
    assert "needs an NVIDIA GPU of compute capability 8.0, 8.9, 9.0 or 10.0" in refusal(kind)
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 8.0)
    assert refusal(kind) == "needs compute capability 8.9 for 8-bit floats"
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    assert refusal(kind) is None
    assert refusal(kind, head_dim=96) == "head_dim=96 must be one of (64, 128, 256)"
    assert refusal(kind, tokens=17) == "68 queries of a KV head must be at most 64"


@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [{}, {"tokens": 16}, {"batch": 16, "room": 2**15}])
def test_what_is_in_flight_fits_shared_memory(kind, head_dim, shape):
    query, cache = specification(kind, head_dim=head_dim, **shape)
    launch = mosaic_gpu.default_launch(query, cache)
    s = mosaic_gpu.settings_of(query, cache, Options(True, scale=1.0), launch)
    assert s.warps * s.warp_bytes(head_dim) <= SHARED_BYTES
    assert s.part % s.step == 0
    assert launch.is_split == (shape == {})


# What a warp computes -----------------------------------------------------------------------------


@pytest.fixture
def lanes(monkeypatch):
    """The kernel's modules on arrays of lanes; gives the lane."""
    for module in (frame, floats, inputs, kernel, scaled):
        monkeypatch.setattr(module, "lane", warp)
    number = warp.Int(warp.LANES)
    g = number >> 2
    return inputs.Place(g, number & 3, number, inputs.parity(g))


def bytes_of(x):
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def arrays(query, cache, b, head, real):
    """The arrays and the place of a program with one KV head, and its heads of queries."""
    group = query.shape[2] // cache.num_kv_heads
    query = np.asarray(query)[b : b + 1, :, head * group : (head + 1) * group]
    tokens, length = query.shape[1], int(cache.lengths[b])
    a = types.SimpleNamespace(
        query=warp.Pointer(bytes_of(query)), tokens=tokens, heads=group, group=group,
        rows=group * tokens, head_dim=cache.head_dim, dtype=query.dtype.name,
        pages=types.SimpleNamespace(key_scale=None, signs=None),
    )  # fmt: skip
    zero = warp.integer(0)
    at = types.SimpleNamespace(
        tile=zero, head=zero, batch=zero, begin=warp.integer(length - real),
        query_length=warp.integer(real), length=warp.integer(length),
    )  # fmt: skip
    return a, at, query


def blocks_of(cache, b, head, s):
    """What a warp copies, block after block."""
    fields = (cache.key_codes, cache.value_codes, cache.key_scale, cache.value_scale)
    for first in range(0, int(cache.lengths[b]), s.block):
        row = first % cache.room
        parts = [bytes_of(x[b, head, row : row + s.block]) for x in fields]
        yield first, np.concatenate(parts)


def attend(lane, query, cache, *, block=64, real=None, **options):
    """`fireq.decode` by one warp for each KV head, and the merge's last step: out, log-sum-exp."""
    options = Options.complete(
        cache.head_dim,
        is_causal=True,
        **{"scale": None, "local_window_size": None, "logits_soft_cap": None, **options},
    )
    launch = mosaic_gpu.Launch(False, block=block)
    s = mosaic_gpu.settings_of(query, cache, options, launch)
    products = kernel.products_of(cache.head_dim, s)
    batch, tokens, heads, dim = query.shape
    group, g, t = heads // cache.num_kv_heads, warp.LANES // 4, warp.LANES % 4
    out, lse = np.zeros(query.shape), np.zeros(query.shape[:3])
    channels = [scaled.channel(i, lane, dim).value.astype(np.int64) for i in range(dim // 8)]
    for b, head in np.ndindex(batch, cache.num_kv_heads):
        a, at, _ = arrays(query, cache, b, head, tokens if real is None else real[b])
        loaded = kernel._load_query(a, at, lane, products, None, s)
        state = inputs.State.empty(s.tiles, dim // 8)
        for first, memory in blocks_of(cache, b, head, s):
            place = warp.Pointer(memory), warp.integer(first)
            state = state.joined(kernel._attend(place, at, loaded, lane, products, True, s))
        o, m, l = np.full((s.rows, dim), np.inf), np.zeros(s.rows), np.zeros(s.rows)
        for tile in range(s.tiles):
            for c, x in zip(channels, state.outputs[tile], strict=True):
                o[4 * tile + t, c] = x.value
            m[4 * tile + t[g == 0]] = state.maxima[tile].value[g == 0]
            l[4 * tile + t[g == 0]] = state.totals[tile].value[g == 0]
        with np.errstate(all="ignore"):
            o = np.where(l[:, None] == 0, 0, o / l[:, None]) * s.value_unit
            found = np.where(l == 0, -np.inf, m / LOG2_E + np.log(l))
        for row in range(group * tokens):
            at_row = b, row % tokens, head * group + row // tokens
            out[at_row], lse[at_row] = o[row], found[row]
    return out.astype(np.float32), lse.astype(np.float32)


def matches(lane, kind, query, cache, block=64, **options):
    """Within the bound that the definition's own suite derives."""

    def call(query, cache, *, return_residual, query_seq_lengths=None, **options):
        assert return_residual
        out, lse = attend(lane, query, cache, block=block, real=query_seq_lengths, **options)
        return jnp.asarray(out, query.dtype), jnp.asarray(lse)

    offset = 0 if kind == "kv4" else None
    assert_matches("mosaic_gpu", query, cache, call=call, offset=offset, **options)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("kind", "head_dim", "block", "dtype"),
    [
        ("kv4", 128, 64, jnp.float32),
        ("k8v4", 128, 32, jnp.float32),
        ("kv4", 64, 64, jnp.bfloat16),
        ("k8v4", 64, 64, jnp.float16),
        ("kv4", 256, 32, jnp.float16),
        ("k8v4", 256, 32, jnp.bfloat16),
    ],
)
def test_a_warp_attends_as_the_definition_says(lanes, kind, head_dim, block, dtype):
    cache = filled(kind, 1, head_dim, (150, 0, 64), dtype)
    matches(lanes, kind, normal(3, (3, 1, 4, head_dim), dtype), cache, block)


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": (20, 0), "query_seq_lengths": (2,), "scale": -0.2},
        {"local_window_size": (9, 2), "logits_soft_cap": 3.0},
    ],
    ids=["window, padding", "window of both sides, soft cap"],
)
def test_options(lanes, kind, options):
    """Two heads of three tokens fill six rows of eight."""
    matches(lanes, kind, normal(4, (1, 3, 2, 64)), filled(kind, 1, 64, (71,)), **options)


def test_a_rolling_buffer_is_read_as_a_cache_that_holds_all(lanes):
    """Of 300 tokens 128 are there; where they are does not change a bit."""
    x, made = [normal(i, (1, 300, 1, 64)) for i in (8, 9)], []
    for window in (None, (40, 0)):
        empty = kv4.init_cache(1, 300, 1, 64, dtype=jnp.float32, local_window_size=window)
        cache = jax.jit(kv4.append)(empty, *x)
        made.append(attend(lanes, normal(10, (1, 2, 2, 64)), cache, local_window_size=(40, 0)))
    for a, b in zip(*made, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", INIT)
def test_not_finite_and_what_is_not_seen(lanes, kind):
    query, clean = normal(5, (1, 2, 2, 64)), filled(kind, 1, 64, (41,), room=40)
    beyond = (jnp.arange(clean.key_scale.shape[2]) >= 41)[None, None]
    dirty = dataclasses.replace(
        clean,
        key_scale=jnp.where(beyond, jnp.nan, clean.key_scale),
        value_scale=jnp.where(beyond, jnp.nan, clean.value_scale),
        value_codes=jnp.where(beyond[..., None], 0x77, clean.value_codes),
        key_codes=jnp.where(
            beyond[..., None], jnp.full_like(clean.key_codes, 0x77), clean.key_codes
        ),
    )
    for a, b in zip(attend(lanes, query, dirty), attend(lanes, query, clean), strict=True):
        np.testing.assert_array_equal(a, b)
    # Token 40 is the second query's own: the first one does not see it.
    for name in ("key_scale", "value_scale"):
        spoiled = getattr(clean, name).at[0, 0, 40].set(jnp.nan)
        out, lse = attend(lanes, query, dataclasses.replace(clean, **{name: spoiled}))
        np.testing.assert_array_equal(np.isnan(out).all((2, 3)), [[False, True]])
        np.testing.assert_array_equal(np.isnan(out).any((2, 3)), [[False, True]])
        np.testing.assert_array_equal(np.isnan(lse[0, 1]), name == "key_scale")
    out, _ = attend(lanes, query.at[0, 0, 1, 5].set(jnp.inf), clean)
    np.testing.assert_array_equal(np.isnan(out).any(-1), [[[False, True], [False, False]]])


@pytest.mark.parametrize("size", [1e-39, 1e-30, 1e30, 3e38])
def test_queries_and_values_of_any_size_are_finite(lanes, size):
    query = np.random.default_rng(6).uniform(-1, 1, (1, 1, 4, 64)) * size
    cache = filled("kv4", 1, 64, (64,))
    loud = min(1e37, max(1e-37, size))
    scale = (np.asarray(cache.value_scale, np.float32) * loud).astype(ml_dtypes.bfloat16)
    cache = dataclasses.replace(cache, value_scale=jnp.asarray(scale))
    out, lse = attend(lanes, query.astype(np.float32), cache, scale=1 / max(size, 1e-30))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert np.abs(out).max() > 1e-3 * loud


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_queries_have_the_codes_of_the_definition(lanes, dtype):
    """To the bit, in the order of keys' bytes, and their sum."""
    query = (np.random.default_rng(7).normal(size=(1, 1, 4, 128)) * 3).astype(dtype)
    cache = filled("kv4", 1, 128, (64,))
    s = mosaic_gpu.settings_of(query, cache, Options(True, scale=1.0), mosaic_gpu.Launch(False))
    a, at, _ = arrays(query, cache, 0, 0, 1)
    loaded = kernel._load_query(a, at, lanes, kernel.products_of(128, s), None, s)
    want, want_scale = (np.asarray(x) for x in quantize_fp8(jnp.asarray(query), axis=-1))
    [words], t = loaded.operands, warp.LANES % 4
    pairs = np.stack([w.value[:, None].view(np.float16) for w in words], 1).astype(np.float64)
    for g in range(8):
        found = np.zeros(128)
        for step, byte in enumerate((0, 1)):
            for upper in (0, 1):
                own = pairs[4 * g : 4 * g + 4, 2 * step + upper :: 4]  # [t, word, pair]
                at_channel = 16 * np.arange(4)[:, None, None] + 4 * np.arange(4)[:, None]
                at_channel = at_channel + byte + np.array([0, 2]) + 64 * upper
                found[at_channel] = own * (16.0 if upper else 1.0)
        codes = want[0, 0, g // 2].astype(np.float64) if g % 2 == 0 else np.zeros(128)
        np.testing.assert_array_equal(found, codes)
    np.testing.assert_array_equal(
        loaded.factor[0].value, (want_scale[0, 0] * np.float32(LOG2_E))[t]
    )
    sums = want[0, 0].astype(np.float64).sum(-1)[t]
    np.testing.assert_allclose(loaded.start[0][0].value, sums * -8 * 2.0**-24, rtol=1e-6)


xla = functools.partial(kv4.append, implementation="xla")


def of_size(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, dtype)


@pytest.fixture
def append(monkeypatch):
    """`kv4.append` by the kernel, emulated; the first warp, which writes lengths, runs last."""
    emulated.patch(monkeypatch, kv4_append, frame)
    update = functools.partial(emulated.update, backwards=True)
    monkeypatch.setattr(kv4_append.lanes, "update", update)
    monkeypatch.setattr(warp, "block_barrier", lambda: None, raising=False)
    monkeypatch.setattr(append_mosaic, "needs_updates", lambda *_: None)
    return functools.partial(kv4.append, implementation="mosaic_gpu")


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_ragged_tokens_have_the_bits_of_the_definition(append, kind, dtype):
    """Token by token, several, many; some are left out."""
    cache = want = INIT[kind](3, 60, 2, 40, dtype=dtype)
    # Of 13 tokens a sequence has 52 vectors, of 17 more than a program takes.
    for i, lengths in enumerate(([1, 0, 1], [13, 4, 0], [17, 30, 1])):
        shape = (3, (1, 13, 30)[i], 2, 40)
        x = of_size(2 * i, shape, dtype), of_size(2 * i + 1, shape, dtype)
        counts = jnp.asarray(lengths, jnp.int32)
        cache, want = (f(c, *x, lengths=counts) for f, c in ((append, cache), (xla, want)))
        assert_same_bits(cache, want)
    assert cache.lengths.tolist() == [31, 34, 2]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("kind", INIT)
@pytest.mark.parametrize("dim", [8, 128, 264])
def test_vectors_that_are_hard_to_round(append, kind, dim):
    x = jnp.asarray(awkward(dim))[:, None, None]
    new = INIT[kind](len(x), 4, 1, dim, dtype=jnp.float32)
    got, want = (f(new, x, x[::-1]) for f in (append, xla))
    # Bits of NaN may differ.
    got, want = (
        [np.asarray(y).astype(np.float64) for y in jax.tree.leaves(cache)] for cache in (got, want)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.fuzz
@pytest.mark.parametrize("tokens", [3, 40])
def test_what_has_no_room_is_left_out_and_told(append, tokens):
    x = of_size(5, (2, tokens, 2, 16))
    full = kv4.init_cache(2, 10, 2, 16, dtype=jnp.float32)
    full = xla(full, x[:, :1], x[:, :1])
    calls = [jax.jit(f) for f in (append, xla)]
    for lengths in ([3, 1], [-1, 99], [tokens, 0]):
        counts = jnp.asarray(lengths, jnp.int32)
        got, full = (f(full, x, x, lengths=counts) for f in calls)
        assert_same_bits(got, full)
    assert full.overflowed.tolist() == [tokens > 6, True]


@pytest.mark.fuzz
@pytest.mark.parametrize("tokens", [150, 13])
def test_rolling_buffers(append, tokens):
    """Of 128 rows more are written than there are, or they are taken in turn."""
    new = functools.partial(kv4.init_cache, 1, 400, 2, 16, dtype=jnp.float32)
    cache = want = new(local_window_size=(100, 0))
    assert cache.is_rolling
    for i, count in enumerate((120, tokens)):
        x = of_size(2 * i, (1, count, 2, 16)), of_size(2 * i + 1, (1, count, 2, 16))
        cache, want = append(cache, *x), xla(want, *x)
        assert_same_bits(cache, want)


def test_what_is_refused_and_chosen():
    cache = kv4.init_cache(1, 10, 2, 16, dtype=jnp.float32)
    x = of_size(6, (1, 1, 2, 16))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu.*compute capability 8\.0, 8\.9"):
        kv4.append(cache, x, x, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="has no implementation='triton'"):
        kv4.append(cache, x, x, implementation="triton")
    # What attends by another name still appends.
    assert kv4.APPEND.beside("triton") is None
    assert append_mosaic.append_unsupported(cache=cache, key=x[:, :0]) == (
        "key.shape=(1, 0, 2, 16) is empty"
    )


@pytest.mark.quick(first=2)
@pytest.mark.parametrize(
    ("kind", "tokens", "head_dim", "dtype"),
    [
        ("kv4", 1, 128, jnp.bfloat16),
        ("k8v4", 256, 128, jnp.bfloat16),
        ("kv4", 300, 80, jnp.float32),
        ("k8v4", 4, 264, jnp.float16),
    ],
)
def test_append_lowers_in_place(kind, tokens, head_dim, dtype):
    cache = jax.eval_shape(lambda: INIT[kind](4, 400, 8, head_dim, dtype=dtype))
    x = jax.ShapeDtypeStruct((4, tokens, 8, head_dim), dtype)
    text = lower_for_cuda(append_mosaic.append, cache, x, x, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert "mosaic_gpu" in text
    assert text.count("output_operand_alias<") == (6 if tokens < 5 else 4)


def test_it_lowers_under_vmap():
    """Of stacked layers, one after the other."""
    cache = jax.eval_shape(lambda: kv4.init_cache(2, 200, 2, 64))
    x = jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)
    one = cache, x, x, jax.ShapeDtypeStruct((2,), jnp.int32)
    many = jax.tree.map(lambda y: jax.ShapeDtypeStruct((3, *y.shape), y.dtype), one)
    assert "mosaic_gpu" in lower_for_cuda(jax.vmap(append_mosaic.append), *many)
