"""`fireq.matmul(activations="bf16")`: unrounded tokens, against float64; weights with zeros.

Every implementation that runs on a CPU; what the kernels for Hopper compute is in
`test_mosaic_w4a16.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.contracts.implementations import ON_CPU, interpreted
from tests.matmul.int4_helpers import (
    assert_equals_oracle,
    random_epilogue,
    random_floats,
    random_tokens,
    weight_of,
    wide,
    with_zeros,
)
from tests.matmul.test_int4_matmul_gradient import oracle_gradient
from tests.matmul.test_int4_weight import assert_same_bits, random_weight
from turbojax.flax import Int4Linear
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.api import MATMUL
from turbojax.matmul.int4.layout import code_rows, scale_rows
from turbojax.models.quantized import take_rows

matmul = functools.partial(tj.fireq.matmul, activations="bf16")

# Tokens, outputs, inputs; scales, or zeros too; activation; dtype.
CASES = [
    ((5, 70, 300), "zeros", None, jnp.bfloat16),
    ((1, 40, 128), "e4m3", "swiglu", jnp.float16),
    ((18, 65, 256), "f16", "gelu", jnp.bfloat16),
    ((3, 40, 200), "bf16", "silu", jnp.float16),
    ((7, 24, 130), "zeros", "swiglu", jnp.float16),
    ((7, 24, 130), "e4m3", None, jnp.bfloat16),
]


def operands(case, seed=0):
    (count, out_size, in_size), kind, activation, dtype = case
    rng = np.random.default_rng(seed)
    weight = weight_of(rng, out_size, in_size, kind, gated=activation == "swiglu")
    x = random_floats(rng, count, in_size, dtype)
    return x, weight, *random_epilogue(rng, count, weight, dtype), activation


@pytest.mark.quick(first=1, slow=0)  # the kernel, with zeros
@pytest.mark.parametrize(
    ("case", "implementation"),
    [(case, name) for case in CASES for name in reversed(ON_CPU)],
)
def test_equals_the_oracle(case, implementation):
    x, weight, bias, residual, activation = operands(case)
    options = {"bias": bias, "residual": residual, "activation": activation}
    with interpreted(implementation):
        got = matmul(x, weight, implementation=implementation, **options)
    assert_equals_oracle(got, x, weight, bias, residual, activation)


@pytest.mark.parametrize("kind", ["zeros", "e4m3"])
def test_float32_tokens(kind):
    """The definition takes them as they are, and so does what is chosen for them."""
    case = (4, 40, 300), kind, None, jnp.float32
    x, weight, bias, residual, _ = operands(case)
    got = matmul(x, weight, bias=bias, residual=residual)
    assert_equals_oracle(got, x, weight, bias, residual, None)
    for name in ("triton", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match=f"{name}: dtype=float32 must be bfloat16 or"):
            matmul(x, weight, implementation=name)


def test_nothing_is_rounded():
    """One hot tokens pick the weights out; those of e4m3's range and far beyond it."""
    weight = weight_of(np.random.default_rng(0), 64, 130, "zeros")
    for size in (1.0, 2.0**-20, 2.0**20):
        x = size * jnp.eye(130, dtype=jnp.float32)
        want = size * tj.fireq.dequantize(weight).T
        np.testing.assert_array_equal(matmul(x, weight), want)
    # A value that e4m3 would round away beside a large one.
    x = jnp.asarray([[1000.0, 0.01] + 128 * [0.0]], jnp.float32)
    values = wide(tj.fireq.dequantize(weight))
    np.testing.assert_allclose(wide(matmul(x, weight))[0], values[:, :2] @ [1000, 0.01], rtol=1e-6)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize(
    ("group_size", "kind"), [(32, "f16"), (64, "f16"), (256, "f16"), (64, "e4m3")]
)
def test_group_sizes(group_size, kind, implementation):
    """Triton takes all of them; of large ones the scale stands for each 128 inputs."""
    w = jnp.asarray(np.random.default_rng(0).normal(size=(40, 300)), jnp.float32)
    weight = tj.fireq.quantize_weight(w, group_size=group_size, scale_dtype=kind)
    if kind != "e4m3":
        weight = with_zeros(weight)
    x = random_floats(np.random.default_rng(1), 3, 300)
    with interpreted(implementation):
        got = matmul(x, weight, implementation=implementation)
    assert_equals_oracle(got, x, weight, None, None, None)
    same = int4.in_blocks(weight)
    same.validate()
    assert same.group_size == min(group_size, 128)
    np.testing.assert_array_equal(tj.fireq.dequantize(same), tj.fireq.dequantize(weight))


