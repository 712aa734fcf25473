"""Softmax and biases of Hopper's attention kernels without a GPU: what lanes compute; lowering.

Lanes load from arrays of bytes, as they do from global memory; the rest as in
`test_mosaic_gradient.py`.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic import softmax
from pallas_kernels.mosaic.hopper.gradient import bias as of_bias
from pallas_kernels.mosaic.hopper.gradient import elementwise, tiles
from tests.attention.attention_helpers import EXACT
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import warp
from tests.oracles.fragments import accumulator, fragments
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import ScoreModifiers
from turbojax.attention.turbo import mosaic_gpu, mosaic_gradient
from turbojax.attention.turbo.api import ATTENTION
from turbojax.attention.turbo.gradient import GRADIENT
from turbojax.attention.turbo.operands import Backward, bias_of_hopper

BATCH, HEADS, TOKENS, SIZE = 2, 3, 75, 140
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = {
    "full": (BATCH, HEADS, TOKENS, SIZE),
    "one for all": (1, 1, TOKENS, SIZE),
    "one for sequences": (1, HEADS, TOKENS, SIZE),
    "row": (BATCH, HEADS, 1, SIZE),
    "row for heads": (BATCH, 1, 1, SIZE),
}
B, HEAD = 1, 2
CAUSAL = Options(True, scale=0.1)


def a_bias(kind, dtype):
    """Some of it hides keys, some marks rows."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=KINDS[kind]) * 3
    x[rng.random(x.shape) < 0.1] = -np.inf
    return x.astype(DTYPES[dtype])


def of_pairs(x, query, key, rows, columns):
    """The definition: float64 ``[rows, columns]`` from a first query and a first key on."""
    b, n = min(B, x.shape[0] - 1), min(HEAD, x.shape[1] - 1)
    at = np.minimum(query + np.arange(rows), x.shape[2] - 1)
    keys = np.minimum(key + np.arange(columns), x.shape[3] - 1)
    return x[b, n][at][:, keys].astype(np.float64)


def patch(monkeypatch, fake):
    """Lanes in numpy; words that lanes loaded stay a list."""

    class of_words(fake):
        @classmethod
        def scalars(cls, a):
            return a if isinstance(a, list) else super().scalars(a)

    barrier = types.SimpleNamespace(optimization_barrier=lambda x: x)
    for module in (biases, softmax, elementwise):
        monkeypatch.setattr(module, "lane", warp)
        monkeypatch.setattr(module, "fragments", of_words)
        monkeypatch.setattr(module, "mgpu", barrier)
        for name in ("Float", "Int"):
            monkeypatch.setattr(module, name, getattr(warp, name))


def load(f, x, *scalars, **static):
    """What a lane's function of loads finds; and what is static of the bias."""
    kind = biases.Bias(x.shape, x.dtype.name)
    line = int(kind.line(jnp.int32(B), jnp.int32(HEAD)))
    start = warp.Pointer(np.frombuffer(x.tobytes(), np.uint8).copy())
    given = [warp.Int(np.full(32, n)) for n in (line, *scalars)]
    with np.errstate(all="ignore"):
        return f(start, *given, x=kind, **static), kind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_lanes_load(monkeypatch, kind, dtype):
    """Of tiles in the middle, and past the last query and key."""
    x = a_bias(kind, dtype)
    for query, key in ((0, 0), (64, 64), (70, 128)):
        patch(monkeypatch, fragments)
        words, static = load(biases._in_fours, x, query, key, SIZE, tile=64)
        rows = np.asarray(fragments.of_rows(biases.numbers(words, static)))
        seen = np.arange(key, key + 64) < SIZE
        want = of_pairs(x, query, key, 16, 64)
        np.testing.assert_array_equal(rows[:, seen], want[:, seen])
        patch(monkeypatch, accumulator)
        words, static = load(biases._in_pairs, x, query, key)
        rows = np.asarray(accumulator.of_rows(biases.numbers(words, static)))
        np.testing.assert_array_equal(rows[:, seen], want[:, seen])
        f = biases._of_two_keys if static.is_row else biases._in_columns
        words, static = load(f, x, query, key)
        rows = accumulator.of_rows(biases.numbers(words, static, rows_are_keys=True))
        np.testing.assert_array_equal(rows, of_pairs(x, query, key, 64, 16).T)


