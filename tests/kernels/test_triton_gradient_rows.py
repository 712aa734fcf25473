"""The kernel that prepares the rows of a backward pass: codes to the bit, sums in float32.

Interpreted on a CPU; its lowering. Compiled it is tested in `test_gpu_quantize.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.triton.gradient_rows import prepare_rows
from pallas_kernels.triton.quantize import quantize
from tests.kernels.gradient_rows_helpers import CASES, check, expected, tensors
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import _device
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gradient
from turbojax.numerics import rows

INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn


def run(case, arrays, query_dtype=INT8, gradient_dtype=INT8, **options):
    shape, block, tokens, _ = CASES[case]
    del shape
    options |= {"query_dtype": query_dtype, "gradient_dtype": gradient_dtype}
    call = functools.partial(prepare_rows, block=block, tokens=tokens, interpret=True, **options)
    return jax.jit(call)(*arrays)


@pytest.mark.quick(slow=1)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("case", "dtypes"),
    [
        ("head dim 64", (INT8, E4M3)),
        ("head dim 80", (INT8, INT8)),
        ("more rows", (E4M3, None)),
        ("head dim 128", (E4M3, E4M3)),
        ("head dim 256", (INT8, INT8)),
        ("head dim 80", (E4M3, E4M3)),
        ("head dim 128", (INT8, INT8)),
        ("head dim 128", (INT8, None)),
        ("more rows", (INT8, INT8)),
    ],
)
def test_codes_and_sums(case, dtypes):
    arrays = tensors(case)
    got = run(case, arrays, *dtypes)
    check(got, expected(case, arrays, *dtypes))


@pytest.mark.optimized
def test_codes_are_those_of_the_other_kernel():
    case = "head dim 80"
    query, d_out, out, residual, d_residual, lengths = tensors(case)
    got = run(case, (query, d_out, out, residual, d_residual, lengths), INT8, E4M3)
    block = CASES[case][1]
    clean = jnp.where((residual == -jnp.inf)[..., None], jnp.zeros((), d_out.dtype), d_out)
    for x, dtype, codes in ((query, INT8, got[:2]), (clean, E4M3, got[2:4])):
        want = quantize(x, lengths, block=block, dtype=dtype, interpret=True)
        for a, b in zip(codes, want, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("dtypes", "bad"), [((INT8, INT8), np.nan), ((E4M3, E4M3), np.inf), ((INT8, None), np.nan)]
)
def test_values_that_are_not_finite(dtypes, bad):
    """They reach their block's scale and sums; from padding and blind rows they reach nothing."""
    case = "head dim 64"
    query, d_out, out, residual, d_residual, lengths = tensors(case)
    block = CASES[case][1]
    blind = np.argwhere(np.asarray(residual[0, :block, 1]) == -np.inf)
    assert blind.size
    clean = query, d_out, out, residual, d_residual, lengths
    dirty = [np.array(x) for x in clean]
    for x in dirty[1:3]:
        x[0, blind[0], 1] = bad
    for x in dirty[:3]:
        x[1, lengths[1] :] = bad
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.tree.map(lambda y: np.asarray(y, np.float32), run(case, x, *dtypes))
          for x in (clean, dirty)),
    )  # fmt: skip
    row = np.argwhere(np.asarray(residual[0, :block, 0]) != -np.inf)[0, 0]
    dirty[0][0, row, 0, 3] = bad
    dirty[1][0, row, 0, 5] = bad
    got = run(case, dirty, *dtypes)
    check(got, expected(case, dirty, *dtypes))
    assert np.isnan(got.q_scale).sum() == 1
    count = 1
    if dtypes[1] is not None:
        assert np.isnan(got.d_scale).sum() == 1
        count = (np.asarray(residual[0, :block, 0]) != -np.inf).sum()
    assert (~np.isfinite(got.delta)).sum() == count