def test_what_is_not_finite_goes_on_as_in_floats():
    x, weight, *_ = operands(((4, 40, 300), "zeros", None, jnp.bfloat16))
    x = x.at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
    got = wide(matmul(x, weight))
    assert np.isnan(got[1]).all()
    with np.errstate(invalid="ignore"):
        want = wide(x)[2] @ wide(tj.fireq.dequantize(weight)).T
    np.testing.assert_array_equal(np.isfinite(got[2]), np.isfinite(want))
    assert np.isfinite(got[[0, 3]]).all()


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_gradient(activation):
    """That of the product itself: nothing is rounded that it would have to pass through."""
    case = (6, 40, 200), "zeros", activation, jnp.float32
    x, weight, bias, residual, _ = operands(case)
    x = 0.1 * x
    d_out = jnp.asarray(np.random.default_rng(2).normal(size=residual.shape), jnp.float32)

    def loss(x, bias, residual):
        options = {"bias": bias, "residual": residual, "activation": activation}
        return jnp.sum(matmul(x, weight, **options) * d_out)

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, bias, residual)
    values = wide(tj.fireq.dequantize(weight))
    want = oracle_gradient(wide(x), values, wide(bias), wide(d_out), activation)
    for a, b in zip(got, (*want, wide(d_out)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    with pytest.raises(NotImplementedError, match="only first derivatives are supported"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, bias, residual)))(x)


def test_transforms():
    x, weight, *_ = operands(((4, 40, 300), "zeros", None, jnp.bfloat16))
    want = wide(matmul(x, weight))
    np.testing.assert_array_equal(wide(jax.jit(matmul)(x, weight)), want)
    many = jax.vmap(matmul, (0, None))(jnp.stack([x, x[::-1]]), weight)
    np.testing.assert_array_equal(wide(many), np.stack([want, want[::-1]]))
    lead = matmul(x.reshape(2, 2, 300), weight)
    np.testing.assert_array_equal(wide(lead).reshape(4, -1), want)


def test_a_linear_layer():
    linear = nnx.Linear(200, 40, rngs=nnx.Rngs(0))
    layer = Int4Linear.from_linear(linear, scale_dtype="f16", activations="bf16")
    x = random_floats(np.random.default_rng(0), 3, 200, jnp.float32)
    want = matmul(x, layer.weight, bias=layer.bias.get_value())
    np.testing.assert_array_equal(layer(x), want)
    assert np.abs(wide(want) - wide(Int4Linear(layer.weight)(x))).max() > 0
    with pytest.raises(ValueError, match="activations='f16' must be one of"):
        Int4Linear(layer.weight, activations="f16")


