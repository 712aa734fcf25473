"""The gradient of `turbo_attention` by Mosaic GPU, without a GPU: refusals, tiles, lowering.

Of a tile what lanes compute, on arrays of lanes; the rest is checked on a GPU, in
`test_gpu_mosaic_gradient.py`.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import bias as biases
from pallas_kernels.mosaic.hopper.gradient import elementwise, tiles
from tests.attention.attention_helpers import EXACT, MODES
from tests.grids import pairwise
from tests.kernels import test_mosaic_bias as lanes_of_biases
from tests.kernels.kernel_helpers import OFFSETS, SEGMENTS, lower_for_cuda, modifiers_of
from tests.oracles.fragments import accumulator
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.attention.turbo import gradient, mosaic_gradient
from turbojax.attention.turbo.operands import Backward

SEES_ALL = Options(False, scale=0.1)
FEATURES = {
    "plain": SEES_ALL,
    "causal": Options(True, scale=0.1),
    "window": Options(False, (100, 30), scale=0.1),
    "causal window": Options(True, (64, 64), scale=0.1),
    "soft cap": Options(True, scale=0.1, logits_soft_cap=5.0),
    "negative scale": Options(False, scale=-0.2),
}


def refusal(config, head_dim=64, dtype=jnp.bfloat16, modifiers=()):
    x = jax.ShapeDtypeStruct((1, 8, 2, head_dim), dtype)
    given = {"options": SEES_ALL, "modifiers": modifiers_of(modifiers, 1, 8, 8, 2)}
    return mosaic_gradient.unsupported(query=x, key=x, value=x, config=config, **given)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("mode", "head_dim"),
    [(m, n) for m in MODES for n in (8, 64, 80, 128, 200, 256) if m != "float" or n <= 128],
)
def test_hopper_runs_it(mode, head_dim):
    assert refusal(tj.TurboConfig(mode=mode, softmax=EXACT), head_dim) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "head_dim", "dtype", "words"),
    [
        ({"block_q": 32}, 64, jnp.bfloat16, "config.block_q=32 must be a multiple of 64"),
        (
            {"block_kv": 32, "buffer_size": 64},
            64,
            jnp.bfloat16,
            "config.block_kv=32 must be a multiple of 64",
        ),
        ({}, 264, jnp.bfloat16, "head_dim=264 must be at most 256"),
        (
            {"mode": "float"},
            256,
            jnp.bfloat16,
            "head_dim=256 must be at most 128 where config.mode='float'",
        ),
        ({"mode": "float"}, 64, jnp.float32, "config.mode='float' in float32 must be an 8-bit"),
    ],
)
def test_refusals_in_words(config, head_dim, dtype, words):
    assert words in refusal(tj.TurboConfig(**config), head_dim, dtype)


@pytest.mark.usefixtures("hopper")
def test_which_modifiers_it_has():
    every = (*OFFSETS, *SEGMENTS, "alibi_slopes", "bias", "sinks")
    assert refusal(tj.TurboConfig(), modifiers=every) is None
    assert refusal(tj.TurboConfig(), 256, modifiers=("bias",)) is None
    words = "head_dim=256 must be at most 128 with segments, or gradient='8bit'"
    assert refusal(tj.TurboConfig(), 256, modifiers=SEGMENTS) == words
    assert refusal(tj.TurboConfig(gradient="8bit"), 256, modifiers=SEGMENTS) is None
    others = ("key_bounds", *OFFSETS, "alibi_slopes", "sinks")
    assert refusal(tj.TurboConfig(), modifiers=others) is None
    assert refusal(tj.TurboConfig(gradient="8bit"), 256, modifiers=others) is None
    words = "head_dim=256 must be at most 128 with key_bounds, or gradient='8bit'"
    assert refusal(tj.TurboConfig(), 256, modifiers=others) == words
    assert "no key_bounds beside segments" in refusal(tj.TurboConfig(), modifiers=(*every, *others))


def test_it_needs_hopper(monkeypatch):
    for capability in (None, 8.9, 10.0):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda c=capability: c)
        assert "needs an NVIDIA GPU of compute capability 9.0" in refusal(tj.TurboConfig())
    with _device.interpret_kernels():
        assert refusal(tj.TurboConfig()) == "its kernel cannot be interpreted"


@pytest.mark.usefixtures("hopper")
def test_which_gradient_runs():
    """The forward pass' name where the gradient has it; else the fastest that can."""
    x = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    arguments = {"query": x, "key": x, "value": x, "options": SEES_ALL}
    for asked, runs in {
        None: "mosaic_gpu",
        "mosaic_gpu": "mosaic_gpu",
        "triton": "mosaic_gpu",
        "jax_triton": "mosaic_gpu",
        "xla": "xla",
    }.items():
        name = gradient.GRADIENT.beside(asked)
        chosen = gradient.GRADIENT.select(name, config=tj.TurboConfig(), **arguments)
        assert chosen.name == runs
    config = tj.TurboConfig(block_q=32)
    assert gradient.GRADIENT.select(None, config=config, **arguments).name == "xla"


