"""The contract of `pooled_attention` forward: the float64 oracle, and what its definition implies.

Float32 results may be as far from the oracle as twice what dense float32 arithmetic is, plus a few
units in the last place. In half precision the pooled keys and values are rounded once, of which
dense arithmetic with the same rounding measures the effect, and the output once more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.pooled_helpers import (
    CASES,
    LEVELS,
    Case,
    api_options,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    plain,
    random_levels,
    worst,
)
from tests.contracts.implementations import interpreted, kernel_is_slow
from turbojax.attention.pooled import reference
from turbojax.attention.pooled.pooling import group_counts, pool, unpool
from turbojax.attention.pooled.static import PooledOptions

BLOCKS = {"block_q": 32, "block_kv": 32}


@functools.partial(jax.jit, static_argnums=(4, 6))
def _attend(q, k, v, levels, static, lengths, implementation):
    options = {"return_residual": True, "implementation": implementation}
    return tj.pooled_attention(q, k, v, levels, **options, **dict(static), **lengths)


def attend(case, q, k, v, levels, implementation="xla"):
    """Output and residual."""
    static, lengths = api_options(case)
    with interpreted(implementation):
        return _attend(q, k, v, levels, static, lengths, implementation)


def check(name, dtype, implementation="xla"):
    case = CASES[name]
    arrays = operands(case, dtype)[:4]
    out, residual = attend(case, *arrays, implementation)
    assert (out.shape, out.dtype) == (arrays[0].shape, dtype)
    assert (residual.shape, residual.dtype) == (out.shape[:3], jnp.float32)
    want = oracle(*arrays, **options(case))
    assert_as_good_as_plain((out, residual), want, plain(*arrays, **options(case)))
    blind = np.isneginf(want[1])
    assert (np.asarray(out)[blind] == 0).all()
    return blind


# A level alone and mixed, tails, causality, lengths, other blocks; then the ends of each.
FAST = (
    "both lengths, causal",
    "level 0",
    "level 8, causal, ragged",
    "mixture",
    "negative scale",
    "odd blocks",
)
SLOW = (
    "level 2",
    "level 4, causal, ragged",
    "tail of seven tokens",
    "causal, other blocks",
    "causal, more keys",
    "causal, more queries",
    "one token",
    "one query",
    "queries' lengths",
    "mostly skipped",
    "smallest blocks",
    "queries' block beyond a tile",
)
# The kernels' gradients and outputs are compared together elsewhere, in more of the cases.
GRID = [
    *(("xla", name) for name in FAST),
    ("triton", "negative scale"),
    ("triton", "causal, larger query blocks"),
    ("triton", "shorter than a block"),
    *(("xla", name) for name in SLOW),
]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("implementation", "name"), GRID)
def test_equals_the_oracle(implementation, name):
    """Every level alone and mixed; tails, causality, groups, lengths, blocks of other sizes."""
    blind = check(name, jnp.float32, implementation)
    assert blind.all() == (name == "level 0")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mixture", jnp.bfloat16),
        ("both lengths, causal", jnp.float16),
        ("tail of seven tokens", jnp.bfloat16),
    ],
)
def test_half_precision(name, dtype):
    check(name, dtype)


def test_float64():
    """The reference is exact where it is given the precision: nothing is off by a little."""
    case = CASES["both lengths, causal"]
    q, k, v, levels, *_ = (np.asarray(x) for x in operands(case))
    lengths = api_options(case)[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    kwargs = options(case)
    static = PooledOptions(**{n: kwargs[n] for n in ("block_q", "block_kv", "scale", "is_causal")})
    with jax.enable_x64(True):
        got = reference.attention(
            *map(jnp.asarray, (q, k, v, levels)),
            lengths.get("query_seq_lengths"),
            lengths.get("key_value_seq_lengths"),
            options=static,
        )
        got = [np.asarray(x) for x in got]
    for x, y in zip(got, oracle(q, k, v, levels, **kwargs), strict=True):
        assert x.dtype == np.float64
        assert worst(x, y) < 1e-13


def test_level_1_everywhere_is_dense_attention():
    """jax's own, causality, grouped queries and lengths included."""
    case = Case(90, 130, heads=4, kv_heads=2, batch=3, is_causal=True)
    q, k, v, levels, *_ = operands(case)
    lengths = {
        "query_seq_lengths": jnp.asarray([90, 33, 90], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([130, 77, 1], jnp.int32),
    }
    got = tj.pooled_attention(q, k, v, jnp.ones_like(levels), is_causal=True, **BLOCKS, **lengths)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, **lengths)
    real = np.arange(90) < np.array([90, 33, 90])[:, None]
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], atol=2e-6)
    assert (np.asarray(got)[~real] == 0).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [91, 89])
