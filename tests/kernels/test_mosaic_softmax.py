"""The prefill kernel's softmax on a CPU: its own arithmetic, on arrays of lanes in place of lanes.

Some blocks of keys through what a warpgroup does with each; in float64 what a product does. The
matrix unit, copies and barriers are checked on a GPU, in `test_gpu_mosaic_attention.py`.
"""

import types

import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import softmax
from tests.grids import pairwise
from tests.oracles import warp
from tests.oracles.fragments import fragments

ROWS, BLOCK, HEAD_DIM = 16, 64, 16
SAS = tj.SAS()
EXPONENTIALS = {
    "exact": softmax.Exponential(),
    "hardware": softmax.Exponential("hardware", SAS.threshold),
    "polynomial": softmax.Exponential("polynomial", SAS.threshold, SAS.coefficients),
    "polynomial, base 2": softmax.Exponential(
        "polynomial", SAS.threshold, tj.SAS(base="2").coefficients, is_base_2=True
    ),
}
# What hides keys, and which positions queries have: the first may see none of a block.
MASKS = {"all": (None, None), "causal": (None, 0), "window": (70, 20)}


@pytest.fixture
def lanes(monkeypatch):
    monkeypatch.setattr(softmax, "lane", warp)
    monkeypatch.setattr(softmax, "fragments", fragments)
    for name in ("Float", "Int"):
        monkeypatch.setattr(softmax, name, getattr(warp, name))
    barrier = types.SimpleNamespace(optimization_barrier=lambda x: x)
    monkeypatch.setattr(softmax, "mgpu", barrier)


def prepared(scores, factors, limits, policy, *extras):
    """As the kernel does it: what is hidden or capped is scaled before."""
    factors = factors if isinstance(factors, tuple) else (factors,)
    if limits is None and policy.soft_cap is None and not extras:
        return scores, factors
    return softmax.seen(scores, factors, limits, policy, *extras), (np.float32(1),)


def by_step(scores, m, l, factors, limits, policy, *extras):
    scores, factors = prepared(scores, factors, limits, policy, *extras)
    weights, m, l, alpha, unit = softmax.step(scores, m, l, factors, policy)
    return weights, m, l, alpha, unit


def ahead(scores, m, l, factors, limits, policy, *extras):
    scores, factors = prepared(scores, factors, limits, policy, *extras)
    top, new, alpha = softmax.maxima(scores, m, factors, policy)
    x = softmax.arguments(scores, new, factors, policy)
    weights, l, unit = softmax.weigh(x, top, new, alpha, l, policy)
    return weights, new, l, alpha, unit


def visible(mask, first, count, length):
    """Float64 oracle's mask ``[16, S]`` of queries from position `first` on."""
    left, right = MASKS[mask]
    query, key = first + np.arange(ROWS)[:, None], np.arange(count)[None, :]
    seen = key < length
    if left is not None:
        seen = seen & (key >= query - left)
    if right is not None:
        seen = seen & (key <= query + right)
    return np.broadcast_to(seen, (ROWS, count))


