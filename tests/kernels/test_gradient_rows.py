"""The kernels that prepare the rows of a backward pass: codes to the bit, sums in float32.

Interpreted or emulated on a CPU; their lowering. Compiled they are in `test_gpu_quantize.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import block as hopper_blocks
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper import quantize as hopper_quantize
from pallas_kernels.mosaic.hopper.gradient import rows as hopper_rows
from pallas_kernels.triton.gradient_rows import prepare_rows
from pallas_kernels.triton.quantize import quantize
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes as oracle
from tests.oracles import warp
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gradient
from turbojax.attention.turbo.operands import Backward, blocks
from turbojax.numerics import rounding as numerics
from turbojax.numerics import rows

# Batch, tokens, heads, head dim; block, rows of the results, dtype.
CASES = {
    "head dim 64": ((2, 70, 2, 64), 64, 128, jnp.float32),
    "head dim 80": ((3, 45, 3, 80), 16, 48, jnp.bfloat16),
    "more rows": ((2, 40, 2, 64), 64, 256, jnp.float16),
    "head dim 128": ((2, 130, 2, 128), 128, 136, jnp.bfloat16),
    "head dim 256": ((1, 65, 2, 256), 64, 128, jnp.float16),
}


def tensors(case, seed=0):
    """Loud heads, ragged lengths, and rows that see nothing, with NaN in their cotangents."""
    (batch, tokens, heads, dim), _, _, dtype = CASES[case]
    rng = np.random.default_rng(seed)
    loud = np.exp(rng.normal(size=(heads, 1)))
    query, d_out, out = (
        (rng.normal(size=(batch, tokens, heads, dim)) * loud).astype(dtype) for _ in range(3)
    )
    residual, d_residual = (
        (rng.normal(size=(batch, tokens, heads)) * 3).astype(np.float32) for _ in range(2)
    )
    lengths = np.linspace(tokens, 0 if batch > 2 else tokens // 2, batch).astype(np.int32)
    blind = rng.random(residual.shape) < 0.1
    blind[0, 3, 1] = True
    blind |= np.arange(tokens)[None, :, None] >= lengths[:, None, None]
    residual[blind] = -np.inf
    d_out[blind] = np.nan
    return query, d_out, out, residual, d_residual, lengths


def expected(case, arrays, query_dtype, gradient_dtype):
    """Codes and scales by the definition; sums in float64, and of their terms' magnitudes."""
    _, block, tokens, _ = CASES[case]
    query, d_out, out, residual, d_residual, lengths = arrays
    size = query.shape[1]
    sees = np.asarray(residual) != -np.inf
    d_out = np.where(sees[..., None], d_out, np.zeros((), d_out.dtype))

    @jax.jit
    def codes_of(x, length):
        def codes(dtype):
            mode = "int8" if dtype == jnp.int8 else "fp8"
            x_blocks = blocks(x, length, block)
            found, scale = numerics.quantize_scores_operand(x_blocks, mode, axis=(-2, -1))
            return found.reshape(*found.shape[:2], -1, found.shape[-1]), scale

        return codes(jnp.int8), codes(jnp.float8_e4m3fn)

    def codes(x, dtype):
        return codes_of(x, lengths)[0 if dtype == jnp.int8 else 1]

    d8, weighed = (None, None), d_out.astype(np.float64)
    if gradient_dtype is not None:
        d8 = codes(d_out, gradient_dtype)
        numbers, scale = (np.asarray(x.astype(jnp.float32), np.float64) for x in d8)
        weighed = numbers * np.repeat(scale, block, axis=2)[..., None]
        weighed = np.swapaxes(weighed, 1, 2)[:, :size]
    with np.errstate(invalid="ignore"):
        terms = weighed * out.astype(np.float64)
    delta = np.where(sees, terms.sum(-1) - d_residual, 0)
    magnitude = np.where(sees, np.abs(terms).sum(-1) + np.abs(d_residual), 0)
    lse = np.where(sees, residual * np.float32(np.log2(np.e)), np.inf)

    def rows(x, value):
        padding = ((0, 0), (0, 0), (0, tokens - size))
        return np.pad(np.swapaxes(x, 1, 2), padding, constant_values=value)

    sums = rows(lse, np.inf), rows(delta, 0), rows(magnitude, 0)
    return (*codes(query, query_dtype), *d8, *sums)


def check_rows(run, case, dtypes):
    """Clean ones, then with a NaN in a query and infinity in a gradient."""
    arrays = tensors(case)
    check(run(*arrays), expected(case, arrays, *dtypes))
    arrays[0][0, 5, 0, 3] = np.nan
    arrays[1][0, np.argmax(arrays[3][0, :, 0] > -np.inf), 0, 7] = np.inf
    got = run(*arrays)
    check(got, expected(case, arrays, *dtypes))
    assert np.isnan(got.q_scale).sum() == 1


