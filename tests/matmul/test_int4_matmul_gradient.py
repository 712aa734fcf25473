"""Gradients of `fireq.matmul`: against float64 derivatives written out, of dequantized weights.

Both exact and with cotangents in e4m3.

The oracle is itself held to finite differences. Float32 gradients may be as far from it as twice
what jax's own float32 gradient of plain arrays is, plus a few units in the last place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.grids import pairwise
from tests.oracles import int4 as oracle
from turbojax.matmul.fp8_tokens import quantize_activation, scale_quantize

SCALE_DTYPES = ("e4m3", "bf16")
ACTIVATIONS = (None, "silu", "gelu", "swiglu")


def normal(shape, seed, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.float32).astype(dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def slope(z, activation):
    """Derivative of the activation."""
    if activation is None:
        return np.ones_like(z)
    if activation == "silu":
        s = oracle.sigmoid(z)
        return s * (1 + z * (1 - s))
    c = 2 * np.sqrt(2 / np.pi)
    s = oracle.sigmoid(c * (z + 0.044715 * z**3))
    return s + z * s * (1 - s) * c * (1 + 3 * 0.044715 * z**2)


def backward(d_out, z, activation):
    if activation is None:
        return d_out
    if activation not in oracle.GATES:
        return d_out * slope(z, activation)
    gate, up = np.split(z, 2, axis=-1)
    of_gate = oracle.GATES[activation]
    d_gate = d_out * up * slope(gate, of_gate)
    return np.concatenate([d_gate, d_out * oracle.ACTIVATIONS[of_gate](gate)], axis=-1)


def oracle_gradient(x, values, bias, d_out, activation):
    """Of ``act(x values^T + bias)``; of a gated product's outputs the gate's come first."""
    z = x @ values.T + bias
    d_z = backward(d_out, z, activation)
    return d_z @ values, d_z.sum(0)


def plain(x, values, bias, residual, activation):
    """The same in jax."""
    z = jnp.matmul(x, values.T, precision="highest") + bias[None]
    functions = {None: lambda x: x, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    if activation in oracle.GATES:
        gate, up = jnp.split(z, 2, axis=-1)
        return functions[oracle.GATES[activation]](gate) * up + residual
    return functions[activation](z) + residual


def problem(activation, scale_dtype, dtype=jnp.float32, rows=6, inputs=200, outputs=40):
    """Activations, weight, bias, residual, cotangent, and the weight's values in float64."""
    gated = activation in oracle.GATES
    arrays = [normal((outputs, inputs), seed) * 0.1 for seed in ((1, 2) if gated else (1,))]
    quantize = functools.partial(tj.fireq.quantize_weight, scale_dtype=scale_dtype)
    weights = [quantize(w, output_scale=0.5) for w in arrays]
    values = [0.5 * oracle.quantize_weight(np.asarray(w), 128, scale_dtype).values for w in arrays]
    return (
        normal((rows, inputs), 5, dtype),
        tj.fireq.gate_and_up(*weights) if gated else weights[0],
        normal((outputs * len(arrays),), 3),
        normal((rows, outputs), 4, dtype),
        normal((rows, outputs), 6, dtype),
        np.concatenate(values),
    )