def test_residuals_of_nan_stay():
    arrays = [np.array(x) for x in tensors("head dim 64")]
    arrays[3][0, 1, 0] = np.nan
    got = run("head dim 64", arrays)
    assert np.isnan(got.lse).sum() == 1
    assert np.isnan(got.lse[0, 0, 1])


# In the gradient on Hopper -----------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("mode", "rounding", "head_dim", "dtype"),
    [
        ("int8_fp8", "8bit", 80, jnp.bfloat16),
        ("fp8", "float", 64, jnp.float16),
        ("int8", "8bit", 8, jnp.float32),
        ("fp8", "8bit", 128, jnp.bfloat16),
    ],
)
def test_the_kernel_and_plain_jax_give_the_gradient_the_same(mode, rounding, head_dim, dtype):
    rng = np.random.default_rng(3)
    query, d_out, out = (
        jnp.asarray(rng.normal(size=(2, 75, 2, head_dim)), dtype) for _ in range(3)
    )
    residual, d_residual = (jnp.asarray(rng.normal(size=(2, 75, 2)), jnp.float32) for _ in range(2))
    lengths = jnp.array([75, 30], jnp.int32)
    there = jnp.arange(75)[None] < lengths[:, None]
    residual = jnp.where(there[..., None], residual, -jnp.inf).at[0, 3].set(-jnp.inf)
    d_out = mosaic_gradient.rows.without_blind(d_out, residual)
    query, d_out = rows.padded(query), rows.padded(d_out)
    config = tj.TurboConfig(mode=mode, gradient=rounding, block_q=64)

    def prepared():  # a new function each time: nothing is kept of the other choice
        call = functools.partial(mosaic_gradient._row_operands, config=config, tokens=128)
        return jax.jit(call)(query, d_out, out, residual, d_residual, lengths)

    want = prepared()
    with interpret_kernels():
        got = prepared()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[3], want[3], rtol=1e-5, atol=1e-5 * head_dim)


def test_what_it_does_not_take():
    x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    rows = jnp.zeros((1, 8, 1), jnp.float32)
    arrays = (x, x, x, rows, rows, jnp.array([8], jnp.int32))
    for options in ({"mode": "float"}, {"block_q": 192}):
        with interpret_kernels():
            found = mosaic_gradient.prepare_rows(*arrays, tj.TurboConfig(**options), 128)
        assert found is None


# Lowering ----------------------------------------------------------------------------------------


@pytest.mark.quick(first=3, slow=0)
@pytest.mark.parametrize("dtypes", [(INT8, E4M3), (INT8, INT8), (E4M3, E4M3), (E4M3, None)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_it_lowers(dtypes, head_dim):
    x = jax.ShapeDtypeStruct((2, 104, 4, head_dim), jnp.bfloat16)
    out, rows = x.update(shape=(2, 97, 4, 8)), x.update(shape=(2, 97, 4), dtype=jnp.float32)
    call = functools.partial(
        prepare_rows,
        block=64,
        query_dtype=dtypes[0],
        gradient_dtype=dtypes[1],
        tokens=256,
    )
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(call, x, x, out, rows, rows, lengths)
    assert text.count("turbojax_gradient_rows") >= 1


@pytest.mark.slow
def test_the_gradient_lowers_with_it(monkeypatch):
    """It, keys, and values with their maxima; where a block is no power of two, the others."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    x = jax.ShapeDtypeStruct((2, 100, 2, 64), jnp.bfloat16)
    rows, lengths = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in ((x.shape[:3], jnp.float32), ((2,), jnp.int32))
    )
    for block, has_kernel in ((128, True), (192, False)):
        config = tj.TurboConfig(gradient="8bit", block_q=block)
        run = functools.partial(
            mosaic_gradient.gradient, config=config, options=Options(True, scale=0.1)
        )
        text = lower_for_cuda(run, x, x, x, lengths, lengths, x, rows, x, rows)
        assert ("turbojax_gradient_rows" in text) == has_kernel