CASES = pairwise(
    exponential=list(EXPONENTIALS),
    mode=["int8", "int8_fp8", "fp8"],
    seen=[("all", None), ("causal", 3.0), ("window", None)],
    one=[by_step, ahead],
)


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize(("exponential", "mode", "seen", "one"), CASES)
def test_attention_block_by_block(exponential, mode, seen, one):
    """Outputs within what 8-bit weights lose, sums within SAS's error; 0 where nothing is seen."""
    (mask, cap), rng = seen, np.random.default_rng(0)
    blocks, length, first = 3, 150, 60
    scores = rng.integers(-900, 900, (ROWS, blocks * BLOCK))
    values = rng.normal(size=(blocks * BLOCK, HEAD_DIM))
    scale = 2e-3
    e = EXPONENTIALS[exponential]
    left, right = MASKS[mask]
    policy = softmax.Policy(e, mode == "int8", left, right, cap)
    stored = scores.astype(np.float32 if mode == "fp8" else np.int32)
    factor = np.float32(scale if cap is not None else scale * e.unit)
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    out = np.zeros((ROWS, HEAD_DIM))
    is_masked = mask != "all"
    if not is_masked:
        length = blocks * BLOCK
    for j in range(blocks):
        span = slice(j * BLOCK, (j + 1) * BLOCK)
        limits = (np.int32(first - j * BLOCK), np.int32(length - j * BLOCK)) if is_masked else None
        weights, m, l, alpha, unit = one(stored[:, span], m, l, factor, limits, policy)
        codes = softmax.pack(weights, policy)
        product = codes @ values[span]
        unit = np.where(unit == 0, 0, unit) if policy.is_int8 else np.ones_like(unit)
        out = out * alpha[:, :1] + product * unit[:, :1]
    rows = 12  # of which the others are padding
    found, lse = softmax.finish(
        out.astype(np.float32), m, l, np.int32(rows), np.float32(1), policy, HEAD_DIM, HEAD_DIM
    )
    x = scores * scale
    x = x if cap is None else cap * np.tanh(x / cap)
    seen = visible(mask, first, blocks * BLOCK, length)
    p = np.where(seen, np.exp(x - x.max(1, keepdims=True)), 0)
    want = p @ values / p.sum(1, keepdims=True)
    want_lse = np.log(p.sum(1)) + x.max(1)
    error = np.linalg.norm(found[:rows] - want[:rows]) / np.linalg.norm(want[:rows])
    # e4m3 has 4 bits, int8 half a unit of 119 in a block's largest weight.
    assert error < (0.04 if not policy.is_int8 else 0.02)
    exact = 2e-5 if exponential == "exact" else 2e-3
    if cap is not None and not policy.is_int8:
        exact += cap * 2**-11  # of the hardware's tanh
    np.testing.assert_allclose(lse[:rows, 0], want_lse[:rows], rtol=0, atol=exact)
    assert (found[rows:] == 0).all()
    assert (lse[rows:] == -np.inf).all()


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("one", [by_step, ahead])
def test_halves_of_a_tile_with_scales_of_their_own(mask, cap, one):
    """The same as one scale for all, of scores that are scaled before."""
    rng = np.random.default_rng(1)
    left, right = MASKS[mask]
    policy = softmax.Policy(softmax.Exponential(), False, left, right, cap)
    scores = rng.integers(-900, 900, (ROWS, 2 * BLOCK)).astype(np.int32)
    scaled = scores * np.repeat(np.int32([1, 4]), BLOCK)
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    limits = None if mask == "all" else (np.int32(60), np.int32(100))
    factor = np.float32(1e-3)
    got = one(scores, m, l, (factor, 4 * factor), limits, policy)
    want = one(scaled, m, l, factor, limits, policy)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # A NaN of one half marks all rows that see it, and no maximum.
    weights, top, sums, *_ = one(scores, m, l, (np.float32(np.nan), factor), limits, policy)
    assert not np.isnan(top).any()
    assert np.isnan(sums).any(1).all()
    assert not np.isnan(weights[:, BLOCK:]).any()


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("one", [by_step, ahead])
@pytest.mark.parametrize("is_int8", [True, False])
def test_rows_that_see_nothing(one, is_int8):
    policy = softmax.Policy(softmax.Exponential(), is_int8, None, 0, None)
    scores = np.full((ROWS, BLOCK), 7, np.int32)
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    # The first query that sees a key is query 5.
    limits = (np.int32(-5), np.int32(BLOCK))
    weights, m, l, _, unit = one(scores, m, l, np.float32(0.1), limits, policy)
    codes = softmax.pack(weights, policy)
    if is_int8:
        assert (unit[:5] == 0).all()
    else:
        assert (codes[:5] == 0).all()
    assert (l[:5] == 0).all()
    out, lse = softmax.finish(
        np.ones((ROWS, HEAD_DIM), np.float32),
        m,
        l,
        np.int32(ROWS),
        np.float32(1),
        policy,
        HEAD_DIM,
        HEAD_DIM,
    )
    assert (out[:5] == 0).all()
    assert (out[5:] != 0).all()
    assert (lse[:5] == -np.inf).all()


@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("one", [by_step, ahead])
def test_nan_stays_in_its_row(one):
    """The sum of the row is NaN, and only that of this row."""
    policy = softmax.Policy(softmax.Exponential(), False, None, None, None)
    scores = np.zeros((ROWS, BLOCK), np.float32)
    scores[3, 17] = np.nan
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    *_, l, _, _ = one(scores, m, l, np.float32(1), None, policy)
    assert np.isnan(l).any(1).tolist() == [row == 3 for row in range(ROWS)]