LOWERED = pairwise(
    feature=list(FEATURES),
    rounding=["float", "8bit"],
    head_dim=[128, 64, 8, 80, 256],
    tokens=[100, 1, 7, 128, 300],
    mode=list(MODES),
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
    is_ragged=[True, False],
    block_kv=[64, 128],
)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("feature", "rounding", "head_dim", "tokens", "mode", "dtype", "is_ragged", "block_kv"),
    LOWERED[::2],
)
def test_it_lowers(feature, rounding, head_dim, tokens, mode, dtype, is_ragged, block_kv):
    """Each option, mode, dtype, head dim, block and number of queries, many in pairs."""
    if mode == "float" and (head_dim > 128 or dtype == jnp.float32):
        mode = "int8"
    if mode == "float":
        rounding = "float"
    config = tj.TurboConfig(
        mode=mode,
        softmax=EXACT,
        gradient=rounding,
        block_q=128,
        block_kv=block_kv,
        buffer_size=block_kv,
    )
    run = functools.partial(
        mosaic_gradient.gradient, config=config, options=FEATURES[feature], is_ragged=is_ragged
    )
    query, key = (
        jax.ShapeDtypeStruct((2, n, h, head_dim), dtype) for n, h in ((tokens, 4), (150, 2))
    )
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    rows = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    arrays = (query, key, key, lengths, lengths, query, rows, query, rows)
    assert "mosaic_gpu" in lower_for_cuda(run, Backward(*arrays))


MODIFIERS = pairwise(
    modifiers=[
        SEGMENTS,
        (*SEGMENTS, *OFFSETS),
        (*SEGMENTS, "sinks"),
        OFFSETS,
        ("sinks",),
        (*SEGMENTS, "alibi_slopes"),
        ("alibi_slopes", "query_offset"),
        ("key_bounds",),
        ("key_bounds", *OFFSETS, "alibi_slopes", "sinks"),
        ("bias",),
        (*SEGMENTS, *OFFSETS, "bias", "alibi_slopes", "sinks"),
    ],
    feature=list(FEATURES),
    rounding=["float", "8bit"],
    head_dim=[(128, 128), (64, 64), (192, 128), (80, 40)],
    mode=list(MODES),
    dtypes=[(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float32), (jnp.float32, jnp.float32)],
    is_ragged=[True, False],
)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("modifiers", "feature", "rounding", "head_dim", "mode", "dtypes", "is_ragged"), MODIFIERS[::2]
)
def test_modifiers_lower(modifiers, feature, rounding, head_dim, mode, dtypes, is_ragged):
    """Each of them, with all else, in pairs."""
    dtype, out_dtype = dtypes
    if head_dim[0] > 128 and {SEGMENTS[0], "key_bounds"} & set(modifiers):
        rounding = "8bit"  # what is refused otherwise
    if mode == "float" and (head_dim[0] > 128 or dtype == jnp.float32 or rounding == "8bit"):
        mode = "int8"
    config = tj.TurboConfig(mode=mode, softmax=EXACT, gradient=rounding)
    run = functools.partial(
        mosaic_gradient.gradient, config=config, options=FEATURES[feature], is_ragged=is_ragged
    )

    def of(tokens, heads, channels, dtype=dtype):
        return jax.ShapeDtypeStruct((2, tokens, heads, channels), dtype)

    channels, of_values = head_dim
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    rows = jax.ShapeDtypeStruct((2, 300, 4), jnp.float32)
    arrays = (of(300, 4, channels), of(150, 2, channels), of(150, 2, of_values), lengths, lengths)
    out = of(300, 4, of_values, out_dtype)
    given = modifiers_of(modifiers, 2, 300, 150, 4)
    arrays = Backward(*arrays, out, rows, out, rows)
    text = lower_for_cuda(run, arrays, modifiers=given)
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("has_order", [True, False])
def test_every_tile_of_every_row_has_a_number(has_order):
    batch, rows, count = 2, 3, 5
    order = jnp.asarray([7, 3, 9, 0, 1, 2, 8, 4, 6, 5], jnp.int32) if has_order else None
    total = batch * rows * tiles.numbers(128 * count, order)
    got = [tiles.place_of(jnp.int32(n), count, order, rows) for n in range(total)]
    seen = sorted((int(row), int(tile)) for row, tile in got if tile < count)
    assert seen == [(row, tile) for row in range(batch * rows) for tile in range(count)]
    if has_order:
        assert [(int(r), int(t)) for r, t in got[:4]] == [(3, 2), (4, 2), (5, 2), (0, 3)]


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("before", "after"), [(None, 0), (None, None), (100, 0), (30, 70)])
@pytest.mark.parametrize("length", [1, 300, 512])
def test_steps_hold_all_keys_that_are_seen(size, before, after, length):
    """The outer ones all that some query sees, the inner ones none that one does not see."""
    first, count = 256, 128
    positions, keys = np.arange(first, first + count)[:, None], np.arange(512)[None]
    seen = keys < length
    seen = seen & (keys <= positions + after) if after is not None else seen
    seen = seen & (keys >= positions - before) if before is not None else seen
    seen = np.broadcast_to(seen, (count, 512))
    begin, inner, outer, end = (
        size * int(x)
        for x in tiles.span(jnp.int32(first), count, jnp.int32(length), before, after, size=size)
    )
    assert begin <= inner <= outer <= end
    assert not seen[:, :begin].any()
    assert not seen[:, end:].any()
    assert seen[:, inner:outer].all()


