"""Many queries to pages, and latents, on Hopper, on a CPU: refusals, lowering, expansion, spans.

Code for single lanes runs on arrays of 32 lanes (`oracles.warp`); the attention itself runs in
Pallas' interpreter where that is (`test_mosaic_interpreted.py`), and on a GPU
(`test_gpu_paged_prompts.py`).
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper.latent import join as latent_join
from pallas_kernels.mosaic.hopper.latent import kernel as latent_kernel
from pallas_kernels.mosaic.hopper.latent import tiles as latent_tiles
from pallas_kernels.mosaic.hopper.paged_prompt import (
    expand,
    join,
    nonfinite,
    products,
    tiles,
    transpose,
)
from tests.attention.paged_helpers import filled
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.kernels.test_mosaic_paged import specification
from tests.models import latent_helpers as helpers
from tests.oracles import warp
from tests.oracles.programs import RoundRobin
from turbojax import paged, polar
from turbojax.attention.options import Options
from turbojax.caches.latent import mosaic_gpu as mosaic_latent
from turbojax.caches.paged import hopper as paged_hopper
from turbojax.caches.paged import mosaic_prompt
from turbojax.caches.paged.pool import gather

KINDS = ("auto", "turbo4", "fp8_e4m3", "fp8_e5m2", "k8v4", "int8", "turbo_k3v2")


# What is refused, and that the rest lowers --------------------------------------------------------


def lower(kind, *, window=None, logits_soft_cap=None, scale=0.1, **shape):
    attend = functools.partial(
        paged_hopper.attend,
        options=Options(True, window, scale=scale, logits_soft_cap=logits_soft_cap),
    )
    return lower_for_cuda(jax.jit(attend), *specification(kind, **shape))


LOWERED = pairwise(
    queries=[(8, 300), (2, 80), (6, 33), (32, 16)],
    page_size=[64, 16, 32, 128],
    kind=KINDS,
    head_dim=[128, 64, 256],
    dtype=[jnp.bfloat16, jnp.float16],
    options=[{}, {"window": (300, 0), "logits_soft_cap": 30.0}, {"scale": -1.0}],
)


@pytest.mark.fuzz
@pytest.mark.parametrize(("queries", "page_size", "kind", "head_dim", "dtype", "options"), LOWERED)
def test_it_lowers(queries, page_size, kind, head_dim, dtype, options):
    heads, tokens = queries
    options = {**options, "page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    text = lower(kind, heads=heads, tokens=tokens, **options)
    assert "turbojax_paged_prompt_hopper" in text
    assert ("turbojax_paged_join_hopper" in text) == (heads * tokens // 2 <= 1024)
    is_e4m3 = kind == "fp8_e4m3" and head_dim <= 128
    assert ("turbojax_paged_expand_hopper" in text) == (kind != "auto" and not is_e4m3)
    assert ("turbojax_paged_turn_hopper" in text) == is_e4m3


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("auto", {"head_dim": 96}, "head_dim=96 must be one of (64, 128, 256)"),
        ("turbo4", {"dtype": jnp.float32}, "dtype=float32 must be bfloat16 or float16"),
    ],
)
def test_refusals_name_value_and_requirement(hopper, kind, shape, words):
    query, cache, tables, *_ = specification(kind, tokens=17, **shape)
    given = {"query": query, "block_tables": tables, "options": Options(True, scale=1.0)}
    assert paged_hopper.unsupported(cache=cache, **given).startswith(words)


# Which keys a tile of queries sees ----------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 0, 5, 130, 400])
def test_spans_hold_all_that_is_seen_and_whole_tiles_alone_inside(window):
    tile = 128
    for first, last in [
        (0, 31),
        (100, 131),
        (127, 254),
        (128, 159),
        (-40, 10),
        (500, 640),
        (3, -1),
    ]:
        found = [int(x) for x in tiles.span(jnp.int32(first), jnp.int32(last), tile, window)]
        begin, inner, outer, end = found
        assert 0 <= begin <= inner <= outer <= end
        for j in range(8):
            keys = np.arange(j * tile, (j + 1) * tile)[None]
            query = np.arange(first, last + 1)[:, None]
            seen = keys <= query
            if window is not None:
                seen &= keys >= query - window
            assert begin <= j < end or not seen.any()
            assert not inner <= j < outer or seen.all()


# Values that are not finite -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_tile_is_made_finite(lanes, dtype, head_dim):
    """By four warps in turn, of which each sees what the others found."""
    tile, count = tiles.tile_tokens(head_dim), 53
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(tile, head_dim)).astype(kind)
    x[7, 3], x[40, head_dim - 1], x[60] = np.nan, -np.inf, np.nan
    stored = x.view(np.uint16).reshape(tile // 8, 8, head_dim // 64, 8, 8).swapaxes(1, 2)
    stored = np.take_along_axis(stored, swizzle()[None, None, :, :, None], 3)
    memory = np.ascontiguousarray(stored).view(np.uint8).ravel()
    found = np.zeros(32, np.uint8)
    arguments = Memory(memory), Memory(found), warp.integer(count), tile, head_dim, dtype
    lanes(lambda: nonfinite._clean(*arguments))
    got = memory.view(np.uint16).reshape(tile // 8, head_dim // 64, 8, 8, 8)
    got = np.take_along_axis(got, swizzle()[None, None, :, :, None], 3).swapaxes(1, 2)
    got = got.reshape(tile, head_dim).view(kind)
    assert found.view(np.uint32)[:4].tolist() == [1 << 7, 1 << 8, 0, 0]
    assert not got[count:].any()
    untouched = np.ones((tile, head_dim), bool)
    untouched[7, 0:8] = untouched[40, -8:] = untouched[count:] = False
    np.testing.assert_array_equal(got[untouched], x[untouched])
    assert not got[~untouched].any()


def swizzle():
    """Which piece of 16 bytes of a row is where: ``[8, 8]``."""
    return np.arange(8)[:, None] ^ np.arange(8)[None]


# Expansion of pages -------------------------------------------------------------------------------


class Memory(warp.Pointer):
    def at(self, *offsets):
        return Memory(self.memory, super().at(*offsets).offset)

    def times(self, index, size):
        return Memory(self.memory, super().times(index, size).offset)

    def half(self):
        index = self.offset[:, None] + np.arange(2)
        words = np.ascontiguousarray(self.memory[index]).view(np.uint16)
        return warp.Int(words[:, 0])


class Half(warp.half):
    @staticmethod
    def pack(low, high, dtype="float16"):
        pair = np.stack([low.value, high.value], 1)
        with np.errstate(all="ignore"):
            pair = pair.astype(getattr(ml_dtypes, dtype, dtype))
        return warp.Int(pair.view(np.uint32)[:, 0])


@pytest.fixture
def lanes(monkeypatch):
    """Runs code for lanes as a program's warps, four if not told, which take turns."""

    def special(name):
        assert name == "tid.x"
        return warp.thread()

    def join_bits(target, bits):
        words, active = target.memory.view(np.uint32), warp.STATE.active[-1]
        np.bitwise_or.at(words, target.offset[active] // 4, bits.value[active])

    monkeypatch.setattr(warp, "special", special, raising=False)
    monkeypatch.setattr(warp, "join_bits", join_bits, raising=False)
    monkeypatch.setattr(warp, "half", Half)
    for module in (eight_bits, expand, join, latent_join, nonfinite, products, transpose):
        monkeypatch.setattr(module, "lane", warp)

    def run(f, warps=4):
        def one(number):
            warp.STATE.number, warp.STATE.barrier = number, barrier
            f()

        def barrier():
            scheduler.barrier("all", warps)

        monkeypatch.setattr(nonfinite.mgpu.utils, "warpgroup_barrier", barrier)
        scheduler = RoundRobin([functools.partial(one, number) for number in range(warps)])
        scheduler.run()

    return run


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("kind", "head_dim"), pairwise(kind=KINDS[1:], head_dim=[128, 64, 256]))
def test_expanded_pages_are_what_they_stand_for(lanes, kind, head_dim, dtype):
    """Rounded once from float32, but for the order of a few roundings before."""
    length, page_size, kv_heads = 150, 32, 2
    cache, tables = filled(kind, (5, length), kv_heads, head_dim, page_size, dtype=dtype)
    codecs = tuple(mosaic_prompt._codec(side, head_dim) for side in cache.formats)
    s = expand.Settings(codecs, jnp.dtype(dtype).name)
    count = -(-tables.shape[1] * page_size // expand.TILE)
    shape = (kv_heads, page_size, head_dim, tables.shape[1], count)
    kind_of = np.dtype(jnp.dtype(dtype))
    out = [np.zeros((2 * count, kv_heads, expand.TILE, head_dim), kind_of) for _ in range(2)]
    given = [np.asarray(tables), np.asarray([5, length], np.int32), np.zeros(2, np.int32)]
    if cache.formats.is_rotated:
        given.append(np.asarray(cache.rotation.signs))
    sides = (cache.key, cache.key_norm, cache.value, cache.value_norm)
    given += [np.asarray(x) for x in sides if x is not None]
    arrays = [Memory(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in [*given, *out]]
    for tile in range(count):
        ids = [warp.integer(x) for x in (tile, 1, 1)]
        lanes(lambda ids=ids: expand._body(arrays, ids, shape=shape, s=s))
    unit = dataclasses.replace(
        cache,
        **{
            name: jnp.ones_like(scale)
            for name in ("key_scale", "value_scale")
            if (scale := getattr(cache, name)) is not None
        },
    )
    want = gather(unit, tables[1:], jnp.asarray([length]), dtype=jnp.float32)
    for got, side in zip(out, want, strict=True):
        rows = got[count:, 1].reshape(-1, head_dim)[:length].astype(np.float64)
        exact = np.asarray(side, np.float64)[0, :length, 1]
        bound = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact) + 2.0**-20 * np.abs(exact).max()
        assert (np.abs(rows - exact) <= bound).all()
        assert not got[:count].any()


# e4m3 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 128])
def test_values_are_transposed_and_what_is_lost_is_told(lanes, head_dim, page_size):
    length, kv_heads, max_pages = 150, 2, 200 // page_size + 1
    rng = np.random.default_rng(0)
    shape = (max_pages + 3, kv_heads, page_size, head_dim)
    value = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    tables = rng.permutation(max_pages + 3)[None, :max_pages].astype(np.int32)
    tokens = value[tables[0], 1].reshape(-1, head_dim)
    nonfinite_tokens = (3, 37, 149)
    for token in (*nonfinite_tokens, 155):
        page, slot = tables[0, token // page_size], token % page_size
        value[page, 1, slot, token % head_dim] = np.nan
    count = -(-max_pages * page_size // transpose.TILE)
    out = np.zeros((count, kv_heads, head_dim, transpose.TILE), value.dtype)
    told = np.full((count, kv_heads, 4), -1, np.int32)
    # Lanes that have nothing to do load, too, where they are emulated.
    shared = np.zeros(4 * (head_dim * transpose._STRIDE + 128), np.uint8)
    given = [tables, np.asarray([length], np.int32), np.zeros(1, np.int32), value, out, told]
    arrays = [Memory(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in given]
    sizes = (kv_heads, page_size, head_dim, max_pages, count)
    for tile in range(count):
        ids = [warp.integer(x) for x in (tile, 1, 0)]
        lanes(lambda ids=ids: transpose._body([*arrays, Memory(shared)], ids, shape=sizes))
    place = np.arange(16)
    token_at = 2 * (place // 4) + place % 4 + np.where(place % 4 < 2, 0, 6)
    got = out[:2, 1].astype(np.float32).reshape(2, head_dim, 8, 16)
    natural = np.zeros_like(got)
    natural[..., token_at] = got
    natural = natural.transpose(0, 2, 3, 1).reshape(-1, head_dim)
    want = np.zeros((256, head_dim), np.float32)
    want[:length] = tokens[:length]
    for token in nonfinite_tokens:
        want[token, token % head_dim] = 0
    np.testing.assert_array_equal(natural, want)
    bits = np.unpackbits(told[:, 1].reshape(-1).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == list(nonfinite_tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_are_quantized_row_by_row(lanes, head_dim, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, head_dim)) * np.geomspace(1e-3, 1e3, 64)[:, None]).astype(kind)
    x[9], x[10, 4], x[11, 5] = 0, np.nan, np.inf
    stored = x.view(np.uint16).reshape(8, 8, head_dim // 64, 8, 8).swapaxes(1, 2)
    stored = np.take_along_axis(stored, swizzle()[None, None, :, :, None], 3)
    memory = Memory(np.ascontiguousarray(stored).view(np.uint8).ravel())
    codes, scales = np.zeros((64, head_dim), np.float32), np.zeros(64, np.float32)

    def row_and_place():
        thread = warp.special("tid.x")
        return ((thread >> 5) & 3) * 16 + ((thread >> 2) & 7), thread & 3

    def f():
        row, t = row_and_place()
        for half, words in enumerate(products._row_words(memory, head_dim)):
            found, scale = products.quantized_row(words, dtype)
            rows = row.value + 8 * half
            scales[rows] = scale.value
            for i, word in enumerate(found):
                for b in range(4):
                    code = word.value[:, None].view(ml_dtypes.float8_e4m3fn)[:, b]
                    codes[rows, 16 * i + 4 * t.value + b] = code.astype(np.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "fragments", types.SimpleNamespace(row_and_place=row_and_place))
        lanes(f)
    bad = np.zeros(64, bool)
    bad[10:12] = True
    assert np.isnan(scales[bad]).all()
    assert np.isfinite(scales[~bad]).all()
    exact = x.astype(np.float64)[~bad]
    got = codes[~bad].astype(np.float64) * scales[~bad, None]
    largest = np.abs(exact).max(1, keepdims=True)
    assert (np.abs(got - exact) <= 2.0**-4 * np.abs(exact) + 2.0**-9 * largest / 448).all()
    assert np.abs(codes[~bad]).max() == 448


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "counts", "window", "want"),
    [
        ((700, 300), (40, 7), None, [0, 3]),
        ((512,), (512,), None, [0, 2]),
        ((513, 0, -1), (1, 5, 1), None, [0, 3]),
        ((0, -1), (1, 1), None, [0, 1]),
        # The first query is at 660 and sees 560 and later ones: the third part.
        ((700,), (40,), 100, [2, 1]),
        # What holds nothing says nothing about where the others begin.
        ((700, 0, -1), (40, 40, 40), 100, [2, 1]),
        ((700, 300), (40, 7), 100, [0, 3]),
        ((0, -1), (1, 1), 100, [0, 1]),
    ],
)
def test_programs_take_the_parts_that_some_sequence_sees(lengths, counts, window, want):
    s = tiles.Settings(window=window, soft_cap=None, stages=2, part=256)
    found = tiles.parts_seen(jnp.asarray(lengths), jnp.asarray(counts), s)
    assert found.tolist() == want


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 64), (1, 128), (7, 64)])
def test_parts_are_joined_and_those_not_seen_are_not_read(lanes, group, head_dim, window):
    batch, tokens, kv_heads, part = 3, 40, 2, 256
    heads = kv_heads * group
    lengths, counts = np.asarray([700, 300, -1], np.int32), np.asarray([40, 7, 9], np.int32)
    s = tiles.Settings(window=window, soft_cap=None, stages=2, part=part, group=group)
    places = -(-tokens * group // 128)
    rows = (batch, kv_heads, places * 128)
    rng = np.random.default_rng(0)
    found = np.full((5, *rows, head_dim), np.nan, np.float32)
    found_lse = np.full((5, *rows), np.nan, np.float32)
    want = np.zeros((batch, tokens, heads, head_dim))
    want_lse = np.full((batch, tokens, heads), -np.inf)
    want[2], want_lse[2] = np.nan, np.nan
    for b, place in np.ndindex(2, places):
        row = np.arange(place * 128, min((place + 1) * 128, counts[b] * group))
        position = lengths[b] - counts[b] + row // group
        for p in range(5):
            keys = np.arange(p * part, (p + 1) * part)
            seen = keys[None] <= position[:, None]
            if window is not None:
                seen &= keys[None] >= position[:, None] - window
            if not seen.any():
                continue
            here = slice(place * 128, (place + 1) * 128)
            found[p, b, :, here], found_lse[p, b, :, here] = 0, -np.inf
            row_seen = row[seen.any(1)]
            found[p, b, :, row_seen] = rng.normal(size=(len(row_seen), kv_heads, head_dim))
            found_lse[p, b, :, row_seen] = rng.normal(size=(len(row_seen), kv_heads)) * 3
        for r, h in np.ndindex(len(row), kv_heads):
            some, lse = found[:, b, h, row[r]], found_lse[:, b, h, row[r]]
            there = np.isfinite(lse)
            weights = np.exp(lse[there].astype(np.float64) - lse[there].max())
            at = b, row[r] // group, h * group + row[r] % group
            want[at] = weights @ some[there] / weights.sum()
            want_lse[at] = lse[there].max() + np.log(weights.sum())
    out = np.zeros(want.shape, np.float16)
    out_lse = np.zeros(want.shape[:3], np.float32)
    arrays = [lengths, counts, found, found_lse, out, out_lse]
    memory = [Memory(x.reshape(-1).view(np.uint8)) for x in arrays]
    body = functools.partial(join._body, memory, rows=rows, shape=want.shape, dtype="float16", s=s)
    for program in range(found[0].size // 8 // 128):
        lanes(lambda program=program: body([warp.integer(program)]))
    np.testing.assert_allclose(out, want, atol=2e-3)
    np.testing.assert_allclose(out_lse, want_lse, atol=1e-5)


def latents(name, batch=2, heads=16, tokens=1, page_size=64, pages=64):
    """Shapes of a call."""
    of = jax.ShapeDtypeStruct
    dtype = jnp.float16 if name == "float16" else jnp.bfloat16
    data = {"turbo4": (256, jnp.uint8), "fp8_e4m3": (512, jnp.float8_e4m3fn)}
    width, kind = data.get(name, (512, dtype))
    pool = (batch * pages, page_size)
    return (
        *(of((batch, tokens, heads, size), dtype) for size in (512, 64)),
        of((*pool, width), kind),
        of(pool, jnp.float32) if name in data else None,
        of((*pool, 64), dtype),
        of((batch, pages), jnp.int32),
        of((batch,), jnp.int32),
        of((batch,), jnp.int32),
    )


def lower_latent(name, *, window=None, **shape):
    arrays = latents(name, **shape)
    sizes, codec = arrays[0].shape[:3], helpers.codec_of(name)
    s = latent_kernel.settings(helpers.SCALE, *sizes, window=window, codec=codec)
    return lower_for_cuda(functools.partial(latent_kernel.attend, settings=s), *arrays)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "shape", "is_joined"),
    [
        ("bfloat16", {}, True),
        ("turbo4", {"pages": 1}, False),
        ("float16", {"heads": 20, "tokens": 3, "page_size": 16, "window": 300}, False),
        ("fp8_e4m3", {"heads": 128, "page_size": 128}, True),
    ],
)
def test_latents_lower(name, shape, is_joined):
    text = lower_latent(name, **shape)
    assert "turbojax_latent_hopper" in text
    assert ("turbojax_latent_join_hopper" in text) == is_joined


@pytest.mark.parametrize(
    ("batch", "heads", "parts", "shortest"),
    [
        (64, 128, 1, 512),
        (64, 16, 2, 512),
        (16, 128, 4, 512),
        (16, 16, 8, 512),
        (1, 128, 66, 256),
        (1, 16, 132, 64),
        (500, 16, 1, 512),
    ],
)
def test_parts_fill_the_gpu(batch, heads, parts, shortest):
    s = latent_kernel.settings(0.1, batch, 1, heads)
    assert (s.parts, s.shortest, s.longest) == (parts, shortest, 8192)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "part"),
    [(1, 2, 16, 1024), (1, 64, 16, 1024), (4, 64, 16, 4096), (8, 64, 128, 8192)],
)
def test_parts_of_several_queries_are_at_fixed_places(batch, tokens, heads, part):
    s = latent_kernel.settings(0.1, batch, tokens, heads, window=3000)
    assert s.shortest == s.longest == part
    for length in (1, 5000, 40000):
        start, size = latent_tiles.cut(jnp.int32(length), jnp.int32(length - 1), s)
        assert (start * 64 % part, size * 64) == (0, part)