def test_bad_input():
    x, weight, *_ = operands(((4, 40, 300), "zeros", None, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"activations='int8' must be one of \('e4m3', 'bf16'\)"):
        tj.fireq.matmul(x, weight, activations="int8")
    with pytest.raises(TypeError, match="x is Fp8Tokens, must be an array for activations='bf16'"):
        matmul(tj.fireq.quantize_tokens(x), weight)
    assert [i.name for i in MATMUL.implementations] == ["mosaic_gpu", "triton", "xla"]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("scale_dtype", ["bf16", "f16"])
def test_zeros(scale_dtype):
    """A value is the distance from the zero, in scales; joins and rows keep them."""
    quantize = functools.partial(tj.fireq.quantize_weight, scale_dtype=scale_dtype)
    plain = quantize(random_weight((70, 300)))
    weight = with_zeros(plain)
    weight.validate()
    scale = np.repeat(wide(scale_rows(weight.scales)), 128, axis=1)
    zeros = np.repeat(np.asarray(scale_rows(weight.zeros)), 128, axis=1)
    codes = np.asarray(int4.unpack_codes(code_rows(weight.codes)))
    want = (scale * (codes - zeros))[:70, :300]
    np.testing.assert_array_equal(tj.fireq.dequantize(weight), want)
    np.testing.assert_array_equal(take_rows(weight, jnp.array([[69, 3]])), want[None, [69, 3]])
    both = tj.fireq.concatenate([weight, weight])
    gated = tj.fireq.gate_and_up(weight, weight)
    for joined in (both, gated):
        joined.validate()
        np.testing.assert_array_equal(tj.fireq.dequantize(joined), np.concatenate([want] * 2))
    assert weight.nbytes == plain.nbytes + 128 * 3
    assert_same_bits(tj.fireq.from_tensors(*tj.fireq.to_tensors(weight, "a"), "a"), weight)
    with pytest.raises(ValueError, match="must be alike"):
        tj.fireq.concatenate([weight, plain])
    with pytest.raises(ValueError, match="must be bfloat16 or float16 of a weight with zeros"):
        with_zeros(tj.fireq.quantize_weight(random_weight((3, 5)))).validate()
    with pytest.raises(TypeError, match="zeros.dtype=uint8 must be int8"):
        dataclasses.replace(weight, zeros=weight.zeros.astype(jnp.uint8)).validate()


def test_stacks():
    """Leading axes, as of experts."""
    w = random_weight((2, 3, 20, 200))
    quantize = jax.vmap(jax.vmap(tj.fireq.quantize_weight))
    stacked = quantize(w)
    stacked.validate()
    assert stacked.stack == (2, 3)
    values = tj.fireq.dequantize(stacked)
    assert values.shape == w.shape
    one = tj.fireq.quantize_weight(w[1, 2])
    np.testing.assert_array_equal(values[1, 2], tj.fireq.dequantize(one))
    assert_same_bits(tj.fireq.from_tensors(*tj.fireq.to_tensors(stacked, "a"), "a"), stacked)
    with pytest.raises(ValueError, match=r"scales.shape=\(3, 1, 2, 64\) must be \(2, 3, 1, 2, 64"):
        dataclasses.replace(stacked, scales=stacked.scales[0]).validate()
    with pytest.raises(ValueError, match=r"stack=\(2, 3\) must be \(\): weights are joined one"):
        tj.fireq.concatenate([stacked])
    with pytest.raises(ValueError, match=r"stack=\(2, 3\) must be \(\): for a stack"):
        tj.fireq.matmul(w[0, 0], stacked)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("scale_dtype", "activation"), [("bf16", "swiglu"), ("f16", "gelu")])
def test_product(scale_dtype, activation):
    """Whatever is chosen for it, here and on a GPU; and its gradient."""
    quantize = functools.partial(tj.fireq.quantize_weight, scale_dtype=scale_dtype)
    parts = [with_zeros(quantize(random_weight((40, 300), seed=i)), i) for i in range(2)]
    weight = tj.fireq.gate_and_up(*parts) if activation == "swiglu" else parts[0]
    rng = np.random.default_rng(0)
    tokens = random_tokens(rng, 5, 300)
    bias, residual = random_epilogue(rng, 5, weight, tokens.dtype)
    options = {"bias": bias, "residual": residual, "activation": activation}
    got = tj.fireq.matmul(tokens, weight, **options)
    assert_equals_oracle(got, tokens, weight, *options.values())
    x, d_out = (jnp.asarray(0.05 * rng.normal(size=(5, n)), jnp.float32) for n in (300, 40))

    def loss(x):
        return jnp.sum(tj.fireq.matmul(x, weight, bias=bias, activation=activation) * d_out)

    values = wide(tj.fireq.dequantize(weight))
    want, _ = oracle_gradient(wide(x), values, wide(bias), wide(d_out), activation)
    np.testing.assert_allclose(jax.grad(loss)(x), want, rtol=1e-4, atol=1e-4)


def test_the_kernel_of_e4m3_products_refuses_zeros():
    weight = with_zeros(tj.fireq.quantize_weight(random_weight((8, 128)), scale_dtype="bf16"))
    x = jnp.ones((1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: weight.zeros must be None"):
        tj.fireq.matmul(x, weight, implementation="mosaic_gpu")