@functools.partial(jax.jit, static_argnames=("activation", "gradient", "implementation"))
def gradients(x, weight, bias, residual, d_out, activation, **options):
    def call(x, bias, residual):
        given = {"bias": bias, "residual": residual, "activation": activation}
        return tj.fireq.matmul(x, weight, **given, **options)

    return jax.vjp(call, x, bias, residual)[1](d_out)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_oracle_is_a_derivative(activation):
    """Central differences, whose error is the square of the step times a third derivative."""
    x, _, bias, _, d_out, values = (
        np.asarray(a, np.float64) if i != 1 else a
        for i, a in enumerate(problem(activation, "e4m3", rows=2, inputs=9, outputs=5))
    )
    got = oracle_gradient(x, values, bias, d_out, activation)
    step = 1e-5
    for which in range(2):
        arrays = [x, bias]
        for at in np.ndindex(arrays[which].shape):
            ends = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[which][at] += sign * step
                y = oracle.activate(moved[0] @ values.T + moved[1], activation)
                ends.append((y * d_out).sum())
            assert abs((ends[0] - ends[1]) / (2 * step) - got[which][at]) < 1e-7


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("scale_dtype", "activation"),
    pairwise(scale_dtype=SCALE_DTYPES, activation=ACTIVATIONS),
)
def test_equals_the_oracle(activation, scale_dtype):
    """Straight through the rounding of `x`: the derivative stands where `x` was, not its codes."""
    x, weight, bias, residual, d_out, values = problem(activation, scale_dtype)
    got = gradients(x, weight, bias, residual, d_out, activation)
    want = oracle_gradient(*(wide(a) for a in (x,)), values, wide(bias), wide(d_out), activation)
    call = functools.partial(plain, activation=activation)
    reference = jax.vjp(call, x, jnp.asarray(values, jnp.float32), bias, residual)[1](d_out)
    for mine, exact, theirs in zip(got[:2], want, (reference[0], reference[2]), strict=True):
        assert mine.dtype == jnp.float32
        error, plain_error = (np.linalg.norm(wide(a) - exact) for a in (mine, theirs))
        assert error <= 2 * plain_error + 4 * 2.0**-24 * np.linalg.norm(exact)
        assert np.linalg.norm(exact) > 1
    np.testing.assert_array_equal(got[2], d_out)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("scale_dtype", "dtype"),
    pairwise(scale_dtype=SCALE_DTYPES, dtype=[jnp.bfloat16, jnp.float16]),
)
def test_half_precision(scale_dtype, dtype):
    """Sums are float32; in bfloat16 cotangents, and weights with bfloat16 scales, are rounded.

    Each rounding is off by half a unit in the last place at most, and so is the result's.
    """
    x, weight, bias, residual, d_out, values = problem(None, scale_dtype, dtype)
    got = gradients(x, weight, bias, residual, d_out, None)
    assert [a.dtype for a in got] == [dtype, jnp.float32, dtype]
    want = oracle_gradient(wide(x), values, wide(bias), wide(d_out), None)
    half = float(jnp.finfo(dtype).eps) / 2
    roundings = 1 if scale_dtype == "e4m3" else 2
    size = np.abs(wide(d_out)) @ np.abs(values)
    unit = 200 * 2.0**-24
    allowed = (roundings * half + unit) * size + half * np.abs(want[0]) + 2.0**-24
    assert (np.abs(wide(got[0]) - want[0]) <= 1.01 * allowed).all()
    np.testing.assert_allclose(got[1], want[1], atol=1e-5)
    np.testing.assert_array_equal(wide(got[2]), wide(d_out))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_activations_in_bfloat16(activation):
    """What the activation is differentiated at is not rounded: operands are exact, sums float32."""
    x, weight, bias, residual, d_out, values = problem(activation, "e4m3", jnp.bfloat16)
    got = gradients(x, weight, bias, residual, d_out, activation)
    want = oracle_gradient(wide(x), values, wide(bias), wide(d_out), activation)
    assert np.linalg.norm(wide(got[0]) - want[0]) <= 2**-8 * np.linalg.norm(want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_the_weight_is_frozen():
    x, weight, bias, residual, _, _ = problem("swiglu", "e4m3")

    def total(weight, x):
        y = tj.fireq.matmul(x, weight, bias=bias, activation="swiglu", residual=residual)
        return jnp.sum(y)

    d_weight = jax.grad(total, allow_int=True)(weight, x)
    assert d_weight.codes.dtype == jax.dtypes.float0
    for name in ("scales", "output_scale"):
        got, of = getattr(d_weight, name), getattr(weight, name)
        assert (got.shape, got.dtype) == (of.shape, of.dtype)
        assert not np.asarray(got.astype(jnp.float32)).any()
    assert np.asarray(jax.grad(total, 1)(weight, x)).any()


@pytest.mark.parametrize("bias", [None, 1.0])
@pytest.mark.parametrize("residual", [None, 1.0])
def test_without_bias_or_residual(bias, residual):
    x, weight, b, r, d_out, _ = problem("silu", "e4m3")
    b, r = (None if given is None else a for given, a in ((bias, b), (residual, r)))
    got = gradients(x, weight, b, r, d_out, "silu")
    full = gradients(x, weight, jnp.zeros(40) if b is None else b, d_out, d_out, "silu")
    np.testing.assert_array_equal(got[0], full[0])
    assert (got[1] is None, got[2] is None) == (b is None, r is None)


def test_a_bias_in_its_own_dtype():
    x, weight, bias, residual, d_out, _ = problem("swiglu", "e4m3")
    half = gradients(x, weight, bias.astype(jnp.bfloat16), residual, d_out, "swiglu")[1]
    assert (half.dtype, half.shape) == (jnp.bfloat16, bias.shape)


@pytest.mark.slow
def test_transforms():
    x, weight, bias, residual, d_out, _ = problem("silu", "e4m3")
    want = gradients(x, weight, bias, residual, d_out, "silu")
    again = gradients(x, weight, bias, residual, d_out, "silu")
    for a, b in zip(want, again, strict=True):
        np.testing.assert_array_equal(a, b)

    def one(x, residual, d_out):
        return gradients(x[None], weight, bias, residual[None], d_out[None], "silu")

    rows = jax.vmap(one)(x, residual, d_out)
    np.testing.assert_allclose(rows[0][:, 0], want[0], atol=1e-5)
    np.testing.assert_allclose(rows[1].sum(0), want[1], atol=1e-5)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), weight)

    def two_layers(x, stacked):
        def layer(x, weight):
            return tj.fireq.matmul(x, weight)[:, :40] @ jnp.ones((40, 200)) / 200, None

        return jnp.sum(jax.lax.scan(layer, x, stacked)[0])

    d_x = jax.grad(two_layers)(x, stacked)
    values = wide(tj.fireq.dequantize(weight))
    step = values.T @ np.ones((40, 200)) / 200
    np.testing.assert_allclose(d_x, np.ones((6, 200)) @ step.T @ step.T, rtol=1e-4, atol=1e-4)