@pytest.mark.parametrize("mode", ["fp8", "int8_fp8", "float"])
def test_which_launches_have_wide_slots(mode):
    """Those of plain scores, with room for two slots of 128 keys."""
    launch = functools.partial(mosaic_gradient.default_launch, config=tj.TurboConfig(mode=mode))
    assert launch(128).is_wide
    assert launch(128).queries == 2
    assert not launch(128, is_plain=False).is_wide
    assert not launch(128, changes_scores=True).is_wide
    assert not launch(256).is_wide


def test_nan_of_a_query_that_sees_no_key_does_not_reach_the_kernels():
    """By itself, or with a sink, which is its log-sum-exp then."""
    sinks = jnp.array([0.5, -jnp.inf])
    residual = jnp.array([[[1.0, 2.0], [0.5, -jnp.inf]]])
    out = jnp.array([[[1.0, 1.0], [0.0, 0.0]]])[..., None].astype(jnp.bfloat16)
    d_out = jnp.array([[[3.0, 4.0], [jnp.nan, jnp.nan]]])[..., None].astype(jnp.bfloat16)
    clean = mosaic_gradient._of_seeing(d_out, out, residual, ScoreModifiers(sinks=sinks))
    assert clean[0, :, :, 0].tolist() == [[3, 4], [0, 0]]
    assert clean.dtype == d_out.dtype
    clean = mosaic_gradient._of_seeing(d_out, out, residual, NO_MODIFIERS)
    assert bool(jnp.isnan(clean[0, 1, 0, 0]))
    assert float(clean[0, 1, 1, 0]) == 0


# Tiles -------------------------------------------------------------------------------------------


HIDDEN = [
    (left, right, cap, slope, hides)
    for left, right, cap, slope in (
        (None, 0, None, 0.1), (20, 5, 3.0, None), (7, None, None, None), (None, None, 2.0, 0.3),
    )
    for hides in ("segments", "bounds")
]  # fmt: skip
HIDDEN += [
    (None, None, cap, 0.1, bias)
    for cap in (None, 2.0)
    for bias in (("full", "bfloat16"), ("row", "float32"))
]


