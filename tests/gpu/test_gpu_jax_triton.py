"""The upstream Triton kernel on a GPU, against the float64 oracle, exact attention and XLA."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import (
    EXACT,
    FLOAT,
    SAS_2,
    SAS_E,
    assert_agrees,
    attend,
    oracle_softmax,
    tensors,
)
from tests.gpu.gpu_helpers import CASES, GRID, error
from tests.gpu.gpu_helpers import EIGHT_BIT_MODES as MODES

_MISSING = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
if _MISSING:
    reason = f"not installed: {_MISSING}; pip install 'jax-triton>=0.3.1'"
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.gpu

kernel = functools.partial(attend, implementation="jax_triton", return_residual=True)
xla = functools.partial(attend, implementation="xla", return_residual=True)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def as_numpy(results):
    return tuple(np.asarray(x, np.float64) for x in results)


def check(q, k, v, config, **options):
    """Against the oracle: within its bound where products are exact.

    An e4m3 unit keeps 13 bits after the largest of the 32 terms of an instruction, and truncates
    them and what it accumulates: 33 * 2**-13 of the largest weight times the largest value for
    each instruction, and a row sum is at least its largest weight. For e4m3 scores no such bound
    is of use; there the error against exact attention may not be larger than XLA's.
    """
    options = {n: jnp.asarray(x) if "lengths" in n else x for n, x in options.items()}
    out, residual = kernel(q, k, v, config=config, **options)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    if config.mode == "fp8":
        want = as_numpy(xla(q, k, v, config=config, **options))
        exact = as_numpy(xla(q, k, v, config=FLOAT, **options))
        for got, theirs, truth in zip((out, residual), want, exact, strict=True):
            scale = np.max(np.abs(truth), where=np.isfinite(truth), initial=0)
            assert error(got, truth) <= 1.25 * error(theirs, truth) + 1e-3 * scale
        return
    want = oracles.attention(
        q,
        k,
        v,
        mode=config.mode,
        softmax=oracle_softmax(config.softmax),
        block_q=config.block_q,
        block_kv=config.block_kv,
        **options,
    )
    if config.mode == "int8":
        assert_agrees(out, residual, want, v)
        return
    coarse = config.block_kv / 32 * 33 * 2.0**-13 * float(jnp.max(jnp.abs(v)))
    own = 0 if q.dtype == jnp.float32 else float(jnp.finfo(q.dtype).eps)
    bound = want.out_tolerance + own * np.abs(want.out) + coarse
    assert np.all(np.abs(np.asarray(out, np.float64) - want.out) <= bound)
    finite = np.isfinite(want.residual)
    np.testing.assert_array_equal(np.isfinite(residual), finite)
    difference = np.abs(np.asarray(residual, np.float64)[finite] - want.residual[finite])
    assert np.all(difference <= want.residual_tolerance[finite])


@pytest.mark.quick(11)
@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_definition(case, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), **options)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("block_q", "block_kv"), [(16, 32), (128, 64), (64, 128), (256, 128)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_sizes(block_q, block_kv, head_dim):
    q, k, v = tensors(1, 1, 300, 390, 2, 1, head_dim)
    for mode, softmax in zip(MODES, (SAS_E, EXACT, SAS_2), strict=True):
        sizes = {"block_q": block_q, "block_kv": block_kv, "buffer_size": block_kv}
        check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax, **sizes), is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_inputs(mode, dtype):
    q, k, v = tensors(2, 1, 170, 130, 2, 1, 64, dtype)
    check(q, k, v, tj.TurboConfig.paper(mode=mode), is_causal=True)


def test_padding_queries_change_nothing(mode):
    q, k, v = tensors(3, 2, 300, 300, 4, 2, 64)
    config = tj.TurboConfig.paper(mode=mode)
    lengths = jnp.array([300, 130])
    options = {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths, "is_causal": True}
    out, residual = kernel(q, k, v, config=config, **options)
    beyond = (jnp.arange(300)[None] >= lengths[:, None])[:, :, None, None]
    spoiled = [jnp.where(beyond, jnp.nan, x) for x in (q, k, v)]
    again = kernel(*spoiled, config=config, **options)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(residual, again[1])
    assert np.all(np.asarray(out[1, 130:]) == 0)
    assert np.all(np.isneginf(residual[1, 130:]))


@pytest.mark.quick(17)
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("softmax", [EXACT, SAS_E, SAS_2], ids=["exact", "e", "2"])
def test_what_is_not_finite_reaches_the_rows_it_reaches_in_the_reference(
    mode, spoiled, bad, softmax
):
    names = ("query", "key", "value")
    operands = dict(zip(names, tensors(4, 1, 300, 300, 2, 1, 64), strict=True))
    operands[spoiled] = operands[spoiled].at[0, 130, 0, 5].set(bad)
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    for options in ({"is_causal": True}, {"local_window_size": (70, 20)}):
        got = kernel(*operands.values(), config=config, **options)
        want = xla(*operands.values(), config=config, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert np.isnan(want[0]).any()


def test_the_same_bits_twice(mode):
    q, k, v = tensors(5, 2, 700, 700, 4, 2, 128, jnp.bfloat16)
    config = tj.TurboConfig.paper(mode=mode)
    for a, b in zip(*(kernel(q, k, v, config=config) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_transforms_give_the_same_bits(mode):
    q, k, v = tensors(6, 4, 130, 130, 4, 2, 64)
    config = tj.TurboConfig.paper(mode=mode)
    run = functools.partial(
        tj.turbo_attention, config=config, is_causal=True, implementation="jax_triton"
    )
    want = run(q, k, v)
    np.testing.assert_array_equal(jax.jit(run)(q, k, v), want)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    np.testing.assert_array_equal(jax.vmap(run)(*split).reshape(want.shape), want)
    shared = jax.vmap(run, in_axes=(0, None, None))(split[0], k[:2], v[:2])
    np.testing.assert_array_equal(shared[0], run(q[:2], k[:2], v[:2]))
    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, split)
    np.testing.assert_array_equal(scanned.reshape(want.shape), want)


def test_it_trains():
    """The backward pass is that of `turbo_attention`, by whichever kernels there are."""
    q, k, v = tensors(7, 1, 130, 130, 2, 1, 64)

    def loss(implementation, q, k, v):
        out = tj.turbo_attention(q, k, v, is_causal=True, implementation=implementation)
        return jnp.sum(out[..., :8])

    # On Hopper its kernels, of weights in 16 bits and of what each forward pass gave.
    got, want = (
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(q, k, v)
        for name in ("jax_triton", "xla")
    )
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b)


def test_long_contexts(mode):
    """128k keys: the error does not grow with the length, also where all values have one sign."""
    rng = np.random.default_rng(8)
    q = jnp.asarray(rng.normal(size=(1, 64, 2, 128)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 2**17, 1, 128)), jnp.bfloat16)
    v = jnp.asarray(np.abs(rng.normal(size=k.shape)) + 1, jnp.bfloat16)
    exact, _ = xla(q, k, v, config=FLOAT)
    for block_kv in (64, 128):
        config = tj.TurboConfig(mode=mode, softmax=EXACT, block_kv=block_kv, buffer_size=block_kv)
        out, _ = kernel(q, k, v, config=config)
        theirs, _ = xla(q, k, v, config=config)
        assert error(out, exact) <= 2 * error(theirs, exact) + 2e-3 * float(jnp.max(exact))
