"""`pooled_attention` through its kernels, compiled, against the oracle and the definition in XLA.

What an implementation refuses is tested on the CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.pooled_helpers import (
    KERNEL_CASES,
    Case,
    api_options,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain,
    plain_gradient,
)
from tests.gpu.gpu_helpers import assert_equal
from turbojax._device import needs_hopper
from turbojax.attention.pooled.api import FORWARD
from turbojax.attention.pooled.static import PooledOptions

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ("triton", "mosaic_gpu")
# What every implementation takes.
LARGE = {
    "mixture": Case(300, 330, heads=4, kv_heads=2, block_q=128, block_kv=64),
    # The last group of level 8 holds one token.
    "causal": Case(385, 385, heads=4, kv_heads=2, block_q=128, block_kv=128, is_causal=True),
    "causal, small blocks": Case(300, 203, block_q=256, block_kv=64, is_causal=True),
    "lengths": Case(
        300,
        333,
        heads=2,
        batch=3,
        block_q=128,
        block_kv=64,
        is_causal=True,
        query_lengths=(300, 167, 0),
        key_lengths=(333, 67, 203),
    ),
    "mostly skipped": Case(
        260, 260, block_q=128, block_kv=64, probabilities=(0.8, 0.05, 0.05, 0.05, 0.05)
    ),
    "shared levels": Case(260, 260, heads=4, block_q=128, block_kv=64, shared="both"),
    "negative scale": Case(200, 200, block_q=128, block_kv=128, scale=-0.2),
    "no keys": Case(200, 333, batch=3, block_q=128, block_kv=64, key_lengths=(333, 0, 5)),
    "shorter than a block": Case(11, 13, block_q=128, block_kv=128),
    "more queries": Case(900, 260, heads=4, kv_heads=2, block_q=256, block_kv=64, is_causal=True),
    **{
        f"level {r}": Case(
            391,
            391,
            block_q=128,
            block_kv=64,
            is_causal=True,
            probabilities=tuple(float(r == x) for x in (0, 1, 2, 4, 8)),
        )
        for r in (0, 1, 2, 4, 8)
    },
}


def need(implementation, query, case):
    """Skips what the implementation refuses, in its words, where the GPU is no Hopper."""
    [found] = [x for x in FORWARD.implementations if x.name == implementation]
    key = jax.ShapeDtypeStruct((case.batch, case.size, case.kv_heads, query.shape[-1]), query.dtype)
    blocks = (-(-case.tokens // case.block_q), -(-case.size // case.block_kv))
    levels = jax.ShapeDtypeStruct((case.batch, case.heads, *blocks), jnp.int8)
    static = PooledOptions(case.is_causal, scale=0.1, block_q=case.block_q, block_kv=case.block_kv)
    refusal = found.unsupported(query=query, key=key, value=key, levels=levels, options=static)
    if refusal is not None:
        assert needs_hopper() is not None, refusal
        pytest.skip(f"{implementation}: {refusal}")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(implementation, static, lengths, q, k, v, levels, *cotangents):
    def call(q, k, v):
        chosen = {"implementation": implementation, "return_residual": True}
        return tj.pooled_attention(q, k, v, levels, **dict(static), **lengths, **chosen)

    results, pull = jax.vjp(call, q, k, v)
    return (*results, *pull(cotangents))


def run(implementation, case, *arrays):
    """Output, residual and the three gradients."""
    static, lengths = api_options(case)
    return _run(implementation, static, lengths, *arrays)


def check(implementation, case, dtype, head_dim):
    arrays = operands(case, dtype, head_dim)
    need(implementation, arrays[0], case)
    found = run(implementation, case, *arrays)
    for got, x in zip((found[0], *found[2:]), (arrays[0], *arrays[:3]), strict=True):
        assert (got.shape, got.dtype) == (x.shape, dtype)
    for got, (want, of_plain) in zip(
        (found[:2], found[2:]), expected(case, dtype, head_dim), strict=True
    ):
        assert_as_good_as_plain(got, want, of_plain)


@functools.lru_cache(maxsize=4)
def expected(case, dtype, head_dim):
    """Of the results and of the gradients the oracle's and plain arithmetic's."""
    arrays, known = operands(case, dtype, head_dim), options(case, head_dim)
    return (
        (oracle(*arrays[:4], **known), plain(*arrays[:4], **known)),
        (oracle_gradient(*arrays, **known), plain_gradient(*arrays, **known)),
    )


@pytest.mark.quick(5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", LARGE)
def test_equals_the_oracle(implementation, name, head_dim):
    check(implementation, LARGE[name], jnp.bfloat16, head_dim)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "implementation"),
    [
        (jnp.float16, 80, "triton"),
        (jnp.float16, 80, "mosaic_gpu"),
        (jnp.float16, 128, "triton"),
        (jnp.float16, 128, "mosaic_gpu"),
        (jnp.bfloat16, 256, "triton"),
        (jnp.float32, 64, "triton"),
        (jnp.float32, 128, "triton"),
        (jnp.float32, 256, "triton"),
    ],
)
def test_dtypes_and_head_dims(implementation, dtype, head_dim):
    check(implementation, LARGE["causal"], dtype, head_dim)


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_small_blocks_through_triton(name, dtype):
    check("triton", KERNEL_CASES[name], dtype, 32)


def relative(got, want):
    got, want = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return np.linalg.norm(got[finite] - want[finite]) / np.linalg.norm(want[finite])


REAL = {
    "4k, grouped": Case(4096, 4096, 8, 2, 1, 128, 128, is_causal=True),
    "odd length": Case(1000, 1000, 4, 1, 2, 128, 128, is_causal=True),
    "all tokens": Case(2048, 2048, 4, 4, 1, 128, 128, probabilities=(0, 1, 0, 0, 0)),
    "coarse": Case(4096, 4096, 4, 4, 1, 128, 64, probabilities=(0.3, 0.05, 0.1, 0.15, 0.4)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(implementation, name):
    """No farther from float32 than twice what the definition is on the same bfloat16 operands.

    The floor is that of weights rounded to bfloat16, half a unit in the last place of each.
    """
    case = REAL[name]
    arrays = operands(case, jnp.bfloat16, 128)
    need(implementation, arrays[0], case)
    found = run(implementation, case, *arrays)
    theirs = run("xla", case, *arrays)
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    exact = run("xla", case, *wide)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for got, plainly, want in zip(found, theirs, exact, strict=True):
        floor = eps / 2 if want.ndim == 4 else 1e-5
        assert relative(got, want) <= 2 * relative(plainly, want) + floor


@pytest.mark.quick(1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_repetition_gives_the_same_bits(implementation):
    case = REAL["odd length"]
    arrays = operands(case, jnp.bfloat16, 128)
    need(implementation, arrays[0], case)
    first, second = (run(implementation, case, *arrays) for _ in range(2))
    assert_equal(first, second)


@pytest.mark.quick(1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_changes_nothing(implementation):
    """NaN past the ends, in operands and cotangents: the same bits, and zeros."""
    case = dataclasses.replace(LARGE["lengths"], heads=4, kv_heads=2)
    q, k, v, levels, d_out, d_residual = operands(case, jnp.bfloat16, 128)
    need(implementation, q, case)
    want = run(implementation, case, q, k, v, levels, d_out, d_residual)
    query_length, key_length = (jnp.array(x) for x in (case.query_lengths, case.key_lengths))
    q, k, v, d_out, d_residual = (
        jnp.where(
            (jnp.arange(x.shape[1])[None] < n[:, None]).reshape(*x.shape[:2], *[1] * (x.ndim - 2)),
            x,
            jnp.asarray(jnp.nan, x.dtype),
        )
        for x, n in (
            (q, query_length),
            (k, key_length),
            (v, key_length),
            (d_out, query_length),
            (d_residual, query_length),
        )
    )
    got = run(implementation, case, q, k, v, levels, d_out, d_residual)
    assert_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_reaches_the_blocks_that_attend_to_it(implementation, name):
    case = LARGE["causal"]
    inputs = dict(
        zip(("q", "key", "value", "levels"), operands(case, jnp.bfloat16, 64)[:4], strict=True)
    )
    need(implementation, inputs["q"], case)
    inputs[name] = inputs[name].at[0, 40, 0, 3].set(jnp.nan)
    out = tj.pooled_attention(
        *inputs.values(), is_causal=True, implementation=implementation
    ).astype(jnp.float32)
    found = np.isnan(out).any(-1)
    seen = np.isnan(oracle(*inputs.values(), **options(case, 64))[0]).any(-1)
    attends = np.asarray(inputs["levels"])[:, :, :, 0] != 0
    attends = np.repeat(np.swapaxes(attends, 1, 2), 128, axis=1)[:, : case.tokens]
    assert seen.any()
    assert (found | ~seen).all()
    assert (attends | ~found).all()
    assert not found[1].any()
    assert not found[:, :, 2:].any()


@pytest.mark.quick(1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cotangents_of_what_sees_nothing_are_not_looked_at(implementation):
    case = LARGE["mostly skipped"]
    *arrays, d_out, d_residual = operands(case, jnp.bfloat16, 128)
    need(implementation, arrays[0], case)
    want = run(implementation, case, *arrays, d_out, d_residual)
    blind = jnp.isneginf(want[1])
    assert blind.any()
    d_out = jnp.where(blind[..., None], jnp.asarray(jnp.nan, d_out.dtype), d_out)
    got = run(implementation, case, *arrays, d_out, jnp.where(blind, jnp.nan, d_residual))
    assert_equal(got, want)
    for x in (got[0], got[2]):
        assert not np.asarray(x[blind].astype(jnp.float32)).any()


@pytest.mark.quick(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [100, 300])
def test_nan_of_a_head_stays_in_its_key_head(implementation, tokens):
    """Also where the last block of queries goes on past the padded rows."""
    case = Case(tokens, 130, heads=4, kv_heads=2, block_q=256, block_kv=64)
    arrays = list(operands(case, jnp.bfloat16, 64))
    need(implementation, arrays[0], case)
    want = run(implementation, case, *arrays)
    arrays[0] = arrays[0].at[:, :, 2].set(jnp.nan)
    got = run(implementation, case, *arrays)
    for x, y in zip(got[-2:], want[-2:], strict=True):
        np.testing.assert_array_equal(*(z[:, :, 0].astype(jnp.float32) for z in (x, y)))
        assert np.isnan(x[:, :, 1].astype(jnp.float32)).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("position", [1, 2])
def test_nan_in_skipped_blocks_has_no_gradient(implementation, position):
    """Also where its tile holds other blocks, to which queries attend."""
    case = Case(260, 260, block_q=128, block_kv=64, probabilities=(0.0, 0.1, 0.2, 0.3, 0.4))
    arrays = list(operands(case, jnp.bfloat16, 128))
    need(implementation, arrays[0], case)
    arrays[3] = arrays[3].at[:, :, :, 1].set(0)
    want = run(implementation, case, *arrays)
    arrays[position] = arrays[position].at[:, 70, 0].set(jnp.nan)
    assert_equal(run(implementation, case, *arrays), want)


@pytest.mark.quick(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rest", [0, 1])
def test_an_invalid_level_under_jit_gives_nan(implementation, rest):
    """In its row of queries alone, also where the row holds nothing else."""
    case = LARGE["shared levels"]
    arrays = list(operands(case, jnp.bfloat16, 128))
    need(implementation, arrays[0], case)
    arrays[3] = jnp.full_like(arrays[3], 1).at[:, :, 0].set(rest).at[:, :, 0, 2].set(3)
    out, residual, *_ = run(implementation, case, *arrays)
    for x in (out[:, :128], residual[:, :128]):
        assert np.isnan(x.astype(jnp.float32)).all()
    for x in (out[:, 128:], residual[:, 128:]):
        assert np.isfinite(x.astype(jnp.float32)).all()
