"""The Triton kernels of `pooled_attention`, interpreted: gradients, with outputs, and launches.

Tolerances are those of `pooled_helpers`: twice the error of plain float32 arithmetic on the same
rounded keys and values, the rounding of the result, and a few units in the last place. Weights and
their gradients are rounded to 16-bit operands once, which that of the result covers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import (
    _pooled_common,
    pooled_forward,
    pooled_pool,
    pooled_query_gradient,
)
from tests.attention.pooled_helpers import (
    CASES,
    EPS,
    LEVELS,
    Case,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain,
    plain_gradient,
    worst,
)
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax._device import interpret_kernels
from turbojax.attention.pooled import lists, pooling, reference, triton
from turbojax.attention.pooled.operands import Backward
from turbojax.attention.pooled.static import PooledOptions
from turbojax.numerics import rows as rows_of


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


def static_of(case, head_dim=16):
    found = options(case, head_dim)
    return PooledOptions(
        case.is_causal, scale=found["scale"], block_q=case.block_q, block_kv=case.block_kv
    )


def lengths_of(case):
    lengths = (case.query_lengths, case.key_lengths)
    return [None if x is None else jnp.asarray(x, jnp.int32) for x in lengths]


# Interpreted kernels are large programs that run for a moment: they are compiled in haste.
HASTE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=HASTE)


@functools.partial(jit, static_argnums=0)
def _run(static, q, k, v, levels, lengths, cotangents):
    results = triton.attention(q, k, v, levels, *lengths, options=static)
    if not cotangents:
        return results
    arrays = Backward(q, k, v, levels, *lengths, *results, *cotangents)
    return results, triton.gradient(arrays, options=static)


def run(case, q, k, v, levels, *cotangents):
    """Output and residual, and with cotangents the gradients too."""
    static = static_of(case, q.shape[-1])
    return _run(static, q, k, v, levels, lengths_of(case), cotangents)


def check(case, dtype=jnp.float32, head_dim=16, with_gradient=True):
    arrays = operands(case, dtype, head_dim)
    *inputs, levels = arrays[:4]
    known = options(case, head_dim)
    if with_gradient:
        results, gradients = run(case, *arrays)
        want = oracle_gradient(*arrays, **known)
        for got, x in zip(gradients, inputs, strict=True):
            assert (got.shape, got.dtype) == (x.shape, dtype)
        assert_as_good_as_plain(gradients, want, plain_gradient(*arrays, **known))
    else:
        results = run(case, *inputs, levels)
    assert (results[0].shape, results[0].dtype) == (inputs[0].shape, dtype)
    assert (results[1].shape, results[1].dtype) == (inputs[0].shape[:3], jnp.float32)
    want = oracle(*inputs, levels, **known)
    assert_as_good_as_plain(results, want, plain(*inputs, levels, **known))


# Programs compile for ten seconds, so slow tests share one: ends of sizes, of blocks and of groups.
RAGGED = Case(203, 71, block_q=64, block_kv=32, is_causal=True, scale=-0.4)


# All levels at once are in `test_equals_the_oracle`.
@pytest.mark.fuzz
@pytest.mark.parametrize("level", [8, 2, 0])
def test_each_level_causal_with_a_partial_group(level):
    check(dataclasses.replace(RAGGED, probabilities=CASES[f"level {level}"].probabilities))


# The first is the program of the tests around.
@pytest.mark.quick(first=1, slow=0)
@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "with_gradient"),
    [
        ("both lengths, causal", jnp.float32, 16, True),
        ("mixture, causal", jnp.bfloat16, 64, False),
    ],
)
def test_equals_the_oracle(name, dtype, head_dim, with_gradient):
    check(CASES[name], dtype, head_dim, with_gradient)


@pytest.mark.slow
def test_equals_the_reference():
    arrays = operands(RAGGED)
    static, lengths = static_of(RAGGED), lengths_of(RAGGED)
    results, gradients = run(RAGGED, *arrays)
    want = reference.attention(*arrays[:4], *lengths, options=static)
    given = Backward(*arrays[:4], *lengths, *want, *arrays[4:])
    want_gradients = reference.gradient(given, options=static)
    for got, expected in zip((*results, *gradients), (*want, *want_gradients), strict=True):
        finite = np.where(np.isfinite(expected), expected, 0)
        assert worst(got, expected) <= 64 * EPS * max(np.abs(finite).max(), 1)


@pytest.mark.fuzz
def test_levels_shared_by_sequences_of_different_lengths():
    lengths = {"query_lengths": (90, 33), "key_lengths": (77, 110)}
    check(dataclasses.replace(CASES["one level array"], **lengths), jnp.float16, 80)


@pytest.mark.fuzz
@pytest.mark.parametrize(("tile", "tile_kv"), [(64, 128), (16, 16)])
def test_launches_agree(tile, tile_kv):
    """Tiles that hold part of a block, and several."""
    q, k, v, levels, d_out, d_residual = operands(RAGGED)
    static, tokens, size = static_of(RAGGED), RAGGED.tokens, RAGGED.size
    results, gradients = run(RAGGED, q, k, v, levels, d_out, d_residual)
    settings = _pooled_common.Settings(
        block_q=static.block_q,
        block_kv=static.block_kv,
        scale=static.scale,
        is_causal=static.is_causal,
        tile=tile,
        tile_kv=tile_kv,
        num_warps=4,
        num_stages=2,
        interpret=True,
    )
    whole = [jnp.full(RAGGED.batch, count, jnp.int32) for count in (tokens, size)]
    found = _pooled_common.Lists(*lists.by_query(levels, (tokens, size), (None, None), static))

    @jit
    def launch(q, k, v):
        with interpret_kernels():
            sides = [triton._side(x, whole[1]) for x in (k, v)]
        out, residual = pooled_forward.forward(q, *sides, found, *whole, settings)
        rows = rows_of.gradient_rows(out, residual, d_out, d_residual, tokens)
        queries = _pooled_common.Queries(q, *rows)
        d_q = pooled_query_gradient.query_gradient(queries, *sides, found, *whole, settings)
        return out, residual, d_q

    for got, want in zip(launch(q, k, v), (*results, gradients[0]), strict=True):
        finite = np.where(np.isfinite(want), want, 0)
        assert worst(got, want) <= 32 * EPS * np.abs(finite).max()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_pooling_and_its_adjoint(dtype):
    """Sums of at most eight numbers in another order, rounded once to the dtype."""
    length = jnp.array([101, 45, 0], jnp.int32)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 101, 2, 48)), dtype)
    there = (jnp.arange(101)[None] < length[:, None])[..., None, None]
    spoiled = jnp.where(there, x, jnp.nan)
    eps = float(jnp.finfo(dtype).eps)
    apart = functools.partial(pooled_pool.pool, multiple=64, interpret=True)
    apart = jit(apart)(spoiled, length)
    together = jit(functools.partial(pooled_pool.pool_together, interpret=True))(spoiled, length)
    offset = 0
    for level, pooled in zip(LEVELS[1:], apart, strict=True):
        want = jnp.swapaxes(pooling.pool(x, length, level), 1, 2)
        groups = want.shape[2]
        assert pooled.shape == (3, 2, 128 // level, 48)
        assert worst(pooled[:, :, :groups], want) <= 8 * EPS + eps * float(jnp.abs(want).max())
        assert not np.asarray(pooled[:, :, groups:]).any()
        np.testing.assert_array_equal(pooled[:, :, :groups], together[:, :, offset:][:, :, :groups])
        offset += groups
    assert together.shape == (3, 2, offset, 48)


@pytest.mark.slow
def test_padding_changes_nothing():
    """NaN past the ends, and in cotangents of what sees nothing: the same bits, and zeros."""
    case = CASES["both lengths, causal"]
    *arrays, levels, d_out, d_residual = operands(case)
    want = jax.tree.leaves(run(case, *arrays, levels, d_out, d_residual))
    q, k, v, d_out = (
        jnp.where((jnp.arange(x.shape[1])[None] < n[:, None])[..., None, None], x, jnp.nan)
        for x, n in zip((*arrays, d_out), [lengths_of(case)[i] for i in (0, 1, 1, 0)], strict=True)
    )
    blind = np.isneginf(want[1])
    d_residual = jnp.where(blind, jnp.nan, d_residual)
    d_out = jnp.where(blind[..., None], jnp.nan, d_out)
    got = jax.tree.leaves(run(case, q, k, v, levels, d_out, d_residual))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert blind.any()
    assert not np.asarray(got[0])[blind].any()
    assert not np.asarray(got[2])[blind].any()


@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_reaches_the_blocks_that_attend_to_it(name):
    """Every query that sees it; none of a block that skips it."""
    case = CASES["both lengths, causal"]
    *arrays, d_out, d_residual = operands(case)
    inputs = dict(zip(("q", "key", "value", "levels"), arrays, strict=True))
    inputs[name] = inputs[name].at[0, 40, 0, 3].set(jnp.nan)
    # With gradients, which nobody looks at: the program of the tests around.
    (out, _), _ = run(case, *inputs.values(), d_out, d_residual)
    found = np.isnan(out).any(-1)
    seen = np.isnan(oracle(*inputs.values(), **options(case))[0]).any(-1)
    attends = np.asarray(inputs["levels"])[:, :, :, 40 // case.block_kv] != 0  # [B, N, T_r]
    attends = np.repeat(np.swapaxes(attends, 1, 2), case.block_q, axis=1)[:, : case.tokens]
    assert seen.any()
    assert (found | ~seen).all()
    assert (attends | ~found).all()
    assert not found[1].any()
    assert not found[:, :, 2:].any()


def test_nan_in_skipped_blocks_has_no_gradient():
    case = CASES["both lengths, causal"]
    q, k, v, levels, d_out, d_residual = operands(case)
    levels = levels.at[:, :, :, 1].set(0)
    k, v = (x.at[:, 40].set(jnp.nan) for x in (k, v))
    results, gradients = run(case, q, k, v, levels, d_out, d_residual)
    assert np.isfinite(np.asarray(results[0])).all()
    for x in gradients:
        assert np.isfinite(np.asarray(x)).all()
    for x in gradients[1:]:
        assert not np.asarray(x)[:, 32:64].any()


@pytest.mark.optimized
@pytest.mark.fuzz
def test_vmap_scan_and_repetition_give_the_same_bits():
    case = Case(40, 56, batch=2, block_q=16, block_kv=16)
    static = static_of(case)
    q, k, v, levels = operands(case)[:4]

    def one(q, k, v, levels):
        return triton.attention(q, k, v, levels, None, None, options=static)[0]

    want = one(q, k, v, levels)
    np.testing.assert_array_equal(one(q, k, v, levels), want)
    # A scan of a vmap of single sequences.
    singles = tuple(x[:, None, None] for x in (q, k, v, levels))
    _, mapped = jax.lax.scan(lambda c, x: (c, jax.vmap(one)(*x)), None, singles)
    np.testing.assert_array_equal(mapped[:, 0, 0], want)


REFUSED = {
    "block_q=24 must be a power of two from 16 to 256": {"block_q": 24},
    "block_q=512 must be a power of two from 16 to 256": {"block_q": 512},
    "block_kv=8 must be a power of two from 16 to 256": {"block_kv": 8},
    "head_dim=320 must be a multiple of 8 up to 256": {"head_dim": 320},
    "head_dim=100 must be a multiple of 8 up to 256": {"head_dim": 100},
    "40000 blocks of queries must be at most 32768": {"tokens": 640_000},
    "cannot be indexed": {"tokens": 2**19, "heads": 32, "head_dim": 128},
}


def refusal(tokens=64, heads=1, head_dim=64, block_q=16, block_kv=16):
    x = jax.ShapeDtypeStruct((1, tokens, heads, head_dim), jnp.bfloat16)
    shape = (1, 1, -(-tokens // block_q), -(-tokens // block_kv))
    levels = jax.ShapeDtypeStruct(shape, jnp.int8)
    static = PooledOptions(False, scale=0.1, block_q=block_q, block_kv=block_kv)
    return triton.unsupported(query=x, key=x, value=x, levels=levels, options=static)


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    assert refusal() is None
    assert message in refusal(**REFUSED[message])


LOWERED = [
    (jnp.bfloat16, 64, 64, 64, True),
    (jnp.float32, 96, 16, 16, True),
    (jnp.float32, 256, 32, 256, False),
]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("dtype", "head_dim", "block_q", "block_kv", "is_causal"), LOWERED)
def test_lowers_for_cuda(dtype, head_dim, block_q, block_kv, is_causal):
    tokens, size = 400, 500
    q = jax.ShapeDtypeStruct((2, tokens, 4, head_dim), dtype)
    k = jax.ShapeDtypeStruct((2, size, 2, head_dim), dtype)
    residual = jax.ShapeDtypeStruct((2, tokens, 4), jnp.float32)
    shape = (2, 4, -(-tokens // block_q), -(-size // block_kv))
    levels = jax.ShapeDtypeStruct(shape, jnp.int8)
    length = jax.ShapeDtypeStruct((2,), jnp.int32) if is_causal else None
    static = {
        "options": PooledOptions(is_causal, scale=0.1, block_q=block_q, block_kv=block_kv),
    }
    arrays = (q, k, k, levels, length, length)
    forward = lower_for_cuda(functools.partial(triton.attention, **static), *arrays)
    backward = functools.partial(triton.gradient, **static)
    backward = lower_for_cuda(backward, Backward(*arrays, q, residual, q, residual))
    assert "turbojax_pooled_forward" in forward
    for name in ("pool", "pooled_query_gradient", "pooled_key_gradient"):
        assert f"turbojax_{name}" in backward


@pytest.mark.slow
def test_levels_are_data():
    """Other levels run the same compiled kernels."""
    *arrays, levels, d_out, d_residual = operands(RAGGED)
    first = run(RAGGED, *arrays, levels, d_out, d_residual)
    sizes = triton.attention._cache_size(), triton.gradient._cache_size()
    other = levels.at[:, :, 0].set(1)
    second = run(RAGGED, *arrays, other, d_out, d_residual)
    assert (triton.attention._cache_size(), triton.gradient._cache_size()) == sizes
    assert not np.array_equal(first[0][0], second[0][0])
