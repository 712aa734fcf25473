"""Stage 1 as kernels, compiled, against plain JAX: equal bits; rows of the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic.hopper import quantize
from pallas_kernels.mosaic.hopper.gradient import rows
from pallas_kernels.triton import gradient_rows
from tests.gpu.gpu_helpers import normal, on_hopper
from tests.kernels.test_gradient_rows import CASES, check_rows
from turbojax.attention.turbo import operands

pytestmark = pytest.mark.gpu
KERNELS = ["triton", pytest.param("hopper", marks=on_hopper)]


@pytest.mark.quick(5)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, jnp.bfloat16), (64, jnp.float16), (80, jnp.bfloat16), (96, jnp.float32)],
)
def test_kernels_and_plain_jax_give_the_same_bits(monkeypatch, mode, head_dim, dtype, kernels):
    if kernels == "triton":
        monkeypatch.setattr(operands, "_hopper", lambda *_: None)
    query = normal(1, (2, 1000, 8, head_dim), dtype)
    key, value = (normal(i, (2, 1030, 2, head_dim), dtype) for i in (2, 3))
    key, value = key.at[0, 77, 1, 3].set(jnp.nan), value.at[1, 99, 0, 3].set(jnp.inf)
    lengths = jnp.array([1000, 310], jnp.int32), jnp.array([1030, 555], jnp.int32)
    config = tj.TurboConfig.paper(mode=mode)

    def run(permuted):
        def call(*arrays):
            return operands.quantize_operands(*arrays, config, permuted=permuted)

        return jax.jit(call)(query, key, value, *lengths)

    for permuted in (False, True):
        got = run(permuted)
        with monkeypatch.context() as patch:
            patch.setattr(operands, "_kernels_unsupported", lambda *_: "asked not to")
            want = run(permuted)
        for name, a, b in zip(got._fields, got, want, strict=True):
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
            np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.quick(15)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "dtypes",
    [
        (jnp.int8, jnp.int8),
        (jnp.int8, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, None),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_rows_of_the_gradient(case, dtypes, kernels):
    prepare_rows = {"triton": gradient_rows, "hopper": rows}[kernels].prepare_rows
    _, block, tokens, _ = CASES[case]
    options = {"block": block, "query_dtype": dtypes[0], "gradient_dtype": dtypes[1]}
    check_rows(jax.jit(functools.partial(prepare_rows, tokens=tokens, **options)), case, dtypes)


@on_hopper
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_several_at_once_under_vmap(dtype):
    x = normal(4, (3, 2, 200, 2, 64))
    lengths = jnp.array([[200, 100], [10, 0], [200, 200]], jnp.int32)
    call = functools.partial(quantize.quantize, block=64, dtype=dtype)
    got = jax.jit(jax.vmap(call))(x, lengths)
    for i in range(3):
        for a, b in zip(got, jax.jit(call)(x[i], lengths[i]), strict=True):
            a, b = (np.asarray(y.astype(jnp.float32)) for y in (a[i], b))
            np.testing.assert_array_equal(a, b)
