"""INT4 weights from plain codes, scales and zero points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turbojax import fireq

SHAPES = [(70, 200, None), (64, 256, 128), (10, 96, 32), (100, 384, 384), (65, 512, 256)]


def plain(outputs, inputs, group_size, seed=0):
    """Codes, scales some of which are subnormal, zeros, output scales."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-inputs // group_size)
    scales = rng.uniform(0.1, 1, (outputs, groups)) * 10.0 ** rng.integers(-7, 0, (outputs, 1))
    return (
        rng.integers(-8, 8, (outputs, inputs)).astype(np.int8),
        scales.astype(np.float16),
        rng.integers(-8, 9, (outputs, groups)).astype(np.int8),
        rng.uniform(0.5, 2, outputs).astype(np.float32),
    )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_there_and_back(shape):
    _, inputs, group_size = shape
    codes, scales, zeros, factor = plain(*shape)

    def wide(x):
        return np.repeat(x.astype(np.float32), group_size or inputs, axis=1)[:, :inputs]

    for z, f in ((None, None), (zeros, None), (zeros, factor)):
        weight = fireq.from_codes(codes, scales, z, group_size=group_size, output_scale=f)
        weight.validate()
        expected = (codes - (0 if z is None else wide(z))) * wide(scales)
        expected = expected if f is None else expected * f[:, None]
        assert np.asarray(fireq.dequantize(weight)).tobytes() == expected.tobytes()
        back = fireq.to_codes(weight)
        np.testing.assert_array_equal(back.codes, codes)
        again = fireq.from_codes(
            *back[:3], group_size=weight.group_size, output_scale=back.output_scale
        )
        assert jax.tree.structure(again) == jax.tree.structure(weight)
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(weight), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_gated_weights_and_transforms():
    codes, scales, zeros, _ = plain(2 * 24, 128, 128)
    halves = [[x[i * 24 : (i + 1) * 24] for x in (codes, scales, zeros)] for i in (0, 1)]
    joined = fireq.gate_and_up(*(fireq.from_codes(*half) for half in halves))
    for one, other in zip(fireq.to_codes(joined)[:3], (codes, scales, zeros), strict=True):
        np.testing.assert_array_equal(one, other)
    stacks = [np.stack(x) for x in zip(*halves, strict=True)]
    stacked = jax.jit(jax.vmap(fireq.from_codes))(*stacks)
    for i, half in enumerate(halves):
        weight = fireq.from_codes(*half)
        for one, other in zip(jax.tree.leaves(stacked), jax.tree.leaves(weight), strict=True):
            assert np.asarray(one[i]).tobytes() == np.asarray(other).tobytes()


def test_refusals():
    codes, scales, zeros, factor = plain(16, 128, 64)
    for error, message, args, keys in (
        (TypeError, "codes.dtype=int32", (codes.astype(np.int32), scales), {}),
        (TypeError, "scales.dtype=float32", (codes, scales.astype(np.float32)), {}),
        (TypeError, "zeros.dtype=float16", (codes, scales, scales), {"group_size": 64}),
        (TypeError, "output_scale.dtype=float16", (codes, scales), {"output_scale": scales[:, 0]}),
        (ValueError, "codes.shape=.128,. must be", (codes[0], scales), {}),
        (ValueError, r"scales.shape=\(16, 2\) must be \(16, 1\)", (codes, scales), {}),
        (ValueError, "group_size=96 must be 32, 64", (codes, scales), {"group_size": 96}),
        (ValueError, "zeros.shape", (codes, scales, zeros[:, :1]), {"group_size": 64}),
        (ValueError, "codes from -7 to 8 must be from -8 to 7", (codes + 1, scales), {}),
        (ValueError, "zeros from -9 to .* must be from -8 to 8", (codes, scales, zeros - 1), {}),
        (ValueError, "output_scale.shape", (codes, scales), {"output_scale": factor[:3]}),
    ):
        given = {"group_size": 64, **keys} if "scales.shape" not in message else keys
        with pytest.raises(error, match=message):
            fireq.from_codes(*map(jnp.asarray, args), **given)