def test_pooling_equal_tokens_changes_nothing(size):
    """Tokens that are alike by eights: each level then is dense attention, and so is any mixture.

    Not so if a group at the end, or across the end of a sequence, counted other than its tokens.
    """
    case = Case(40, size, heads=2, kv_heads=2)
    q, k, v, levels, *_ = operands(case)
    k, v = (jnp.repeat(x[:, ::8], 8, axis=1)[:, :size] for x in (k, v))
    lengths = {"key_value_seq_lengths": jnp.asarray([size, 43], jnp.int32)}
    call = jax.jit(functools.partial(tj.pooled_attention, q, k, v, return_residual=True, **BLOCKS))
    want = call(jnp.ones_like(levels), **lengths)
    mixture = jnp.asarray(random_levels(np.random.default_rng(1), levels.shape, (0, *[0.25] * 4)))
    for chosen in (*(jnp.full_like(levels, r) for r in LEVELS), mixture):
        got = call(chosen, **lengths)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=3e-6)


@pytest.mark.slow
def test_levels_of_any_integer_dtype_and_of_numpy():
    case = CASES["grouped queries"]
    q, k, v, levels, *_ = operands(case)
    want = attend(case, q, k, v, levels)
    for dtype in (np.int32, np.uint8):
        got = attend(case, q, k, v, np.asarray(levels, dtype))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_shared_levels_are_those_of_every_head_and_sequence():
    for name in ("one level array", "levels shared by heads", "levels shared by the batch"):
        case = CASES[name]
        q, k, v, levels, *_ = operands(case)
        whole = jnp.broadcast_to(levels, (case.batch, case.heads, *levels.shape[2:]))
        got, want = attend(case, q, k, v, levels), attend(case, q, k, v, whole)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_padding_has_no_say():
    """Whatever stands at or past the lengths."""
    case = CASES["both lengths, causal"]
    q, k, v, levels, *_ = operands(case)
    want = attend(case, q, k, v, levels)
    q, k, v = (np.asarray(x).copy() for x in (q, k, v))
    for b in range(case.batch):
        q[b, case.query_lengths[b] :] = np.nan
        k[b, case.key_lengths[b] :] = np.nan
        v[b, case.key_lengths[b] :] = np.inf
    got = attend(case, *map(jnp.asarray, (q, k, v)), levels)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("of", ["key", "value"])
@pytest.mark.parametrize("name", ["mixture", "mixture, causal"])
def test_a_bad_value_reaches_those_who_see_it_and_nobody_else(name, of):
    case = CASES[name]
    q, k, v, levels, *_ = operands(case)
    bad = np.asarray(k if of == "key" else v).copy()
    bad[0, 77, 1] = np.nan
    k, v = (bad, v) if of == "key" else (k, bad)
    got = attend(case, q, jnp.asarray(k), jnp.asarray(v), levels)[0]
    want, _ = oracle(q, k, v, levels, **options(case))
    reached = np.isnan(want)
    assert 0 < reached.sum() < reached[0].size / 2
    np.testing.assert_array_equal(np.isnan(got), reached)
    assert worst(np.where(reached, 0, np.asarray(got)), np.where(reached, 0, want)) < 2e-6


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("implementation", "dtype", "wrong"),
    [
        ("triton", jnp.int8, 3),
        ("xla", jnp.int8, -1),
        ("xla", jnp.int32, 257),
        ("triton", jnp.uint8, 255),
    ],
)
def test_under_jit_a_wrong_level_makes_its_queries_nan(implementation, dtype, wrong):
    """And no others: not those of another block, head or sequence."""
    case = CASES["queries' lengths"]
    q, k, v, levels, *_ = operands(case)
    levels = np.asarray(levels).astype(dtype)
    want = attend(case, q, k, v, levels, implementation)
    spoiled = levels.copy()
    spoiled[1, 0, 1, 2] = wrong
    got = attend(case, q, k, v, spoiled, implementation)
    first, end = case.block_q, min(2 * case.block_q, case.query_lengths[1])
    assert end < 2 * case.block_q  # so that there is padding in the block, which stays what it is
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x).copy(), np.asarray(y)
        assert np.isnan(x[1, first:end, 0]).all()
        x[1, first:end, 0] = y[1, first:end, 0]
        np.testing.assert_array_equal(x, y)


