"""Rows of the gradient on Hopper, emulated: equal codes, sums within their bound; the choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits
from pallas_kernels.mosaic.hopper import quantize
from pallas_kernels.mosaic.hopper.gradient import rows
from tests.kernels.gradient_rows_helpers import CASES, check, expected, tensors
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import lanes as oracle
from tests.oracles import warp
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gradient

INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn


@pytest.fixture
def emulated(monkeypatch):
    """Arrays of 32 lanes in place of numbers."""
    oracle.patch(monkeypatch, blocks, eight_bits, quantize, rows)
    for module in (blocks, quantize):
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
def test_rows(case, dtypes):
    """Ragged, with rows that see nothing; then with a NaN in a query and infinity in a gradient."""
    arrays = tensors(case)
    _, block, tokens, _ = CASES[case]
    options = {"block": block, "query_dtype": dtypes[0], "gradient_dtype": dtypes[1]}
    got = rows.prepare_rows(*arrays, tokens=tokens, **options)
    check(got, expected(case, arrays, *dtypes))
    arrays[0][0, 5, 0, 3] = np.nan
    arrays[1][0, np.argmax(arrays[3][0, :, 0] > -np.inf), 0, 7] = np.inf
    got = rows.prepare_rows(*arrays, tokens=tokens, **options)
    check(got, expected(case, arrays, *dtypes))
    assert np.isnan(got.q_scale).sum() == 1


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_an_output_of_another_dtype(dtype):
    """Of float32 inputs, what multiplies without codes is rounded to 16 bits before."""
    case = "head dim 64"
    arrays = list(tensors(case))
    arrays[1] = arrays[1].astype(dtype)
    options = {"query_dtype": E4M3, "gradient_dtype": None}
    got = rows.prepare_rows(*arrays, block=64, tokens=128, **options)
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
        rows.prepare_rows, block=64, query_dtype=INT8, gradient_dtype=E4M3, tokens=128
    )
    got = call(query, d_out, out, residual, d_residual, lengths)
    more = ((0, 0), (0, 9), (0, 0))
    whole = np.pad(out, (*more, (0, 40)))
    residual = np.pad(residual, more, constant_values=-np.inf)
    want = call(query, d_out, whole, residual, np.pad(d_residual, more), lengths)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.fuzz
@pytest.mark.parametrize(("head_dim", "is_on_hopper"), [(128, True), (36, False)])
def test_the_gradient_lowers_with_it(monkeypatch, head_dim, is_on_hopper):
    """Heads are padded before; outputs are not, and their channels are what it may refuse."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    x = jax.ShapeDtypeStruct((2, 100, 2, head_dim), jnp.bfloat16)
    of_rows, lengths = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in ((x.shape[:3], jnp.float32), ((2,), jnp.int32))
    )
    config = tj.TurboConfig(gradient="8bit", block_q=128)
    run = functools.partial(
        mosaic_gradient.gradient, config=config, options=Options(True, scale=0.1)
    )
    text = lower_for_cuda(run, x, x, x, lengths, lengths, x, of_rows, x, of_rows)
    assert ("turbojax_gradient_rows_hopper" in text) == is_on_hopper
    assert ("triton" in text) != is_on_hopper
