"""`grouped_matmul` compiled, each expert against the oracle, and `Int4Experts` as XLA has it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.matmul.experts_helpers import assert_equals_experts, operands
from tests.matmul.int4_helpers import wide
from turbojax._device import needs_hopper
from turbojax.matmul.grouped import mosaic_gpu
from turbojax.matmul.int4.weight import BLOCK

pytestmark = pytest.mark.gpu

KERNELS = ("triton", "mosaic_gpu")
UNEVEN = [1, 0, 200, 33, 0, 8, 7, 64]
# Rows, sizes of groups; outputs, inputs; what else. On Hopper tiles of 8 to 256 tokens.
CASES = {
    "one row": ((1, [0, 1, 0]), (64, 128), {}),
    "few, odd sizes": ((23, [3, 0, 11, 1, 2]), (200, 300), {}),
    "gated": ((61, [5, 0, 30, 9, 0, 16]), (384, 520), {"gated": True}),
    "bf16": ((61, [5, 0, 30, 9, 0, 16]), (192, 520), {"scale_dtype": "bf16"}),
    "float16, gated": ((70, [60, 10]), (75, 130), {"gated": True, "dtype": jnp.float16}),
    "many experts": ((300, [3, 0, 1] * 60), (136, 256), {}),
    "uneven": ((320, UNEVEN), (640, 1024), {}),
    "uneven, gated": ((313, UNEVEN), (200, 640), {"gated": True}),
    "all to one": ((300, [0, 300, 0, 0]), (512, 640), {}),
    "many, gated": ((900, [500, 3, 297]), (320, 640), {"gated": True}),
    "many, bf16": ((900, [500, 3, 297]), (130, 300), {"scale_dtype": "bf16"}),
    "one expert": ((2049, [2000]), (768, 1024), {}),
    "nobody": ((40, [0, 0]), (128, 256), {}),
}


def run(implementation, tokens, weight, sizes, bias, activation, precision=None):
    if implementation == "mosaic_gpu" and needs_hopper() is not None:
        pytest.skip(needs_hopper())
    options = {"activation": activation, "precision": precision}
    call = functools.partial(tj.fireq.grouped_matmul, implementation=implementation, **options)
    return jax.jit(call)(tokens, weight, sizes, bias=bias)


@pytest.mark.quick(7)
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_each_expert_is_as_the_oracle(implementation, name, precision):
    (rows, sizes), shape, options = CASES[name]
    arrays = operands(rows, sizes, *shape, **options)
    weight = arrays[1]
    activation = "swiglu" if weight.gated else "gelu"
    got = run(implementation, *arrays, activation, precision)
    depth = None
    if implementation == "mosaic_gpu":
        launch = mosaic_gpu.default_launch(rows, weight, is_precise=precision is not None)
        depth = BLOCK if launch.is_two_level else weight.padded_shape[1]
    assert_equals_experts(got, *arrays, activation, depth)
    again = run(implementation, *arrays, activation, precision)
    np.testing.assert_array_equal(wide(got), wide(again))


@pytest.mark.parametrize("implementation", [*KERNELS, "xla"])
@pytest.mark.parametrize("sizes", [[3, -1, 4], [30, 100, 140]])
def test_sizes_that_are_not_valid(implementation, sizes):
    tokens, weight, _, bias = operands(200, [0, 0, 0], 200, 300)
    got = run(implementation, tokens, weight, jnp.asarray(sizes), bias, None)
    assert jnp.isnan(got).all()


@pytest.mark.parametrize("implementation", KERNELS)
def test_what_is_not_finite_stays_with_its_token(implementation):
    tokens, weight, sizes, _ = operands(320, UNEVEN, 640, 1024)
    clean = wide(run(implementation, tokens, weight, sizes, None, None))
    scale = tokens.scale.at[jnp.array([5, 201, 319])].set(jnp.nan)
    bad = tj.fireq.Fp8Tokens(tokens.codes, scale, tokens.dtype)
    got = wide(run(implementation, bad, weight, sizes, None, None))
    lost = np.isnan(got).all(axis=1)
    assert np.flatnonzero(lost).tolist() == [5, 201]
    np.testing.assert_array_equal(got[~lost], clean[~lost])


def test_under_vmap():
    """Each of several calls, with its own groups, as it would be alone."""
    tokens, weight, *_ = operands(24, [3, 10, 8], 200, 300)
    sizes = jnp.array([[3, 10, 8], [24, 0, 0], [0, 1, 2]])
    got = jax.jit(jax.vmap(tj.fireq.grouped_matmul, in_axes=(None, None, 0)))(tokens, weight, sizes)
    alone = jax.jit(tj.fireq.grouped_matmul)
    for out, size in zip(got, sizes, strict=True):
        np.testing.assert_array_equal(wide(out), wide(alone(tokens, weight, size)))


def test_the_layer():
    """What None chooses as XLA has it, and its gradient."""
    rng = np.random.default_rng(0)
    shapes = [(256, 12), (12, 256, 136), (12, 256, 136), (12, 136, 256)]
    kernels = [jnp.asarray(rng.normal(size=s) * s[-2] ** -0.5, jnp.float32) for s in shapes]
    x = jnp.asarray(rng.normal(size=(3, 50, 256)), jnp.bfloat16)
    found = []
    for implementation in (None, "xla"):
        layer = tj.flax.Int4Experts.from_kernels(
            *kernels, top_k=3, normalize=True, implementation=implementation
        )

        def total(x, layer=layer):
            y = layer(x)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), d_x = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
        found.append((wide(y), wide(d_x)))
    for got, want in zip(*found, strict=True):
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)
