"""INT4 weights that are not symmetric, and stacks of weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.matmul.int4_helpers import (
    assert_equals_oracle,
    random_epilogue,
    random_tokens,
    wide,
    with_zeros,
)
from tests.matmul.test_int4_matmul_gradient import oracle_gradient
from tests.matmul.test_int4_weight import assert_same_bits, random_weight
from turbojax.matmul.int4 import weight as int4
from turbojax.matmul.int4.layout import code_rows, scale_rows
from turbojax.models.quantized import take_rows


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
