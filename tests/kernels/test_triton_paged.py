"""What is the own of Triton's kernels for pages and KV4: scaling, merging, refusals, lowering.

Numerics that every implementation shares are in `test_paged_attention.py`, `test_kv4_decode.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.triton._merge import merge_parts
from tests.attention.paged_helpers import (
    KV_DTYPES,
    assert_matches_oracle,
    attend,
    equal,
    filled,
    kernel_units,
    normal,
)
from tests.attention.test_kv4_decode import INIT, assert_matches
from tests.attention.test_kv4_decode import filled as kv4_filled
from tests.attention.test_kv4_decode import normal as kv4_normal
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles.paged import code_bits
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.caches.paged import paged_attention, triton
from turbojax.caches.paged import pool as paged
from turbojax.caches.token_scaled import cache as kv4
from turbojax.caches.token_scaled import triton as kv4_triton

run = functools.partial(attend, implementation="triton")


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


def matches(query, cache, tables, lengths, **options):
    units = kernel_units(cache)
    assert_matches_oracle(query, cache, tables, lengths, units=units, call=run, **options)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_queries_of_any_size(scale):
    """They are scaled to fit float16."""
    lengths = (90, 20)
    cache, tables = filled("turbo4", lengths)
    query = normal(5, (2, 1, 4, 32)) * scale
    matches(query.at[0, 0, 1].set(0), cache, tables, lengths, scale=0.2 / scale)


# Merging -----------------------------------------------------------------------------------------


def merged(o, m, l, lengths, query_lengths, **options):
    """`merge_parts` in float64, of all that a row sees, part by part."""
    tokens, heads, kv_heads = options["tokens"], options["heads"], options["kv_heads"]
    out = np.zeros((len(lengths), tokens, heads, o.shape[-1]))
    lse = np.full(out.shape[:3], -np.inf)
    for b, t, h in np.ndindex(lse.shape):
        position = lengths[b] - query_lengths[b] + t
        if t >= query_lengths[b] or position < 0:
            continue
        group = heads // kv_heads
        pair, row = b * kv_heads + h // group, h % group * tokens + t
        first = 0 if options.get("window") is None else max(position - options["window"][0], 0)
        parts = slice(first // 1024, position // 1024 + 1)
        top = m[pair, parts, row].max()
        if top == -np.inf:
            continue
        weight = np.exp2(m[pair, parts, row] - top)
        total = weight @ l[pair, parts, row]
        out[b, t, h] = weight @ o[pair, parts, row] / total
        lse[b, t, h] = top * np.log(2) + np.log(total)
    return out, lse


@pytest.mark.parametrize("window", [None, (3071, 0)], ids=["all", "window"])
def test_merging(window):
    """Groups of parts, one part, none; what a row does not see is NaN and never read.

    The window's first token is the last of a part, or the first of one.
    """
    tokens, heads, kv_heads, dim, parts, rows = 2, 6, 3, 24, 40, 8
    lengths, real = np.asarray((40960, 17000, 900, 0)), np.asarray((2, 1, 2, 0))
    rng = np.random.default_rng(0)
    shape = (4 * kv_heads, parts, rows)
    o, m, l = rng.normal(size=(*shape, dim)), 9 * rng.normal(size=shape), rng.random(shape) + 0.1
    m[:, 15], o[:, 15], l[:, 15] = -np.inf, 0, 0
    for b in range(4):
        pairs = slice(b * kv_heads, (b + 1) * kv_heads)
        ends = [-(-max(lengths[b] - real[b] + t + 1, 0) // 1024) for t in range(tokens)]
        for x in (o, m, l):
            x[pairs, max(ends) :] = np.nan
            x[pairs, :, heads // kv_heads * tokens :] = np.nan
            if window is not None:
                x[pairs, : max(lengths[b] - real[b] - window[0], 0) // 1024] = np.nan
    options = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "window": window}
    options["part"] = 1024
    o, m, l = (x.astype(np.float32) for x in (o, m, l))
    want, want_lse = merged(o, m, l, lengths, real, **options)
    call = jax.jit(functools.partial(merge_parts, interpret=True, **options))
    out, lse = call(o, m, l, lengths.astype(np.int32), real.astype(np.int32))
    # Sums of 40 terms, and weights within a few units of their exponent's size.
    np.testing.assert_allclose(out, want, atol=100 * 2.0**-24 * np.abs(want).max())
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    # Parts that nobody sees change no bit.
    longer = [np.concatenate([x, np.full_like(x, np.nan)], axis=1) for x in (o, m, l)]
    equal(call(*longer, lengths.astype(np.int32), real.astype(np.int32)), (out, lse))


# What it takes -----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("head_dim", [8, 320])
def test_refusals_in_words(head_dim):
    """And what is asked for without a name runs in plain JAX."""
    cache = paged.init_paged_cache(2, 16, 1, head_dim, kv_dtype="auto", dtype=jnp.float32)
    tables, lengths = jnp.zeros((1, 2), jnp.int32), jnp.asarray([9])
    arguments = jnp.zeros((1, 1, 1, head_dim)), cache, tables, lengths
    message = f"head_dim={head_dim} must be between 16 and 256"
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(*arguments, implementation="triton")
    assert paged_attention(*arguments).shape == (1, 1, 1, head_dim)


# Shape of the query, page size, pages of a sequence; and options.
LOWERED = {
    "Llama-3-8B": ((16, 1, 32, 128), 64, 512, {}),
    "small pages, chunk": ((1, 64, 32, 128), 16, 100, {}),
    "one part": ((2, 3, 8, 64), 32, 16, {"window": (100, 0)}),
    "head dim 80, soft cap, window": ((2, 2, 4, 80), 16, 81, {"cap": 5.0, "window": (70, 2)}),
    "head dim 256": ((1, 5, 16, 256), 128, 16, {}),
    "head dim 16": ((3, 8, 16, 16), 16, 3, {}),
}


LOWERED_WITH = pairwise(
    name=list(LOWERED), kv_dtype=KV_DTYPES[::-1], dtype=[jnp.bfloat16, jnp.float32]
)


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(("name", "kv_dtype", "dtype"), LOWERED_WITH[:3] + LOWERED_WITH[3::3])
def test_lowers_for_cuda(name, kv_dtype, dtype):
    (batch, tokens, heads, dim), page_size, pages, given = LOWERED[name]
    cache = jax.eval_shape(
        functools.partial(
            paged.init_paged_cache, 99, page_size, 2, dim, kv_dtype=kv_dtype, dtype=dtype
        )
    )
    call = functools.partial(
        triton.attend,
        options=Options(True, given.get("window"), scale=0.1, logits_soft_cap=given.get("cap")),
    )
    seen = jnp.float32 if code_bits(kv_dtype)[0] else dtype
    text = lower_for_cuda(
        call,
        jax.ShapeDtypeStruct((batch, tokens, heads, dim), seen),
        cache,
        *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch, pages), (batch,), (batch,))),
    )
    assert "turbojax_paged_attention" in text
    assert ("turbojax_paged_merge" in text) == (pages * page_size > 512)


@pytest.mark.slow
def test_splits_do_not_matter(monkeypatch):
    """A program's tiles, few or many: weights are rounded relative to other maxima."""
    query, cache = kv4_normal(11, (2, 1, 4, 32)), kv4_filled("kv4", 2, 32, (200, 90))
    for programs in (1, 8, 1000):
        monkeypatch.setattr(kv4_triton, "_ENOUGH_PROGRAMS", programs)
        kv4_triton.decode.clear_cache()
        call = functools.partial(tj.decode, implementation="triton")
        assert_matches("triton", query, cache, call)
    kv4_triton.decode.clear_cache()


