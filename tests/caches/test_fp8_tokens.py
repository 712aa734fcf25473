"""Activations to e4m3 per token: the definition against an oracle, the kernel against it."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import int4 as oracle
from turbojax._device import interpret_kernels
from turbojax.flax.norms import rms_norm
from turbojax.matmul.fp8_tokens import quantize_activation, rms_norm_quantize, triton
from turbojax.quantizers import quantize_tokens

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# One chunk, several, the last of them full or not, and no chunk's size.
SHAPES = ((3, 1), (2, 3, 300), (2, 4096), (2, 9000))
EPS = 1e-5
# Several chunks first; every shape and dtype.
GRID = [
    (SHAPES[3], jnp.bfloat16),
    (SHAPES[1], jnp.bfloat16),
    (SHAPES[2], jnp.float16),
    (SHAPES[0], jnp.float32),
    (SHAPES[1], jnp.float32),
]


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def bits(x):
    unsigned = {1: np.uint8, 2: np.uint16}[x.dtype.itemsize]
    return np.asarray(x).view(unsigned).astype(np.int64)


def activations(shape, dtype, seed=0):
    """Tokens of very different sizes, with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(np.where(rng.random(shape) < 0.01, 30.0, 1.0) * x, jnp.float32).astype(dtype)


def norm_scale(size, dtype):
    values = np.random.default_rng(7).normal(size=size) + 1
    return jnp.asarray(values, jnp.float32).astype(dtype)


def interpreted(call, *args, **kwargs):
    with interpret_kernels():
        return call(*args, implementation="triton", **kwargs)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(bits(a.codes), bits(b.codes))
    np.testing.assert_array_equal(bits(a.scale), bits(b.scale))


@pytest.mark.quick(1, slow=0)
@pytest.mark.optimized
@pytest.mark.parametrize(("shape", "dtype"), GRID)
def test_the_kernel_has_the_bits_of_the_definition(shape, dtype):
    x = activations(shape, dtype)
    want = quantize_activation(x, implementation="xla")
    assert want.codes.shape == x.shape
    assert want.scale.shape == x.shape[:-1]
    assert want.dtype == dtype
    assert_same_bits(interpreted(quantize_activation, x), want)
    assert_same_bits(want, quantize_tokens(x))
    codes, scale = oracle.quantize_tokens(wide(x))
    np.testing.assert_array_equal(wide(want.codes), codes)
    np.testing.assert_array_equal(wide(want.scale), scale)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("shape", "dtype"), GRID)
def test_norm(implementation, shape, dtype):
    """Against the norm in float64: within a step of e4m3 and of the dtype that it is rounded to."""
    x, scale = activations(shape, dtype), norm_scale(shape[-1], dtype)
    call = functools.partial(rms_norm_quantize, x, scale, EPS, implementation=implementation)
    with interpret_kernels():
        got = call()
    exact = wide(x)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + EPS) * wide(scale)
    largest = np.abs(exact).max(-1)
    relative = 2 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(wide(got.scale) * 448, largest, rtol=2**-8 + relative)
    # Half a step of e4m3, normal or not; the largest may saturate by half a step of the scale.
    step = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * wide(got.scale)[..., None])
    step = step + relative * np.abs(exact)
    found = wide(got.codes) * wide(got.scale)[..., None]
    assert (np.abs(found - exact) <= 1.001 * step).all()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("shape", "dtype"), GRID)
def test_the_norm_is_the_models(shape, dtype):
    """Also under `jit`, where XLA could drop the rounding to `x`'s dtype; squares may be summed in
    another order, so some codes differ, by one step."""
    x, scale = activations(shape, dtype), norm_scale(shape[-1], dtype)
    want = quantize_tokens(rms_norm(x, scale, EPS))
    xla = jax.jit(functools.partial(rms_norm_quantize, eps=EPS, implementation="xla"))
    for got in (xla(x, scale), interpreted(rms_norm_quantize, x, scale, EPS)):
        assert got.dtype == dtype
        for a, b in ((got.codes, want.codes), (got.scale, want.scale)):
            difference = np.abs(bits(a) - bits(b))
            assert difference.max() <= 1
            assert np.count_nonzero(difference) <= 0.002 * x.size


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_what_is_not_finite_marks_its_token(implementation, bad):
    x = activations((4, 2000), jnp.float32).at[1, 1990].set(bad).at[2, 0].set(bad)
    with interpret_kernels():
        plain = quantize_activation(x, implementation=implementation)
        norm = rms_norm_quantize(x, jnp.ones(2000), EPS, implementation=implementation)
    for got in (plain, norm):
        np.testing.assert_array_equal(np.isnan(wide(got.scale)), [False, True, True, False])
        assert np.isnan(wide(got.codes)[1:3]).all()
        assert np.isfinite(wide(got.codes)[[0, 3]]).all()