def test_refusals():
    x, weight, *_ = problem(None, "e4m3")
    tokens = tj.fireq.quantize_tokens(x)

    def of_tokens(scale):
        y = tj.fireq.matmul(tj.fireq.Fp8Tokens(tokens.codes, scale, tokens.dtype), weight)
        return jnp.sum(y)

    with pytest.raises(NotImplementedError, match="matmul of quantized tokens has no gradient"):
        jax.grad(of_tokens)(tokens.scale)

    def total(x):
        return jnp.sum(tj.fireq.matmul(x, weight, activation="silu") ** 2)

    words = "the gradient of matmul has no gradient: only first derivatives are supported"
    with pytest.raises(NotImplementedError, match=words):
        jax.grad(lambda x: jnp.sum(jax.grad(total)(x)))(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(total, (x,), (x,))


DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def e4m3_gradients(x, weight, bias, d_out, activation, gradient="e4m3", **options):
    return gradients(x, weight, bias, None, d_out, activation, gradient=gradient, **options)[:2]


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_e4m3_equals_the_oracle(dtype):
    """Without an activation to the bit but for sums: of `K` products, and one rounding."""
    x, weight, bias, _, d_out, values = problem(None, "e4m3", dtype)
    got = e4m3_gradients(x, weight, bias, d_out, None)
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
    got = e4m3_gradients(x, weight, bias, d_out, activation)
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
    d_x = e4m3_gradients(x, weight, None, d_out, "silu")[0]
    np.testing.assert_array_equal(wide(d_x), 0.0)


def test_rows_of_every_size():
    """Powers of two in `output_scale` go to the cotangents; small rows drown in large ones."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(60, 200)) * np.logspace(-12, 4, 60)[:, None], jnp.float32)
    weight = tj.fireq.quantize_weight(w)
    x, d_out = normal((5, 200), 1), normal((5, 60), 2) / jnp.logspace(-12, 4, 60)[None]
    bias = jnp.zeros(60)
    got, exact = (
        e4m3_gradients(x, weight, bias, d_out, None, name)[0] for name in ("e4m3", "exact")
    )
    assert jnp.linalg.norm(got - exact) < 0.04 * jnp.linalg.norm(exact)


@pytest.mark.parametrize("gradient", ["exact", "e4m3"])
def test_what_is_not_finite(gradient):
    """In its token alone; in e4m3 NaN of a weight in the inputs of its group, of every token."""
    x, weight, bias, _, d_out, _ = problem("silu", "e4m3")
    spoiled = d_out.at[2, 3].set(jnp.nan)
    d_x, d_bias = e4m3_gradients(x, weight, bias, spoiled, "silu", gradient)
    assert np.isnan(d_x[2]).all()
    assert np.isfinite(np.delete(d_x, 2, 0)).all()
    assert np.flatnonzero(np.isnan(d_bias)).tolist() == [3]
    if gradient == "e4m3":
        bad = tj.fireq.quantize_weight((normal((40, 200), 1) * 0.1).at[7, 3].set(jnp.inf))
        d_x, _ = e4m3_gradients(x, bad, bias, d_out, None)
        is_nan = np.arange(200)[None] < 128 + np.zeros((6, 1))
        np.testing.assert_array_equal(np.isnan(d_x), is_nan)


def test_transforms_in_e4m3():
    """Equal bits twice; of one token under vmap those of many; names of implementations."""
    x, weight, bias, _, d_out, _ = problem("swiglu", "e4m3", jnp.bfloat16)
    want = e4m3_gradients(x, weight, bias, d_out, "swiglu")
    for again in (
        e4m3_gradients(x, weight, bias, d_out, "swiglu"),
        e4m3_gradients(x, weight, bias, d_out, "swiglu", implementation="xla"),
    ):
        jax.tree.map(np.testing.assert_array_equal, again, want)

    def one(x, d_out):
        return e4m3_gradients(x[None], weight, bias, d_out[None], "swiglu")[0][0]

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


def test_refusals_of_e4m3():
    x, weight, bias, _, d_out, _ = problem(None, "bf16")
    with pytest.raises(ValueError, match="gradient='e4m3' needs weights with e4m3 scales, not bf"):
        e4m3_gradients(x, weight, bias, d_out, None)
    with pytest.raises(ValueError, match=r"gradient='bf16' must be one of \('exact', 'e4m3'\)"):
        e4m3_gradients(x, weight, bias, d_out, None, "bf16")
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
