"""`fireq.matmul(gradient="e4m3")`: against float64 from the definition, and its distance to exact.

The oracle rounds cotangents as it rounds tokens. Where an activation comes before, its float64
derivative may fall on the other side of a boundary between two codes, a step of 2**-4 at most, so
norms are compared.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.grids import pairwise
from tests.matmul.test_int4_matmul_gradient import (
    ACTIVATIONS,
    normal,
    oracle_gradient,
    problem,
    slope,
    wide,
)
from tests.oracles import int4 as oracle
from turbojax.matmul.fp8_tokens import quantize_activation, scale_quantize

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@functools.partial(jax.jit, static_argnames=("activation", "gradient", "implementation"))
def gradients(x, weight, bias, d_out, activation, gradient="e4m3", implementation=None):
    def call(x, bias):
        options = {"activation": activation, "gradient": gradient}
        return tj.fireq.matmul(x, weight, bias=bias, implementation=implementation, **options)

    return jax.vjp(call, x, bias)[1](d_out)


def oracle_e4m3(x, values, bias, d_out, activation, output_scale=1.0):
    """`oracle_gradient` with rounded cotangents; `values` hold `output_scale`."""
    is_wide = x.dtype == jnp.float32
    z = None
    if activation is not None:
        codes, scale = oracle.quantize_tokens(wide(x))
        z = codes @ values.T * scale[:, None] + wide(bias)
        z = wide(jnp.asarray(z, jnp.float32).astype(jnp.float32 if is_wide else jnp.bfloat16))
    d_z = backward(wide(d_out), z, activation)
    scaled = oracle.f32(d_z * output_scale)
    codes, scale = oracle.quantize_tokens(scaled if is_wide else oracle.bf16(scaled))
    return scale[:, None] * (codes @ (values / output_scale)), d_z.sum(0)


def backward(d_out, z, activation):
    if activation is None:
        return d_out
    if activation not in oracle.GATES:
        return d_out * slope(z, activation)
    gate, up = np.split(z, 2, axis=-1)
    of_gate = oracle.GATES[activation]
    d_gate = d_out * up * slope(gate, of_gate)
    return np.concatenate([d_gate, d_out * oracle.ACTIVATIONS[of_gate](gate)], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_oracle(dtype):
    """Without an activation to the bit but for sums: of `K` products, and one rounding."""
    x, weight, bias, _, d_out, values = problem(None, "e4m3", dtype)
    got = gradients(x, weight, bias, d_out, None)
    want, d_bias = oracle_e4m3(x, values, bias, d_out, None, 0.5)
    assert got[0].dtype == dtype
    codes, scale = oracle.quantize_tokens(0.5 * wide(d_out))
    size = scale[:, None] * (np.abs(codes) @ np.abs(2 * values))
    half = float(jnp.finfo(dtype).eps) / 2
    allowed = (40 + 8) * 2.0**-24 * size + half * np.abs(want) + 2.0**-24
    assert (np.abs(wide(got[0]) - want) <= 1.01 * allowed).all()
    np.testing.assert_allclose(got[1], d_bias, atol=1e-5)


@pytest.mark.quick(first=3, slow=0)
@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("swiglu", jnp.bfloat16),
        ("silu", jnp.float32),
        ("geglu", jnp.float16),
        *pairwise(activation=ACTIVATIONS[1:], dtype=DTYPES),
    ],
)
def test_through_activations(activation, dtype):
    """Few codes are another one, so the error is far below the 2 to 3 % that rounding costs."""
    x, weight, bias, _, d_out, values = problem(activation, "e4m3", dtype)
    got = gradients(x, weight, bias, d_out, activation)
    want, d_bias = oracle_e4m3(x, values, bias, d_out, activation, 0.5)
    exact, _ = oracle_gradient(wide(x), values, wide(bias), wide(d_out), activation)
    error, cost = (np.linalg.norm(wide(got[0]) - to) / np.linalg.norm(to) for to in (want, exact))
    assert error < 0.006
    assert 0.015 < cost < 0.045
    np.testing.assert_allclose(got[1], d_bias, rtol=2e-3, atol=2e-3)


def test_sums_beyond_float16():
    """Before an activation they may be large, as in the product's epilogue."""
    weight = tj.fireq.quantize_weight(jnp.full((64, 128), -8.0))
    x, d_out = jnp.full((1, 128), 100.0, jnp.float16), jnp.ones((1, 64), jnp.float16)
    d_x = gradients(x, weight, None, d_out, "silu")[0]
    np.testing.assert_array_equal(wide(d_x), 0.0)