def test_zeros_and_limits(implementation):
    """Zeros, numbers below the normal ones, the smallest scale, and a scale that rounds down."""
    tiny = float(np.finfo(np.float32).tiny)
    # 1.00390625 lies halfway between bfloat16 numbers, of which the even one is 1.
    rows = [[0.0, -0.0, 0.0], [tiny / 2, 0, 0], [tiny, 0, 0], [448 * 1.00390625, -1.0, 5.5]]
    x = jnp.asarray(rows, jnp.float32)
    with interpret_kernels():
        got = quantize_activation(x, implementation=implementation)
    np.testing.assert_array_equal(wide(got.scale), [1, 1, tiny, 1])
    np.testing.assert_array_equal(wide(got.codes)[:2], 0)
    np.testing.assert_array_equal(wide(got.codes)[2:], [[1, 0, 0], [448, -1, 5.5]])


@pytest.mark.quick(slow=1)
def test_transforms(implementation):
    x, scale = activations((3, 2, 300), jnp.bfloat16), norm_scale(300, jnp.bfloat16)

    def call(x):
        return rms_norm_quantize(x, scale, EPS, implementation=implementation)

    with interpret_kernels():
        want = call(x)
        assert_same_bits(jax.jit(call)(x), want)
        assert_same_bits(jax.vmap(call)(x), want)
        _, scanned = jax.lax.scan(lambda carry, row: (carry, call(row)), None, x)
        assert_same_bits(scanned, want)


def test_it_has_no_gradient():
    x, scale = activations((2, 8), jnp.float32), jnp.ones(8)
    with pytest.raises(NotImplementedError, match="quantize_activation has no gradient"):
        jax.grad(lambda x: quantize_activation(x).scale.astype(jnp.float32).sum())(x)
    with pytest.raises(NotImplementedError, match="rms_norm_quantize has no gradient"):
        jax.grad(lambda s: rms_norm_quantize(x, s, EPS).scale.astype(jnp.float32).sum())(scale)


X = jnp.ones((2, 8))
WRONG = {
    "integers": (lambda: quantize_activation(jnp.ones((2, 8), jnp.int32)), TypeError, "x.dtype"),
    "no axis": (lambda: quantize_activation(jnp.float32(1)), ValueError, "no axis empty"),
    "no channels": (lambda: quantize_activation(jnp.ones((2, 0))), ValueError, "no axis empty"),
    "no tokens": (lambda: quantize_activation(jnp.ones((0, 8))), ValueError, "no axis empty"),
    "a name": (lambda: quantize_activation(X, implementation="cuda"), ValueError, "'cuda'"),
    "no such": (
        lambda: quantize_activation(X, implementation="jax_triton"),
        NotImplementedError,
        "no implementation='jax_triton'",
    ),
    "scale": (lambda: rms_norm_quantize(X, jnp.ones(7), EPS), ValueError, r"must be \(8,\)"),
    "scale's dtype": (
        lambda: rms_norm_quantize(X, jnp.ones(8, jnp.int8), EPS),
        TypeError,
        "scale.dtype=int8",
    ),
    "eps": (lambda: rms_norm_quantize(X, jnp.ones(8), -1.0), ValueError, "must not be negative"),
    "no eps": (lambda: rms_norm_quantize(X, jnp.ones(8), None), TypeError, "eps is None"),
    "nan": (lambda: rms_norm_quantize(X, jnp.ones(8), np.nan), ValueError, "must be finite"),
    "eps, an array": (
        lambda: rms_norm_quantize(X, jnp.ones(8), jnp.float32(1)),
        TypeError,
        "must be a Python number",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call()


def test_refusals():
    wide_token = jax.ShapeDtypeStruct((1, 2**15 + 1), jnp.bfloat16)
    with interpret_kernels():
        assert "must be at most 32768" in triton.unsupported(x=wide_token, scale=None)
        assert triton.unsupported(x=X, scale=None) is None
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="triton: needs an NVIDIA GPU"):
            quantize_activation(X, implementation="triton")


LOWERED = pairwise(
    shape=[(16, 4096), (1, 100), (5, 11008), (2, 32768)],
    dtype=DTYPES,
    has_e4m3=[True, False],
    has_norm=[True, False],
)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(("shape", "dtype", "has_e4m3", "has_norm"), LOWERED)
def test_it_lowers(shape, dtype, has_e4m3, has_norm):
    x = jax.ShapeDtypeStruct(shape, dtype)
    scale = jax.ShapeDtypeStruct(shape[1:], jnp.float32) if has_norm else None
    options = {"eps": EPS, "has_e4m3": has_e4m3}
    call = functools.partial(triton._quantize, **options)
    assert "turbojax_fp8_tokens" in lower_for_cuda(call, x, scale)


def test_every_e4m3_value_is_kept():
    """A token that holds all of them, in its order, is its own code."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = values[np.isfinite(values.astype(np.float32))]
    x = jnp.asarray(values.astype(np.float32))[None]
    got = interpreted(quantize_activation, x)
    np.testing.assert_array_equal(bits(got.codes)[0], values.view(np.uint8))
    assert wide(got.scale) == 1