def test_what_is_not_there_is_not_loaded(monkeypatch):
    patch(monkeypatch, fragments)
    x = a_bias("full", "float32")
    words, static = load(biases._in_fours, x, 0, 0, 0, tile=64)
    assert all(np.isnan(v.value).all() for row in biases.numbers(words, static) for v in row)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("kind", "dtype"), [("full", "bfloat16"), ("row", "float32")])
def test_softmax_of_scores_with_a_bias(monkeypatch, kind, dtype, cap, overlaps):
    """Log-sum-exps against float64; a row that sees nothing; NaN under -inf, and not."""
    patch(monkeypatch, fragments)
    x, rng = a_bias(kind, dtype), np.random.default_rng(3)
    if kind == "full":
        x[B, HEAD, 3] = -np.inf
    policy = softmax.Policy(softmax.Exponential(), False, None, 0, cap)
    scores = rng.normal(size=(16, 128)).astype(np.float32) * 3
    hidden = np.isneginf(of_pairs(x, 0, 0, 16, 128))
    first = 20  # the first query's position: causality hides keys, too
    hidden |= np.arange(128) > first + np.arange(16)[:, None]
    scores[hidden] = np.nan  # whatever hides it
    scores[5, np.flatnonzero(~hidden[5])[1]] = np.nan
    m, l = np.full((16, 4), -np.inf, np.float32), np.zeros((16, 4), np.float32)
    for j in range(2):
        words, static = load(biases._in_fours, x, 0, 64 * j, SIZE, tile=64)
        factor = np.float32(0.5 if cap is not None else 0.5 * policy.exponential.unit)
        limits = np.int32(first - 64 * j), np.int32(SIZE - 64 * j)
        given = (scores[:, 64 * j : 64 * j + 64], (factor,), limits, policy)
        tile, one = softmax.seen(*given, of_pairs=(words, static)), (np.float32(1),)
        if overlaps:
            top, m, alpha = softmax.maxima(tile, m, one, policy)
            arguments = softmax.arguments(tile, m, one, policy)
            _, l, _ = softmax.weigh(arguments, top, m, alpha, l, policy)
        else:
            _, m, l, *_ = softmax.step(tile, m, l, one, policy)
    out = np.ones((16, 16), np.float32)
    found, lse = softmax.finish(out, m, l, np.int32(16), np.float32(1), policy, 16, 16)
    whole = scores * 0.5
    whole = whole if cap is None else cap * np.tanh(whole / cap)
    whole = np.where(hidden, -np.inf, whole + of_pairs(x, 0, 0, 16, 128))
    with np.errstate(invalid="ignore"):
        want = np.logaddexp.reduce(whole, axis=1)
    assert np.isnan(want).sum() == 1
    atol = 3e-5 if cap is None else cap * 2**-11  # the hardware's tanh
    np.testing.assert_allclose(lse[:, 0], want, rtol=1e-6, atol=atol)
    if kind == "full":
        assert want[3] == -np.inf
        assert (found[3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query", "key"), [(64, 64), (70, 128)])
def test_what_lanes_store(monkeypatch, query, key, dtype):
    """Of tiles in the middle, and past the last query and key: there nothing."""
    patch(monkeypatch, accumulator)
    shape = (BATCH, HEADS, TOKENS, SIZE)
    kind = biases.Bias(shape, dtype)
    memory = np.frombuffer(np.full(shape, 9, DTYPES[dtype]).tobytes(), np.uint8).copy()
    values = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    line = int(kind.line(jnp.int32(B), jnp.int32(HEAD)))
    given = [warp.Int(np.full(32, n)) for n in (line, query, key)]
    biases._store(warp.Pointer(memory), accumulator.by_row(values), *given, x=kind)
    got = memory.view(DTYPES[dtype]).reshape(shape)
    want = np.full(shape, 9, DTYPES[dtype])
    rows, columns = min(16, TOKENS - query), min(64, SIZE - key)
    want[B, HEAD, query : query + rows, key : key + columns] = values[:rows, :columns]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", [(2, 4, 300, 8), (1, 4, 300, 8), (1, 1, 300, 8), (2, 1, 1, 300)])
def test_every_pair_is_added_to_one_tile_of_the_gradient(kind):
    """Of all sequences, heads, queries and keys, where their bias is."""
    batch, heads, tokens = 2, 4, 300
    x = dict.fromkeys(tiles.Operands._fields)
    x["q"], x["k"] = jnp.zeros((batch, tokens, heads, 1)), jnp.zeros((batch, 300, 2, 1))
    x["query_lengths"] = x["key_lengths"] = jnp.asarray([300, 200])
    x["bias"] = jnp.zeros(kind)
    s = types.SimpleNamespace(left=None, right=0)
    count = kind[0] * kind[1] * -(-kind[2] // 128) * -(-kind[3] // 128)
    seen = []
    for number in range(count):
        work = of_bias._Work(jnp.int32(number), tiles.Operands(**x), s)
        for i in range(work.steps):
            step = work.step(jnp.int32(i))
            b, head, h, query, key = (int(a) for a in step[:5])
            assert h == head // 2
            assert int(work.key) == key
            assert (int(work.b), int(work.head)) == (b % kind[0], head % kind[1])
            assert kind[2] == 1 or int(work.row) * 128 == query
            length = (300, 200)[b]
            assert bool(step.is_seen) == (query < length and key < length and key <= query + 127)
            seen.append((b, head, query, key))
    keys = range(0, kind[3], 128)
    every = itertools.product(range(batch), range(heads), (0, 128, 256), keys)
    assert sorted(seen) == list(every)


def operands(shape, dtype, head_dim, size):
    """Shapes of queries, keys, values, lengths and a bias."""
    q, k = (jax.ShapeDtypeStruct((2, n, 4, head_dim), jnp.bfloat16) for n in (300, size))
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    return (q, k, k, lengths, lengths), ScoreModifiers(bias=jax.ShapeDtypeStruct(shape, dtype))


LOWERED = [
    ((1, 4, 300, 150), jnp.bfloat16, "fp8", 128, 150),
    ((2, 1, 1, 152), jnp.bfloat16, "int8_fp8", 64, 152),
    ((1, 1, 300, 152), jnp.float32, "int8", 128, 152),
    ((2, 4, 1, 150), jnp.float32, "fp8", 128, 150),
    ((2, 4, 300, 152), jnp.float16, "fp8", 256, 152),
    ((1, 4, 300, 152), jnp.bfloat16, "fp8", 64, 152),
]


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize("case", LOWERED, ids=lambda case: "-".join(map(str, case[0])))
def test_attention_lowers(case):
    """Kinds, dtypes, head dims; keys that are no multiple of 4."""
    shape, dtype, mode, head_dim, size = case
    arrays, modifiers = operands(shape, dtype, head_dim, size)
    static = {"config": tj.TurboConfig(mode=mode, softmax=EXACT), "options": CAUSAL}
    run = functools.partial(mosaic_gpu.attention, **static)
    assert "mosaic_gpu" in lower_for_cuda(
        lambda *x: run(*x[:-1], modifiers=x[-1]), *arrays, modifiers
    )


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("case", LOWERED, ids=lambda case: "-".join(map(str, case[0])))
def test_gradients_lower(case):
    shape, dtype, mode, head_dim, size = case
    arrays, modifiers = operands(shape, dtype, head_dim, size)
    config = tj.TurboConfig(mode=mode, softmax=EXACT, gradient="8bit")
    run = functools.partial(mosaic_gradient.gradient, config=config, options=CAUSAL)
    rows = jax.ShapeDtypeStruct((2, 300, 4), jnp.float32)
    arrays = Backward(*arrays, arrays[0], rows, arrays[0], rows)
    assert "mosaic_gpu" in lower_for_cuda(run, arrays, modifiers=modifiers)


@pytest.mark.parametrize(
    ("block_kv", "rows", "dtype", "overlaps"),
    [
        (64, 300, jnp.bfloat16, True),
        (64, 1, jnp.float32, True),
        (64, 300, jnp.float32, False),
        (128, 300, jnp.bfloat16, False),
    ],
)
def test_launches_of_a_bias(block_kv, rows, dtype, overlaps):
    """Tiles of one block; overlapped where a tile's bias has registers, in turns never."""
    query = jax.ShapeDtypeStruct((2, 300, 4, 128), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 4, rows, 300), dtype)
    config = tj.TurboConfig(block_kv=block_kv, buffer_size=block_kv)
    found = mosaic_gpu.default_launch(query, config, bias=bias)
    assert (found.tile, found.intra_warpgroup_overlap, found.ping_pong) == (
        block_kv,
        overlaps,
        False,
    )


def test_keys_are_padded_only_where_they_must_be():
    x = jnp.ones((1, 2, 3, 8), jnp.bfloat16)
    assert bias_of_hopper(ScoreModifiers(bias=x)) is x
    assert bias_of_hopper(ScoreModifiers(bias=x[..., :5])).shape == (1, 2, 3, 8)
    assert bias_of_hopper(ScoreModifiers()) is None


@pytest.mark.parametrize("registry", [ATTENTION, GRADIENT])
def test_hoppers_kernels_are_the_default(registry, hopper):
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    given = {"query": x, "key": x, "value": x, "options": Options(False, scale=0.1)}
    ends = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    for modifiers in (
        ScoreModifiers(bias=jax.ShapeDtypeStruct((1, 1, 8, 8), jnp.bfloat16)),
        ScoreModifiers(key_bounds=(ends, ends)),
    ):
        chosen = registry.select(None, **given, config=tj.TurboConfig(), modifiers=modifiers)
        assert chosen.name == "mosaic_gpu"


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
def of_softmax(monkeypatch):
    monkeypatch.setattr(softmax, "lane", warp)
    monkeypatch.setattr(softmax, "fragments", fragments)
    for name in ("Float", "Int"):
        monkeypatch.setattr(softmax, name, getattr(warp, name))
    barrier = types.SimpleNamespace(optimization_barrier=lambda x: x)
    monkeypatch.setattr(softmax, "mgpu", barrier)


def prepared(scores, factors, limits, policy, *modifiers):
    """As the kernel does it: what is hidden or capped is scaled before."""
    factors = factors if isinstance(factors, tuple) else (factors,)
    if limits is None and policy.soft_cap is None and not modifiers:
        return scores, factors
    return softmax.seen(scores, factors, limits, policy, *modifiers), (np.float32(1),)


def by_step(scores, m, l, factors, limits, policy, *modifiers):
    scores, factors = prepared(scores, factors, limits, policy, *modifiers)
    weights, m, l, alpha, unit = softmax.step(scores, m, l, factors, policy)
    return weights, m, l, alpha, unit


def overlaps(scores, m, l, factors, limits, policy, *modifiers):
    scores, factors = prepared(scores, factors, limits, policy, *modifiers)
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
    one=[by_step, overlaps],
)


@pytest.mark.usefixtures("of_softmax")
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


@pytest.mark.usefixtures("of_softmax")
@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("one", [by_step, overlaps])
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


@pytest.mark.usefixtures("of_softmax")
@pytest.mark.parametrize("one", [by_step, overlaps])
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


@pytest.mark.usefixtures("of_softmax")
@pytest.mark.parametrize("one", [by_step, overlaps])
def test_nan_stays_in_its_row(one):
    """The sum of the row is NaN, and only that of this row."""
    policy = softmax.Policy(softmax.Exponential(), False, None, None, None)
    scores = np.zeros((ROWS, BLOCK), np.float32)
    scores[3, 17] = np.nan
    m, l = np.full((ROWS, 4), -np.inf, np.float32), np.zeros((ROWS, 4), np.float32)
    *_, l, _, _ = one(scores, m, l, np.float32(1), None, policy)
    assert np.isnan(l).any(1).tolist() == [row == 3 for row in range(ROWS)]


@pytest.mark.quick(44, slow=0)
@pytest.mark.usefixtures("of_softmax")
@pytest.mark.parametrize("one", [by_step, overlaps])
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
