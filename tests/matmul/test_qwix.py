"""INT4 weights from and to qwix's arrays: a stand-in of its class, and the package itself."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax import fireq


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
CASES = {
    "groups": ((256, 40), (2, 40), jnp.bfloat16, None, 0),
    "groups of 32, zeros": ((96, 40), (3, 40), jnp.float16, (3, 40), 0),
    "channels": ((200, 24), (1, 24), jnp.float32, None, 0),
    "channels, zeros by group": ((24, 128), (24, 1), jnp.float32, (24, 2), 1),
    "one for all outputs": ((512, 24), (2, 1), jnp.bfloat16, (1, 24), 0),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, monkeypatch):
    shape, scale, dtype, zero, axis = CASES[case]
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