def test_rows_of_every_size():
    """Powers of two in `output_scale` go to the cotangents; small rows drown in large ones."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(60, 200)) * np.logspace(-12, 4, 60)[:, None], jnp.float32)
    weight = tj.fireq.quantize_weight(w)
    x, d_out = normal((5, 200), 1), normal((5, 60), 2) / jnp.logspace(-12, 4, 60)[None]
    bias = jnp.zeros(60)
    got, exact = (gradients(x, weight, bias, d_out, None, name)[0] for name in ("e4m3", "exact"))
    assert jnp.linalg.norm(got - exact) < 0.04 * jnp.linalg.norm(exact)


def test_what_is_not_finite():
    """In its token alone; NaN of a weight in the inputs of its group, of every token."""
    x, weight, bias, _, d_out, _ = problem("silu", "e4m3")
    d_x, d_bias = gradients(x, weight, bias, d_out.at[2, 3].set(jnp.nan), "silu")
    assert np.isnan(d_x[2]).all()
    assert np.isfinite(np.delete(d_x, 2, 0)).all()
    assert np.flatnonzero(np.isnan(d_bias)).tolist() == [3]
    bad = tj.fireq.quantize_weight((normal((40, 200), 1) * 0.1).at[7, 3].set(jnp.inf))
    d_x, _ = gradients(x, bad, bias, d_out, None)
    np.testing.assert_array_equal(np.isnan(d_x), np.arange(200)[None] < 128 + np.zeros((6, 1)))


def test_transforms():
    """Equal bits twice; of one token under vmap those of many; names of implementations."""
    x, weight, bias, _, d_out, _ = problem("swiglu", "e4m3", jnp.bfloat16)
    want = gradients(x, weight, bias, d_out, "swiglu")
    for again in (
        gradients(x, weight, bias, d_out, "swiglu"),
        gradients(x, weight, bias, d_out, "swiglu", implementation="xla"),
    ):
        jax.tree.map(np.testing.assert_array_equal, again, want)

    def one(x, d_out):
        return gradients(x[None], weight, bias, d_out[None], "swiglu")[0][0]

    rows = jax.vmap(one)(x, d_out)
    np.testing.assert_allclose(wide(rows), wide(want[0]), atol=2**-6)


def test_precision_is_that_of_sums():
    """Products of rounded cotangents, whatever it is."""
    x, weight, bias, _, d_out, _ = problem("silu", "e4m3")

    def call(x, precision):
        options = {"bias": bias, "activation": "silu", "gradient": "e4m3"}
        return tj.fireq.matmul(x, weight, precision=precision, **options)

    got, want = (jax.vjp(lambda x, p=p: call(x, p), x)[1](d_out)[0] for p in ("highest", None))
    np.testing.assert_array_equal(got, want)


def test_refusals():
    x, weight, bias, _, d_out, _ = problem(None, "bf16")
    with pytest.raises(ValueError, match="gradient='e4m3' needs weights with e4m3 scales, not bf"):
        gradients(x, weight, bias, d_out, None)
    with pytest.raises(ValueError, match=r"gradient='bf16' must be one of \('exact', 'e4m3'\)"):
        gradients(x, weight, bias, d_out, None, "bf16")
    words = "the gradient of matmul has no gradient: only first derivatives are supported"
    good = problem(None, "e4m3")[1]

    def total(x):
        return jnp.sum(tj.fireq.matmul(x, good, gradient="e4m3") ** 2)

    with pytest.raises(NotImplementedError, match=words):
        jax.grad(lambda x: jnp.sum(jax.grad(total)(x)))(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_channels(dtype):
    """`scale_quantize` is a product, rounded to the tokens' dtype, then `quantize_activation`."""
    x, scale = normal((5, 300), 0, dtype), normal((300,), 1)
    product = (x.astype(jnp.float32) * scale[None]).astype(dtype)
    got, want = scale_quantize(x, scale), quantize_activation(product)
    np.testing.assert_array_equal(wide(got.codes), wide(want.codes))
    np.testing.assert_array_equal(wide(got.scale), wide(want.scale))
    with pytest.raises(ValueError, match=r"scale.shape=\(300,\) must be \(200,\)"):
        scale_quantize(x[:, :200], scale)
