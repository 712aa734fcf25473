"""`fireq.matmul(activations="bf16")` compiled, against the oracle.

What an implementation refuses is tested on the CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.matmul.int4_helpers import (
    assert_equals_oracle,
    random_epilogue,
    random_floats,
    stored_bias,
    weight_of,
    wide,
)
from turbojax._device import needs_hopper
from turbojax.matmul.int4.api import MATMUL
from turbojax.matmul.int4.weight import in_blocks

pytestmark = pytest.mark.gpu

KERNELS = ("triton", "mosaic_gpu")
# Tokens, outputs, inputs; scales, or zeros too; activation: around the tiles of both kernels.
CASES = {
    "one token": ((1, 4096, 4096), "zeros", None),
    "five tokens, gated": ((5, 75, 300), "zeros", "swiglu"),
    "eight tokens": ((8, 200, 520), "e4m3", None),
    "sixteen tokens, gated": ((16, 1408, 2048), "f16", "swiglu"),
    "half a tile": ((3, 64, 96), "bf16", "silu"),
    "many inputs": ((16, 320, 14336), "zeros", None),
    "many outputs": ((2, 28672, 640), "zeros", "gelu"),
    "seventeen tokens": ((17, 200, 300), "zeros", "gelu"),
    "one tile": ((64, 512, 4096), "e4m3", "silu"),
    "several tiles, gated": ((300, 704, 640), "zeros", "swiglu"),
    "a tile and one token": ((129, 200, 300), "bf16", None),
    "half a tile, many tokens": ((300, 64, 300), "zeros", None),
    "many tokens": ((2049, 768, 1024), "zeros", None),
}


def run(implementation, x, weight, bias, residual, activation):
    """By name; where the GPU is no Hopper perhaps a skip with the refusal."""
    [found] = [i for i in MATMUL.implementations if i.name == implementation]
    options = {"activation": activation, "residual": residual}
    rows = stored_bias(bias, weight)
    blocks = jax.eval_shape(in_blocks, weight)  # which is what implementations are given
    refusal = found.unsupported(tokens=x, weight=blocks, bias=rows, **options)
    if refusal is not None:
        assert needs_hopper() is not None, refusal
        pytest.skip(f"{implementation}: {refusal}")
    return compiled(implementation, activation)(x, weight, bias=bias, residual=residual)


@functools.cache
def compiled(implementation, activation):
    call = functools.partial(tj.fireq.matmul, activations="bf16", activation=activation)
    return jax.jit(functools.partial(call, implementation=implementation))


@pytest.mark.quick(14)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(implementation, name, dtype):
    """Near it, and twice the same bits."""
    (count, out_size, in_size), kind, activation = CASES[name]
    rng = np.random.default_rng(0)
    weight = weight_of(rng, out_size, in_size, kind, gated=activation == "swiglu")
    x = random_floats(rng, count, in_size, dtype)
    bias, residual = random_epilogue(rng, count, weight, dtype)
    arrays = (x, weight, bias, residual, activation)
    got = run(implementation, *arrays)
    assert_equals_oracle(got, *arrays)
    np.testing.assert_array_equal(wide(got), wide(run(implementation, *arrays)))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("kind", ["zeros", "e4m3"])
@pytest.mark.parametrize("count", [16, 512])
def test_every_weight_by_itself(implementation, kind, count):
    """One hot tokens pick the weights out one by one: the order of inputs, and every value."""
    weight = weight_of(np.random.default_rng(1), 128, 512, kind)
    want = wide(tj.fireq.dequantize(weight).T.astype(jnp.float16))
    tokens = jnp.eye(512, dtype=jnp.float16)
    for first in range(0, 512, count):
        some = slice(first, first + count)
        got = run(implementation, tokens[some], weight, None, None, None)
        np.testing.assert_array_equal(wide(got), want[some])


@pytest.mark.parametrize(
    ("implementation", "group_size"),
    [("triton", 32), ("triton", 64), ("triton", 256), ("mosaic_gpu", 256)],
)
def test_other_groups(implementation, group_size):
    """Kernels for Hopper take those of 128 and more alone."""
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.normal(size=(200, 1024)), jnp.float32)
    weight = tj.fireq.quantize_weight(w, group_size=group_size, scale_dtype="f16")
    x = random_floats(rng, 9, 1024)
    got = run(implementation, x, weight, None, None, None)
    assert_equals_oracle(got, x, weight, None, None, None)