@kernel_is_slow
def test_two_runs_have_equal_bits(implementation):
    case = CASES["queries' lengths"]  # as above, where the programs are compiled already
    arrays = operands(case)[:4]
    first, second = (attend(case, *arrays, implementation) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.fuzz
@kernel_is_slow
def test_transforms(implementation):
    """vmap over everything at once, and over the levels alone; scan; eager equals jit.

    Kernels are not scanned: each program takes seconds to compile, and a scan calls the same one.
    """
    case = Case(40, 70, heads=2, batch=6, is_causal=True)
    q, k, v, levels, *_ = operands(case)
    lengths = np.asarray([70, 11, 0, 3, 69, 32], np.int32)
    options = {"is_causal": True, "implementation": implementation, **BLOCKS}

    def call(q, k, v, levels, lengths):
        return tj.pooled_attention(q, k, v, levels, key_value_seq_lengths=lengths, **options)

    arrays = tuple(np.asarray(x) for x in (q, k, v, levels, lengths))
    parts = [x.reshape(3, 2, *x.shape[1:]) for x in arrays]
    with interpreted(implementation):
        want = np.asarray(call(*map(jnp.asarray, arrays)))
        np.testing.assert_allclose(jax.jit(call)(*arrays), want, atol=1e-6)
        got = np.asarray(jax.jit(jax.vmap(call))(*parts))
        over_levels = jax.jit(jax.vmap(call, in_axes=(None, None, None, 0, None)))
        # The last levels are those of these sequences, of which the result is known.
        by_levels = over_levels(q[:2], k[:2], v[:2], parts[3][::-1], lengths[:2])
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-6)
    np.testing.assert_allclose(by_levels[2], want[:2], atol=1e-6)
    assert worst(by_levels[0], want[:2]) > 1e-3
    if implementation == "xla":
        scan = jax.jit(lambda *xs: jax.lax.scan(lambda c, x: (c, call(*x)), None, xs)[1])
        np.testing.assert_allclose(scan(*parts), got, atol=1e-6)


def test_other_levels_need_no_compilation():
    case = CASES["mixture"]
    q, k, v, levels, *_ = operands(case)
    traced = []

    @jax.jit
    def step(levels):
        traced.append(levels.shape)

        def loss(q):
            return jnp.sum(tj.pooled_attention(q, k, v, levels, **BLOCKS))

        return jax.grad(loss)(q)

    results = [step(jnp.full_like(levels, r)) for r in LEVELS]
    assert len(traced) == 1
    assert worst(results[0], results[3]) > 1e-3
    tj.pooled_attention(q, k, v, levels, **BLOCKS)
    before = reference.attention._cache_size()
    tj.pooled_attention(q, k, v, jnp.full_like(levels, 8), **BLOCKS)
    assert reference.attention._cache_size() == before


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("size", "level"), [(29, 8), (29, 1), (29, 4), (24, 2)])
def test_pool_and_unpool(size, level):
    """Means of the tokens that are there, and the adjoint: <pool(x), d> = <x, unpool(d)>."""
    rng = np.random.default_rng(2)
    lengths = np.array([size, 13, 0, 1], np.int32)
    x = rng.normal(size=(4, size, 2, 3)).astype(np.float32)
    d = rng.normal(size=(4, -(-size // level), 2, 3)).astype(np.float32)
    want, counts = np.zeros(d.shape), np.zeros(d.shape[:2], int)
    for b, g in np.ndindex(*counts.shape):
        tokens = x[b, g * level : min((g + 1) * level, lengths[b])].astype(np.float64)
        counts[b, g] = len(tokens)
        if len(tokens):
            want[b, g] = tokens.mean(0)
        else:
            d[b, g] = np.nan  # nobody asks
    past = np.arange(size) >= lengths[:, None]
    dirty = jnp.asarray(np.where(past[..., None, None], np.nan, x))
    length = jnp.asarray(lengths)
    np.testing.assert_array_equal(group_counts(length, size, level), counts)
    got = pool(dirty, length, level)
    np.testing.assert_allclose(got, want, atol=1e-6)
    back = np.asarray(unpool(jnp.asarray(d), length, size, level))
    assert back.dtype == np.float32
    assert (back[past] == 0).all()
    sides = (want * np.nan_to_num(d)).sum((1, 2, 3)), (np.where(past[..., None, None], 0, x) * back)
    np.testing.assert_allclose(sides[0], sides[1].sum((1, 2, 3)), atol=1e-5)
    half = pool(dirty.astype(jnp.bfloat16), length, level)
    assert half.dtype == jnp.bfloat16
    assert worst(half, want) <= 2 * 2.0**-8 * np.abs(x).max()