def check(got, want):
    """Equal bits; of the sums, what float32 loses with as many terms added in any order."""
    *codes, lse, delta, magnitude = want
    for name, a, b in zip(got._fields[:4], got[:4], codes, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=name)
    for x in (got.lse, got.delta):
        assert (x.dtype, x.shape) == (jnp.float32, lse.shape)
    np.testing.assert_allclose(got.lse, lse, rtol=2**-22)
    x, is_finite = np.asarray(got.delta, np.float64), np.isfinite(delta)
    np.testing.assert_array_equal(np.isfinite(x), is_finite)
    channels = got.q8.shape[-1]
    bound = 2**-24 * (channels + 3) * magnitude
    assert (np.abs(x[is_finite] - delta[is_finite]) <= bound[is_finite]).all()


INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn


def run_triton(case, arrays, query_dtype=INT8, gradient_dtype=INT8, **options):
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
    got = run_triton(case, arrays, *dtypes)
    check(got, expected(case, arrays, *dtypes))


@pytest.mark.optimized
def test_codes_are_those_of_the_other_kernel():
    case = "head dim 80"
    query, d_out, out, residual, d_residual, lengths = tensors(case)
    got = run_triton(case, (query, d_out, out, residual, d_residual, lengths), INT8, E4M3)
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
        *(jax.tree.map(lambda y: np.asarray(y, np.float32), run_triton(case, x, *dtypes))
          for x in (clean, dirty)),
    )  # fmt: skip
    row = np.argwhere(np.asarray(residual[0, :block, 0]) != -np.inf)[0, 0]
    dirty[0][0, row, 0, 3] = bad
    dirty[1][0, row, 0, 5] = bad
    got = run_triton(case, dirty, *dtypes)
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
    got = run_triton("head dim 64", arrays)
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


@pytest.fixture
def emulated(monkeypatch):
    """Arrays of 32 lanes in place of numbers."""
    oracle.patch(monkeypatch, hopper_blocks, eight_bits, hopper_quantize, hopper_rows)
    for module in (hopper_blocks, hopper_quantize):
        monkeypatch.setattr(module, "Int", warp.Int)


@pytest.mark.quick(slow=1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("case", "dtypes"),
    [
        ("head dim 64", (INT8, INT8)),
        ("head dim 80", (E4M3, E4M3)),
        ("more rows", (INT8, E4M3)),
        ("head dim 128", (INT8, INT8)),
        ("head dim 256", (E4M3, None)),
    ],
)
def test_rows_on_hopper(case, dtypes):
    """Ragged, with rows that see nothing; then with a NaN in a query and infinity in a gradient."""
    _, block, tokens, _ = CASES[case]
    options = {"block": block, "query_dtype": dtypes[0], "gradient_dtype": dtypes[1]}
    check_rows(functools.partial(hopper_rows.prepare_rows, tokens=tokens, **options), case, dtypes)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_an_output_of_another_dtype(dtype):
    """Of float32 inputs, what multiplies without codes is rounded to 16 bits before."""
    case = "head dim 64"
    arrays = list(tensors(case))
    arrays[1] = arrays[1].astype(dtype)
    options = {"query_dtype": E4M3, "gradient_dtype": None}
    got = hopper_rows.prepare_rows(*arrays, block=64, tokens=128, **options)
    check(got, expected(case, arrays, E4M3, None))


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_an_output_of_fewer_tokens_and_channels():
    """What it has not counts as zero."""
    case = "head dim 64"
    query, d_out, out, residual, d_residual, lengths = tensors(case)
    out, residual, d_residual = out[:, :61, :, :24], residual[:, :61], d_residual[:, :61]
    lengths = np.minimum(lengths, 61)
    call = functools.partial(
        hopper_rows.prepare_rows, block=64, query_dtype=INT8, gradient_dtype=E4M3, tokens=128
    )
    got = call(query, d_out, out, residual, d_residual, lengths)
    more = ((0, 0), (0, 9), (0, 0))
    whole = np.pad(out, (*more, (0, 40)))
    residual = np.pad(residual, more, constant_values=-np.inf)
    want = call(query, d_out, whole, residual, np.pad(d_residual, more), lengths)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("head_dim", "block", "kernel"),
    [
        pytest.param(64, 128, "any", marks=pytest.mark.slow),
        pytest.param(64, 192, None, marks=pytest.mark.slow),
        pytest.param(128, 128, "hopper", marks=pytest.mark.fuzz),
        pytest.param(36, 128, "triton", marks=pytest.mark.fuzz),
    ],
)
def test_the_gradient_lowers_with_it(hopper, head_dim, block, kernel):
    """Where a block is no power of two, the others; heads are padded before, outputs are not.

    Their channels are what Hopper's kernel may refuse.
    """
    x = jax.ShapeDtypeStruct((2, 100, 2, head_dim), jnp.bfloat16)
    of_rows, lengths = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in ((x.shape[:3], jnp.float32), ((2,), jnp.int32))
    )
    config = tj.TurboConfig(gradient="8bit", block_q=block)
    run = functools.partial(
        mosaic_gradient.gradient, config=config, options=Options(True, scale=0.1)
    )
    text = lower_for_cuda(run, Backward(x, x, x, lengths, lengths, x, of_rows, x, of_rows))
    assert ("turbojax_gradient_rows" in text) == (kernel is not None)
    if kernel in ("hopper", "triton"):
        assert ("turbojax_gradient_rows_hopper" in text) == (kernel == "hopper")
        assert ("triton" in text) == (kernel == "triton")