KV4_REFUSED = {
    "rows": ((1, 5, 13, 8), "5 query tokens times 13 heads per KV head must be at most 64"),
    "head dim": ((1, 1, 1, 264), "head_dim=264 must be at most 256"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", KV4_REFUSED)
def test_kv4_refusals_in_words(name):
    """And what is asked for without a name runs in plain JAX."""
    shape, message = KV4_REFUSED[name]
    cache = kv4.init_cache(1, 10, 1, shape[3], dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=message):
        tj.decode(jnp.zeros(shape), cache, implementation="triton")
    assert tj.decode(jnp.zeros(shape), cache).shape == shape


KV4_LOWERED = {
    "Llama-3-8B": ((16, 1, 32, 128), {}),
    "several, window": ((2, 3, 8, 64), {"window": (100, 0)}),
    "head dim 96, soft cap": ((2, 2, 4, 96), {"cap": 5.0}),
    "head dim 96, window, soft cap": ((2, 2, 4, 96), {"window": (100, 0), "cap": 5.0}),
    "head dim 256": ((1, 1, 16, 256), {}),
    "head dim 8": ((3, 8, 16, 8), {}),
    "head dim 8, window": ((3, 8, 16, 8), {"window": (5, 5)}),
}


@pytest.mark.quick(first=4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kv4", "Llama-3-8B"),
        ("kv4", "several, window"),
        ("k8v4", "Llama-3-8B"),
        ("k8v4", "head dim 96, window, soft cap"),
        ("k8v4", "head dim 256"),
        ("k8v4", "head dim 8"),
        pytest.param("kv4", "head dim 96, soft cap", marks=pytest.mark.fuzz),
        pytest.param("kv4", "head dim 256", marks=pytest.mark.fuzz),
        pytest.param("kv4", "head dim 8, window", marks=pytest.mark.fuzz),
    ],
)
def test_kv4_lowers_for_cuda(kind, name):
    (batch, tokens, heads, dim), given = KV4_LOWERED[name]
    cache = jax.eval_shape(lambda: INIT[kind](batch, 4000, 2, dim))
    call = functools.partial(
        kv4_triton.decode,
        options=Options(True, given.get("window"), scale=0.1, logits_soft_cap=given.get("cap")),
    )
    query = jax.ShapeDtypeStruct((batch, tokens, heads, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert "turbojax_kv4_decode" in text
    assert "turbojax_decode_merge" in text