@pytest.mark.quick(44, slow=0)
@pytest.mark.usefixtures("lanes")
@pytest.mark.parametrize("one", [by_step, ahead])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("hides", ["segments", "bounds", "window and bounds", None])
@pytest.mark.parametrize("has_slope", [True, False])
@pytest.mark.parametrize("sink", [None, -1.0, 60.0, -np.inf])
def test_segments_bounds_slopes_and_sinks(one, cap, hides, has_slope, sink):
    """Against float64, with a row that sees nothing but the sink, and one of padding."""
    rng = np.random.default_rng(2)
    sees = (25, 15) if hides == "window and bounds" else (None, None)
    policy = softmax.Policy(softmax.Exponential(), True, *sees, cap)
    blocks, first, scale, slope = 2, 40, 2e-3, 0.125
    size = blocks * BLOCK
    scores = rng.integers(-900, 900, (ROWS, size)).astype(np.int32)
    values = rng.normal(size=(size, HEAD_DIM))
    own = np.sort(rng.integers(0, 4, ROWS)).astype(np.int32)
    own[3] = 9
    start, end = np.sort(rng.integers(0, size, (2, ROWS)), axis=0).astype(np.int32)
    start[3] = end[3]
    start[:2], end[:2] = ((0, 20), (BLOCK, size)) if sees[0] is None else ((0, 20), (70, size))
    others = np.sort(rng.integers(0, 4, size)).astype(np.int32)
    factor = np.float32(scale if cap is not None else scale * policy.exponential.unit)
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    out = np.zeros((ROWS, HEAD_DIM))
    for j in range(blocks):
        span = slice(j * BLOCK, (j + 1) * BLOCK)
        relative = np.int32(first - j * BLOCK)
        ids = (np.repeat(own[:, None], 4, 1), others[span]) if hides == "segments" else None
        of_rows = None
        if hides and hides.endswith("bounds"):
            of_rows = *(np.repeat(x[:, None], 4, 1) for x in (start, end)), np.int32(j * BLOCK)
        linear = (np.float32(slope * policy.exponential.unit), relative) if has_slope else None
        limits = (relative, np.int32(size - j * BLOCK))
        given = (scores[:, span], m, l, factor, limits, policy, ids, linear, of_rows)
        weights, m, l, alpha, unit = one(*given)
        product = softmax.pack(weights, policy) @ values[span]
        out = out * alpha[:, :1] + product * np.where(unit == 0, 0, unit)[:, :1]
    last, sizes = np.int32(ROWS - 1), (HEAD_DIM, HEAD_DIM)
    given = () if sink is None else (np.float32(sink),)
    found, lse = softmax.finish(
        out.astype(np.float32), m, l, last, np.float32(1), policy, *sizes, *given
    )
    x = scores * scale
    x = x if cap is None else cap * np.tanh(x / cap)
    if has_slope:
        distance = first + np.arange(ROWS)[:, None] - np.arange(size)[None]
        x = x - slope * np.abs(distance)
    row, key = first + np.arange(ROWS)[:, None], np.arange(size)[None]
    if hides == "segments":
        x = np.where(own[:, None] == others[None], x, -np.inf)
    elif hides:
        x = np.where((key >= start[:, None]) & (key < end[:, None]), x, -np.inf)
    if sees[0] is not None:
        x = np.where((key >= row - sees[0]) & (key <= row + sees[1]), x, -np.inf)
    want_lse = np.logaddexp.reduce(x, axis=1)
    if sink is not None:
        want_lse = np.logaddexp(want_lse, sink)
    want_lse[-1] = -np.inf
    weights = np.exp(x - np.where(np.isinf(want_lse), 0, want_lse)[:, None])
    weights[-1] = 0
    np.testing.assert_allclose(lse[:, 0], want_lse, rtol=1e-6, atol=2e-5)
    error = np.linalg.norm(found - weights @ values, axis=1)
    assert (error <= 0.03 * np.linalg.norm(weights @ values, axis=1) + 1e-7).all()
    if hides:
        assert (found[3] == 0).all()
    assert (found[-1] == 0).all()
