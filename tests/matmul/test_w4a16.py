"""`fireq.matmul(activations="bf16")`: tokens that stay as they are, against float64.

Every implementation that runs on a CPU; what the kernels for Hopper compute is in
`test_mosaic_w4a16.py`.
"""

import dataclasses
import functools
import sys
from typing import Any

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
    weight_of,
    wide,
    with_zeros,
)
from tests.matmul.test_int4_matmul_gradient import oracle_gradient
from turbojax import fireq
from turbojax.flax import Int4Linear
from turbojax.ops.int4_matmul.api import MATMUL
from turbojax.quantizers import int4

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


@dataclasses.dataclass(frozen=True)
class QArray:
    """What qwix's documentation says of its class, which is used where qwix is not installed."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    qtype: Any = jnp.int4

    def values(self):
        """float64, rounded once to the scales' dtype."""

        def wide(x):
            x = np.asarray(x).astype(np.float64)
            for axis, size in enumerate(self.qvalue.shape):
                x = np.repeat(x, size // x.shape[axis], axis=axis)
            return x

        zero = 0.0 if self.zero_point is None else wide(self.zero_point)
        exact = (np.asarray(self.qvalue).astype(np.float64) - zero) * wide(self.scale)
        return exact.astype(np.asarray(self.scale).dtype)


def random(shape, scale, dtype, zero=None, seed=0):
    rng = np.random.default_rng(seed)
    return QArray(
        jnp.asarray(rng.integers(-8, 8, shape)).astype(jnp.int4),
        jnp.asarray(rng.uniform(0.001, 0.02, scale)).astype(dtype),
        None if zero is None else jnp.asarray(rng.integers(-8, 8, zero)).astype(jnp.int4),
    )


# shape, scale, dtype, zero_point, in_axis
QWIX_CASES = {
    "groups": ((256, 40), (2, 40), jnp.bfloat16, None, 0),
    "groups of 32, zeros": ((96, 40), (3, 40), jnp.float16, (3, 40), 0),
    "channels": ((200, 24), (1, 24), jnp.float32, None, 0),
    "channels, zeros by group": ((24, 128), (24, 1), jnp.float32, (24, 2), 1),
    "one for all outputs": ((512, 24), (2, 1), jnp.bfloat16, (1, 24), 0),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("case", QWIX_CASES)
def test_there_and_back(case, monkeypatch):
    shape, scale, dtype, zero, axis = QWIX_CASES[case]
    array = random(shape, scale, dtype, zero)
    weight = fireq.from_qwix(array, in_axis=axis)
    weight.validate()
    values = np.asarray(fireq.dequantize(weight))
    values = values.T if axis == 0 else values
    assert values.astype(array.scale.dtype).tobytes() == array.values().tobytes()

    monkeypatch.setattr("turbojax.quantizers.int4_qwix._qarray_type", lambda: QArray)
    back = fireq.to_qwix(weight, in_axis=axis)
    assert back.scale.dtype == array.scale.dtype
    assert back.values().tobytes() == array.values().tobytes()
    again = fireq.from_qwix(back, in_axis=axis)
    assert jax.tree.structure(again) == jax.tree.structure(weight)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(weight), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_our_own_weights(monkeypatch):
    monkeypatch.setattr("turbojax.quantizers.int4_qwix._qarray_type", lambda: QArray)
    w = jax.random.normal(jax.random.key(0), (40, 256))
    for kind, dtype in (("bf16", jnp.bfloat16), ("f16", jnp.float16)):
        weight = fireq.quantize_weight(w, scale_dtype=kind)
        array = fireq.to_qwix(weight)
        assert (array.qvalue.shape, array.scale.dtype) == ((256, 40), dtype)
        values = np.asarray(fireq.dequantize(weight)).T
        assert values.astype(dtype).tobytes() == array.values().tobytes()
    # A power of two an output is part of the scale.
    weight = fireq.quantize_weight(w * 1e-9, scale_dtype="f16")
    array = fireq.to_qwix(weight)
    assert array.scale.dtype == jnp.float32
    np.testing.assert_array_equal(array.values(), np.asarray(fireq.dequantize(weight)).T)


@pytest.mark.slow
def test_refusals(monkeypatch):
    good = random((256, 40), (2, 40), jnp.bfloat16)
    for error, message, changes in (
        (TypeError, "qvalue.dtype=int8", {"qvalue": good.qvalue.astype(jnp.int8)}),
        (TypeError, "qtype=nf4", {"qtype": "nf4"}),
        (TypeError, "zero_point.dtype=int8", {"zero_point": jnp.zeros((2, 40), jnp.int8)}),
        (TypeError, "scale.dtype=int8", {"scale": good.scale.astype(jnp.int8)}),
        (ValueError, "two axes", {"qvalue": good.qvalue[None]}),
        (ValueError, "divides 256", {"scale": jnp.ones((3, 40), jnp.bfloat16)}),
        (
            ValueError,
            "16 groups of 256 inputs are of 16, must be of 32, 64 or a multiple of 128",
            {"scale": jnp.ones((16, 40), jnp.bfloat16)},
        ),
        (ValueError, r"scale.shape=\(0, 40\) must", {"scale": jnp.ones((0, 40), jnp.bfloat16)}),
        (ValueError, r"zero_point.shape=\(0, 40\)", {"zero_point": jnp.zeros((0, 40), jnp.int4)}),
        (TypeError, "scale is a NoneType, must be an array", {"scale": None}),
        (TypeError, "qvalue is a NoneType, must be an array", {"qvalue": None}),
        (ValueError, "scale in float32", {"scale": 0.1 + good.scale.astype(jnp.float32)}),
    ):
        with pytest.raises(error, match=message):
            fireq.from_qwix(dataclasses.replace(good, **changes))
    with pytest.raises(TypeError, match="must have qvalue"):
        fireq.from_qwix(jnp.zeros((4, 4)))
    with pytest.raises(ValueError, match="in_axis=2"):
        fireq.from_qwix(good, in_axis=2)

    weight = fireq.from_qwix(good)
    w = jnp.ones((8, 128))
    codes, zeros = jnp.ones((8, 128), jnp.int8), jnp.zeros((8, 1), jnp.int8)
    high = fireq.from_codes(codes, jnp.ones((8, 1), jnp.float16), zeros + 8)
    for error, message, wrong in (
        (TypeError, "must be an Int4Weight", w),
        (ValueError, "e4m3", fireq.quantize_weight(w)),
        (ValueError, "gate and up one by one", fireq.gate_and_up(weight, weight)),
        (ValueError, "one by one", jax.tree.map(lambda x: x[None], weight)),
        (ValueError, "zeros hold 8", high),
        (
            ValueError,
            "must be float32 numbers",
            dataclasses.replace(weight, output_scale=1.1 * weight.output_scale),
        ),
    ):
        with pytest.raises(error, match=message):
            fireq.to_qwix(wrong)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    weight = fireq.from_qwix(random((256, 40), (2, 40), jnp.bfloat16))
    with pytest.raises(ImportError, match="pip install 'qwix>=0.1.5'"):
        fireq.to_qwix(weight)


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("how", [{"tiled_axes": {0: 64}}, {}, {"calibration_method": "minmax"}])
def test_the_package_itself(how):
    qwix = pytest.importorskip("qwix", reason="qwix is not installed: pip install '.[test-all]'")
    for dtype in (jnp.bfloat16, jnp.float32):
        w = jax.random.normal(jax.random.key(0), (256, 40), dtype)
        if dtype == jnp.float32 and "tiled_axes" in how:
            continue
        array = qwix.quantize(w, jnp.int4, channelwise_axes=[1], **how)
        weight = fireq.from_qwix(array)
        values = np.asarray(fireq.dequantize(weight).T.astype(dtype))
        assert values.tobytes() == np.asarray(qwix.dequantize(array)).tobytes()
        back = fireq.to_qwix(weight)
        assert isinstance(back, qwix.QArray)
        assert jax.tree.structure(back) == jax.tree.structure(array)
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(array), strict=True):
            assert (one == other).all()