@pytest.mark.parametrize("rows_are_keys", [False, True])
@pytest.mark.parametrize(("left", "right", "cap", "slope", "hides"), HIDDEN)
def test_weights_and_score_gradients(monkeypatch, rows_are_keys, left, right, cap, slope, hides):
    """Of a tile whose pairs segments, bounds or a bias hide, ends and a window, against float64.

    NaN under a bias of -inf reaches nothing.
    """
    lanes_of_biases.patch(monkeypatch, accumulator)
    rng, shape = np.random.default_rng(0), (16, 64)
    has_bias = isinstance(hides, tuple)
    distance, stop, factor = -56 if has_bias else 9, 50, 0.4
    scores, products = (rng.normal(size=shape).astype(np.float32) * 3 for _ in range(2))
    ids = [rng.integers(0, 2, n) for n in shape]
    queries = shape[rows_are_keys]
    lse, delta = (rng.normal(size=queries).astype(np.float32) for _ in range(2))

    def of_rows(x):  # once for each of a row's lanes
        return np.repeat(x[:, None], 4, axis=1)

    of_queries = [x if rows_are_keys else of_rows(x) for x in (lse, delta)]
    of_tile = np.int32(distance), np.int32(stop)
    limits = *of_tile, of_rows(ids[0]), ids[1]
    first = 70  # the tile's first key
    starts = first + rng.integers(-20, 40, queries)
    ends = starts + rng.integers(0, 60, queries)
    bias, words, static_bias = 0.0, (), None
    if hides == "bounds":
        own = [x if rows_are_keys else of_rows(x) for x in (starts, ends)]
        limits = *of_tile, *own, np.int32(first)
    if has_bias:
        limits, query, key = of_tile, 8, 64
        x = lanes_of_biases.a_bias(*hides)
        bias = lanes_of_biases.of_pairs(x, query, key, *(shape[::-1] if rows_are_keys else shape))
        bias = bias.T if rows_are_keys else bias
        scores[np.isneginf(bias)] = products[np.isneginf(bias)] = np.nan
        f = biases._in_pairs
        if rows_are_keys:
            f = biases._of_two_keys if x.shape[2] == 1 else biases._in_columns
        loaded, static_bias = lanes_of_biases.load(f, x, query, key)
        words = (loaded,)
    s = types.SimpleNamespace(left=left, right=right, soft_cap=cap, approximate_tanh=False)
    static = {"dtype": "bfloat16", "rows_are_keys": rows_are_keys, "s": s}
    linear = () if slope is None else (np.float32(slope), np.int32(distance))
    unit = np.float32(factor if cap is not None else factor * np.log2(np.e))
    given = (scores, of_queries[0], unit, *linear, *words, *limits)
    p, *rest = elementwise._weigh(*given, is_linear=bool(linear), bias=static_bias, **static)
    slopes = rest[:1] if cap is not None else []
    given = (p, products, of_queries[1], np.float32(factor), *slopes, *limits)
    d = elementwise._gradients(*given, has_bias=has_bias, **static)
    added = None
    if has_bias and not rows_are_keys:
        before = np.full(shape, 0.25, np.float32)
        of_queries[0][5] = np.inf  # a query that sees nothing
        given = (before, p, products, *of_queries[::-1], np.float32(factor), np.float32(0.5))
        added = elementwise._add_gradients(*given, *limits, s=s)

    row, column = np.indices(shape)
    query, key = (column, row) if rows_are_keys else (row, column)
    query = query + distance
    seen = ids[0][:, None] == ids[1]
    if hides == "bounds":
        start, end = (x if rows_are_keys else x[:, None] for x in (starts, ends))
        seen = (start <= first + key) & (first + key < end)
    elif has_bias:
        seen = ~np.isneginf(bias)
    seen &= column < stop
    seen &= (left is None) | (key >= query - (left or 0))
    seen &= (right is None) | (key <= query + (right or 0))
    assert (0.5 if has_bias else 0) < seen.mean() < (0.9 if has_bias else 0.5)
    lse, delta = (x if rows_are_keys else x[:, None] for x in (lse, delta))
    with np.errstate(all="ignore"):
        x, bend = scores * np.float64(factor), 1.0
        if cap is not None:
            bend, x = 1 - np.tanh(x) ** 2, cap * np.tanh(x)
        x = (x + bias) * np.log2(np.e) - (slope or 0) * np.abs(query - key)
        want = np.where(seen, np.exp2(x - lse), 0)
        whole = np.where(seen, want * (factor * products.astype(np.float64) - delta), 0)
    np.testing.assert_allclose(p, want, rtol=1e-4, atol=1e-6)
    rtol = 2e-4 if has_bias else 1e-4
    np.testing.assert_allclose(d, whole * np.where(seen, bend, 1), rtol=rtol, atol=1e-4)
    if added is not None:  # before the cap's derivative
        whole[5] = 0
        np.testing.assert_allclose(added, 0.25 + 0.5 * whole, rtol=2e-4, atol=1e-4)