def works(lengths, real, *, heads=16, tokens=1, window=None, parts=3, shortest=64, longest=256):
    """Settings, and what all programs of such a call would do."""
    s = latent_kernel.settings(0.1, 1, 1, 16, window=window)
    s = dataclasses.replace(s, parts=parts, shortest=shortest, longest=longest, tokens=tokens)
    lengths = jnp.asarray(lengths, jnp.int32)
    real = None if real is None else jnp.asarray(real, jnp.int32)
    rows = -(-tokens * heads // 8) * 8
    q = jax.ShapeDtypeStruct((len(lengths), rows, 512), jnp.bfloat16)
    x = latent_tiles.Inputs(q, None, None, None, None, lengths, real)
    most = latent_tiles.most_parts(1024, tokens, s)
    total = most * len(lengths) * -(-rows // 64)
    return s, [latent_tiles.Work(jnp.int32(i), x, heads, s) for i in range(total)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("tokens", "heads", "shortest"), [(1, 16, 64), (9, 16, 64), (9, 16, 256)])
def test_parts_of_a_sequence_are_all_that_its_queries_see(tokens, heads, shortest, window):
    lengths, real = (700, 0, 1, 64, 65, -1, 1000), (tokens, 0, 1, tokens, 1, 1, tokens)
    s, found = works(lengths, real, tokens=tokens, heads=heads, window=window, shortest=shortest)
    seen = latent_tiles.count_parts(*(jnp.asarray(x) for x in (lengths, real)), s)
    for b, length in enumerate(lengths):
        of_places = {}
        for work in found:
            if work.b == b and work.is_any:
                assert work.part < seen[0]
                assert work.tiles.end - work.tiles.begin <= 4  # of `longest`
                of_places.setdefault(int(work.first), []).append(work)
        places = range(-(-tokens * heads // 64))
        for first in (64 * place for place in places):
            queries = {row // heads for row in range(first, min(first + 64, tokens * heads))}
            at = [length - real[b] + t for t in queries if t < real[b]]
            at = [p for p in at if p >= 0]
            runs = [range(int(w.tiles.begin), int(w.tiles.end)) for w in of_places.get(first, ())]
            start = 0 if window is None else max(min(at, default=0) - window, 0) // 64
            want = range(start, max(at, default=-1) // 64 + 1)
            if length <= 0 or not at:
                want = range(0)
            assert [j for run in runs for j in run] == list(want)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("parts", [3, 11])
@pytest.mark.parametrize(
    ("window", "real"), [(None, (5, 1, 5, 4)), (100, (5, 1, 5, 4)), (100, None)]
)
def test_parts_of_latents_are_joined_and_those_not_seen_are_not_read(lanes, window, real, parts):
    """Of few parts by one warp, of more by eight; those not written hold NaN."""
    tokens, heads, lengths = 5, 16, (700, 0, -1, 2)
    given = {"tokens": tokens, "heads": heads, "window": window, "parts": parts}
    s, found = works(lengths, real, longest=1024, **given)
    most = latent_tiles.most_parts(1024, tokens, s)
    shape, rng = (len(lengths), tokens, heads, 512), np.random.default_rng(0)
    o = np.full((most, len(lengths), tokens * heads, 512), np.nan, np.float32)
    lse = np.full(o.shape[:3], np.nan, np.float32)
    for work in found:
        if work.is_any:
            at = int(work.part), int(work.b), slice(int(work.first), int(work.first) + 64)
            o[at], lse[at] = rng.normal(size=o[at].shape), rng.normal(size=lse[at].shape) * 3
    out, out_lse = np.zeros(shape, np.float16), np.zeros(shape[:3], np.float32)
    given = [np.asarray(x, np.int32) for x in (lengths, real) if x is not None]
    arrays = [*given, o, lse, out, out_lse]
    shared = latent_join.SHARED if most > 4 else 1
    arrays += [np.zeros(8 * (16 * 32 + 4), np.uint8)] * (shared > 1)
    body = functools.partial(
        latent_join._body,
        [Memory(x.reshape(-1).view(np.uint8)) for x in arrays],
        shape=shape, rows=tokens * heads, parts=most, is_padded=real is not None, dtype="float16",
        s=s,
    )  # fmt: skip
    for b, row in itertools.product(range(len(lengths)), (0, 63, 64, 79)):
        ids = [warp.integer(b * tokens * heads + row)]
        for piece in range(4 if shared > 1 else 1):
            every = [*ids, warp.integer(piece)]
            lanes(lambda every=every: body(every), max(4, shared))
        there = ~np.isnan(lse[:, b, row])
        weights = np.exp(lse[there, b, row].astype(np.float64))
        want = weights @ o[there, b, row] / weights.sum() if there.any() else np.zeros(512)
        got = out[b, row // heads, row % heads]
        got_lse = out_lse[b, row // heads, row % heads]
        if lengths[b] < 0:
            assert np.isnan(got).all()
            assert np.isnan(got_lse)
            continue
        np.testing.assert_allclose(got, want, atol=2e-3)
        want_lse = np.log(weights.sum()) if there.any() else -np.inf
        np.testing.assert_allclose(got_lse, want_lse, atol=1e-5)


def test_registers_suffice():
    for codec in (None, helpers.codec_of("turbo4")):
        attends, copies = latent_kernel.settings(0.1, 1, 1, 16, codec=codec).registers
        # What three warpgroups have when they start.
        assert 2 * attends + copies <= 3 * 168


@pytest.fixture
def lanes_of_latents(monkeypatch):
    """Runs code for lanes_of_latents as one of a warpgroup's warps."""
    prefetched = []
    monkeypatch.setattr(warp, "special", lambda name: warp.thread(), raising=False)
    monkeypatch.setattr(warp, "prefetch", prefetched.append, raising=False)
    monkeypatch.setattr(warp, "half", Half)
    for module in (latent_kernel, latent_tiles):
        monkeypatch.setattr(module, "lane", warp)
    monkeypatch.setattr("pallas_kernels.mosaic.hopper.paged_prompt.expand.lane", warp)

    def run(number, f):
        warp.STATE.number = number
        return f()

    run.prefetched = prefetched
    return run


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("name", ["fp8_e4m3", "turbo4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("page_size", [16, 128])
def test_tiles_are_expanded_where_the_matrix_unit_finds_them(
    lanes_of_latents, name, dtype, page_size
):
    """Latents exactly, but for a factor of each token, by which its rotary part is divided."""
    length = 230
    case = helpers.make(name, (3, length), page_size=page_size)
    *given, rope, tables = (np.asarray(case.arrays[i]) for i in (2, 3, 4, 5))
    rope = rope.astype(dtype)
    given = [given[0], rope, given[1], tables]
    arrays = [Memory(np.ascontiguousarray(x).reshape(-1).view(np.uint8)) for x in given]
    x = types.SimpleNamespace(rope=rope, tables=tables)
    codes = latent_kernel.Codes(x, helpers.codec_of(name), jnp.dtype(dtype).name)
    for tile in range(-(-length // latent_tiles.TILE)):
        slots = [np.zeros(size, np.uint8) for size in (2 * 64 * 256 * 2, 64 * 64 * 2, 64 * 4)]
        numbers = [warp.integer(n) for n in (1, tile, length)]
        for part in range(latent_kernel.SHARES):
            for number in range(4):

                def f(part=part, numbers=numbers, slots=slots):
                    words, factor = codes.loaded(arrays, numbers, part)
                    codes.stored(words, factor, [Memory(slot) for slot in slots], part)

                lanes_of_latents(number, f)
        count = min(64, length - tile * 64)
        unit = slots[2].view(np.float32)[:count, None].astype(np.float64)
        found = unswizzled(slots[0], 2, dtype)[:count] * unit
        np.testing.assert_allclose(found, case.latent[1][tile * 64 :][:count], rtol=1e-6)
        found = unswizzled(slots[1], 1, dtype)[:count] * unit
        want = case.rope[1][tile * 64 :][:count]
        np.testing.assert_allclose(found, want, rtol=2.0**-8, atol=1e-6)


def unswizzled(slot, halves, dtype):
    """A tile of 64 tokens as numbers, of memory in the matrix unit's layout."""
    found = slot.view(np.uint16).reshape(halves, 8, -1, 8, 8, 8)
    found = np.take_along_axis(found, swizzle()[None, None, None, :, :, None], 4)
    return found.transpose(1, 3, 0, 2, 4, 5).reshape(64, -1).view(dtype).astype(np.float64)


@pytest.mark.parametrize("name", helpers.FORMATS)
def test_all_of_a_tile_is_asked_for_once(lanes_of_latents, name):
    case = helpers.make(name, (3, 230), page_size=16)
    latent, _, rope, tables = (np.asarray(x) for x in case.arrays[2:6])
    arrays = [Memory(np.zeros(0 if x is None else x.nbytes, np.uint8)) for x in (latent, rope)]
    arrays.append(Memory(np.ascontiguousarray(tables).reshape(-1).view(np.uint8)))
    x = types.SimpleNamespace(latent=latent, rope=rope, tables=tables)
    numbers = [warp.integer(n) for n in (1, 2, 230)]
    for number in range(4):
        lanes_of_latents(number, lambda: latent_tiles.asked_for(arrays, numbers, x))
    pages = tables[1, 8:12]
    for memory, array in zip(arrays, (latent, rope), strict=False):
        size = array[0].nbytes
        lines = [
            at.offset // 128 for at in lanes_of_latents.prefetched if at.memory is memory.memory
        ]
        want = {page * size // 128 + i for page in pages for i in range(size // 128)}
        assert set(np.concatenate(lines).tolist()) == want


def test_the_rotation_of_latents_lacks_what_their_codec_has():
    """A factor, the root of 2: products with a matrix of powers of two are exact in bfloat16."""
    cache = paged.init_latent_pages(1, 64, kv_dtype="turbo4", seed=3)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 512)), jnp.bfloat16)
    factor = mosaic_latent.codec_of(cache).unit / (polar.integer_centroids(4)[2] / 512**0.5)
    for ours, theirs in (
        (mosaic_latent._rotated, polar.rotate),
        (mosaic_latent._unrotated, polar.unrotate),
    ):
        found = ours(x, cache.rotation).astype(jnp.float32) * factor
        np.testing.assert_allclose(found, theirs(x, cache.rotation), rtol=2**-8, atol=1e-3)
